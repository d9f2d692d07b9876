/* SPDX-License-Identifier: Apache-2.0 */
/* Readers: pins through their own segments or through the socket, at any moment. */
#include "core.h"
#include "fail.h"

enum {
    DIRTY_COUNT = 1u << 30, /* so that counting on from garbage never comes round to 0 */
};

static struct shm_pins *pins_of(const struct run *r, int process, int pool, enum m_source source)
{
    const struct attach *a = r->process[process].attach[pool];

    return source == M_SOCKET ? a->own : a->map.addr;
}

static bool has_segment(const struct run *r, int process, int pool)
{
    const struct process *p = &r->process[process];

    return p->session && p->alive && p->attach[pool] && p->attach[pool]->segment.fd >= 0 &&
           !r->model.session[process].lost[pool];
}

static struct m_counters *counters(struct run *r, int process, int pool, enum m_source source)
{
    return &r->model.session[process].counters[pool][source];
}

static void tell_pin(struct run *r, const struct pin *pin, int delta, bool stamped)
{
    struct m_counters *c = counters(r, pin->process, pin->pool, pin->source);

    model_count_pin(&r->model, pin->process, pin->pool, pin->source, pin->slot,
                    c->count[pin->slot] + (uint32_t)delta,
                    stamped ? run_tick(r, pin->pool) : c->stamp[pin->slot]);
}

/* An object that is pinned is there, whole; one that was pinned before its commit, if that has come. */
void run_verify_pin(struct run *r, const struct pin *pin)
{
    const struct m_slot *s = &r->model.pool[pin->pool].slot[pin->slot];
    const struct shm_slot *t = &run_pool(r, pin->pool)->table->slots[pin->slot];

    if (pin->half || (pin->reserved && (s->ticket != pin->ticket || s->state != M_LIVE)))
        return;
    expect(s->ticket == pin->ticket && s->state == M_LIVE && t->ticket == pin->ticket &&
               t->state == SHM_SLOT_LIVE,
           "I3: pool %d: slot %u is pinned by process %d and holds another object", pin->pool,
           pin->slot, pin->process);
    run_verify(r, pin->pool, pin->slot);
}

/* Keeps a pin that the core's side has given. */
static void keep(struct run *r, const struct pin *pin)
{
    r->pins[r->n_pins++] = *pin;
    tell_pin(r, pin, 1, !pin->half);
    run_verify_pin(r, pin);
    r->pinned += !pin->half;
}

/* `strict`: nothing else happens meanwhile, so what is there is pinned. In the middle of the core's work, a
 * miss is always a right answer. */
static void pin_keys(struct run *r, struct pin pin, const int *numbers, uint32_t n, bool all,
                     bool strict)
{
    struct shm_pinned got[RUN_CHAIN];
    struct shm_key keys[RUN_CHAIN];
    struct shm_index *index = run_pool(r, pin.pool)->index;
    uint32_t epoch = r->process[pin.process].epoch[r->model.pool[pin.pool].space];
    size_t filled, held, counted = 0;

    if (r->n_pins + n > RUN_PINS)
        return;
    for (uint32_t i = 0; i < n; i++)
        keys[i] = r->keys[numbers[i]];
    filled = shm_pin_keys(index, pins_of(r, pin.process, pin.pool, pin.source), keys, n, epoch, all,
                          7, got, &held);
    expect(!all || filled == n, "pin: %zu entries of %u", filled, n);
    for (uint32_t i = 0; i < n; i++) {
        int want = model_find(&r->model, pin.pool, numbers[i], epoch);
        const struct m_slot *s = &r->model.pool[pin.pool].slot[want == MODEL_NONE ? 0 : want];

        if (i >= filled || got[i].slot == SHM_NO_SLOT) {
            expect(!strict || want == MODEL_NONE, "pool %d: key %d in slot %d was not pinned",
                   pin.pool, numbers[i], want);
            if (!all)
                break;
            continue;
        }
        expect((int)got[i].slot == want && got[i].bytes == s->bytes && got[i].view == 7,
               "pool %d: key %d was pinned in slot %u with %llu bytes, and is in %d", pin.pool,
               numbers[i], got[i].slot, (unsigned long long)got[i].bytes, want);
        pin.slot = got[i].slot;
        pin.ticket = s->ticket;
        keep(r, &pin);
        counted++;
    }
    expect(counted == held, "pin: %zu pins, %zu counted", counted, held);
}

/* Mostly one that is in the pool. */
static int random_key(struct run *r, int pool)
{
    int key = (int)rng_below(&r->rng, MODEL_KEYS);

    if (rng_once_in(&r->rng, 6))
        return key;
    for (int i = 0; i < MODEL_KEYS; i++)
        if (r->model.pool[pool].where[(key + i) % MODEL_KEYS] != MODEL_NONE)
            return (key + i) % MODEL_KEYS;
    return key;
}

/* A prefix of a chain, or any keys. */
static uint32_t random_keys(struct run *r, int pool, int keys[RUN_CHAIN])
{
    uint32_t n = rng_between(&r->rng, 1, RUN_CHAIN);
    bool chain = !rng_once_in(&r->rng, 3);
    int first = random_key(r, pool);

    if (chain)
        first = first / RUN_CHAIN * RUN_CHAIN;

    for (uint32_t i = 0; i < n; i++)
        keys[i] = i == 0 ? first : chain ? first + (int)i : random_key(r, pool);
    return n;
}

static int random_reader(struct run *r, int pool)
{
    uint32_t first = rng_below(&r->rng, MODEL_SESSIONS);

    for (uint32_t i = 0; i < MODEL_SESSIONS; i++)
        if (has_segment(r, (int)((first + i) % MODEL_SESSIONS), pool))
            return (int)((first + i) % MODEL_SESSIONS);
    return MODEL_NONE;
}

void op_pin(struct run *r)
{
    struct pin pin = {.pool = (int)rng_below(&r->rng, MODEL_POOLS), .source = M_SHARED};
    int keys[RUN_CHAIN];
    uint32_t n = random_keys(r, pin.pool, keys);

    pin.process = random_reader(r, pin.pool);
    if (pin.process == MODEL_NONE)
        return;
    run_note(r, "process %d pins %u keys from %d in pool %d", pin.process, n, keys[0], pin.pool);
    pin_keys(r, pin, keys, n, rng_once_in(&r->rng, 2), true);
}

void op_socket_pin(struct run *r)
{
    struct pin pin = {.pool = (int)rng_below(&r->rng, MODEL_POOLS), .source = M_SOCKET};
    int keys[RUN_CHAIN];
    uint32_t n = random_keys(r, pin.pool, keys);
    struct process *p;

    pin.process = run_pick(r, can_ask);
    if (pin.process == MODEL_NONE)
        return;
    p = &r->process[pin.process];
    expect(session_attach(p->session, run_pool(r, pin.pool), false, &p->attach[pin.pool]) == 0 &&
               attach_own_pins(p->attach[pin.pool]) == 0,
           "cannot attach for pins through the socket");
    p->has_socket_pins[pin.pool] = true;
    run_note(r, "process %d pins %u keys from %d in pool %d through the socket", pin.process, n,
             keys[0], pin.pool);
    pin_keys(r, pin, keys, n, false, true);
}

static void unpin(struct run *r, uint32_t i)
{
    struct pin pin = r->pins[i];
    struct shm_pinned one = {.slot = pin.slot};
    struct shm_pins *pins = pins_of(r, pin.process, pin.pool, pin.source);

    run_verify_pin(r, &pin);
    r->pins[i] = r->pins[--r->n_pins];
    if (pin.half)
        atomic_fetch_sub(&pins->pins[pin.slot].count, 1); /* R4 has failed */
    else
        shm_unpin(run_pool(r, pin.pool)->index, pins, &one, 1);
    tell_pin(r, &pin, -1, !pin.half);
}

static bool can_unpin(struct run *r, const struct pin *pin)
{
    if (pin->source == M_SOCKET)
        return r->process[pin->process].alive && can_ask(r, pin->process);
    return has_segment(r, pin->process, pin->pool);
}

static void unpin_any(struct run *r)
{
    uint32_t i;

    if (!r->n_pins)
        return;
    i = rng_below(&r->rng, r->n_pins);
    if (can_unpin(r, &r->pins[i]))
        unpin(r, i);
}

void op_unpin(struct run *r)
{
    uint32_t n = rng_below(&r->rng, r->n_pins + 1);

    run_note(r, "up to %u of %u pins are given back", n, r->n_pins);
    while (n--)
        unpin_any(r);
}

/* A reader that has counted and is not scheduled for a while, or never again. */
static void half_pin(struct run *r, int pool)
{
    struct pin pin = {.process = random_reader(r, pool), .pool = pool, .half = true};

    if (pin.process == MODEL_NONE || r->n_pins == RUN_PINS)
        return;
    pin.slot = rng_below(&r->rng, r->model.pool[pool].slots);
    atomic_fetch_add(&pins_of(r, pin.process, pool, M_SHARED)->pins[pin.slot].count, 1); /* R2 */
    keep(r, &pin);
}

/* A writer that holds its slot before it commits. */
static void pin_reserved(struct run *r, int pool)
{
    struct pin pin = {.process = random_reader(r, pool), .pool = pool, .reserved = true};
    const struct m_slot *s;
    struct shm_pin *cell;

    pin.slot = rng_below(&r->rng, r->model.pool[pool].slots);
    s = &r->model.pool[pool].slot[pin.slot];
    if (pin.process == MODEL_NONE || r->n_pins == RUN_PINS || s->state != M_RESERVED)
        return;
    pin.ticket = s->ticket;
    cell = &pins_of(r, pin.process, pool, M_SHARED)->pins[pin.slot];
    atomic_fetch_add(&cell->count, 1);
    atomic_store(&cell->stamp, run_tick(r, pool));
    keep(r, &pin);
}

void op_half_pin(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS);
    bool reserved = rng_once_in(&r->rng, 2);

    run_note(r, "somebody %s in pool %d",
             reserved ? "holds a reserved slot" : "counts a pin and stops", pool);
    if (reserved)
        pin_reserved(r, pool);
    else
        half_pin(r, pool);
}

/* In the middle of an operation of the core. */
void run_interleave(struct run *r)
{
    struct pin pin = {.pool = r->focus, .source = M_SHARED};
    int key;

    if (!r->interleave || !rng_once_in(&r->rng, 8))
        return;
    key = random_key(r, pin.pool);
    r->interleave = false;
    r->stepped_in++;
    pin.process = random_reader(r, pin.pool);
    if (rng_once_in(&r->rng, 2))
        unpin_any(r);
    else if (rng_once_in(&r->rng, 4))
        half_pin(r, pin.pool);
    else if (pin.process != MODEL_NONE)
        pin_keys(r, pin, &key, 1, false, false);
    r->interleave = true;
}

void run_drop_pins(struct run *r, int process, int pool)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r->n_pins; i++)
        if (r->pins[i].process != process || (pool != MODEL_NONE && r->pins[i].pool != pool))
            r->pins[n++] = r->pins[i];
    r->n_pins = n;
}

/* ---- asking and telling */

void op_lookup(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS), numbers[RUN_CHAIN];
    uint32_t n = random_keys(r, pool, numbers), leading = 0;
    uint32_t epoch = r->model.space[r->model.pool[pool].space].epoch;
    struct shm_key keys[RUN_CHAIN];
    uint8_t states[RUN_CHAIN];

    for (uint32_t i = 0; i < n; i++)
        keys[i] = r->keys[numbers[i]];
    run_note(r, "lookup of %u keys from %d in pool %d", n, numbers[0], pool);
    while (leading < n && model_find(&r->model, pool, numbers[leading], epoch) != MODEL_NONE)
        leading++;
    expect(shm_lookup(run_pool(r, pool)->index, NULL, keys, n, epoch, NULL) == leading &&
               shm_lookup(run_pool(r, pool)->index, NULL, keys, n, epoch, states) == leading,
           "pool %d: not %u leading hits", pool, leading);
    for (uint32_t i = 0; i < n; i++)
        expect((states[i] == SHM_FOUND_RAM) ==
                   (model_find(&r->model, pool, numbers[i], epoch) != MODEL_NONE),
               "pool %d: key %d is said to be in state %u", pool, numbers[i], states[i]);
}

void op_observe(struct run *r)
{
    int process = run_pick(r, can_ask), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    int keys[RUN_CHAIN];
    uint32_t n = random_keys(r, pool, keys), epoch;

    if (process == MODEL_NONE)
        return;
    epoch = r->process[process].epoch[r->model.pool[pool].space];
    run_note(r, "process %d has used %u keys from %d of pool %d", process, n, keys[0], pool);
    while (n--) {
        pool_observe(run_pool(r, pool), &r->keys[keys[n]], epoch);
        model_use(&r->model, pool, keys[n], epoch, run_tick(r, pool));
    }
}

/* Anything in counters and stamps of slots that the process does not really hold. */
void op_play_dirty(struct run *r)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS), process = random_reader(r, pool);
    bool busy[MODEL_SLOTS] = {false}, dirt = rng_once_in(&r->rng, 3);
    uint32_t slots = r->model.pool[pool].slots;
    struct shm_pins *pins;

    if (process == MODEL_NONE)
        return;
    pins = pins_of(r, process, pool, M_SHARED);
    for (uint32_t i = 0; i < r->n_pins; i++)
        if (r->pins[i].process == process && r->pins[i].pool == pool &&
            r->pins[i].source == M_SHARED)
            busy[r->pins[i].slot] = true;
    run_note(r, "process %d writes %s into its counters of pool %d", process,
             dirt ? "anything" : "zeroes", pool);
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t count = dirt && rng_once_in(&r->rng, 12) ? rng_below(&r->rng, DIRTY_COUNT) : 0;
        uint32_t stamp = rng_once_in(&r->rng, 2) ? (uint32_t)rng_next(&r->rng)
                                                 : rng_below(&r->rng, run_tick(r, pool) + 1);

        if (busy[i])
            continue;
        atomic_store(&pins->pins[i].count, count);
        atomic_store(&pins->pins[i].stamp, stamp);
        model_count_pin(&r->model, process, pool, M_SHARED, i, count, stamp);
    }
}
