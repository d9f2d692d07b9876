/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_BENCH_API_H
#define KVD_TESTS_BENCH_API_H

#include "chain.h"
#include "daemon.h"

/* A worker's session as a subject (chain.h). */
struct api {
    struct session session;
    struct kvd_pinset *pinset;
    const struct shm_index *index; /* as the library has mapped it */
};

/* Objects just below a third of 64 Ki lines, and of 512 Ki. */
#define API_FEW  21800u
#define API_MANY 174700u

/* A daemon whose pool is full of objects 0 .. objects - 1. */
int api_daemon(const struct bench *b, uint64_t objects, struct daemon *ret);

/* `a` must stay where it is; free() the subject before api_close(). */
int api_open(const struct daemon *d, uint64_t filled, struct api *a, struct subject **ret);
void api_close(struct api *a);

#endif
