/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A compact daemon for tests of the library: one thread, one connection at a time, two pools of
 * small pages. It follows the protocol, including sleep and wake-up, unless a test bends it:
 * `tweak` sees every response before it is sent, `mute` leaves requests unanswered, and rings can
 * be served by hand.
 *
 * All fields are guarded by `lock`, which the thread holds whenever it does anything. The memory is
 * mapped a second time, at other addresses than the library's.
 */
#ifndef KVD_TESTS_FAKE_DAEMON_H
#define KVD_TESTS_FAKE_DAEMON_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/kvd.pb-c.h"
#include "shm/layout.h"
#include "shm/ring.h"

#define FAKE_POOLS      2u
#define FAKE_CHUNKS_MAX 8u
#define FAKE_PARTS_MAX  2u
#define FAKE_SLOTS_MAX  64u
#define FAKE_FIRST_POOL 7u
#define FAKE_CANCELS    64u

struct fake_memory {
    int fd, reader; /* writable, read-only */
    void *addr;
    size_t bytes;
};

struct fake_pool {
    const char *name;
    uint32_t id, slots, parts, chunk_slots, chunks, next_slot;
    uint64_t part_bytes;
    struct fake_memory index, metas, pins, nvme;
    struct fake_memory data[FAKE_CHUNKS_MAX * FAKE_PARTS_MAX];
    struct shm_index *ix;
    struct shm_index *nx; /* NULL: no stores */
    uint32_t next_record;
    uint32_t line[FAKE_SLOTS_MAX];
    uint64_t ticket[FAKE_SLOTS_MAX]; /* 0: not reserved */
    uint64_t parts_done[FAKE_SLOTS_MAX];
    uint64_t bytes[FAKE_SLOTS_MAX];
};

struct fake_session {
    struct fake_memory memory;
    struct shm_session *shm;
    struct shm_cursor requests, completions;
    uint32_t id;
};

struct fake {
    char dir[64], path[96];
    pthread_t thread;
    pthread_mutex_t lock;
    bool stop;
    int listener, nudge, conn;
    struct frame_reader reader;

    uint8_t instance[16];
    struct fake_memory core;
    struct shm_core *shm;
    struct fake_session session;
    struct fake_pool pools[FAKE_POOLS];
    uint32_t epoch;
    uint64_t operation;

    /* behaviour */
    bool may_resume;
    bool by_hand;          /* the thread leaves the rings alone */
    uint64_t mute;         /* bit per request body that is not answered; Hello is 10 */
    uint32_t ring_entries; /* 0: as asked */
    uint64_t max_inline;
    uint32_t records; /* of the stores of pool 0; 0: none */
    void (*tweak)(struct fake *f, Kvd__Proto__Response *response, int *fds, unsigned *n_fds);
    unsigned tweak_pick; /* for the tweak */
    const void *raw;     /* instead of the first response */
    size_t raw_bytes;

    /* what was seen */
    unsigned hellos, resumes, byes, wakes, pings, aborted, abort_asked, released, events, accepted;
    uint64_t start_time;
    char client[64];
    unsigned token_len, cookie_len;
    unsigned fetches, fetch_messages, cancels; /* keys, messages, requests of the ring */
    struct {
        uint64_t tag, n;
    } cancel[FAKE_CANCELS];
    int32_t chain; /* status of the fetch before */
};

struct fake *fake_start(void);

/* The same, and pool 0 has stores of so many records. */
struct fake *fake_start_stores(uint32_t records);
void fake_stop(struct fake *f);

/* Has the thread look at its fields. */
void fake_nudge(struct fake *f);

/* The connection is gone, the daemon is not. */
void fake_hang_up(struct fake *f);

/* Nobody listens any more, and the other way round. */
void fake_leave(struct fake *f);
void fake_return(struct fake *f);

/* Another daemon: new memory, nothing stored. The old memory is not touched. */
void fake_replace(struct fake *f);

/* Makes an object that is LIVE in the pool; its slot. Bytes of part p are (slot + p). */
uint32_t fake_store(struct fake *f, unsigned pool, const struct shm_key *key,
                    const struct shm_key *parent, uint64_t bytes);

/* Makes a record of the pool's stores, or takes it out. */
void fake_spill(struct fake *f, unsigned pool, const struct shm_key *key);
void fake_lose(struct fake *f, unsigned pool, const struct shm_key *key);

/* Serves up to `max` requests of the ring; how many. */
unsigned fake_serve(struct fake *f, unsigned max);

/* Takes a request out of the ring without an answer, or answers one twice. */
bool fake_take(struct fake *f, struct shm_request *ret);
void fake_answer(struct fake *f, const struct shm_request *q, struct shm_completion *ret_last);
void fake_post(struct fake *f, const struct shm_completion *c);

/* Sum of the counters of a pool. */
uint32_t fake_pins(struct fake *f, unsigned pool);

#endif
