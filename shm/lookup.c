/* SPDX-License-Identifier: Apache-2.0 */
#include "lookup.h"

#include "index.h"

/* How often a pin is tried again when the entry changes under it. It changes because the core tries
 * to evict it or has evicted it; either way a few rounds settle it, and a miss is always a right
 * answer. */
#define PIN_TRIES 4u

/* Keys that the hot loop takes at a time, which saves counting; divides SHM_AHEAD. */
#define STRIDE 4u

/* What the hot loops must not call, and what must not be part of them. */
#define inlined  static inline __attribute__((always_inline))
#define outlined static __attribute__((noinline))

/* The probe ends by the overflow counters; the bound only guards against a damaged table. */
struct shm_hit shm_probe_on(const struct shm_entry *lines, uint64_t mask, const struct shm_entry *e,
                            const struct shm_key *key, uint32_t epoch)
{
    for (uint64_t left = mask; left && shm_load32(&e->overflow); left--) {
        uint64_t word;

        e = shm_next_line(lines, mask, e);
        word = atomic_load_explicit(&e->word, memory_order_acquire); /* R1 */
        if (shm_entry_is(e, key, epoch) && shm_word_state(word) != SHM_EMPTY)
            return (struct shm_hit){e, word};
    }
    return (struct shm_hit){NULL, 0};
}

/* A sliding window over the keys: where the probes of the next ones begin. */
struct window {
    const struct shm_entry *home[SHM_AHEAD];
};

static inline const struct shm_entry *fetch(const struct shm_table *t, const struct shm_key *key)
{
    const struct shm_entry *e = shm_home_line(t, key);

    __builtin_prefetch(e, 0, 3);
    return e;
}

static inline void window_open(struct window *w, const struct shm_table *t,
                               const struct shm_key *keys, size_t n)
{
    for (size_t i = 0; i < n && i < SHM_AHEAD; i++)
        w->home[i] = fetch(t, &keys[i]);
}

/* The home of key i, and the prefetch of the one that takes its place. */
static inline const struct shm_entry *window_next(struct window *w, const struct shm_table *t,
                                                  const struct shm_key *keys, size_t n, size_t i)
{
    const struct shm_entry *e = w->home[i % SHM_AHEAD];

    if (__builtin_expect(i + SHM_AHEAD < n, 1))
        w->home[i % SHM_AHEAD] = fetch(t, &keys[i + SHM_AHEAD]);
    return e;
}

/* LIVE and LEAVING have this bit, the others do not. LEAVING is still there; a pin will find
 * out. */
#define RAM_BIT ((uint64_t)SHM_LIVE << SHM_SLOT_BITS)
_Static_assert((SHM_LIVE & SHM_LEAVING) == SHM_LIVE && !(SHM_LIVE & (SHM_PENDING | SHM_EMPTY)),
               "one bit tells");

/* What is known of one key without pinning it. The key was compared between two equal loads of the
 * word, so it was the line's key at that time. */
static inline enum shm_found find_one(const struct shm_table *t, const struct shm_entry *home,
                                      const struct shm_key *key, uint32_t epoch)
{
    struct shm_hit hit = shm_probe(t, home, key, epoch);

    if (!hit.entry)
        return SHM_FOUND_MISS;
    atomic_thread_fence(memory_order_acquire);
    if (shm_load64(&hit.entry->word) != hit.word)
        return SHM_FOUND_MISS;
    return hit.word & RAM_BIT ? SHM_FOUND_RAM : SHM_FOUND_PENDING;
}

/* Takes what it needs of the table by value: a pointer would keep all of it in memory, also for the
 * hot loop. */
outlined bool is_found_on(const struct shm_entry *lines, uint64_t mask,
                          const struct shm_entry *home, const struct shm_key *key, uint32_t epoch)
{
    const struct shm_table t = {.lines = lines, .mask = mask};

    return find_one(&t, home, key, epoch) == SHM_FOUND_RAM;
}

/* Is this line the key's, and in ram? The same as find_one() for the answer that is looked for. */
inlined bool line_has(const struct shm_entry *e, const struct shm_key *key, uint32_t epoch)
{
    uint64_t word = atomic_load_explicit(&e->word, memory_order_acquire);

    if (!shm_entry_is(e, key, epoch) || __builtin_expect(!(word & RAM_BIT), 0))
        return false;
    atomic_thread_fence(memory_order_acquire);
    return __builtin_expect(shm_load64(&e->word) == word, 1);
}

/* Most keys are in their first line, most of the others in the second. */
inlined bool is_found(const struct shm_table *t, const struct shm_entry *home,
                      const struct shm_key *key, uint32_t epoch)
{
    return line_has(home, key, epoch) ||
           line_has(shm_next_line(t->lines, t->mask, home), key, epoch) ||
           is_found_on(t->lines, t->mask, home, key, epoch);
}

static bool usable(const struct shm_index *index, uint32_t epoch)
{
    return !shm_load32(&index->retired) &&
           atomic_load_explicit(&index->epoch, memory_order_acquire) == epoch;
}

/* STRIDE keys whose homes are in the window, of which they make room for the next ones. Returns how
 * many of them are found. */
inlined size_t count_stride(const struct shm_table *t, const struct shm_entry **home,
                            const struct shm_key *keys, uint32_t epoch)
{
#pragma GCC unroll 4 /* STRIDE */
    for (size_t i = 0; i < STRIDE; i++) {
        const struct shm_entry *e = home[i];

        home[i] = fetch(t, &keys[SHM_AHEAD + i]);
        if (!is_found(t, e, &keys[i], epoch))
            return i;
    }
    return STRIDE;
}

/* The loop that the product is measured by. Out of line, so that it is the same code however many
 * call it; the table is made here, so that it is in registers. */
outlined size_t count_leading(const struct shm_index *index, const struct shm_key *keys, size_t n,
                              uint32_t epoch)
{
    const struct shm_table t = shm_table_of(index);
    struct window w;
    size_t i;

    window_open(&w, &t, keys, n);
    for (i = 0; i + SHM_AHEAD + STRIDE <= n; i += STRIDE) {
        size_t found = count_stride(&t, &w.home[i % SHM_AHEAD], &keys[i], epoch);

        if (found < STRIDE)
            return i + found;
    }
    for (; i < n; i++)
        if (!is_found(&t, window_next(&w, &t, keys, n, i), &keys[i], epoch))
            break;
    return i;
}

/* The first key is not in `other`. By turns, each from where the other has ended, until one does not
 * go on. */
outlined size_t count_by_turns(const struct shm_index *index, const struct shm_index *other,
                               const struct shm_key *keys, size_t n, uint32_t epoch)
{
    size_t at = 0, found;

    while (at < n && (found = count_leading(index, keys + at, n - at, epoch)) > 0) {
        const struct shm_index *swap = index;

        at += found;
        index = other;
        other = swap;
    }
    return at;
}

/* States of keys in ram alone, then what the spill stores know of the others: in this order, since an
 * object is in the nvme index before it is evicted. */
static void find_states(const struct shm_index *index, const struct shm_key *keys, size_t n,
                        uint32_t epoch, uint8_t *states)
{
    const struct shm_table t = shm_table_of(index);
    struct window w;

    window_open(&w, &t, keys, n);
    for (size_t i = 0; i < n; i++)
        states[i] = (uint8_t)find_one(&t, window_next(&w, &t, keys, n, i), &keys[i], epoch);
}

static void find_stored(const struct shm_index *nvme, const struct shm_key *keys, size_t n,
                        uint32_t epoch, uint8_t *states)
{
    const struct shm_table t = shm_table_of(nvme);
    struct window w;

    window_open(&w, &t, keys, n);
    for (size_t i = 0; i < n; i++) {
        const struct shm_entry *home = window_next(&w, &t, keys, n, i);

        if (states[i] != SHM_FOUND_RAM &&
            find_one(&t, home, &keys[i], epoch) == SHM_FOUND_RAM) /* LIVE there */
            states[i] = SHM_FOUND_NVME;
    }
}

static size_t count_cached(const uint8_t *states, size_t n)
{
    size_t i = 0;

    while (i < n && (states[i] == SHM_FOUND_RAM || states[i] == SHM_FOUND_NVME))
        i++;
    return i;
}

size_t shm_lookup(const struct shm_index *index, const struct shm_index *nvme,
                  const struct shm_key *keys, size_t n, uint32_t epoch, uint8_t *ret_states)
{
    size_t leading = usable(index, epoch) ? count_leading(index, keys, n, epoch) : 0;

    if (ret_states)
        memset(ret_states, SHM_FOUND_RAM, leading);
    if (!usable(index, epoch)) {
        if (ret_states)
            memset(ret_states + leading, SHM_FOUND_MISS, n - leading);
        return leading;
    }
    keys += leading;
    n -= leading;
    if (!ret_states)
        return leading + (nvme ? count_by_turns(nvme, index, keys, n, epoch) : 0);
    find_states(index, keys, n, epoch, ret_states + leading);
    if (nvme)
        find_stored(nvme, keys, n, epoch, ret_states + leading);
    return leading + count_cached(ret_states + leading, n);
}

/* R2 and R3 in one: on x86 the locked add is the fence. */
static inline void count_up(struct shm_pin *pin)
{
#if defined(__x86_64__)
    atomic_fetch_add_explicit(&pin->count, 1, memory_order_seq_cst);
#else
    atomic_fetch_add_explicit(&pin->count, 1, memory_order_relaxed);
    shm_full_fence(); /* R3 pairs with A2; on arm64 an exchange alone is no fence for later loads */
#endif
}

/* R5. Release order: the reads of the slot's bytes are over. Pairs with the acquire loads at A0 and
 * A3. */
static inline void count_down(struct shm_pin *pin)
{
    atomic_fetch_sub_explicit(&pin->count, 1, memory_order_release);
}

/* The use reaches the eviction policy by the stamp, which is read when the slot comes up for
 * eviction. */
static inline void stamp(struct shm_pin *pin, uint32_t tick)
{
    if (__builtin_expect(shm_load32(&pin->stamp) != tick, 0))
        atomic_store_explicit(&pin->stamp, tick, memory_order_relaxed);
}

/* What pins are taken with. */
struct pinner {
    struct shm_pins *pins;
    uint32_t epoch, tick, view;
};

/* R2..R4 for a line that was LIVE by `word`. */
inlined bool pin_line(const struct pinner *p, const struct shm_entry *e, uint64_t word,
                      const struct shm_key *key, struct shm_pinned *ret)
{
    struct shm_pin *pin = &p->pins->pins[shm_word_slot(word)];

    count_up(pin); /* R2, R3 */
    if (__builtin_expect(atomic_load_explicit(&e->word, memory_order_acquire) == word, 1) &&
        shm_entry_is(e, key, p->epoch)) { /* R4: the slot is ours */
        *ret = (struct shm_pinned){.slot = shm_word_slot(word),
                                   .view = p->view,
                                   .bytes = (uint64_t)shm_load32(&e->last_byte) + 1};
        stamp(pin, p->tick);
        return true;
    }
    count_down(pin);
    return false;
}

outlined bool pin_on(const struct pinner *p, const struct shm_table *t,
                     const struct shm_entry *home, const struct shm_key *key,
                     struct shm_pinned *ret)
{
    for (unsigned int tries = 0; tries < PIN_TRIES; tries++) {
        struct shm_hit hit = shm_probe(t, home, key, p->epoch); /* R1 */

        if (!hit.entry || shm_word_state(hit.word) == SHM_PENDING)
            break;
        if (shm_word_state(hit.word) != SHM_LIVE)
            continue; /* LEAVING: the core is looking at the counters right now */
        if (pin_line(p, hit.entry, hit.word, key, ret))
            return true;
    }
    *ret = (struct shm_pinned){.slot = SHM_NO_SLOT, .view = p->view};
    return false;
}

/* R1 looks at the first word of the key only: R4 compares all of it, under the pin. */
static inline bool pin_one(const struct pinner *p, const struct shm_table *t,
                           const struct shm_entry *home, const struct shm_key *key,
                           struct shm_pinned *ret)
{
    uint64_t word = atomic_load_explicit(&home->word, memory_order_acquire); /* R1 */

    if (__builtin_expect(shm_word_state(word) == SHM_LIVE, 1) &&
        __builtin_expect(shm_load64(&home->key[0]) == shm_key_word(key, 0), 1) &&
        __builtin_expect(pin_line(p, home, word, key, ret), 1))
        return true;
    return pin_on(p, t, home, key, ret);
}

/* The line has arrived by now: fetch the counter it will need, for writing. */
static inline void prefetch_pin(struct shm_pins *pins, const struct window *w, size_t i)
{
    uint64_t word = shm_load64(&w->home[i % SHM_AHEAD]->word);

    __builtin_prefetch(&pins->pins[shm_word_slot(word)], 1, 3);
}

size_t shm_pin_keys(const struct shm_index *index, struct shm_pins *pins,
                    const struct shm_key *keys, size_t n, uint32_t epoch, bool all, uint32_t view,
                    struct shm_pinned *ret, size_t *ret_pinned)
{
    const struct shm_table t = shm_table_of(index);
    const struct pinner p = {
        .pins = pins, .epoch = epoch, .tick = shm_load32(&index->tick), .view = view};
    size_t pinned = 0, i;
    struct window w;

    if (!usable(index, epoch)) {
        for (i = 0; all && i < n; i++)
            ret[i] = (struct shm_pinned){.slot = SHM_NO_SLOT, .view = view};
        *ret_pinned = 0;
        return all ? n : 0;
    }
    window_open(&w, &t, keys, n);
    for (i = 0; i < n; i++) {
        const struct shm_entry *home = window_next(&w, &t, keys, n, i);

        if (__builtin_expect(i + SHM_AHEAD / 2 < n, 1))
            prefetch_pin(pins, &w, i + SHM_AHEAD / 2);
        if (__builtin_expect(pin_one(&p, &t, home, &keys[i], &ret[i]), 1))
            pinned++;
        else if (!all)
            break;
    }
    *ret_pinned = pinned;
    return i;
}

void shm_unpin(const struct shm_index *index, struct shm_pins *pins,
               const struct shm_pinned *pinned, size_t n)
{
    uint32_t tick = shm_load32(&index->tick);

    while (n--) {
        struct shm_pin *pin = &pins->pins[pinned[n].slot & (SHM_SLOTS_MAX - 1)];

        if (pinned[n].slot == SHM_NO_SLOT)
            continue;
        stamp(pin, tick);
        count_down(pin);
    }
}
