/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workers of random-processes: real processes with the real library, that may be killed or stopped at any
 * instruction.
 *
 *      WORKER     reads a prefix, publishes the rest, like an engine of one process
 *      READER     only reads, through a socket of that role
 *      SCHEDULER  reserves objects of two parts, writes the first, hands the ticket to its
 *      RANK       which writes the second: an engine of two processes
 *      ASYNC      publishes by kvd_submit_*() and kvd_drain()
 *      REMOTE     maps nothing: kvd_remote_*()
 */
#ifndef KVD_TESTS_RANDOM_WORKER_H
#define KVD_TESTS_RANDOM_WORKER_H

#include <stdbool.h>

#include "board.h"
#include "client/kvd.h"
#include "content.h"
#include "rng.h"

enum kind {
    KIND_WORKER,
    KIND_READER,
    KIND_SCHEDULER,
    KIND_RANK,
    KIND_ASYNC,
    KIND_REMOTE,
    KINDS,
};

enum {
    WORKER_POOLS = 3,
    WORKER_PARTS = 2,    /* at most */
    WORKER_PART = 65536, /* bytes of one, at most */
    WORKER_HOLDS = 8,
};

struct place {
    const char *space, *pool;
    struct kvd_space *in;
    struct kvd_pool *at;
    struct kvd_pool_info info;
};

/* A pinset, and what must lie in it as long as it is held. */
struct hold {
    struct kvd_pinset *set;
    struct place *place;
    size_t n;
    struct content content[CONTENT_CHAIN];
    uint64_t until_us;
};

struct worker {
    enum kind kind;
    uint32_t number;
    const char *writer_socket, *reader_socket;
    struct rng rng;
    struct board *board;
    struct lane *lane;
    int engine; /* datagrams between a scheduler and its rank */

    struct kvd *kvd;
    struct kvd_space *space[2];
    struct place place[WORKER_POOLS];
    struct hold hold[WORKER_HOLDS];
    void *kind_data;
    uint8_t room[WORKER_PART];
};

uint64_t worker_now_us(void);
bool worker_stops(const struct worker *w);

/* Something that must not be. The worker goes on; the run has failed. */
void worker_wrong(struct worker *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A call has failed: is that an answer it may give? Refreshes what is stale. */
void worker_judge(struct worker *w, struct place *p, const char *call, ssize_t result);

/* A new object of that key; the epoch is that of the handle. */
struct content worker_content(struct worker *w, const struct place *p, uint32_t key);
struct place *worker_place(struct worker *w);
uint32_t worker_chain(struct worker *w); /* its first key; some are more popular */

void worker_step(struct worker *w);    /* worker.c: reading, and publishing with waiting */
void scheduler_step(struct worker *w); /* worker_engine.c */
void rank_step(struct worker *w);
void async_step(struct worker *w);  /* worker_async.c */
void remote_step(struct worker *w); /* worker_remote.c */

/* ---- worker_read.c */

void worker_read(struct worker *w);
void worker_release(struct worker *w, uint64_t now_us); /* what has been held long enough */
void worker_release_all(struct worker *w);

/* An empty place for a pinset, or NULL. */
struct hold *worker_hold(struct worker *w, struct place *p);
void worker_hold_for(struct worker *w, struct hold *h); /* some time from now on */
void worker_let_go(struct hold *h);

/* All bytes of all objects of the pinset. */
void worker_verify(struct worker *w, const struct hold *h, const char *when);

int worker_main(int argc, char **argv);

#endif
