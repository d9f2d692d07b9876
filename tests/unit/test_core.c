/* SPDX-License-Identifier: Apache-2.0 */
/* The core without processes: slots, publishing, eviction, epochs, engines, rings. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core_world.h"
#include "shm/ring.h"

#define SMALL "[space s]\n[pool s/kv]\nslot = 4K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"

static struct world w;

/* Each test ends with all invariants checked. Not in .fini: Criterion does not count what fails
 * there. */
#define CORE_TEST(name)                                                                            \
    static void name(void);                                                                        \
    Test(core, name)                                                                               \
    {                                                                                              \
        world_open(&w, SMALL);                                                                     \
        name();                                                                                    \
        world_close(&w);                                                                           \
    }                                                                                              \
    static void name(void)

CORE_TEST(a_committed_object_is_found_and_a_reserved_one_is_pending)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k = world_key(1);
    struct reservation r, again;
    uint8_t state;

    cr_assert_eq(world_reserve(a, &k, NULL, &r), RESERVE_NEW);
    shm_lookup(w.pool->index, NULL, &k, 1, 1, &state);
    cr_assert_eq(state, SHM_FOUND_PENDING);
    cr_assert_eq(world_reserve(a, &k, NULL, &again), RESERVE_PENDING);
    cr_assert_eq(world_commit(a, r.ticket, 0), 0);
    cr_assert(world_has(w.pool, &k));
    cr_assert_eq(world_reserve(a, &k, NULL, &again), RESERVE_PRESENT);
    cr_assert_eq(world_commit(a, r.ticket, 0), 0, "a replayed commit is answered 0");
    cr_assert_eq(w.pool->stats.committed, 1u);
}

CORE_TEST(keys_that_differ_only_in_the_last_byte_or_the_group_are_different)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k = {.hash = {1, 2, 3}}, last = k, group = k;

    last.hash[31] = 1;
    group.group = 7;
    cr_assert_eq(world_put(a, &k, NULL), RESERVE_NEW);
    cr_assert_not(world_has(w.pool, &last));
    cr_assert_not(world_has(w.pool, &group));
    cr_assert_eq(world_put(a, &last, NULL), RESERVE_NEW);
    cr_assert_eq(world_put(a, &group, NULL), RESERVE_NEW);
    cr_assert(world_has(w.pool, &k) && world_has(w.pool, &last) && world_has(w.pool, &group));
}

CORE_TEST(a_full_pool_of_pins_says_enospc_and_one_release_helps_at_once)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_pinned pins[64];
    struct shm_key k;
    struct reservation r;

    for (int i = 0; i < 64; i++) {
        k = world_key((uint64_t)i);
        cr_assert_eq(world_put(a, &k, NULL), RESERVE_NEW);
        cr_assert(world_pin(a, &k, &pins[i]));
    }
    k = world_key(1000);
    cr_assert_eq(world_reserve(a, &k, NULL, &r), -ENOSPC);
    world_unpin(a, &pins[17]);
    cr_assert_eq(world_reserve(a, &k, NULL, &r), RESERVE_NEW);
    cr_assert_eq(r.slot, pins[17].slot);
    for (int i = 0; i < 64; i++) { /* I3 */
        k = world_key((uint64_t)i);
        cr_assert_eq(world_has(w.pool, &k), i != 17);
    }
}

CORE_TEST(the_least_recently_used_leaves_first)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k[65];
    struct shm_pinned p;

    for (int i = 0; i < 65; i++)
        k[i] = world_key((uint64_t)i);
    for (int i = 0; i < 64; i++)
        world_put(a, &k[i], NULL);
    core_tick(w.core);
    cr_assert(world_pin(a, &k[0], &p)); /* a use that only the stamp tells */
    world_unpin(a, &p);
    pool_observe(w.pool, &k[1], 1); /* one that the engine tells */
    world_put(a, &k[64], NULL);
    cr_assert(world_has(w.pool, &k[0]) && world_has(w.pool, &k[1]));
    cr_assert_not(world_has(w.pool, &k[2]));
}

CORE_TEST(tails_leave_before_heads)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k[64];

    for (int i = 0; i < 64; i++) {
        k[i] = world_key((uint64_t)i);
        cr_assert_eq(world_put(a, &k[i], i ? &k[i - 1] : NULL), RESERVE_NEW);
        core_tick(w.core); /* heads are older by the clock */
    }
    for (int left = 64; left > 0; left -= 5) {
        pool_evict(w.pool, 5, HISTORY_EVICTED);
        world_check(&w);
        for (int i = 0; i < 64; i++) /* I2 */
            cr_assert_eq(world_has(w.pool, &k[i]), i < left - 5);
    }
}

CORE_TEST(a_pinned_tail_keeps_its_heads_until_nothing_else_is_left)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k[64], other = world_key(99);
    struct shm_pinned p;

    for (int i = 0; i < 64; i++) {
        k[i] = world_key((uint64_t)i);
        world_put(a, &k[i], i && i < 32 ? &k[i - 1] : NULL);
    }
    cr_assert(world_pin(a, &k[31], &p));
    pool_evict(w.pool, 32, HISTORY_EVICTED);
    for (int i = 0; i < 32; i++)
        cr_assert(world_has(w.pool, &k[i]));
    for (int i = 0; i < 32; i++)
        world_put(a, &k[32 + i], NULL);
    for (int i = 32; i < 64; i++)
        cr_assert(world_pin(a, &k[i], &p));
    /* Only heads of a pinned tail are left: one of them must go rather than refuse. */
    cr_assert_eq(world_put(a, &other, NULL), RESERVE_NEW);
    cr_assert(world_has(w.pool, &k[31]));
}

CORE_TEST(stamps_of_the_future_and_garbage_counters_do_no_harm)
{
    struct session *s = world_session(&w, "", 0);
    struct attach *a = world_attach(s, w.pool), *b = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_pins *pins = a->map.addr;
    struct shm_key k;

    srand(7);
    for (int i = 0; i < 500; i++) {
        for (uint32_t n = 0; n < 64; n++) {
            atomic_store(&pins->pins[n].stamp, (uint32_t)rand());
            atomic_store(&pins->pins[n].count, n % 2 ? (uint32_t)rand() : 0);
        }
        k = world_key((uint64_t)i);
        world_put(b, &k, NULL);
        world_check(&w);
    }
    for (uint32_t n = 0; n < 64; n++)
        atomic_store(&pins->pins[n].count, 0);
}

CORE_TEST(a_truncated_pin_segment_breaks_its_session_only)
{
    struct session *s = world_session(&w, "", 0), *good = world_session(&w, "", 0);
    struct attach *a = world_attach(s, w.pool), *b = world_attach(good, w.pool);
    struct shm_pinned p;
    struct shm_key k, kept = world_key(1);

    world_put(b, &kept, NULL);
    cr_assert(world_pin(b, &kept, &p));
    cr_assert_eq(ftruncate(a->segment.fd, 0), 0);
    for (int i = 2; i < 200; i++) {
        k = world_key((uint64_t)i);
        cr_assert_eq(world_put(b, &k, NULL), RESERVE_NEW);
    }
    cr_assert(s->broken);
    cr_assert_not(good->broken);
    cr_assert(world_has(w.pool, &kept));
}

CORE_TEST(the_slots_of_a_dead_writer_are_quarantined_and_come_back)
{
    struct session *s = world_session(&w, "", 0);
    struct attach *a = world_attach(s, w.pool), *b;
    struct reservation r[3];
    struct shm_key k[3], other = world_key(50);

    for (int i = 0; i < 3; i++) {
        k[i] = world_key((uint64_t)i);
        world_reserve(a, &k[i], NULL, &r[i]);
    }
    session_end(s, true);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 3u);
    cr_assert_eq(w.pool->count[SHM_SLOT_FREE], 61u);
    b = world_attach(world_session(&w, "", 0), w.pool);
    cr_assert_eq(world_commit(b, r[0].ticket, 0), -ESTALE);
    cr_assert_eq(world_put(b, &k[0], NULL), RESERVE_NEW, "the key itself is free at once");
    world_sleep(&w, 29000);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 3u);
    world_sleep(&w, 2000);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 0u);
    cr_assert_eq(world_reserve(b, &other, NULL, &r[0]), RESERVE_NEW);
    cr_assert_neq(r[0].slot, r[1].slot, "a slot that was quarantined is reused last");
}

CORE_TEST(a_dead_pinner_lets_go_at_once)
{
    struct session *s = world_session(&w, "", 0);
    struct attach *a = world_attach(s, w.pool), *b;
    struct shm_pinned p;
    struct shm_key k = world_key(1);

    world_put(a, &k, NULL);
    cr_assert(world_pin(a, &k, &p));
    cr_assert_eq(pool_remove(w.pool, &p.slot, 1, HISTORY_REMOVED, 0), 0u);
    cr_assert_eq(pool_pins_of(w.pool, p.slot), 1u);
    session_hang_up(s); /* goes on reading */
    cr_assert_eq(pool_remove(w.pool, &p.slot, 1, HISTORY_REMOVED, 0), 0u);
    session_end(s, true);
    b = world_attach(world_session(&w, "", 0), w.pool);
    cr_assert_eq(pool_remove(b->pool, &p.slot, 1, HISTORY_REMOVED, 0), 1u);
}

CORE_TEST(an_engine_keeps_what_its_dead_member_held_for_those_who_are_copying)
{
    struct session *scheduler = world_session(&w, "engine", 0);
    struct session *rank = world_session(&w, "engine", 0);
    struct attach *a = world_attach(scheduler, w.pool), *b = world_attach(rank, w.pool);
    struct shm_key k = world_key(1), pinned = world_key(2);
    struct reservation r;
    struct shm_pinned p;

    world_put(a, &pinned, NULL);
    cr_assert(world_pin(a, &pinned, &p));
    cr_assert_eq(world_reserve(a, &k, NULL, &r), RESERVE_NEW);
    session_end(scheduler, true);
    session_end(scheduler, true); /* whoever notices second */
    cr_assert_str_eq(session_state_name(scheduler), "lingering");
    cr_assert_eq(pool_remove(w.pool, &p.slot, 1, HISTORY_REMOVED, 0), 0u);
    cr_assert_eq(world_commit(b, r.ticket, 0), 0, "the ticket belongs to the engine");
    world_sleep(&w, 31000);
    cr_assert_eq(pool_remove(w.pool, &p.slot, 1, HISTORY_REMOVED, 0), 1u);
    cr_assert(world_has(w.pool, &k));
}

CORE_TEST(who_says_goodbye_does_not_speak_for_those_who_are_copying)
{
    struct session *scheduler = world_session(&w, "engine", 0);
    struct session *rank = world_session(&w, "engine", 0);
    struct attach *a = world_attach(scheduler, w.pool), *b = world_attach(rank, w.pool);
    struct shm_key k[2] = {world_key(1), world_key(2)};
    struct reservation r;

    world_reserve(a, &k[0], NULL, &r);
    session_end(scheduler, false);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 1u, "a rank may be writing into it");
    world_reserve(b, &k[1], NULL, &r);
    session_end(rank, false);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 1u, "nobody else is left");
    cr_assert_eq(w.pool->count[SHM_SLOT_FREE], 63u);
}

CORE_TEST(the_last_members_death_ends_the_lingering)
{
    struct session *one = world_session(&w, "engine", 0), *two = world_session(&w, "engine", 0);
    struct attach *a = world_attach(one, w.pool);
    struct shm_key k = world_key(1);
    struct reservation r;

    world_reserve(a, &k, NULL, &r);
    session_end(one, true);
    cr_assert_eq(w.pool->count[SHM_SLOT_RESERVED], 1u);
    session_end(two, false);
    cr_assert_eq(w.pool->count[SHM_SLOT_QUARANTINED], 1u);
    cr_assert_eq(w.core->n_sessions, 0u);
    cr_assert(list_empty(&w.core->engines));
}

CORE_TEST(another_engine_cannot_use_a_ticket)
{
    struct attach *a = world_attach(world_session(&w, "one", 0), w.pool);
    struct attach *b = world_attach(world_session(&w, "two", 0), w.pool);
    struct shm_key k = world_key(1);
    struct reservation r;

    world_reserve(a, &k, NULL, &r);
    cr_assert_eq(world_commit(b, r.ticket, 0), -EPERM);
    cr_assert_eq(pool_abort(w.pool, b, r.ticket), -ENOENT);
    cr_assert_eq(world_commit(a, r.ticket ^ 1, 0), -ESTALE);
    cr_assert_eq(world_commit(a, 0, 0), -ESTALE);
    cr_assert_eq(world_commit(a, UINT64_MAX, 0), -ESTALE);
    cr_assert_eq(pool_abort(w.pool, a, r.ticket), 0);
    cr_assert_eq(world_commit(a, r.ticket, 0), -ESTALE);
    cr_assert_eq(w.pool->count[SHM_SLOT_FREE], 64u);
}

CORE_TEST(a_reset_makes_the_old_epoch_unreachable_and_uncommittable)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key k[3] = {world_key(0), world_key(1), world_key(2)};
    struct reservation r, stale;
    struct shm_pinned p;

    world_put(a, &k[0], NULL);
    world_put(a, &k[1], NULL);
    cr_assert(world_pin(a, &k[1], &p));
    world_reserve(a, &k[2], NULL, &r);
    space_reset(w.space);
    cr_assert_eq(w.space->epoch, 2u);
    cr_assert_not(world_has(w.pool, &k[0]));
    cr_assert_eq(shm_lookup(w.pool->index, NULL, k, 1, 1, NULL), 0u, "nor under the old epoch");
    cr_assert_eq(world_commit(a, r.ticket, 0), -ESTALE);
    pool_reserve(w.pool, a, &k[0], NULL, 1, 0, &stale);
    cr_assert_eq(stale.status, -ESTALE);
    cr_assert_eq(world_put(a, &k[1], NULL), RESERVE_NEW, "beside its pinned namesake");
    world_sleep(&w, 1);
    cr_assert_eq(w.pool->count[SHM_SLOT_LIVE], 2u, "the pinned one stays (I3)");
    world_check(&w);
    world_unpin(a, &p);
    cr_assert_eq(pool_evict(w.pool, 64, HISTORY_EVICTED), 2u);
}

CORE_TEST(a_million_inserts_and_evictions_leave_no_tombstones)
{
    struct attach *a = world_attach(world_session(&w, "", 0), w.pool);
    uint64_t probes = 0;

    for (uint64_t i = 0; i < 1000000; i++) {
        struct shm_key k = world_key(i);

        cr_assert_eq(world_put(a, &k, NULL), RESERVE_NEW);
    }
    world_check(&w);
    for (uint64_t i = 0; i < 1000; i++) { /* lines that a miss looks at */
        struct shm_key k = world_key(i);
        struct shm_table t = shm_table_of(w.pool->index);
        uint64_t line = shm_home(&t, &k);

        cr_assert_not(world_has(w.pool, &k));
        for (probes++; shm_load32(&t.lines[line].overflow); line = (line + 1) & t.mask)
            probes++;
    }
    /* Two or three in so small a table, by chance up to five; rotten tables need thousands. */
    cr_assert_lt(probes, 8000u, "%llu lines for 1000 misses", (unsigned long long)probes);
}

CORE_TEST(water_marks_keep_slots_free)
{
    struct attach *a;

    world_close(&w);
    world_open(&w,
               "[space s]\n[pool s/kv]\nslot = 4K\nslots = 64\nlow_water = 8\nhigh_water = 16\n");
    a = world_attach(world_session(&w, "", 0), w.pool);
    for (uint64_t i = 0; i < 64; i++) {
        struct shm_key k = world_key(i);

        world_put(a, &k, NULL);
        world_sleep(&w, 1);
        cr_assert_geq(w.pool->count[SHM_SLOT_FREE], 8u);
    }
}

CORE_TEST(parts_come_in_any_order_from_any_member_and_count_once)
{
    struct attach *a, *b;
    struct shm_key k = world_key(1);
    struct reservation r;
    struct commit c;

    world_close(&w);
    world_open(&w, "[space s]\n[pool s/kv]\nslot = 16K\nparts = 4\nslots = 16\n");
    a = world_attach(world_session(&w, "e", 0), w.pool);
    b = world_attach(world_session(&w, "e", 0), w.pool);
    cr_assert_eq(world_reserve(a, &k, NULL, &r), RESERVE_NEW);
    cr_assert_eq(world_commit(b, r.ticket, 3), 0);
    cr_assert_eq(world_commit(b, r.ticket, 3), 0);
    cr_assert_eq(world_commit(a, r.ticket, 0), 0);
    cr_assert_eq(world_commit(a, r.ticket, 4), -EINVAL);
    c = (struct commit){.ticket = r.ticket, .part = 1, .bytes = 17};
    cr_assert_eq(pool_commit(w.pool, a, &c), -EINVAL, "parts have one length");
    cr_assert_eq(world_commit(b, r.ticket, 1), 0);
    cr_assert_not(world_has(w.pool, &k));
    cr_assert_eq(world_commit(a, r.ticket, 2), 0);
    cr_assert(world_has(w.pool, &k));
}

CORE_TEST(quotas_of_sessions_and_tenants)
{
    struct attach *a;
    struct shm_key k;
    struct reservation r;

    world_close(&w);
    world_open(&w, "[space s]\nmax_reserved = 3\n[pool s/kv]\nslot = 4K\nslots = 64\n"
                   "[tenant 5]\nmax_resident = 8K\n[tenant *]\nmax_reserved = 2\n");
    a = world_attach(world_session(&w, "", 0), w.pool);
    for (uint64_t i = 0; i < 4; i++) { /* tenant 0: by the rule for all others */
        k = world_key(i);
        cr_assert_eq(world_reserve(a, &k, NULL, &r), i < 2 ? RESERVE_NEW : -EDQUOT);
    }
    for (uint64_t i = 10; i < 13; i++) { /* tenant 5: the session's limit comes first */
        k = world_key(i);
        pool_reserve(w.pool, a, &k, NULL, 1, 5, &r);
        cr_assert_eq(r.status, i < 11 ? RESERVE_NEW : -EDQUOT);
    }
    while (a->reserved.first != SLOT_NONE)
        cr_assert_eq(world_commit(a, w.pool->table->slots[a->reserved.first].ticket, 0), 0);
    for (uint64_t i = 20; i < 23; i++) {
        k = world_key(i);
        pool_reserve(w.pool, a, &k, NULL, 1, 5, &r);
        cr_assert_eq(r.status, i < 21 ? RESERVE_NEW : -EDQUOT, "8K resident are two slots");
        if (r.status == RESERVE_NEW)
            cr_assert_eq(world_commit(a, r.ticket, 0), 0);
    }
    cr_assert_eq(tenants_get(&w.space->tenants, 5).resident, 2u);
}

/* ---- rings */

static void post(struct session *s, struct shm_cursor *c, const struct shm_request *q)
{
    s->shm->request[shm_ring_at(c, c->mine)] = *q;
    shm_ring_produce(c, 1);
}

CORE_TEST(requests_of_a_ring_are_answered_and_wait_for_room)
{
    struct session *s = world_session(&w, "", 16);
    struct attach *a = world_attach(s, w.pool);
    struct shm_cursor q = {.ring = &s->shm->requests, .entries = 16};
    struct shm_cursor c = {.ring = &s->shm->completions, .entries = 16};
    struct shm_completion *answers = shm_completion_array(s->shm, 16);

    (void)a;
    for (uint64_t i = 0; i < 16; i++) {
        struct shm_request r = {.op = SHM_RESERVE, .pool = w.pool->id, .epoch = 1, .user_data = i};

        r.reserve.key = world_key(i);
        post(s, &q, &r);
    }
    cr_assert_eq(shm_ring_room(&q), 0u);
    cr_assert_eq(session_serve(s, 64), 16);
    cr_assert_eq(shm_ring_waiting(&c), 16);
    for (uint64_t i = 0; i < 16; i++) {
        cr_assert_eq(answers[i].status, RESERVE_NEW);
        cr_assert_eq(answers[i].user_data, i);
    }
    for (uint64_t i = 0; i < 3; i++) {
        struct shm_request r = {.op = SHM_COMMIT, .pool = w.pool->id, .ticket = answers[i].ticket};

        r.commit.bytes = 100;
        post(s, &q, &r);
    }
    cr_assert_eq(session_serve(s, 64), 0, "no room for an answer: the requests wait");
    shm_ring_consume(&c, 2);
    cr_assert_eq(session_serve(s, 64), 2);
    cr_assert_eq(w.pool->stats.committed, 2u);
}

CORE_TEST(a_ring_that_makes_no_sense_breaks_its_session)
{
    struct session *s = world_session(&w, "", 16);

    atomic_store(&s->shm->requests.tail, 17);
    cr_assert_eq(session_serve(s, 64), -EPROTO);
    cr_assert(s->broken);
    cr_assert_eq(session_serve(s, 64), 0);
}

CORE_TEST(any_bytes_in_a_session_segment_do_no_harm)
{
    struct attach *good = world_attach(world_session(&w, "", 0), w.pool);
    struct shm_key kept = world_key(1);
    struct shm_pinned p;

    world_put(good, &kept, NULL);
    cr_assert(world_pin(good, &kept, &p));
    srand(11);
    for (int round = 0; round < 3000; round++) {
        struct session *s = world_session(&w, "", 16);
        uint8_t *bytes;

        world_attach(s, w.pool);
        bytes = (uint8_t *)s->shm;
        for (size_t i = SHM_PAGE; i < SHM_PAGE + 16 * sizeof(struct shm_request); i++)
            bytes[i] = (uint8_t)rand();
        for (int i = 0; i < 16; i++) { /* mostly real operations on real pools */
            s->shm->request[i].op = (uint8_t)(rand() % 5);
            s->shm->request[i].pool = (uint32_t)(rand() % 3);
            s->shm->request[i].epoch = 1;
        }
        atomic_store(&s->shm->requests.tail, (uint32_t)(rand() % 18));
        atomic_store(&s->shm->completions.head, (uint32_t)(rand() % 3 ? 0 : rand()));
        session_serve(s, 64);
        session_end(s, true);
        world_sleep(&w, 40000);
        cr_assert(world_has(w.pool, &kept));
    }
}
