/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers that are the same on every machine for the same seed (SplitMix64). */
#ifndef KVD_TESTS_RNG_H
#define KVD_TESTS_RNG_H

#include <stdbool.h>
#include <stdint.h>

struct rng {
    uint64_t state;
};

static inline uint64_t rng_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline uint64_t rng_next(struct rng *r)
{
    r->state += 0x9e3779b97f4a7c15ull;
    return rng_mix(r->state);
}

/* 0 .. n - 1; n is not 0. */
static inline uint32_t rng_below(struct rng *r, uint32_t n)
{
    return (uint32_t)(rng_next(r) % n);
}

static inline uint32_t rng_between(struct rng *r, uint32_t from, uint32_t to)
{
    return from + rng_below(r, to - from + 1);
}

/* True once in n times. */
static inline bool rng_once_in(struct rng *r, uint32_t n)
{
    return rng_below(r, n) == 0;
}

#endif
