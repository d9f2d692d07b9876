/* SPDX-License-Identifier: Apache-2.0 */
#include "ring.h"

#include <errno.h>

uint32_t shm_ring_room(const struct shm_cursor *c)
{
    uint32_t head = atomic_load_explicit(&c->ring->head, memory_order_acquire);
    uint32_t used = c->mine - head;

    return used <= c->entries ? c->entries - used : 0;
}

void shm_ring_produce(struct shm_cursor *c, uint32_t n)
{
    c->mine += n;
    atomic_store_explicit(&c->ring->tail, c->mine, memory_order_release);
}

int64_t shm_ring_waiting(const struct shm_cursor *c)
{
    uint32_t tail = atomic_load_explicit(&c->ring->tail, memory_order_acquire);
    uint32_t n = tail - c->mine;

    return n <= c->entries ? (int64_t)n : -EPROTO;
}

void shm_ring_consume(struct shm_cursor *c, uint32_t n)
{
    c->mine += n;
    atomic_store_explicit(&c->ring->head, c->mine, memory_order_release);
}
