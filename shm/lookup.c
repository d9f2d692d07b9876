/* SPDX-License-Identifier: Apache-2.0 */
#include "lookup.h"

#include "index.h"

/* How often a pin is tried again when the entry changes under it. It changes because the core tries to
 * evict it or has evicted it; either way a few rounds settle it, and a miss is always a right answer. */
#define PIN_TRIES 4u

/* A sliding window over the keys: probes are made SHM_AHEAD keys early to prefetch the lines they start
 * at, and kept until their turn. */
struct window {
    struct shm_probe probe[SHM_AHEAD];
    uint64_t home[SHM_AHEAD];
};

static inline void window_fill(struct window *w, const struct shm_index *index, uint64_t mask,
                               const struct shm_key *key, size_t i, uint32_t epoch)
{
    struct shm_probe p = shm_probe_of(key, epoch);
    uint64_t home = shm_hash(index->seed, &p) & mask;

    __builtin_prefetch(&index->lines[home], 0, 3);
    w->probe[i % SHM_AHEAD] = p;
    w->home[i % SHM_AHEAD] = home;
}

static inline enum shm_found state_of(const struct shm_entry *e, uint64_t word)
{
    if (!e)
        return SHM_FOUND_MISS;
    switch (shm_word_state(word)) {
    case SHM_LIVE:
    case SHM_LEAVING: /* still there; a pin will find out */
        return SHM_FOUND_RAM;
    case SHM_PENDING:
        return SHM_FOUND_PENDING;
    default:
        return SHM_FOUND_MISS;
    }
}

/* Is what was found under `word` still so? The key was compared between the two loads. */
static inline bool word_same(const struct shm_entry *e, uint64_t word)
{
    atomic_thread_fence(memory_order_acquire);
    return shm_load64(&e->word) == word;
}

static bool usable(const struct shm_index *index, uint32_t epoch)
{
    return !shm_load32(&index->retired) &&
           atomic_load_explicit(&index->epoch, memory_order_acquire) == epoch;
}

size_t shm_lookup(const struct shm_index *index, const struct shm_key *keys, size_t n,
                  uint32_t epoch, uint8_t *ret_states)
{
    uint64_t mask = index->header.count - 1;
    struct window w;
    size_t leading = 0, i;

    if (!usable(index, epoch)) {
        if (ret_states)
            memset(ret_states, SHM_FOUND_MISS, n);
        return 0;
    }
    for (i = 0; i < n && i < SHM_AHEAD; i++)
        window_fill(&w, index, mask, &keys[i], i, epoch);
    for (i = 0; i < n; i++) {
        uint64_t word = 0;
        struct shm_probe p = w.probe[i % SHM_AHEAD];
        const struct shm_entry *e = shm_find(index->lines, mask, w.home[i % SHM_AHEAD], &p, &word);
        enum shm_found s = e && !word_same(e, word) ? SHM_FOUND_MISS : state_of(e, word);

        if (i + SHM_AHEAD < n)
            window_fill(&w, index, mask, &keys[i + SHM_AHEAD], i, epoch);
        if (leading == i && s == SHM_FOUND_RAM)
            leading++;
        else if (!ret_states)
            break;
        if (ret_states)
            ret_states[i] = (uint8_t)s;
    }
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

/* Release order: the reads of the slot's bytes are over. Pairs with the acquire loads at A0 and A3. */
static inline void count_down(struct shm_pin *pin)
{
    atomic_fetch_sub_explicit(&pin->count, 1, memory_order_release);
}

/* The use reaches the eviction policy by the stamp, which is read when the slot comes up for eviction. */
static inline void stamp(struct shm_pin *pin, uint32_t tick)
{
    if (shm_load32(&pin->stamp) != tick)
        atomic_store_explicit(&pin->stamp, tick, memory_order_relaxed);
}

/* R1..R4 for one key. */
static bool pin_one(const struct shm_index *index, struct shm_pins *pins, uint64_t mask,
                    const struct shm_probe *p, uint64_t home, struct shm_pinned *ret)
{
    for (unsigned int tries = 0; tries < PIN_TRIES; tries++) {
        uint64_t word;
        const struct shm_entry *e = shm_find(index->lines, mask, home, p, &word); /* R1 */
        uint32_t slot = shm_word_slot(word);

        if (!e || shm_word_state(word) == SHM_PENDING)
            return false;
        if (shm_word_state(word) != SHM_LIVE)
            continue; /* LEAVING: the core is looking at the counters right now */
        count_up(&pins->pins[slot]); /* R2, R3 */
        if (atomic_load_explicit(&e->word, memory_order_acquire) == word && shm_entry_is(e, p)) {
            ret->slot = slot;                              /* R4 held: the slot is ours */
            ret->bytes = (uint64_t)shm_load32(&e->last_byte) + 1;
            stamp(&pins->pins[slot], shm_load32(&index->tick));
            return true;
        }
        count_down(&pins->pins[slot]);
    }
    return false;
}

/* The line should have arrived by now: fetch the counter it will need, for writing. */
static inline void prefetch_pin(const struct shm_index *index, struct shm_pins *pins, uint64_t home)
{
    uint64_t word = shm_load64(&index->lines[home].word);

    __builtin_prefetch(&pins->pins[shm_word_slot(word)], 1, 3);
}

size_t shm_pin_keys(const struct shm_index *index, struct shm_pins *pins,
                    const struct shm_key *keys, size_t n, uint32_t epoch, bool all, uint32_t view,
                    struct shm_pinned *ret, size_t *ret_pinned)
{
    uint64_t mask = index->header.count - 1;
    struct window w;
    size_t pinned = 0, i;

    if (!usable(index, epoch)) {
        for (i = 0; all && i < n; i++)
            ret[i] = (struct shm_pinned){.slot = SHM_NO_SLOT, .view = view};
        *ret_pinned = 0;
        return all ? n : 0;
    }
    for (i = 0; i < n && i < SHM_AHEAD; i++)
        window_fill(&w, index, mask, &keys[i], i, epoch);
    for (i = 0; i < n; i++) {
        struct shm_probe p = w.probe[i % SHM_AHEAD];
        uint64_t home = w.home[i % SHM_AHEAD];
        struct shm_pinned r = {.slot = SHM_NO_SLOT, .view = view};

        if (i + SHM_AHEAD < n)
            window_fill(&w, index, mask, &keys[i + SHM_AHEAD], i, epoch);
        if (i + SHM_AHEAD / 2 < n)
            prefetch_pin(index, pins, w.home[(i + SHM_AHEAD / 2) % SHM_AHEAD]);
        if (pin_one(index, pins, mask, &p, home, &r))
            pinned++;
        else if (!all)
            break;
        ret[i] = r;
    }
    *ret_pinned = pinned;
    return i;
}

void shm_unpin(const struct shm_index *index, struct shm_pins *pins, const struct shm_pinned *pinned,
               size_t n)
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
