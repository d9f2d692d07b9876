/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Publishing: reserve, parts, commit, abort.
 *
 * The stores are in the order C1..C7 of tests/model/commit.pml, so that whoever finds them after a
 * crash between any two knows what happened: slot table before the grant is answered; parts before
 * the entry turns LIVE; the entry before the slot table's state; the answer before the request is
 * given back.
 */
#include <errno.h>
#include <string.h>

#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"

static uint64_t all_parts(const struct pool *p)
{
    return p->parts == 64 ? UINT64_MAX : ((uint64_t)1 << p->parts) - 1;
}

static int check_quota(struct pool *p, const struct attach *a, uint32_t tenant)
{
    uint64_t max = p->space->max_reserved;

    if (session_over_quota(a->session, p->space) ||
        (max && session_reserved_in(a->session, p->space) >= max))
        return -EDQUOT;
    return tenants_check(&p->space->tenants, tenant, p->part_bytes * p->parts);
}

/* Tenants that were made room for but hold nothing must not stay in the table. */
static void forget_tenant(struct pool *p, uint32_t tenant)
{
    tenants_add(&p->space->tenants, tenant, 0, 0, 0);
}

static uint32_t resident_parent(struct pool *p, const struct shm_key *parent, uint32_t epoch)
{
    struct shm_entry *e = parent ? index_find(p->index, parent, epoch) : NULL;

    return e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;
}

/* Never 0, and not given out again for 2^36 grants. */
static uint64_t next_ticket(struct core *c, uint32_t slot)
{
    uint64_t operation = c->next_operation++ << SHM_SLOT_BITS;

    if (!operation)
        operation = c->next_operation++ << SHM_SLOT_BITS;
    return operation | slot;
}

/* A slot for a key that is not in the index. */
static int grant(struct pool *p, struct attach *a, const struct shm_key *key,
                 const struct shm_key *parent, uint32_t tenant, struct reservation *ret)
{
    uint32_t slot, line, up;
    struct shm_slot *t;
    struct shm_meta *m;
    int r = slot_take(p, &slot);

    if (r == 0) /* not before: what had to leave may have been all that the tenant had */
        r = tenants_want(&p->space->tenants, tenant);
    if (r < 0)
        return r;
    t = &p->table->slots[slot];
    *t = (struct shm_slot){
        .state = SHM_SLOT_FREE,
        .session = a->session->id,
        .ticket = next_ticket(p->core, slot),
        .epoch = p->space->epoch,
    };
    r = index_insert(p->index, key, p->space->epoch, slot, &line);
    if (r < 0)
        return r;
    t->line = line;
    m = &p->metas->metas[slot];
    *m = (struct shm_meta){.key = *key, .tenant = tenant, .epoch = p->space->epoch};
    if (parent) {
        m->parent = *parent;
        m->has_parent = 1;
    }
    p->slot[slot].writer = a;
    p->slot[slot].tenant = tenant;
    p->slot[slot].tick = shm_load32(&p->index->tick); /* its parent inherits it */
    slot_set(p, slot, SHM_SLOT_RESERVED);             /* C1 */
    up = resident_parent(p, parent, p->space->epoch);
    if (up != SLOT_NONE && up != slot)
        slot_link_parent(p, slot, up);
    *ret = (struct reservation){.status = RESERVE_NEW, .slot = slot, .ticket = t->ticket};
    return 0;
}

static void refuse(struct pool *p, const struct shm_key *key, int error, struct reservation *ret)
{
    p->stats.reserve_refused++;
    history_add(p->history, key, HISTORY_REFUSED, (uint32_t)-error, core_now_ms(p->core));
    *ret = (struct reservation){.status = error, .slot = SHM_NO_SLOT};
}

/* The parent must outlive the search for a slot: it may be the coldest of all. */
static void reserve_new(struct pool *p, struct attach *a, const struct shm_key *key,
                        const struct shm_key *parent, uint32_t tenant, struct reservation *ret)
{
    uint32_t up = resident_parent(p, parent, p->space->epoch);
    int r = check_quota(p, a, tenant);

    if (up != SLOT_NONE)
        slot_touch(p, up);
    if (r == 0)
        r = grant(p, a, key, parent, tenant, ret);
    if (r < 0) {
        forget_tenant(p, tenant);
        refuse(p, key, r, ret);
        return;
    }
    p->stats.reserve_new++;
}

void pool_reserve(struct pool *p, struct attach *a, const struct shm_key *key,
                  const struct shm_key *parent, uint32_t epoch, uint32_t tenant,
                  struct reservation *ret)
{
    struct shm_entry *e;

    *ret = (struct reservation){.slot = SHM_NO_SLOT};
    if (p->space->offline || epoch != p->space->epoch) {
        ret->status = p->space->offline ? -EIO : -ESTALE;
        return;
    }
    e = index_find(p->index, key, epoch);
    if (!e && spill_has(p, key, epoch)) { /* nobody computes it again: it can be fetched */
        p->stats.reserve_present++;
        spill_observed(p, key, epoch);
        ret->status = RESERVE_PRESENT;
    } else if (!e) {
        reserve_new(p, a, key, parent, tenant, ret);
    } else if (shm_word_state(shm_load64(&e->word)) == SHM_PENDING) {
        p->stats.reserve_pending++;
        ret->status = RESERVE_PENDING;
    } else {
        p->stats.reserve_present++;
        slot_touch(p, shm_word_slot(shm_load64(&e->word)));
        ret->status = RESERVE_PRESENT;
    }
}

/* The slot of a ticket that was given out and not taken back. */
static int slot_of_ticket(const struct pool *p, uint64_t ticket, uint32_t *ret_slot)
{
    uint32_t slot = (uint32_t)ticket & (SHM_SLOTS_MAX - 1);

    if (slot >= p->slots || !ticket || p->table->slots[slot].ticket != ticket)
        return -ESTALE;
    *ret_slot = slot;
    return 0;
}

int pool_ticket(struct pool *p, const struct attach *a, uint64_t ticket, uint32_t *ret_slot)
{
    uint32_t slot;
    int r = slot_of_ticket(p, ticket, &slot);

    if (r < 0)
        return r;
    if (p->table->slots[slot].state != SHM_SLOT_RESERVED)
        return -ESTALE;
    if (p->slot[slot].writer->session->engine != a->session->engine)
        return -EPERM;
    *ret_slot = slot;
    return 0;
}

static void fill_meta(struct shm_meta *m, const struct commit *c)
{
    m->position = c->position;
    m->layout = c->layout;
    m->checksum = c->checksum;
    m->bytes = c->bytes;
    m->user_bytes = c->user_bytes;
    memset(m->user, 0, sizeof(m->user));
    if (c->user_bytes)
        memcpy(m->user, c->user, c->user_bytes);
}

static void publish(struct pool *p, uint32_t slot, const struct commit *c)
{
    fill_meta(&p->metas->metas[slot], c);
    index_publish(p->index, p->table->slots[slot].line, c->bytes); /* C4 */
    slot_set(p, slot, SHM_SLOT_LIVE);                              /* C5 */
    slot_queue(p, slot, shm_load32(&p->index->tick), true);
    pool_count_insert(p);
    spill_committed(p, slot);
    p->stats.committed++;
    p->stats.committed_bytes += c->bytes * p->parts;
}

static int check_commit(const struct pool *p, const struct shm_slot *t, const struct commit *c)
{
    if (p->space->offline)
        return -EIO;
    if (t->epoch != p->space->epoch)
        return -ESTALE;
    if (c->part >= p->parts || c->user_bytes > SHM_USER_BYTES)
        return -EINVAL;
    if (!c->bytes || c->bytes > p->part_bytes || (t->parts_done && c->bytes != t->bytes))
        return -EINVAL;
    return 0;
}

int pool_commit(struct pool *p, struct attach *a, const struct commit *c)
{
    uint32_t slot;
    struct shm_slot *t;
    int r = slot_of_ticket(p, c->ticket, &slot);

    if (r < 0)
        return r;
    t = &p->table->slots[slot];
    if (t->state == SHM_SLOT_LIVE) /* C11: committed before; the answer was lost */
        return t->epoch == p->space->epoch ? 0 : -ESTALE;
    r = pool_ticket(p, a, c->ticket, &slot);
    if (r < 0)
        return r;
    r = check_commit(p, t, c);
    if (r < 0)
        return r;
    t->bytes = c->bytes;
    t->parts_done |= (uint64_t)1 << c->part; /* C3 */
    if (t->parts_done == all_parts(p))
        publish(p, slot, c);
    return 0;
}

static void count_unreserved(struct pool *p, enum history_event why)
{
    if (why == HISTORY_ABORTED)
        p->stats.aborted++;
    else if (why == HISTORY_ORPHANED)
        p->stats.orphaned++;
    else
        p->stats.reset++;
}

void pool_unreserve(struct pool *p, uint32_t slot, bool quarantine, enum history_event why,
                    uint32_t detail)
{
    struct shm_slot *t = &p->table->slots[slot];

    history_add(p->history, &p->metas->metas[slot].key, why, detail, core_now_ms(p->core));
    index_remove(p->index, t->line);
    slot_unlink_parent(p, slot);
    p->slot[slot].use++; /* children that named it are orphans */
    p->slot[slot].children = 0;
    t->ticket = 0; /* a late commit finds nothing */
    slot_set(p, slot, quarantine ? SHM_SLOT_QUARANTINED : SHM_SLOT_FREE);
    spill_left(p, slot, false); /* its children need not wait for it */
    count_unreserved(p, why);
}

int pool_abort(struct pool *p, struct attach *a, uint64_t ticket)
{
    uint32_t slot;
    int r = pool_ticket(p, a, ticket, &slot);

    if (r < 0)
        return -ENOENT;
    pool_unreserve(p, slot, false, HISTORY_ABORTED, a->session->id);
    return 0;
}

void pool_observe(struct pool *p, const struct shm_key *key, uint32_t epoch)
{
    struct shm_entry *e = epoch == p->space->epoch ? index_find(p->index, key, epoch) : NULL;

    if (!e && epoch == p->space->epoch)
        spill_observed(p, key, epoch);
    if (!e || shm_word_state(shm_load64(&e->word)) != SHM_LIVE)
        return;
    p->stats.observed++;
    slot_touch(p, shm_word_slot(shm_load64(&e->word)));
}
