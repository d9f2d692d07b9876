/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool: the memory of one object size of one space, its index, and who holds what in it.
 *
 * I4: a slot is at every instant exactly one of free, reserved, live, in flight, quarantined. The
 * state in the slot table says which, and pool->count[] are the sums; both change together, in
 * slot_set().
 *
 * Everything here runs on the core thread. What is slow (making and populating segments) happens
 * before the daemon is ready.
 */
#ifndef KVD_DAEMON_POOL_H
#define KVD_DAEMON_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/history.h"
#include "daemon/index.h"
#include "daemon/list.h"
#include "daemon/policy.h"
#include "daemon/segment_make.h"
#include "shm/layout.h"
#include "shm/segment.h"

struct attach;
struct core;
struct session;
struct space;
struct spill;

/* What the core knows of a slot beyond the slot table. */
struct slot {
    uint32_t parent;     /* slot of the parent, SLOT_NONE if unknown */
    uint32_t parent_use; /* the parent's `use` when the link was made */
    uint32_t use;        /* counts the objects that have lived here */
    uint32_t children;   /* resident or reserved objects that name this one as parent */
    uint32_t tick;       /* last use the core knows of */
    uint32_t tenant;
    uint64_t since_ms;     /* of the current state */
    struct attach *writer; /* while reserved */
    bool queued;           /* the policy has it */
};

/* An array of pin counters that eviction must look at. `attach`: NULL for the daemon's own. */
struct pin_source {
    struct shm_pins *pins;
    size_t bytes;
    struct attach *attach;
};

#define POOL_TICKS 2048u

struct pool_stats {
    uint64_t committed, committed_bytes;
    uint64_t evicted, removed, reset;
    uint64_t aborted, orphaned;
    uint64_t reserve_new, reserve_pending, reserve_present, reserve_refused;
    uint64_t restored;    /* hidden, then found pinned (A3) */
    uint64_t pins_in_way; /* candidates that were pinned (A0) */
    uint64_t observed;
    uint64_t lookups, lookup_hits; /* keys asked through the socket; shared memory is not counted */
};

struct pool {
    struct core *core;
    struct space *space;
    uint32_t id;
    char name[64];

    uint32_t slots;
    uint32_t parts;
    uint64_t part_bytes;
    uint32_t chunk_slots;
    uint32_t chunks;
    uint32_t low_water, high_water; /* free slots: evict below low, until high */

    struct segment index_segment, meta_segment, slots_segment;
    struct segment_mapping index_map, meta_map, slots_map;
    struct shm_index *index;
    struct shm_index *nvme_index; /* of what its spill stores hold; NULL: it has none */
    struct shm_metas *metas;
    struct shm_slots *table;
    struct segment *data;                           /* [chunk * parts + part] */
    struct segment_reservation base[SHM_PARTS_MAX]; /* the daemon's own view, for the socket */
    enum segment_rung rung;                         /* the lowest that any chunk had to take */
    uint64_t page_bytes;
    char ladder[1024]; /* the rungs taken, and why no better ones */

    struct slot *slot;
    struct slot_link *links; /* of the lists below and of an attach's reservations */
    struct slot_list free;
    struct slot_list quarantine; /* in order of deadline */
    uint32_t count[SHM_SLOT_QUARANTINED + 1];

    const struct policy_ops *ops;
    struct policy *policy;
    uint32_t inserts_in_tick;
    uint64_t tick_ms[POOL_TICKS]; /* when each of the last ticks began: turns stamps into ages */
    uint64_t exhausted_until_ns;
    uint64_t pinned, pinned_until_ns; /* the last count, and how long it is good enough */
    bool making_room; /* free slots were below the low-water mark and are not at the high one yet */
    uint32_t inner_cursor; /* where the search for unpinned inner objects goes on */

    struct list attaches;
    struct pin_source *sources;
    uint32_t n_sources, max_sources;
    struct shm_pins
        *held; /* pins of the daemon itself: I/O reads the slot, or it was fetched for somebody */

    struct spill *spill; /* NULL: no stores */

    struct history *history;
    struct pool_stats stats;
};

struct pool_spec {
    const char *space_name, *name;
    uint64_t slots;
    uint64_t part_bytes;
    uint32_t parts;
    uint64_t chunk_bytes; /* of all parts together; rounded to whole pages */
    uint32_t low_water, high_water;
    const char *policy;
    const struct segment_spec
        *memory; /* hugepages, directories, populate options; name and bytes are ours */
};

/* Makes and populates everything. On failure *ret_why (if not NULL, >= 512 bytes) has a
 * sentence. */
int pool_new(struct core *core, struct space *space, uint32_t id, const struct pool_spec *spec,
             char *ret_why, size_t why_bytes, struct pool **ret_pool);

/* A table beside the pool: a file in the runtime directory, mapped writable. */
int pool_make_small(struct pool *p, const char *what, enum shm_kind kind, uint64_t bytes,
                    uint64_t count, struct segment *segment, struct segment_mapping *map);
void pool_drop_small(struct segment *s, struct segment_mapping *m);

/* Unmaps and removes the files. All sessions have been detached, all stores closed. */
void pool_free(struct pool *p);

/* ---- slots.c: states of slots */

void slot_set(struct pool *p, uint32_t slot, enum shm_slot_state state);

/* A free slot, evicting if there is none. -ENOSPC: everything is pinned, reserved or
 * quarantined. */
int slot_take(struct pool *p, uint32_t *ret_slot);

/* The parent link of an object that is being reserved or dropped; keeps heads out of the policy
 * while they have resident children (I2). */
void slot_link_parent(struct pool *p, uint32_t slot, uint32_t parent);
void slot_unlink_parent(struct pool *p, uint32_t slot);

/* Last use at `tick`; `first` as in policy.h. */
void slot_queue(struct pool *p, uint32_t slot, uint32_t tick, bool first);
void slot_unqueue(struct pool *p, uint32_t slot);

/* A use that the core saw itself. */
void slot_touch(struct pool *p, uint32_t slot);

/* Quarantined slots whose time has come are free, last in line. Returns ms to the next one, -1:
 * none. */
int64_t pool_release_quarantine(struct pool *p, uint64_t now_ms);

/* One more object has come in: moves the pool's clock. */
void pool_count_insert(struct pool *p);
void pool_tick(struct pool *p);
uint64_t pool_tick_age_ms(const struct pool *p, uint32_t tick);

/* ---- evict.c */

/* Tries to free `want` slots, coldest first; returns how many. */
uint32_t pool_evict(struct pool *p, uint32_t want, enum history_event why);

/* What pool_remove() is told of copies in spill stores. */
enum {
    REMOVE_FORGET = 1, /* they go, too */
};

/* Removes these live slots unless they are pinned; returns how many. `detail` goes into the history; with
 * HISTORY_REMOVED it may be REMOVE_FORGET. */
uint32_t pool_remove(struct pool *p, const uint32_t *slots, uint32_t n, enum history_event why,
                     uint32_t detail);

/* Background: keeps free slots above the low-water mark. True: there is more to do. */
bool pool_keep_free(struct pool *p);

/* Makes p->held, if it is not there yet. */
int pool_hold_new(struct pool *p);

/* Counts the daemon's own pins of a slot up or down. */
void pool_hold(struct pool *p, uint32_t slot, int by);

int pool_add_source(struct pool *p, struct shm_pins *pins, size_t bytes, struct attach *a);
void pool_drop_sources(struct pool *p, const struct attach *a);

/* Pins of all sessions on a slot. */
uint32_t pool_pins_of(struct pool *p, uint32_t slot);

/* Live slots that somebody has pinned; walks all counters. */
uint64_t pool_count_pinned(struct pool *p);

/* ---- publish.c */

enum reserve_status {
    RESERVE_NEW = 1,
    RESERVE_PENDING = 2,
    RESERVE_PRESENT = 3,
};

struct reservation {
    int32_t status; /* enum reserve_status or a negative errno */
    uint32_t slot;
    uint64_t ticket;
};

struct commit {
    uint64_t ticket;
    uint32_t part;
    uint64_t bytes;
    uint64_t position, layout, checksum;
    uint32_t user_bytes;
    const uint8_t *user;
};

void pool_reserve(struct pool *p, struct attach *a, const struct shm_key *key,
                  const struct shm_key *parent, uint32_t epoch, uint32_t tenant,
                  struct reservation *ret);

/* 0; -ESTALE: ticket or epoch gone; -EPERM: another engine's; -EINVAL: part, bytes, metadata. */
int pool_commit(struct pool *p, struct attach *a, const struct commit *c);

/* 0; -ENOENT: no such ticket of this engine. */
int pool_abort(struct pool *p, struct attach *a, uint64_t ticket);

/* The slot of a ticket that `a` may write to. */
int pool_ticket(struct pool *p, const struct attach *a, uint64_t ticket, uint32_t *ret_slot);

/* Takes a reserved slot away from its writer: to quarantine if somebody may still write into it. */
void pool_unreserve(struct pool *p, uint32_t slot, bool quarantine, enum history_event why,
                    uint32_t detail);

/* A use reported by a client. */
void pool_observe(struct pool *p, const struct shm_key *key, uint32_t epoch);

#endif
