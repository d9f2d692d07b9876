/* SPDX-License-Identifier: Apache-2.0 */
/* I3 under ThreadSanitizer: threads stand for worker processes and pin, read and release while the
 * core evicts and gives slots to new objects, whose bytes are then written. Reads and writes of the
 * bytes are plain: if a pinned slot were ever reused, or a release did not order the reads before
 * it, that is a race that the sanitizer reports, and a wrong byte that the test finds. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/core_world.h"

#define READERS 3
#define KEYS    96 /* half again as many as there are slots */
#define ROUNDS  60000

static struct world w;
static uint64_t bytes[64]
                     [8]; /* stands for the pool's memory: slot by slot, the number of the key */
static atomic_bool stop;

struct reader {
    pthread_t thread;
    struct attach *attach;
    uint64_t pins, wrong;
};

static void *read_all(void *arg)
{
    struct reader *r = arg;

    for (uint64_t i = 0; !atomic_load(&stop); i++) {
        uint64_t n = (i * 2654435761u) % KEYS;
        struct shm_key key = world_key(n);
        struct shm_pinned pin;

        if (!world_pin(r->attach, &key, &pin))
            continue;
        r->pins++;
        for (int k = 0; k < 8; k++)
            r->wrong += bytes[pin.slot][k] != n;
        world_unpin(r->attach, &pin);
    }
    return NULL;
}

static void publish(struct attach *a, uint64_t n)
{
    struct shm_key key = world_key(n);
    struct reservation r;

    if (world_reserve(a, &key, NULL, &r) != RESERVE_NEW)
        return;
    for (int k = 0; k < 8; k++)
        bytes[r.slot][k] = n;
    cr_assert_eq(world_commit(a, r.ticket, 0), 0);
}

Test(pins, hold_while_slots_are_reused)
{
    struct reader readers[READERS] = {{.pins = 0}};
    struct attach *writer;
    uint64_t pins = 0;

    world_open(&w,
               "[space s]\n[pool s/kv]\nslot = 4K\nslots = 64\nlow_water = 0\nhigh_water = 0\n");
    writer = world_attach(world_session(&w, "", 0), w.pool);
    for (int i = 0; i < READERS; i++)
        readers[i].attach = world_attach(world_session(&w, "", 0), w.pool);
    for (int i = 0; i < READERS; i++)
        cr_assert_eq(pthread_create(&readers[i].thread, NULL, read_all, &readers[i]), 0);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        publish(writer, i % KEYS);
        if (i % 64 == 0)
            sched_yield();
    }
    atomic_store(&stop, true);
    for (int i = 0; i < READERS; i++) {
        pthread_join(readers[i].thread, NULL);
        cr_assert_eq(readers[i].wrong, 0u);
        pins += readers[i].pins;
    }
    printf("%llu pins, %llu evictions, %llu found pinned after hiding\n", (unsigned long long)pins,
           (unsigned long long)w.pool->stats.evicted, (unsigned long long)w.pool->stats.restored);
    cr_assert_gt(pins, 0u);
    cr_assert_gt(w.pool->stats.evicted, 1000u);
    world_close(&w);
}
