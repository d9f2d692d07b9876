/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to stores between and beside: other files, resets, removals. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "spill_world.h"

#define SIZE "slot = 64K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"
#define POOL "[space s]\n[pool s/kv]\n" SIZE
#define DISK "[spill s/kv/disk]\npath = %s/disk\nsize = 16M\n"
#define NAME "s/kv/disk"

#define N    64u

static struct place p;

#define LIFE_TEST(name) PLACE_TEST(spill_life, name)

/* ---- files that are not what they should be */

static void truncate_file(const char *file, uint64_t bytes)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", p.dir, file);
    cr_assert_eq(truncate(path, (off_t)bytes), 0);
}

LIFE_TEST(a_file_that_was_truncated_between_runs_is_refused)
{
    place_make_store(&p, POOL DISK, N);
    truncate_file("disk", 8 << 20);
    place_open(&p, POOL DISK);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    cr_assert(strstr(place_status(&p, NAME).problem, "truncated"), "%s",
              place_status(&p, NAME).problem);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    place_put_all(&p, 0, 10);
    place_check_object(&p, 3);
    place_turns(&p, 10);
    place_act(&p, NAME, SPILL_FORMAT, true);
    place_await_state(&p, NAME, "online");
    place_put_all(&p, 10, 20);
    place_write_all(&p);
    cr_assert_geq(place_status(&p, NAME).used, 10u);
    place_close(&p);
}

LIFE_TEST(a_file_that_is_truncated_while_it_is_used_is_a_miss)
{
    struct format_super s;
    uint32_t right;

    place_fill(&p, POOL DISK, N);
    place_drop_ram(&p);
    place_super(&p, "disk", &s);
    truncate_file("disk", s.data + 20 * 65536);
    right = place_fetch_all(&p, N);
    cr_assert_geq(right, 1u);
    cr_assert_leq(right, 20u);
    place_turns(&p, 20);
    cr_assert_eq(place_put(&p, 1000), RESERVE_NEW);
    place_settle(&p);
    place_close(&p);
}

LIFE_TEST(two_stores_that_were_swapped_are_told_apart)
{
    static const char two[] = "[space s]\n[pool s/kv]\n" SIZE DISK "[pool s/big]\n" SIZE
                              "[spill s/big/disk]\npath = %s/big\nsize = 16M\n";

    place_make_store(&p, two, N);
    place_rename(&p, "disk", "x");
    place_rename(&p, "big", "disk");
    place_rename(&p, "x", "big");
    place_open(&p, two);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    cr_assert_str_eq(place_status(&p, "s/big/disk").state, "offline");
    cr_assert_eq(place_count_stored(&p, N), 0u);
    place_close(&p);
}

/* Of the same pool it does not matter which is which; but each has its own identity. */
LIFE_TEST(a_table_of_another_store_of_the_same_pool_is_garbage)
{
    static const char two[] = POOL DISK "[spill s/kv/other]\npath = %s/other\nsize = 16M\n";
    struct format_super s;
    uint8_t *table;
    uint32_t used;

    place_make_store(&p, two, N);
    place_super(&p, "disk", &s);
    table = malloc(s.user - s.table);
    place_read(&p, "disk", table, s.user - s.table, s.table);
    place_write(&p, "other", table, s.user - s.table, s.table);
    free(table);
    place_open(&p, two);
    used = place_status(&p, NAME).used;
    cr_assert_gt(used, 10u);
    cr_assert_eq(place_status(&p, "s/kv/other").used, 0u);
    cr_assert_eq(place_fetch_all(&p, N), used);
    place_close(&p);
}

LIFE_TEST(another_geometry_or_model_is_refused)
{
    static const char *const others[] = {
        "[space s]\n[pool s/kv]\nslot = 32K\nslots = 64\n" DISK,
        "[space s]\n[pool s/kv]\nslot = 64K\nparts = 2\nslots = 64\n" DISK,
        "[space s]\nrevision = other-weights\n[pool s/kv]\n" SIZE DISK,
        "[space s]\nscheme = sglang\n[pool s/kv]\n" SIZE DISK,
    };

    place_make_store(&p, POOL DISK, N);
    for (unsigned int i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        place_open(&p, others[i]);
        cr_assert_str_eq(place_status(&p, NAME).state, "offline", "%u", i);
        cr_assert_eq(place_count_stored(&p, N), 0u);
        place_close(&p);
    }
    place_open(&p, POOL DISK);
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
}

static void fill_random(const char *file, uint64_t from, uint64_t to)
{
    unsigned int seed = 4;
    uint8_t *bytes = malloc(to - from);

    for (uint64_t i = 0; i < to - from; i++)
        bytes[i] = (uint8_t)(rand_r(&seed) >> 4);
    place_write(&p, file, bytes, to - from, from);
    free(bytes);
}

LIFE_TEST(a_table_full_of_garbage_is_an_empty_store)
{
    struct format_super s;

    place_make_store(&p, POOL DISK, N);
    place_super(&p, "disk", &s);
    fill_random("disk", s.table, s.user);
    place_open(&p, POOL DISK);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    cr_assert_eq(place_status(&p, NAME).used, 0u);
    place_put_all(&p, 0, N);
    place_write_all(&p);
    place_drop_ram(&p);
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
}

static uint32_t generation_of(uint64_t i)
{
    struct shm_key k = world_key(i);
    struct format_super s;
    struct format_record r;
    struct spill_entry e;
    uint8_t sector[FORMAT_SECTOR];

    cr_assert(spill_entry(p.w.pool, spill_record_of(p.w.pool, &k, p.w.space->epoch), &e));
    place_super(&p, "disk", &s);
    place_read(&p, "disk", sector, sizeof(sector), format_sector_offset(&s, e.number));
    cr_assert_eq(format_record_decode(sector + e.number % FORMAT_IN_SECTOR * FORMAT_RECORD_BYTES,
                                      &s, e.number, &r),
                 0);
    return r.generation;
}

/* Records are counted in 32 bits, which wrap. */
LIFE_TEST(the_order_of_writing_goes_on_where_it_was_however_many_there_were)
{
    struct format_super s;
    struct format_record r;
    uint8_t sector[FORMAT_SECTOR];

    place_make_store(&p, POOL DISK, N);
    place_super(&p, "disk", &s);
    place_read(&p, "disk", sector, sizeof(sector), s.table);
    for (uint32_t i = 0; i < FORMAT_IN_SECTOR; i++) {
        if (format_record_decode(sector + i * FORMAT_RECORD_BYTES, &s, i, &r) < 0)
            continue;
        r.generation += 0xe0000000u;
        format_record_encode(&r, &s, i, sector + i * FORMAT_RECORD_BYTES);
    }
    memset(sector + FORMAT_RECORD_BYTES, 0, FORMAT_RECORD_BYTES);
    place_write(&p, "disk", sector, sizeof(sector), s.table);
    memset(sector, 0, sizeof(sector)); /* the others would be younger */
    place_write(&p, "disk", sector, sizeof(sector), s.table + FORMAT_SECTOR);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_put(&p, 1000), RESERVE_NEW);
    place_write_all(&p);
    place_turns(&p, 5);
    cr_assert_gt(generation_of(1000), 0xe0000000u);
    place_close(&p);
}

LIFE_TEST(user_metadata_or_data_full_of_garbage_is_a_miss)
{
    struct format_super s;
    uint32_t right;

    place_make_store(&p, POOL DISK, N);
    place_super(&p, "disk", &s);
    fill_random("disk", s.user, s.user + 16384);
    fill_random("disk", s.data, s.data + 8 * 65536 + 4096);
    place_open(&p, POOL DISK);
    right = place_fetch_all(&p, N);
    cr_assert_geq(right, 32u);
    cr_assert_leq(right, N - 8);
    place_turns(&p, 20);
    cr_assert_eq(place_status(&p, NAME).used, right);
    place_close(&p);
}

/* ---- resets */

static void reset_and_wait(void)
{
    space_reset(p.w.space);
    place_await_reset(&p);
}

LIFE_TEST(what_is_older_than_a_reset_is_never_hit_again)
{
    place_fill(&p, POOL DISK, N);
    reset_and_wait();
    place_close(&p); /* at once */
    place_open(&p, POOL DISK);
    cr_assert_eq(p.w.space->epoch, 2u);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    cr_assert_eq(place_ask(&p, 0, 1), -ENOENT);
    place_turns(&p, 10);
    cr_assert_eq(place_status(&p, NAME).used, 0u);
    place_put_all(&p, 0, 10);
    place_write_all(&p);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_count_stored(&p, N), 10u);
    cr_assert_eq(place_fetch_all(&p, N), 10u);
    place_close(&p);
}

/* The file as it is when the reset is answered, and what was on its way at that moment lost. */
LIFE_TEST(nor_after_a_crash_right_after_the_answer)
{
    p.parent = place_no_parent;
    for (int round = 0; round < 6; round++) {
        uint32_t epoch;

        place_open_faulty(&p, POOL DISK, "write:delay=2");
        epoch = p.w.space->epoch;
        for (uint64_t i = 0; i < 20; i++)
            place_put(&p, i);
        place_turns(&p, 3 * round);
        reset_and_wait();
        place_copy(&p, "disk", "copy");
        place_settle(&p);
        place_close(&p);
        place_rename(&p, "copy", "disk");
        place_open(&p, POOL DISK);
        cr_assert_eq(p.w.space->epoch, epoch + 1);
        cr_assert_eq(place_count_stored(&p, 20), 0u);
        place_close(&p);
    }
}

LIFE_TEST(one_torn_superblock_is_no_harm)
{
    uint32_t epoch;

    place_fill(&p, POOL DISK, N);
    reset_and_wait();
    place_put_all(&p, 100, 120);
    place_write_all(&p);
    epoch = p.w.space->epoch;
    place_close(&p);
    for (int copy = 0; copy < 2; copy++) {
        place_flip(&p, "disk", copy ? FORMAT_SUPER_COPY + 100 : 100);
        place_open(&p, POOL DISK);
        cr_assert_eq(p.w.space->epoch, epoch);
        for (uint64_t i = 100; i < 120; i++)
            cr_assert(place_stored(&p, i));
        cr_assert_eq(place_count_stored(&p, N), 0u);
        reset_and_wait(); /* writes both */
        place_put_all(&p, 100, 120);
        place_write_all(&p);
        epoch = p.w.space->epoch;
        place_close(&p);
    }
}

LIFE_TEST(of_several_stores_the_youngest_epoch_counts)
{
    static const char two[] = POOL DISK "[spill s/kv/other]\npath = %s/other\nsize = 16M\n";

    place_make_store(&p, two, N);
    place_copy(&p, "other", "old");
    place_open(&p, two);
    reset_and_wait();
    place_close(&p);
    place_rename(&p, "old", "other"); /* a store that has missed it */
    place_open(&p, two);
    cr_assert_eq(p.w.space->epoch, 2u);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    place_await_reset(&p);
    cr_assert_eq(place_status(&p, "s/kv/other").epoch, 2u);
    cr_assert_eq(place_status(&p, "s/kv/other").used, 0u);
    place_close(&p);
}

/* The store that has missed it is opened long before the other. */
LIFE_TEST(of_several_pools_too)
{
    static const char two[] =
        "[space s]\n[pool s/kv]\n" SIZE DISK "[pool s/big]\nslot = 4K\nslots = 64\n"
        "[spill s/big/disk]\npath = %s/big\nsize = 512M\n";

    place_make_store(&p, two, N);
    place_copy(&p, "disk", "old");
    place_open(&p, two);
    reset_and_wait();
    place_close(&p);
    place_rename(&p, "old", "disk");
    place_open(&p, two);
    cr_assert_eq(p.w.space->epoch, 2u);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    place_await_reset(&p);
    place_turns(&p, 5);
    cr_assert_eq(place_status(&p, NAME).used, 0u);
    place_close(&p);
}

LIFE_TEST(a_store_that_was_never_used_can_be_formatted_after_a_reset)
{
    place_make_store(
        &p, "[space s]\n[pool s/kv]\nslot = 32K\nslots = 64\nlow_water = 0\nhigh_water = 0\n" DISK,
        N);
    place_open(&p, POOL DISK);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    reset_and_wait();
    place_act(&p, NAME, SPILL_FORMAT, true);
    place_await_state(&p, NAME, "online");
    place_put_all(&p, 0, 10);
    place_write_all(&p);
    cr_assert_eq(place_count_stored(&p, N), 10u);
    place_close(&p);
}

/* ---- removal */

static uint32_t remove_tenant(uint32_t tenant)
{
    uint32_t cursor = 0, n = 0;

    do
        n += spill_remove_tenant(p.w.pool, &tenant, &cursor);
    while (cursor);
    return n;
}

LIFE_TEST(a_tenant_that_was_removed_stays_removed)
{
    place_fill(&p, POOL DISK, N);
    place_drop_ram(&p);
    cr_assert_eq(remove_tenant(1), N / 2);
    cr_assert_eq(remove_tenant(1), 0u);
    for (uint64_t i = 0; i < N; i++)
        cr_assert_eq(place_find(&p, i), i % 2 ? SHM_FOUND_MISS : SHM_FOUND_NVME);
    place_turns(&p, 50);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_count_stored(&p, N), N / 2);
    for (uint64_t i = 1; i < N; i += 2)
        cr_assert_not(place_stored(&p, i));
    cr_assert_eq(place_fetch_all(&p, N), N / 2);
    place_close(&p);
}

LIFE_TEST(a_key_that_was_removed_stays_removed_even_if_it_was_being_read)
{
    struct shm_key k5 = world_key(5), k9 = world_key(9);
    uint64_t tag;

    place_make_store(&p, POOL DISK, N);
    place_open_faulty(&p, POOL DISK, "read:hang:from=2M:to=1G");
    cr_assert_eq(place_ask(&p, 5, 1), 1);
    place_turns(&p, 3);
    cr_assert_eq(spill_remove(p.w.pool, &k5, p.w.space->epoch), 1u);
    cr_assert_eq(spill_remove(p.w.pool, &k9, p.w.space->epoch), 1u);
    cr_assert_eq(spill_remove(p.w.pool, &k9, p.w.space->epoch), 0u);
    place_release(&p);
    cr_assert_eq(place_completion(&p, &tag), -ENOENT);
    place_turns(&p, 20);
    cr_assert_not(place_stored(&p, 5) || place_stored(&p, 9));
    cr_assert_eq(p.w.pool->count[SHM_SLOT_LIVE], 0u);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_count_stored(&p, N), N - 2);
    cr_assert_not(place_stored(&p, 5) || place_stored(&p, 9));
    place_close(&p);
}

static uint32_t slot_of(uint64_t i)
{
    struct shm_key k = world_key(i);
    struct shm_entry *e = index_find(p.w.pool->index, &k, p.w.space->epoch);

    cr_assert(e);
    return shm_word_slot(shm_load64(&e->word));
}

LIFE_TEST(a_resident_object_takes_its_copy_along_when_it_is_removed)
{
    uint32_t slot;

    place_fill(&p, POOL DISK, N);
    slot = slot_of(3);
    cr_assert_eq(pool_remove(p.w.pool, &slot, 1, HISTORY_REMOVED, REMOVE_FORGET), 1u);
    slot = slot_of(4);
    cr_assert_eq(pool_remove(p.w.pool, &slot, 1, HISTORY_REMOVED, 0), 1u);
    cr_assert_eq(place_find(&p, 3), SHM_FOUND_MISS);
    cr_assert_eq(place_find(&p, 4), SHM_FOUND_NVME);
    place_turns(&p, 20);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_find(&p, 3), SHM_FOUND_MISS);
    cr_assert_eq(place_find(&p, 4), SHM_FOUND_NVME);
    place_close(&p);
}

/* Its data is out, its record is being written. */
LIFE_TEST(an_object_that_is_removed_while_its_record_is_written_does_not_come_back)
{
    p.parent = place_no_parent;
    for (int how = 0; how < 2; how++) {
        uint32_t slot;

        place_open_faulty(&p, POOL DISK, "write:hang:from=1M:to=2M");
        cr_assert_eq(place_put(&p, 1), RESERVE_NEW);
        place_turns(&p, 10);
        slot = slot_of(1);
        while (!pool_remove(p.w.pool, &slot, 1, HISTORY_REMOVED, how ? 0 : REMOVE_FORGET))
            place_turn(&p);
        if (how)
            cr_assert_eq(remove_tenant(1), 1u);
        place_release(&p);
        place_settle(&p);
        place_turns(&p, 20);
        cr_assert_not(place_stored(&p, 1));
        place_close(&p);
        place_open(&p, POOL DISK);
        cr_assert_not(place_stored(&p, 1));
        place_close(&p);
    }
}
