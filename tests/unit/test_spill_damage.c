/* SPDX-License-Identifier: Apache-2.0 */
/* Devices that fail, lie, hang or fill up: a miss, never a wrong byte (I1), and ram goes on (I5). */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "spill_world.h"

#define POOL "[space s]\n[pool s/kv]\nslot = 64K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"
#define DISK "[spill s/kv/disk]\npath = %s/disk\nsize = 16M\n"
#define NAME "s/kv/disk"

#define N    64u

static struct place p;
static char text[512];

#define DAMAGE_TEST(name) PLACE_TEST(spill_damage, name)

/* Roots: each by itself. */
/* "FAULT:from=..:to=.." for a region of the store. */
enum region {
    SUPER,
    TABLE,
    USER,
    DATA,
};

static const char *at(const char *fault, enum region where, const char *rest)
{
    struct format_super s;
    uint64_t from[5];

    place_super(&p, "disk", &s);
    from[SUPER] = 0;
    from[TABLE] = s.table;
    from[USER] = s.user;
    from[DATA] = s.data;
    from[DATA + 1] = s.bytes;
    snprintf(text, sizeof(text), "%s:from=%llu:to=%llu%s", fault, (unsigned long long)from[where],
             (unsigned long long)from[where + 1], rest);
    return text;
}

/* Stored under no faults: N objects. */
static void make_store(void)
{
    p.parent = place_no_parent;
    place_open(&p, POOL DISK);
    place_put_all(&p, 0, N);
    place_write_all(&p);
    place_close(&p);
}

struct counts {
    uint32_t right, lost, missing;
};

/* Fetches all, compares what comes. */
static struct counts fetch_all(void)
{
    struct counts c = {0};

    for (uint64_t i = 0; i < N; i++) {
        int r = place_fetch(&p, i);

        if (r == 0)
            place_check_object(&p, i);
        c.right += r == 0;
        c.missing += r == -ENOENT;
        c.lost += r < 0 && r != -ENOENT;
    }
    return c;
}

static void check_ram(void)
{
    place_sleep(&p, 6);
    cr_assert_eq(place_put(&p, 5000 + p.w.now_ns % 1000000), RESERVE_NEW);
}

/* ---- reading */

DAMAGE_TEST(objects_that_cannot_be_read_are_dropped)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK, at("read:error=EIO", DATA, ":after=3:times=5"));
    c = fetch_all();
    cr_assert_eq(c.lost, 5u);
    cr_assert_eq(c.right, N - 5);
    cr_assert_eq(place_status(&p, NAME).used, N - 5);
    cr_assert_eq(place_status(&p, NAME).stats.errors, 5u);
    place_turns(&p, 20); /* the records are being erased */
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert_eq(place_status(&p, NAME).used, N - 5);
    c = fetch_all();
    cr_assert_eq(c.right, N - 5);
    cr_assert_eq(c.missing, 5u);
    place_close(&p);
}

static void read_with(const char *fault, enum region where, const char *rest, uint32_t least_right)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK, at(fault, where, rest));
    c = fetch_all();
    cr_assert_geq(c.right, least_right, "%s: %u right, %u lost, %u missing", text, c.right, c.lost,
                  c.missing);
    cr_assert_eq(c.right + c.lost + c.missing, N);
    check_ram();
    place_settle(&p);
    place_close(&p);
    place_open(&p, POOL DISK);
    c = fetch_all();
    cr_assert_geq(c.right, least_right);
    place_close(&p);
}

DAMAGE_TEST(short_reads_are_completed)
{
    read_with("read:short=8192", DATA, "", N);
}

DAMAGE_TEST(short_reads_of_the_table_are_repeated)
{
    read_with("read:short=0", TABLE, ":times=3", N);
}

DAMAGE_TEST(storms_of_eagain_pass)
{
    read_with("read:error=EAGAIN", DATA, ":times=30", N);
}

DAMAGE_TEST(storms_of_eagain_at_submission_pass)
{
    read_with("any:refused=EAGAIN", DATA, ":times=40", N);
}

DAMAGE_TEST(interrupted_reads_are_repeated)
{
    read_with("read:error=EINTR", TABLE, ":times=5", N);
}

DAMAGE_TEST(a_file_that_ends_early_is_a_miss)
{
    read_with("read:short=0", DATA, ":after=10:times=4", N - 4);
}

DAMAGE_TEST(flipped_bits_in_data_are_a_miss)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK, at("read:flip", DATA, ":after=5:times=7"));
    c = fetch_all();
    cr_assert_eq(c.lost, 7u);
    cr_assert_eq(c.right, N - 7);
    cr_assert_eq(place_status(&p, NAME).stats.broken, 7u);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    place_turns(&p, 10);
    place_close(&p);
}

/* One bit of a sector: of one record, or of the zeros behind it. */
DAMAGE_TEST(flipped_bits_in_a_record_are_a_miss)
{
    read_with("read:flip", TABLE, "", N - 2);
}

DAMAGE_TEST(flipped_bits_in_user_metadata_are_a_miss)
{
    read_with("read:flip", USER, "", N - 2);
}

DAMAGE_TEST(a_table_that_cannot_be_read_is_a_miss)
{
    read_with("read:error=EIO", TABLE, ":times=2", 0);
}

DAMAGE_TEST(user_metadata_that_cannot_be_read_is_a_miss)
{
    read_with("read:error=EIO", USER, ":times=1", N / 2);
}

/* ---- writing */

static void write_with(const char *fault, enum region where, const char *rest,
                       uint32_t least_stored)
{
    uint32_t stored, right = 0;

    p.parent = place_no_parent;
    place_open(&p, POOL DISK);
    place_close(&p);
    place_open_faulty(&p, POOL DISK, at(fault, where, rest));
    place_put_all(&p, 0, N);
    place_write_all(&p);
    place_turns(&p, 10);
    stored = place_count_stored(&p, N);
    cr_assert_geq(stored, least_stored, "%s: %u", text, stored);
    check_ram();
    place_settle(&p);
    place_drop_ram(&p);
    for (int run = 0; run < 2; run++) {
        struct counts c = fetch_all();

        cr_assert_leq(c.right, N);
        right = run ? right : c.right;
        cr_assert_geq(c.right, least_stored < right ? least_stored : right, "%s", text);
        place_settle(&p);
        place_close(&p);
        place_open(&p, POOL DISK);
    }
    place_close(&p);
}

DAMAGE_TEST(what_could_not_be_written_is_not_stored)
{
    p.parent = place_no_parent;
    place_open(&p, POOL DISK);
    place_close(&p);
    place_open_faulty(&p, POOL DISK, at("write:error=EIO", DATA, ":after=10:times=5"));
    place_put_all(&p, 0, N);
    place_write_all(&p);
    cr_assert_eq(place_count_stored(&p, N), N - 5);
    cr_assert_eq(place_status(&p, NAME).stats.errors, 5u);
    place_close(&p);
}

DAMAGE_TEST(short_writes_are_completed)
{
    write_with("write:short=4096", DATA, "", N);
}

DAMAGE_TEST(writes_of_nothing_are_repeated)
{
    write_with("write:short=0", DATA, ":times=10", N);
}

DAMAGE_TEST(writes_that_are_refused_for_now_are_repeated)
{
    write_with("write:error=EAGAIN", DATA, ":times=20", N);
}

DAMAGE_TEST(short_writes_of_the_table_are_repeated)
{
    write_with("write:short=0", TABLE, ":times=4", N);
}

DAMAGE_TEST(torn_data_is_a_miss)
{
    write_with("write:torn=4096", DATA, ":after=4:times=6", 0);
}

DAMAGE_TEST(torn_records_are_a_miss)
{
    write_with("write:torn=0", TABLE, ":after=1:times=1", 0);
}

DAMAGE_TEST(torn_user_metadata_is_a_miss)
{
    write_with("write:torn=0", USER, ":times=1", 0);
}

DAMAGE_TEST(bits_that_flip_on_their_way_to_the_medium_are_a_miss)
{
    write_with("write:flip", DATA, ":after=4:times=6", 0);
}

DAMAGE_TEST(bits_that_flip_in_a_record_on_its_way_are_a_miss)
{
    write_with("write:flip", TABLE, "", 0);
}

DAMAGE_TEST(a_table_that_cannot_be_written_stores_nothing)
{
    write_with("write:error=EIO", TABLE, ":times=3", 0);
}

DAMAGE_TEST(a_user_table_that_cannot_be_written_loses_only_those_with_user_metadata)
{
    write_with("write:error=EIO", USER, ":times=2", N / 2);
}

DAMAGE_TEST(operations_that_the_backend_will_never_take_fail)
{
    write_with("write:refused=EBADF", DATA, ":times=4", N - 4);
}

DAMAGE_TEST(a_backend_that_takes_nothing_any_more_takes_its_store_offline)
{
    static const char *const faults[] = {"any:refused=EBADF", "any:refused=EAGAIN"};

    for (unsigned int i = 0; i < 2; i++) {
        make_store();
        place_open_faulty(&p, POOL DISK, faults[i]);
        for (uint64_t k = 0; k < 10; k++)
            cr_assert_eq(place_ask(&p, k, k), 1);
        for (uint64_t k = 1000; k < 1020; k++)
            cr_assert_eq(place_put(&p, k), RESERVE_NEW);
        place_turns(&p, 50);
        place_sleep(&p, 15);
        for (int n = 0; n < 1000 && place_status(&p, NAME).io; n++)
            place_turn(&p);
        cr_assert_str_eq(place_status(&p, NAME).state, "offline");
        cr_assert_not(place_status(&p, NAME).io); /* and it is closed: nothing is with the device */
        place_settle(&p);
        p.faults = "";
        place_act(&p, NAME, SPILL_ONLINE, false);
        place_await_state(&p, NAME, "online");
        cr_assert_geq(place_count_stored(&p, N), N - 10);
        place_close(&p);
        place_free(&p);
        place_new(&p);
    }
}

/* ---- the store gives up, ram does not */

DAMAGE_TEST(after_errors_in_a_row_the_store_goes_offline_and_comes_back_when_told_to)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK, at("read:error=EIO", DATA, ""));
    c = fetch_all();
    cr_assert_eq(c.right, 0u);
    cr_assert_leq(c.lost, 8u);
    place_await_state(&p, NAME, "offline");
    cr_assert(strstr(place_status(&p, NAME).problem, "errors in a row"), "%s",
              place_status(&p, NAME).problem);
    cr_assert_eq(place_status(&p, NAME).used, 0u);
    for (uint64_t i = 0; i < N; i++)
        cr_assert_eq(place_find(&p, i), SHM_FOUND_MISS);
    for (uint64_t i = 1000; i < 1030; i++) {
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
        place_check_object(&p, i);
    }
    cr_assert_eq(nvme_unwritten(p.w.core->nvme), 0u);
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    cr_assert_geq(place_status(&p, NAME).used, N - 8);
    c = fetch_all();
    cr_assert_geq(c.right, N - 8);
    place_close(&p);
}

DAMAGE_TEST(errors_with_successes_between_them_do_not_add_up)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK,
                      "read:error=EIO:from=2M:to=1G:times=5,"
                      "read:error=EIO:from=2M:to=1G:after=5:times=5,"
                      "read:error=EIO:from=2M:to=1G:after=10:times=5");
    c = fetch_all();
    cr_assert_eq(c.lost, 15u);
    cr_assert_eq(c.right, N - 15);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    place_turns(&p, 10);
    place_close(&p);
}

DAMAGE_TEST(many_reads_fail_at_once)
{
    uint64_t tag;

    make_store();
    place_open_faulty(&p, POOL DISK, at("any:error=EIO", DATA, ""));
    for (uint64_t i = 0; i < N; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    for (uint64_t i = 0; i < N; i++) {
        int r = place_completion(&p, &tag);

        cr_assert(r == -EIO || r == -ENOENT || r == -ECANCELED, "%d", r);
    }
    place_await_state(&p, NAME, "offline");
    place_settle(&p);
    cr_assert_eq(p.w.pool->count[SHM_SLOT_FREE], p.w.pool->slots);
    place_close(&p);
}

DAMAGE_TEST(many_writes_fail_at_once)
{
    p.parent = place_no_parent;
    place_open_faulty(&p, POOL DISK, "write:error=EIO:from=1M:to=1G");
    place_put_all(&p, 0, N);
    place_await_state(&p, NAME, "offline");
    place_settle(&p);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    for (uint64_t i = 0; i < N; i++)
        place_check_object(&p, i);
    place_drop_ram(&p); /* nothing pins them any more */
    place_close(&p);
}

DAMAGE_TEST(a_full_file_system_makes_the_store_read_only)
{
    struct counts c;

    make_store();
    place_open_faulty(&p, POOL DISK, "write:error=ENOSPC:from=1M:to=1G");
    for (uint64_t i = 1000; i < 1020; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_await_state(&p, NAME, "read-only");
    place_settle(&p);
    cr_assert(strstr(place_status(&p, NAME).fix, "make room"));
    c = fetch_all();
    cr_assert_eq(c.right + c.missing, N); /* what had made room for new ones is gone */
    cr_assert_geq(c.right, N - 32);
    place_act(&p, NAME, SPILL_OFFLINE, false);
    place_await_state(&p, NAME, "offline");
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    place_sleep(&p, 6); /* holds */
    for (uint64_t i = 2000; i < 2020; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    place_write_all(&p);
    for (uint64_t i = 2000; i < 2020; i++)
        cr_assert(place_stored(&p, i));
    place_close(&p);
}

DAMAGE_TEST(read_only_ends_when_an_administrator_says_so)
{
    p.parent = place_no_parent;
    place_open_faulty(&p, POOL DISK, "write:error=ENOSPC:from=1M:to=1G:times=1");
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW);
    place_await_state(&p, NAME, "read-only");
    cr_assert_eq(place_put(&p, 1), RESERVE_NEW);
    place_turns(&p, 20);
    cr_assert_not(place_stored(&p, 1));
    place_act(&p, NAME, SPILL_ONLINE, false);
    cr_assert_eq(place_put(&p, 2), RESERVE_NEW);
    place_write_all(&p);
    cr_assert(place_stored(&p, 2));
    place_close(&p);
}

DAMAGE_TEST(a_device_that_hangs_is_given_up_and_completes_later)
{
    uint64_t tag;

    make_store();
    place_open_faulty(&p, POOL DISK, at("read:hang", DATA, ""));
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    place_turns(&p, 3);
    place_sleep(&p, 3);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(place_completion(&p, &tag), -ETIMEDOUT);
    place_sleep(&p, 10);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    cr_assert(strstr(place_status(&p, NAME).problem, "has not answered"));
    cr_assert_eq(p.w.pool->count[SHM_SLOT_IN_FLIGHT], 4u);
    cr_assert_eq(place_ask(&p, 10, 1), -ENOENT);
    cr_assert_eq(place_put(&p, 999), RESERVE_NEW);
    place_check_object(&p, 999);
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false); /* as soon as it can */
    place_release(&p);
    place_await_state(&p, NAME, "online");
    cr_assert_eq(p.w.pool->count[SHM_SLOT_IN_FLIGHT], 0u);
    cr_assert_eq(fetch_all().right, N);
    place_close(&p);
}

/* All that it does to the tables and the superblock, too. */
static void hang_everywhere(enum region where)
{
    make_store();
    place_open_faulty(&p, POOL DISK, at("any:hang", where, ""));
    for (uint64_t i = 0; i < 10; i++)
        place_ask(&p, i, i);
    for (uint64_t i = 1000; i < 1010; i++)
        cr_assert_eq(place_put(&p, i), RESERVE_NEW);
    space_reset(p.w.space);
    place_turns(&p, 5);
    place_sleep(&p, 20);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    place_check(&p);
    cr_assert_eq(place_put(&p, 3000), RESERVE_NEW);
    place_release(&p);
    place_settle(&p);
    place_turns(&p, 10);
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    place_turns(&p, 10);
    cr_assert_eq(place_count_stored(&p, N), 0u); /* of an older epoch */
    place_close(&p);
}

DAMAGE_TEST(superblocks_hang)
{
    hang_everywhere(SUPER);
}

/* Its tables are needed only for what is written or fetched; the reset comes first, so nothing is. */
DAMAGE_TEST(a_hanging_table_is_given_up)
{
    uint64_t tag;

    make_store();
    place_open_faulty(&p, POOL DISK, at("any:hang", TABLE, ""));
    for (uint64_t i = 0; i < 10; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    place_turns(&p, 5);
    for (uint64_t i = 1000; i < 1010; i++)
        place_put(&p, i);
    place_turns(&p, 5);
    place_sleep(&p, 20);
    for (uint64_t i = 0; i < 10; i++)
        cr_assert_eq(place_completion(&p, &tag), -ETIMEDOUT);
    cr_assert_str_eq(place_status(&p, NAME).state, "offline");
    place_check(&p);
    place_release(&p);
    place_settle(&p);
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    cr_assert_eq(fetch_all().right, N);
    place_close(&p);
}

DAMAGE_TEST(superblocks_that_cannot_be_written_take_the_store_offline)
{
    make_store();
    place_open_faulty(&p, POOL DISK, at("write:error=EIO", SUPER, ""));
    cr_assert_eq(fetch_all().right, N);
    space_reset(p.w.space);
    cr_assert_not(spill_reset_done(p.w.space));
    place_await_state(&p, NAME, "offline");
    cr_assert(strstr(place_status(&p, NAME).problem, "superblock"));
    p.faults = "";
    place_act(&p, NAME, SPILL_ONLINE, false);
    place_await_state(&p, NAME, "online");
    place_await_reset(&p);
    cr_assert_eq(place_count_stored(&p, N), 0u);
    place_close(&p);
}

/* Between the two copies of the superblock. */
DAMAGE_TEST(a_store_goes_offline_while_its_superblocks_are_being_written)
{
    make_store();
    for (int turns = 0; turns < 8; turns++) {
        place_open_faulty(&p, POOL DISK, "write:delay=2:from=0:to=1M");
        space_reset(p.w.space);
        place_turns(&p, turns);
        place_act(&p, NAME, SPILL_OFFLINE, false);
        for (int i = 0; i < 1000 && strcmp(place_status(&p, NAME).state, "offline") == 0 &&
                        place_status(&p, NAME).io;
             i++)
            place_turn(&p);
        place_act(&p, NAME, SPILL_ONLINE, false);
        place_await_state(&p, NAME, "online");
        place_await_reset(&p);
        place_close(&p);
    }
}

/* ---- the end of the daemon */

DAMAGE_TEST(many_reads_wait_when_the_daemon_stops)
{
    uint64_t tag;

    make_store();
    place_open_faulty(&p, POOL DISK "queue_depth = 1\n", at("read:delay=20", DATA, ""));
    cr_assert_eq(place_put(&p, 1000), RESERVE_NEW);
    for (uint64_t i = 0; i < 40; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    place_turns(&p, 2);
    nvme_stop(p.w.core->nvme);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    for (uint64_t i = 0; i < 40; i++) {
        int r = place_completion(&p, &tag);

        cr_assert(r == 0 || r == -ESHUTDOWN, "%d", r);
    }
    place_write_all(&p);
    cr_assert(place_stored(&p, 1000));
    cr_assert_eq(place_ask(&p, 50, 1), -ESHUTDOWN);
    place_close(&p);
}
