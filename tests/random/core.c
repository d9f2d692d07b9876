/* SPDX-License-Identifier: Apache-2.0 */
/* What the operations have in common: bytes of objects, the model's turn, the walk. */
#include "core.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fail.h"
#include "tests/unit/core_check.h"

void run_note(struct run *r, const char *format, ...)
{
    char *line = r->log[r->op % RUN_LOG];
    size_t n = strlen(line);
    va_list args;

    va_start(args, format);
    vsnprintf(line + n, sizeof(r->log[0]) - n, format, args);
    va_end(args);
}

struct pool *run_pool(const struct run *r, int pool)
{
    return r->core->pools[pool];
}

uint32_t run_tick(const struct run *r, int pool)
{
    return shm_load32(&run_pool(r, pool)->index->tick);
}

/* ---- objects */

static uint64_t *words_of(const struct run *r, int pool, uint32_t slot, uint32_t part)
{
    const struct pool *p = run_pool(r, pool);

    return (uint64_t *)(void *)(p->base[part].base + slot * p->part_bytes);
}

static uint64_t word_of(uint64_t ticket, int pool, uint32_t part, uint64_t i)
{
    return rng_mix(ticket * 0x9e3779b97f4a7c15ull + ((uint64_t)pool << 40) +
                   ((uint64_t)part << 32) + i);
}

/* Whole words up to `bytes`; the rest of the slot stays what it was. */
void run_write(struct run *r, int pool, uint32_t slot, uint64_t ticket, uint32_t part,
               uint64_t bytes)
{
    uint64_t *w = words_of(r, pool, slot, part);

    for (uint64_t i = 0; i < bytes / sizeof(*w); i++)
        w[i] = word_of(ticket, pool, part, i);
}

/* The metadata of an object is made from one number, so that a mixture is recognised. */
void run_fill_commit(const struct m_commit *c, uint8_t user[SHM_USER_BYTES], struct commit *ret)
{
    for (uint32_t i = 0; i < SHM_USER_BYTES; i++)
        user[i] = (uint8_t)(c->meta + 3 * i);
    *ret = (struct commit){
        .ticket = c->ticket,
        .part = c->part,
        .bytes = c->bytes,
        .position = rng_mix(c->meta),
        .layout = rng_mix(c->meta + 1),
        .checksum = rng_mix(c->meta + 2),
        .user_bytes = c->bad_user ? SHM_USER_BYTES + 1 : (uint32_t)(c->meta % (SHM_USER_BYTES + 1)),
        .user = user,
    };
}

static void verify_meta(struct run *r, int pool, uint32_t slot)
{
    const struct shm_meta *m = &run_pool(r, pool)->metas->metas[slot];
    const struct m_slot *s = &r->model.pool[pool].slot[slot];
    const struct m_commit c = {.meta = s->meta, .bytes = s->bytes};
    uint8_t user[SHM_USER_BYTES];
    struct commit w;
    bool parent_fits;

    run_fill_commit(&c, user, &w);
    parent_fits =
        s->parent_key == MODEL_NONE
            ? !m->has_parent
            : m->has_parent && memcmp(&m->parent, &r->keys[s->parent_key], sizeof(m->parent)) == 0;
    expect(memcmp(&m->key, &r->keys[s->key], sizeof(m->key)) == 0 && m->epoch == s->epoch &&
               m->tenant == s->tenant && parent_fits,
           "I1: pool %d: slot %u: metadata of another reservation", pool, slot);
    expect(m->position == w.position && m->layout == w.layout && m->checksum == w.checksum &&
               m->bytes == s->bytes && m->user_bytes == w.user_bytes &&
               memcmp(m->user, user, w.user_bytes) == 0,
           "I1: pool %d: slot %u: metadata of another commit", pool, slot);
}

void run_verify(struct run *r, int pool, uint32_t slot)
{
    const struct m_slot *s = &r->model.pool[pool].slot[slot];

    for (uint32_t part = 0; part < r->model.pool[pool].parts; part++) {
        const uint64_t *w = words_of(r, pool, slot, part);

        for (uint64_t i = 0; i < s->bytes / sizeof(*w); i++)
            expect(w[i] == word_of(s->ticket, pool, part, i),
                   "I1: pool %d: slot %u (key %d): wrong bytes at word %llu of part %u", pool, slot,
                   s->key, (unsigned long long)i, part);
    }
    verify_meta(r, pool, slot);
}

/* ---- processes */

int run_pick(struct run *r, bool (*passes)(struct run *r, int process))
{
    uint32_t first = rng_below(&r->rng, MODEL_SESSIONS);

    for (uint32_t i = 0; i < MODEL_SESSIONS; i++) {
        int k = (int)((first + i) % MODEL_SESSIONS);

        if (r->process[k].session && r->process[k].alive && passes(r, k))
            return k;
    }
    return MODEL_NONE;
}

bool can_ask(struct run *r, int process)
{
    return !r->process[process].doomed && r->model.session[process].state == M_ATTACHED;
}

bool can_write(struct run *r, int process)
{
    return can_ask(r, process) && r->model.session[process].writer;
}

/* ---- the model's turn */

void run_begin(struct run *r, int pool)
{
    model_begin(&r->model);
    r->focus = pool;
    r->interleave = true;
}

static bool is_there(const struct pool *p, uint32_t slot, const struct m_slot *s)
{
    return p->table->slots[slot].ticket == s->ticket &&
           p->table->slots[slot].state == SHM_SLOT_LIVE;
}

/* Tells the model which live objects have left. `old`: of older epochs only. */
static void tell_gone(struct run *r, int pool, enum m_reason reason, bool old)
{
    struct m_pool *p = &r->model.pool[pool];

    for (uint32_t i = 0; i < p->slots; i++) {
        struct m_slot *s = &p->slot[i];

        if (s->state != M_LIVE || (old && s->epoch == r->model.space[p->space].epoch))
            continue;
        s->gone = !is_there(run_pool(r, pool), i, s);
    }
    model_gone(&r->model, pool, reason, run_tick(r, pool));
}

/* Pins that were good before, or became so meanwhile. */
static void check_pins(struct run *r)
{
    for (uint32_t i = 0; i < r->n_pins; i++) {
        const struct pin *pin = &r->pins[i];
        const struct m_slot *s = &r->model.pool[pin->pool].slot[pin->slot];

        expect(pin->half || s->ticket != pin->ticket || !s->gone,
               "I3: pool %d: slot %u (key %d) has left, and process %d has pinned it", pin->pool,
               pin->slot, s->key, pin->process);
    }
}

static void check_counts(struct run *r, int pool)
{
    const struct model *m = &r->model;
    const uint32_t *n = run_pool(r, pool)->count;
    uint32_t free = model_count(m, pool, M_FREE), quarantined = model_count(m, pool, M_QUARANTINED);
    uint32_t live = model_count(m, pool, M_LIVE), reserved = model_count(m, pool, M_RESERVED);

    expect(
        n[SHM_SLOT_LIVE] == live && n[SHM_SLOT_RESERVED] == reserved &&
            n[SHM_SLOT_FREE] + n[SHM_SLOT_QUARANTINED] == free + quarantined &&
            n[SHM_SLOT_QUARANTINED] >= quarantined && !n[SHM_SLOT_IN_FLIGHT],
        "I4: pool %d: %u free, %u reserved, %u live, %u quarantined; it should be %u, %u, %u, %u",
        pool, n[SHM_SLOT_FREE], n[SHM_SLOT_RESERVED], n[SHM_SLOT_LIVE], n[SHM_SLOT_QUARANTINED],
        free, reserved, live, quarantined);
}

/* With M_RESET, the core has worked in the background: it purges older epochs and then looks after free
 * slots, in all pools. */
void run_gone(struct run *r, enum m_reason reason)
{
    r->interleave = false;
    for (int i = 0; i < MODEL_POOLS; i++) {
        if (reason == M_RESET) {
            tell_gone(r, i, M_RESET, true);
            tell_gone(r, i, M_EVICT, false);
        } else {
            tell_gone(r, i, i == r->focus ? reason : M_NOT_AT_ALL, false);
        }
    }
    check_pins(r);
}

void run_check(struct run *r)
{
    for (int i = 0; i < MODEL_POOLS; i++)
        check_counts(r, i);
    for (int i = 0; i < MODEL_SESSIONS; i++)
        expect((r->process[i].session != NULL) == (r->model.session[i].state != M_NOBODY),
               "session of process %d: %s", i,
               r->process[i].session ? "not buried" : "buried too soon");
}

void run_end(struct run *r, enum m_reason reason)
{
    run_gone(r, reason);
    run_check(r);
}

/* ---- the walk */

static void check_key(struct run *r, int pool, int key)
{
    const struct m_pool *p = &r->model.pool[pool];
    uint32_t epoch = r->model.space[p->space].epoch;
    int slot = p->where[key];
    uint8_t want = slot == MODEL_NONE                  ? SHM_FOUND_MISS
                   : p->slot[slot].state == M_RESERVED ? SHM_FOUND_PENDING
                                                       : SHM_FOUND_RAM;
    uint8_t state;

    shm_lookup(run_pool(r, pool)->index, NULL, &r->keys[key], 1, epoch, &state);
    expect(state == want, "pool %d: key %d is in state %u, not %u", pool, key, state, want);
    shm_lookup(run_pool(r, pool)->index, NULL, &r->keys[key], 1, epoch - 1, &state);
    expect(state == SHM_FOUND_MISS, "pool %d: key %d is hit in an older epoch", pool, key);
}

static void check_stats(struct run *r, int pool)
{
    const struct pool_stats *s = &run_pool(r, pool)->stats;
    const struct m_pool *p = &r->model.pool[pool];

    /* An object of an older epoch may leave either way in the background. */
    expect(s->committed == p->committed && s->evicted + s->reset == p->evicted + p->reset &&
               s->removed == p->removed && s->aborted == p->aborted && s->orphaned == p->orphaned,
           "pool %d: statistics differ from what has happened", pool);
}

static bool rings_wait(const struct run *r)
{
    for (int i = 0; i < MODEL_SESSIONS; i++) {
        const struct process *p = &r->process[i];

        if (p->session && !p->doomed && r->model.session[i].state == M_ATTACHED && process_waits(p))
            return true;
    }
    return false;
}

static bool somebody_doomed(const struct run *r)
{
    for (int i = 0; i < MODEL_SESSIONS; i++)
        if (r->process[i].session && r->process[i].doomed)
            return true;
    return false;
}

void run_walk(struct run *r)
{
    char why[512];

    expect(core_check(r->core, why, sizeof(why)) == 0, "I4: %s", why);
    for (int i = 0; i < MODEL_POOLS; i++) {
        for (int k = 0; k < MODEL_KEYS; k++)
            check_key(r, i, k);
        check_stats(r, i);
    }
    for (uint32_t i = 0; i < r->n_pins; i++)
        run_verify_pin(r, &r->pins[i]);
    if (!somebody_doomed(r))
        expect(sessions_have_work(r->core) == rings_wait(r),
               "requests wait in rings, and nobody sees them (or the other way round)");
}
