/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon whose pool has a store, and a session with it. */
#ifndef KVD_TESTS_BENCH_TIER_H
#define KVD_TESTS_BENCH_TIER_H

#include "daemon.h"
#include "shm/layout.h"

#define TIER_DEPTH 8u /* queue_depth of the store */

struct tier_spec {
    size_t object;   /* bytes; a multiple of 4 KiB */
    size_t slots;    /* of the pool */
    uint64_t stored; /* objects that the store has room for, at least */
    bool huge;
};

struct tier {
    struct tier_spec spec;
    char dir[96];
    char store[128]; /* the store's path */
    struct daemon daemon;
    struct session session;
    const struct shm_index *nvme; /* what the store holds, as the library has mapped it */
    struct kvd_pinset *pins;
    struct kvd_key *keys; /* room for `slots` */
};

/* Bytes of a store for so many objects. */
uint64_t tier_store_bytes(const struct tier_spec *spec);

int tier_open(const struct bench *b, const struct tier_spec *spec, struct tier *ret);
void tier_close(struct tier *t); /* idempotent */

/* Sets t->keys. */
void tier_keys(struct tier *t, uint64_t first, size_t n);

/* Stores objects first .. first + n - 1 (n <= slots) in the pool without writing their bytes, and does not
 * wait for the store. */
int tier_publish(struct tier *t, struct session *s, uint64_t first, size_t n);

/* Until all of them are in the store. Looks only at shared memory: the daemon notices nothing. */
int tier_wait_stored(struct tier *t, uint64_t first, size_t n);

/* A number of `kvctl stats`, of all pools. */
int tier_stat(const struct tier *t, const char *name, uint64_t *ret);

/* Processor time of the daemon, ns: of its core thread, and of its other threads. */
struct tier_cpu {
    uint64_t core, helpers;
};
int tier_cpu(const struct tier *t, struct tier_cpu *ret);

/* That of the daemon's memory in bytes which nothing else would keep. */
int tier_memory(pid_t pid, uint64_t *ret);

#endif
