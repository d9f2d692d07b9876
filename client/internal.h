/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the library.
 *
 * LOCKS, in the order in which they may be taken:
 *
 *   handle_lock()  the control connection, the lists of spaces and views. Held across round trips,
 * so it can be waited for with a deadline; `gate` guards only who holds it. ring_lock      the
 * session segment, flights, orphans. Held for moments, never across a system call. error_lock the
 * sentence. `gate` is taken last, inside of ring_lock too.
 *
 * A fetch takes as long as a device does. Who waits for one sleeps on the socket with handle_lock() as
 * the others do, but leaves it to them when they come (handle_lock_last()), and finds its answers all
 * the same: whoever takes completions from the ring takes everybody's.
 *
 * The data path (kvd_lookup, kvd_pin, release) takes none: it reads struct kvd_pool and struct
 * view, which change only in kvd_space_refresh() and kvd_space_close(), and those run beside
 * nothing.
 *
 * SESSIONS come and go (`incarnation` counts them), the handle stays. When the daemon takes our
 * session up again, nothing changes. When it does not, all spaces are stale until they are
 * refreshed, every request in flight ends with -ENOTCONN, and the memory of the former session
 * stays mapped while pins lie in it.
 */
#ifndef KVD_CLIENT_INTERNAL_H
#define KVD_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/control.h"
#include "client/kvd.h"
#include "client/options.h"
#include "shm/layout.h"
#include "shm/lookup.h"
#include "shm/ring.h"
#include "shm/segment.h"

_Static_assert(sizeof(struct kvd_key) == sizeof(struct shm_key), "one is cast to the other");
_Static_assert(offsetof(struct kvd_key, group) == offsetof(struct shm_key, group), "cast");
_Static_assert(sizeof(struct kvd_ref) == sizeof(struct shm_pinned), "one is cast to the other");
_Static_assert(offsetof(struct kvd_ref, view) == offsetof(struct shm_pinned, view), "cast");
_Static_assert(offsetof(struct kvd_ref, bytes) == offsetof(struct shm_pinned, bytes), "cast");
_Static_assert((int)KVD_RAM == (int)SHM_FOUND_RAM && (int)KVD_NVME == (int)SHM_FOUND_NVME &&
                   (int)KVD_PENDING == (int)SHM_FOUND_PENDING,
               "states are handed through");

/* ---- views: memory of a pool as it was mapped at one time */

/* Numbered by the order of their making; a number is never used again, so a reference to a view
 * that is gone finds nothing. The struct lives as long as the handle, its mappings until nobody
 * needs them. */
struct view {
    uint32_t number;
    uint32_t parts;
    uint32_t slots;
    bool dropped; /* no space uses it any more: unmapped when no pin lies in it */
    uint64_t part_bytes;
    const struct shm_index *index; /* NULL: unmapped */
    const struct shm_metas *metas;
    struct shm_pins *pins;
    const struct shm_index *nvme; /* NULL: the pool has no stores */
    struct segment_mapping index_map, metas_map, pins_map, nvme_map;
    struct segment_reservation *read, *write; /* [parts] each; base NULL: not mapped */
};

/* Read without a lock while others add: a full table is replaced and the old one kept for its
 * readers. */
struct view_table {
    struct view_table *older;
    uint32_t capacity;
    _Atomic uint32_t n;
    struct view *view[];
};

/* ---- requests in flight */

struct batch;

enum flight_state {
    FLIGHT_FREE = 0,
    FLIGHT_SYNC,      /* `batch` waits for it */
    FLIGHT_ASYNC,     /* its completion is for kvd_completions() */
    FLIGHT_ABANDONED, /* nobody waits; what it is granted is given back */
    FLIGHT_DONE,      /* completed, waits for kvd_completions() */
};

/* A posted request. Its place in the table and its generation are the user_data that the daemon
 * sees, so an answer that comes twice, or to nobody, is recognised. */
struct flight {
    enum flight_state state;
    uint32_t generation;
    uint32_t next; /* of the free or the done list */
    uint32_t pool;
    enum shm_op op;
    bool async;
    bool cancelled; /* the daemon has been told to give it up */
    uint32_t index; /* in the batch */
    struct batch *batch;
    struct kvd_completion done; /* user_data: the caller's */
};

#define NO_FLIGHT UINT32_MAX

/* A fetch that is over: the daemon still holds what it has brought, under this tag. */
struct kept {
    uint64_t tag; /* 0 is a fine one */
    uint64_t user_data;
    uint32_t pool;
    bool valid;
};

/* A slot that was granted to somebody who does not wait any more. */
struct orphan {
    uint64_t ticket;
    uint32_t pool;
};

struct rings {
    struct segment_mapping core_map, session_map;
    const struct shm_core *core;
    struct shm_session *session; /* NULL: KVD_NO_SHM */
    struct shm_cursor requests, completions;
    const struct shm_completion *completion;

    struct flight *flights;
    uint32_t n_flights, n_async; /* async: in flight or done */
    uint32_t n_open, n_fetches;  /* flights that the daemon may still answer; of them: fetches */
    uint32_t free_first, done_first, done_last;
    uint32_t n_done;

    /* The last asynchronous fetches that ended well; newer ones overwrite older ones, which the daemon
     * lets go by itself after some seconds. */
    struct kept *held; /* [n_flights of the making] */
    uint32_t n_held, next_held;
};

/* ---- the handle */

/* What kvd_drain() has promised to whoever polls the event fd. */
enum armed {
    ARMED_NO = 0,
    ARMED_WANTED, /* promised, session->waiting perhaps not set */
    ARMED_SET,
};

struct kvd {
    /* A page that a forked child sees as zeros: one load tells. It is never unmapped in a child,
     * where pinsets may still look at it. */
    _Atomic uint32_t *alive;
    _Atomic(struct view_table *) views;

    struct control *control;
    uint32_t timeout_ms, spin_us, flags;

    pthread_mutex_t gate;
    pthread_cond_t freed; /* CLOCK_MONOTONIC; also: a batch of fetches has been answered */
    bool held;
    bool patient;    /* held by somebody who waits long, and may be woken */
    unsigned wanted; /* threads that wait for it and are not patient */
    enum armed armed;
    bool
        poked; /* a message is on its way to whoever polls the event fd: not to be read by others */

    /* under handle_lock() */
    uint32_t incarnation; /* written under both locks */
    uint8_t instance[16];
    struct kvd_space *spaces;

    pthread_mutex_t ring_lock;
    struct rings rings;
    struct orphan *orphans;
    _Atomic size_t n_orphans; /* may be looked at without the lock */
    size_t max_orphans;

    pthread_mutex_t pinset_lock;
    struct kvd_pinset *pinsets;

    pthread_mutex_t error_lock;
    char error[512];
};

struct kvd_pool {
    struct kvd *kvd;
    struct kvd_space *space;
    struct view *view; /* NULL: KVD_NO_SHM */
    uint32_t id;
    struct kvd_pool_info info;
};

struct kvd_space {
    _Atomic uint32_t epoch;
    _Atomic bool stale; /* of a session that is gone; written under both locks */
    _Atomic bool moved; /* the daemon has said -ESTALE */
    struct kvd *kvd;
    struct kvd_space *next;
    struct kvd_pool **pools;
    size_t n_pools;
    uint32_t id, incarnation;

    char *name, *scheme, *identity; /* as opened; NULL: none */
    uint8_t first_parent[32], vector_key[32];
    size_t first_parent_len, vector_key_len;
    bool has_first_parent;
    uint64_t part_mask;
    bool write;
};

struct kvd_pinset {
    struct kvd *kvd; /* NULL: closed */
    _Atomic uint32_t *alive;
    struct kvd_pinset *next, *prev;
    struct shm_pinned *refs;
    size_t count, capacity;
};

/* No system call: the page is zero in a child. */
static inline bool handle_forked(const struct kvd *kvd)
{
    return !atomic_load_explicit(kvd->alive, memory_order_relaxed);
}

/* ---- kvd.c */

/* Sets the sentence of the handle and returns err. */
int handle_fail(struct kvd *kvd, int err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

uint64_t handle_deadline(const struct kvd *kvd);

/* The lock for all that talks to the daemon. -ETIMEDOUT: another thread has it all the time. */
int handle_lock(struct kvd *kvd, uint64_t deadline_ns);
bool handle_try_lock(struct kvd *kvd);

/* For those who wait long: takes the lock when nobody else wants it. -EALREADY: nothing of the batch is
 * in flight any more; -EAGAIN: look at the ring, and come again; -ETIMEDOUT. */
int handle_lock_last(struct kvd *kvd, const struct batch *b, uint64_t deadline_ns);

/* Somebody else should have the lock, or the socket: give it back, and take it last. */
bool handle_wanted(struct kvd *kvd);

/* Wakes those in handle_lock_last(): their batch may be answered. Takes `gate`. */
void handle_answered(struct kvd *kvd);

/* Also keeps what kvd_drain() has promised, and gives orphans back. */
void handle_unlock(struct kvd *kvd);

/* Under handle_lock(): connected, if need be again. -ENOTCONN. */
int handle_ready(struct kvd *kvd, uint64_t deadline_ns);

enum call_flags {
    CALL_AGAIN = 1 << 0, /* harmless if carried out twice */
};

/* Under handle_lock(): a round trip, reconnecting if need be. `space` (may be NULL): whose numbers
 * the request has; -ESTALE when they are no longer those of the daemon. Sets the sentence. */
int handle_call(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                Kvd__Proto__Response__BodyCase expect, unsigned flags,
                struct control_reply *ret_reply);

/* The same for a request that may take `more_ms` longer than others. */
int handle_call_long(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                     Kvd__Proto__Response__BodyCase expect, unsigned flags, uint32_t more_ms,
                     struct control_reply *ret_reply);

/* As handle_call(), with the lock taken and given back. */
int handle_round_trip(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                      Kvd__Proto__Response__BodyCase expect, unsigned flags,
                      struct control_reply *ret_reply);

/* ---- view.c */

/* Maps a whole descriptor: a segment of that kind, made by this daemon. -EPROTO: it is not. */
int map_segment(int fd, enum shm_kind kind, const uint8_t instance[16], enum segment_view view,
                struct segment_mapping *ret);

/* Opens and maps a pool; under handle_lock(). */
int view_new(struct kvd_space *space, uint32_t pool, const struct kvd_pool_info *info,
             struct view **ret_view);

/* Of a view that was not added. NULL is fine. */
void view_free(struct view *view);

/* Gives it its number; the handle owns it from now on. -ENOMEM. */
int views_add(struct kvd *kvd, struct view *view);

/* NULL: no such view. */
struct view *views_get(const struct kvd *kvd, uint32_t number);

/* Unmaps views that no space and no pin needs. */
void views_reap(struct kvd *kvd);

/* Takes all pins back and unmaps everything; `forked`: frees memory only. */
void views_free(struct kvd *kvd, bool forked);

/* ---- space.c */

/* Frees the struct and what it owns, but not its views. */
void space_free(struct kvd_space *space);

/* 0; -ECHILD, -EOPNOTSUPP (nothing mapped), -EINVAL. The pool's view is mapped when 0. */
int pool_check(const struct kvd_pool *pool);

/* ---- data.c */

/* The handle goes, pinsets may stay. */
void pinsets_detach(struct kvd *kvd);

/* ---- publish.c: posting and waiting */

enum {
    UNANSWERED = 1,   /* status of a commit or a fetch; an answer is 0 or negative */
    FETCH_MS = 60000, /* how long a fetch is waited for whose deadline is the daemon's */
};

/* Connected, if need be again: afterwards the space may be stale. */
int handle_connected(struct kvd *kvd);

/* 0, or -ESTALE and its sentence. */
int pool_check_current(const struct kvd_pool *pool);

/* Posts all of the batch, ringful by ringful, and waits for the answers. A chain of fetches ends with the
 * ringful in which one has failed. */
int batch_run(struct kvd *kvd, struct batch *b);

/* Posts what there is room for; returns how many. */
ssize_t batch_submit(struct kvd *kvd, struct batch *b);

/* Waits until the batch is settled, as batch_settled(); or only until what was posted is answered. */
int batch_wait(struct kvd *kvd, struct batch *b, uint64_t deadline_ns);

/* ---- flight.c */

/* What is posted together; `op` tells which of the pointers is set. SHM_CANCEL posts nothing: it just
 * waits for room. */
struct batch {
    struct kvd_pool *pool;
    enum shm_op op;
    const struct kvd_reserve *reserve;
    const struct kvd_commit *commits;
    const struct kvd_fetch *fetch;
    uint64_t until_ns; /* of a fetch with a deadline of its own; 0: the daemon's */
    size_t n, posted;
    uint32_t incarnation; /* of the session it was posted in */

    bool async;
    uint64_t user_data; /* async */

    /* synchronous: where answers go, and how many have come */
    struct kvd_reservation *reservations;
    struct kvd_commit *results;
    int32_t *statuses;
    _Atomic size_t done;
    _Atomic int error; /* the session has gone */
};

/* All of these lock ring_lock themselves. */

/* Sets up rings for the descriptors of a hello; nothing is shared yet. */
int rings_new(const int fds[2], const uint8_t instance[16], struct rings *ret);
void rings_free(struct rings *r, bool forked);

/* Takes over `fresh` in place of the rings of a session that is gone. Everything in flight ends. */
void rings_replace(struct kvd *kvd, struct rings *fresh);

/* The daemon is away: asynchronous requests complete with -ENOTCONN, synchronous ones end. Should
 * they be answered after all, the answers are for nobody. */
void rings_give_up(struct kvd *kvd);

/* Posts as many of the batch's requests as fit, and wakes the daemon if it sleeps. Returns how
 * many, or -ESTALE, -ENOTCONN (posted, but the daemon could not be woken: the connection is dead).
 */
ssize_t batch_post(struct kvd *kvd, struct batch *b);

/* All posted requests are answered, or nothing was posted for want of room and now there is some,
 * or the batch has failed. Takes what the completion ring has. With `try` only if nobody else is at
 * it. */
bool batch_settled(struct kvd *kvd, struct batch *b, bool try_only);

/* Something that was posted is not answered, and may be; without looking at the ring. */
bool batch_in_flight(const struct batch *b);

/* Nobody waits for the batch any more; takes back what it has been granted. */
void batch_abandon(struct kvd *kvd, struct batch *b);

/* Milliseconds that are left to a fetch; 0: as many as the daemon gives it. */
uint32_t batch_fetch_ms(const struct batch *b);

/* Asks the daemon to give up asynchronous fetches of a pool, as far as the ring has room: 0 all; 1 there
 * are more; -ENOTCONN (posted, as batch_post()). */
int rings_cancel(struct kvd_pool *pool, uint64_t user_data, uint64_t n);

/* Completions for kvd_completions(), as far as they have been collected. */
bool rings_have_done(struct kvd *kvd);

/* Sets session->waiting, so that the next completion is announced, and wakes the daemon if requests
 * lie in the ring while it sleeps. Returns completions for kvd_completions(). */
ssize_t rings_expect(struct kvd *kvd);

/* Takes it back: the next completion is not announced. Collects, too. */
void rings_expect_none(struct kvd *kvd);

/* Collects, and takes up to n completions. */
ssize_t rings_take(struct kvd *kvd, struct kvd_completion *ret, size_t n);

/* Puts observations into the ring while it is less than half full. Returns how many keys. */
ssize_t rings_observe(struct kvd_pool *pool, const struct kvd_key *keys, size_t n);

/* A granted slot that nobody wants. */
void orphans_add(struct kvd *kvd, uint32_t pool, uint64_t ticket);

/* Gives orphans back, without waiting. Under handle_lock(): they must not reach another daemon. */
void orphans_send(struct kvd *kvd);

/* Their session has gone, and they with it. */
void orphans_forget(struct kvd *kvd);

#endif
