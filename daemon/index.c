/* SPDX-License-Identifier: Apache-2.0 */
#include "index.h"

#include <errno.h>

uint64_t index_lines_for(uint64_t slots)
{
    uint64_t lines = 16;

    while (lines < slots * 3)
        lines *= 2;
    return lines;
}

struct shm_entry *index_find(struct shm_index *ix, const struct shm_key *key, uint32_t epoch)
{
    struct shm_table t = shm_table_of(ix);

    return (struct shm_entry *)shm_probe(&t, &t.lines[shm_home(&t, key)], key, epoch).entry;
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

static void store_key(struct shm_entry *e, const struct shm_key *key, uint32_t epoch)
{
    for (unsigned int i = 0; i < 4; i++)
        atomic_store_explicit(&e->key[i], shm_key_word(key, i), memory_order_relaxed);
    atomic_store_explicit(&e->scope, shm_scope(key->group, epoch), memory_order_relaxed);
}

static struct shm_key load_key(const struct shm_entry *e)
{
    struct shm_key key = {.group = (uint32_t)shm_load64(&e->scope)};

    for (unsigned int i = 0; i < 4; i++) {
        uint64_t w = shm_load64(&e->key[i]);

        memcpy(key.hash + 8 * i, &w, sizeof(w));
    }
    return key;
}

int index_insert(struct shm_index *ix, const struct shm_key *key, uint32_t epoch, uint32_t slot,
                 uint32_t *ret_line)
{
    struct shm_table t = shm_table_of(ix);
    uint64_t home = shm_home(&t, key), line = home;
    struct shm_entry *e;

    while (shm_word_state(word_of(&ix->lines[line])) != SHM_EMPTY) {
        line = (line + 1) & t.mask;
        if (line == home)
            return -ENOSPC;
    }
    e = &ix->lines[line];
    /* A reader that saw the line's former key LIVE and is still comparing must not take half of
     * this key for its own: it re-reads the word (R4), which has been EMPTY since before these
     * stores. */
    atomic_thread_fence(memory_order_release);
    store_key(e, key, epoch);
    /* The path first: a reader that can see the key must be able to reach it. */
    count_overflow(ix, home, line, 1);
    atomic_store_explicit(&e->word, shm_word(shm_word_generation(word_of(e)), SHM_PENDING, slot),
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
    struct shm_table t = shm_table_of(ix);
    struct shm_entry *e = &ix->lines[line];
    struct shm_key key = load_key(e);

    atomic_store_explicit(&e->word, shm_word(shm_word_generation(word_of(e)) + 1, SHM_EMPTY, 0),
                          memory_order_release); /* A4; pairs with R4 */
    count_overflow(ix, shm_home(&t, &key), line, UINT32_MAX);
}
