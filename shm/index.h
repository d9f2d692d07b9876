/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an index: hashing, comparing, probing. Shared by the daemon and the library; changes
 * nothing.
 *
 * All of this is inline and branch-poor because the product is measured by it: a resident key must
 * cost little more than the cache miss of its line. */
#ifndef KVD_SHM_INDEX_H
#define KVD_SHM_INDEX_H

#include <stdbool.h>
#include <string.h>

#include "layout.h"

#if defined(__SANITIZE_THREAD__)
#define SHM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SHM_TSAN 1
#endif
#endif

#if defined(__SSE2__) && !defined(SHM_TSAN)
#include <emmintrin.h>
#endif

/* How far ahead a loop over keys prefetches index lines: enough to cover a cache miss, few enough
 * for the line fill buffers. A power of two. */
#define SHM_AHEAD 16u

static inline uint64_t shm_load64(const _Atomic uint64_t *p)
{
    return atomic_load_explicit(p, memory_order_relaxed);
}

static inline uint32_t shm_load32(const _Atomic uint32_t *p)
{
    return atomic_load_explicit(p, memory_order_relaxed);
}

static inline uint64_t shm_key_word(const struct shm_key *key, unsigned int i)
{
    uint64_t w;

    memcpy(&w, key->hash + 8 * i, sizeof(w));
    return w;
}

/* What a probe needs of an index, in registers. */
struct shm_table {
    const struct shm_entry *lines;
    uint64_t mask;
    uint64_t seed0, seed1;
    unsigned int shift; /* leaves the top bits of a product, as a line's offset in bytes */
};

static inline struct shm_table shm_table_of(const struct shm_index *index)
{
    uint64_t mask = index->header.count - 1;

    return (struct shm_table){.lines = index->lines,
                              .mask = mask,
                              .seed0 = index->seed[0],
                              .seed1 = index->seed[1],
                              .shift = (unsigned int)__builtin_clzll(mask | 1) - 6};
}

/* The line where a key's probe begins: the top bits of a product, each of which depends on all bits of
 * both factors. All 36 bytes count, since opaque keys may differ in the last one only; keys of real
 * schemes are hashes already. The seed is random per index, so nobody outside can aim many keys at one
 * line. */
static inline const struct shm_entry *shm_home_line(const struct shm_table *t,
                                                    const struct shm_key *key)
{
    uint64_t a = (shm_key_word(key, 0) ^ t->seed0) + shm_key_word(key, 2);
    uint64_t b = (shm_key_word(key, 1) ^ t->seed1) + shm_key_word(key, 3) + key->group;
    uint64_t offset = (a * b) >> t->shift & ~(uint64_t)(SHM_LINE - 1);

    return (const struct shm_entry *)((const char *)t->lines + offset);
}

static inline uint64_t shm_home(const struct shm_table *t, const struct shm_key *key)
{
    return (uint64_t)(shm_home_line(t, key) - t->lines);
}

static inline const struct shm_entry *shm_next_line(const struct shm_entry *lines, uint64_t mask,
                                                    const struct shm_entry *e)
{
    return &lines[((uint64_t)(e - lines) + 1) & mask];
}

/* Does the line hold this key in this epoch? The bytes may change meanwhile: whoever acts on the
 * answer re-reads the word. */
static inline bool shm_entry_is(const struct shm_entry *e, const struct shm_key *key,
                                uint32_t epoch)
{
#if defined(__SSE2__) && !defined(SHM_TSAN)
    const __m128i *theirs = (const __m128i *)(const void *)e;
    const __m128i *ours = (const __m128i *)(const void *)key->hash;
    __m128i low = _mm_cmpeq_epi8(_mm_loadu_si128(ours), _mm_load_si128(theirs));
    __m128i high = _mm_cmpeq_epi8(_mm_loadu_si128(ours + 1), _mm_load_si128(theirs + 1));

    return __builtin_expect(_mm_movemask_epi8(_mm_and_si128(low, high)) == 0xffff, 1) &&
           __builtin_expect(shm_load64(&e->scope) == shm_scope(key->group, epoch), 1);
#else
    uint64_t x = shm_load64(&e->scope) ^ shm_scope(key->group, epoch);

    for (unsigned int i = 0; i < 4; i++)
        x |= shm_load64(&e->key[i]) ^ shm_key_word(key, i);
    return x == 0;
#endif
}

/* What a probe found: the line that holds the key, NULL if it is not there, and its word, loaded
 * (acquire, R1) before the key was compared; never EMPTY. Returned by value, so that both stay in
 * registers. */
struct shm_hit {
    const struct shm_entry *entry;
    uint64_t word;
};

/* The rest of a probe whose first line, `e`, is not it. Out of line: it is the rarer case. */
struct shm_hit shm_probe_on(const struct shm_entry *lines, uint64_t mask, const struct shm_entry *e,
                            const struct shm_key *key, uint32_t epoch);

/* Looks for a key from `home`, its home line, on. */
static inline struct shm_hit shm_probe(const struct shm_table *t, const struct shm_entry *home,
                                       const struct shm_key *key, uint32_t epoch)
{
    uint64_t word = atomic_load_explicit(&home->word, memory_order_acquire); /* R1 */

    if (shm_entry_is(home, key, epoch) && __builtin_expect(shm_word_state(word) != SHM_EMPTY, 1))
        return (struct shm_hit){home, word};
    return shm_probe_on(t->lines, t->mask, home, key, epoch);
}

#endif
