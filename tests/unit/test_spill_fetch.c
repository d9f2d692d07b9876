/* SPDX-License-Identifier: Apache-2.0 */
/* Promotion: who waits for what, for how long, and what is left when somebody goes. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "spill_world.h"

#define SIZE "slot = 64K\nslots = 32\nlow_water = 0\nhigh_water = 0\n"
#define DISK "[spill s/kv/disk]\npath = %s/disk\nsize = 32M\n"
#define POOL "[space s]\n[pool s/kv]\n" SIZE DISK

/* Only data; the tables are small here. */
#define DATA ":from=2M:to=1G"

static struct place p;

#define FETCH_TEST(name) PLACE_TEST(spill_fetch, name)

static uint32_t count(enum shm_slot_state state)
{
    return p.w.pool->count[state];
}

static const struct spill_stats *stats(void)
{
    return spill_stats(p.w.pool);
}

FETCH_TEST(each_state_of_a_key_has_its_answer)
{
    struct fetch_ask old = {.key = world_key(0), .epoch = 77};
    struct reservation r;

    place_open_filled(&p, POOL, 4, "");
    cr_assert_eq(place_ask(&p, 999, 1), -ENOENT);
    cr_assert_eq(spill_fetch(p.attach, &old), -ESTALE);
    cr_assert_eq(place_reserve(&p, 500, &r), RESERVE_NEW);
    cr_assert_eq(place_ask(&p, 500, 1), -EINPROGRESS);
    place_commit(&p, 500, &r);
    cr_assert_eq(place_ask(&p, 500, 1), 0);
    cr_assert_eq(place_fetch(&p, 0), 0);
    cr_assert_eq(place_ask(&p, 0, 1), 0);
    cr_assert_eq(stats()->fetch_ram, 2u);
    cr_assert_eq(stats()->fetch_nvme, 1u);
    cr_assert_eq(stats()->fetch_miss, 1u);
    place_close(&p);
}

FETCH_TEST(two_sessions_that_want_the_same_share_one_read)
{
    struct session *other;
    struct attach *a;
    uint64_t tag;

    place_open_filled(&p, POOL, 4, "read:delay=20");
    other = world_session(&p.w, "", 64);
    a = world_attach(other, p.w.pool);
    cr_assert_eq(place_ask(&p, 2, 7), 1);
    place_turn(&p);
    cr_assert_eq(place_ask_of(&p, a, 2, 8, 0), 1);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 1u);
    cr_assert_eq(place_completion(&p, &tag), 0);
    cr_assert_eq(tag, 7u);
    cr_assert_eq(place_completion_of(&p, other, &tag), 0);
    cr_assert_eq(tag, 8u);
    cr_assert_eq(place_status(&p, "s/kv/disk").stats.read_objects, 1u);
    cr_assert_eq(stats()->fetch_shared, 1u);
    place_check_object(&p, 2);
    place_close(&p);
}

FETCH_TEST(a_key_in_flight_is_pending_for_who_would_write_it)
{
    struct reservation r;
    uint64_t tag;

    place_open_filled(&p, POOL, 4, "read:hang" DATA);
    cr_assert_eq(place_ask(&p, 0, 7), 1);
    place_turns(&p, 3);
    cr_assert_eq(place_reserve(&p, 0, &r), RESERVE_PENDING);
    cr_assert_eq(place_find(&p, 0), SHM_FOUND_NVME); /* on its way back */
    cr_assert_eq(place_reserve(&p, 3, &r), RESERVE_PRESENT);
    cr_assert_eq(place_put(&p, 4), RESERVE_NEW); /* a child of 3 */
    place_release(&p);
    cr_assert_eq(place_completion(&p, &tag), 0);
    cr_assert_eq(place_reserve(&p, 0, &r), RESERVE_PRESENT);
    place_settle(&p);
    place_close(&p);
}

/* ---- giving up */

FETCH_TEST(a_cancelled_read_that_waits_is_not_begun_and_one_in_flight_is_finished)
{
    uint64_t tag, reads;

    place_open_filled(&p, POOL "queue_depth = 1\n", 8, "read:hang" DATA);
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(place_ask(&p, i, 100 + i), 1);
    place_turns(&p, 3);
    reads = place_status(&p, "s/kv/disk").stats.physical_read;
    spill_cancel(p.attach, 100, 8);
    for (uint64_t i = 0; i < 8; i++) {
        cr_assert_eq(place_completion(&p, &tag), -ECANCELED);
        cr_assert_eq(tag, 100 + i);
    }
    place_turns(&p, 10);
    cr_assert_eq(p.session->promised, 0u);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 1u); /* I4: the device has it */
    place_check(&p);
    place_release(&p);
    place_settle(&p);
    place_turns(&p, 3);
    cr_assert_eq(count(SHM_SLOT_LIVE), 1u);
    place_check_object(&p, 0);
    cr_assert_leq(place_status(&p, "s/kv/disk").stats.physical_read, reads + 2 * 4096);
    place_close(&p);
}

FETCH_TEST(a_cancelled_key_may_be_asked_for_again_at_once)
{
    uint64_t tag;

    place_open_filled(&p, POOL, 8, "read:delay=5");
    for (int round = 0; round < 20; round++) {
        uint64_t i = (uint64_t)round % 8;

        if (place_ask(&p, i, 1) != 1)
            continue;
        for (int k = 0; k < round % 4; k++)
            place_turn(&p);
        spill_cancel(p.attach, 1, 1);
        cr_assert_eq(place_ask(&p, i, 2) >= 0, 1);
    }
    place_settle(&p);
    place_turns(&p, 10);
    while (place_has_completion(p.session))
        cr_assert(place_completion(&p, &tag) == (tag == 1 ? -ECANCELED : 0) || tag == 1);
    for (uint64_t i = 0; i < 8; i++)
        place_check_object(&p, i);
    cr_assert_eq(p.session->promised, 0u);
    place_close(&p);
}

FETCH_TEST(past_its_deadline_a_read_is_a_miss_and_its_slot_stays_in_flight)
{
    uint64_t tag;

    place_open_filled(&p, POOL, 4, "read:hang" DATA);
    cr_assert_eq(place_ask(&p, 0, 1), 1);
    cr_assert_eq(place_ask_of(&p, p.attach, 1, 2, 100), 1);
    place_turns(&p, 90);
    cr_assert_not(place_has_completion(p.session));
    place_turns(&p, 20);
    cr_assert_eq(place_completion(&p, &tag), -ETIMEDOUT);
    cr_assert_eq(tag, 2u);
    cr_assert_not(place_has_completion(p.session));
    place_sleep(&p, 2);
    cr_assert_eq(place_completion(&p, &tag), -ETIMEDOUT);
    cr_assert_eq(tag, 1u);
    cr_assert_eq(stats()->fetch_timeout, 2u);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 2u);
    place_check(&p);
    place_release(&p);
    place_settle(&p);
    cr_assert_eq(count(SHM_SLOT_LIVE), 2u);
    place_check_object(&p, 0);
    place_check_object(&p, 1);
    place_close(&p);
}

FETCH_TEST(a_session_dies_while_its_reads_are_in_flight)
{
    struct session *other;
    struct attach *a;

    place_open_filled(&p, POOL, 8, "read:hang" DATA);
    other = world_session(&p.w, "", 64);
    a = world_attach(other, p.w.pool);
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(place_ask_of(&p, a, i, i, 0), 1);
    cr_assert_eq(place_ask(&p, 5, 50), 1);
    place_turns(&p, 3);
    session_end(other, true);
    place_turns(&p, 3);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 8u);
    place_check(&p);
    place_release(&p);
    place_settle(&p);
    for (uint64_t i = 0; i < 8; i++)
        place_check_object(&p, i);
    place_close(&p);
}

FETCH_TEST(a_session_dies_while_its_reads_wait)
{
    struct session *other;
    struct attach *a;

    place_open_filled(&p, POOL "queue_depth = 1\n", 8, "read:hang" DATA);
    other = world_session(&p.w, "", 64);
    a = world_attach(other, p.w.pool);
    for (uint64_t i = 0; i < 8; i++)
        cr_assert_eq(place_ask_of(&p, a, i, i, 0), 1);
    place_turns(&p, 3);
    session_end(other, true);
    place_turns(&p, 10);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 1u);
    place_release(&p);
    place_settle(&p);
    place_close(&p);
}

/* ---- a call of the socket */

static int calls_done;

static void call_done(struct fetch_call *call)
{
    cr_assert_eq(call->left, 0u);
    calls_done++;
}

static struct fetch_call *call_keys(uint32_t n)
{
    struct fetch_call *w = calloc(1, sizeof(*w) + n * sizeof(w->statuses[0]));

    w->session = p.session;
    w->n = w->left = n;
    w->done = call_done;
    for (uint32_t i = 0; i < n; i++) {
        struct fetch_ask ask = {
            .key = world_key(i), .epoch = p.w.space->epoch, .call = w, .index = i};

        cr_assert_eq(spill_fetch(p.attach, &ask), 1);
    }
    return w;
}

FETCH_TEST(a_call_is_answered_when_the_last_of_its_keys_is)
{
    struct fetch_call *w;

    place_open_filled(&p, POOL, 8, "read:delay=3,read:error=EIO:from=2M:to=1G:after=3:times=1");
    w = call_keys(8);
    place_turn(&p);
    cr_assert_eq(calls_done, 0);
    place_settle(&p);
    cr_assert_eq(calls_done, 1);
    for (uint32_t i = 0; i < 8; i++)
        cr_assert(w->statuses[i] == 0 || w->statuses[i] == -EIO);
    cr_assert_eq(p.session->promised, 0u);
    free(w);
    place_close(&p);
}

FETCH_TEST(a_call_ends_with_its_session)
{
    struct fetch_call *w;

    place_open_filled(&p, POOL, 8, "read:hang" DATA);
    w = call_keys(8);
    place_turns(&p, 3);
    session_end(p.session, true);
    cr_assert_eq(calls_done, 1);
    free(w);
    place_release(&p);
    place_settle(&p);
    place_close(&p);
}

/* ---- holds */

FETCH_TEST(what_was_fetched_stays_until_it_was_pinned)
{
    struct shm_pinned pin;

    place_open_filled(&p, POOL, 1, "");
    cr_assert_eq(place_fetch(&p, 0), 0);
    place_turns(&p, 1000);
    cr_assert_eq(pool_evict(p.w.pool, 1, HISTORY_EVICTED), 0u);
    cr_assert(place_pin(&p, 0, &pin));
    place_turns(&p, 200);
    cr_assert_eq(p.attach->n_held, 0u);
    cr_assert_eq(pool_evict(p.w.pool, 1, HISTORY_EVICTED), 0u); /* I3 */
    world_unpin(p.attach, &pin);
    place_turns(&p, 1);
    place_drop_ram(&p);
    cr_assert_eq(place_find(&p, 0), SHM_FOUND_NVME);
    place_close(&p);
}

FETCH_TEST(a_hold_is_not_in_the_way_when_its_session_has_had_the_object)
{
    struct reservation r;
    struct shm_pinned pin;

    place_open_filled(&p, POOL, 32, NULL);
    for (uint64_t i = 0; i < 32; i++)
        cr_assert_eq(place_fetch(&p, i), 0);
    cr_assert_eq(place_reserve(&p, 1000, &r), -ENOSPC);
    core_tick(p.w.core);
    for (uint64_t i = 0; i < 32; i++) { /* quicker than anybody looks at the counters */
        cr_assert(place_pin(&p, i, &pin));
        world_unpin(p.attach, &pin);
    }
    p.w.now_ns += 10000000;
    cr_assert_eq(place_reserve(&p, 1000, &r), RESERVE_NEW);
    place_commit(&p, 1000, &r);
    place_close(&p);
}

FETCH_TEST(a_hold_expires_or_is_cancelled)
{
    place_open_filled(&p, POOL, 2, "");
    cr_assert_eq(place_fetch(&p, 0), 0);
    cr_assert_eq(place_fetch(&p, 1), 0);
    cr_assert_eq(p.attach->n_held, 2u);
    spill_cancel(p.attach, 1000001, 1);
    cr_assert_eq(p.attach->n_held, 1u);
    cr_assert_eq(pool_evict(p.w.pool, 2, HISTORY_EVICTED), 1u);
    place_sleep(&p, 6);
    cr_assert_eq(p.attach->n_held, 0u);
    place_drop_ram(&p);
    place_close(&p);
}

FETCH_TEST(a_resident_object_is_held_too_and_holds_are_limited)
{
    place_open_filled(&p, POOL, 2, "");
    cr_assert_eq(place_fetch(&p, 1), 0);
    for (uint32_t i = 0; i < 16384; i++)
        cr_assert_eq(place_ask(&p, 1, i), 0);
    cr_assert_eq(p.attach->n_held, 16384u);
    cr_assert_eq(place_fetch(&p, 0), 0);
    cr_assert_eq(p.attach->n_held, 16384u);
    cr_assert_eq(pool_evict(p.w.pool, 2, HISTORY_EVICTED), 0u);
    session_end(p.session, true);
    place_drop_ram(&p);
    place_close(&p);
}

/* ---- no room */

FETCH_TEST(a_pool_that_is_pinned_all_over_refuses_two_workers_at_once)
{
    struct shm_pinned pins[32];
    struct attach *other;

    place_open_filled(&p, POOL, 64, "");
    other = world_attach(world_session(&p.w, "", 64), p.w.pool);
    for (uint64_t i = 0; i < 32; i++) {
        cr_assert_eq(place_fetch(&p, i), 0);
        cr_assert(place_pin(&p, i, &pins[i]));
    }
    for (uint64_t i = 32; i < 40; i++) {
        cr_assert_eq(place_ask(&p, i, i), -ENOSPC);
        cr_assert_eq(place_ask_of(&p, other, i + 8, i, 0), -ENOSPC);
    }
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 0u);
    place_check(&p);
    world_unpin(p.attach, &pins[7]);
    place_sleep(&p, 6);
    cr_assert_eq(place_fetch(&p, 33), 0);
    place_close(&p);
}

FETCH_TEST(two_workers_that_each_want_more_than_the_pool_has_both_come_to_an_end)
{
    struct session *other;
    struct attach *a;
    uint32_t got = 0, asked = 0;
    uint64_t tag;

    place_open_filled(&p, POOL, 64, "read:delay=2");
    other = world_session(&p.w, "", 64);
    a = world_attach(other, p.w.pool);
    for (uint64_t i = 0; i < 32; i++) {
        int x = place_ask(&p, i, i), y = place_ask_of(&p, a, i + 32, i, 0);

        cr_assert((x == 1 || x == -ENOSPC) && (y == 1 || y == -ENOSPC));
        asked += (x == 1) + (y == 1);
    }
    cr_assert_eq(asked, 32u);
    place_settle(&p);
    while (place_has_completion(p.session))
        got += place_completion(&p, &tag) == 0;
    while (place_has_completion(other))
        got += place_completion_of(&p, other, &tag) == 0;
    cr_assert_eq(got, 32u);
    place_close(&p);
}

static uint64_t parent_in_short_chain(uint64_t i)
{
    return i % 8 ? i - 1 : PLACE_ROOT;
}

FETCH_TEST(a_store_of_many_times_the_pool_can_be_read_through_it)
{
    p.parent = parent_in_short_chain;
    place_open_filled(&p, POOL, 300, "");
    for (uint64_t i = 0; i < 300; i++) {
        if (i % 16 == 0)
            place_sleep(&p, 6);
        cr_assert_eq(place_fetch(&p, i), 0);
        place_check_object(&p, i);
    }
    cr_assert_eq(stats()->evicted_unspilled, 0u);
    place_close(&p);
}

FETCH_TEST(tails_leave_first_after_promotion_too)
{
    uint64_t tag;

    place_open_filled(&p, POOL, 20, "read:delay=7:after=2:times=5,read:delay=2");
    for (uint64_t i = 0; i < 20; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    for (uint64_t i = 0; i < 20; i++)
        cr_assert_eq(place_completion(&p, &tag), 0);
    place_sleep(&p, 6);
    for (uint64_t left = 20; left-- > 0;) {
        cr_assert_eq(pool_evict(p.w.pool, 1, HISTORY_EVICTED), 1u);
        for (uint64_t i = 0; i < 20; i++)
            cr_assert_eq(place_find(&p, i), i < left ? SHM_FOUND_RAM : SHM_FOUND_NVME);
    }
    place_close(&p);
}

FETCH_TEST(a_quota_bounds_what_is_on_its_way)
{
    uint64_t tag;

    place_open_filled(&p, "[space s]\nmax_reserved = 3\n[pool s/kv]\n" SIZE DISK, 3,
                      "read:hang" DATA);
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(place_ask(&p, i % 2, i), i < 2 ? 1 : 1);
    cr_assert_eq(place_ask(&p, 2, 9), -EDQUOT);
    place_release(&p);
    for (uint64_t i = 0; i < 3; i++)
        cr_assert_eq(place_completion(&p, &tag), 0);
    place_sleep(&p, 6);
    cr_assert_eq(place_fetch(&p, 2), 0);
    place_close(&p);
}

/* ---- reset */

FETCH_TEST(a_reset_ends_what_is_on_its_way)
{
    uint64_t tag;

    place_open_filled(&p, POOL, 4, "read:hang" DATA);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    place_turns(&p, 3);
    space_reset(p.w.space);
    place_turns(&p, 3);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 4u);
    cr_assert_eq(place_find(&p, 0), SHM_FOUND_MISS);
    cr_assert_eq(place_put(&p, 0), RESERVE_NEW); /* under the new epoch */
    place_release(&p);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(place_completion(&p, &tag), -ESTALE);
    place_settle(&p);
    place_turns(&p, 5);
    cr_assert_eq(count(SHM_SLOT_IN_FLIGHT), 0u);
    cr_assert_eq(count(SHM_SLOT_LIVE), 1u);
    cr_assert_eq(place_status(&p, "s/kv/disk").used, 1u); /* all of the old ones are gone */
    place_check_object(&p, 0);
    place_close(&p);
}
