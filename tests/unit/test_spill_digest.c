/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests by helper threads, and the helpers themselves: who is woken, and how often. Linked with
 * --wrap for pthread_cond_signal and eventfd_write, to count them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <criterion/criterion.h>
#include <xxhash.h>

#include "daemon/guard.h"
#include "daemon/spill/digest.h"
#include "daemon/spill/helpers.h"

/* ---- counting wake-ups */

static atomic_uint signals, events;
static _Thread_local unsigned own_signals;

int __real_pthread_cond_signal(pthread_cond_t *cond);
int __wrap_pthread_cond_signal(pthread_cond_t *cond);
int __real_eventfd_write(int fd, eventfd_t value);
int __wrap_eventfd_write(int fd, eventfd_t value);

int __wrap_pthread_cond_signal(pthread_cond_t *cond)
{
    atomic_fetch_add(&signals, 1);
    own_signals++;
    return __real_pthread_cond_signal(cond);
}

int __wrap_eventfd_write(int fd, eventfd_t value)
{
    atomic_fetch_add(&events, 1);
    return __real_eventfd_write(fd, value);
}

static void await(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    int r;

    do
        r = poll(&p, 1, 60000);
    while (r < 0 && errno == EINTR);
    cr_assert_eq(r, 1, "no result shows");
}

static bool readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, 0) == 1;
}

/* ---- digests */

TestSuite(digest, .timeout = 120);

static struct digest_pool *new_pool(uint32_t threads, uint32_t depth)
{
    struct digest_pool *pool;

    cr_assert_eq(guard_install(), 0);
    cr_assert_eq(digest_pool_new(threads, depth, &pool), 0);
    return pool;
}

static void *filled(size_t bytes)
{
    unsigned char *p = malloc(bytes);

    cr_assert_not_null(p);
    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(i * 2654435761u >> 13);
    return p;
}

Test(digest, is_that_of_the_bytes_whatever_their_number)
{
    static const size_t sizes[] = {0, 1, 16, 17, 240, 241, 4096, 4097, 1 << 20, (1 << 20) + 13};
    const uint32_t n_sizes = sizeof(sizes) / sizeof(sizes[0]), total = 2000;
    char *bytes = filled((1 << 20) + 4096);

    for (uint32_t threads = 1; threads <= 4; threads += 3) {
        struct digest_pool *pool = new_pool(threads, 16);
        uint8_t *seen = calloc(total, 1);
        uint32_t next = 0, done = 0;

        while (done < total) {
            struct digest_job jobs[5];
            struct digest_done results[3];
            uint32_t n = 0;

            for (; n < 5 && next + n < total; n++) {
                uint32_t i = next + n;

                jobs[n] = (struct digest_job){i, bytes + i % 64, sizes[i % n_sizes]};
            }
            next += digest_submit(pool, jobs, n);
            await(digest_pool_fd(pool));
            n = digest_reap(pool, results, 3);
            for (uint32_t k = 0; k < n; k++) {
                uint32_t i = (uint32_t)results[k].cookie;

                cr_assert_lt(i, total);
                cr_assert_eq(seen[i]++, 0);
                cr_assert_eq(results[k].status, 0);
                cr_assert_eq(results[k].digest, XXH3_64bits(bytes + i % 64, sizes[i % n_sizes]));
            }
            done += n;
        }
        digest_pool_free(pool);
        free(seen);
    }
    free(bytes);
}

Test(digest, no_more_than_depth_are_taken)
{
    struct digest_pool *pool = new_pool(2, 3);
    struct digest_job jobs[5] = {{0, "a", 1}, {1, "b", 1}, {2, "c", 1}, {3, "d", 1}, {4, "e", 1}};
    struct digest_done done[5];
    uint32_t n = 0;

    cr_assert_not(readable(digest_pool_fd(pool)));
    cr_assert_eq(digest_submit(pool, jobs, 5), 3u);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(digest_submit(pool, jobs + 3, 2), 0u, "full until they are reaped");
        sched_yield();
    }
    await(digest_pool_fd(pool));
    cr_assert_eq(digest_reap(pool, done, 1), 1u);
    cr_assert_eq(digest_submit(pool, jobs + 3, 2), 1u);
    while (n < 3) {
        await(digest_pool_fd(pool));
        n += digest_reap(pool, done, 5);
    }
    cr_assert_eq(n, 3u);
    digest_pool_free(pool);
    digest_pool_free(NULL);
}

Test(digest, are_announced_only_while_somebody_waits_for_them)
{
    struct digest_pool *pool = new_pool(2, 4);
    const struct digest_job job = {7, "abc", 3};
    struct digest_done done;

    for (int round = 0; round < 300; round++) {
        digest_announce(pool, false);
        cr_assert_eq(digest_submit(pool, &job, 1), 1u);
        for (int i = 0; i < round % 100; i++) {
            sched_yield();
            cr_assert_not(readable(digest_pool_fd(pool)));
        }
        digest_announce(pool, true); /* it has come meanwhile, or is to come */
        await(digest_pool_fd(pool));
        cr_assert_eq(digest_reap(pool, &done, 1), 1u);
        cr_assert_eq(done.cookie, 7u);
    }
    digest_announce(pool, false); /* whoever looks finds them all the same */
    cr_assert_eq(digest_submit(pool, &job, 1), 1u);
    while (digest_reap(pool, &done, 1) == 0)
        sched_yield();
    digest_pool_free(pool);
}

Test(digest, are_announced_some_at_a_time_while_more_are_to_come)
{
    struct digest_pool *pool = new_pool(1, 64);
    char *bytes = filled(1 << 20); /* long enough for us to be there before the next one is done */
    struct digest_job jobs[64];
    struct digest_done done[64];
    unsigned before = atomic_load(&events);
    uint32_t n = 0;

    for (uint32_t i = 0; i < 64; i++)
        jobs[i] = (struct digest_job){i, bytes, 1 << 20};
    cr_assert_eq(digest_submit(pool, jobs, 64), 64u);
    while (n < 64) {
        await(digest_pool_fd(pool));
        n += digest_reap(pool, done, 64);
    }
    cr_assert_leq(atomic_load(&events) - before, 64u / 8 + 1);
    digest_pool_free(pool);
    free(bytes);
}

/* ThreadSanitizer runs signal handlers with all signals blocked, and the guard's jump out of one leaves
 * it so: the second fault is deadly there. */
#ifndef PLAIN_CRITERION_H
/* A writer truncates the pool's file. */
Test(digest, memory_that_vanished_is_an_error_and_the_thread_goes_on)
{
    const size_t bytes = 1 << 20;
    int fd = memfd_create("kvd-test", MFD_CLOEXEC);
    struct digest_pool *pool = new_pool(1, 4);
    struct digest_job jobs[4];
    struct digest_done done[4];
    char *p;

    cr_assert_geq(fd, 0);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(p, MAP_FAILED);
    memset(p, 7, bytes);
    cr_assert_eq(ftruncate(fd, (off_t)bytes / 2), 0);
    jobs[0] = (struct digest_job){0, p + bytes / 2, bytes / 2};
    jobs[1] = (struct digest_job){1, p, bytes / 2};
    jobs[2] = (struct digest_job){2, p, bytes};
    jobs[3] = (struct digest_job){3, p + 4096, 4096};
    for (int round = 0; round < 20; round++) {
        uint32_t n = 0;

        cr_assert_eq(digest_submit(pool, jobs, 4), 4u);
        while (n < 4) {
            await(digest_pool_fd(pool));
            n += digest_reap(pool, done + n, 4 - n);
        }
        for (uint32_t i = 0; i < 4; i++) {
            const struct digest_job *job = &jobs[done[i].cookie];

            if (done[i].cookie % 2 == 0) {
                cr_assert_eq(done[i].status, -EFAULT);
                continue;
            }
            cr_assert_eq(done[i].status, 0);
            cr_assert_eq(done[i].digest, XXH3_64bits(job->addr, job->bytes));
        }
    }
    digest_pool_free(pool);
    munmap(p, bytes);
    close(fd);
}

#endif

/* Nothing is read after digest_pool_free(): the sanitizers and this mapping would tell. */
Test(digest, the_end_waits_for_what_runs_and_drops_the_rest)
{
    const size_t bytes = 8 << 20;

    for (int round = 0; round < 10; round++) {
        struct digest_pool *pool = new_pool(2, 1000);
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        cr_assert_neq(p, MAP_FAILED);
        memset(p, 1, bytes);
        for (uint64_t i = 0; i < 1000; i++)
            cr_assert_eq(digest_submit(pool, &(struct digest_job){i, p, bytes}, 1), 1u);
        if (round & 1)
            await(digest_pool_fd(pool));
        digest_pool_free(pool);
        munmap(p, bytes);
    }
}

static atomic_uint handled;

static void on_signal(int sig)
{
    (void)sig;
    atomic_fetch_add(&handled, 1);
}

Test(digest, helpers_take_no_signals)
{
    struct sigaction sa = {.sa_handler = on_signal};
    struct digest_pool *pool = new_pool(4, 8);
    struct digest_done done;
    sigset_t usr1, pending;

    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    cr_assert_eq(sigaction(SIGUSR1, &sa, NULL), 0);
    cr_assert_eq(pthread_sigmask(SIG_BLOCK, &usr1, NULL), 0);
    cr_assert_eq(kill(getpid(), SIGUSR1), 0);
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(digest_submit(pool, &(struct digest_job){0, "x", 1}, 1), 1u);
        await(digest_pool_fd(pool));
        digest_reap(pool, &done, 1);
    }
    cr_assert_eq(atomic_load(&handled), 0u);
    cr_assert_eq(sigpending(&pending), 0);
    cr_assert(sigismember(&pending, SIGUSR1));
    digest_pool_free(pool);
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    cr_assert_eq(atomic_load(&handled), 1u);
}

Test(digest, nonsense_is_refused)
{
    struct digest_pool *pool = NULL;

    cr_assert_eq(guard_install(), 0);
    cr_assert_eq(digest_pool_new(0, 4, &pool), -EINVAL);
    cr_assert_eq(digest_pool_new(4, 0, &pool), -EINVAL);
    cr_assert_null(pool);
}

/* ---- helpers */

TestSuite(helpers, .timeout = 120);

static struct {
    atomic_uint running, wanted; /* each waits until so many run at once */
    atomic_bool open;
} gate;

static void pass_gate(void *arg, const void *job, void *ret_result)
{
    (void)arg;
    atomic_fetch_add(&gate.running, 1);
    while (!atomic_load(&gate.open) || atomic_load(&gate.running) < gate.wanted)
        sched_yield();
    memcpy(ret_result, job, 4);
}

static struct helpers *gated(uint32_t threads, uint32_t wanted, bool open)
{
    const struct helpers_spec spec = {
        .threads = threads, .depth = 200, .job_bytes = 4, .result_bytes = 4, .run = pass_gate};
    struct helpers *h;

    atomic_store(&gate.running, 0);
    atomic_store(&gate.wanted, wanted);
    atomic_store(&gate.open, open);
    cr_assert_eq(helpers_new(&spec, &h), 0);
    return h;
}

static void reap_all(struct helpers *h, uint32_t n)
{
    uint32_t results[200];

    while (n) {
        await(helpers_fd(h));
        n -= helpers_reap(h, results, n);
    }
}

Test(helpers, a_busy_one_is_not_woken_and_results_are_announced_once)
{
    struct helpers *h = gated(1, 1, false);
    uint32_t results[101];

    atomic_store(&signals, 0);
    atomic_store(&events, 0);
    cr_assert_eq(helpers_submit(h, &(uint32_t){0}, 1), 1u);
    while (!atomic_load(&gate.running))
        sched_yield();
    cr_assert_leq(atomic_load(&signals), 1u);
    atomic_store(&signals, 0);
    for (uint32_t i = 1; i <= 100; i++)
        cr_assert_eq(helpers_submit(h, &i, 1), 1u);
    cr_assert_eq(atomic_load(&signals), 0u);
    cr_assert_eq(atomic_load(&events), 0u);
    atomic_store(&gate.open, true);
    while (atomic_load(&gate.running) < 101)
        sched_yield();
    await(helpers_fd(h));
    cr_assert_eq(atomic_load(&signals), 0u);
    cr_assert_eq(atomic_load(&events), 1u, "nobody reaped in between");
    while (helpers_in_flight(h))
        helpers_reap(h, results, 101);
    helpers_free(h, true);
}

/* If one of them slept on, the others would wait for ever. */
Test(helpers, a_batch_costs_one_wake_up_and_sets_all_to_work)
{
    struct helpers *h = gated(4, 4, true);
    uint32_t jobs[4] = {0, 1, 2, 3};

    for (uint32_t round = 1; round <= 200; round++) {
        atomic_store(&gate.running, 0);
        own_signals = 0;
        cr_assert_eq(helpers_submit(h, jobs, 4), 4u);
        cr_assert_leq(own_signals, 1u);
        reap_all(h, 4);
        cr_assert_eq(atomic_load(&gate.running), 4u);
    }
    for (uint32_t round = 1; round <= 200; round++) { /* one by one, too */
        atomic_store(&gate.running, 0);
        for (int i = 0; i < 4; i++)
            cr_assert_eq(helpers_submit(h, &jobs[i], 1), 1u);
        reap_all(h, 4);
    }
    helpers_free(h, true);
}

/* Reaping races with announcing: no result may wait unannounced. */
Test(helpers, no_result_waits_unannounced)
{
    struct helpers *h = gated(3, 0, true);
    uint32_t results[4], submitted = 0, reaped = 0;

    while (reaped < 100000) {
        uint32_t n = 0;

        if (submitted < 100000)
            n = helpers_submit(h, (uint32_t[2]){0}, submitted & 1 ? 1 : 2);
        submitted += n;
        if (!n || submitted % 7 == 0)
            await(helpers_fd(h));
        reaped += helpers_reap(h, results, submitted % 4 + 1);
        cr_assert_eq(helpers_in_flight(h), submitted - reaped);
    }
    while (helpers_in_flight(h)) {
        await(helpers_fd(h));
        helpers_reap(h, results, 4);
    }
    for (int i = 0; readable(helpers_fd(h)); i++) {
        cr_assert_lt(i, 2);
        cr_assert_eq(helpers_reap(h, results, 1), 0u);
    }
    helpers_free(h, true);
}

static void count_end(void *arg)
{
    atomic_fetch_add((atomic_uint *)arg, 1);
}

Test(helpers, the_last_one_out_ends_it)
{
    static atomic_uint ended;
    struct helpers_spec spec = {.threads = 3,
                                .depth = 8,
                                .job_bytes = 4,
                                .result_bytes = 4,
                                .run = pass_gate,
                                .end = count_end,
                                .arg = &ended};
    struct helpers *h = NULL;

    atomic_store(&gate.wanted, 0);
    for (int left_behind = 0; left_behind < 2; left_behind++) {
        atomic_store(&ended, 0);
        atomic_store(&gate.running, 0);
        atomic_store(&gate.open, !left_behind);
        cr_assert_eq(helpers_new(&spec, &h), 0);
        cr_assert_eq(helpers_submit(h, (uint32_t[8]){0}, 8), 8u);
        while (atomic_load(&gate.running) < 2)
            sched_yield();
        helpers_free(h, !left_behind);
        if (left_behind) {
            cr_assert_eq(atomic_load(&ended), 0u, "two of them run");
            atomic_store(&gate.open, true);
        }
        while (!atomic_load(&ended))
            sched_yield();
        cr_assert_eq(atomic_load(&ended), 1u);
    }
    helpers_free(NULL, true);
    spec.job_bytes = HELPERS_VALUE_BYTES + 1;
    h = NULL;
    cr_assert_eq(helpers_new(&spec, &h), -EINVAL);
    cr_assert_null(h);
}
