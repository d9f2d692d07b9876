/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core: everything that only one thread may change. Owned by main, driven by the loop's
 * callbacks (daemon/server.c for the sockets, daemon/rings.c for shared memory), never by another
 * thread.
 */
#ifndef KVD_DAEMON_CORE_H
#define KVD_DAEMON_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/list.h"
#include "daemon/log.h"
#include "daemon/segment_make.h"
#include "daemon/tenant.h"
#include "shm/layout.h"

#define CORE_MAX_POOLS  256u
#define CORE_MAX_SPACES 64u

struct config;
struct io;
struct nvme;
struct pool;
struct session;
struct space;

/* Time as the core sees it; tests drive it. */
struct core_clock {
    uint64_t (*now_ns)(void *arg); /* CLOCK_MONOTONIC */
    void *arg;
};

struct core_stats {
    uint64_t requests, wakes_sent;
    uint64_t sessions, reaped, broken;
    uint64_t ring_errors;
};

struct core {
    struct core_clock clock;
    struct log *log;
    struct log_limit breaks; /* of sessions */
    char runtime_dir[108];
    const atomic_bool *cancel;
    uint8_t instance[16];
    uint64_t started_ms;
    uint64_t quarantine_ms, engine_linger_ms;
    uint32_t ring_entries_max;
    uint64_t max_inline, max_frame;
    uint32_t max_sessions;

    struct segment core_segment;
    struct segment_mapping core_map;
    struct shm_core *shm;

    struct tenant_limit *limits;
    struct space *spaces;
    uint32_t n_spaces;
    struct pool *pools[CORE_MAX_POOLS];
    uint32_t n_pools;
    struct nvme *nvme; /* NULL: no pool has stores */

    struct list sessions; /* all that are not buried */
    struct list engines;
    uint32_t n_sessions;
    uint32_t next_session;
    uint64_t next_operation; /* tickets are never given out twice */

    struct core_stats stats;
    bool stopping;

    /* A session is about to be freed: whoever holds a pointer to it lets go. */
    void (*session_gone)(void *arg, struct session *s);
    void *session_gone_arg;
};

uint64_t core_now_ms(const struct core *c);
uint64_t core_now_ns(const struct core *c);

struct core_options {
    const struct config *config; /* checked; not needed afterwards */
    struct log *log;
    struct core_clock clock;
    void (*progress)(uint64_t done, uint64_t total, void *arg); /* bytes populated; may be NULL */
    void *progress_arg;
    const atomic_bool *cancel; /* stops populating; may be NULL */
    int (*wrap_io)(void *arg, const char *store, struct io *io, struct io **ret_io); /* tests */
    void *wrap_arg;
};

/* Spaces, pools, everything in memory. Long: populates. On failure *ret_why has the sentence. */
int core_new(const struct core_options *options, char *ret_why, size_t why_bytes,
             struct core **ret_core);

/* Buries all sessions, removes all segments. */
void core_free(struct core *c);

struct pool *core_pool(struct core *c, uint32_t id);

/* Background work of one turn (water marks, quarantine, purging, lingering). True: call again
 * soon. */
bool core_work(struct core *c);

/* Milliseconds until core_work() has something to do by itself; -1: nothing. */
int64_t core_next_deadline(struct core *c);

/* Once every two seconds while sessions exist: the pools' clocks also go on without inserts. */
void core_tick(struct core *c);

/* Epochs outlive the daemon, in a file of the runtime directory: a store that was away when its space was
 * reset, and comes back after a restart, must not bring back what the old weights have stored. */
void core_save_epochs(struct core *c);

#endif
