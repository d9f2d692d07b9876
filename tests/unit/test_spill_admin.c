/* SPDX-License-Identifier: Apache-2.0 */
/* What administrators do with stores, and when. */
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

#define ADMIN_TEST(name) PLACE_TEST(spill_admin, name)

static struct task_status run_task(enum spill_action action)
{
    place_act(&p, NAME, action, false);
    for (int i = 0; i < 20000 && place_status(&p, NAME).task.running; i++)
        place_turn(&p);
    cr_assert_not(place_status(&p, NAME).task.running);
    return place_status(&p, NAME).task;
}

static uint64_t data_of(uint64_t i)
{
    struct shm_key k = world_key(i);
    struct spill_entry e;
    struct format_super s;

    cr_assert(spill_entry(p.w.pool, spill_record_of(p.w.pool, &k, p.w.space->epoch), &e));
    place_super(&p, "disk", &s);
    return format_slot_offset(&s, e.number);
}

ADMIN_TEST(a_scrub_finds_a_flipped_bit_and_drops_that_object_only)
{
    struct task_status t;

    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    place_flip(&p, "disk", data_of(17) + 1234);
    place_flip(&p, "disk", data_of(40));
    t = run_task(SPILL_SCRUB);
    cr_assert_eq(t.status, 0);
    cr_assert_str_eq(t.result, "2 broken objects were dropped");
    cr_assert_eq(place_status(&p, NAME).used, N - 2);
    cr_assert_not(place_stored(&p, 17) || place_stored(&p, 40));
    t = run_task(SPILL_SCRUB);
    cr_assert_str_eq(t.result, "0 broken objects were dropped");
    cr_assert_eq(place_fetch_all(&p, N), N - 2);
    place_turns(&p, 20);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_status(&p, NAME).used, N - 2);
    place_close(&p);
}

ADMIN_TEST(a_scrub_can_be_stopped_and_goes_on_beside_traffic)
{
    char why[384];

    place_fill(&p, POOL DISK, N);
    place_drop_ram(&p);
    place_act(&p, NAME, SPILL_SCRUB, false);
    cr_assert_lt(store_act(place_store(&p, NAME), SPILL_SCRUB, false, 0, why, sizeof(why)), 0);
    cr_assert_lt(store_act(place_store(&p, NAME), SPILL_TRIM, false, 0, why, sizeof(why)), 0);
    place_turns(&p, 2);
    place_act(&p, NAME, SPILL_STOP, false);
    cr_assert_eq(place_status(&p, NAME).task.status, -ECANCELED);
    place_act(&p, NAME, SPILL_SCRUB, false);
    cr_assert_eq(place_fetch_all(&p, N), N);
    while (place_status(&p, NAME).task.running)
        place_turn(&p);
    cr_assert_eq(store_act(place_store(&p, NAME), SPILL_SCRUB, false, 1 << 20, why, sizeof(why)),
                 0);
    place_turns(&p, 2);
    place_act(&p, NAME, SPILL_OFFLINE, false);
    cr_assert_eq(place_status(&p, NAME).task.status, -ECANCELED);
    place_settle(&p);
    place_close(&p);
}

/* The clock goes a millisecond a turn. */
ADMIN_TEST(a_scrub_keeps_to_its_rate)
{
    char why[384];
    int turns = 0;

    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    cr_assert_eq(store_act(place_store(&p, NAME), SPILL_SCRUB, false, 16 << 20, why, sizeof(why)),
                 0);
    for (; place_status(&p, NAME).task.running; turns++)
        place_turn(&p);
    cr_assert_gt(turns, 100); /* 3.3 MiB at 16 MiB/s */
    place_close(&p);
}

ADMIN_TEST(trimming_keeps_all_objects)
{
    struct task_status t;

    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    for (uint64_t i = 0; i < N; i += 3) {
        struct shm_key k = world_key(i);

        spill_remove(p.w.pool, &k, p.w.space->epoch);
    }
    t = run_task(SPILL_TRIM);
    cr_assert(t.status == 0 || t.status == -EOPNOTSUPP, "%s", t.result);
    cr_assert_eq(place_fetch_all(&p, N), N - (N + 2) / 3);
    cr_assert_eq(place_put(&p, 999), RESERVE_NEW);
    place_write_all(&p);
    cr_assert(place_stored(&p, 999));
    place_close(&p);
}

/* What lies behind the configured size could neither be found nor removed, and would come back one day. */
ADMIN_TEST(a_store_larger_than_its_configuration_is_refused_and_a_smaller_one_used_as_it_is)
{
    static const char small[] = POOL "[spill s/kv/disk]\npath = %s/disk\nsize = 4M\n";
    static const char large[] = POOL "[spill s/kv/disk]\npath = %s/disk\nsize = 64M\n";
    struct store_status status;

    place_make_store(&p, POOL DISK, N);
    place_open(&p, small);
    status = place_status(&p, NAME);
    cr_assert_str_eq(status.state, "offline");
    cr_assert(strstr(status.problem, "its configured size") && strstr(status.fix, "size = 16M"),
              "%s; %s", status.problem, status.fix);
    place_close(&p);
    place_open(&p, large);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
}

/* And offline again before that has come to an end. */
ADMIN_TEST(a_store_goes_online_after_its_opening_was_called_off)
{
    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    for (int i = 0; i < 20; i++) {
        place_act(&p, NAME, SPILL_OFFLINE, false);
        place_act(&p, NAME, SPILL_ONLINE, false);
        place_turns(&p, i % 3);
        place_act(&p, NAME, SPILL_OFFLINE, false);
        place_act(&p, NAME, SPILL_ONLINE, false);
        place_await_state(&p, NAME, "online");
    }
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
}

ADMIN_TEST(a_store_whose_file_was_deleted_says_so)
{
    char path[128];

    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    cr_assert_null(place_status(&p, NAME).problem);
    snprintf(path, sizeof(path), "%s/disk", p.dir);
    cr_assert_eq(unlink(path), 0);
    cr_assert(strstr(place_status(&p, NAME).problem, "deleted"));
    cr_assert_eq(place_fetch_all(&p, N), N); /* as long as it lasts */
    place_close(&p);
}

ADMIN_TEST(what_is_in_ram_is_written_once_there_is_room_again)
{
    p.parent = place_no_parent;
    place_open_faulty(&p, POOL DISK, "write:error=ENOSPC:times=1");
    place_put_all(&p, 0, N);
    place_await_state(&p, NAME, "read-only");
    place_turns(&p, 20);
    cr_assert_lt(place_count_stored(&p, N), N);
    cr_assert_lt(run_task(SPILL_SYNC).status, 0);
    place_act(&p, NAME, SPILL_ONLINE, false);
    cr_assert_eq(run_task(SPILL_SYNC).status, 0);
    cr_assert_eq(place_count_stored(&p, N), N);
    place_close(&p);
}

ADMIN_TEST(a_sync_ends_when_everything_is_written)
{
    struct task_status t;

    p.parent = place_no_parent;
    place_open_faulty(&p, POOL DISK, "write:delay=2");
    place_put_all(&p, 0, N);
    t = run_task(SPILL_SYNC);
    cr_assert_eq(t.status, 0);
    cr_assert_eq(t.done, N);
    cr_assert_eq(place_count_stored(&p, N), N);
    place_close(&p);
}

ADMIN_TEST(formatting_asks_for_force_when_something_would_be_lost)
{
    char why[384] = "";

    place_make_store(&p, POOL DISK, N);
    place_open(&p, POOL DISK);
    cr_assert_eq(store_act(place_store(&p, NAME), SPILL_FORMAT, false, 0, why, sizeof(why)),
                 -EEXIST);
    cr_assert(strstr(why, "64 objects"), "%s", why);
    cr_assert_eq(place_ask(&p, 0, 1), 1);
    place_act(&p, NAME, SPILL_FORMAT, true);
    place_await_state(&p, NAME, "online");
    cr_assert_eq(place_status(&p, NAME).used, 0u);
    cr_assert_eq(place_find(&p, 1), SHM_FOUND_MISS);
    place_put_all(&p, 100, 110);
    place_write_all(&p);
    cr_assert_eq(place_status(&p, NAME).used, 10u);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_status(&p, NAME).used, 10u);
    place_close(&p);
}

ADMIN_TEST(stores_come_and_go_under_traffic)
{
    unsigned int seed = 1;
    uint64_t tag;
    char why[384];

    p.parent = place_no_parent;
    place_open_faulty(&p, POOL DISK, "any:delay=1");
    for (uint64_t i = 0; i < 1200; i++) {
        place_put(&p, i);
        place_ask(&p, i - (uint64_t)rand_r(&seed) % (i + 1), i);
        if (i % 60 == 20)
            place_act(&p, NAME, SPILL_OFFLINE, false);
        if (i % 60 == 40)
            store_act(place_store(&p, NAME), SPILL_ONLINE, false, 0, why, sizeof(why));
        if (i % 3 == 0)
            place_turn(&p);
        while (place_has_completion(p.session))
            place_completion(&p, &tag);
        if (i % 50 == 0) {
            place_check(&p);
            place_sleep(&p, 6);
        }
    }
    store_act(place_store(&p, NAME), SPILL_ONLINE, false, 0, why, sizeof(why));
    place_await_state(&p, NAME, "online");
    place_settle(&p);
    place_drop_ram(&p);
    while (place_has_completion(p.session))
        place_completion(&p, &tag);
    for (uint64_t i = 0; i < 1200; i++)
        if (place_stored(&p, i)) {
            if (i % 32 == 0)
                place_sleep(&p, 6);
            if (place_fetch(&p, i) == 0)
                place_check_object(&p, i);
        }
    cr_assert_gt(spill_stats(p.w.pool)->promoted, 50u);
    place_close(&p);
}

ADMIN_TEST(children_in_another_store_do_no_harm_when_their_parents_come_back)
{
    place_open(&p, POOL DISK "[spill s/kv/other]\npath = %s/other\nsize = 16M\n");
    place_put_all(&p, 0, 40); /* a chain: now here, now there */
    place_write_all(&p);
    place_drop_ram(&p);
    for (int round = 0; round < 2; round++) {
        const char *name = round ? "s/kv/other" : NAME;

        cr_assert_gt(place_status(&p, name).used, 5u);
        place_act(&p, name, SPILL_OFFLINE, false);
        place_turns(&p, 3);
        place_act(&p, name, SPILL_ONLINE, false);
        place_await_state(&p, name, "online");
        place_check(&p);
    }
    for (uint64_t i = 40; i-- > 0;) { /* from the tail */
        struct shm_key k = world_key(i);

        spill_remove(p.w.pool, &k, p.w.space->epoch);
        spill_check(p.w.pool);
    }
    place_turns(&p, 10);
    place_close(&p);
}

/* The younger copy is loaded while the older one is being read. */
ADMIN_TEST(an_object_that_two_stores_have_is_read_from_one_while_the_other_is_loaded)
{
    struct shm_key k = world_key(0);
    uint64_t tag;

    p.parent = place_no_parent;
    p.faulty = "disk";
    place_open_faulty(&p, POOL DISK "[spill s/kv/other]\npath = %s/other\nsize = 16M\n",
                      "read:hang:from=2M:to=1G");
    place_act(&p, "s/kv/other", SPILL_OFFLINE, false);
    place_await_state(&p, "s/kv/other", "offline");
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW);
    place_write_all(&p);
    cr_assert_eq(place_status(&p, NAME).used, 1u);
    place_act(&p, NAME, SPILL_OFFLINE, false);
    place_act(&p, "s/kv/other", SPILL_ONLINE, false);
    place_await_state(&p, "s/kv/other", "online");
    place_turns(&p, 5);
    pool_observe(p.w.pool, &k, p.w.space->epoch);
    place_write_all(&p);
    cr_assert_eq(place_status(&p, "s/kv/other").used, 1u);
    place_act(&p, "s/kv/other", SPILL_OFFLINE, false);
    place_turns(&p, 5);
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    place_drop_ram(&p);
    cr_assert_eq(place_ask(&p, 0, 1), 1);
    place_turns(&p, 3);
    place_act(&p, "s/kv/other", SPILL_ONLINE, false);
    place_await_state(&p, "s/kv/other", "online");
    place_check(&p);
    place_release(&p);
    cr_assert_eq(place_completion(&p, &tag), 0);
    place_check_object(&p, 0);
    place_close(&p);
}

ADMIN_TEST(what_is_in_ram_is_recognised_when_its_store_comes_back)
{
    uint64_t written;

    place_fill(&p, POOL DISK, N);
    place_act(&p, NAME, SPILL_OFFLINE, false);
    place_await_state(&p, NAME, "offline");
    place_turns(&p, 3);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    for (uint64_t i = 0; i < N; i++)
        place_check_object(&p, i);
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    cr_assert_eq(place_count_stored(&p, N), N);
    written = place_status(&p, NAME).stats.physical_written;
    for (uint64_t i = 0; i < N; i++) {
        struct shm_key k = world_key(i);

        pool_observe(p.w.pool, &k, p.w.space->epoch);
    }
    place_write_all(&p);
    place_drop_ram(&p);
    cr_assert_eq(place_status(&p, NAME).stats.physical_written, written);
    cr_assert_eq(spill_stats(p.w.pool)->evicted_clean, N);
    cr_assert_eq(place_fetch_all(&p, N), N);
    place_close(&p);
}
