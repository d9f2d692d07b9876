/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Least recently used, as a queue of buckets: one list per tick, a ring of the last LRU_BUCKETS
 * ticks. Adding, removing and taking are O(1), also for a slot whose last use is found out late
 * (the stamps beside the pin counters are read only when a slot comes up for eviction): it goes
 * into the bucket of that tick, not to the young end. What is older than the ring lies in the
 * oldest bucket, in order.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "list.h"
#include "policy.h"

#define LRU_BUCKETS 2048u /* a power of two; four turnovers of a pool at 512 ticks each */

struct policy {
    uint32_t now;   /* tick of the youngest bucket; the ring holds (now - LRU_BUCKETS, now] */
    uint32_t first; /* no bucket before this tick holds anything */
    uint32_t n;
    struct slot_link *links;
    uint32_t *ticks; /* of each slot: last use; its bucket, or if that is gone, the oldest one */
    struct slot_list buckets[LRU_BUCKETS];
};

static struct slot_list *bucket_of(struct policy *p, uint32_t tick)
{
    return &p->buckets[tick % LRU_BUCKETS];
}

static void lru_destroy(struct policy *p)
{
    if (!p)
        return;
    free(p->links);
    free(p->ticks);
    free(p);
}

static int lru_make(uint32_t slots, struct policy **ret_policy)
{
    struct policy *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    p->links = calloc(slots, sizeof(*p->links));
    p->ticks = calloc(slots, sizeof(*p->ticks));
    if (!p->links || !p->ticks) {
        lru_destroy(p);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < LRU_BUCKETS; i++)
        slot_list_init(&p->buckets[i]);
    *ret_policy = p;
    return 0;
}

static uint32_t oldest_tick(const struct policy *p)
{
    return p->now - (LRU_BUCKETS - 1);
}

/* Ticks wrap, so they are compared by their distance. */
static bool before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

/* Moves the clock on. A bucket that falls out of the ring goes in front of the next one. */
static void advance(struct policy *p, uint32_t now)
{
    while (p->n && before(p->now, now)) {
        struct slot_list *from = bucket_of(p, oldest_tick(p));

        p->now++;
        slot_list_splice_front(bucket_of(p, oldest_tick(p)), from, p->links);
    }
    if (before(p->now, now))
        p->now = now; /* it is empty: nothing to move */
    if (before(p->first, oldest_tick(p)))
        p->first = oldest_tick(p);
}

static struct slot_list *slot_bucket(struct policy *p, uint32_t slot)
{
    uint32_t tick = p->ticks[slot];

    return bucket_of(p, before(tick, oldest_tick(p)) ? oldest_tick(p) : tick);
}

static void lru_add(struct policy *p, uint32_t slot, uint32_t now, uint32_t tick, bool first)
{
    struct slot_list *b;

    advance(p, now);
    if (before(now, tick))
        tick = now; /* a session may write any stamp; none is younger than now */
    p->ticks[slot] = tick;
    b = slot_bucket(p, slot);
    if (before(tick, oldest_tick(p)))
        tick = oldest_tick(p);
    if (!p->n || before(tick, p->first))
        p->first = tick;
    if (first)
        slot_list_push_front(b, p->links, slot);
    else
        slot_list_push_back(b, p->links, slot);
    p->n++;
}

static void lru_remove(struct policy *p, uint32_t slot)
{
    slot_list_remove(slot_bucket(p, slot), p->links, slot);
    p->n--;
}

static uint32_t lru_take(struct policy *p, uint32_t now, uint32_t *ret_tick)
{
    uint32_t slot;

    advance(p, now);
    if (!p->n)
        return SLOT_NONE;
    while (!bucket_of(p, p->first)->n)
        p->first++;
    slot = slot_list_pop(bucket_of(p, p->first), p->links);
    p->n--;
    *ret_tick = p->ticks[slot];
    return slot;
}

static uint32_t lru_count(const struct policy *p)
{
    return p->n;
}

const struct policy_ops policy_lru = {
    .name = "lru",
    .make = lru_make,
    .destroy = lru_destroy,
    .add = lru_add,
    .remove = lru_remove,
    .take = lru_take,
    .count = lru_count,
};

const struct policy_ops *policy_find(const char *name)
{
    return strcmp(name, policy_lru.name) == 0 ? &policy_lru : NULL;
}
