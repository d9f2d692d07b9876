/* SPDX-License-Identifier: Apache-2.0 */
#include "chain.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define TRIALS_MAX 1024u

struct shm_key chain_key(uint64_t i)
{
    struct shm_key k = {.group = 0};
    uint64_t s = i * 0x9e3779b97f4a7c15ull + 54321;

    for (size_t n = 0; n < sizeof(k.hash); n += 8) {
        uint64_t x = random_next(&s);

        memcpy(k.hash + n, &x, sizeof(x));
    }
    return k;
}

void chain_choose(struct subject *s, uint64_t *seed)
{
    uint64_t first = random_next(seed) % (s->filled - CHAIN);

    for (size_t i = 0; i < CHAIN; i++)
        s->ops->set(s, i, s->scattered ? random_next(seed) % s->filled : first + i);
}

int chain_time_lookup(struct subject *s, bool cold, unsigned trials, uint64_t seed, double *ret)
{
    double ns[TRIALS_MAX];

    chain_choose(s, &seed);
    for (unsigned t = 0; t < trials; t++) {
        size_t depth = 1 + random_next(&seed) % (CHAIN - 1), n;
        uint64_t there = random_next(&seed) % s->filled, start;

        if (cold)
            chain_choose(s, &seed);
        s->ops->set(s, depth, ABSENT + random_next(&seed) % ABSENT);
        if (cold)
            s->ops->flush(s);
        start = now_ns();
        n = s->ops->lookup(s);
        ns[t] = (double)(now_ns() - start) / (double)depth;
        if (n != depth)
            return -EIO;
        s->ops->set(s, depth, there);
    }
    *ret = median(ns, trials);
    return 0;
}

int chain_time_pin(struct subject *s, bool cold, unsigned trials, uint64_t seed, double *ret)
{
    double ns[TRIALS_MAX];

    chain_choose(s, &seed);
    for (unsigned t = 0; t < trials; t++) {
        uint64_t start;
        size_t n;

        if (cold) {
            chain_choose(s, &seed);
            s->ops->flush(s);
        }
        start = now_ns();
        n = s->ops->pin(s);
        s->ops->release(s);
        ns[t] = (double)(now_ns() - start) / CHAIN;
        if (n != CHAIN)
            return -EIO;
    }
    *ret = median(ns, trials);
    return 0;
}

/* ---- duels */

static uint64_t next_seed(struct duel *d)
{
    d->half = !d->half;
    return d->half ? ++d->seed : d->seed;
}

static int ours_lookup(void *arg, double *ret)
{
    struct duel *d = arg;

    return chain_time_lookup(d->ours, d->cold, d->trials, next_seed(d), ret);
}

static int floor_lookups(void *arg, double *ret)
{
    struct duel *d = arg;

    return chain_time_lookup(d->floor, d->cold, d->trials, next_seed(d), ret);
}

static int ours_pin(void *arg, double *ret)
{
    struct duel *d = arg;

    return chain_time_pin(d->ours, d->cold, d->trials, next_seed(d), ret);
}

static int floor_pins(void *arg, double *ret)
{
    struct duel *d = arg;

    return chain_time_pin(d->floor, d->cold, d->trials, next_seed(d), ret);
}

static int duel(struct bench *b, struct duel *d, const char *name, double limit, sample_fn ours,
                const struct contender *floor)
{
    const struct figure f = {.name = name,
                             .unit = "ns/key",
                             .goal = limit > 0 ? GOAL_RATIO_AT_MOST : GOAL_NONE,
                             .limit = limit};

    return bench_compare(b, &f, d, ours, floor, 1);
}

int duel_lookup(struct bench *b, struct duel *d, const char *name, double limit)
{
    const struct contender floor = {"a bare table", floor_lookups};

    return duel(b, d, name, limit, ours_lookup, &floor);
}

int duel_pin(struct bench *b, struct duel *d, const char *name, double limit)
{
    const struct contender floor = {"hazard pin, lock-or", floor_pins};

    return duel(b, d, name, limit, ours_pin, &floor);
}

/* ---- the floor */

static void floor_set(struct subject *s, size_t at, uint64_t key)
{
    s->floor_keys[at] = floor_key(key);
}

static void floor_flush_chain(struct subject *s)
{
    floor_flush(s->floor, s->floor_keys, CHAIN);
}

static size_t floor_lookup_chain(struct subject *s)
{
    return floor_lookup(s->floor, s->floor_keys, CHAIN, s->at);
}

static size_t floor_pin_chain(struct subject *s)
{
    s->n_pinned = floor_pin(s->floor, s->floor_keys, CHAIN, s->at);
    return s->n_pinned;
}

static void floor_release(struct subject *s)
{
    floor_unpin(s->floor, s->n_pinned);
}

const struct subject_ops floor_subject = {
    .set = floor_set,
    .flush = floor_flush_chain,
    .lookup = floor_lookup_chain,
    .pin = floor_pin_chain,
    .release = floor_release,
};

struct subject *floor_subject_new(struct floor *f)
{
    struct subject *s = calloc(1, sizeof(*s));

    if (s)
        *s = (struct subject){.ops = &floor_subject, .floor = f, .filled = f->filled};
    return s;
}
