/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The NVMe tier as the rest of the daemon sees it. All of it runs on the core thread and waits for
 * nothing: I/O, hashing and opening stores go on elsewhere, and nvme_run() takes what has come of them.
 *
 *      commit ──> queue ──> transfer (data, digest) ──> record ──> in the nvme index     write.c
 *      fetch ──> slot in flight <── transfer (record, data, digest) ──> LIVE, held       fetch.c
 *
 * Objects never change, so a copy in a store stays right as long as its key and epoch are: evicting an
 * object that has one costs no I/O, and a promoted object keeps it.
 *
 * A pool's stores have one index and one array of records, numbered through: store k owns the numbers
 * from its `base` on.
 */
#ifndef KVD_SPILL_SPILL_H
#define KVD_SPILL_SPILL_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core.h"
#include "daemon/list.h"
#include "daemon/pool.h"

struct attach;
struct config;
struct io;
struct nvme;  /* the tier of the daemon: helper threads, stores */
struct spill; /* of a pool */
struct store;
struct transfer;

/* ---- the tier */

struct nvme_options {
    uint64_t fetch_deadline_ns, fetch_hold_ns;
    uint32_t digest_threads;
    bool no_lock; /* tests: to show what the lock is for */
    /* Tests: puts itself around a store's backend. NULL: none. On failure the store stays offline. */
    int (*wrap)(void *arg, const char *store, struct io *io, struct io **ret_io);
    void *wrap_arg;
};

int nvme_new(struct core *core, const struct nvme_options *options, struct nvme **ret_nvme);

/* Waits for what is in flight, but not for a device that hangs. NULL is fine. */
void nvme_free(struct nvme *n);

/* The pool gets a store; `path` and so on as configured. Begins to open it. Before sessions attach. */
struct store_config {
    const char *name, *path;
    uint64_t bytes; /* 0: the whole device */
    bool second_touch;
    uint64_t bandwidth, wear; /* bytes per second, per day; 0: no limit */
    uint32_t queue_depth;
    uint32_t backend;        /* enum io_backend */
    uint32_t register_pages; /* enum config_register */
};

/* All stores of a pool at once; makes the nvme index. */
int spill_new(struct nvme *n, struct pool *p, const struct store_config *stores, uint32_t n_stores,
              char *ret_why, size_t why_bytes);
void spill_free(struct spill *s);

/* Readable when nvme_run() has something to do. */
int nvme_fd(const struct nvme *n);

/* The descriptor was readable: takes its events. */
void nvme_news(struct nvme *n);

/* Takes what has completed, begins what can be begun. True: call again soon. */
bool nvme_run(struct nvme *n);

/* Nanoseconds of the core's clock at which nvme_run() should be called by itself; 0: never. */
uint64_t nvme_deadline(const struct nvme *n);

/* Waits at start until all stores are open or have failed, at most `patience_ns` without progress. */
void nvme_wait(struct nvme *n, uint64_t patience_ns,
               void (*progress)(const char *what, uint64_t done, uint64_t total, void *arg),
               void *arg);

/* Objects that wait to be written or are being written. */
uint64_t nvme_unwritten(const struct nvme *n);

/* No new reads: the daemon stops, and what is queued is written. */
void nvme_stop(struct nvme *n);

/* ---- what happens to objects: called by the pool, whose `spill` may be NULL */

/* The slot has become LIVE by a commit. */
void spill_committed(struct pool *p, uint32_t slot);

/* A use was noticed. */
void spill_touched(struct pool *p, uint32_t slot);

/* The object leaves ram. `forget`: its copies must go, too. */
void spill_left(struct pool *p, uint32_t slot, bool forget);

/* The key has a copy in a store. */
bool spill_has(const struct pool *p, const struct shm_key *key, uint32_t epoch);

/* It had been admitted to a store, and has not been written yet. */
bool spill_is_unwritten(const struct pool *p, uint32_t slot);

/* A use of an object that is not in ram. */
void spill_observed(struct pool *p, const struct shm_key *key, uint32_t epoch);

/* For clients, read-only. */
int spill_index_fd(const struct pool *p);

/* The space has a new epoch. */
void spill_reset(struct pool *p);

/* All stores of the space that are not offline have its epoch on the medium. */
bool spill_reset_done(const struct space *s);

/* Removes the copy of a key, or all of a tenant (NULL: all, but of what is still in ram) from record *cursor
 * on (a step; *cursor 0: done). Returns how many. On the medium, too. */
uint32_t spill_remove(struct pool *p, const struct shm_key *key, uint32_t epoch);
uint32_t spill_remove_tenant(struct pool *p, const uint32_t *tenant, uint32_t *cursor);

/* ---- fetch */

enum waiter_state {
    WAITER_IDLE,
    WAITER_WAITING,
    WAITER_HELD, /* completed; the slot is held until the session has pinned it, or for a while */
};

/* Who asked for a key. */
struct waiter {
    struct list in_attach, in_transfer, in_nvme; /* the last: waiting or held, of all */
    struct attach *attach;
    struct transfer *transfer; /* while waiting */
    enum waiter_state state;
    uint32_t slot;
    uint32_t stamp; /* beside the session's pin counter, when the hold began */
    uint64_t tag;   /* user_data of a ring request */
    uint64_t until_ns;
    struct fetch_call *call; /* NULL: answered by the ring */
    uint32_t index;          /* in the call */
};

/* A Fetch of the socket: answered when all its keys are. */
struct fetch_call {
    struct list in_session;
    struct session *session; /* NULL: nobody waits any more */
    uint64_t id;
    uint32_t n, left;
    void (*done)(struct fetch_call *call);
    int32_t statuses[];
};

struct fetch_ask {
    struct shm_key key;
    uint32_t epoch;
    uint32_t deadline_ms;
    uint64_t tag;
    struct fetch_call *call;
    uint32_t index;
};

/* 1: will be answered later, by the ring or the call; else the status, 0 or a negative errno. */
int spill_fetch(struct attach *a, const struct fetch_ask *ask);

/* Gives up what was asked with tags in [tag, tag + n): waiting ones complete with -ECANCELED, held slots
 * are let go. */
void spill_cancel(struct attach *a, uint64_t tag, uint64_t n);

/* No slot can be had: lets go of what is held for sessions that have had it. True: something was. */
bool spill_let_go(struct pool *p);

/* The attach goes. */
void spill_forget(struct attach *a);

/* ---- for administrators */

enum spill_action {
    SPILL_FORMAT,
    SPILL_SCRUB,
    SPILL_TRIM,
    SPILL_ONLINE,
    SPILL_OFFLINE,
    SPILL_SYNC,
    SPILL_STOP,
};

struct task_status {
    const char *name; /* NULL: none so far */
    bool running;
    uint64_t done, total;
    const char *unit;
    int status;
    char result[512];
};

struct store_stats {
    uint64_t written_objects, written_bytes; /* payload */
    uint64_t read_objects, read_bytes;
    uint64_t physical_written, physical_read; /* what the device was asked for */
    uint64_t evicted;                         /* records, for others */
    uint64_t broken;                          /* records whose data was not what it should be */
    uint64_t errors, timeouts, retries;
};

struct store_status {
    char name[200]; /* "space/pool/name" */
    char fix_text[512];
    const char *path, *state, *problem, *fix, *io, *note, *admission;
    uint64_t bytes, records, used, queued, writing, reading, bandwidth;
    uint32_t epoch;
    struct store_stats stats;
    struct task_status task;
};

struct spill_stats {
    uint64_t fetch_ram, fetch_nvme, fetch_miss, fetch_refused, fetch_timeout,
        fetch_failed;      /* keys */
    uint64_t fetch_shared; /* of them: somebody else had begun it */
    uint64_t promoted, promoted_bytes;
    uint64_t evicted_clean;     /* left ram with a copy in a store */
    uint64_t evicted_unspilled; /* left ram without one although it had been admitted */
    uint64_t orphans;           /* not written: the parent is in no tier */
    uint64_t refused;           /* not written: no store can take it */
};

uint32_t nvme_stores(const struct nvme *n);
struct store *nvme_store(const struct nvme *n, uint32_t i);
struct store *nvme_find(const struct nvme *n, const char *name); /* "space/pool/name" */
struct pool *store_pool(const struct store *st);
void store_status(const struct store *st, struct store_status *ret);
const struct store_stats *store_stats(const struct store *st);

/* 0: begun (or done); else a sentence in ret_why. */
int store_act(struct store *st, enum spill_action action, bool force, uint64_t rate, char *ret_why,
              size_t why_bytes);

struct spill_totals {
    uint64_t records, used, bytes;
};
void spill_totals(const struct pool *p, struct spill_totals *ret);
const struct spill_stats *spill_stats(const struct pool *p);

/* A record by its number, for listings. False: nothing there. */
struct spill_entry {
    struct shm_key key;
    uint64_t bytes;
    uint32_t epoch, tenant, number; /* number: within its store */
    const char *store;
};
bool spill_entry(const struct pool *p, uint32_t record, struct spill_entry *ret);

/* A store of the pool that is not online, and so may hold what nobody finds now; NULL: none. */
const char *spill_away(const struct pool *p);

/* The store that has a copy of what is in the slot; NULL: none. */
const char *spill_store_of(const struct pool *p, uint32_t slot);

/* Numbers that records can have. */
uint32_t spill_records(const struct pool *p);

/* The record of a key; SLOT_NONE. */
uint32_t spill_record_of(const struct pool *p, const struct shm_key *key, uint32_t epoch);

/* I4 and I2 of the tier; asserts. For tests and debug builds. */
void spill_check(const struct pool *p);

#endif
