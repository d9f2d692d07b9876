/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of keys, and what is done with them: the same measurement for a bare table, for libkvd and for
 * the floor. */
#ifndef KVD_TESTS_CHAIN_H
#define KVD_TESTS_CHAIN_H

#include "bench.h"
#include "floor.h"
#include "shm/lookup.h"

#define CHAIN 2048u

/* Keys of bytes without a pattern; those from ABSENT on are never stored. */
#define ABSENT ((uint64_t)1 << 40)
struct shm_key chain_key(uint64_t i);

/* Somebody who looks up and pins. */
struct subject {
    const struct subject_ops *ops;
    struct floor *floor;
    struct table *table;
    struct api *api;
    uint64_t filled; /* keys 0 .. filled - 1 are there */
    bool scattered;  /* the chain's objects were not stored one after the other */
    union {
        struct floor_key floor_keys[CHAIN];
        struct shm_key keys[CHAIN];
    };
    uint32_t at[CHAIN];
    struct shm_pinned pinned[CHAIN];
    size_t n_pinned;
};

struct subject_ops {
    void (*set)(struct subject *s, size_t at, uint64_t key); /* one key of the chain */
    void (*flush)(struct subject *s);                        /* its lines of the table */
    size_t (*lookup)(struct subject *s);                     /* leading keys that are there */
    size_t (*pin)(struct subject *s);
    void (*release)(struct subject *s);
};

extern const struct subject_ops floor_subject;

/* A random chain of keys that are there. Their lines lie all over the table in any case; their slots (and
 * so the pin counters) are neighbours, as those of objects that were stored together, or scattered. */
void chain_choose(struct subject *s, uint64_t *seed);

/* Both in ns per key, the median of `trials`. Cold: another chain for each, flushed. A lookup finds the
 * chain up to a random depth only. -EIO: not all was found that should be. */
int chain_time_lookup(struct subject *s, bool cold, unsigned trials, uint64_t seed, double *ret);
int chain_time_pin(struct subject *s, bool cold, unsigned trials, uint64_t seed, double *ret);

/* One against the other. */
struct duel {
    struct subject *ours, *floor;
    bool cold;
    unsigned trials;
    uint64_t seed; /* of the next sample; both get the same */
    bool half;
};

/* A limit of 0: no goal. */
int duel_lookup(struct bench *b, struct duel *d, const char *name, double limit);
int duel_pin(struct bench *b, struct duel *d, const char *name, double limit);

/* A subject of its own on that floor; free() it. */
struct subject *floor_subject_new(struct floor *f);

#endif
