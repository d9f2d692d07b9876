/* SPDX-License-Identifier: Apache-2.0 */
#include "lookup.h"

#include "index.h"

/* How often a pin is tried again when the entry changes under it. It changes because the core tries
 * to evict it or has evicted it; either way a few rounds settle it, and a miss is always a right
 * answer. */
#define PIN_TRIES 4u

/* The probe ends by the overflow counters; the bound only guards against a damaged table. */
struct shm_hit shm_probe_on(const struct shm_entry *lines, uint64_t mask, const struct shm_entry *e,
                            const struct shm_key *key, uint32_t epoch)
{
    for (uint64_t left = mask; left && shm_load32(&e->overflow); left--) {
        uint64_t word;

        e = &lines[((uint64_t)(e - lines) + 1) & mask];
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

static inline void window_put(struct window *w, const struct shm_table *t,
                              const struct shm_key *key, size_t i)
{
    const struct shm_entry *e = &t->lines[shm_home(t, key)];

    __builtin_prefetch(e, 0, 3);
    w->home[i % SHM_AHEAD] = e;
}

static inline void window_open(struct window *w, const struct shm_table *t,
                               const struct shm_key *keys, size_t n)
{
    for (size_t i = 0; i < n && i < SHM_AHEAD; i++)
        window_put(w, t, &keys[i], i);
}

/* The home of key i, and the prefetch of the one that takes its place. */
static inline const struct shm_entry *window_next(struct window *w, const struct shm_table *t,
                                                  const struct shm_key *keys, size_t n, size_t i)
{
    const struct shm_entry *e = w->home[i % SHM_AHEAD];

    if (__builtin_expect(i + SHM_AHEAD < n, 1))
        window_put(w, t, &keys[i + SHM_AHEAD], i);
    return e;
}

static inline enum shm_found state_of(uint64_t word)
{
    if (__builtin_expect(shm_word_state(word) == SHM_LIVE, 1))
        return SHM_FOUND_RAM;
    /* LEAVING is still there; a pin will find out. */
    return shm_word_state(word) == SHM_LEAVING ? SHM_FOUND_RAM : SHM_FOUND_PENDING;
}

/* What is known of one key without pinning it. The key was compared between two equal loads of the
 * word, so it was the line's key at that time. */
static inline enum shm_found find_one(const struct shm_table *t, const struct shm_entry *home,
                                      const struct shm_key *key, uint32_t epoch)
{
    struct shm_hit hit = shm_probe(t, home, key, epoch);

    if (__builtin_expect(!hit.entry, 0))
        return SHM_FOUND_MISS;
    atomic_thread_fence(memory_order_acquire);
    return shm_load64(&hit.entry->word) == hit.word ? state_of(hit.word) : SHM_FOUND_MISS;
}

static bool usable(const struct shm_index *index, uint32_t epoch)
{
    return !shm_load32(&index->retired) &&
           atomic_load_explicit(&index->epoch, memory_order_acquire) == epoch;
}

/* The loop that the product is measured by. */
static size_t count_leading(const struct shm_table *table, const struct shm_key *keys, size_t n,
                            uint32_t epoch)
{
    const struct shm_table t = *table;
    struct window w;
    size_t i;

    window_open(&w, &t, keys, n);
    for (i = 0; i < n; i++)
        if (__builtin_expect(
                find_one(&t, window_next(&w, &t, keys, n, i), &keys[i], epoch) != SHM_FOUND_RAM, 0))
            break;
    return i;
}

size_t shm_lookup(const struct shm_index *index, const struct shm_key *keys, size_t n,
                  uint32_t epoch, uint8_t *ret_states)
{
    struct shm_table t = shm_table_of(index);
    size_t leading = usable(index, epoch) ? count_leading(&t, keys, n, epoch) : 0;
    struct window w;

    if (!ret_states)
        return leading;
    memset(ret_states, SHM_FOUND_RAM, leading);
    if (!usable(index, epoch)) {
        memset(ret_states + leading, SHM_FOUND_MISS, n - leading);
        return leading;
    }
    keys += leading;
    n -= leading;
    window_open(&w, &t, keys, n);
    for (size_t i = 0; i < n; i++)
        ret_states[leading + i] =
            (uint8_t)find_one(&t, window_next(&w, &t, keys, n, i), &keys[i], epoch);
    return leading;
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
    if (shm_load32(&pin->stamp) != tick)
        atomic_store_explicit(&pin->stamp, tick, memory_order_relaxed);
}

/* R1..R4 for one key. */
static inline bool pin_one(const struct shm_table *t, struct shm_pins *pins,
                           const struct shm_entry *home, const struct shm_key *key, uint32_t epoch,
                           uint32_t tick, struct shm_pinned *ret)
{
    for (unsigned int tries = 0; tries < PIN_TRIES; tries++) {
        struct shm_hit hit = shm_probe(t, home, key, epoch); /* R1 */
        const struct shm_entry *e = hit.entry;
        uint64_t word = hit.word;
        struct shm_pin *pin;

        if (!e || shm_word_state(word) == SHM_PENDING)
            return false;
        if (__builtin_expect(shm_word_state(word) != SHM_LIVE, 0))
            continue; /* LEAVING: the core is looking at the counters right now */
        pin = &pins->pins[shm_word_slot(word)];
        count_up(pin); /* R2, R3 */
        if (__builtin_expect(atomic_load_explicit(&e->word, memory_order_acquire) == word, 1) &&
            __builtin_expect(shm_entry_is(e, key, epoch), 1)) { /* R4: the slot is ours */
            ret->slot = shm_word_slot(word);
            ret->bytes = (uint64_t)shm_load32(&e->last_byte) + 1;
            stamp(pin, tick);
            return true;
        }
        count_down(pin);
    }
    return false;
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
    struct shm_table t = shm_table_of(index);
    uint32_t tick = shm_load32(&index->tick);
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
        ret[i].slot = SHM_NO_SLOT;
        ret[i].view = view;
        if (__builtin_expect(pin_one(&t, pins, home, &keys[i], epoch, tick, &ret[i]), 1))
            pinned++;
        else if (!all)
            break;
        else
            ret[i].bytes = 0;
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
