/* SPDX-License-Identifier: Apache-2.0 */
#include "index.h"

#include <errno.h>

uint64_t index_lines_for(uint64_t slots)
{
    uint64_t lines = 16;

    while (lines < slots * 2)
        lines *= 2;
    return lines;
}

static uint64_t home_of(const struct shm_index *ix, const struct shm_probe *p)
{
    return shm_hash(ix->seed, p) & (ix->header.count - 1);
}

struct shm_entry *index_find(struct shm_index *ix, const struct shm_key *key, uint32_t epoch)
{
    struct shm_probe p = shm_probe_of(key, epoch);
    uint64_t word;

    return (struct shm_entry *)shm_find(ix->lines, ix->header.count - 1, home_of(ix, &p), &p, &word);
}

static uint64_t word_of(const struct shm_entry *e)
{
    return atomic_load_explicit(&e->word, memory_order_relaxed); /* our own stores */
}

static void count_overflow(struct shm_index *ix, uint64_t home, uint64_t line, uint32_t by)
{
    uint64_t mask = ix->header.count - 1;

    for (uint64_t i = home; i != line; i = (i + 1) & mask) {
        uint32_t n = shm_load32(&ix->lines[i].overflow);

        atomic_store_explicit(&ix->lines[i].overflow, n + by, memory_order_relaxed);
    }
}

static void store_key(struct shm_entry *e, const struct shm_probe *p)
{
    for (int i = 0; i < 4; i++)
        atomic_store_explicit(&e->key[i], p->k[i], memory_order_relaxed);
    atomic_store_explicit(&e->group, p->group, memory_order_relaxed);
    atomic_store_explicit(&e->epoch, p->epoch, memory_order_relaxed);
}

int index_insert(struct shm_index *ix, const struct shm_key *key, uint32_t epoch, uint32_t slot,
                 uint32_t *ret_line)
{
    struct shm_probe p = shm_probe_of(key, epoch);
    uint64_t mask = ix->header.count - 1, home = home_of(ix, &p), line = home;
    struct shm_entry *e;

    while (shm_word_state(word_of(&ix->lines[line])) != SHM_EMPTY) {
        line = (line + 1) & mask;
        if (line == home)
            return -ENOSPC;
    }
    e = &ix->lines[line];
    /* A reader that saw the line's former key LIVE and is still comparing must not take half of this
     * key for its own: it re-reads the word (R4), which has been EMPTY since before these stores. */
    atomic_thread_fence(memory_order_release);
    store_key(e, &p);
    /* The path first: a reader that can see the key must be able to reach it. */
    count_overflow(ix, home, line, 1);
    atomic_store_explicit(&e->word,
                          shm_word(shm_word_generation(word_of(e)), SHM_PENDING, slot),
                          memory_order_release); /* pairs with R1 */
    *ret_line = (uint32_t)line;
    return 0;
}

static void set_state(struct shm_index *ix, uint32_t line, enum shm_state state)
{
    struct shm_entry *e = &ix->lines[line];
    uint64_t w = word_of(e);

    atomic_store_explicit(&e->word, shm_word(shm_word_generation(w), state, shm_word_slot(w)),
                          memory_order_release); /* pairs with R1 and R4 */
}

void index_publish(struct shm_index *ix, uint32_t line, uint64_t bytes)
{
    atomic_store_explicit(&ix->lines[line].last_byte, (uint32_t)(bytes - 1), memory_order_relaxed);
    set_state(ix, line, SHM_LIVE);
}

void index_hide(struct shm_index *ix, uint32_t line)
{
    set_state(ix, line, SHM_LEAVING); /* A1 */
}

void index_restore(struct shm_index *ix, uint32_t line)
{
    set_state(ix, line, SHM_LIVE);
}

void index_remove(struct shm_index *ix, uint32_t line)
{
    struct shm_entry *e = &ix->lines[line];
    struct shm_probe p = {.group = shm_load32(&e->group), .epoch = shm_load32(&e->epoch)};

    for (int i = 0; i < 4; i++)
        p.k[i] = shm_load64(&e->key[i]);
    atomic_store_explicit(&e->word, shm_word(shm_word_generation(word_of(e)) + 1, SHM_EMPTY, 0),
                          memory_order_release); /* A4; pairs with R4 */
    count_overflow(ix, home_of(ix, &p), line, UINT32_MAX);
}
