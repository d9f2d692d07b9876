/* SPDX-License-Identifier: Apache-2.0 */
/* The two rings of a session: one producer and one consumer each. The daemon's side trusts nothing
 * that the other side can write. */
#ifndef KVD_SHM_RING_H
#define KVD_SHM_RING_H

#include <stdbool.h>

#include "layout.h"

/* One side's own view. `mine` is the index this side advances (head of a consumer, tail of a
 * producer); it is published to shared memory and never read back from there. */
struct shm_cursor {
    struct shm_ring *ring;
    uint32_t entries;
    uint32_t mine;
};

/* ---- producer */

/* Free entries; 0 also when the peer's index makes no sense. */
uint32_t shm_ring_room(const struct shm_cursor *c);

/* Publishes n entries that were written at cursor positions mine .. mine + n - 1. Release: pairs
 * with the acquire load in shm_ring_waiting(). */
void shm_ring_produce(struct shm_cursor *c, uint32_t n);

/* ---- consumer */

/* Entries that wait, or -EPROTO when the peer's index makes no sense. */
int64_t shm_ring_waiting(const struct shm_cursor *c);

/* Gives n entries back to the producer. Release: the entries were read before. */
void shm_ring_consume(struct shm_cursor *c, uint32_t n);

/* Entry number `index` of a ring counts from its start. */
static inline uint32_t shm_ring_at(const struct shm_cursor *c, uint32_t index)
{
    return index & (c->entries - 1);
}

static inline struct shm_completion *shm_completion_array(struct shm_session *s, uint32_t entries)
{
    return (struct shm_completion *)((char *)s + shm_completions_offset(entries));
}

/* ---- sleeping and waking: labels as in the essay of layout.h */

/* W2, W3. True: the peer sleeps and must be sent a message. */
static inline bool shm_must_wake(const _Atomic uint32_t *flag)
{
    shm_full_fence(); /* W2 pairs with S2 */
    return atomic_load_explicit(flag, memory_order_relaxed) != 0;
}

/* S1, S2. The caller then rescans (S3) before it sleeps (S4). */
static inline void shm_going_to_sleep(_Atomic uint32_t *flag)
{
    atomic_store_explicit(flag, 1, memory_order_relaxed);
    shm_full_fence(); /* S2 pairs with W2 */
}

static inline void shm_awake(_Atomic uint32_t *flag)
{
    if (atomic_load_explicit(flag, memory_order_relaxed))
        atomic_store_explicit(flag, 0, memory_order_relaxed);
}

#endif
