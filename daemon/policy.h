/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who leaves first. A policy knows slots and ticks, nothing of keys, pins or memory; the pool asks
 * it for candidates and decides (a pinned candidate is put back). Policies are compared by
 * replaying traces.
 */
#ifndef KVD_DAEMON_POLICY_H
#define KVD_DAEMON_POLICY_H

#include <stdbool.h>
#include <stdint.h>

struct policy;

struct policy_ops {
    const char *name;
    int (*make)(uint32_t slots, struct policy **ret_policy);
    void (*destroy)(struct policy *p);

    /* The slot becomes a candidate at `now`, last used at `tick` (of the pool's clock, which
     * wraps). `first`: among the slots of the same tick it leaves before those already there. A
     * chain that is added from its head to its tail with `first` set loses its tail first. */
    void (*add)(struct policy *p, uint32_t slot, uint32_t now, uint32_t tick, bool first);

    void (*remove)(struct policy *p, uint32_t slot);

    /* Takes out the coldest candidate; SLOT_NONE: there is none. *ret_tick: when it was last
     * used. */
    uint32_t (*take)(struct policy *p, uint32_t now, uint32_t *ret_tick);

    uint32_t (*count)(const struct policy *p);
};

extern const struct policy_ops policy_lru;

/* By name as in the configuration; NULL: unknown. */
const struct policy_ops *policy_find(const char *name);

#endif
