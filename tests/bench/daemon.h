/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon of our own in a temporary directory, and sessions with it. */
#ifndef KVD_TESTS_BENCH_DAEMON_H
#define KVD_TESTS_BENCH_DAEMON_H

#include "bench.h"
#include "client/kvd.h"

struct daemon {
    pid_t pid;
    char dir[64];
    char socket[96];
};

enum daemon_memory {
    DAEMON_SMALL_PAGES,
    DAEMON_HUGEPAGES, /* or none */
};

/* One space "s" with one pool "kv". `pool`: the lines of its section. Returns when it serves. What it
 * has logged is shown when it does not start. */
int daemon_start(const struct bench *b, enum daemon_memory memory, const char *pool,
                 struct daemon *ret);

/* Ends it and removes what is left; NULL-safe and idempotent. */
void daemon_stop(struct daemon *d);

struct session {
    struct kvd *kvd;
    struct kvd_space *space;
    struct kvd_pool *pool;
};

/* `flags`: of kvd_options. */
int session_open(const struct daemon *d, uint32_t flags, struct session *ret);
void session_close(struct session *s);

/* Stores objects `first` .. `first + n - 1` (keys as in chain.h) without writing their bytes. -ENOSPC:
 * not all of them were taken. */
int session_fill(struct session *s, uint64_t first, uint64_t n);

#endif
