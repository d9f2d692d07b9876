/* SPDX-License-Identifier: Apache-2.0 */
/* Publishing through the rings, its wake-ups and its accidents; and one handle used by several
 * threads. */
#define _GNU_SOURCE
#include <criterion/criterion.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "client/kvd.h"
#include "fake_daemon.h"

#define PAGE 4096u
#define RING 16u

static struct fake *f;
static struct kvd *kvd;
static struct kvd_space *space;
static struct kvd_pool *pool;

static void start(uint32_t timeout_ms, uint32_t spin_us)
{
    struct kvd_options o;
    struct kvd_space_options s;
    int r;

    alarm(60);
    f = fake_start();
    kvd_options_init(&o, sizeof(o));
    o.socket = f->path;
    o.ring_entries = RING;
    o.timeout_ms = timeout_ms;
    o.spin_us = spin_us;
    do
        r = kvd_connect(&o, &kvd);
    while (r == -ETIMEDOUT); /* a loaded machine is no failure */
    cr_assert_eq(r, 0, "%s", kvd_last_error(NULL));
    kvd_space_options_init(&s, sizeof(s));
    s.write = 1;
    do
        r = kvd_space_open(kvd, "model", &s, &space);
    while (r == -ETIMEDOUT);
    cr_assert_eq(r, 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, "kv", &pool), 0);
}

static void setup(void)
{
    start(20000, 0); /* without spinning, so that each answer needs its wake-up */
}

/* A daemon that answers only when told to, and a library that does not wait for long. */
static void impatient(void)
{
    start(20, 0);
    pthread_mutex_lock(&f->lock);
    f->by_hand = true;
    pthread_mutex_unlock(&f->lock);
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

static unsigned seen(const unsigned *counter)
{
    unsigned n;

    pthread_mutex_lock(&f->lock);
    n = *counter;
    pthread_mutex_unlock(&f->lock);
    return n;
}

static void until(const unsigned *counter, unsigned n)
{
    while (seen(counter) < n)
        sched_yield();
}

/* Any call to the daemon takes such slots along. */
static void given_back(unsigned n)
{
    while (seen(&f->aborted) < n)
        kvd_ping(kvd);
}

static void set(bool *field, bool value)
{
    pthread_mutex_lock(&f->lock);
    *field = value;
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

static void publish(unsigned first, unsigned n)
{
    struct kvd_key keys[64];
    struct kvd_reservation got[64];
    struct kvd_commit parts[128];
    struct kvd_reserve want = {.keys = keys, .n = n, .chain = 1, .tenant = 3};

    chain(keys, first, n);
    cr_assert_eq(kvd_reserve(pool, &want, got), (ssize_t)n, "%s", kvd_last_error(kvd));
    for (unsigned i = 0; i < 2 * n; i++) {
        memset(kvd_slot_rw(pool, got[i / 2].slot, i & 1), (int)(first + i), PAGE);
        parts[i] = (struct kvd_commit){
            .ticket = got[i / 2].ticket, .part = i & 1, .bytes = 100 + i / 2, .position = i / 2};
    }
    cr_assert_eq(kvd_commit(pool, parts, 2 * n), (ssize_t)(2 * n), "%s", kvd_last_error(kvd));
}

/* ---- publishing */

TestSuite(rings, .init = setup, .fini = teardown);

Test(rings, reserve_write_commit_read)
{
    struct kvd_key keys[3];
    struct kvd_reservation got[3];
    struct kvd_reserve want = {.keys = keys, .n = 2, .chain = 1, .tenant = 9};
    struct kvd_commit parts[2] = {0};
    struct kvd_pinset *pins;
    struct kvd_meta meta;
    uint8_t state = 0;

    chain(keys, 0, 3);
    want.parent = &keys[2];
    cr_assert_eq(kvd_reserve(pool, &want, got), 2, "%s", kvd_last_error(kvd));
    for (unsigned i = 0; i < 2; i++) {
        cr_assert_eq(got[i].status, KVD_NEW);
        cr_assert_eq(got[i].slot, i);
        cr_assert_neq(got[i].ticket, 0);
    }
    cr_assert_eq(kvd_reserve(pool, &want, got + 1), 0);
    cr_assert_eq(got[1].status, KVD_IN_PROGRESS);
    cr_assert_eq(kvd_lookup(pool, keys, 1, &state), 0);
    cr_assert_eq(state, KVD_PENDING);

    memset(kvd_slot_rw(pool, 0, 0), 'a', PAGE);
    memset(kvd_slot_rw(pool, 0, 1), 'b', PAGE);
    for (unsigned i = 0; i < 2; i++)
        parts[i] = (struct kvd_commit){.ticket = got[0].ticket,
                                       .part = i,
                                       .bytes = 4000,
                                       .position = 12,
                                       .layout = 13,
                                       .checksum = 14,
                                       .user = "user",
                                       .user_bytes = 4};
    cr_assert_eq(kvd_commit(pool, parts, 1), 1);
    cr_assert_eq(kvd_lookup(pool, keys, 1, NULL), 0, "not before its last part");
    cr_assert_eq(kvd_commit(pool, parts + 1, 1), 1);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 1);
    cr_assert_eq(kvd_reserve(pool, &want, got), 0);
    cr_assert_eq(got[0].status, KVD_PRESENT);

    cr_assert_eq(kvd_pinset_new(kvd, 0, &pins), 0);
    cr_assert_eq(kvd_pin(pins, pool, keys, 2, 0), 1);
    cr_assert_eq(kvd_pinset_refs(pins)[0].bytes, 4000);
    cr_assert_eq(*(const char *)kvd_pinset_data(pins, 0, 0), 'a');
    cr_assert_eq(*(const char *)kvd_pinset_data(pins, 0, 1), 'b');
    cr_assert_eq(kvd_pinset_meta(pins, 0, &meta), 0);
    cr_assert_eq(meta.position, 12);
    cr_assert_eq(meta.layout, 13);
    cr_assert_eq(meta.checksum, 14);
    cr_assert_eq(meta.tenant, 9);
    cr_assert_eq(meta.has_parent, 1);
    cr_assert_arr_eq(meta.parent.hash, keys[2].hash, 32);
    cr_assert_arr_eq(meta.user, "user", 4);
    kvd_pinset_free(pins);
}

Test(rings, a_reserved_slot_can_be_held)
{
    struct kvd_key keys[2];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    struct kvd_commit parts[2];
    struct kvd_pinset *pins;
    struct kvd_meta meta;

    chain(keys, 0, 2);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &pins), 0);
    cr_assert_eq(kvd_reserve(pool, &want, got), 2);
    cr_assert_eq(kvd_pin_reserved(pins, pool, &got[1]), 0);
    cr_assert_eq(fake_pins(f, 0), 1);
    cr_assert_eq(kvd_pinset_refs(pins)[0].slot, got[1].slot);
    cr_assert_eq(kvd_pinset_refs(pins)[0].bytes, PAGE);
    for (unsigned i = 0; i < 2; i++)
        parts[i] = (struct kvd_commit){.ticket = got[1].ticket, .part = i, .bytes = 9};
    *(char *)kvd_slot_rw(pool, got[1].slot, 1) = 'x';
    cr_assert_eq(kvd_commit(pool, parts, 2), 2);
    cr_assert_eq(*(const char *)kvd_pinset_data(pins, 0, 1), 'x');
    cr_assert_eq(kvd_pinset_meta(pins, 0, &meta), 0);
    got[0].slot = 56;
    cr_assert_eq(kvd_pin_reserved(pins, pool, &got[0]), -EINVAL);
    cr_assert_eq(kvd_reserve(pool, &want, got), 0);
    cr_assert_eq(kvd_pin_reserved(pins, pool, &got[0]), -EINVAL);
    cr_assert_eq(kvd_pinset_count(pins), 1);
    kvd_pinset_free(pins);
    cr_assert_eq(fake_pins(f, 0), 0);
}

Test(rings, a_batch_longer_than_the_ring)
{
    struct kvd_key keys[70];
    struct kvd_reservation got[70];
    struct kvd_reserve want = {.keys = keys, .n = 70};

    publish(0, 50); /* 100 commits */
    chain(keys, 0, 70);
    cr_assert_eq(kvd_lookup(pool, keys, 70, NULL), 50);
    cr_assert_eq(kvd_reserve(pool, &want, got), 6);
    for (unsigned i = 0; i < 70; i++)
        cr_assert_eq(got[i].status,
                     i < 50   ? (int)KVD_PRESENT
                     : i < 56 ? (int)KVD_NEW
                              : -ENOSPC,
                     "%u", i);
}

Test(rings, what_is_wrong_with_a_commit)
{
    struct kvd_key key;
    struct kvd_reservation got;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_commit parts[3];

    chain(&key, 0, 1);
    cr_assert_eq(kvd_reserve(pool, &want, &got), 1);
    parts[0] = (struct kvd_commit){.ticket = got.ticket, .bytes = 0};
    parts[1] = (struct kvd_commit){.ticket = got.ticket + 1, .bytes = 1};
    parts[2] = (struct kvd_commit){.ticket = got.ticket, .bytes = 1};
    cr_assert_eq(kvd_commit(pool, parts, 3), 1);
    cr_assert_eq(parts[0].status, -EINVAL);
    cr_assert_eq(parts[1].status, -ESTALE);
    cr_assert_eq(parts[2].status, 0);
    parts[0].part = 2;
    cr_assert_eq(kvd_commit(pool, parts, 1), -EINVAL);
    parts[0].part = 65536;
    cr_assert_eq(kvd_commit(pool, parts, 1), -EINVAL);
    parts[0].part = 0;
    parts[0].user_bytes = 129;
    parts[0].user = &key;
    cr_assert_eq(kvd_commit(pool, parts, 1), -EINVAL);
    parts[0].user_bytes = 1;
    parts[0].user = NULL;
    cr_assert_eq(kvd_commit(pool, parts, 1), -EINVAL);
}

Test(rings, abort_gives_back)
{
    struct kvd_key keys[2];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    uint64_t tickets[3];

    chain(keys, 0, 2);
    cr_assert_eq(kvd_reserve(pool, &want, got), 2);
    tickets[0] = got[0].ticket;
    tickets[1] = 12345;
    tickets[2] = got[1].ticket;
    cr_assert_eq(kvd_abort(pool, tickets, 3), 2);
    cr_assert_eq(kvd_abort(pool, tickets, 3), 0);
    cr_assert_eq(kvd_reserve(pool, &want, got), 2);
}

Test(rings, reading_spaces_do_not_publish)
{
    struct kvd_space *reading;
    struct kvd_pool *theirs;
    struct kvd_key key = {0};
    struct kvd_reservation got;
    struct kvd_reserve want = {.keys = &key, .n = 1};

    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &reading), 0);
    cr_assert_eq(kvd_pool_get(reading, NULL, &theirs), 0);
    cr_assert_eq(kvd_reserve(theirs, &want, &got), -EACCES);
    cr_assert_eq(kvd_submit_reserve(theirs, &want, 0), -EACCES);
}

/* A batch that is answered while the library still looks needs no event; one wake-up serves all of
 * it. */
Test(rings, one_wake_up_for_a_batch)
{
    struct kvd_key keys[10];
    struct kvd_reserve want = {.keys = keys, .n = 10};
    struct kvd_completion done[10];
    ssize_t n = 0;

    chain(keys, 0, 10);
    while (!atomic_load(&f->shm->sleeping))
        sched_yield();
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), 10);
    while (n < 10) {
        n += kvd_completions(kvd, done + n, 10 - (size_t)n);
        sched_yield();
    }
    until(&f->wakes, 1);
    cr_assert_eq(seen(&f->wakes), 1);
    cr_assert_eq(seen(&f->events), 0);
}

/* ---- completions */

Test(rings, submitted_and_collected)
{
    struct kvd_key keys[40];
    struct kvd_reserve want = {.keys = keys, .n = 40};
    struct kvd_completion done[40];
    unsigned n = 0;

    chain(keys, 0, 40);
    cr_assert_eq(kvd_submit_reserve(pool, &want, UINT64_MAX - 7), RING, "the ring is full");
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), 0, "until something is collected");
    while (n < RING) {
        ssize_t waiting = kvd_drain(kvd), k;

        cr_assert_geq(waiting, 0, "%s", kvd_last_error(kvd));
        if (waiting == 0) {
            struct pollfd p = {.fd = kvd_event_fd(kvd), .events = POLLIN};

            cr_assert_eq(poll(&p, 1, -1), 1); /* the alarm ends a lost wake-up */
            continue;
        }
        k = kvd_completions(kvd, done + n, 3);
        cr_assert_eq(k, waiting < 3 ? waiting : 3);
        n += (unsigned)k;
    }
    for (unsigned i = 0; i < RING; i++) {
        cr_assert_eq(done[i].user_data, UINT64_MAX - 7 + i, "all 64 bits are the caller's");
        cr_assert_eq(done[i].status, KVD_NEW);
        cr_assert_eq(done[i].slot, i);
        cr_assert_neq(done[i].ticket, 0);
    }
    cr_assert_eq(kvd_completions(kvd, done, 40), 0);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), RING);
}

/* A synchronous call, or a control call, reads the message that was meant for whoever polls: that
 * one is woken all the same. */
Test(rings, a_wake_up_that_somebody_else_reads)
{
    struct kvd_key keys[4];
    struct kvd_reserve want = {.keys = keys, .n = 2}, other = {.keys = keys + 2, .n = 1};
    struct kvd_reservation got;
    struct pollfd p = {.events = POLLIN};
    struct kvd_completion done[4];

    chain(keys, 0, 4);
    set(&f->by_hand, true);
    cr_assert_eq(kvd_drain(kvd), 0);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 7), 2);
    fake_serve(f, 2); /* the event is on its way */
    set(&f->by_hand, false);
    cr_assert_eq(kvd_ping(kvd), 0); /* and this reads it */
    p.fd = kvd_event_fd(kvd);
    cr_assert_eq(poll(&p, 1, -1), 1);
    cr_assert_eq(kvd_drain(kvd), 2);
    cr_assert_eq(kvd_completions(kvd, done, 4), 2);

    while (kvd_drain(kvd) != 0)
        ;
    other.n = 1;
    cr_assert_eq(kvd_submit_reserve(pool, &other, 9), 1);
    other.keys = keys + 3;
    cr_assert_eq(kvd_reserve(pool, &other, &got), 1); /* collects the other's answer, too */
    cr_assert_eq(poll(&p, 1, -1), 1);
    cr_assert_eq(kvd_drain(kvd), 1);
    cr_assert_eq(kvd_completions(kvd, done, 4), 1);
    cr_assert_eq(done[0].user_data, 9);
}

Test(rings, completions_of_commits)
{
    struct kvd_key key;
    struct kvd_reservation got;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_commit parts[3] = {0};
    struct kvd_completion done[3];
    ssize_t n = 0;

    chain(&key, 0, 1);
    cr_assert_eq(kvd_reserve(pool, &want, &got), 1);
    for (unsigned i = 0; i < 3; i++)
        parts[i] = (struct kvd_commit){.ticket = got.ticket, .part = i & 1, .bytes = 10};
    cr_assert_eq(kvd_submit_commit(pool, parts, 3, 100), 3);
    while (n < 3)
        n += kvd_completions(kvd, done + n, 3 - (size_t)n);
    cr_assert_eq(done[0].status, 0);
    cr_assert_eq(done[1].status, 0);
    cr_assert_eq(done[1].user_data, 101);
    cr_assert_eq(done[1].ticket, got.ticket);
    cr_assert_eq(done[2].status, -ESTALE);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
}

/* ---- accidents */

TestSuite(ring_accidents, .init = impatient, .fini = teardown);

Test(ring_accidents, a_grant_after_the_timeout_is_given_back)
{
    struct kvd_key keys[3];
    struct kvd_reservation got[3];
    struct kvd_reserve want = {.keys = keys, .n = 3};

    chain(keys, 0, 3);
    cr_assert_eq(kvd_reserve(pool, &want, got), -ETIMEDOUT);
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(got[i].status, -ETIMEDOUT);
    cr_assert_eq(fake_serve(f, 3), 3);
    given_back(3);
    set(&f->by_hand, false);
    while (kvd_reserve(pool, &want, got) == -ETIMEDOUT)
        ;
    cr_assert_eq(got[0].status, KVD_NEW);
}

/* A daemon that died between answering a request and taking it back answers again after its
 * restart. */
Test(ring_accidents, an_answer_that_comes_twice)
{
    struct kvd_key keys[4];
    struct kvd_reserve want = {.keys = keys, .n = 4};
    struct kvd_completion done[4];
    struct shm_request q;
    struct shm_completion c;

    chain(keys, 0, 4);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), 4);
    for (unsigned i = 0; i < 4; i++) {
        cr_assert(fake_take(f, &q));
        fake_answer(f, &q, &c);
        fake_post(f, &c);
        fake_post(f, &c);
        cr_assert_eq(kvd_completions(kvd, done, 4), 1);
        cr_assert_eq(done[0].user_data, i);
        fake_post(f, &c);
        cr_assert_eq(kvd_completions(kvd, done, 4), 0);
    }
}

static void *serve_two(void *arg)
{
    unsigned n = 0;

    while (n < 2)
        n += fake_serve(f, 2 - n);
    return arg;
}

Test(ring_accidents, what_was_granted_before_the_timeout_is_given_back)
{
    struct kvd_key keys[4];
    struct kvd_reservation got[4];
    struct kvd_reserve want = {.keys = keys, .n = 4};
    pthread_t t;

    chain(keys, 0, 4);
    pthread_create(&t, NULL, serve_two, NULL);
    cr_assert_eq(kvd_reserve(pool, &want, got), -ETIMEDOUT);
    pthread_join(t, NULL);
    given_back(2);
    cr_assert_eq(fake_serve(f, 4), 2);
    given_back(4);
}

Test(ring_accidents, completions_of_others_survive_a_timeout)
{
    struct kvd_key keys[6];
    struct kvd_reservation got[2];
    struct kvd_reserve first = {.keys = keys, .n = 2}, second = {.keys = keys + 2, .n = 2},
                       third = {.keys = keys + 4, .n = 2};
    struct kvd_completion done[8];

    chain(keys, 0, 6);
    cr_assert_eq(kvd_submit_reserve(pool, &first, 10), 2);
    cr_assert_eq(kvd_reserve(pool, &second, got), -ETIMEDOUT);
    cr_assert_eq(kvd_submit_reserve(pool, &third, 20), 2);
    cr_assert_eq(fake_serve(f, 6), 6);
    cr_assert_eq(kvd_completions(kvd, done, 8), 4);
    cr_assert_eq(done[0].user_data, 10);
    cr_assert_eq(done[1].user_data, 11);
    cr_assert_eq(done[2].user_data, 20);
    cr_assert_eq(done[3].user_data, 21);
    cr_assert_eq(kvd_completions(kvd, done, 8), 0);
    given_back(2);
}

Test(ring_accidents, a_full_ring_is_a_timeout)
{
    struct kvd_key keys[RING];
    struct kvd_reservation got[1];
    struct kvd_reserve all = {.keys = keys, .n = RING}, one = {.keys = keys, .n = 1};
    struct kvd_completion done[RING];

    chain(keys, 0, RING);
    cr_assert_eq(kvd_submit_reserve(pool, &all, 0), RING);
    cr_assert_eq(kvd_reserve(pool, &one, got), -ETIMEDOUT);
    cr_assert_eq(fake_serve(f, RING), RING);
    cr_assert_eq(kvd_completions(kvd, done, RING), RING);
}

Test(ring_accidents, daemon_away)
{
    struct kvd_key keys[4];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2}, other = {.keys = keys + 2, .n = 2};
    struct kvd_completion done[4];

    chain(keys, 0, 4);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 5), 2);
    fake_leave(f);
    cr_assert_eq(kvd_completions(kvd, done, 4), 0);
    cr_assert_eq(kvd_reserve(pool, &other, got), -ENOTCONN);
    cr_assert_eq(got[1].status, -ENOTCONN);
    cr_assert_neq(kvd_last_error(kvd), NULL);
    cr_assert_eq(kvd_completions(kvd, done, 4), 2, "at once, although nobody answers");
    cr_assert_eq(done[0].user_data, 5);
    cr_assert_eq(done[0].status, -ENOTCONN);
    cr_assert_eq(done[1].user_data, 6);
    cr_assert_eq(done[1].status, -ENOTCONN);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 5), -ENOTCONN);
    cr_assert_eq(kvd_completions(kvd, done, 4), 0);

    /* It comes back, takes the session up again and grants what was asked: too late for all. */
    fake_return(f);
    cr_assert_eq(fake_serve(f, 4), 4);
    while (kvd_ping(kvd) != 0)
        ;
    cr_assert_eq(seen(&f->resumes), 1);
    cr_assert_eq(kvd_completions(kvd, done, 4), 0);
    given_back(4);
}

Test(ring_accidents, another_daemon)
{
    struct kvd_key keys[6];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2}, other = {.keys = keys + 2, .n = 2};
    struct kvd_completion done[8];

    chain(keys, 0, 6);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 5), 2);
    cr_assert_eq(fake_serve(f, 1), 1);
    cr_assert_eq(kvd_reserve(pool, &other, got), -ETIMEDOUT);
    pthread_mutex_lock(&f->lock);
    f->may_resume = false;
    f->ring_entries = 32;
    pthread_mutex_unlock(&f->lock);
    fake_replace(f);
    while (kvd_ping(kvd) != 0)
        ;
    cr_assert_eq(kvd_completions(kvd, done, 8), 2);
    cr_assert_eq(done[0].user_data, 5);
    cr_assert_eq(done[0].status, KVD_NEW, "this one was answered in time");
    cr_assert_eq(done[1].user_data, 6);
    cr_assert_eq(done[1].status, -ENOTCONN);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 5), -ESTALE);
    while (kvd_space_refresh(space) != 0)
        ;
    set(&f->by_hand, false);
    while (kvd_reserve(pool, &other, got) == -ETIMEDOUT)
        ;
    cr_assert_eq(seen(&f->abort_asked), 0);
}

/* Slots that are to be given back when their daemon goes: their tickets mean nothing, or something
 * else, to the next one. */
Test(ring_accidents, tickets_of_another_daemon)
{
    struct kvd_key keys[2];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    struct kvd_completion none;

    chain(keys, 0, 2);
    cr_assert_eq(kvd_reserve(pool, &want, got), -ETIMEDOUT);
    cr_assert_eq(fake_serve(f, 2), 2);
    cr_assert_eq(kvd_completions(kvd, &none, 1), 0); /* finds out, and may not say so yet */
    set(&f->may_resume, false);
    fake_replace(f);
    for (unsigned pings = 0; pings < 3;)
        pings += kvd_ping(kvd) == 0;
    cr_assert_eq(seen(&f->abort_asked), 0);
}

Test(ring_accidents, a_ring_with_completions_inherits_them)
{
    struct kvd_key keys[RING];
    struct kvd_reserve want = {.keys = keys, .n = RING};
    struct kvd_completion done[RING + 1];

    chain(keys, 0, RING);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 100), RING);
    for (unsigned round = 0; round < 2; round++) { /* a longer ring, then a shorter one */
        pthread_mutex_lock(&f->lock);
        f->may_resume = false;
        f->ring_entries = round ? RING : 64;
        pthread_mutex_unlock(&f->lock);
        fake_replace(f);
        while (kvd_ping(kvd) != 0)
            ;
    }
    cr_assert_eq(kvd_completions(kvd, done, 3), 3);
    cr_assert_eq(kvd_completions(kvd, done + 3, RING), RING - 3);
    for (unsigned i = 0; i < RING; i++)
        cr_assert_eq(done[i].user_data, 100 + i);
    while (kvd_space_refresh(space) != 0)
        ;
    set(&f->by_hand, false);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), RING, "all places are free again");
}

Test(ring_accidents, nonsense_in_the_completion_ring)
{
    struct kvd_key keys[4];
    struct kvd_reserve want = {.keys = keys, .n = 4};
    struct kvd_completion done[8];
    struct shm_request q[4];
    struct shm_completion c;

    chain(keys, 0, 4);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 1), 4);
    for (unsigned i = 0; i < 4; i++)
        cr_assert(fake_take(f, &q[i]));
    c = (struct shm_completion){.user_data = UINT64_MAX, .status = 1};
    fake_post(f, &c); /* no such place */
    c.user_data = q[0].user_data + ((uint64_t)1 << 32);
    fake_post(f, &c); /* a generation that has not been */
    c.user_data = q[0].user_data;
    c.status = 4;
    fake_post(f, &c);
    cr_assert_eq(kvd_completions(kvd, done, 8), 1);
    cr_assert_eq(done[0].status, -EPROTO);
    pthread_mutex_lock(&f->lock);
    atomic_store(&f->session.shm->completions.tail, 5000);
    pthread_mutex_unlock(&f->lock);
    cr_assert_eq(kvd_completions(kvd, done, 8), -EPROTO);
}

static void *grant_outside(void *arg)
{
    struct shm_request q;
    struct shm_completion c;

    while (!fake_take(f, &q))
        sched_yield();
    c = (struct shm_completion){
        .user_data = q.user_data, .status = 1, .slot = 56, .ticket = 1u << 28 | 56};
    fake_post(f, &c);
    return arg;
}

TestSuite(ring_nonsense, .init = setup, .fini = teardown);

Test(ring_nonsense, a_slot_outside_of_the_pool)
{
    struct kvd_key key;
    struct kvd_reservation got;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    pthread_t t;

    chain(&key, 0, 1);
    set(&f->by_hand, true);
    pthread_create(&t, NULL, grant_outside, NULL);
    cr_assert_eq(kvd_reserve(pool, &want, &got), 0);
    cr_assert_eq(got.status, -EPROTO);
    pthread_join(t, NULL);
}

/* The connection dies while a call sleeps on it; the session lives, and the answer comes after all.
 */
static void *break_and_serve(void *arg)
{
    struct shm_session *s = f->session.shm;

    while (!atomic_load(&s->waiting)) /* it sleeps */
        sched_yield();
    fake_hang_up(f);
    until(&f->resumes, 1);
    set(&f->by_hand, false);
    return arg;
}

Test(ring_nonsense, a_connection_that_dies_under_a_waiting_call)
{
    struct kvd_key keys[2];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    pthread_t t;

    chain(keys, 0, 2);
    set(&f->by_hand, true);
    pthread_create(&t, NULL, break_and_serve, NULL);
    cr_assert_eq(kvd_reserve(pool, &want, got), 2, "%s", kvd_last_error(kvd));
    pthread_join(t, NULL);
    cr_assert_eq(seen(&f->resumes), 1);
}

static void *grant_one_and_leave(void *arg)
{
    struct shm_session *s = f->session.shm;

    while (!atomic_load(&s->waiting))
        sched_yield();
    cr_assert_eq(fake_serve(f, 1), 1);
    while (!atomic_load(&s->waiting)) /* has taken it, and sleeps again */
        sched_yield();
    set(&f->may_resume, false);
    fake_replace(f);
    return arg;
}

Test(ring_nonsense, a_daemon_that_goes_half_way)
{
    struct kvd_key keys[2];
    struct kvd_reservation got[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    pthread_t t;

    chain(keys, 0, 2);
    set(&f->by_hand, true);
    pthread_create(&t, NULL, grant_one_and_leave, NULL);
    cr_assert_eq(kvd_reserve(pool, &want, got), -ENOTCONN);
    cr_assert_eq(got[0].status, -ENOTCONN, "also the one that had been granted");
    cr_assert_eq(kvd_space_current(space), -ESTALE);
    pthread_join(t, NULL);
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(seen(&f->abort_asked), 0);
}

static void *ping(void *arg)
{
    return (void *)(intptr_t)kvd_ping(arg);
}

/* Draining while another thread waits for the daemon neither blocks nor loses the wake-up. */
Test(ring_nonsense, draining_beside_a_call)
{
    struct kvd_key keys[2];
    struct kvd_reserve want = {.keys = keys, .n = 2};
    struct pollfd p = {.fd = kvd_event_fd(kvd), .events = POLLIN};
    pthread_t t;
    int bytes = 0;
    void *r;

    chain(keys, 0, 2);
    pthread_mutex_lock(&f->lock); /* the daemon stands still */
    pthread_create(&t, NULL, ping, kvd);
    while (bytes == 0) /* until the ping is under way */
        cr_assert_eq(ioctl(f->conn, FIONREAD, &bytes), 0);
    cr_assert_eq(kvd_drain(kvd), 0);
    cr_assert_eq(kvd_submit_reserve(pool, &want, 0), 2);
    pthread_mutex_unlock(&f->lock);
    pthread_join(t, &r);
    cr_assert_eq(r, NULL);
    cr_assert_eq(poll(&p, 1, -1), 1);
    while (kvd_drain(kvd) < 2)
        sched_yield();
}

/* ---- threads */

TestSuite(client_threads, .init = setup, .fini = teardown);

#define ROUNDS 300u

static void *look(void *arg)
{
    struct kvd_key keys[32];
    uint8_t states[32];
    struct kvd_pinset *pins;
    uintptr_t bad = 0;

    chain(keys, 0, 32);
    bad += kvd_pinset_new(kvd, 0, &pins) != 0;
    for (unsigned i = 0; i < ROUNDS; i++) {
        ssize_t n = kvd_lookup(pool, keys, 32, states);

        bad += n < 8;
        bad += kvd_pin(pins, pool, keys, 32, 0) < 8;
        bad += *(const uint8_t *)kvd_pinset_data(pins, 3, 0) != 3 * 2;
        kvd_pinset_truncate(pins, 4);
        kvd_pinset_release(pins);
    }
    kvd_pinset_free(pins);
    (void)arg;
    return (void *)bad;
}

static void *write_all(void *arg)
{
    unsigned first = (unsigned)(uintptr_t)arg;

    for (unsigned i = 0; i < 10; i++)
        publish(first + 100 * i, 1);
    return NULL;
}

static void *control(void *arg)
{
    struct kvd_space *other;
    uintptr_t bad = 0;

    for (unsigned i = 0; i < 20; i++) {
        bad += kvd_ping(kvd) != 0;
        bad += kvd_space_open(kvd, "model", NULL, &other) != 0;
        kvd_space_close(other);
        bad += strlen(kvd_last_error(kvd)) == 0;
    }
    (void)arg;
    return (void *)bad;
}

/* Two that read, two that publish, one that talks to the daemon, all through one handle. */
Test(client_threads, one_handle)
{
    pthread_t t[5];
    void *bad;
    uint32_t left;

    publish(0, 8);
    pthread_create(&t[0], NULL, look, NULL);
    pthread_create(&t[1], NULL, look, NULL);
    pthread_create(&t[2], NULL, write_all, (void *)1000);
    pthread_create(&t[3], NULL, write_all, (void *)5000);
    pthread_create(&t[4], NULL, control, NULL);
    for (unsigned i = 0; i < 5; i++) {
        pthread_join(t[i], &bad);
        cr_assert_eq(bad, NULL, "thread %u", i);
    }
    left = fake_pins(f, 0);
    cr_assert_eq(left, 0);
}

static void *submit_and_collect(void *arg)
{
    struct kvd_key keys[4];
    struct kvd_reserve want = {.keys = keys, .n = 4};
    struct kvd_completion done[8];
    unsigned n = 0;

    for (unsigned i = 0; i < 40; i++) {
        chain(keys, 40, 4); /* the same again and again: pending is an answer, too */
        cr_assert_eq(kvd_submit_reserve(pool, &want, 4 * i), 4);
        while (n < 4 * (i + 1)) {
            ssize_t waiting = kvd_drain(kvd);

            if (waiting == 0) {
                struct pollfd p = {.fd = kvd_event_fd(kvd), .events = POLLIN};

                poll(&p, 1, -1);
                continue;
            }
            waiting = kvd_completions(kvd, done, 8);
            for (ssize_t k = 0; k < waiting; k++)
                cr_assert_eq(done[k].user_data, n++);
        }
    }
    return arg;
}

/* Whoever polls is woken, however many others read the socket. */
Test(client_threads, polling_beside_waiting)
{
    pthread_t t[4];
    void *bad;

    publish(0, 8);
    pthread_create(&t[0], NULL, submit_and_collect, NULL);
    pthread_create(&t[1], NULL, write_all, (void *)1000);
    pthread_create(&t[2], NULL, control, NULL);
    pthread_create(&t[3], NULL, write_all, (void *)5000);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(t[i], &bad);
}
