/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reference model of the core: what it promises, written down in the plainest way, by itself. It knows
 * keys, sessions, engines and pools by number, walks arrays, and never looks at the core.
 *
 * Where the core must give one answer, the model computes it. Where it may choose (which slot, which victim),
 * the model is told the choice and judges it. The order of one operation:
 *
 *      model_begin()       remembers who is held, who is free
 *      the core works; pins taken and given back meanwhile are told as they happen
 *      model_gone()        these live objects have left: was that allowed?
 *      model_reserved(), model_committed(), ...: this was answered: was that right?
 *
 * What is wrong ends the run (fail.h).
 */
#ifndef KVD_TESTS_RANDOM_MODEL_H
#define KVD_TESTS_RANDOM_MODEL_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MODEL_SPACES = 2,
    MODEL_POOLS = 4, /* two of each space */
    MODEL_SLOTS = 384,
    MODEL_KEYS = 224,
    MODEL_SESSIONS = 12,
    MODEL_TENANTS = 4,
    MODEL_NONE = -1,
};

enum m_state {
    M_FREE,
    M_RESERVED,
    M_LIVE,
    M_QUARANTINED,
};

/* What a slot holds. Ticket, key and so on are those of the last grant, also when that is over. */
struct m_slot {
    enum m_state state;
    uint64_t ticket; /* 0: never granted, or void */
    int key;
    uint32_t epoch, tenant;
    int writer, engine; /* while reserved */
    uint64_t parts;     /* committed so far */
    uint64_t bytes;     /* of one part; known from the first commit on */
    uint64_t meta;      /* what the metadata was made from */
    int parent_key;     /* as said at reserve, MODEL_NONE: none */
    int parent;         /* slot of the parent if it was there then, */
    uint64_t parent_ticket;
    uint64_t until_ms;    /* quarantined */
    bool from_quarantine; /* how it became free */
    uint32_t used;        /* tick of the last use that the core was told of */
    uint32_t used_max;    /* ... that it may have in mind */
    bool held_since_reset;

    /* of the operation under way */
    bool touched; /* was held at some moment of it */
    bool stirred; /* its counters have changed */
    bool leaf;    /* live, without children, when it began */
    bool gone;
};

struct m_pool {
    uint32_t slots, parts, low_water, high_water;
    uint64_t part_bytes;
    int space;
    struct m_slot slot[MODEL_SLOTS];
    int where[MODEL_KEYS]; /* slot of the key in the current epoch, MODEL_NONE: a miss */
    uint64_t evicted, removed, reset, committed, aborted, orphaned;

    /* of the operation under way */
    uint32_t free_before;
};

struct m_tenant_limit {
    uint64_t max_resident; /* bytes, 0: none */
    uint32_t max_reserved;
};

struct m_space {
    uint32_t epoch;
    uint32_t max_reserved; /* slots per session, 0: none */
    uint64_t max_pinned;   /* bytes per session */
    struct m_tenant_limit limit[MODEL_TENANTS];
};

/* One array of pin counters. */
struct m_counters {
    uint32_t count[MODEL_SLOTS];
    uint32_t stamp[MODEL_SLOTS];
};

enum m_session_state {
    M_NOBODY,
    M_ATTACHED,
    M_HUNG_UP,
    M_LINGERING,
};

enum m_source {
    M_SHARED, /* the process's own segment */
    M_SOCKET, /* pins taken through the socket */
    M_SOURCES,
};

struct m_session {
    enum m_session_state state;
    int engine;
    bool writer;
    uint64_t linger_until_ms;
    bool attached[MODEL_POOLS];
    bool lost
        [MODEL_POOLS]; /* it has truncated its pin segment: those pins are gone, and no wonder */
    bool over_quota[MODEL_SPACES];
    struct m_counters counters[MODEL_POOLS][M_SOURCES];
};

struct model {
    struct m_space space[MODEL_SPACES];
    struct m_pool pool[MODEL_POOLS];
    struct m_session session[MODEL_SESSIONS];
    uint32_t held[MODEL_POOLS][MODEL_SLOTS]; /* counters that are not 0, of sessions that count */
    int engines;                             /* given out so far */
    uint64_t now_ms, quarantine_ms, linger_ms;
    uint64_t last_operation;          /* of a ticket */
    bool disturbed;                   /* counters have changed during the operation under way */
    uint64_t orphans, orphans_forced; /* of evictions: children that lost their parent (I2) */
};

/* ---- operations */

void model_begin(struct model *m);

enum m_reason {
    M_NOT_AT_ALL,
    M_EVICT,  /* for room: coldest first, tails before heads */
    M_REMOVE, /* asked for */
    M_RESET,  /* of an older epoch */
};

/* The slots marked `gone` of a pool have left, for this reason; `tick` is the pool's clock. */
void model_gone(struct model *m, int pool, enum m_reason reason, uint32_t tick);

/* The pool's slots in a state; of M_FREE also those whose quarantine is over. */
uint32_t model_count(const struct model *m, int pool, enum m_state state);

/* ---- publishing */

struct m_reserve {
    int session, pool, key, parent; /* parent: MODEL_NONE if none */
    uint32_t epoch, tenant;
};

/* The status that the core must give: 1 new, 2 pending, 3 present, or a negative errno; 1 may also turn out
 * as -ENOSPC. Asked before the core is, for what it evicts for this key does not change the answer. Asking
 * is a use: of the object, or of its parent if a slot has to be found. */
int model_ask_reserve(struct model *m, const struct m_reserve *q, uint32_t tick);
void model_reserved(struct model *m, const struct m_reserve *q, int expected, int status,
                    uint32_t slot, uint64_t ticket, uint32_t tick);

/* Did the search for room have to find somebody? */
bool model_had_idle(const struct model *m, int pool, uint32_t tick);

struct m_commit {
    int session, pool;
    uint64_t ticket;
    uint32_t part;
    uint64_t bytes;
    uint64_t meta;
    bool bad_user; /* more metadata than allowed */
};

/* The status that the core must give. */
int model_commit(struct model *m, const struct m_commit *c, uint32_t tick);
int model_abort(struct model *m, int session, int pool, uint64_t ticket);

void model_reset(struct model *m, int space);

/* A use that the core is told of. */
void model_use(struct model *m, int pool, int key, uint32_t epoch, uint32_t tick);

/* ---- pins */

/* Counter and stamp of a session's slot are now these. */
void model_count_pin(struct model *m, int session, int pool, enum m_source source, uint32_t slot,
                     uint32_t count, uint32_t stamp);

/* It has truncated its pin segment. */
void model_lose(struct model *m, int session, int pool);

/* The slot that a pin of the key must get in this epoch, MODEL_NONE: a miss. */
int model_find(const struct model *m, int pool, int key, uint32_t epoch);

/* max_pinned is looked at. */
void model_check_pins(struct model *m);

/* ---- sessions */

void model_attach(struct model *m, int session, int engine, bool writer);
int model_engine_of(struct model *m); /* a new one */
bool model_engine_lives(const struct model *m, int engine);
void model_end(struct model *m, int session, bool died);

/* Buries whose lingering is over. */
void model_linger(struct model *m);

/* Slots whose quarantine is over are free. */
void model_release(struct model *m);

/* Milliseconds until somebody's lingering or some quarantine ends, -1: nobody's. */
int64_t model_deadline(const struct model *m);

#endif
