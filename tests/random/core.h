/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random life of a core, in one process: processes that are none, a clock that the run moves, and after each
 * operation the model's judgement (model.h).
 *
 * Pins also come and go in the middle of the core's operations: wherever the core looks at pin counters or
 * at the clock, run_interleave() may let a reader take its steps. So the pin protocol is tried between A0
 * and A3 and between A3 and A4, at points that the seed decides.
 */
#ifndef KVD_TESTS_RANDOM_CORE_H
#define KVD_TESTS_RANDOM_CORE_H

#include "daemon/core.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "model.h"
#include "rng.h"
#include "shm/lookup.h"

enum {
    RUN_PINS = 256,
    RUN_RING = 32,
    RUN_TICKETS = 64,
    RUN_LOG = 30,
    RUN_CHAIN = 8, /* keys of a chain; key k is the child of k - 1 but for every eighth */
};

/* A request that lies in a session's ring, and what the model must make of it. */
struct posted {
    uint8_t op;
    int pool; /* MODEL_NONE: one that is not attached */
    uint64_t user_data;
    struct m_reserve reserve;
    struct m_commit commit;
    uint32_t n_keys, epoch;
    int keys[SHM_OBSERVE_KEYS];
};

/* Somebody with a session. */
struct process {
    struct session *session; /* NULL: buried */
    bool alive;
    bool
        doomed; /* has broken its shared memory: no more requests, but what it has pinned elsewhere stays */
    pid_t pid;
    uint8_t cookie[16];
    char token[4];
    struct attach *attach[MODEL_POOLS];
    bool has_socket_pins[MODEL_POOLS];
    uint32_t epoch[MODEL_SPACES]; /* as it knows it */

    uint32_t entries; /* of its rings; 0: none */
    struct shm_cursor requests, completions;
    struct posted posted[RUN_RING];
    uint32_t first_posted, n_posted, n_answers;
};

/* A request waits, and there is room for its answer; an observation has none. */
static inline bool process_waits(const struct process *p)
{
    return p->n_posted &&
           (p->n_answers < p->entries || p->posted[p->first_posted % RUN_RING].op == SHM_OBSERVE);
}

struct pin {
    int process, pool;
    enum m_source source;
    uint32_t slot;
    uint64_t ticket;
    bool half;     /* R2 without R4: counted, not validated, never read */
    bool reserved; /* taken before the commit: means something only if that comes */
};

struct run {
    uint64_t seed, op, ops;
    struct rng rng;
    char dir[64];
    char log[RUN_LOG][192];

    struct core *core;
    struct model model;
    uint64_t now_ns;
    uint32_t max_sessions;
    pid_t next_pid;

    struct shm_key keys[MODEL_KEYS];
    struct process process[MODEL_SESSIONS];
    struct pin pins[RUN_PINS];
    uint32_t n_pins;
    struct {
        uint64_t ticket;
        int pool;
    } tickets[RUN_TICKETS]; /* the last ones, good or not */

    bool interleave; /* readers may step in */
    int focus;       /* the pool of the operation under way */
    uint64_t granted, refused, pinned, stepped_in;
};

/* ---- core.c */

void run_note(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Around every operation of the core. `reason`: why objects of `pool` may leave; of others, none may. Where
 * the model must be told of an answer between the two halves of run_end(), they are called by themselves. */
void run_begin(struct run *r, int pool);
void run_end(struct run *r, enum m_reason reason);
void run_gone(struct run *r, enum m_reason reason); /* who has left? */
void run_check(struct run *r);                      /* do the sums agree? */

/* The whole world: all sums, all keys, all pins. */
void run_walk(struct run *r);

uint32_t run_tick(const struct run *r, int pool);
struct pool *run_pool(const struct run *r, int pool);

/* The bytes and the metadata of an object are those of its commit. */
void run_write(struct run *r, int pool, uint32_t slot, uint64_t ticket, uint32_t part,
               uint64_t bytes);
void run_verify(struct run *r, int pool, uint32_t slot);
void run_fill_commit(const struct m_commit *c, uint8_t user[SHM_USER_BYTES], struct commit *ret);

/* A random living process with a session that passes, MODEL_NONE: there is none. */
int run_pick(struct run *r, bool (*passes)(struct run *r, int process));
bool can_ask(struct run *r, int process);   /* its connection stands */
bool can_write(struct run *r, int process); /* ... and it is a writer */

/* ---- operations, by file */

void op_publish(struct run *r); /* publish.c */
void op_reserve(struct run *r);
void op_commit(struct run *r);
void op_abort(struct run *r);
void op_late_write(struct run *r);
void op_evict(struct run *r); /* remove.c */
void op_remove_keys(struct run *r);
void op_remove_many(struct run *r);
void op_reset(struct run *r);
void op_work(struct run *r);
void op_tick(struct run *r);
void op_wait(struct run *r);
void op_deadline(struct run *r);
void op_pin(struct run *r); /* pins.c */
void op_unpin(struct run *r);
void op_half_pin(struct run *r);
void op_socket_pin(struct run *r);
void op_lookup(struct run *r);
void op_observe(struct run *r);
void op_play_dirty(struct run *r);
void op_new_session(struct run *r); /* processes.c */
void op_attach(struct run *r);
void op_hang_up(struct run *r);
void op_resume(struct run *r);
void op_end_session(struct run *r);
void op_truncate(struct run *r);
void op_post(struct run *r); /* requests.c */
void op_serve(struct run *r);
void op_collect(struct run *r);
void op_break_ring(struct run *r);

/* ---- shared by them */

void run_random_reserve(struct run *r, int process, int pool, struct m_reserve *ret);
void run_random_commit(struct run *r, int process, int pool, struct m_commit *ret);
void run_keep_ticket(struct run *r, int pool, uint64_t ticket);

/* The model and the core answer a commit: the part is written first if the ticket is good. */
void run_prepare_commit(struct run *r, const struct m_commit *c);

void run_interleave(struct run *r);
void run_drop_pins(struct run *r, int process, int pool); /* MODEL_NONE: of all pools */
void run_verify_pin(struct run *r, const struct pin *pin);

#endif
