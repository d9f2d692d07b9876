/* SPDX-License-Identifier: Apache-2.0 */
/* What a store gives up, and whether what it keeps can be reached: also after a crash. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "spill_world.h"

#define POOL    "[space s]\n[pool s/kv]\nslot = 16K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"
#define DISK    "[spill s/kv/disk]\npath = %s/disk\nsize = 4M\n" /* 127 records */

#define OBJECTS 4000u

static struct place p;
static uint64_t parents[OBJECTS];

#define EVICT_TEST(name) PLACE_TEST(spill_evict, name)

static uint64_t random_parent(uint64_t i)
{
    return parents[i];
}

/* Chains that branch: mostly on from the last one, sometimes from any of the last hundred, sometimes new. */
static void make_chains(unsigned int seed)
{
    for (uint64_t i = 0; i < OBJECTS; i++) {
        unsigned int x = (unsigned int)rand_r(&seed) % 100;

        if (i == 0 || x < 15)
            parents[i] = PLACE_ROOT;
        else if (x < 30)
            parents[i] = i - 1 - (unsigned int)rand_r(&seed) % (i < 100 ? i : 100);
        else
            parents[i] = i - 1;
    }
    p.parent = random_parent;
}

static uint32_t records(void)
{
    return (uint32_t)place_status(&p, "s/kv/disk").records;
}

EVICT_TEST(tails_leave_a_full_store_first)
{
    uint32_t n;

    place_open(&p, POOL DISK);
    for (uint64_t i = 0; i < 40; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW); /* a chain */
    place_write_all(&p);
    place_drop_ram(&p);
    for (uint64_t i = 0; i < 40; i++) /* its head is the oldest by far */
        cr_assert(place_stored(&p, i));
    n = records();
    for (uint64_t i = 1000; place_stored(&p, 20); i++) {
        uint64_t head = 0;

        cr_assert_lt(i, 1000u + 4 * n);
        place_put(&p, i * 100); /* single ones */
        if (i % 8 == 7)
            place_write_all(&p);
        while (head < 40 && place_stored(&p, head))
            head++;
        for (uint64_t k = head; k < 40; k++)
            cr_assert_not(place_stored(&p, k), "%llu without %llu", (unsigned long long)k,
                          (unsigned long long)head);
    }
    cr_assert(place_stored(&p, 0));
    cr_assert_gt(place_status(&p, "s/kv/disk").stats.evicted, 0u);
    place_write_all(&p);
    place_close(&p);
}

EVICT_TEST(what_is_in_ram_as_well_is_passed_over)
{
    place_open(&p, POOL DISK);
    for (uint64_t i = 0; i < 32; i++)
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
    place_write_all(&p);
    for (uint64_t i = 32; i < 600; i++) {
        for (uint64_t k = 0; k < 32; k++) { /* they stay young in ram; the store is not told */
            struct shm_pinned pin;

            cr_assert(place_pin(&p, 100 * k, &pin));
            world_unpin(p.attach, &pin);
        }
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
        if (i % 8 == 7)
            place_write_all(&p);
    }
    for (uint64_t i = 0; i < 32; i++)
        cr_assert(place_stored(&p, 100 * i));
    place_write_all(&p);
    cr_assert_gt(place_status(&p, "s/kv/disk").stats.evicted, 300u);
    cr_assert_eq(place_status(&p, "s/kv/disk").stats.written_objects, 600u); /* each once */
    place_close(&p);
}

/* More of them than one search looks at. */
EVICT_TEST(however_many_are_in_ram_as_well_the_others_make_room)
{
    struct shm_pinned pins[100];

    place_open(
        &p,
        "[space s]\n[pool s/kv]\nslot = 16K\nslots = 128\nlow_water = 0\nhigh_water = 0\n" DISK);
    for (uint64_t i = 0; i < 100; i++) {
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
        cr_assert(place_pin(&p, 100 * i, &pins[i]));
    }
    place_write_all(&p); /* these are the coldest of the store, and stay in ram */
    for (uint64_t i = 100; i < 300; i++) {
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
        place_write_all(&p);
        cr_assert(place_stored(&p, 100 * i));
    }
    cr_assert_eq(spill_stats(p.w.pool)->refused, 0u);
    for (uint64_t i = 0; i < 100; i++) {
        cr_assert(place_stored(&p, 100 * i));
        world_unpin(p.attach, &pins[i]);
    }
    place_close(&p);
}

/* The child wants its parent to go first, which was refused; nobody must try that for ever. */
EVICT_TEST(a_child_of_what_was_refused_is_refused_too)
{
    uint64_t refused;

    place_open(&p, "[space s]\n[pool s/kv]\nslot = 16K\nslots = 256\nlow_water = 0\n"
                   "high_water = 0\n" DISK);
    for (uint64_t i = 0; i < records(); i++)
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
    place_write_all(&p); /* full of what is in ram as well */
    cr_assert_eq(place_status(&p, "s/kv/disk").used, records());
    cr_assert_eq(place_put(&p, 100000), RESERVE_NEW);
    place_write_all(&p);
    refused = spill_stats(p.w.pool)->refused;
    cr_assert_gt(refused, 0u);
    for (uint64_t i = 100001; i < 100005; i++) {
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
        place_write_all(&p);
    }
    cr_assert_gt(spill_stats(p.w.pool)->refused, refused);
    cr_assert_eq(place_status(&p, "s/kv/disk").used, records());
    place_close(&p);
}

EVICT_TEST(a_store_smaller_than_its_pool_refuses_and_keeps_what_it_has)
{
    place_open(&p, "[space s]\n[pool s/kv]\nslot = 16K\nslots = 256\nlow_water = 0\n"
                   "high_water = 0\n" DISK);
    for (uint64_t i = 0; i < 200; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_write_all(&p);
    cr_assert_eq(place_status(&p, "s/kv/disk").used, records());
    cr_assert_eq(place_count_orphans(&p, 200), 0u);
    cr_assert_gt(spill_stats(p.w.pool)->refused, 0u);
    place_drop_ram(&p); /* now there is room */
    for (uint64_t i = 300; i < 330; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_write_all(&p);
    for (uint64_t i = 300; i < 330; i++)
        cr_assert(place_stored(&p, i));
    place_close(&p);
}

#define READS 8u

EVICT_TEST(what_is_being_read_is_not_given_away)
{
    uint32_t n;
    uint64_t tag;

    place_open(&p, POOL DISK);
    for (uint64_t i = 0; i < 60; i++)
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
    place_write_all(&p);
    place_close(&p);
    place_open_faulty(&p, POOL DISK "queue_depth = 32\n", "read:hang:from=2M:to=1G");
    n = records();
    for (uint64_t i = 0; i < READS; i++)
        cr_assert_eq(place_ask(&p, 100 * i, i), 1);
    place_turns(&p, 3);
    for (uint64_t i = 100; i < 100 + 3 * n; i++) { /* everything else leaves */
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
        if (i % 8 == 7)
            place_write_all(&p);
    }
    place_write_all(&p);
    for (uint64_t i = 0; i < READS; i++)
        cr_assert(place_stored(&p, 100 * i));
    cr_assert_not(place_stored(&p, 5900));
    place_release(&p);
    for (uint64_t i = 0; i < READS; i++)
        cr_assert_eq(place_completion(&p, &tag), 0);
    for (uint64_t i = 0; i < READS; i++)
        place_check_object(&p, 100 * i);
    place_settle(&p);
    place_close(&p);
}

/* The parent is only in the store, and its coldest tail: until its child comes. */
EVICT_TEST(a_parent_does_not_make_room_for_its_own_child)
{
    struct reservation r;
    uint32_t n;

    place_open(&p, POOL DISK);
    n = records();
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW);
    place_write_all(&p);
    for (uint64_t i = 1; i < n; i++) {
        cr_assert_eq(place_put(&p, 100 * i), RESERVE_NEW);
        if (i % 8 == 7)
            place_write_all(&p);
    }
    place_write_all(&p);
    place_drop_ram(&p);
    cr_assert_eq(place_status(&p, "s/kv/disk").used, n);
    for (uint64_t i = 1; i < n; i++) { /* used later than it */
        struct shm_key k = world_key(100 * i);

        pool_observe(p.w.pool, &k, p.w.space->epoch);
    }
    cr_assert_eq(place_reserve(&p, 1, &r), RESERVE_NEW); /* child of 0 */
    place_commit(&p, 1, &r);
    place_write_all(&p);
    cr_assert(place_stored(&p, 0));
    cr_assert(place_stored(&p, 1));
    cr_assert_eq(place_status(&p, "s/kv/disk").used, n);
    place_close(&p);
}

/* ---- I2, measured */

static void check_reach(const char *when)
{
    uint32_t stored = place_count_stored(&p, OBJECTS), orphans = place_count_orphans(&p, OBJECTS);

    cr_assert_leq(orphans * 100, stored, "%s: %u of %u stored ones cannot be reached", when,
                  orphans, stored);
}

static void churn(uint64_t from, uint64_t to, unsigned int *seed)
{
    for (uint64_t i = from; i < to; i++) {
        if (place_put(&p, i) == -ENOSPC)
            place_turn(&p);
        if (rand_r(seed) % 4 == 0)
            place_turn(&p);
        if (rand_r(seed) % 8 == 0)
            place_ask(&p, i - (uint64_t)rand_r(seed) % (i < 200 ? i + 1 : 200), i);
        while (place_has_completion(p.session)) {
            uint64_t tag;

            place_completion(&p, &tag);
        }
        if (i % 50 == 0) {
            check_reach("running");
            spill_check(p.w.pool);
        }
    }
}

EVICT_TEST(what_random_chains_leave_in_a_store_can_be_reached_at_any_time)
{
    unsigned int seed = 7;

    make_chains(5);
    place_open_faulty(&p, POOL DISK, "write:delay=1");
    churn(0, 1500, &seed);
    place_settle(&p);
    check_reach("at the end");
    cr_assert_gt(place_status(&p, "s/kv/disk").stats.evicted, 100u);
    place_close(&p);
}

/* What a crash cuts off in the middle is a few objects, whatever the size of the store: this one has a
 * thousand. */
#define CRASHED                                                                                    \
    "[space s]\n[pool s/kv]\nslot = 4K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"               \
    "[spill s/kv/disk]\npath = %s/disk\nsize = 6M\n"

EVICT_TEST(and_after_a_crash_at_any_time)
{
    unsigned int seed = 11;
    uint64_t next = 0;
    uint32_t found = 0;

    make_chains(6);
    for (int run = 0; run < 12; run++) {
        uint64_t to = next + (run ? 100 + (uint64_t)rand_r(&seed) % 200 : 900);

        place_open_faulty(&p, CRASHED, "write:delay=1");
        check_reach("after a crash");
        for (uint64_t i = 0; i < next; i++) {
            if (!place_stored(&p, i) || rand_r(&seed) % 16)
                continue;
            if (place_fetch(&p, i) != 0)
                continue; /* its record was there, its data not any more */
            place_check_object(&p, i);
            found++;
        }
        place_sleep(&p, 6);
        churn(next, to, &seed);
        next = to;
        place_copy(&p, "disk", "copy"); /* as it is, with writes on their way */
        place_settle(&p);
        place_close(&p);
        place_rename(&p, "copy", "disk");
    }
    cr_assert_gt(found, 30u);
}

/* The same with two stores: parents lie in either. */
EVICT_TEST(parents_are_found_in_the_other_store_when_both_are_loaded)
{
    static const char two[] = POOL DISK "[spill s/kv/other]\npath = %s/other\nsize = 4M\n";
    unsigned int seed = 3;

    make_chains(9);
    for (int run = 0; run < 4; run++) {
        place_open(&p, two);
        check_reach("loaded");
        churn((uint64_t)run * 400, (uint64_t)run * 400 + 400, &seed);
        place_settle(&p);
        check_reach("filled");
        place_close(&p);
    }
}
