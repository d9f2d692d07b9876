/* SPDX-License-Identifier: Apache-2.0 */
/* Taking objects out, epochs, background work, time. */
#include <string.h>

#include "core.h"
#include "daemon/index.h"
#include "fail.h"

static uint32_t count_gone(const struct run *r, int pool)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r->model.pool[pool].slots; i++)
        n += r->model.pool[pool].slot[i].gone;
    return n;
}

static bool is_idle(const struct m_slot *s)
{
    return (s->state == M_LIVE || s->gone) && !s->touched;
}

void op_evict(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct m_pool *p = &r->model.pool[pool];
    uint32_t want = rng_between(&r->rng, 1, rng_once_in(&r->rng, 4) ? p->slots : 8), got;

    run_note(r, "evict %u of pool %d", want, pool);
    run_begin(r, pool);
    got = pool_evict(run_pool(r, pool), want, HISTORY_EVICTED);
    run_end(r, M_EVICT);
    run_note(r, ": %u", got);
    expect(got == count_gone(r, pool) && got <= want, "pool %d: %u of %u evicted, %u have left",
           pool, got, want, count_gone(r, pool));
    expect(got || !model_had_idle(&r->model, pool, run_tick(r, pool)),
           "pool %d: nothing was evicted although somebody is not held", pool);
}

void op_remove_keys(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS), key = (int)rng_below(&r->rng, MODEL_KEYS);
    struct pool *p = run_pool(r, pool);
    struct shm_entry *e = index_find(p->index, &r->keys[key], p->space->epoch);
    int where = r->model.pool[pool].where[key];
    uint32_t slot, got;

    expect((e != NULL) == (where != MODEL_NONE), "pool %d: key %d is %sthere", pool, key,
           e ? "" : "not ");
    if (!e)
        return;
    slot = shm_word_slot(shm_load64(&e->word));
    expect((int)slot == where, "pool %d: key %d is in slot %u, not %d", pool, key, slot, where);
    run_note(r, "remove key %d from slot %u of pool %d", key, slot, pool);
    run_begin(r, pool);
    got = pool_remove(p, &slot, 1, HISTORY_REMOVED, 0);
    run_end(r, M_REMOVE);
    run_note(r, ": %u", got);
    expect(got == count_gone(r, pool), "pool %d: %u removed, %u have left", pool, got,
           count_gone(r, pool));
    expect(got || !is_idle(&r->model.pool[pool].slot[slot]),
           "pool %d: slot %u was not removed, and nobody holds it", pool, slot);
}

/* All, or those of a tenant; in any order, with slots that are not live and some that come twice. */
void op_remove_many(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct m_pool *p = &r->model.pool[pool];
    bool all = rng_once_in(&r->rng, 3);
    uint32_t tenant = rng_below(&r->rng, MODEL_TENANTS), slots[2 * MODEL_SLOTS], n = 0, got;

    for (uint32_t i = 0; i < p->slots; i++)
        if (all || p->slot[i].tenant == tenant)
            slots[n++] = i;
    for (uint32_t i = 0; i < n / 8; i++)
        slots[n + i] = slots[rng_below(&r->rng, n)];
    n += n / 8;
    for (uint32_t i = n; i > 1 && rng_once_in(&r->rng, 2); i--) {
        uint32_t k = rng_below(&r->rng, i), x = slots[k];

        slots[k] = slots[i - 1];
        slots[i - 1] = x;
    }
    run_note(r, "remove %s of pool %d", all ? "all" : "a tenant", pool);
    run_begin(r, pool);
    got = pool_remove(run_pool(r, pool), slots, n, HISTORY_REMOVED, 0);
    run_end(r, M_REMOVE);
    run_note(r, ": %u", got);
    expect(got == count_gone(r, pool), "pool %d: %u removed, %u have left", pool, got,
           count_gone(r, pool));
    for (uint32_t i = 0; i < p->slots; i++) {
        const struct m_slot *s = &p->slot[i];

        expect(!s->gone || all || s->tenant == tenant,
               "pool %d: slot %u of tenant %u was removed, not of tenant %u", pool, i, s->tenant,
               tenant);
        expect(!is_idle(s) || s->gone || !(all || s->tenant == tenant),
               "pool %d: slot %u was not removed, and nobody holds it", pool, i);
    }
}

void op_reset(struct run *r)
{
    int space = (int)rng_below(&r->rng, MODEL_SPACES);

    if (!rng_once_in(&r->rng, 4))
        return;
    run_note(r, "space %d is reset", space);
    run_begin(r, 0);
    space_reset(&r->core->spaces[space]);
    model_reset(&r->model, space);
    run_end(r, M_NOT_AT_ALL);
    expect(r->core->spaces[space].epoch == r->model.space[space].epoch, "space %d is at epoch %u",
           space, r->core->spaces[space].epoch);
}

/* ---- background */

/* After all work is done: nothing of an older epoch is left but what was held, and enough slots are
 * free if they were not (and nobody came in between). */
static void check_work_done(struct run *r, int pool, bool was_low)
{
    const struct m_pool *p = &r->model.pool[pool];
    uint32_t free = model_count(&r->model, pool, M_FREE);
    bool idle = model_had_idle(&r->model, pool, run_tick(r, pool));

    for (uint32_t i = 0; i < p->slots; i++) {
        const struct m_slot *s = &p->slot[i];

        expect(s->state != M_LIVE || s->held_since_reset ||
                   s->epoch == r->model.space[p->space].epoch,
               "pool %d: slot %u of epoch %u was not purged", pool, i, s->epoch);
    }
    expect(!was_low || free >= p->high_water || !idle,
           "pool %d: %u slots are free, fewer than high_water (%u), and somebody unheld could go",
           pool, free, p->high_water);
    expect(run_pool(r, pool)->count[SHM_SLOT_FREE] == free,
           "pool %d: %u slots are free, not %u: their quarantine is over", pool,
           run_pool(r, pool)->count[SHM_SLOT_FREE], free);
}

/* The core's own counts of victims: the model does not see whether an object of an older epoch was
 * purged or evicted. */
static void count_evicted(const struct run *r, uint64_t counts[MODEL_POOLS])
{
    for (int i = 0; i < MODEL_POOLS; i++)
        counts[i] = run_pool(r, i)->stats.evicted;
}

/* `was_low`: room was made in the pool, or should have been. */
static bool work(struct run *r, bool was_low[MODEL_POOLS])
{
    uint64_t before[MODEL_POOLS], after[MODEL_POOLS];
    bool more;

    count_evicted(r, before);
    run_begin(r, (int)rng_below(&r->rng, MODEL_POOLS));
    more = core_work(r->core);
    model_linger(&r->model);
    model_release(&r->model);
    run_end(r, M_RESET);
    count_evicted(r, after);
    for (int i = 0; i < MODEL_POOLS; i++) {
        const struct m_pool *p = &r->model.pool[i];
        uint32_t free = model_count(&r->model, i, M_FREE), n = (uint32_t)(after[i] - before[i]);

        expect(!n || ((was_low[i] || free - n < p->low_water) && free <= p->high_water),
               "pool %d: %u were evicted in the background, %u are free, between %u and %u wanted",
               i, n, free, p->low_water, p->high_water);
        was_low[i] |= n || free < p->low_water;
    }
    return more;
}

void op_work(struct run *r)
{
    bool was_low[MODEL_POOLS] = {false}, disturbed = false;
    uint32_t rounds = 1;

    run_note(r, "background work");
    for (; work(r, was_low); rounds++) {
        expect(rounds < 1000, "the background work does not end");
        disturbed |= r->model.disturbed;
    }
    disturbed |= r->model.disturbed;
    for (int i = 0; i < MODEL_POOLS; i++)
        check_work_done(r, i, was_low[i] && !disturbed);
    run_note(r, ", %u rounds", rounds);
}

void op_tick(struct run *r)
{
    run_note(r, "tick");
    core_tick(r->core);
    model_check_pins(&r->model);
}

void op_wait(struct run *r)
{
    uint64_t ms = rng_once_in(&r->rng, 8) ? rng_below(&r->rng, 40000) : rng_below(&r->rng, 3000);

    run_note(r, "%llu ms pass", (unsigned long long)ms);
    r->model.now_ms += ms;
    r->now_ns += ms * 1000000;
}

void op_deadline(struct run *r)
{
    int64_t got, want;

    run_begin(r, 0);
    got = core_next_deadline(r->core);
    model_linger(&r->model);
    model_release(&r->model);
    run_end(r, M_NOT_AT_ALL);
    want = model_deadline(&r->model);
    run_note(r, "next deadline in %lld ms", (long long)got);
    expect(got == want, "the next deadline is in %lld ms, not %lld", (long long)got,
           (long long)want);
}
