/* SPDX-License-Identifier: Apache-2.0 */
/* Reserve, commit, abort; and what a device does that its dead owner has started. */
#include <errno.h>
#include <string.h>

#include "core.h"
#include "fail.h"

void run_keep_ticket(struct run *r, int pool, uint64_t ticket)
{
    uint32_t i = rng_below(&r->rng, RUN_TICKETS);

    r->tickets[i].ticket = ticket;
    r->tickets[i].pool = pool;
}

/* Mostly the chain's order, and sometimes any other key, its own child or itself. */
static int random_parent(struct run *r, int key)
{
    switch (rng_below(&r->rng, 16)) {
    case 0:
        return MODEL_NONE;
    case 1:
        return (int)rng_below(&r->rng, MODEL_KEYS);
    case 2:
        return key;
    default:
        return key % RUN_CHAIN ? key - 1 : MODEL_NONE;
    }
}

static uint32_t random_epoch(struct run *r, int process, int pool)
{
    int space = r->model.pool[pool].space;

    if (rng_once_in(&r->rng, 100))
        return (uint32_t)rng_next(&r->rng);
    return r->process[process].epoch[space];
}

void run_random_reserve(struct run *r, int process, int pool, struct m_reserve *ret)
{
    int key = (int)rng_below(&r->rng, MODEL_KEYS);

    *ret = (struct m_reserve){
        .session = process,
        .pool = pool,
        .key = key,
        .parent = random_parent(r, key),
        .epoch = random_epoch(r, process, pool),
        .tenant = rng_below(&r->rng, MODEL_TENANTS),
    };
}

static struct attach *attach_of(struct run *r, int process, int pool)
{
    struct process *p = &r->process[process];

    if (!p->attach[pool])
        expect(session_attach(p->session, run_pool(r, pool), false, &p->attach[pool]) == 0,
               "cannot attach");
    return p->attach[pool];
}

static int reserve(struct run *r, const struct m_reserve *q, struct reservation *ret)
{
    struct attach *a = attach_of(r, q->session, q->pool);
    int expected;

    run_begin(r, q->pool);
    expected = model_ask_reserve(&r->model, q, run_tick(r, q->pool));
    pool_reserve(run_pool(r, q->pool), a, &r->keys[q->key],
                 q->parent == MODEL_NONE ? NULL : &r->keys[q->parent], q->epoch, q->tenant, ret);
    run_gone(r, expected == RESERVE_NEW ? M_EVICT : M_NOT_AT_ALL);
    model_reserved(&r->model, q, expected, ret->status, ret->slot, ret->ticket,
                   run_tick(r, q->pool));
    run_check(r);
    if (ret->status == RESERVE_NEW)
        run_keep_ticket(r, q->pool, ret->ticket);
    r->granted += ret->status == RESERVE_NEW;
    r->refused += ret->status == -ENOSPC;
    return ret->status;
}

void op_reserve(struct run *r)
{
    int process = run_pick(r, can_write), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct reservation got;
    struct m_reserve q;
    int status;

    if (process == MODEL_NONE)
        return;
    run_random_reserve(r, process, pool, &q);
    run_note(r, "process %d reserves key %d, parent %d, tenant %u in pool %d", process, q.key,
             q.parent, q.tenant, pool);
    status = reserve(r, &q, &got);
    run_note(r, ": %d, slot %d", status, (int)got.slot);
}

void run_prepare_commit(struct run *r, const struct m_commit *c)
{
    const struct m_pool *p = &r->model.pool[c->pool];
    uint64_t slot = c->ticket & ((1u << SHM_SLOT_BITS) - 1);

    if (slot < p->slots && p->slot[slot].ticket == c->ticket && p->slot[slot].state == M_RESERVED &&
        c->part < p->parts && c->bytes <= p->part_bytes)
        run_write(r, c->pool, (uint32_t)slot, c->ticket, c->part, c->bytes);
}

static int commit(struct run *r, const struct m_commit *c)
{
    uint8_t user[SHM_USER_BYTES];
    struct commit w;
    uint32_t tick = run_tick(r, c->pool);
    int got, want;

    run_prepare_commit(r, c);
    run_fill_commit(c, user, &w);
    run_begin(r, c->pool);
    r->interleave = false; /* the model would not know of an object that has just become visible */
    got = pool_commit(run_pool(r, c->pool), attach_of(r, c->session, c->pool), &w);
    want = model_commit(&r->model, c, tick);
    expect(got == want, "pool %d: commit of ticket %llx, part %u, %llu bytes: %d, not %d", c->pool,
           (unsigned long long)c->ticket, c->part, (unsigned long long)c->bytes, got, want);
    run_end(r, M_NOT_AT_ALL);
    return got;
}

/* A ticket of the last ones, or a live one, or nonsense. */
static uint64_t random_ticket(struct run *r, int pool)
{
    const struct m_pool *p = &r->model.pool[pool];
    uint32_t slot = rng_below(&r->rng, p->slots), i = rng_below(&r->rng, RUN_TICKETS);

    switch (rng_below(&r->rng, 20)) {
    case 0:
        return rng_next(&r->rng);
    case 1:
        return rng_below(&r->rng, 4);
    case 2:
        return p->slot[slot].ticket ^ 1;
    case 3:
    case 4:
        return r->tickets[i].ticket; /* maybe of another pool */
    }
    for (uint32_t n = 0; n < p->slots; n++, slot = (slot + 1) % p->slots)
        if (p->slot[slot].state == M_RESERVED)
            break;
    return p->slot[slot].ticket;
}

void run_random_commit(struct run *r, int process, int pool, struct m_commit *ret)
{
    const struct m_pool *p = &r->model.pool[pool];
    uint64_t ticket = random_ticket(r, pool), slot = ticket & ((1u << SHM_SLOT_BITS) - 1);
    uint64_t bytes = p->part_bytes;

    if (slot < p->slots && p->slot[slot].parts && !rng_once_in(&r->rng, 30))
        bytes = p->slot[slot].bytes;
    else if (rng_once_in(&r->rng, 4))
        bytes = rng_between(&r->rng, 1, (uint32_t)p->part_bytes);
    if (rng_once_in(&r->rng, 60))
        bytes = rng_once_in(&r->rng, 2) ? 0 : p->part_bytes + 1;
    *ret = (struct m_commit){
        .session = process,
        .pool = pool,
        .ticket = ticket,
        .part = rng_below(&r->rng, rng_once_in(&r->rng, 60) ? 66 : p->parts),
        .bytes = bytes,
        .meta = rng_next(&r->rng),
        .bad_user = rng_once_in(&r->rng, 60),
    };
}

void op_commit(struct run *r)
{
    int process = run_pick(r, can_write), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct m_commit c;
    int got;

    if (process == MODEL_NONE)
        return;
    run_random_commit(r, process, pool, &c);
    run_note(r, "process %d commits ticket %llx part %u of pool %d, %llu bytes", process,
             (unsigned long long)c.ticket, c.part, pool, (unsigned long long)c.bytes);
    got = commit(r, &c);
    run_note(r, ": %d", got);
}

static void commit_all(struct run *r, int process, int pool, uint64_t ticket)
{
    const struct m_pool *p = &r->model.pool[pool];
    struct m_commit c = {.session = process, .pool = pool, .ticket = ticket};

    c.bytes =
        rng_once_in(&r->rng, 3) ? rng_between(&r->rng, 1, (uint32_t)p->part_bytes) : p->part_bytes;
    c.meta = rng_next(&r->rng);
    for (uint32_t i = 0, first = rng_below(&r->rng, p->parts); i < p->parts; i++) {
        c.part = (first + i) % p->parts;
        commit(r, &c);
    }
}

/* A chain or the rest of one, as an engine does it. */
void op_publish(struct run *r)
{
    int process = run_pick(r, can_write), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct m_reserve q;

    if (process == MODEL_NONE)
        return;
    run_random_reserve(r, process, pool, &q);
    run_note(r, "process %d publishes from key %d in pool %d:", process, q.key, pool);
    do {
        struct reservation got;

        q.parent = q.key % RUN_CHAIN ? q.key - 1 : MODEL_NONE;
        run_note(r, " %d", reserve(r, &q, &got));
        if (got.status == RESERVE_NEW)
            commit_all(r, process, pool, got.ticket);
    } while (++q.key % RUN_CHAIN && q.key < MODEL_KEYS);
}

void op_abort(struct run *r)
{
    int process = run_pick(r, can_write), pool = (int)rng_below(&r->rng, MODEL_POOLS), got, want;
    uint64_t ticket;

    if (process == MODEL_NONE)
        return;
    ticket = random_ticket(r, pool);
    run_note(r, "process %d aborts ticket %llx of pool %d", process, (unsigned long long)ticket,
             pool);
    run_begin(r, pool);
    got = pool_abort(run_pool(r, pool), attach_of(r, process, pool), ticket);
    want = model_abort(&r->model, process, pool, ticket);
    expect(got == want, "pool %d: abort of ticket %llx: %d, not %d", pool,
           (unsigned long long)ticket, got, want);
    run_end(r, M_NOT_AT_ALL);
    run_note(r, ": %d", got);
}

/* Who has died with a reservation may have started transfers that still land: that is what quarantine is
 * for. */
void op_late_write(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS);
    const struct m_pool *p = &r->model.pool[pool];
    uint32_t n = 0;

    for (uint32_t i = 0; i < p->slots; i++) {
        if (p->slot[i].state != M_QUARANTINED || p->slot[i].until_ms <= r->model.now_ms)
            continue;
        run_write(r, pool, i, rng_next(&r->rng), 0, p->part_bytes);
        n++;
    }
    run_note(r, "late writes to %u quarantined slots of pool %d", n, pool);
}
