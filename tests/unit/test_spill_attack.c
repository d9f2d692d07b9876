/* SPDX-License-Identifier: Apache-2.0 */
/* Removals that do not last, keys that nobody can have, rings that are full. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>

#include "shm/ring.h"
#include "spill_world.h"

#define POOL  "[space s]\n[pool s/kv]\nslot = 64K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"
#define DISK  "[spill s/kv/disk]\npath = %s/disk\nsize = 16M\n"
#define OTHER "[spill s/kv/other]\npath = %s/other\nsize = 16M\n"
#define NAME  "s/kv/disk"
#define ONAME "s/kv/other"

static struct place p;

#define ATTACK_TEST(name) PLACE_TEST(spill_attack, name)

static void stored(const char *text, uint64_t n)
{
    p.parent = place_no_parent;
    place_open(&p, text);
    place_put_all(&p, 0, n);
    place_write_all(&p);
    place_drop_ram(&p);
}

static void removed(uint64_t i)
{
    struct shm_key k = world_key(i);

    cr_assert_eq(spill_remove(p.w.pool, &k, p.w.space->epoch), 1u);
}

static void turn_off(const char *name)
{
    place_act(&p, name, SPILL_OFFLINE, false);
    place_await_state(&p, name, "offline");
    place_turns(&p, 20);
}

static void turn_on(const char *name)
{
    place_act(&p, name, SPILL_ONLINE, false);
    place_await_state(&p, name, "online");
}

ATTACK_TEST(what_was_removed_stays_removed_when_the_store_goes_offline)
{
    stored(POOL DISK, 8);
    removed(3);
    turn_off(NAME);
    turn_on(NAME);
    cr_assert(!place_stored(&p, 3));
    place_close(&p);
}

ATTACK_TEST(what_was_removed_stays_removed_when_the_daemon_stops)
{
    stored(POOL DISK, 8);
    removed(3);
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert(!place_stored(&p, 3));
    place_close(&p);
}

static void removed_with(const char *fault)
{
    p.parent = place_no_parent;
    place_open_filled(&p, POOL DISK, 8, fault);
    removed(3);
    place_turns(&p, 200);
    cr_assert_str_eq(place_status(&p, NAME).state, "online");
    place_close(&p);
    place_open(&p, POOL DISK);
    cr_assert(!place_stored(&p, 3));
    place_close(&p);
}

ATTACK_TEST(one_failed_write_of_the_table_does_not_bring_back_what_was_removed)
{
    removed_with("write:error=EIO:from=1M:to=2M:times=1");
}

ATTACK_TEST(one_failed_read_of_the_table_does_not_bring_back_what_was_removed)
{
    removed_with("read:error=EIO:from=1M:to=2M:times=1");
}

ATTACK_TEST(an_older_copy_in_another_store_does_not_outlive_a_removal)
{
    p.parent = place_no_parent;
    place_open(&p, POOL DISK OTHER);
    turn_off(ONAME);
    place_put_all(&p, 0, 4);
    place_write_all(&p);
    place_drop_ram(&p);
    turn_off(NAME);
    turn_on(ONAME);
    place_put_all(&p, 0, 4);
    place_write_all(&p);
    place_drop_ram(&p);
    turn_on(NAME);
    removed(2);
    place_turns(&p, 300);
    place_close(&p);
    place_open(&p, POOL DISK OTHER);
    cr_assert(!place_stored(&p, 2));
    place_close(&p);
}

/* One read hangs, so the store cannot close; another one comes to its end meanwhile. */
ATTACK_TEST(a_store_that_cannot_close_poisons_no_key)
{
    struct format_super s;
    char faults[200];
    uint64_t tag, at;

    p.parent = place_no_parent;
    place_open(&p, POOL DISK);
    place_super(&p, "disk", &s);
    place_close(&p);
    at = s.data;
    snprintf(faults, sizeof(faults), "read:hang:from=%llu:to=%llu,read:delay=30:from=%llu:to=%llu",
             (unsigned long long)at, (unsigned long long)at + 65536, (unsigned long long)at + 65536,
             (unsigned long long)at + 131072);
    place_open_filled(&p, POOL DISK, 8, faults);
    cr_assert_eq(place_ask(&p, 0, 1), 1);
    cr_assert_eq(place_ask(&p, 1, 2), 1);
    place_turns(&p, 5);
    place_act(&p, NAME, SPILL_OFFLINE, false);
    place_completion(&p, &tag);
    for (int i = 0; i < 20; i++) {
        world_sleep(&p.w, 6000);
        pool_evict(p.w.pool, 64, HISTORY_EVICTED);
    }
    cr_assert_neq(place_find(&p, 1), SHM_FOUND_NVME);
    cr_assert_eq(place_put(&p, 1), RESERVE_NEW); /* I5 */
    place_release(&p);
    place_settle(&p);
    place_close(&p);
}

static void post(struct session *s, const struct shm_request *q)
{
    struct shm_cursor c = {.ring = &s->shm->requests,
                           .entries = s->ring_entries,
                           .mine = shm_load32(&s->shm->requests.tail)};

    cr_assert_gt(shm_ring_room(&c), 0u);
    s->shm->request[shm_ring_at(&c, c.mine)] = *q;
    shm_ring_produce(&c, 1);
}

ATTACK_TEST(a_ring_full_of_fetches_takes_their_cancelling)
{
    struct shm_request cancel = {.op = SHM_CANCEL, .cancel = {.n = 100}};
    struct session *s;

    p.parent = place_no_parent;
    place_open_filled(&p, POOL DISK, 32, "read:hang:from=2M:to=1G");
    s = world_session(&p.w, "", 16);
    world_attach(s, p.w.pool);
    for (uint64_t i = 0; i < s->ring_entries; i++) {
        struct shm_request q = {
            .op = SHM_FETCH, .user_data = i, .epoch = p.w.space->epoch, .fetch.key = world_key(i)};

        post(s, &q);
        session_serve(s, 64);
    }
    post(s, &cancel);
    cr_assert_eq(session_serve(s, 64), 1, "%u promised", s->promised);
    place_release(&p);
    place_settle(&p);
    place_close(&p);
}
