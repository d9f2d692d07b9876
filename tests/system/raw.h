/* SPDX-License-Identifier: Apache-2.0 */
/* A client that says what it likes. */
#ifndef KVD_TESTS_RAW_H
#define KVD_TESTS_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/kvd.h"
#include "proto/frame.h"
#include "proto/kvd.pb-c.h"

struct raw {
    int fd;
    struct frame_reader in;
    uint64_t next_id;
    struct frame_budget budget;
    Kvd__Proto__ServerFrame *frame; /* of the last answer */
    const Kvd__Proto__Response *response;
    int fds[8]; /* that came with it; closed with the next one */
    unsigned n_fds;
    uint32_t session;
    bool resumed;
    uint8_t cookie[16];
};

/* Connects; asserts that it can. */
void raw_connect(struct raw *r, const char *path);
void raw_close(struct raw *r);

/* Any bytes; false: the daemon has hung up. */
bool raw_bytes(struct raw *r, const void *bytes, size_t n);

/* A request with a new number, framed; false: the daemon has hung up. */
bool raw_send(struct raw *r, Kvd__Proto__Request *request);

/* The next answer, in r->response: its status, or INT32_MIN at the end of the stream. Events are skipped.
 * Asserts that it comes. */
int32_t raw_answer(struct raw *r);

/* raw_send() and raw_answer(). */
int32_t raw_call(struct raw *r, Kvd__Proto__Request *request);

/* Hello; `edit` may change it. */
int32_t raw_hello(struct raw *r, void (*edit)(Kvd__Proto__Hello *hello, void *arg), void *arg);

/* raw_connect() and a plain Hello that succeeds. */
void raw_join(struct raw *r, const char *path);

/* A key of the protocol that points to `from`. */
void raw_key(Kvd__Proto__Key *to, const struct kvd_key *from);

#define RAW_END INT32_MIN

#endif
