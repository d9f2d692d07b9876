/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an index: hashing, probing. Shared by the daemon and the library; changes nothing. */
#ifndef KVD_SHM_INDEX_H
#define KVD_SHM_INDEX_H

#include <string.h>

#include "layout.h"

/* How far ahead a loop over keys prefetches index lines: enough to cover a cache miss, few enough for the
 * line fill buffers. */
#define SHM_AHEAD 16u

/* A key in registers. */
struct shm_probe {
    uint64_t k[4];
    uint32_t group;
    uint32_t epoch;
};

static inline struct shm_probe shm_probe_of(const struct shm_key *key, uint32_t epoch)
{
    struct shm_probe p = {.group = key->group, .epoch = epoch};

    memcpy(p.k, key->hash, sizeof(p.k));
    return p;
}

static inline uint64_t shm_fold(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;

    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

/* Table hash. All 36 bytes count (opaque keys may differ in the last one only), and the seed is random
 * per index, so nobody outside can aim many keys at one line. */
static inline uint64_t shm_hash(const uint64_t seed[4], const struct shm_probe *p)
{
    return shm_fold(p->k[0] ^ seed[0], p->k[1] ^ seed[1]) ^
           shm_fold(p->k[2] ^ seed[2], p->k[3] ^ seed[3] ^ p->group * 0x9e3779b97f4a7c15ull);
}

static inline uint64_t shm_load64(const _Atomic uint64_t *p)
{
    return atomic_load_explicit(p, memory_order_relaxed);
}

static inline uint32_t shm_load32(const _Atomic uint32_t *p)
{
    return atomic_load_explicit(p, memory_order_relaxed);
}

/* Does the entry hold this key, in this epoch? One branch for the caller, none in here. */
static inline int shm_entry_is(const struct shm_entry *e, const struct shm_probe *p)
{
    uint64_t x = (shm_load64(&e->key[0]) ^ p->k[0]) | (shm_load64(&e->key[1]) ^ p->k[1]) |
                 (shm_load64(&e->key[2]) ^ p->k[2]) | (shm_load64(&e->key[3]) ^ p->k[3]);
    uint32_t y = (shm_load32(&e->group) ^ p->group) | (shm_load32(&e->epoch) ^ p->epoch);

    return (x | y) == 0;
}

/* The line that holds the key, from `home` (its hash & mask) on; NULL: not there. The word seen is in
 * *ret_word; it was loaded (acquire, R1) before the key was compared and is not EMPTY. The probe ends by
 * the overflow counters; the bound only guards against a damaged table. */
static inline const struct shm_entry *shm_find(const struct shm_entry *lines, uint64_t mask,
                                               uint64_t home, const struct shm_probe *p,
                                               uint64_t *ret_word)
{
    uint64_t i = home;

    do {
        const struct shm_entry *e = &lines[i];
        uint64_t word = atomic_load_explicit(&e->word, memory_order_acquire); /* R1 */

        if (shm_entry_is(e, p) && shm_word_state(word) != SHM_EMPTY) {
            *ret_word = word;
            return e;
        }
        if (!shm_load32(&e->overflow))
            return NULL;
        i = (i + 1) & mask;
    } while (i != home);
    return NULL;
}

#endif
