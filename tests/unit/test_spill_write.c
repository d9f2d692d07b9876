/* SPDX-License-Identifier: Apache-2.0 */
/* Write-behind: order, admission, limits, several stores, all sizes. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "spill_world.h"

#define POOL "[space s]\n[pool s/kv]\nslot = 64K\nslots = 128\nlow_water = 0\nhigh_water = 0\n"
#define DISK "[spill s/kv/disk]\npath = %s/disk\nsize = 16M\n"

static struct place p;

#define WRITE_TEST(name) PLACE_TEST(spill_write, name)

static const struct spill_stats *stats(void)
{
    return spill_stats(p.w.pool);
}

/* A heap: up to six generations of two children each. */
static uint64_t parent_in_tree(uint64_t i)
{
    return i ? (i - 1) / 2 : PLACE_ROOT;
}

/* At each instant what is stored is whole (I2). */
static void write_and_watch(uint64_t n)
{
    for (int i = 0; i < 20000 && nvme_unwritten(p.w.core->nvme); i++) {
        place_turn(&p);
        cr_assert_eq(place_count_orphans(&p, n), 0u);
    }
    cr_assert_eq(nvme_unwritten(p.w.core->nvme), 0u);
}

WRITE_TEST(parents_are_written_first_although_children_are_committed_first)
{
    struct reservation r[100];

    p.parent = parent_in_tree;
    place_open_faulty(&p, POOL DISK, "write:delay=2");
    for (uint64_t i = 0; i < 100; i++)
        cr_assert_eq(place_reserve(&p, i, &r[i]), RESERVE_NEW);
    for (uint64_t i = 100; i-- > 0;)
        place_commit(&p, i, &r[i]);
    write_and_watch(100);
    cr_assert_eq(place_count_stored(&p, 100), 100u);
    cr_assert_eq(stats()->orphans, 0u);
    place_drop_ram(&p);
    for (uint64_t i = 0; i < 100; i++)
        cr_assert_eq(place_fetch(&p, i), 0);
    for (uint64_t i = 0; i < 100; i++)
        place_check_object(&p, i);
    place_close(&p);
}

WRITE_TEST(a_child_waits_for_a_parent_that_is_being_written_by_its_worker)
{
    struct reservation up, down;

    place_open(&p, POOL DISK);
    place_reserve(&p, 0, &up);
    place_reserve(&p, 1, &down);
    place_commit(&p, 1, &down);
    place_turns(&p, 20);
    cr_assert_not(place_stored(&p, 1));
    place_commit(&p, 0, &up);
    write_and_watch(2);
    cr_assert(place_stored(&p, 0) && place_stored(&p, 1));
    place_close(&p);
}

WRITE_TEST(a_child_whose_parent_is_given_up_is_not_written)
{
    struct reservation up, down;

    place_open(&p, POOL DISK);
    place_reserve(&p, 0, &up);
    place_reserve(&p, 1, &down);
    place_commit(&p, 1, &down);
    place_turns(&p, 5);
    cr_assert_eq(pool_abort(p.w.pool, p.attach, up.ticket), 0);
    place_write_all(&p);
    place_turns(&p, 5);
    cr_assert_eq(place_count_stored(&p, 2), 0u);
    cr_assert_eq(stats()->orphans, 1u);
    place_close(&p);
}

WRITE_TEST(the_descendants_of_an_object_that_is_in_no_tier_are_not_written)
{
    place_open(&p, POOL DISK);
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW);
    cr_assert_eq(pool_evict(p.w.pool, 1, HISTORY_EVICTED), 1u); /* before it was written */
    for (uint64_t i = 1; i < 20; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_write_all(&p);
    place_turns(&p, 5);
    cr_assert_eq(place_count_stored(&p, 20), 0u);
    cr_assert_geq(stats()->orphans, 1u);
    place_put_all(&p, 100, 110);
    place_write_all(&p);
    for (uint64_t i = 100; i < 110; i++)
        cr_assert(place_stored(&p, i));
    place_close(&p);
}

WRITE_TEST(parents_in_a_circle_do_no_harm)
{
    struct shm_key a = world_key(1000), b = world_key(1001);
    struct reservation ra, rb;

    place_open(&p, POOL DISK);
    world_reserve(p.attach, &a, &b, &ra);
    world_reserve(p.attach, &b, &a, &rb);
    cr_assert_eq(world_commit(p.attach, ra.ticket, 0), 0);
    cr_assert_eq(world_commit(p.attach, rb.ticket, 0), 0);
    place_write_all(&p);
    place_put_all(&p, 0, 10);
    place_write_all(&p);
    cr_assert_eq(place_count_stored(&p, 10), 10u);
    cr_assert_not(spill_has(p.w.pool, &a, p.w.space->epoch));
    place_close(&p);
}

/* A snapshot whose parent is a block. It needs no record of its parent's to be found again. */
WRITE_TEST(the_child_of_an_object_in_another_pool_is_written)
{
    static const char two_pools[] = POOL DISK "[pool s/blocks]\nslot = 4K\nslots = 64\n";
    struct attach *blocks;
    struct shm_key block = world_key(0);
    struct reservation r;

    place_open(&p, two_pools);
    blocks = world_attach(p.session, p.w.core->pools[1]);
    cr_assert_eq(world_reserve(blocks, &block, NULL, &r), RESERVE_NEW);
    cr_assert_eq(world_commit(blocks, r.ticket, 0), 0);
    cr_assert_eq(place_put(&p, 1), RESERVE_NEW);
    cr_assert_eq(place_put(&p, 2), RESERVE_NEW);
    write_and_watch(3);
    cr_assert_eq(place_count_stored(&p, 3), 2u);
    place_close(&p);
    place_open(&p, two_pools);
    cr_assert_eq(place_count_stored(&p, 3), 2u);
    place_close(&p);
}

/* ---- admission */

#define SECOND DISK "admission = second_touch\n"

static void touch(uint64_t i)
{
    struct shm_key k = world_key(i);

    pool_observe(p.w.pool, &k, p.w.space->epoch);
}

WRITE_TEST(second_touch_writes_only_what_is_used_again)
{
    place_open(&p, POOL SECOND);
    for (uint64_t i = 0; i < 400; i += 100) /* roots */
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_turns(&p, 20);
    cr_assert_not(place_stored(&p, 0) || place_stored(&p, 100) || place_stored(&p, 200));
    touch(100);
    place_write_all(&p);
    cr_assert(place_stored(&p, 100));
    cr_assert_not(place_stored(&p, 0) || place_stored(&p, 200) || place_stored(&p, 300));
    place_drop_ram(&p);
    cr_assert_eq(stats()->evicted_clean, 1u);
    cr_assert_eq(stats()->evicted_unspilled, 0u);
    place_close(&p);
}

WRITE_TEST(what_is_used_again_takes_parents_along_that_were_used_once)
{
    place_open(&p, POOL SECOND);
    for (uint64_t i = 0; i < 10; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW); /* putting a child touches its parent */
    place_turns(&p, 50);
    touch(9);
    write_and_watch(10);
    cr_assert_eq(place_count_stored(&p, 10), 10u);
    cr_assert_eq(stats()->refused, 0u);
    place_close(&p);
}

static uint64_t no_parent_but_of_1(uint64_t i)
{
    return i == 1 ? 0 : PLACE_ROOT;
}

/* The parent has come back after its child: nothing has touched it since. */
WRITE_TEST(an_untouched_parent_is_admitted_for_the_sake_of_its_child)
{
    struct reservation r;

    p.parent = no_parent_but_of_1;
    place_open(&p, POOL SECOND);
    cr_assert_eq(place_reserve(&p, 1, &r), RESERVE_NEW);
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW);
    place_commit(&p, 1, &r);
    touch(1);
    place_write_all(&p);
    cr_assert(place_stored(&p, 0) && place_stored(&p, 1));
    cr_assert_eq(stats()->refused, 0u);
    place_close(&p);
}

/* ---- what leaves */

WRITE_TEST(evicting_what_is_stored_costs_no_io_and_what_is_not_is_counted)
{
    uint64_t written;

    place_open(&p, POOL DISK);
    place_put_all(&p, 0, 40);
    place_write_all(&p);
    place_turns(&p, 5);
    written = place_status(&p, "s/kv/disk").stats.physical_written;
    place_put_all(&p, 100, 130);
    while (pool_evict(p.w.pool, 128, HISTORY_EVICTED)) /* before they are written */
        ;
    cr_assert_eq(p.w.pool->count[SHM_SLOT_LIVE], 0u);
    cr_assert_eq(stats()->evicted_clean, 40u);
    cr_assert_eq(stats()->evicted_unspilled, 30u);
    place_turns(&p, 20);
    cr_assert_eq(place_status(&p, "s/kv/disk").stats.physical_written, written);
    place_close(&p);
}

WRITE_TEST(what_was_promoted_is_not_written_again)
{
    uint64_t written;

    place_open(&p, POOL DISK);
    place_put_all(&p, 0, 40);
    place_write_all(&p);
    place_turns(&p, 5);
    written = place_status(&p, "s/kv/disk").stats.physical_written;
    for (int round = 0; round < 3; round++) {
        place_drop_ram(&p);
        for (uint64_t i = 0; i < 40; i++)
            cr_assert_eq(place_fetch(&p, i), 0);
    }
    cr_assert_eq(place_status(&p, "s/kv/disk").stats.physical_written, written);
    cr_assert_eq(stats()->promoted, 120u);
    place_close(&p);
}

WRITE_TEST(a_slot_is_not_reused_while_its_bytes_are_being_written)
{
    place_open_faulty(&p, POOL DISK, "write:hang:from=2M:to=1G");
    place_put_all(&p, 0, 100);
    place_turns(&p, 5);
    for (uint64_t i = 1000; i < 1500; i++) /* far more than the pool holds */
        place_put(&p, i);
    place_release(&p);
    place_settle(&p);
    place_drop_ram(&p);
    for (uint64_t i = 0; i < 1500; i++)
        if (place_find(&p, i) == SHM_FOUND_NVME) {
            cr_assert_eq(place_fetch(&p, i), 0);
            place_check_object(&p, i);
        }
    cr_assert_gt(stats()->promoted, 0u);
    cr_assert_gt(stats()->evicted_unspilled, 0u);
    place_close(&p);
}

/* ---- limits */

static uint64_t payload(void)
{
    return place_status(&p, "s/kv/disk").stats.written_bytes;
}

WRITE_TEST(the_bandwidth_is_capped)
{
    uint64_t start, after;

    place_open(&p, POOL DISK "bandwidth = 1M\n");
    place_put_all(&p, 0, 100);
    start = p.w.now_ns;
    for (int i = 0; i < 1000; i++) { /* a second of the clock */
        place_turn(&p);
        after = payload();
        cr_assert_leq(after, (1 << 18) + 65536 + (p.w.now_ns - start) / 1000 * 1049 / 1000);
    }
    cr_assert_geq(after, 900000u);
    place_close(&p);
}

WRITE_TEST(the_wear_of_a_day_is_capped)
{
    place_open(&p, POOL DISK "wear = 1M\n");
    place_put_all(&p, 0, 100);
    place_turns(&p, 200);
    cr_assert_leq(payload(), 1u << 20);
    cr_assert_gt(payload(), (1u << 20) - 2 * 65536u);
    p.w.now_ns += 86400000000000u;
    place_turns(&p, 200);
    cr_assert_leq(payload(), 2u << 20);
    cr_assert_gt(payload(), (2u << 20) - 4 * 65536u);
    place_close(&p);
}

/* ---- more than one */

#define TWO DISK "[spill s/kv/other]\npath = %s/other\nsize = 16M\n"

WRITE_TEST(several_stores_share_the_objects_of_a_pool)
{
    uint64_t a, b;

    p.parent = parent_in_tree;
    place_open(&p, POOL TWO);
    place_put_all(&p, 0, 120);
    write_and_watch(120);
    a = place_status(&p, "s/kv/disk").used;
    b = place_status(&p, "s/kv/other").used;
    cr_assert_eq(a + b, 120u);
    cr_assert_gt(a, 20u);
    cr_assert_gt(b, 20u);
    place_close(&p);
    place_open(&p, POOL TWO);
    cr_assert_eq(place_count_stored(&p, 120), 120u);
    cr_assert_eq(place_count_orphans(&p, 120), 0u);
    for (uint64_t i = 0; i < 120; i++) {
        cr_assert_eq(place_fetch(&p, i), 0);
        place_check_object(&p, i);
    }
    place_close(&p);
}

WRITE_TEST(one_store_hangs_and_the_other_goes_on)
{
    p.faulty = "other";
    place_open_faulty(&p, POOL TWO, "any:hang");
    p.parent = NULL;
    for (uint64_t i = 0; i < 100; i++)
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW); /* roots */
    for (int i = 0; i < 2000 && place_status(&p, "s/kv/disk").used < 60; i++)
        place_turn(&p);
    cr_assert_geq(place_status(&p, "s/kv/disk").used, 60u);
    cr_assert_eq(place_status(&p, "s/kv/other").used, 0u);
    place_turns(&p, 100);
    place_sleep(&p, 20);
    cr_assert_str_eq(place_status(&p, "s/kv/other").state, "offline");
    cr_assert_str_eq(place_status(&p, "s/kv/disk").state, "online");
    place_release(&p);
    place_settle(&p);
    place_close(&p);
}

/* ---- sizes */

static void there_and_back(const char *text, uint64_t n)
{
    for (int run = 0; run < 2; run++) {
        place_open(&p, text);
        if (run == 0) {
            place_put_all(&p, 0, n);
            place_write_all(&p);
            place_drop_ram(&p);
        }
        for (uint64_t i = 0; i < n; i++) {
            cr_assert_eq(place_fetch(&p, i), 0, "object %llu", (unsigned long long)i);
            place_check_object(&p, i);
        }
        place_close(&p);
    }
}

WRITE_TEST(the_smallest_objects)
{
    there_and_back("[space s]\n[pool s/kv]\nslot = 4K\nslots = 256\nlow_water = 0\nhigh_water = 0\n"
                   "[spill s/kv/disk]\npath = %s/disk\nsize = 4M\n",
                   256);
}

WRITE_TEST(objects_of_many_pieces)
{
    there_and_back("[space s]\n[pool s/kv]\nslot = 9M\nslots = 6\nlow_water = 0\nhigh_water = 0\n"
                   "[spill s/kv/disk]\npath = %s/disk\nsize = 200M\nqueue_depth = 4\n",
                   6);
}

WRITE_TEST(objects_of_several_parts)
{
    there_and_back("[space s]\n[pool s/kv]\nslot = 7680K\nparts = 5\nslots = 8\nlow_water = 0\n"
                   "high_water = 0\n[spill s/kv/disk]\npath = %s/disk\nsize = 200M\n",
                   8);
}

WRITE_TEST(the_thread_pool_does_the_same)
{
    there_and_back(POOL DISK "io = threads\nqueue_depth = 3\n", 100);
}

WRITE_TEST(a_queue_of_one)
{
    there_and_back(POOL DISK "queue_depth = 1\n", 40);
}

/* ---- two pools are two worlds */

WRITE_TEST(pools_do_not_see_each_others_stores)
{
    struct pool *other;
    struct shm_key k = world_key(3);

    place_open(&p, POOL DISK "[pool s/big]\nslot = 1M\nslots = 8\n[spill s/big/disk]\n"
                             "path = %s/big\nsize = 32M\n");
    other = p.w.core->pools[1];
    place_put_all(&p, 0, 20);
    place_write_all(&p);
    cr_assert_eq(other->spill ? spill_records(other) > 0 : 0, 1);
    cr_assert_not(spill_has(other, &k, p.w.space->epoch));
    cr_assert(spill_has(p.w.pool, &k, p.w.space->epoch));
    place_close(&p);
}
