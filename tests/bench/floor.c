/* SPDX-License-Identifier: Apache-2.0 */
#include "floor.h"

#include <errno.h>

#define AHEAD 16u

_Static_assert(sizeof(struct floor_entry) == 32, "two to a line");

struct floor_key floor_key(uint64_t i)
{
    uint64_t s = i * 0x9e3779b97f4a7c15ull + 12345;
    struct floor_key k;

    k.a = random_next(&s) | 1;
    k.b = random_next(&s);
    return k;
}

static void insert(struct floor_entry *e, uint64_t mask, struct floor_key k, uint32_t block)
{
    uint64_t i = k.a & mask;

    while (atomic_load_explicit(&e[i].k0, memory_order_relaxed))
        i = (i + 1) & mask;
    atomic_store_explicit(&e[i].k1, k.b, memory_order_relaxed);
    atomic_store_explicit(&e[i].block, block, memory_order_relaxed);
    atomic_store_explicit(&e[i].generation, 1, memory_order_relaxed);
    atomic_store_explicit(&e[i].k0, k.a, memory_order_release);
}

int floor_new(uint64_t entries, size_t chain, struct floor *ret)
{
    struct floor f = {.mask = entries - 1, .filled = entries / 2};
    int r = memory_new(entries * sizeof(struct floor_entry), PAGES_SMALL, &f.table);

    if (r == 0)
        r = memory_new(chain * sizeof(*f.hazard), PAGES_SMALL, &f.hazards);
    if (r < 0) {
        floor_free(&f);
        return r;
    }
    f.entries = f.table.ro;
    f.hazard = f.hazards.rw;
    for (uint64_t i = 0; i < f.filled; i++)
        insert(f.table.rw, f.mask, floor_key(i), (uint32_t)i);
    *ret = f;
    return 0;
}

void floor_free(struct floor *f)
{
    memory_free(&f->table);
    memory_free(&f->hazards);
}

static inline bool is(const struct floor_entry *e, struct floor_key k)
{
    return atomic_load_explicit(&e->k0, memory_order_acquire) == k.a &&
           atomic_load_explicit(&e->k1, memory_order_relaxed) == k.b;
}

static inline uint32_t find(const struct floor *f, struct floor_key k)
{
    for (uint64_t i = k.a & f->mask;; i = (i + 1) & f->mask) {
        const struct floor_entry *e = &f->entries[i];
        uint64_t a = atomic_load_explicit(&e->k0, memory_order_acquire);

        if (a == k.a && atomic_load_explicit(&e->k1, memory_order_relaxed) == k.b)
            return (uint32_t)i;
        if (!a)
            return UINT32_MAX;
    }
}

static inline void fence(void)
{
#if defined(__x86_64__)
    __asm__ volatile("lock orq $0,(%%rsp)" ::: "memory", "cc");
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static inline __attribute__((always_inline)) size_t
run(const struct floor *f, const struct floor_key *keys, size_t n, uint32_t *ret_at, bool pin)
{
    const struct floor own = *f; /* in registers */
    size_t i;

    for (i = 0; i < n; i++) {
        uint32_t at;

        if (i + AHEAD < n)
            __builtin_prefetch(&own.entries[keys[i + AHEAD].a & own.mask]);
        at = find(&own, keys[i]);
        if (at == UINT32_MAX)
            break;
        ret_at[i] = at;
        if (!pin)
            continue;
        atomic_store_explicit(&own.hazard[i], at + 1, memory_order_relaxed);
        fence();
        if (!is(&own.entries[at], keys[i]))
            break;
    }
    return i;
}

size_t floor_lookup(const struct floor *f, const struct floor_key *keys, size_t n, uint32_t *ret_at)
{
    return run(f, keys, n, ret_at, false);
}

size_t floor_pin(const struct floor *f, const struct floor_key *keys, size_t n, uint32_t *ret_at)
{
    return run(f, keys, n, ret_at, true);
}

void floor_unpin(const struct floor *f, size_t n)
{
    atomic_thread_fence(memory_order_release);
    for (size_t i = 0; i < n; i++)
        atomic_store_explicit(&f->hazard[i], 0, memory_order_relaxed);
}

void floor_flush(const struct floor *f, const struct floor_key *keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (uint64_t line = 0; line < 4; line++)
            flush_line(&f->entries[(keys[i].a + 2 * line) & f->mask]);
    flush_wait();
}
