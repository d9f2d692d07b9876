/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking live objects out of a pool. The core's side of the pin protocol (A0..A4, shm/layout.h), in
 * batches: one fence and two passes over the counters for up to BATCH victims.
 *
 * Counters lie in memory that their owners can truncate or fill with anything. A pass over one
 * source runs under a guard; a source that faults belongs to a session that has destroyed its own
 * pins: it is dropped and the session broken. Values are only compared, never used as an index.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/guard.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"

#define BATCH 32u

/* A full search that found nothing and took longer than this is not repeated at once: a writer that
 * asks for slots of a pool that is pinned all over would otherwise own the core thread. */
#define SEARCH_NS 50000u

/* Passes over all candidates, while some turn out to have been used since. */
#define PASSES 4

/* Until then only so many candidates are looked at: enough to notice a release before long. */
#define SEARCH_SOME 256u

/* The most that one search looks at: a pinned candidate costs microseconds. Those that were looked
 * at are the youngest afterwards, so the next search goes on behind them. */
#define SEARCH_MOST 16384u

struct batch {
    uint32_t n;
    uint32_t slot[BATCH];
    uint32_t tick[BATCH]; /* last use: of the policy, then of the youngest stamp */
    bool pinned[BATCH];
};

struct pass {
    struct batch *b;
    const struct shm_pin *pins;
    uint32_t now;
};

/* A0 and A3: acquire, pairs with the release decrement of an unpin: its reads are over. */
static uint32_t counter(const struct shm_pin *pin)
{
    return atomic_load_explicit(&pin->count, memory_order_acquire);
}

static int look(void *arg)
{
    struct pass *x = arg;

    for (uint32_t i = 0; i < x->b->n; i++)
        __builtin_prefetch(&x->pins[x->b->slot[i]], 0, 3);
    for (uint32_t i = 0; i < x->b->n; i++) {
        const struct shm_pin *pin = &x->pins[x->b->slot[i]];
        uint32_t stamp = shm_load32(&pin->stamp);

        if (counter(pin))
            x->b->pinned[i] = true;
        /* By distance from now, so that stamps of the future and from before a wrap do not
         * count. */
        if (x->now - stamp < x->now - x->b->tick[i])
            x->b->tick[i] = stamp;
    }
    return 0;
}

int pool_hold_new(struct pool *p)
{
    size_t bytes = shm_pins_bytes(p->slots);
    void *m;
    int r;

    if (p->held)
        return 0;
    m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (m == MAP_FAILED)
        return -errno;
    r = pool_add_source(p, m, bytes, NULL);
    if (r < 0)
        munmap(m, bytes);
    else
        p->held = m;
    return r;
}

void pool_hold(struct pool *p, uint32_t slot, int by)
{
    struct shm_pin *pin = &p->held->pins[slot];

    atomic_store_explicit(&pin->count, shm_load32(&pin->count) + (uint32_t)by,
                          memory_order_relaxed);
}

int pool_add_source(struct pool *p, struct shm_pins *pins, size_t bytes, struct attach *a)
{
    if (p->n_sources == p->max_sources) {
        uint32_t max = p->max_sources ? p->max_sources * 2 : 16;
        struct pin_source *more = reallocarray(p->sources, max, sizeof(*more));

        if (!more)
            return -ENOMEM;
        p->sources = more;
        p->max_sources = max;
    }
    p->sources[p->n_sources++] = (struct pin_source){.pins = pins, .bytes = bytes, .attach = a};
    return 0;
}

void pool_drop_sources(struct pool *p, const struct attach *a)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < p->n_sources; i++)
        if (p->sources[i].attach != a)
            p->sources[n++] = p->sources[i];
    p->n_sources = n;
}

/* One pass over all counters of the batch. */
static void look_at_all(struct pool *p, struct batch *b)
{
    struct pass x = {.b = b, .now = shm_load32(&p->index->tick)};

    memset(b->pinned, 0, sizeof(b->pinned));
    for (uint32_t i = 0; i < p->n_sources;) {
        struct pin_source *src = &p->sources[i];
        struct attach *a = src->attach;

        x.pins = src->pins->pins;
        if (guard_call(look, &x, src->pins, src->bytes) == 0) {
            i++;
            continue;
        }
        pool_drop_sources(p, a);
        session_break(
            a->session,
            "its pin segment cannot be read: truncated, or a hole that no page is left for");
        i = 0; /* what the faulting pass wrote is a mixture, but each mark in it is a safe one */
    }
}

static uint32_t pins_of(struct pool *p, uint32_t slot)
{
    struct batch b = {.n = 1, .slot = {slot}};

    look_at_all(p, &b);
    return b.pinned[0];
}

uint32_t pool_pins_of(struct pool *p, uint32_t slot)
{
    uint32_t n = 0;

    if (!pins_of(p, slot)) /* guarded; also drops what cannot be read */
        return 0;
    for (uint32_t i = 0; i < p->n_sources; i++) {
        struct shm_pin pin;

        if (p->sources[i].attach &&
            guard_copy(&pin, &p->sources[i].pins->pins[slot], sizeof(pin)) == 0)
            n += shm_load32(&pin.count);
    }
    return n;
}

struct marking {
    const struct pool *pool;
    const struct shm_pins *pins;
    uint8_t *marks;
};

static int mark(void *arg)
{
    struct marking *x = arg;

    for (uint32_t i = 0; i < x->pool->slots; i++)
        if (counter(&x->pins->pins[i]))
            x->marks[i / 8] |= (uint8_t)(1 << i % 8);
    return 0;
}

/* Anybody may ask for this, so it takes at most a twentieth of the core's time. */
uint64_t pool_count_pinned(struct pool *p)
{
    uint64_t start = core_now_ns(p->core), n = 0;
    struct marking x;

    if (start < p->pinned_until_ns) /* live ones may have left since */
        return p->pinned < p->count[SHM_SLOT_LIVE] ? p->pinned : p->count[SHM_SLOT_LIVE];
    x = (struct marking){.pool = p, .marks = calloc(p->slots / 8 + 1, 1)};
    if (!x.marks)
        return 0;
    for (uint32_t i = 0; i < p->n_sources; i++) {
        if (!p->sources[i].attach)
            continue;
        x.pins = p->sources[i].pins;
        guard_call(mark, &x, x.pins, p->sources[i].bytes); /* eviction deals with what faults */
    }
    for (uint32_t i = 0; i < p->slots; i++)
        n += p->table->slots[i].state == SHM_SLOT_LIVE && (x.marks[i / 8] >> i % 8 & 1);
    free(x.marks);
    p->pinned = n;
    p->pinned_until_ns = start + 20 * (core_now_ns(p->core) - start);
    return n;
}

/* A live, hidden object that nobody holds: A4. */
static void drop(struct pool *p, uint32_t slot, enum history_event why, uint32_t detail)
{
    struct shm_slot *t = &p->table->slots[slot];

    if (why == HISTORY_EVICTED)
        detail = spill_is_unwritten(p, slot);
    history_add(p->history, &p->metas->metas[slot].key, why, detail, core_now_ms(p->core));
    spill_left(p, slot, why == HISTORY_REMOVED && detail == REMOVE_FORGET);
    index_remove(p->index, t->line); /* A4 */
    slot_unlink_parent(p, slot);
    p->slot[slot].use++;
    p->slot[slot].children = 0;
    slot_set(p, slot, SHM_SLOT_FREE);
    if (why == HISTORY_EVICTED)
        p->stats.evicted++;
    else if (why == HISTORY_RESET)
        p->stats.reset++;
    else
        p->stats.removed++;
}

/* A1..A4 for the slots of a batch, none of which the policy has. Those that are pinned are LIVE
 * again afterwards, and queued as used now; so are, without `heads`, those that still have
 * children. Returns how many were dropped. */
static uint32_t take_out(struct pool *p, struct batch *b, bool heads, enum history_event why,
                         uint32_t detail)
{
    uint32_t dropped = 0, now = shm_load32(&p->index->tick);

    if (!b->n)
        return 0;
    for (uint32_t i = 0; i < b->n; i++)
        index_hide(p->index, p->table->slots[b->slot[i]].line); /* A1 */
    shm_full_fence();                                           /* A2 pairs with R3 */
    look_at_all(p, b);                                          /* A3 */
    for (uint32_t i = 0; i < b->n; i++) {
        if (b->pinned[i] || (!heads && p->slot[b->slot[i]].children)) {
            index_restore(p->index, p->table->slots[b->slot[i]].line);
            slot_unqueue(p, b->slot[i]); /* its last child may have left in this very batch */
            slot_queue(p, b->slot[i], b->pinned[i] ? now : b->tick[i], false);
            p->stats.restored += b->pinned[i];
            continue;
        }
        drop(p, b->slot[i], why, detail);
        dropped++;
    }
    return dropped;
}

/* A0: sorts out the pinned ones and those used since the policy last heard of them. True: there are
 * some of the latter. */
static bool sift(struct pool *p, struct batch *b)
{
    bool used = false;
    uint32_t n = 0, now = shm_load32(&p->index->tick);
    struct batch before = *b;

    look_at_all(p, b);
    for (uint32_t i = 0; i < b->n; i++) {
        uint32_t s = b->slot[i];

        if (b->pinned[i]) {
            slot_queue(p, s, now, false);
            spill_touched(p, s);
            p->stats.pins_in_way++;
        } else if (b->tick[i] != before.tick[i]) {
            slot_queue(p, s, b->tick[i], false);
            spill_touched(p, s);
            used = true;
        } else {
            b->tick[n] = b->tick[i];
            b->slot[n++] = s;
        }
    }
    b->n = n;
    return used;
}

/* The parent that would be the next candidate once `slot` is gone: nothing else hangs on it and it
 * was not used later. A chain leaves tail first, but in one batch. */
static uint32_t next_up(const struct pool *p, uint32_t slot)
{
    const struct slot *s = &p->slot[slot];
    const struct slot *up = s->parent == SLOT_NONE ? NULL : &p->slot[s->parent];

    if (!up || up->use != s->parent_use || up->children != 1 || (int32_t)(up->tick - s->tick) > 0 ||
        p->table->slots[s->parent].state != SHM_SLOT_LIVE)
        return SLOT_NONE;
    return s->parent;
}

/* Drops the pinned ones from the batch. */
static void sift_pinned(struct pool *p, struct batch *b)
{
    uint32_t n = 0;

    if (!b->n)
        return;
    look_at_all(p, b);
    for (uint32_t i = 0; i < b->n; i++) {
        if (b->pinned[i])
            continue;
        b->tick[n] = b->tick[i];
        b->slot[n++] = b->slot[i];
    }
    b->n = n;
}

/* Looks at `left` candidates at most. *ret_used: some have been used since the policy last heard of
 * them. */
static uint32_t evict_pass(struct pool *p, uint32_t want, uint32_t left, enum history_event why,
                           bool *ret_used)
{
    uint32_t freed = 0;
    uint32_t now = shm_load32(&p->index->tick);

    while (freed < want && left) {
        struct batch b = {.n = 0};

        while (b.n < BATCH && b.n < want - freed && left) {
            uint32_t tick, s = p->ops->take(p->policy, now, &tick);

            if (s == SLOT_NONE)
                break;
            left--;
            p->slot[s].queued = false;
            for (; s != SLOT_NONE && b.n < BATCH && b.n < want - freed; s = next_up(p, s)) {
                b.tick[b.n] = p->slot[s].tick;
                b.slot[b.n++] = s;
            }
        }
        if (!b.n)
            break;
        *ret_used |= sift(p, &b);
        freed += take_out(p, &b, false, why, 0);
    }
    return freed;
}

static uint32_t evict_queued(struct pool *p, uint32_t want, uint32_t most, enum history_event why)
{
    uint32_t freed = 0;
    bool used = true;

    /* Now that the policy knows, they are candidates like any other; perhaps there are no others.
     * More than twice only while readers come and go all the time. */
    for (int passes = 0; passes < PASSES && freed < want && used; passes++) {
        used = false;
        freed += evict_pass(p, want - freed, most, why, &used);
    }
    return freed;
}

/* Objects with resident children are no candidates (I2); but when all those children are pinned, an
 * unpinned head must go rather than refuse a commit. */
static uint32_t evict_inner(struct pool *p, uint32_t want, enum history_event why)
{
    uint32_t freed = 0, looked = 0, most = p->slots < SEARCH_MOST ? p->slots : SEARCH_MOST;

    while (looked < most && freed < want) {
        struct batch b = {.n = 0};

        for (; looked < most && b.n < BATCH && b.n < want - freed; looked++) {
            uint32_t s = p->inner_cursor;

            p->inner_cursor = s + 1 == p->slots ? 0 : s + 1;
            if (p->table->slots[s].state != SHM_SLOT_LIVE || p->slot[s].queued)
                continue;
            b.tick[b.n] = p->slot[s].tick;
            b.slot[b.n++] = s;
        }
        sift_pinned(p, &b);
        freed += take_out(p, &b, true, why, 0);
    }
    return freed;
}

uint32_t pool_evict(struct pool *p, uint32_t want, enum history_event why)
{
    uint32_t freed, candidates = p->ops->count(p->policy);
    uint32_t all = candidates < SEARCH_MOST ? candidates : SEARCH_MOST;
    uint64_t start = core_now_ns(p->core), took;

    if (start < p->exhausted_until_ns)
        return evict_queued(p, want, all < SEARCH_SOME ? all : SEARCH_SOME, why);
    freed = evict_queued(p, want, all, why);
    if (!freed && all == candidates) /* else a tail may still be found, behind those looked at */
        freed = evict_inner(p, want, why);
    took = core_now_ns(p->core) - start;
    if (!freed && took > SEARCH_NS)
        p->exhausted_until_ns = start + 8 * took;
    return freed;
}

static bool in_batch(const struct batch *b, uint32_t slot)
{
    for (uint32_t i = 0; i < b->n; i++)
        if (b->slot[i] == slot)
            return true;
    return false;
}

uint32_t pool_remove(struct pool *p, const uint32_t *slots, uint32_t n, enum history_event why,
                     uint32_t detail)
{
    uint32_t removed = 0;

    for (uint32_t i = 0; i < n;) {
        struct batch b = {.n = 0};

        for (; i < n && b.n < BATCH; i++) {
            if (p->table->slots[slots[i]].state != SHM_SLOT_LIVE || in_batch(&b, slots[i]))
                continue;
            slot_unqueue(p, slots[i]);
            b.tick[b.n] = p->slot[slots[i]].tick;
            b.slot[b.n++] = slots[i];
        }
        removed += take_out(p, &b, true, why, detail);
    }
    return removed;
}

bool pool_keep_free(struct pool *p)
{
    uint32_t free = p->count[SHM_SLOT_FREE];
    uint32_t step = 4 * BATCH, want = p->high_water - free;

    if (free < p->low_water)
        p->making_room = true;
    if (!p->making_room)
        return false;
    p->making_room = free < p->high_water &&
                     pool_evict(p, want < step ? want : step, HISTORY_EVICTED) > 0 &&
                     p->count[SHM_SLOT_FREE] < p->high_water;
    return p->making_room;
}
