/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copier: gather and scatter by several threads, its bound, its event fd, its end, and a forked
 * child. Linked with --wrap for everything that may fail.
 */
#include "client/kvd.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

/* ---- failures on demand */

/* The wrapped call with this number, counting down, fails; negative: none does. */
static int calls_until_failure = -1;

static bool fails_now(void)
{
    if (calls_until_failure < 0)
        return false;
    return calls_until_failure-- == 0;
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__real_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset);
int __real_madvise(void *at, size_t n, int advice);
int __wrap_madvise(void *at, size_t n, int advice);
int __real_eventfd(unsigned count, int flags);
int __wrap_eventfd(unsigned count, int flags);
int __real_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr);
int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr);
int __real_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr);
int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr);

void *__wrap_calloc(size_t n, size_t size)
{
    return fails_now() ? NULL : __real_calloc(n, size);
}

void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    errno = ENOMEM;
    return fails_now() ? MAP_FAILED : __real_mmap(at, n, prot, flags, fd, offset);
}

/* the name of mmap() with _FILE_OFFSET_BITS=64 */
void *__wrap_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    errno = ENOMEM;
    return fails_now() ? MAP_FAILED : __real_mmap64(at, n, prot, flags, fd, offset);
}

int __wrap_madvise(void *at, size_t n, int advice)
{
    errno = EINVAL;
    return fails_now() ? -1 : __real_madvise(at, n, advice);
}

int __wrap_eventfd(unsigned count, int flags)
{
    errno = EMFILE;
    return fails_now() ? -1 : __real_eventfd(count, flags);
}

int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr)
{
    return fails_now() ? EAGAIN : __real_pthread_mutex_init(mutex, attr);
}

int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr)
{
    return fails_now() ? EAGAIN : __real_pthread_cond_init(cond, attr);
}

/* ---- helpers */

enum { THREADS_MAX = 8 };

struct crew {
    struct kvd_copier *copier;
    pthread_t threads[THREADS_MAX];
    size_t count;
};

static void *work(void *copier)
{
    return (void *)(intptr_t)kvd_copier_run(copier);
}

static void crew_start(struct crew *crew, struct kvd_copier *copier, size_t count)
{
    crew->copier = copier;
    crew->count = count;
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(pthread_create(&crew->threads[i], NULL, work, copier), 0);
}

static void crew_join(struct crew *crew)
{
    for (size_t i = 0; i < crew->count; i++) {
        void *result;

        cr_assert_eq(pthread_join(crew->threads[i], &result), 0);
        cr_assert_eq((intptr_t)result, 0);
    }
}

static struct kvd_copier *new_copier(uint32_t depth)
{
    struct kvd_copier *copier = NULL;

    cr_assert_eq(kvd_copier_new(depth, &copier), 0);
    cr_assert_not_null(copier);
    return copier;
}

static bool readable(const struct kvd_copier *copier, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = kvd_copier_event_fd(copier), .events = POLLIN};

    return poll(&poll_fd, 1, timeout_ms) == 1;
}

/* Sleeps on the event fd alone until n results are in: hangs, and fails by Criterion's timeout,
 * when a wake-up is lost. */
static void drain_all(struct kvd_copier *copier, struct kvd_copied *ret, size_t n, size_t at_once)
{
    for (size_t got = 0; got < n;) {
        size_t want = at_once < n - got ? at_once : n - got;
        ssize_t r;

        cr_assert(readable(copier, -1));
        r = kvd_copier_drain(copier, ret + got, want);
        cr_assert_gt(r, 0, "readable without a result");
        got += (size_t)r;
    }
    cr_assert_not(readable(copier, 0), "readable after the last result");
}

/* xorshift64*: the same sequence everywhere */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dull;
}

static void fill(uint8_t *bytes, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(next_random(&seed) >> 56);
}

/* Memory cut into iovecs at random, some of them empty. */
struct scattered {
    uint8_t *bytes;
    struct iovec *iov;
    int32_t iovcnt;
};

static struct scattered scatter(size_t bytes, size_t longest, uint64_t *seed)
{
    struct scattered scattered = {.bytes = malloc(bytes),
                                  .iov = calloc(bytes + 8, sizeof(struct iovec))};
    size_t at = 0;

    while (at < bytes) {
        size_t n = next_random(seed) % (longest + 1);

        if (n > bytes - at)
            n = bytes - at;
        scattered.iov[scattered.iovcnt++] = (struct iovec){n ? scattered.bytes + at : NULL, n};
        at += n;
        if ((size_t)scattered.iovcnt == bytes + 7 && at < bytes) {
            scattered.iov[scattered.iovcnt++] = (struct iovec){scattered.bytes + at, bytes - at};
            break;
        }
    }
    return scattered;
}

static void scattered_free(struct scattered *scattered)
{
    free(scattered->bytes);
    free(scattered->iov);
}

/* ---- copying */

/* Puts and then gets `count` objects of `bytes` bytes with iovecs of up to `longest` bytes. */
static void round_trip(size_t threads, size_t count, size_t bytes, size_t longest, size_t at_once)
{
    struct kvd_copier *copier = new_copier((uint32_t)count);
    struct crew crew;
    uint8_t *slots = aligned_alloc(64, (count * bytes + 63) / 64 * 64);
    struct scattered *from = calloc(count, sizeof(*from)), *to = calloc(count, sizeof(*to));
    struct kvd_copy *copies = calloc(count, sizeof(*copies));
    struct kvd_copied *results = calloc(count, sizeof(*results));
    bool *seen = calloc(count, sizeof(*seen));
    uint64_t seed = bytes + threads;

    memset(slots, 0, count * bytes);
    for (size_t i = 0; i < count; i++) {
        from[i] = scatter(bytes, longest, &seed);
        to[i] = scatter(bytes, longest, &seed);
        fill(from[i].bytes, bytes, i + 1);
        memset(to[i].bytes, 0, bytes);
    }
    crew_start(&crew, copier, threads);
    for (int op = KVD_PUT; op <= KVD_GET; op++) {
        for (size_t i = 0; i < count; i++) {
            const struct scattered *side = op == KVD_PUT ? &from[i] : &to[i];

            copies[i] = (struct kvd_copy){.op = (uint32_t)op,
                                          .iovcnt = side->iovcnt,
                                          .iov = side->iov,
                                          .slot = slots + i * bytes,
                                          .bytes = bytes,
                                          .user_data = 1000 + i};
        }
        cr_assert_eq(kvd_copier_submit(copier, copies, count), (ssize_t)count);
        drain_all(copier, results, count, at_once);
        memset(seen, 0, count * sizeof(*seen));
        for (size_t i = 0; i < count; i++) {
            size_t which = results[i].user_data - 1000;

            cr_assert_lt(which, count);
            cr_assert_not(seen[which]);
            seen[which] = true;
            cr_assert_eq(results[i].status, (int64_t)bytes);
        }
        for (size_t i = 0; i < count; i++)
            cr_assert_arr_eq(slots + i * bytes, from[i].bytes, bytes, "op %d, copy %zu", op, i);
    }
    for (size_t i = 0; i < count; i++)
        cr_assert_arr_eq(to[i].bytes, from[i].bytes, bytes, "copy %zu", i);
    kvd_copier_stop(copier);
    crew_join(&crew);
    kvd_copier_free(copier);
    for (size_t i = 0; i < count; i++) {
        scattered_free(&from[i]);
        scattered_free(&to[i]);
    }
    free(slots);
    free(from);
    free(to);
    free(copies);
    free(results);
    free(seen);
}

Test(copier, small_scattered_copies_by_several_threads, .timeout = 60)
{
    round_trip(4, 200, 777, 50, 1);
}

Test(copier, one_thread_and_one_byte, .timeout = 60)
{
    round_trip(1, 3, 1, 1, 8);
}

/* Long iovecs are streamed, short ones are not. */
Test(copier, large_copies_by_several_threads, .timeout = 60)
{
    round_trip(4, 3, (5 << 20) + 12345, 3 << 20, 2);
    round_trip(3, 2, (3 << 20) + 1, 4000, 2);
    round_trip(2, 2, 2 << 20, 2 << 20, 2);
}

/* A stream through a small queue: submit what fits, drain what is done, with wake-ups at every
 * turn. */
Test(copier, a_small_queue_carries_a_long_stream, .timeout = 60)
{
    enum { DEPTH = 4, TOTAL = 3000, BYTES = 100 };
    static uint8_t src[BYTES], slots[TOTAL][BYTES];
    struct iovec iov = {src, BYTES};
    struct kvd_copier *copier = new_copier(DEPTH);
    struct crew crew;
    size_t submitted = 0, drained = 0;

    fill(src, BYTES, 9);
    crew_start(&crew, copier, 3);
    while (drained < TOTAL) {
        struct kvd_copied results[DEPTH];
        ssize_t r = 1;

        while (submitted < TOTAL && r == 1) {
            struct kvd_copy copy = {KVD_PUT, 1, &iov, slots[submitted], BYTES, submitted};

            r = kvd_copier_submit(copier, &copy, 1);
            cr_assert_eq(r, submitted - drained < DEPTH);
            submitted += (size_t)r;
        }
        cr_assert(readable(copier, -1));
        r = kvd_copier_drain(copier, results, DEPTH);
        cr_assert_gt(r, 0);
        drained += (size_t)r;
    }
    cr_assert_not(readable(copier, 0));
    for (size_t i = 0; i < TOTAL; i++)
        cr_assert_arr_eq(slots[i], src, BYTES);
    kvd_copier_stop(copier);
    crew_join(&crew);
    kvd_copier_free(copier);
}

/* ---- without threads: exact states */

struct simple {
    uint8_t src[64];
    uint8_t slot[64];
    struct iovec iov[2];
    struct kvd_copy copy;
};

static void simple_init(struct simple *simple)
{
    *simple = (struct simple){
        .copy = {
            .op = KVD_PUT, .iovcnt = 2, .iov = simple->iov, .slot = simple->slot, .bytes = 64}};
    simple->iov[0] = (struct iovec){simple->src, 40};
    simple->iov[1] = (struct iovec){simple->src + 40, 24};
    fill(simple->src, sizeof(simple->src), 11);
}

static void submit_numbered(struct kvd_copier *copier, const struct simple *simple, size_t n,
                            ssize_t expected)
{
    struct kvd_copy copies[8];

    for (size_t i = 0; i < n; i++) {
        copies[i] = simple->copy;
        copies[i].user_data = i;
    }
    cr_assert_eq(kvd_copier_submit(copier, copies, n), expected);
}

Test(copier, the_bound_covers_queued_and_undrained)
{
    struct simple simple;
    struct kvd_copier *copier = new_copier(5);
    struct kvd_copied results[8];

    simple_init(&simple);
    submit_numbered(copier, &simple, 3, 3);
    submit_numbered(copier, &simple, 3, 2);
    submit_numbered(copier, &simple, 1, 0);
    cr_assert_not(readable(copier, 0));
    cr_assert_eq(kvd_copier_drain(copier, results, 8), 0);
    kvd_copier_stop(copier); /* turns the queued ones into results, which count as well */
    cr_assert(readable(copier, 0));
    cr_assert_eq(kvd_copier_drain(copier, results, 2), 2);
    cr_assert(readable(copier, 0), "three more wait");
    cr_assert_eq(kvd_copier_drain(copier, results, 0), 0);
    cr_assert(readable(copier, 0));
    cr_assert_eq(kvd_copier_drain(copier, results + 2, 6), 3);
    cr_assert_not(readable(copier, 0));
    cr_assert_eq(kvd_copier_drain(copier, results, 8), 0);
    for (size_t i = 0; i < 5; i++) {
        cr_assert_eq(results[i].status, -ECANCELED);
        cr_assert_eq(results[i].user_data, i % 3, "in the order of submission");
    }
    kvd_copier_free(copier);
}

/* What cannot be taken yet is not judged yet either: a long batch costs no more than what fits. */
Test(copier, a_full_queue_takes_what_fits)
{
    struct simple simple;
    struct kvd_copier *copier = new_copier(2);
    struct kvd_copied results[3];
    struct kvd_copy copies[3];

    simple_init(&simple);
    for (size_t i = 0; i < 3; i++)
        copies[i] = simple.copy;
    copies[2].op = 0;
    cr_assert_eq(kvd_copier_submit(copier, copies, 3), 2);
    cr_assert_eq(kvd_copier_submit(copier, copies + 2, 1), -EINVAL);
    kvd_copier_stop(copier);
    cr_assert_eq(kvd_copier_drain(copier, results, 3), 2);
    kvd_copier_free(copier);
}

Test(copier, stopping_again_changes_nothing)
{
    struct simple simple;
    struct kvd_copier *copier = new_copier(4);
    struct kvd_copied results[4];

    simple_init(&simple);
    submit_numbered(copier, &simple, 2, 2);
    kvd_copier_stop(copier);
    kvd_copier_stop(copier);
    cr_assert_eq(kvd_copier_run(copier), 0, "a thread that comes late returns at once");
    cr_assert_eq(kvd_copier_drain(copier, results, 4), 2);
    cr_assert_not(readable(copier, 0));
    cr_assert_eq(kvd_copier_submit(copier, &simple.copy, 1), -ECANCELED);
    cr_assert_eq(kvd_copier_drain(copier, results, 4), 0);
    kvd_copier_stop(copier);
    kvd_copier_free(copier);
    kvd_copier_free(NULL);
}

Test(copier, results_and_queued_copies_may_be_left_behind)
{
    struct simple simple;
    struct kvd_copier *copier = new_copier(4);

    simple_init(&simple);
    submit_numbered(copier, &simple, 3, 3);
    kvd_copier_free(copier);
}

/* Whatever the moment, each copy ends exactly once: copied in full, or cancelled and untouched. */
Test(copier, stopping_under_load_accounts_for_every_copy, .timeout = 60)
{
    enum { N = 8, BYTES = (2 << 20) + 5, ROUNDS = 20 };
    uint8_t *src = malloc(BYTES), *slots = malloc((size_t)N * BYTES);
    struct iovec iov = {src, BYTES};

    fill(src, BYTES, 12);
    for (int round = 0; round < ROUNDS; round++) {
        struct kvd_copier *copier = new_copier(N);
        struct kvd_copied results[N];
        struct kvd_copy copies[N];
        unsigned seen = 0;
        struct crew crew;

        memset(slots, 0, (size_t)N * BYTES);
        for (size_t i = 0; i < N; i++)
            copies[i] = (struct kvd_copy){KVD_PUT, 1, &iov, slots + i * BYTES, BYTES, i};
        crew_start(&crew, copier, 3);
        cr_assert_eq(kvd_copier_submit(copier, copies, N), N);
        if (round % 3)
            cr_assert(readable(copier, -1));
        kvd_copier_stop(copier);
        crew_join(&crew);
        drain_all(copier, results, N, N);
        for (size_t i = 0; i < N; i++) {
            const uint8_t *slot = slots + results[i].user_data * BYTES;

            seen |= 1u << results[i].user_data;
            cr_assert(results[i].status == BYTES || results[i].status == -ECANCELED);
            if (results[i].status == BYTES)
                cr_assert_arr_eq(slot, src, BYTES);
            else
                cr_assert(slot[0] == 0 && memcmp(slot, slot + 1, BYTES - 1) == 0);
        }
        cr_assert_eq(seen, (1u << N) - 1);
        kvd_copier_free(copier);
    }
    free(src);
    free(slots);
}

/* ---- refusals */

#define REFUSED(...)                                                                               \
    do {                                                                                           \
        struct simple simple;                                                                      \
        struct kvd_copy copies[2];                                                                 \
        simple_init(&simple);                                                                      \
        copies[0] = simple.copy;                                                                   \
        __VA_ARGS__;                                                                               \
        copies[1] = simple.copy;                                                                   \
        cr_assert_eq(kvd_copier_submit(copier, copies + 1, 1), -EINVAL, "%s", #__VA_ARGS__);       \
        cr_assert_eq(kvd_copier_submit(copier, copies, 2), -EINVAL, "%s", #__VA_ARGS__);           \
    } while (0)

Test(copier, bad_copies_are_refused_and_none_of_the_batch_is_taken)
{
    struct kvd_copier *copier = new_copier(4);
    struct kvd_copied result;

    REFUSED(simple.copy.op = 0);
    REFUSED(simple.copy.op = 3);
    REFUSED(simple.copy.bytes = 63);
    REFUSED(simple.copy.bytes = 65);
    REFUSED(simple.copy.bytes = 0);
    REFUSED(simple.copy.iovcnt = 0; simple.copy.bytes = 0);
    REFUSED(simple.copy.iovcnt = -1);
    REFUSED(simple.copy.iov = NULL);
    REFUSED(simple.copy.slot = NULL);
    REFUSED(simple.iov[0].iov_base = NULL);
    REFUSED(simple.iov[0].iov_len = SIZE_MAX; simple.iov[1].iov_len = 65); /* 64 after wrapping */
    REFUSED(simple.iov[0].iov_len = SIZE_MAX - 24; simple.copy.bytes = UINT64_MAX);
    cr_assert_eq(kvd_copier_submit(copier, NULL, 1), -EINVAL);
    cr_assert_eq(kvd_copier_submit(copier, NULL, 0), 0);
    cr_assert_eq(kvd_copier_drain(copier, NULL, 1), -EINVAL);
    kvd_copier_stop(copier);
    cr_assert_eq(kvd_copier_drain(copier, &result, 1), 0, "something was taken");
    kvd_copier_free(copier);
}

Test(copier, a_failure_while_making_one_leaves_nothing)
{
    struct kvd_copier *untouched = (void *)&untouched, *copier = untouched;
    int failures = 0, fd = eventfd(0, 0), r;

    cr_assert_eq(kvd_copier_new(0, &copier), -EINVAL);
    for (;; failures++) {
        calls_until_failure = failures;
        r = kvd_copier_new(4, &copier);
        calls_until_failure = -1;
        if (r == 0)
            break;
        cr_assert(r == -ENOMEM || r == -EINVAL || r == -EMFILE || r == -EAGAIN);
        cr_assert_eq(copier, untouched);
    }
    cr_assert_eq(failures, 6);
    cr_assert_eq(kvd_copier_event_fd(copier), fd + 1, "a descriptor was left open");
    kvd_copier_free(copier);
    close(fd);
}

/* ---- a forked child */

/* What is wrong in the child, as its exit status. */
static int child_main(struct kvd_copier *copier, const struct simple *simple)
{
    struct kvd_copied result;

    if (kvd_copier_submit(copier, &simple->copy, 1) != -ECHILD)
        return 1;
    if (kvd_copier_drain(copier, &result, 1) != -ECHILD)
        return 2;
    if (kvd_copier_run(copier) != -ECHILD)
        return 3;
    if (kvd_copier_event_fd(copier) != -ECHILD)
        return 4;
    kvd_copier_stop(copier);
    kvd_copier_free(copier);
    return 0;
}

Test(copier, a_forked_child_is_refused_and_the_parent_goes_on, .timeout = 60)
{
    struct simple simple;
    struct kvd_copier *copier = new_copier(4);
    struct kvd_copied result;
    struct crew crew;
    int status;
    pid_t child;

    simple_init(&simple);
    crew_start(&crew, copier, 2);
    child = fork();
    if (child == 0)
        _exit(child_main(copier, &simple));
    cr_assert_gt(child, 0);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    cr_assert_eq(WEXITSTATUS(status), 0, "step %d", WEXITSTATUS(status));
    cr_assert_eq(kvd_copier_submit(copier, &simple.copy, 1), 1);
    drain_all(copier, &result, 1, 1);
    cr_assert_eq(result.status, 64);
    cr_assert_arr_eq(simple.slot, simple.src, 64);
    kvd_copier_stop(copier);
    crew_join(&crew);
    kvd_copier_free(copier);
}
