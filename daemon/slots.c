/* SPDX-License-Identifier: Apache-2.0 */
/* States of slots: the one place where a slot changes hands (I4). */
#include <assert.h>
#include <errno.h>

#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"

/* Takes the slot out of the list of its old state. */
static void leave(struct pool *p, uint32_t slot, enum shm_slot_state state)
{
    struct slot *s = &p->slot[slot];

    switch (state) {
    case SHM_SLOT_FREE:
        slot_list_remove(&p->free, p->links, slot);
        break;
    case SHM_SLOT_QUARANTINED:
        slot_list_remove(&p->quarantine, p->links, slot);
        break;
    case SHM_SLOT_RESERVED:
        slot_list_remove(&s->writer->reserved, p->links, slot);
        s->writer->session->n_reserved--;
        s->writer = NULL;
        break;
    case SHM_SLOT_LIVE:
        slot_unqueue(p, slot);
        break;
    case SHM_SLOT_IN_FLIGHT:
        break;
    }
}

/* Both deltas at once: a tenant that holds nothing, even for a moment, leaves the table. */
static void count_tenant(struct pool *p, uint32_t tenant, enum shm_slot_state old,
                         enum shm_slot_state state)
{
    int reserved = (state == SHM_SLOT_RESERVED) - (old == SHM_SLOT_RESERVED);
    int live = (state == SHM_SLOT_LIVE) - (old == SHM_SLOT_LIVE);

    if (reserved || live)
        tenants_add(&p->space->tenants, tenant, reserved, live, p->part_bytes * p->parts);
}

/* The caller has set the fields that go with the new state: `writer` before RESERVED, `tenant`. */
void slot_set(struct pool *p, uint32_t slot, enum shm_slot_state state)
{
    struct shm_slot *t = &p->table->slots[slot];
    enum shm_slot_state old = (enum shm_slot_state)t->state;
    struct slot *s = &p->slot[slot];
    struct attach *writer = s->writer;

    assert(p->count[old] > 0); /* I4 */
    leave(p, slot, old);
    p->count[old]--;
    p->count[state]++;
    s->since_ms = core_now_ms(p->core);
    switch (state) {
    case SHM_SLOT_FREE:
        if (old == SHM_SLOT_QUARANTINED) /* reused last: a late DMA may still be on its way */
            slot_list_push_back(&p->free, p->links, slot);
        else
            slot_list_push_front(&p->free, p->links, slot);
        break;
    case SHM_SLOT_QUARANTINED:
        slot_list_push_back(&p->quarantine, p->links, slot);
        break;
    case SHM_SLOT_RESERVED:
        s->writer = writer;
        slot_list_push_back(&writer->reserved, p->links, slot);
        writer->session->n_reserved++;
        break;
    case SHM_SLOT_LIVE:
    case SHM_SLOT_IN_FLIGHT:
        break;
    }
    count_tenant(p, s->tenant, old, state);
    t->state = state;
}

static bool make_room(struct pool *p)
{
    uint32_t want = p->low_water ? 32 : 1;

    if (pool_evict(p, want, HISTORY_EVICTED))
        return true;
    if (!spill_let_go(p))
        return false;
    p->exhausted_until_ns = 0; /* a search may find something now */
    return pool_evict(p, want, HISTORY_EVICTED) > 0;
}

int slot_take(struct pool *p, uint32_t *ret_slot)
{
    if (p->free.first == SLOT_NONE) {
        pool_release_quarantine(p, core_now_ms(p->core));
        /* A burst has outrun the background: a batch costs little more than one. */
        if (p->free.first == SLOT_NONE && !make_room(p))
            return -ENOSPC;
    }
    *ret_slot = p->free.first;
    return 0;
}

void slot_queue(struct pool *p, uint32_t slot, uint32_t tick, bool first)
{
    struct slot *s = &p->slot[slot];

    s->tick = tick;
    if (s->children) /* I2: it becomes a candidate when its last child has left */
        return;
    assert(!s->queued);
    p->ops->add(p->policy, slot, shm_load32(&p->index->tick), tick, first);
    s->queued = true;
}

void slot_unqueue(struct pool *p, uint32_t slot)
{
    if (!p->slot[slot].queued)
        return;
    p->ops->remove(p->policy, slot);
    p->slot[slot].queued = false;
}

void slot_touch(struct pool *p, uint32_t slot)
{
    uint32_t now = shm_load32(&p->index->tick);

    spill_touched(p, slot);
    if (!p->slot[slot].queued) {
        p->slot[slot].tick = now;
        return;
    }
    slot_unqueue(p, slot);
    slot_queue(p, slot, now, true);
}

void slot_link_parent(struct pool *p, uint32_t slot, uint32_t parent)
{
    p->slot[slot].parent = parent;
    p->slot[slot].parent_use = p->slot[parent].use;
    if (p->slot[parent].children++ == 0)
        slot_unqueue(p, parent);
}

void slot_unlink_parent(struct pool *p, uint32_t slot)
{
    struct slot *s = &p->slot[slot];
    uint32_t parent = s->parent;
    struct slot *up = parent == SLOT_NONE ? NULL : &p->slot[parent];

    s->parent = SLOT_NONE;
    if (!up || up->use != s->parent_use)
        return; /* the parent was taken away first: by an administrator or a reset */
    if (--up->children || p->table->slots[parent].state != SHM_SLOT_LIVE)
        return;
    /* A head is never older than its tail. */
    slot_queue(p, parent, (int32_t)(s->tick - up->tick) > 0 ? s->tick : up->tick, false);
}

int64_t pool_release_quarantine(struct pool *p, uint64_t now_ms)
{
    uint32_t s;

    while ((s = p->quarantine.first) != SLOT_NONE) {
        uint64_t until = p->slot[s].since_ms + p->core->quarantine_ms;

        if (until > now_ms)
            return (int64_t)(until - now_ms);
        slot_set(p, s, SHM_SLOT_FREE);
    }
    return -1;
}

void pool_tick(struct pool *p)
{
    uint32_t tick = shm_load32(&p->index->tick) + 1;

    p->inserts_in_tick = 0;
    p->tick_ms[tick % POOL_TICKS] = core_now_ms(p->core);
    atomic_store_explicit(&p->index->tick, tick, memory_order_relaxed);
}

void pool_count_insert(struct pool *p)
{
    if (++p->inserts_in_tick > p->slots / 512)
        pool_tick(p);
}

uint64_t pool_tick_age_ms(const struct pool *p, uint32_t tick)
{
    uint32_t distance = shm_load32(&p->index->tick) - tick;
    uint64_t now = core_now_ms(p->core);

    if (distance >= POOL_TICKS)
        distance = POOL_TICKS - 1;
    return now - p->tick_ms[(shm_load32(&p->index->tick) - distance) % POOL_TICKS];
}
