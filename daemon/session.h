/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions (attached processes), engines (sessions with one token), attaches (a session's use of a
 * pool).
 *
 * A session ends by the death of its process, which a pidfd tells, or by Bye. A hang-up is neither:
 * the process may go on reading, so its pins stand (I3) and only new grants stop.
 *
 *      ATTACHED <──resume── HUNG_UP
 *         │                    │
 *         └──── death, Bye ────┴──> LINGERING (its engine has living members) ──> buried
 *
 * session_end() is the one way out, whoever notices first; calling it again changes nothing.
 */
#ifndef KVD_DAEMON_SESSION_H
#define KVD_DAEMON_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/core.h"
#include "daemon/list.h"
#include "daemon/pool.h"
#include "shm/ring.h"

struct conn;

enum session_state {
    SESSION_ATTACHED,
    SESSION_HUNG_UP,
    SESSION_LINGERING,
};

enum session_role {
    ROLE_READER = 1,
    ROLE_WRITER = 2,
    ROLE_ADMIN = 3,
};

struct engine {
    struct list in_core;
    struct list members; /* living and lingering */
    uint32_t living;
    uint32_t token_len; /* 0: an engine of one */
    uint8_t token[64];
};

struct session {
    struct core *core;
    struct list in_core, in_engine;
    struct engine *engine;
    uint32_t id;
    enum session_state state;
    enum session_role role;
    pid_t pid;
    uid_t uid;
    uint64_t start_time;
    char client[64];
    uint8_t cookie[16];
    struct conn *conn;  /* NULL: hung up or ended */
    void *watch;        /* of the service: waits for the death of the process */
    const void *socket; /* the one it came by; only to count those of each */
    uint64_t created_ms, active_ms;
    uint64_t linger_until_ms;
    const char *note; /* what is wrong with it; NULL: nothing */
    bool broken; /* its memory made no sense: no more service, but its pins stand while it lives */

    struct segment segment; /* rings; fd -1 when it uses the socket only */
    struct segment_mapping map;
    struct shm_session *shm;
    uint32_t ring_entries;
    struct shm_cursor requests, completions;

    struct list attaches;
    uint32_t n_reserved;

    /* fetches */
    uint32_t promised; /* completions that will come: their room in the ring is kept */
    bool posted;       /* completions came since the session was last served */
    int32_t stopped;   /* status of the first fetch of the batch that cannot be had; 0: none */
    struct list calls; /* struct fetch_call */
};

struct attach {
    struct list in_session, in_pool;
    struct session *session;
    struct pool *pool;
    struct segment segment; /* pins; fd -1: none yet */
    struct segment_mapping map;
    struct shm_pins
        *own; /* pins taken through the socket, in the daemon's memory; NULL: none yet */
    size_t own_bytes;
    uint64_t own_pinned; /* pins in it */
    struct slot_list reserved;
    struct list waiters; /* what it has asked for, or holds, of fetches */
    uint32_t n_held, n_waiting;
    bool over_quota; /* holds more pinned bytes of the space than it may: no new grants */
};

struct session_spec {
    pid_t pid;
    uid_t uid;
    uint64_t start_time;
    enum session_role role;
    const char *client;
    const uint8_t *token;
    uint32_t token_len;
    uint32_t ring_entries; /* 0: no shared memory */
    const void *socket;
    uint32_t socket_max; /* sessions of this socket; 0: no limit */
};

int session_new(struct core *c, const struct session_spec *spec, struct session **ret_session);

/* The session that owns the cookie and may be taken up by `pid`; NULL: none. */
struct session *session_find(struct core *c, const uint8_t *cookie, size_t len, pid_t pid,
                             uint64_t start_time);
struct session *session_by_id(struct core *c, uint32_t id);

/* Nobody waits for its socket's Fetch requests any more: their connection is gone. */
void session_drop_calls(struct session *s);

/* The connection is gone, the process perhaps not. */
void session_hang_up(struct session *s);

/* The process is dead (`died`), or has let go of everything. Idempotent. May free the session. */
void session_end(struct session *s, bool died);

/* Its memory or its requests made no sense: no more service. `note` is static text. */
void session_break(struct session *s, const char *note);

/* This session's use of a pool; made on first use. `shared`: with a pin segment for its process. */
int session_attach(struct session *s, struct pool *p, bool shared, struct attach **ret_attach);

/* NULL: the session has not used the pool. */
struct attach *session_attached(const struct session *s, const struct pool *p);

/* Makes a->own. */
int attach_own_pins(struct attach *a);

struct session_pins {
    uint64_t objects, bytes;
    uint64_t oldest_ms; /* since the longest untouched pinned slot was last pinned or released */
};

/* What the session holds at this moment, of one space or (NULL) of all; walks its counters. */
int session_count_pins(struct session *s, const struct space *space, struct session_pins *ret_pins);

/* It was found to hold more pinned bytes of the space than it may. */
bool session_over_quota(const struct session *s, const struct space *space);

/* Slots of the space that it has reserved. */
uint64_t session_reserved_in(const struct session *s, const struct space *space);

/* Ends all sessions: the daemon stops. */
void sessions_bury(struct core *c);

/* Compares what sessions hold with max_pinned. Pins are taken without asking, so this can only be
 * found out afterwards; who holds too much gets no new slots until it lets go. */
void sessions_check_pins(struct core *c);

/* Buries sessions whose lingering is over. Returns ms to the next, -1: none. */
int64_t sessions_linger(struct core *c, uint64_t now_ms);

const char *session_state_name(const struct session *s);
const char *session_role_name(enum session_role role);

/* ---- rings.c */

/* Works off up to `max` requests of a session's ring; returns how many, or a negative errno after
 * which the session is broken. *ret_posted: completions were posted. */
int session_serve(struct session *s, uint32_t max);

/* A completion that was promised, at any time. Room for it is there. */
void session_post(struct session *s, const struct shm_completion *c);

/* The process polls for the completions just posted. Asking takes the answer back. */
bool session_must_wake(struct session *s);

/* Work waits in some ring. */
bool sessions_have_work(const struct core *c);

#endif
