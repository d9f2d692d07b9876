/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floor of finding and pinning without a system call: an open-addressing table of 16-byte keys in
 * shared memory, half full, never changing, mapped read-only by its reader, and hazard cells on a page of
 * the reader's own. No states, no 32-byte keys, no misses that stop early, no eviction, no stamps.
 */
#ifndef KVD_TESTS_FLOOR_H
#define KVD_TESTS_FLOOR_H

#include <stdatomic.h>

#include "bench.h"

struct floor_entry { /* two to a line; k0 0: empty */
    _Atomic uint64_t k0, k1;
    _Atomic uint32_t generation, block;
    _Atomic uint32_t zero[2];
};

struct floor_key {
    uint64_t a, b;
};

struct floor {
    struct memory table, hazards;
    const struct floor_entry *entries;
    uint64_t mask;
    uint64_t filled; /* keys 0 .. filled - 1 are in it */
    _Atomic uint32_t *hazard;
};

/* `entries`: a power of two. Pins at most `chain` keys at a time. */
int floor_new(uint64_t entries, size_t chain, struct floor *ret);
void floor_free(struct floor *f);

struct floor_key floor_key(uint64_t i);

/* Leading keys that are there. Prefetches 16 ahead. ret_at: where. */
size_t floor_lookup(const struct floor *f, const struct floor_key *keys, size_t n,
                    uint32_t *ret_at);

/* The same, each with a store to a hazard cell, a full fence, and a second look at the entry. */
size_t floor_pin(const struct floor *f, const struct floor_key *keys, size_t n, uint32_t *ret_at);
void floor_unpin(const struct floor *f, size_t n);

/* Takes the entries out of all caches. */
void floor_flush(const struct floor *f, const struct floor_key *keys, size_t n);

#endif
