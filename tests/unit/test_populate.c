/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "daemon/guard.h"
#include "segment_world.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- populating */

struct seen {
    pid_t thread;
    uint64_t last, total;
    unsigned calls;
    bool wrong;
    atomic_bool cancel;
};

static void on_progress(uint64_t done, uint64_t total, void *userdata)
{
    struct seen *seen = userdata;

    seen->wrong |= gettid() != seen->thread || done < seen->last || done > total;
    seen->last = done;
    seen->total = total;
    seen->calls++;
}

static int empty_file(size_t bytes)
{
    char path[160];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", huge_dir, "empty");
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    return fd;
}

TestSuite(populate, .init = world_setup);

Test(populate, hugepages_by_several_threads)
{
    const size_t pages = WORLD_PAGES / 2;
    struct seen seen = {.thread = gettid()};
    struct populate_options o = {
        .threads = 3, .slice = 1, .progress = on_progress, .userdata = &seen};
    struct segment_mapping m;
    int fd;

    need_hugepages();
    fd = empty_file(pages * hp);
    cr_assert_eq(segment_map(NULL, fd, pages * hp, SEGMENT_WRITE, 0, &m), 0);
    cr_assert_eq(bytes_present(fd), 0);
    cr_assert_eq(populate_range(m.addr, m.bytes, hp, &o), 0);
    cr_assert_eq(bytes_present(fd), pages * hp);
    cr_assert_not(seen.wrong);
    cr_assert_geq(seen.calls, 1);
    cr_assert_eq(seen.last, pages * hp);
    cr_assert_eq(seen.total, pages * hp);
    segment_unmap(&m);
    close(fd);
    world_assert_nothing_left();
}

Test(populate, contents_stay)
{
    struct segment_spec spec = small_spec(64 * sp);
    struct populate_options o = {.threads = 2, .slice = 3 * sp};
    struct segment_mapping m;
    struct segment s = segment_must(&spec);

    cr_assert_eq(segment_map(NULL, s.fd, s.bytes, SEGMENT_WRITE, 0, &m), 0);
    memset(m.addr, 0xa5, m.bytes);
    cr_assert_eq(populate_range(m.addr, m.bytes, sp, &o), 0);
    for (size_t i = 0; i < m.bytes; i++)
        cr_assert_eq(((unsigned char *)m.addr)[i], 0xa5);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* The pages are reserved to nobody here, as for a mapping made before the pages were short. */
Test(populate, stops_when_pages_are_short)
{
    struct seen seen = {.thread = gettid()};
    struct populate_options o = {
        .threads = 2, .slice = 1, .progress = on_progress, .userdata = &seen};
    const size_t pages = 4 * WORLD_TIGHT_PAGES;
    char path[160];
    void *p;
    int fd;

    need_hugepages();
    snprintf(path, sizeof(path), "%s/short", tight_dir);
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    unlink(path);
    cr_assert_eq(ftruncate(fd, (off_t)(pages * hp)), 0);
    p = mmap(NULL, pages * hp, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_assert_eq(populate_range(p, pages * hp, hp, &o), -ENOMEM);
    cr_assert_eq(seen.last, WORLD_TIGHT_PAGES * hp);
    cr_assert_not(seen.wrong);
    munmap(p, pages * hp);
    close(fd);
    world_assert_nothing_left();
}

static struct {
    atomic_int calls, at; /* the call that something happens at */
    atomic_bool *cancel;
    int error;
} advice;

static int counting_madvise(void *addr, size_t len, int what)
{
    int call = atomic_fetch_add(&advice.calls, 1);

    if (call >= advice.at && advice.error) {
        errno = advice.error;
        return -1;
    }
    if (call == advice.at && advice.cancel)
        atomic_store(advice.cancel, true);
    return madvise(addr, len, what);
}

static int no_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                     void *arg)
{
    (void)thread, (void)attr, (void)start, (void)arg;
    return EAGAIN;
}

static int one_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                      void *arg)
{
    static int n;

    return n++ ? EAGAIN : pthread_create(thread, attr, start, arg);
}

static const struct populate_sys counting = {counting_madvise, pthread_create};

static void *anonymous(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    cr_assert_neq(p, MAP_FAILED);
    return p;
}

static size_t resident(void *p, size_t bytes)
{
    unsigned char v[1024];
    size_t n = 0;

    cr_assert_leq(bytes / sp, sizeof(v));
    cr_assert_eq(mincore(p, bytes, v), 0);
    for (size_t i = 0; i < bytes / sp; i++)
        n += v[i] & 1;
    return n * sp;
}

Test(populate, cancel_begins_no_further_slice)
{
    const size_t slices = 64;
    struct seen seen = {.thread = gettid()};
    struct populate_options o = {.threads = 2,
                                 .slice = sp,
                                 .progress = on_progress,
                                 .userdata = &seen,
                                 .cancel = &seen.cancel,
                                 .sys = &counting};
    void *p = anonymous(slices * sp);

    advice.at = 5;
    advice.cancel = &seen.cancel;
    cr_assert_eq(populate_range(p, slices * sp, sp, &o), -ECANCELED);
    cr_assert_leq(advice.calls, 5 + 2); /* the other thread may have been past the question */
    cr_assert_eq(seen.last, (uint64_t)advice.calls * sp);
    cr_assert_not(seen.wrong);
    munmap(p, slices * sp);
}

/* One slice fails; the other helper goes on only when the first has ended, and then must stop. */
static atomic_int helpers_ended;
static void *(*helper_start)(void *);

static void *helper_watched(void *arg)
{
    helper_start(arg);
    atomic_fetch_add(&helpers_ended, 1);
    return NULL;
}

static int watching_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                           void *arg)
{
    helper_start = start;
    return pthread_create(thread, attr, helper_watched, arg);
}

static int failing_once_madvise(void *addr, size_t len, int what)
{
    int call = atomic_fetch_add(&advice.calls, 1);

    if (call == advice.at) {
        errno = advice.error;
        return -1;
    }
    while (call > advice.at && atomic_load(&helpers_ended) == 0)
        sched_yield();
    return madvise(addr, len, what);
}

Test(populate, an_error_stops_everybody)
{
    const int errors[][2] = {{EFAULT, -ENOMEM}, {ENOMEM, -ENOMEM}, {EHWPOISON, -EHWPOISON}};
    const struct populate_sys sys = {failing_once_madvise, watching_create};
    const struct populate_options o = {.threads = 2, .slice = sp, .sys = &sys};
    const size_t slices = 64;

    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        void *p = anonymous(slices * sp);

        helpers_ended = 0;
        advice.calls = 0;
        advice.at = 3;
        advice.error = errors[i][0];
        cr_assert_eq(populate_range(p, slices * sp, sp, &o), errors[i][1]);
        cr_assert_eq(helpers_ended, 2);
        cr_assert_leq(advice.calls, 3 + 2);
        munmap(p, slices * sp);
    }
}

Test(populate, old_kernel_touches)
{
    const size_t bytes = 64 * sp;
    struct populate_options o = {.threads = 2, .slice = 5 * sp, .sys = &counting};
    unsigned char *p = anonymous(bytes);

    advice.error = EINVAL; /* what MADV_POPULATE_WRITE is to a kernel that does not know it */
    cr_assert_eq(populate_range(p, bytes, sp, &o), -EINVAL, "there is no guard yet");
    cr_assert_eq(guard_install(), 0);
    p[0] = p[3] = 9;
    cr_assert_eq(populate_range(p, bytes, sp, &o), 0);
    cr_assert_eq(resident(p, bytes), bytes);
    cr_assert_eq(p[0], 9);
    cr_assert_eq(p[3], 9);
    munmap(p, bytes);
}

Test(populate, old_kernel_survives_what_is_short)
{
    struct populate_options o = {.threads = 2, .slice = 1, .sys = &counting};
    struct segment_spec spec = small_spec(8 * sp);
    struct segment_mapping m;
    struct segment s = segment_must(&spec);

    advice.error = EINVAL;
    cr_assert_eq(guard_install(), 0);
    cr_assert_eq(segment_map(NULL, s.fd, s.bytes, SEGMENT_WRITE, 0, &m), 0);
    cr_assert_eq(ftruncate(s.fd, (off_t)(4 * sp)), 0);
    cr_assert_eq(populate_range(m.addr, m.bytes, sp, &o), -ENOMEM);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(populate, without_threads_the_caller_works)
{
    const struct populate_sys none = {madvise, no_thread}, one = {madvise, one_thread};
    const struct populate_sys *each[] = {&none, &one};
    const size_t bytes = 64 * sp;

    for (int i = 0; i < 2; i++) {
        struct seen seen = {.thread = gettid()};
        struct populate_options o = {.threads = 4,
                                     .slice = 4 * sp,
                                     .progress = on_progress,
                                     .userdata = &seen,
                                     .sys = each[i]};
        void *p = anonymous(bytes);

        cr_assert_eq(populate_range(p, bytes, sp, &o), 0);
        cr_assert_eq(resident(p, bytes), bytes);
        cr_assert_eq(seen.last, bytes);
        cr_assert_not(seen.wrong);
        munmap(p, bytes);
    }
}

static sigset_t helper_mask;

static int mask_madvise(void *addr, size_t len, int what)
{
    pthread_sigmask(SIG_SETMASK, NULL, &helper_mask);
    return madvise(addr, len, what);
}

Test(populate, helpers_take_no_signals)
{
    const struct populate_sys sys = {mask_madvise, pthread_create};
    const struct populate_options o = {.sys = &sys};
    sigset_t before, after;
    void *p = anonymous(sp);

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    cr_assert_eq(populate_range(p, sp, sp, &o), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int sig = 1; sig < SIGRTMIN; sig++)
        cr_assert_eq(sigismember(&before, sig), sigismember(&after, sig));
    cr_assert(sigismember(&helper_mask, SIGTERM));
    cr_assert(sigismember(&helper_mask, SIGCHLD));
    cr_assert_not(sigismember(&helper_mask, SIGBUS));
    munmap(p, sp);
}

Test(populate, nonsense_is_refused)
{
    unsigned char *p = anonymous(2 * sp);

    cr_assert_eq(populate_range(p, 0, sp, NULL), -EINVAL);
    cr_assert_eq(populate_range(p, sp + 1, sp, NULL), -EINVAL);
    cr_assert_eq(populate_range(p + 1, sp, sp, NULL), -EINVAL);
    cr_assert_eq(populate_range(p, sp, 0, NULL), -EINVAL);
    cr_assert_eq(populate_range(p, 2 * sp, sp, NULL), 0);
    munmap(p, 2 * sp);
}

Test(populate, make_in_parallel)
{
    struct seen seen = {.thread = gettid()};
    struct populate_options o = {
        .threads = 2, .slice = 1, .progress = on_progress, .userdata = &seen};
    struct segment_spec spec;
    struct segment s;

    need_hugepages();
    spec = pool_spec(8 * hp);
    spec.populate = &o;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_HUGETLBFS);
    cr_assert_eq(bytes_present(s.fd), 8 * hp);
    cr_assert_eq(seen.last, 8 * hp);
    segment_destroy(&s);
    spec.hugepages = SEGMENT_HUGEPAGES_OFF;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    cr_assert_eq(bytes_present(s.fd), 8 * hp);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* The reservation fails before a single page is cleared. */
Test(populate, make_in_parallel_when_short)
{
    struct seen seen = {.thread = gettid()};
    struct populate_options o = {
        .threads = 2, .slice = 1, .progress = on_progress, .userdata = &seen};
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages();
    spec = pool_spec(2 * WORLD_TIGHT_PAGES * hp);
    spec.hugetlbfs_dir = tight_dir;
    spec.populate = &o;
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_MEMFD_HUGETLB);
    assert_says(why.list[0].text, "size= of the mount");
    cr_assert_eq(seen.last, 2 * WORLD_TIGHT_PAGES * hp);
    cr_assert_not(seen.wrong);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(populate, make_is_cancelled)
{
    struct seen seen = {.cancel = true};
    struct populate_options o = {.cancel = &seen.cancel};
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages();
    spec = pool_spec(2 * hp);
    spec.populate = &o;
    cr_assert_eq(segment_make(&spec, &why, &s), -ECANCELED);
    cr_assert_eq(why.n, 1);
    world_assert_nothing_left();
}

/* ---- the guard */

TestSuite(guard, .init = world_setup);

static void truncate_under(struct segment_spec spec, enum segment_rung rung)
{
    struct segment_mapping m;
    struct segment s = segment_must(&spec);
    size_t half = s.bytes / 2;
    unsigned char byte = 3, *p;
    char *copy = malloc(s.bytes);

    cr_assert_eq(s.rung, rung);
    cr_assert_eq(segment_map(NULL, s.fd, s.bytes, SEGMENT_WRITE, 0, &m), 0);
    p = m.addr;
    memset(p, 7, s.bytes);
    cr_assert_eq(guard_copy(copy, p, s.bytes), 0);
    cr_assert_eq(memcmp(copy, p, s.bytes), 0);

    cr_assert_eq(ftruncate(s.fd, (off_t)half), 0);
    for (int round = 0; round < 3; round++) {
        cr_assert_eq(guard_copy(copy, p, s.bytes), -EFAULT);
        cr_assert_eq(guard_copy(p + half, copy, 1), -EFAULT);
        cr_assert_eq(guard_copy(&byte, p + s.bytes - 1, 1), -EFAULT);
        cr_assert_eq(guard_copy(&byte, p + half - 1, 1), 0);
        cr_assert_eq(byte, 7);
        cr_assert_eq(guard_call(read_byte, p + half, p, s.bytes), -EFAULT);
        cr_assert_eq(guard_call(read_byte, p, p, s.bytes), 7);
    }
    cr_assert_eq(run_child(read_byte, p + half), -SIGBUS, "unguarded, it is deadly");
    free(copy);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(guard, a_truncated_hugetlbfs_file)
{
    need_hugepages();
    cr_assert_eq(guard_install(), 0);
    truncate_under(pool_spec(2 * hp), SEGMENT_HUGETLBFS);
}

Test(guard, a_truncated_tmpfs_file)
{
    cr_assert_eq(guard_install(), 0);
    truncate_under(small_spec(4 * sp), SEGMENT_TMPFS);
}

/* Seals do not forbid holes. Filling one needs a hugepage, and there is none. */
Test(guard, a_hole_without_hugepages)
{
    struct segment_spec spec;
    struct segment_mapping m;
    struct segment s;
    unsigned char byte;

    need_hugepages();
    cr_assert_eq(guard_install(), 0);
    spec = pool_spec(2 * hp);
    spec.hugetlbfs_dir = run_dir;
    s = segment_must(&spec);
    cr_assert_eq(segment_map(NULL, s.reader_fd, s.bytes, SEGMENT_READ, 0, &m), 0);
    cr_assert_eq(fallocate(s.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)hp), 0);
    world_steal(0);
    cr_assert_eq(guard_copy(&byte, m.addr, 1), -EFAULT);
    cr_assert_eq(guard_copy(&byte, (unsigned char *)m.addr + hp, 1), 0);
    world_unsteal();
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* Faults at addresses that were not named are bugs, and must not be taken for a hostile writer. */
static int fault_elsewhere(void *arg)
{
    unsigned char *p = arg;

    if (guard_install() < 0)
        return 1;
    guard_call(read_byte, p, p + sp, sp);
    return 2;
}

static int raise_bus(void *arg)
{
    (void)arg;
    return raise(SIGBUS);
}

static int signal_from_outside(void *arg)
{
    if (guard_install() < 0)
        return 1;
    guard_call(raise_bus, arg, NULL, UINTPTR_MAX); /* wherever si_addr seems to point */
    return 2;
}

/* Once the guard is over, a fault goes to whoever handled it before the guards came. */
static void before_the_guard(int sig)
{
    _exit(sig == SIGSEGV ? 77 : 78);
}

static int unguarded_after_fault(void *arg)
{
    signal(SIGSEGV, before_the_guard);
    alarm(10); /* a stale guard may well loop for ever */
    if (guard_install() < 0 || guard_copy(arg, "x", 1) != -EFAULT)
        return 1;
    return write_byte(arg);
}

static int nothing(void *arg)
{
    (void)arg;
    return 4;
}

static int unguarded_after_success(void *arg)
{
    signal(SIGSEGV, before_the_guard);
    alarm(10);
    if (guard_install() < 0 || guard_call(nothing, NULL, arg, sp) != 4)
        return 1;
    return write_byte(arg);
}

Test(guard, covers_nothing_else)
{
    unsigned char *p = mmap(NULL, 2 * sp, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    cr_assert_neq(p, MAP_FAILED);
    cr_assert_eq(run_child(fault_elsewhere, p), -SIGSEGV);
    cr_assert_eq(run_child(signal_from_outside, p), -SIGBUS);
    cr_assert_eq(run_child(unguarded_after_fault, p), 77);
    cr_assert_eq(run_child(unguarded_after_success, p), 77);
    munmap(p, 2 * sp);
}

struct nest {
    unsigned char *bad;
    int inner; /* what the inner guard answered */
};

static int nested_inner_fault(void *arg)
{
    struct nest *n = arg;

    n->inner = guard_call(read_byte, n->bad, n->bad, sp);
    return 5;
}

/* The inner guard names other memory: the fault belongs to the outer one. */
static int nested_outer_fault(void *arg)
{
    struct nest *n = arg;

    n->inner = guard_call(read_byte, n->bad, n, sizeof(*n));
    return 5;
}

Test(guard, nests)
{
    unsigned char *p = mmap(NULL, sp, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct nest n = {.bad = p, .inner = 1};

    cr_assert_eq(guard_call(nested_inner_fault, &n, p, sp), -EINVAL, "not installed yet");
    cr_assert_eq(n.inner, 1);
    cr_assert_eq(guard_copy(p, &n, 1), -EINVAL);
    cr_assert_eq(guard_install(), 0);
    cr_assert_eq(guard_install(), 0);
    cr_assert_eq(guard_call(nested_inner_fault, &n, p, sp), 5);
    cr_assert_eq(n.inner, -EFAULT);
    n.inner = 1;
    cr_assert_eq(guard_call(nested_outer_fault, &n, p, sp), -EFAULT);
    cr_assert_eq(n.inner, 1);
    cr_assert_eq(guard_copy(&n.inner, p, 1), -EFAULT);
    munmap(p, sp);
}

/* Two threads are inside guards over the same memory when both fault. */
struct both {
    pthread_barrier_t barrier;
    unsigned char *bad;
};

static int meet_and_read(void *arg)
{
    struct both *b = arg;

    pthread_barrier_wait(&b->barrier);
    return *(volatile unsigned char *)b->bad;
}

static void *guarded_thread(void *arg)
{
    struct both *b = arg;

    return guard_call(meet_and_read, b, b->bad, sp) == -EFAULT ? b : NULL;
}

Test(guard, belongs_to_its_thread)
{
    unsigned char *p = mmap(NULL, sp, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct both b = {.bad = p};
    pthread_t thread;
    void *result;

    cr_assert_eq(guard_install(), 0);
    pthread_barrier_init(&b.barrier, NULL, 2);
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(pthread_create(&thread, NULL, guarded_thread, &b), 0);
        cr_assert_eq(guard_call(meet_and_read, &b, p, sp), -EFAULT);
        pthread_join(thread, &result);
        cr_assert_eq(result, &b);
    }
    pthread_barrier_destroy(&b.barrier);
    munmap(p, sp);
}
