/* SPDX-License-Identifier: Apache-2.0 */
/* Pools with spill stores: what is found there, bringing it back, giving that up, and its accidents. */
#define _GNU_SOURCE
#include <criterion/criterion.h>

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd.h"
#include "fake_daemon.h"

#define PAGE    4096u
#define RING    16u
#define RECORDS 200u

static struct fake *f;
static struct kvd *kvd;
static struct kvd_space *space;
static struct kvd_pool *pool, *snapshots;

static void connect_to(uint32_t timeout_ms, uint32_t flags)
{
    struct kvd_options o;
    int r;

    kvd_options_init(&o, sizeof(o));
    o.socket = f->path;
    o.ring_entries = RING;
    o.timeout_ms = timeout_ms;
    o.spin_us = 0;
    o.flags = flags;
    do
        r = kvd_connect(&o, &kvd);
    while (r == -ETIMEDOUT); /* a loaded machine is no failure */
    cr_assert_eq(r, 0, "%s", kvd_last_error(NULL));
}

static void open_space(void)
{
    struct kvd_space_options s;
    int r;

    kvd_space_options_init(&s, sizeof(s));
    s.write = 1;
    do
        r = kvd_space_open(kvd, "model", &s, &space);
    while (r == -ETIMEDOUT);
    cr_assert_eq(r, 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, "kv", &pool), 0);
    cr_assert_eq(kvd_pool_get(space, "snapshots", &snapshots), 0);
}

static void start(uint32_t timeout_ms, bool by_hand, uint32_t flags)
{
    alarm(60); /* a hang is a failure, too */
    f = fake_start_stores(RECORDS);
    connect_to(timeout_ms, flags);
    open_space();
    pthread_mutex_lock(&f->lock);
    f->by_hand = by_hand;
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

static void setup(void)
{
    start(20000, false, 0);
}

/* A daemon that answers requests of the ring only when told to. */
static void slow(void)
{
    start(20000, true, 0);
}

/* And a library that does not wait for long. */
static void impatient(void)
{
    start(20, true, 0);
}

static void no_shm(void)
{
    start(20000, false, KVD_NO_SHM);
}

static void teardown(void)
{
    kvd_close(kvd);
    fake_stop(f);
}

static void chain(struct kvd_key *keys, unsigned first, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        unsigned number = first + i;

        keys[i] = (struct kvd_key){.hash = {1}};
        memcpy(keys[i].hash + 8, &number, sizeof(number));
    }
}

static void spill(unsigned first, unsigned n)
{
    struct kvd_key key;

    for (unsigned i = 0; i < n; i++) {
        chain(&key, first + i, 1);
        fake_spill(f, 0, (struct shm_key *)&key);
    }
}

static void store(unsigned first, unsigned n)
{
    struct kvd_key key;

    for (unsigned i = 0; i < n; i++) {
        chain(&key, first + i, 1);
        fake_store(f, 0, (struct shm_key *)&key, NULL, PAGE);
    }
}

static unsigned seen(const unsigned *counter)
{
    unsigned n;

    pthread_mutex_lock(&f->lock);
    n = *counter;
    pthread_mutex_unlock(&f->lock);
    return n;
}

static void set(bool *field, bool value)
{
    pthread_mutex_lock(&f->lock);
    *field = value;
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

static void take(struct shm_request *q, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        while (!fake_take(f, &q[i]))
            sched_yield();
}

static void answer(const struct shm_request *q, int32_t status)
{
    struct shm_completion c = {.user_data = q->user_data, .status = status, .slot = 7, .ticket = 8};

    fake_post(f, &c);
}

static bool ring_is_empty(void)
{
    struct shm_request q;

    return !fake_take(f, &q);
}

static void check_statuses(const int32_t *statuses, unsigned from, unsigned to, int32_t status)
{
    for (unsigned i = from; i < to; i++)
        cr_assert_eq(statuses[i], status, "key %u: %d", i, statuses[i]);
}

static void check_completion(const struct kvd_completion *c, uint64_t user_data, int32_t status)
{
    cr_assert_eq(c->user_data, user_data, "%llu", (unsigned long long)c->user_data);
    cr_assert_eq(c->status, status, "%d", c->status);
    cr_assert_eq(c->slot, UINT32_MAX);
    cr_assert_eq(c->ticket, 0);
}

/* ---- finding */

TestSuite(fetch, .init = setup, .fini = teardown);

Test(fetch, lookup_tells_ram_and_nvme_and_pending)
{
    struct kvd_key keys[12];
    struct kvd_reserve want = {.keys = keys + 8, .n = 2};
    struct kvd_reservation got[2];
    struct kvd_pool_info info;
    uint8_t states[12];
    static const uint8_t expected[12] = {KVD_RAM,  KVD_RAM,     KVD_NVME, KVD_NVME,
                                         KVD_RAM,  KVD_RAM,     KVD_NVME, KVD_NVME,
                                         KVD_NVME, KVD_PENDING, KVD_MISS, KVD_NVME};

    chain(keys, 0, 12);
    store(0, 2);
    store(4, 2);
    cr_assert_eq(kvd_reserve(pool, &want, got), 2);
    spill(1, 1); /* in both */
    spill(2, 2);
    spill(6, 3); /* the last one is PENDING, too */
    spill(11, 1);
    cr_assert_eq(kvd_lookup(pool, keys, 12, NULL), 9);
    cr_assert_eq(kvd_lookup(pool, keys, 12, states), 9);
    cr_assert_arr_eq(states, expected, 12);
    cr_assert_eq(kvd_lookup(snapshots, keys, 12, states), 0, "the stores of another pool");
    cr_assert_eq(states[2], KVD_MISS);
    fake_lose(f, 0, (struct shm_key *)&keys[2]);
    cr_assert_eq(kvd_lookup(pool, keys, 12, NULL), 2);
    kvd_pool_info(pool, &info);
    cr_assert_eq(info.records, RECORDS);
    kvd_pool_info(snapshots, &info);
    cr_assert_eq(info.records, 0);
}

Test(fetch, another_epoch_has_nothing_stored)
{
    struct kvd_key keys[2];
    struct kvd_fetch want = {.keys = keys, .n = 2};
    struct kvd_completion done;
    int32_t statuses[2];
    uint8_t states[2];

    chain(keys, 0, 2);
    spill(0, 2);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 2);
    pthread_mutex_lock(&f->lock); /* somebody else resets the space */
    f->epoch++;
    atomic_store(&f->pools[0].ix->epoch, f->epoch);
    pthread_mutex_unlock(&f->lock);
    cr_assert_eq(kvd_lookup(pool, keys, 2, states), 0);
    cr_assert_eq(states[0], KVD_MISS);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 0);
    check_statuses(statuses, 0, 2, -ESTALE);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 9), 2);
    while (kvd_completions(kvd, &done, 1) == 0)
        sched_yield();
    check_completion(&done, 9, -ESTALE);
    cr_assert_eq(kvd_space_refresh(space), 0);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 0, "records of the old epoch");
    spill(0, 1);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 1);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 1);
}

/* ---- bringing back */

Test(fetch, what_was_fetched_can_be_pinned)
{
    struct kvd_key keys[8];
    struct kvd_fetch want = {.keys = keys, .n = 8};
    struct kvd_reserve reserve = {.keys = keys + 6, .n = 1};
    struct kvd_reservation got;
    struct kvd_pinset *pins;
    int32_t statuses[9];

    chain(keys, 0, 8);
    store(0, 2);
    spill(2, 3);
    cr_assert_eq(kvd_reserve(pool, &reserve, &got), 1);
    statuses[8] = 77;
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 5, "%s", kvd_last_error(kvd));
    check_statuses(statuses, 0, 5, 0);
    cr_assert_eq(statuses[5], -ENOENT);
    cr_assert_eq(statuses[6], -EINPROGRESS);
    cr_assert_eq(statuses[7], -ENOENT);
    cr_assert_eq(statuses[8], 77);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &pins), 0);
    cr_assert_eq(kvd_pin(pins, pool, keys, 8, 0), 5);
    kvd_pinset_free(pins);
    want.n = 0;
    cr_assert_eq(kvd_fetch(pool, &want, NULL), 0);
}

Test(fetch, who_may_only_read_may_fetch)
{
    struct kvd_key key;
    struct kvd_fetch want = {.keys = &key, .n = 1};
    struct kvd_space *reading;
    struct kvd_pool *theirs;
    int32_t status;

    chain(&key, 0, 1);
    spill(0, 1);
    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &reading), 0);
    cr_assert_eq(kvd_pool_get(reading, NULL, &theirs), 0);
    cr_assert_eq(kvd_fetch(theirs, &want, &status), 1);
    cr_assert_eq(status, 0);
}

Test(fetch, arguments_are_checked)
{
    struct kvd_key key = {0};
    struct kvd_fetch want = {.n = 1};
    int32_t status = 77;

    cr_assert_eq(kvd_fetch(NULL, &want, &status), -EINVAL);
    cr_assert_eq(kvd_fetch(pool, NULL, &status), -EINVAL);
    cr_assert_eq(kvd_fetch(pool, &want, &status), -EINVAL);
    want.keys = &key;
    cr_assert_eq(kvd_fetch(pool, &want, NULL), -EINVAL);
    want.chain = 2;
    cr_assert_eq(kvd_fetch(pool, &want, &status), -EINVAL);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), -EINVAL);
    cr_assert_eq(kvd_submit_fetch(pool, NULL, 0), -EINVAL);
    cr_assert_eq(kvd_fetch_cancel(NULL, 0, 1), -EINVAL);
    cr_assert_eq(status, 77);
    cr_assert_eq(seen(&f->fetches), 0);
}

Test(fetch, a_batch_longer_than_the_ring)
{
    struct kvd_key keys[60];
    struct kvd_fetch want = {.keys = keys, .n = 50};
    int32_t statuses[60];

    chain(keys, 0, 60);
    spill(0, 20);
    spill(21, 39);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 49, "%s", kvd_last_error(kvd));
    check_statuses(statuses, 0, 20, 0);
    cr_assert_eq(statuses[20], -ENOENT);
    check_statuses(statuses, 21, 50, 0);
    want.n = 60;
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 56, "%s", kvd_last_error(kvd));
    check_statuses(statuses, 57, 60, -ENOSPC);
}

Test(fetch, a_chain_longer_than_the_ring_ends_with_its_first_miss)
{
    struct kvd_key keys[60];
    struct kvd_fetch want = {.keys = keys, .n = 50, .chain = 1};
    int32_t statuses[50];

    chain(keys, 0, 60);
    spill(0, 20);
    spill(21, 29);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 20, "%s", kvd_last_error(kvd));
    check_statuses(statuses, 0, 20, 0);
    check_statuses(statuses, 20, 50, -ENOENT);
    cr_assert_eq(seen(&f->fetches), 21, "the rest is not tried");
    spill(20, 1);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 50);
}

/* ---- in the ring */

TestSuite(fetch_ring, .init = slow, .fini = teardown);

Test(fetch_ring, requests_say_what_was_asked)
{
    struct kvd_key keys[5];
    struct kvd_fetch want = {.keys = keys, .n = 5, .chain = 1, .deadline_ms = 1000000};
    struct shm_request q[5];

    chain(keys, 0, 5);
    for (unsigned round = 0; round < 2; round++) {
        cr_assert_eq(kvd_submit_fetch(pool, &want, 0), round ? 3 : 5);
        take(q, round ? 3 : 5);
        for (unsigned i = 0; i < (round ? 3 : 5); i++) {
            cr_assert_eq(q[i].op, SHM_FETCH);
            cr_assert_eq(q[i].flags, i && !round ? SHM_GOES_ON : 0, "%u", i);
            cr_assert_eq(q[i].pool, f->pools[0].id);
            cr_assert_eq(q[i].epoch, 1);
            cr_assert_arr_eq(&q[i].fetch.key, &keys[i], sizeof(keys[i]));
            cr_assert(round ? q[i].fetch.deadline_ms == 0
                            : q[i].fetch.deadline_ms <= 1000000 && q[i].fetch.deadline_ms > 900000);
        }
        want.chain = 0;
        want.deadline_ms = 0;
    }
}

Test(fetch_ring, fetches_leave_room_for_those_who_publish)
{
    struct kvd_key keys[40];
    struct kvd_fetch want = {.keys = keys, .n = 20};
    struct kvd_reserve reserve = {.keys = keys + 20, .n = 20};
    struct kvd_completion done[RING];
    struct shm_request q[RING];

    chain(keys, 0, 40);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), RING / 2);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 100), 0);
    take(q, RING / 2);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 100), 0, "in flight, although the ring is empty");
    cr_assert_eq(kvd_submit_reserve(pool, &reserve, 200), RING / 2);
    for (unsigned i = 0; i < RING / 2; i++)
        answer(&q[i], -ENOENT);
    cr_assert_eq(fake_serve(f, RING), RING / 2, "answers of all that is in flight fit the ring");
    cr_assert_eq(kvd_completions(kvd, done, RING), RING);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 100), RING / 2);
}

static void *reserve_a_ringful(void *arg)
{
    struct kvd_key keys[RING];
    struct kvd_reserve want = {.keys = keys, .n = RING};
    struct kvd_reservation got[RING];

    chain(keys, 500, RING);
    return (void *)(intptr_t)(kvd_reserve(pool, &want, got) == RING ? arg : NULL);
}

/* The daemon answers fetches late, and cannot wait for room then. */
Test(fetch_ring, no_more_in_flight_than_the_completion_ring_takes)
{
    struct kvd_key keys[RING / 2];
    struct kvd_fetch want = {.keys = keys, .n = RING / 2};
    struct shm_request q[RING / 2];
    pthread_t t;
    void *ok;

    chain(keys, 0, RING / 2);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), RING / 2);
    take(q, RING / 2);
    pthread_create(&t, NULL, reserve_a_ringful, f);
    while (shm_ring_waiting(&f->session.requests) == 0)
        sched_yield();
    cr_assert_eq(shm_ring_waiting(&f->session.requests), RING / 2, "posted at once");
    set(&f->by_hand, false);
    pthread_join(t, &ok);
    cr_assert_eq(ok, f);
}

Test(fetch_ring, answers_come_in_any_order)
{
    struct kvd_key keys[6];
    struct kvd_fetch want = {.keys = keys, .n = 6};
    struct kvd_completion done[6];
    struct shm_request q[6];
    static const int32_t statuses[6] = {0, -ENOENT, -EIO, -ETIMEDOUT, 0, -ENOSPC};
    static const unsigned order[6] = {3, 0, 5, 4, 2, 1};

    chain(keys, 0, 6);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 50), 6);
    take(q, 6);
    for (unsigned i = 0; i < 6; i++)
        answer(&q[order[i]], statuses[order[i]]);
    answer(&q[0], -EIO); /* twice */
    cr_assert_eq(kvd_completions(kvd, done, 6), 6);
    for (unsigned i = 0; i < 6; i++)
        check_completion(&done[i], 50 + order[i], statuses[order[i]]);
    cr_assert_eq(kvd_completions(kvd, done, 6), 0);
}

static void *answer_backwards(void *arg)
{
    struct shm_request q[4];

    take(q, 4);
    answer(&q[3], 0);
    answer(&q[2], 5); /* no such status */
    answer(&q[1], -EIO);
    answer(&q[0], 0);
    return arg;
}

Test(fetch_ring, a_waiting_call_takes_answers_in_any_order)
{
    struct kvd_key keys[4];
    struct kvd_fetch want = {.keys = keys, .n = 4};
    int32_t statuses[4];
    pthread_t t;

    chain(keys, 0, 4);
    pthread_create(&t, NULL, answer_backwards, NULL);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 2);
    pthread_join(t, NULL);
    cr_assert_eq(statuses[0], 0);
    cr_assert_eq(statuses[1], -EIO);
    cr_assert_eq(statuses[2], -EPROTO);
    cr_assert_eq(statuses[3], 0);
}

Test(fetch_ring, nonsense_is_no_status)
{
    static const int32_t nonsense[3] = {1, 3, INT32_MAX};
    struct kvd_key keys[3];
    struct kvd_fetch want = {.keys = keys, .n = 3};
    struct kvd_completion done[3];
    struct shm_request q[3];

    chain(keys, 0, 3);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 1), 3);
    take(q, 3);
    for (unsigned i = 0; i < 3; i++)
        answer(&q[i], nonsense[i]);
    cr_assert_eq(kvd_completions(kvd, done, 3), 3);
    for (unsigned i = 0; i < 3; i++)
        check_completion(&done[i], 1 + i, -EPROTO);
}

/* ---- giving up */

/* All cancels in the ring; how many requests. *ret_tags: what they name. */
static unsigned take_cancels(uint64_t tags[RING], unsigned *ret_tags)
{
    struct shm_request q;
    unsigned n = 0;

    *ret_tags = 0;
    while (fake_take(f, &q)) {
        cr_assert_eq(q.op, SHM_CANCEL);
        cr_assert_eq(q.pool, f->pools[0].id);
        n++;
        for (uint64_t i = 0; i < q.cancel.n; i++) {
            cr_assert_lt(*ret_tags, RING);
            tags[(*ret_tags)++] = q.cancel.user_data + i;
        }
    }
    return n;
}

static bool named(const uint64_t *tags, unsigned n, uint64_t tag)
{
    unsigned times = 0;

    for (unsigned i = 0; i < n; i++)
        times += tags[i] == tag;
    cr_assert_leq(times, 1, "twice");
    return times == 1;
}

Test(fetch_ring, a_cancel_names_those_in_the_range)
{
    struct kvd_key keys[6];
    struct kvd_fetch want = {.keys = keys, .n = 6};
    struct kvd_completion done[6];
    struct shm_request q[6];
    uint64_t tags[RING];
    unsigned n;

    chain(keys, 0, 6);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 100), 6);
    take(q, 6);
    cr_assert_eq(kvd_fetch_cancel(snapshots, 100, 6), 0);
    cr_assert_eq(kvd_fetch_cancel(pool, 106, 100), 0);
    cr_assert_eq(kvd_fetch_cancel(pool, 94, 6), 0);
    cr_assert_eq(kvd_fetch_cancel(pool, 100, 0), 0);
    cr_assert(ring_is_empty());
    cr_assert_eq(kvd_fetch_cancel(pool, 101, 3), 0);
    cr_assert_eq(take_cancels(tags, &n), 1, "one request for a run of tags");
    cr_assert_eq(n, 3);
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(named(tags, n, q[i].user_data), i >= 1 && i < 4, "%u", i);
    cr_assert_eq(kvd_fetch_cancel(pool, 100, 4), 0);
    cr_assert_eq(take_cancels(tags, &n), 1);
    cr_assert_eq(n, 1, "those before are not named again");
    cr_assert_eq(tags[0], q[0].user_data);
    for (unsigned i = 0; i < 6; i++)
        answer(&q[i], i < 3 ? -ECANCELED : 0); /* number 3 had come before its cancel */
    cr_assert_eq(kvd_completions(kvd, done, 6), 6);
    for (unsigned i = 0; i < 6; i++)
        check_completion(&done[i], 100 + i, i < 3 ? -ECANCELED : 0);
    cr_assert_eq(kvd_fetch_cancel(pool, 0, SIZE_MAX), 0);
    take_cancels(tags, &n);
    cr_assert_eq(n, 2, "the two that were brought back and not given up");
    cr_assert(named(tags, n, q[4].user_data) && named(tags, n, q[5].user_data));
}

Test(fetch_ring, a_cancel_lets_go_of_what_has_been_collected)
{
    struct kvd_key keys[4];
    struct kvd_fetch want = {.keys = keys, .n = 4};
    struct kvd_completion done[4];
    struct shm_request q[4];
    uint64_t tags[RING], first[2];
    unsigned n;

    chain(keys, 0, 4);
    for (unsigned round = 0; round < 2; round++) { /* places in the table are used again */
        cr_assert_eq(kvd_submit_fetch(pool, &want, 10 * round), 4);
        take(q, 4);
        for (unsigned i = 0; i < 4; i++)
            answer(&q[i], i % 2 ? 0 : -EIO);
        cr_assert_eq(kvd_completions(kvd, done, 4), 4);
        first[round] = q[1].user_data;
    }
    cr_assert_eq(kvd_fetch_cancel(pool, 0, 2), 0);
    take_cancels(tags, &n);
    cr_assert_eq(n, 1);
    cr_assert_eq(tags[0], first[0]);
    cr_assert_eq(kvd_fetch_cancel(pool, 10, 2), 0);
    take_cancels(tags, &n);
    cr_assert_eq(n, 1);
    cr_assert_eq(tags[0], first[1]);
    cr_assert_eq(kvd_fetch_cancel(pool, 0, 3), 0);
    cr_assert(ring_is_empty());
}

/* The memory of what was brought back is bounded: the oldest are forgotten, not the newest. */
Test(fetch_ring, the_last_ones_are_remembered)
{
    struct kvd_key key;
    struct kvd_fetch want = {.keys = &key, .n = 1};
    struct kvd_completion done;
    struct shm_request q;
    unsigned cancels = 0;

    chain(&key, 0, 1);
    for (unsigned i = 0; i < 5 * RING; i++) {
        cr_assert_eq(kvd_submit_fetch(pool, &want, i), 1);
        take(&q, 1);
        answer(&q, 0);
        cr_assert_eq(kvd_completions(kvd, &done, 1), 1);
    }
    cr_assert_eq(kvd_fetch_cancel(pool, 0, 3 * RING), 0);
    cr_assert(ring_is_empty());
    for (unsigned i = 3 * RING; i < 5 * RING; i++) {
        cr_assert_eq(kvd_fetch_cancel(pool, i, 1), 0);
        while (fake_take(f, &q))
            cancels += q.op == SHM_CANCEL && q.cancel.n == 1;
    }
    cr_assert_eq(cancels, 2 * RING);
}

/* Until it sleeps: the library says so before it does. */
static void until_waiting(void)
{
    while (!atomic_load(&f->session.shm->waiting))
        sched_yield();
}

static void *take_one_silently(void *arg)
{
    until_waiting();
    cr_assert_eq(fake_serve(f, 1), 1);
    return arg;
}

/* That the daemon has taken a request is not announced. (To wait for an announcement would take longer
 * than this test has.) */
Test(fetch_ring, cancels_wait_for_room)
{
    struct kvd_key keys[48];
    struct kvd_fetch want = {.n = 1};
    struct kvd_reserve reserve = {.keys = keys, .n = 8};
    struct kvd_completion done[RING];
    struct shm_request q[8];
    pthread_t t;

    chain(keys, 0, 48);
    for (unsigned i = 0; i < 8; i++) {
        want.keys = &keys[i];
        cr_assert_eq(kvd_submit_fetch(pool, &want, 2 * i), 1);
    }
    take(q, 8);
    cr_assert_eq(kvd_observe(pool, keys, 48), 48); /* half of the ring: has no completions */
    cr_assert_eq(kvd_submit_reserve(pool, &reserve, 100), 8);
    for (unsigned i = 0; i < 7; i++) {
        cr_assert_eq(shm_ring_waiting(&f->session.requests), RING, "it is full");
        pthread_create(&t, NULL, take_one_silently, NULL);
        cr_assert_eq(kvd_fetch_cancel(pool, 2 * i, 1), 0, "%s", kvd_last_error(kvd));
        pthread_join(t, NULL);
    }
    cr_assert_eq(fake_serve(f, RING), RING);
    cr_assert_eq(seen(&f->cancels), 7);
    for (unsigned i = 0; i < 7; i++)
        cr_assert_eq(f->cancel[i].tag, q[i].user_data);
    cr_assert_eq(kvd_completions(kvd, done, RING), 8);
}

/* ---- beside others */

struct call {
    pthread_t thread;
    struct kvd_key keys[4];
    int32_t statuses[4];
    unsigned first;
    ssize_t r;
};

static void *fetch_two(void *arg)
{
    struct call *c = arg;
    struct kvd_fetch want = {.keys = c->keys, .n = 2};

    chain(c->keys, c->first, 2);
    c->r = kvd_fetch(pool, &want, c->statuses);
    return NULL;
}

static void begin(struct call *c, unsigned first, struct shm_request *q)
{
    c->first = first;
    pthread_create(&c->thread, NULL, fetch_two, c);
    take(q, 2);
}

static void end(struct call *c, int32_t status)
{
    pthread_join(c->thread, NULL);
    cr_assert_eq(c->r, status == 0 ? 2 : 0, "%zd", c->r);
    check_statuses(c->statuses, 0, 2, status);
}

static void *reserve_one(void *arg)
{
    struct kvd_key key;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_reservation got;

    chain(&key, 500, 1);
    return kvd_reserve(pool, &want, &got) == 1 ? arg : NULL;
}

Test(fetch_ring, a_waiting_fetch_keeps_nobody_from_the_daemon)
{
    struct kvd_space *other;
    struct call c = {0};
    struct shm_request q[2], reserve;
    struct shm_completion done;
    pthread_t t;
    void *ok;

    begin(&c, 0, q);
    until_waiting();
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(kvd_ping(kvd), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &other), 0, "%s", kvd_last_error(kvd));
    kvd_space_close(other);
    until_waiting();
    pthread_create(&t, NULL, reserve_one, f);
    take(&reserve, 1);
    until_waiting();
    fake_answer(f, &reserve, &done);
    fake_post(f, &done);
    pthread_join(t, &ok);
    cr_assert_eq(ok, f);
    for (unsigned i = 0; i < 2; i++)
        answer(&q[i], 0);
    end(&c, 0);
}

Test(fetch_ring, several_wait_and_are_answered_in_another_order)
{
    struct call c[4] = {0};
    struct shm_request q[4][2];
    static const unsigned order[4] = {2, 0, 3, 1};

    for (unsigned i = 0; i < 4; i++) {
        begin(&c[i], 10 * i, q[i]);
        until_waiting();
    }
    for (unsigned i = 0; i < 4; i++) {
        answer(&q[order[i]][1], -EIO);
        answer(&q[order[i]][0], -EIO);
        end(&c[order[i]], -EIO);
    }
}

Test(fetch_ring, who_polls_is_woken_beside_a_waiting_fetch)
{
    struct kvd_key keys[2];
    struct kvd_reserve want = {.keys = keys, .n = 1};
    struct kvd_completion done;
    struct pollfd p = {.fd = kvd_event_fd(kvd), .events = POLLIN};
    struct call c = {0};
    struct shm_request q[2];

    begin(&c, 0, q);
    until_waiting();
    for (unsigned i = 0; i < 20; i++) {
        chain(keys, 100 + i, 1);
        cr_assert_eq(kvd_submit_reserve(pool, &want, i), 1);
        cr_assert_eq(kvd_drain(kvd), 0);
        cr_assert_eq(fake_serve(f, 1), 1);
        cr_assert_eq(poll(&p, 1, -1), 1);
        while (kvd_drain(kvd) == 0)
            cr_assert_eq(poll(&p, 1, -1), 1);
        cr_assert_eq(kvd_completions(kvd, &done, 1), 1);
        cr_assert_eq(done.user_data, i);
    }
    for (unsigned i = 0; i < 2; i++)
        answer(&q[i], 0);
    end(&c, 0);
}

/* The socket is left to the poller, who does not come: the ring is looked at all the same, and nobody
 * keeps the daemon busy meanwhile. */
Test(fetch_ring, a_fetch_beside_completions_that_nobody_collects)
{
    struct kvd_key key;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_completion done;
    struct pollfd p = {.fd = kvd_event_fd(kvd), .events = POLLIN};
    struct call c = {0};
    struct shm_request q[2];

    chain(&key, 100, 1);
    cr_assert_eq(kvd_drain(kvd), 0);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 5), 1);
    cr_assert_eq(fake_serve(f, 1), 1);
    begin(&c, 0, q);
    cr_assert_eq(poll(&p, 1, -1), 1);
    usleep(50000);
    cr_assert_leq(seen(&f->pings), 2);
    for (unsigned i = 0; i < 2; i++)
        answer(&q[i], 0);
    end(&c, 0);
    cr_assert_eq(poll(&p, 1, -1), 1);
    cr_assert_eq(kvd_completions(kvd, &done, 1), 1);
}

/* ---- accidents */

static void *hang_up_and_answer(void *arg)
{
    struct shm_request q[2];
    unsigned resumed = seen(&f->resumes);

    take(q, 2);
    until_waiting();
    fake_hang_up(f);
    while (seen(&f->resumes) == resumed)
        sched_yield();
    answer(&q[1], 0);
    answer(&q[0], 0);
    return arg;
}

Test(fetch_ring, a_connection_that_dies_under_a_waiting_fetch)
{
    struct kvd_key keys[2];
    struct kvd_fetch want = {.keys = keys, .n = 2};
    int32_t statuses[2];
    pthread_t t;

    chain(keys, 0, 2);
    pthread_create(&t, NULL, hang_up_and_answer, NULL);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), 2, "%s", kvd_last_error(kvd));
    pthread_join(t, NULL);
}

static void *answer_one_and_go(void *arg)
{
    struct shm_request q[2];

    take(q, 2);
    answer(&q[0], 0);
    while (shm_ring_room(&f->session.completions) < f->session.completions.entries)
        sched_yield();
    until_waiting();
    if (arg) {
        set(&f->may_resume, false);
        fake_replace(f);
    } else {
        fake_leave(f);
    }
    return NULL;
}

Test(fetch_ring, a_daemon_that_goes_in_between)
{
    struct kvd_key keys[2];
    struct kvd_fetch want = {.keys = keys, .n = 2};
    struct kvd_completion done[4];
    int32_t statuses[2];
    pthread_t t;

    chain(keys, 0, 2);
    pthread_create(&t, NULL, answer_one_and_go, NULL);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ENOTCONN);
    pthread_join(t, NULL);
    cr_assert_eq(statuses[0], 0, "it was answered");
    cr_assert_eq(statuses[1], -ENOTCONN);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), -ENOTCONN);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ENOTCONN);
    check_statuses(statuses, 0, 2, -ENOTCONN);
    fake_return(f);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 5), 2, "%s", kvd_last_error(kvd));
    cr_assert_eq(fake_serve(f, RING), 3, "the one that was given up was cancelled");
    cr_assert_eq(seen(&f->cancels), 1);
    cr_assert_eq(kvd_completions(kvd, done, 4), 2);
    check_completion(&done[0], 5, -ENOENT);
}

Test(fetch_ring, another_daemon_in_between)
{
    struct kvd_key keys[2];
    struct kvd_fetch want = {.keys = keys, .n = 2};
    struct kvd_completion done[4];
    int32_t statuses[2];
    pthread_t t;

    chain(keys, 0, 2);
    pthread_create(&t, NULL, answer_one_and_go, (void *)1);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ENOTCONN);
    pthread_join(t, NULL);
    cr_assert_eq(statuses[1], -ENOTCONN);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ESTALE);
    check_statuses(statuses, 0, 2, -ESTALE);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 5), -ESTALE);
    cr_assert_eq(kvd_fetch_cancel(pool, 0, 100), 0);
    cr_assert_eq(kvd_space_refresh(space), 0);
    spill(0, 2);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 2, "the new daemon's index");
    cr_assert_eq(kvd_submit_fetch(pool, &want, 5), 2);
    cr_assert_eq(fake_serve(f, RING), 2);
    cr_assert_eq(kvd_completions(kvd, done, 4), 2);
    check_completion(&done[1], 6, 0);
}

Test(fetch_ring, fetches_in_flight_end_with_their_session)
{
    struct kvd_key keys[3];
    struct kvd_fetch want = {.keys = keys, .n = 3};
    struct kvd_completion done[4];
    struct shm_request q[3];

    chain(keys, 0, 3);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 70), 3);
    take(q, 3);
    answer(&q[1], 0);
    set(&f->may_resume, false);
    fake_replace(f);
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(kvd_completions(kvd, done, 4), 3);
    check_completion(&done[0], 71, 0);
    check_completion(&done[1], 70, -ENOTCONN);
    check_completion(&done[2], 72, -ENOTCONN);
    cr_assert_eq(kvd_space_refresh(space), 0);
    cr_assert_eq(kvd_fetch_cancel(pool, 70, 3), 0);
    cr_assert(ring_is_empty(), "the new daemon holds nothing");
    for (unsigned i = 0; i < RING / 2; i++) {
        want.n = 1;
        cr_assert_eq(kvd_submit_fetch(pool, &want, i), 1, "all places are free again: %u", i);
    }
}

TestSuite(fetch_late, .init = impatient, .fini = teardown);

Test(fetch_late, a_fetch_that_nobody_answers_is_given_up)
{
    struct kvd_key keys[10];
    struct kvd_fetch want = {.keys = keys, .n = 10, .deadline_ms = 30};
    struct kvd_completion done[RING];
    int32_t statuses[10];
    struct shm_request q[8];
    uint64_t tags[RING];
    unsigned n;

    chain(keys, 0, 10);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ETIMEDOUT);
    check_statuses(statuses, 0, 10, -ETIMEDOUT);
    cr_assert_neq(strstr(kvd_last_error(kvd), "in time"), NULL);
    take(q, 8);
    take_cancels(tags, &n);
    cr_assert_eq(n, 8);
    for (unsigned i = 0; i < 8; i++)
        cr_assert(named(tags, n, q[i].user_data), "%u", i);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), 0, "they are in flight, still");
    for (unsigned i = 0; i < 8; i++)
        answer(&q[i], i ? -ECANCELED : 0);
    cr_assert_eq(kvd_completions(kvd, done, RING), 0, "for nobody");
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), 8);
    cr_assert_eq(fake_serve(f, RING), 8);
    cr_assert_eq(kvd_completions(kvd, done, RING), 8);
    check_completion(&done[7], 7, -ENOENT);
}

static void *answer_the_second(void *arg)
{
    struct shm_request q[3];

    take(q, 3);
    answer(&q[1], -EIO);
    return arg;
}

Test(fetch_late, what_was_answered_keeps_its_status)
{
    struct kvd_key keys[3];
    struct kvd_fetch want = {.keys = keys, .n = 3, .deadline_ms = 1000};
    int32_t statuses[3];
    pthread_t t;

    chain(keys, 0, 3);
    pthread_create(&t, NULL, answer_the_second, NULL);
    cr_assert_eq(kvd_fetch(pool, &want, statuses), -ETIMEDOUT);
    pthread_join(t, NULL);
    cr_assert_eq(statuses[0], -ETIMEDOUT);
    cr_assert_eq(statuses[1], -EIO);
    cr_assert_eq(statuses[2], -ETIMEDOUT);
}

/* Room does not come: nothing is forgotten, and the next try finds what is left. */
Test(fetch_late, cancels_that_find_no_room)
{
    struct kvd_key keys[2 * RING];
    struct kvd_fetch want = {.keys = keys, .n = 8};
    struct kvd_reserve reserve = {.keys = keys, .n = 8};
    struct kvd_completion done[RING];
    int r;

    chain(keys, 0, 2 * RING);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 40), 8);
    cr_assert_eq(kvd_submit_reserve(pool, &reserve, 0), 8);
    cr_assert_eq(kvd_fetch_cancel(pool, 40, 8), -ETIMEDOUT);
    cr_assert_eq(kvd_fetch_cancel(snapshots, 40, 8), 0, "nothing to tell");
    cr_assert_eq(fake_serve(f, RING), RING);
    cr_assert_eq(seen(&f->cancels), 0);
    while ((r = kvd_fetch_cancel(pool, 40, 8)) == -ETIMEDOUT)
        ;
    cr_assert_eq(r, 0);
    cr_assert_eq(fake_serve(f, RING), 0, "all had been answered, and none was in a store");
    cr_assert_eq(kvd_completions(kvd, done, RING), RING);
}

/* ---- what the daemon says of its stores */

static unsigned open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;

    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static void tweak_stores(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    struct shm_header *h = d->pools[0].nvme.addr;

    if (r->body_case != KVD__PROTO__RESPONSE__BODY_POOL_OPEN || *n_fds != 4)
        return;
    switch (d->tweak_pick) {
    case 0:
        r->fds = *n_fds = 3;
        break;
    case 1:
        r->pool_open->info->has_records = 0;
        break;
    case 2:
        fds[3] = fds[2]; /* pin counters */
        break;
    case 3:
        fds[3] = fds[0]; /* another kind */
        break;
    case 4:
        h->pool++;
        break;
    case 5:
        h->count--;
        break;
    case 6:
        h->count = 1;
        break;
    case 7:
        h->count *= 2; /* more than the segment has */
        break;
    case 8:
        h->instance[3]++;
        break;
    case 9:
        h->version++;
        break;
    case 10:
        fds[3] = d->nudge;
        break;
    }
}

TestSuite(fetch_stores, .init = setup, .fini = teardown);

Test(fetch_stores, nonsense_is_refused)
{
    struct shm_header *h = f->pools[0].nvme.addr, good = *h;
    unsigned before = open_fds();
    struct kvd_space *other = NULL;

    for (unsigned pick = 0; pick <= 10; pick++) {
        int r;

        pthread_mutex_lock(&f->lock);
        f->tweak = tweak_stores;
        f->tweak_pick = pick;
        pthread_mutex_unlock(&f->lock);
        r = kvd_space_open(kvd, "model", NULL, &other);
        cr_assert_lt(r, 0, "tweak %u", pick);
        if (pick != 9 && pick != 10)
            cr_assert_eq(r, -EPROTO, "tweak %u: %d %s", pick, r, kvd_last_error(kvd));
        cr_assert_eq(other, NULL);
        pthread_mutex_lock(&f->lock);
        *h = good;
        f->tweak = NULL;
        pthread_mutex_unlock(&f->lock);
    }
    cr_assert_eq(open_fds(), before, "no descriptor has leaked");
    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &other), 0, "%s", kvd_last_error(kvd));
}

static unsigned mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned n = 0;

    while (fgets(line, sizeof(line), file))
        n += strstr(line, "memfd:fake") != NULL;
    fclose(file);
    return n;
}

Test(fetch_stores, the_index_is_unmapped_with_its_pool)
{
    unsigned before = mappings();
    struct kvd_space *other;

    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &other), 0);
    cr_assert_gt(mappings(), before);
    kvd_space_close(other);
    cr_assert_eq(mappings(), before);
}

/* ---- through the socket */

TestSuite(fetch_remote, .init = no_shm, .fini = teardown);

Test(fetch_remote, rings_are_not_for_those_without_memory)
{
    struct kvd_key key = {0};
    struct kvd_fetch want = {.keys = &key, .n = 1};
    int32_t status;

    cr_assert_eq(kvd_fetch(pool, &want, &status), -EOPNOTSUPP);
    cr_assert_eq(kvd_submit_fetch(pool, &want, 0), -EOPNOTSUPP);
    cr_assert_eq(kvd_fetch_cancel(pool, 0, 1), -EOPNOTSUPP);
}

Test(fetch_remote, many_keys_go_in_pieces)
{
    static struct kvd_key keys[2500];
    static int32_t statuses[2500];
    struct kvd_fetch want = {.keys = keys, .n = 2500};

    chain(keys, 0, 2500);
    spill(0, 3);
    spill(2400, 2);
    cr_assert_eq(kvd_remote_fetch(pool, &want, statuses), 5, "%s", kvd_last_error(kvd));
    check_statuses(statuses, 0, 3, 0);
    check_statuses(statuses, 3, 2400, -ENOENT);
    check_statuses(statuses, 2400, 2402, 0);
    check_statuses(statuses, 2402, 2500, -ENOENT);
    cr_assert_eq(seen(&f->fetch_messages), 3);
    want.chain = 1;
    cr_assert_eq(kvd_remote_fetch(pool, &want, statuses), 3);
    check_statuses(statuses, 3, 2500, -ENOENT);
    cr_assert_eq(seen(&f->fetch_messages), 4, "the rest is not asked for");
    want.n = 0;
    cr_assert_eq(kvd_remote_fetch(pool, &want, NULL), 0);
    want.n = 1;
    cr_assert_eq(kvd_remote_fetch(pool, &want, NULL), -EINVAL);
    cr_assert_eq(kvd_remote_fetch(pool, NULL, statuses), -EINVAL);
    want.chain = 2;
    cr_assert_eq(kvd_remote_fetch(pool, &want, statuses), -EINVAL);
}

Test(fetch_remote, a_get_brings_back_what_is_stored)
{
    struct kvd_key keys[2];
    char buf[PAGE];

    chain(keys, 0, 2);
    spill(0, 1);
    cr_assert_eq(kvd_remote_get(pool, &keys[0], 0, buf, 100, NULL), PAGE, "%s",
                 kvd_last_error(kvd));
    cr_assert_eq(seen(&f->fetches), 1);
    cr_assert_eq(kvd_remote_get(pool, &keys[0], 0, buf, 100, NULL), PAGE);
    cr_assert_eq(seen(&f->fetches), 1, "it is in ram");
    cr_assert_eq(kvd_remote_get(pool, &keys[1], 0, buf, 100, NULL), -ENOENT);
    cr_assert_eq(seen(&f->fetches), 2, "asked for once");
    cr_assert_eq(kvd_remote_get(snapshots, &keys[1], 0, buf, 100, NULL), -ENOENT);
    cr_assert_eq(seen(&f->fetches), 2, "that pool has no stores");
}

/* It is in pieces, so pinned first: that is the miss that is made good. */
Test(fetch_remote, a_get_of_several_pieces)
{
    struct kvd_key key;
    static char buf[2 * PAGE];

    pthread_mutex_lock(&f->lock);
    f->max_inline = 1000;
    pthread_mutex_unlock(&f->lock);
    fake_hang_up(f);
    cr_assert_eq(kvd_ping(kvd), 0);
    chain(&key, 0, 1);
    spill(0, 1);
    cr_assert_eq(kvd_remote_get(pool, &key, 0, buf, sizeof(buf), NULL), PAGE, "%s",
                 kvd_last_error(kvd));
    cr_assert_eq(seen(&f->fetches), 1);
}

static void tweak_fetch(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    (void)fds;
    (void)n_fds;
    if (r->body_case != KVD__PROTO__RESPONSE__BODY_FETCH)
        return;
    if (d->tweak_pick == 0)
        r->fetch->n_statuses--;
    else if (d->tweak_pick == 1)
        r->fetch->statuses[0] = 1;
    else
        r->fetch->statuses[0] = -EDQUOT;
}

Test(fetch_remote, nonsense_and_refusals)
{
    struct kvd_key keys[2];
    struct kvd_fetch want = {.keys = keys, .n = 2};
    int32_t statuses[2];
    char buf[8];

    chain(keys, 0, 2);
    pthread_mutex_lock(&f->lock);
    f->tweak = tweak_fetch;
    pthread_mutex_unlock(&f->lock);
    for (unsigned pick = 0; pick < 2; pick++) {
        f->tweak_pick = pick;
        cr_assert_eq(kvd_remote_fetch(pool, &want, statuses), -EPROTO, "%u", pick);
        check_statuses(statuses, 0, 2, -EPROTO);
        cr_assert_eq(kvd_remote_get(pool, keys, 0, buf, 8, NULL), -EPROTO, "%u", pick);
    }
    f->tweak_pick = 2;
    cr_assert_eq(kvd_remote_get(pool, keys, 0, buf, 8, NULL), -EDQUOT);
    fake_leave(f);
    cr_assert_eq(kvd_remote_fetch(pool, &want, statuses), -ENOTCONN);
    check_statuses(statuses, 0, 2, -ENOTCONN);
}
