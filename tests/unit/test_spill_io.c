/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backends of the spill tier: one contract for all of them, then what each has of its own, and
 * what io_new() chooses when the system refuses something.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/io_world.h"

static struct io_world w;

static void setup(void)
{
    io_world_open(&w);
}

static void teardown(void)
{
    io_world_close(&w);
}

#define for_each_variant(v) for (v = io_variants; v < io_variants + n_io_variants; v++)

/* ---- the contract */

TestSuite(contract, .init = setup, .fini = teardown, .timeout = 120);

static void shuffle(uint32_t *order, uint32_t n)
{
    uint32_t x = 12345;

    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j, t = order[i - 1];

        x = x * 1664525u + 1013904223u;
        j = (x >> 8) % i;
        order[i - 1] = order[j];
        order[j] = t;
    }
}

/* All blocks, in random order, in batches of any size, many in flight. */
static void transfer_all(struct io *io, bool write, bool durable)
{
    uint32_t order[WORLD_BLOCKS], next = 0, done = 0, x = 7;
    uint8_t seen[WORLD_BLOCKS] = {0};

    shuffle(order, WORLD_BLOCKS);
    while (done < WORLD_BLOCKS) {
        struct io_done results[5];
        struct io_op ops[9];
        uint32_t n = 0;
        int r;

        x = x * 1664525u + 1013904223u;
        for (; n < x % 9 + 1 && next + n < WORLD_BLOCKS; n++) {
            ops[n] = io_world_op(&w, write, order[next + n], 1);
            ops[n].durable = durable;
        }
        r = io_submit(io, ops, n);
        cr_assert_geq(r, 0);
        cr_assert_leq((uint32_t)r, n);
        next += (uint32_t)r;
        n = io_world_await(io, results, 1 + x % 5);
        for (uint32_t i = 0; i < n; i++) {
            cr_assert_lt(results[i].cookie, WORLD_BLOCKS);
            cr_assert_eq(results[i].result, IO_BLOCK);
            cr_assert_eq(seen[results[i].cookie]++, 0, "one completion for each");
        }
        done += n;
    }
}

static void check_arrival(const struct io_variant *v, uint32_t seed)
{
    struct io *io = io_world_new(&w, v, 16);

    memset(w.mem, 0xee, WORLD_BYTES);
    transfer_all(io, false, false);
    cr_assert_eq(io_world_wrong(w.mem, 0), 0u, "read by %s", v->name);

    for (uint32_t n = 0; n < WORLD_BLOCKS; n++)
        io_world_pattern(w.mem + (size_t)n * IO_BLOCK, n, seed);
    transfer_all(io, true, seed & 1);
    cr_assert_eq(pread(w.fd, w.copy, WORLD_BYTES, 0), (ssize_t)WORLD_BYTES);
    cr_assert_eq(io_world_wrong(w.copy, seed), 0u, "written by %s", v->name);
    io_free(io);
    io_world_fill(&w, 0);
}

Test(contract, data_arrives_at_its_place_in_any_order)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        check_arrival(v, 2);
        check_arrival(v, 3); /* durably */
    }
}

Test(contract, one_transfer_may_be_as_large_as_the_file)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = io_world_new(&w, v, 1);
        struct io_op op = io_world_op(&w, false, 0, WORLD_BLOCKS);

        memset(w.mem, 0xee, WORLD_BYTES);
        cr_assert_eq(io_world_run(io, &op), WORLD_BYTES, "%s", v->name);
        cr_assert_eq(io_world_wrong(w.mem, 0), 0u, "%s", v->name);
        io_free(io);
    }
}

Test(contract, no_more_than_depth_are_in_flight)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = io_world_new(&w, v, 6); /* not a power of two */
        struct io_done done[8];
        struct io_op ops[10];
        uint32_t n = 0;

        for (uint32_t i = 0; i < 10; i++)
            ops[i] = io_world_op(&w, false, i, 1);
        cr_assert_eq(io_submit(io, ops, 0), 0);
        cr_assert_eq(io_submit(io, ops, 4), 4);
        cr_assert_eq(io_submit(io, ops + 4, 6), 2, "%s", v->name);
        for (int i = 0; i < 100; i++) {
            cr_assert_eq(io_submit(io, ops + 6, 4), 0, "%s: full until it was reaped", v->name);
            sched_yield();
        }
        cr_assert_eq(io_world_await(io, done, 1), 1u);
        cr_assert_eq(io_submit(io, ops + 6, 4), 1, "%s", v->name);
        cr_assert_eq(io_submit(io, ops + 7, 3), 0, "%s", v->name);
        while (n < 6)
            n += io_world_await(io, done, 8);
        cr_assert_eq(n, 6u);
        cr_assert_eq(io_submit(io, ops, 10), 6);
        for (n = 0; n < 6;)
            n += io_world_await(io, done, 8);
        io_free(io);
    }
}

/* Not repaired: short transfers and errors come as they are. */
Test(contract, short_results_and_errors_are_handed_on)
{
    void *nowhere = mmap(NULL, IO_BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool direct = fcntl(w.fd, F_GETFL) & O_DIRECT;
    const struct io_variant *v;

    cr_assert_neq(nowhere, MAP_FAILED);
    for_each_variant(v)
    {
        struct io *io = io_world_new(&w, v, 4);
        struct io_op op = io_world_op(&w, false, WORLD_BLOCKS - 1, 1);

        op.buf = w.mem;
        op.bytes = 4 * IO_BLOCK;
        cr_assert_eq(io_world_run(io, &op), IO_BLOCK, "%s: the last block only", v->name);
        op.offset = WORLD_BYTES;
        cr_assert_eq(io_world_run(io, &op), 0, "%s: the end", v->name);
        op.offset = 0;
        op.bytes = 0;
        cr_assert_eq(io_world_run(io, &op), 0, "%s: nothing", v->name);
        op.bytes = IO_BLOCK;
        op.buf = nowhere;
        cr_assert_eq(io_world_run(io, &op), -EFAULT, "%s", v->name);
        op.write = true;
        cr_assert_eq(io_world_run(io, &op), -EFAULT, "%s", v->name);
        op.buf = w.mem;
        op.offset = 1;
        if (direct)
            cr_assert_eq(io_world_run(io, &op), -EINVAL, "%s", v->name);
        io_free(io);
    }
    munmap(nowhere, IO_BLOCK);
}

Test(contract, descriptors_that_do_not_fit)
{
    const struct io_variant *v;
    int fd = w.fd;

    for_each_variant(v)
    {
        struct io_op read = io_world_op(&w, false, 0, 1), write = io_world_op(&w, true, 0, 1);
        const struct io_options closed = {
            .fd = 1000000, .depth = 1, .backend = v->backend, .sys = v->sys};
        struct io *io = NULL;
        char note[256];

        cr_assert_eq(io_new(&closed, note, sizeof(note), &io), -EBADF, "%s", v->name);
        cr_assert_null(io);

        w.fd = open(w.path, O_WRONLY | O_CLOEXEC);
        io = io_world_new(&w, v, 2);
        cr_assert_eq(io_world_run(io, &read), -EBADF, "%s", v->name);
        cr_assert_eq(io_world_run(io, &write), IO_BLOCK, "%s", v->name);
        io_free(io);
        close(w.fd);

        w.fd = open(w.path, O_RDONLY | O_CLOEXEC);
        io = io_world_new(&w, v, 2);
        cr_assert_eq(io_world_run(io, &write), -EBADF, "%s", v->name);
        cr_assert_eq(io_world_run(io, &read), IO_BLOCK, "%s", v->name);
        io_free(io);
        close(w.fd);
        w.fd = fd;
    }
}

static int epoll_over(int fd)
{
    struct epoll_event e = {.events = EPOLLIN};
    int over = epoll_create1(EPOLL_CLOEXEC);

    cr_assert_geq(over, 0);
    cr_assert_eq(epoll_ctl(over, EPOLL_CTL_ADD, fd, &e), 0);
    return over;
}

static void epoll_must(int fd)
{
    struct epoll_event e;
    int n;

    do
        n = epoll_wait(fd, &e, 1, 60000);
    while (n < 0 && errno == EINTR);
    cr_assert_eq(n, 1, "the sleeper was not woken");
}

/* It may be readable once more than there are completions, but not for ever. */
static void must_fall_silent(struct io *io, int fd)
{
    struct io_done done;

    for (int i = 0; io_world_readable(fd); i++) {
        cr_assert_lt(i, 3);
        cr_assert_eq(io_reap(io, &done, 1), 0);
    }
}

Test(contract, the_descriptor_is_readable_while_completions_wait)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = io_world_new(&w, v, 8);
        int inner = epoll_over(io->fd), outer = epoll_over(inner);

        for (uint32_t i = 0; i < 50; i++) {
            struct io_op ops[2] = {io_world_op(&w, false, i, 1), io_world_op(&w, false, i + 50, 1)};
            struct io_done done[2];
            uint32_t n = 0;

            must_fall_silent(io, outer);
            cr_assert_eq(io_reap(io, done, 2), 0);
            cr_assert_eq(io_submit(io, ops, 2), 2);
            while (n < 2) {
                epoll_must(outer);
                cr_assert(io_world_readable(io->fd), "%s", v->name);
                n += (uint32_t)io_reap(io, done, 1);
            }
            cr_assert_eq(n, 2u);
        }
        close(outer);
        close(inner);
        io_free(io);
    }
}

/* A store is closed and opened again in one process: its lock must not linger. */
Test(contract, the_lock_is_free_once_the_file_is_closed)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        int fd = w.fd;

        for (int round = 0; round < 20; round++) {
            struct io_op op = io_world_op(&w, false, 0, 1);
            struct io *io;

            w.fd = open(w.path, O_RDWR | O_CLOEXEC);
            cr_assert_eq(flock(w.fd, LOCK_EX | LOCK_NB), 0, "%s, round %d", v->name, round);
            io = io_world_new(&w, v, 2);
            cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
            io_free(io);
            close(w.fd);
        }
        w.fd = fd;
    }
}

Test(contract, every_descriptor_is_closed_again)
{
    const struct io_variant *v;
    uint32_t before = io_world_descriptors();

    for_each_variant(v)
    {
        struct io *io = io_world_new(&w, v, 8);

        cr_assert_gt(io_world_descriptors(), before);
        io_free(io);
        cr_assert_eq(io_world_descriptors(), before, "%s", v->name);
    }
    io_free(NULL);
}

Test(contract, nonsense_is_refused)
{
    const struct io_options good = {.fd = w.fd, .depth = 1024, .backend = IO_AUTO};
    struct io_options bad[] = {good, good, good, good};
    struct io *io = NULL;
    char note[256];

    bad[0].depth = 0;
    bad[1].depth = 1025;
    bad[2].n_windows = 1;
    bad[3].backend = (enum io_backend)3;
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(io_new(&bad[i], note, sizeof(note), &io), -EINVAL, "%d", i);
        cr_assert_null(io);
    }
    cr_assert_eq(io_new(&good, note, sizeof(note), &io), 0);
    io_free(io);
}

/* ---- io_uring alone */

TestSuite(uring, .init = setup, .fini = teardown, .timeout = 120);

/* What stands between the backend and liburing. */
static struct {
    struct io_uring_sqe sqes[16];
    unsigned n_sqes;
    unsigned enter; /* so many entries are given to the kernel */
    int answer;
    unsigned random;
    struct iovec buffers[20000];
    unsigned n_buffers;
} spy;

/* Shows the entries to the test, and gives the first of them to the kernel. */
static int spy_submit(struct io_uring *ring)
{
    struct io_uring_sq *sq = &ring->sq;
    unsigned head = *sq->khead;
    int r = 0;

    spy.n_sqes = 0;
    for (unsigned at = head; at != sq->sqe_tail && spy.n_sqes < 16; at++)
        spy.sqes[spy.n_sqes++] = sq->sqes[at & sq->ring_mask];
    sq->sqe_head = sq->sqe_tail;
    io_uring_smp_store_release(sq->ktail, sq->sqe_tail);
    if (spy.random)
        spy.enter = (spy.random = spy.random * 1664525u + 1013904223u) >> 8 & 3;
    if (spy.enter)
        r = io_uring_enter((unsigned)ring->ring_fd,
                           spy.enter < sq->sqe_tail - head ? spy.enter : sq->sqe_tail - head, 0, 0,
                           NULL);
    return spy.answer ? spy.answer : r;
}

static int spy_register(struct io_uring *ring, const struct iovec *iov, unsigned n)
{
    (void)ring;
    cr_assert_leq(n, 20000u);
    memcpy(spy.buffers, iov, n * sizeof(*iov));
    spy.n_buffers = n;
    return 0;
}

static struct io *spied_uring(const struct io_window *windows, uint32_t n)
{
    static struct io_sys sys;
    struct io_options o = {.fd = w.fd,
                           .depth = 16,
                           .backend = IO_URING,
                           .windows = windows,
                           .n_windows = n,
                           .sys = &sys};
    char note[256];
    struct io *io;

    spy.answer = 0;
    spy.random = 0;
    sys = io_sys_real;
    sys.ring_submit = spy_submit;
    sys.ring_register_buffers = spy_register;
    spy.enter = 1; /* the NOP */
    cr_assert_eq(io_new(&o, note, sizeof(note), &io), 0, "%s", note);
    spy.enter = 0;
    return io;
}

Test(uring, what_the_kernel_did_not_take_is_not_accepted)
{
    struct io *io = spied_uring(NULL, 0);
    struct io_done done[16];
    struct io_op ops[8];
    uint64_t seen = 0;
    uint32_t n = 0;

    for (uint32_t i = 0; i < 8; i++)
        ops[i] = io_world_op(&w, false, i, 1);
    spy.answer = -EAGAIN;
    cr_assert_eq(io_submit(io, ops, 8), -EAGAIN);
    spy.answer = -EBUSY;
    cr_assert_eq(io_submit(io, ops, 8), -EBUSY);
    spy.answer = 0;
    cr_assert_eq(io_submit(io, ops, 8), -EAGAIN, "nothing taken, and no reason given");
    spy.enter = 3;
    cr_assert_eq(io_submit(io, ops, 8), 3);
    spy.answer = -EAGAIN; /* although it took some */
    cr_assert_eq(io_submit(io, ops + 3, 5), 3);
    spy.answer = 0;
    spy.enter = 16;
    cr_assert_eq(io_submit(io, ops + 6, 2), 2);
    while (n < 8) {
        uint32_t got = io_world_await(io, done, 16);

        for (uint32_t i = 0; i < got; i++)
            seen += 1u << (4 * done[i].cookie);
        n += got;
    }
    cr_assert_eq(seen, 0x11111111u, "each exactly once: %llx", (unsigned long long)seen);
    io_free(io);
}

Test(uring, a_storm_of_refusals_loses_nothing)
{
    struct io *io = spied_uring(NULL, 0);

    for (int round = 0; round < 8; round++) {
        uint32_t next = 0, done = 0;
        uint8_t seen[WORLD_BLOCKS] = {0};

        spy.random = (unsigned)round + 1;
        spy.answer = round & 1 ? -EBUSY : -EAGAIN;
        while (done < WORLD_BLOCKS) {
            struct io_done results[16];
            struct io_op ops[7];
            uint32_t n = 0;
            int r;

            for (; n < 7 && next + n < WORLD_BLOCKS; n++)
                ops[n] = io_world_op(&w, false, next + n, 1);
            r = n ? io_submit(io, ops, n) : 0;
            cr_assert(r >= 0 || r == spy.answer);
            next += r > 0 ? (uint32_t)r : 0;
            r = io_reap(io, results, 16);
            for (int i = 0; i < r; i++)
                cr_assert_eq(seen[results[i].cookie]++, 0);
            done += (uint32_t)r;
        }
        cr_assert_eq(io_reap(io, &(struct io_done){0}, 1), 0);
    }
    cr_assert_eq(io_world_wrong(w.mem, 0), 0u);
    io_free(io);
}

#define GIB (UINT64_C(1) << 30)

static void must_use(struct io *io, uint64_t at, uint32_t bytes, int buffer)
{
    const struct io_op op = {.buf = (void *)at, .bytes = bytes, .cookie = UINT64_MAX};

    cr_assert_eq(io_submit(io, &op, 1), -EAGAIN);
    cr_assert_eq(spy.n_sqes, 1u);
    cr_assert_eq(spy.sqes[0].opcode, buffer < 0 ? IORING_OP_READ : IORING_OP_READ_FIXED, "%llx",
                 (unsigned long long)at);
    cr_assert_eq(spy.sqes[0].len, bytes);
    cr_assert_eq(spy.sqes[0].user_data, UINT64_MAX);
    if (buffer >= 0)
        cr_assert_eq(spy.sqes[0].buf_index, buffer, "%llx: %d", (unsigned long long)at,
                     spy.sqes[0].buf_index);
}

/* Nothing is behind these addresses: the registration is the test's. */
Test(uring, windows_are_cut_and_transfers_find_their_buffer)
{
    const uint64_t a = 0x500000000000, b = 0x100000000000, c = 0x200000000000;
    const struct io_window windows[] = {{(void *)a, 2 * GIB + 8192},
                                        {(void *)0x300000000000, 0},
                                        {(void *)b, 4096},
                                        {(void *)c, 20000 * GIB}};
    struct io *io = spied_uring(windows, 4);
    const unsigned left = 16384 - 4;

    cr_assert(io->registered);
    cr_assert_eq(spy.n_buffers, 16384u, "as many as the kernel takes");
    for (unsigned i = 0; i < spy.n_buffers; i++)
        cr_assert_leq(spy.buffers[i].iov_len, GIB);
    cr_assert_eq((uint64_t)spy.buffers[2].iov_base, a + 2 * GIB);
    cr_assert_eq(spy.buffers[2].iov_len, 8192u);
    cr_assert_eq((uint64_t)spy.buffers[4].iov_base, c);

    must_use(io, a, 4096, 0);
    must_use(io, a, GIB, 0);
    must_use(io, a + GIB - 4096, 4096, 0);
    must_use(io, a + GIB - 4096, 8192, -1); /* across a cut */
    must_use(io, a + GIB, 4096, 1);
    must_use(io, a + 2 * GIB + 4096, 4096, 2);
    must_use(io, a + 2 * GIB + 4096, 8192, -1);
    must_use(io, a + 2 * GIB + 8192, 4096, -1);
    must_use(io, a - 4096, 4096, -1);
    must_use(io, a - 4096, 8192, -1);
    must_use(io, b - 4096, 4096, -1);
    must_use(io, b, 4096, 3);
    must_use(io, b, 0, -1);
    must_use(io, b + 4096, 4096, -1);
    must_use(io, c + 5 * GIB + 4096, 1 << 20, 9);
    must_use(io, c + left * GIB - 4096, 4096, 16383);
    must_use(io, c + left * GIB, 4096, -1); /* more than it takes */
    must_use(io, a, UINT32_MAX, -1);
    io_free(io);
}

Test(uring, a_durable_write_says_so)
{
    const struct io_window window = {w.mem, WORLD_BYTES};
    struct io *io = spied_uring(&window, 1);
    uint8_t *mems[] = {w.mem, w.copy};

    for (int i = 0; i < 2; i++) {
        struct io_op ops[3];

        for (int k = 0; k < 3; k++)
            ops[k] = (struct io_op){
                .buf = mems[i], .bytes = IO_BLOCK, .write = k > 0, .durable = k != 1};
        cr_assert_eq(io_submit(io, ops, 3), -EAGAIN);
        cr_assert_eq(spy.n_sqes, 3u);
        cr_assert_eq(spy.sqes[0].rw_flags, 0);
        cr_assert_eq(spy.sqes[1].rw_flags, 0);
        cr_assert_eq(spy.sqes[2].rw_flags, RWF_DSYNC);
        cr_assert_eq(spy.sqes[2].opcode, i ? IORING_OP_WRITE : IORING_OP_WRITE_FIXED);
    }
    io_free(io);
}

static void *write_later(void *arg)
{
    const int *fd = arg;

    usleep(20000);
    cr_assert_eq(write(*fd, "x", 1), 1);
    return NULL;
}

/* The read of a pipe is not done before its sleeper sleeps. */
Test(uring, a_completion_wakes_a_sleeper_through_nested_epolls)
{
    for (uint32_t i = 0; i < n_io_variants; i++) {
        const struct io_variant *v = &io_variants[i];
        int fds[2], fd = w.fd, inner, outer;
        struct io_op op = io_world_op(&w, false, 0, 1);
        struct io_done done;
        pthread_t thread;
        struct io *io;

        if (v->backend != IO_URING)
            continue;
        cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
        w.fd = fds[0];
        io = io_world_new(&w, v, 4);
        inner = epoll_over(io->fd);
        outer = epoll_over(inner);
        for (int round = 0; round < 3; round++) {
            cr_assert_eq(io_submit(io, &op, 1), 1);
            must_fall_silent(io, outer);
            cr_assert_eq(pthread_create(&thread, NULL, write_later, &fds[1]), 0);
            epoll_must(outer);
            while (io_reap(io, &done, 1) == 0)
                epoll_must(outer);
            cr_assert_eq(done.result, 1, "%s", v->name);
            pthread_join(thread, NULL);
        }
        close(outer);
        close(inner);
        io_free(io);
        close(fds[0]);
        close(fds[1]);
        w.fd = fd;
    }
}

Test(uring, the_end_does_not_wait_for_what_hangs)
{
    int fds[2], fd = w.fd;
    struct io_op op = io_world_op(&w, false, 0, 1);
    struct io *io;

    cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
    w.fd = fds[0];
    io = io_world_new(&w, &io_variants[0], 4);
    cr_assert_eq(io_submit(io, &op, 1), 1);
    io_free(io);
    close(fds[0]);
    close(fds[1]);
    w.fd = fd;
}

/* ---- threads alone */

TestSuite(threads, .init = setup, .fini = teardown, .timeout = 120);

static struct {
    atomic_bool open;
    atomic_uint inside;
    pthread_mutex_t lock; /* for what is below */
    int flags;
    sigset_t mask;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void gate_wait(void)
{
    atomic_fetch_add(&gate.inside, 1);
    while (!atomic_load(&gate.open))
        usleep(100);
}

static ssize_t gated_write(int fd, const struct iovec *iov, int n, off_t offset, int flags)
{
    pthread_mutex_lock(&gate.lock);
    pthread_sigmask(SIG_SETMASK, NULL, &gate.mask);
    gate.flags = flags;
    pthread_mutex_unlock(&gate.lock);
    gate_wait();
    return pwritev2(fd, iov, n, offset, flags);
}

static struct io *gated_threads(uint32_t threads)
{
    static struct io_sys sys;
    struct io_options o = {
        .fd = w.fd, .depth = 8, .backend = IO_THREADS, .threads = threads, .sys = &sys};
    char note[256];
    struct io *io;

    sys = io_sys_real;
    sys.pwritev2 = gated_write;
    atomic_store(&gate.open, false);
    atomic_store(&gate.inside, 0);
    cr_assert_eq(io_new(&o, note, sizeof(note), &io), 0);
    return io;
}

Test(threads, one_batch_sets_all_of_them_to_work)
{
    struct io *io = gated_threads(4);
    struct io_op ops[8];
    struct io_done done[8];
    uint32_t n = 0;

    for (uint32_t i = 0; i < 8; i++)
        ops[i] = io_world_op(&w, true, i, 1);
    cr_assert_eq(io_submit(io, ops, 8), 8);
    while (atomic_load(&gate.inside) < 4)
        sched_yield();
    cr_assert_eq(io_reap(io, done, 8), 0);
    atomic_store(&gate.open, true);
    while (n < 8)
        n += io_world_await(io, done, 8);
    io_free(io);
}

Test(threads, take_no_signals_and_a_durable_write_says_so)
{
    struct io *io = gated_threads(1);
    struct io_op op = io_world_op(&w, true, 0, 1);

    atomic_store(&gate.open, true);
    cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
    cr_assert_eq(gate.flags, 0);
    op.durable = true;
    cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
    cr_assert_eq(gate.flags, RWF_DSYNC);
    cr_assert(sigismember(&gate.mask, SIGTERM));
    cr_assert(sigismember(&gate.mask, SIGCHLD));
    cr_assert_not(sigismember(&gate.mask, SIGBUS));
    io_free(io);
}

/*
 * io_free() does not wait for what hangs; what waits is dropped; the thread that comes back later
 * finds its own file, not another one that got its number, and cleans up.
 */
Test(threads, one_left_behind_writes_to_its_own_file_and_cleans_up)
{
    uint32_t before = io_world_descriptors();
    struct io_world other;
    struct io_op ops[3];
    int fd = w.fd, number;
    struct io *io;

    number = w.fd = open(w.path, O_RDWR | O_CLOEXEC);
    io = gated_threads(1);
    for (uint32_t i = 0; i < 3; i++)
        ops[i] = io_world_op(&w, true, i, 1);
    memset(w.mem, 0x77, WORLD_BYTES);
    cr_assert_eq(io_submit(io, ops, 3), 3);
    while (!atomic_load(&gate.inside))
        sched_yield();
    io_free(io);

    io_world_open(&other);
    cr_assert_eq(dup3(other.fd, number, O_CLOEXEC), number);
    atomic_store(&gate.open, true);
    close(number);
    w.fd = fd;
    while (io_world_descriptors() > before + 1) /* +1: `other` */
        sched_yield();
    cr_assert_eq(pread(other.fd, other.mem, WORLD_BYTES, 0), (ssize_t)WORLD_BYTES);
    cr_assert_eq(io_world_wrong(other.mem, 0), 0u);
    cr_assert_eq(pread(w.fd, w.copy, WORLD_BYTES, 0), (ssize_t)WORLD_BYTES);
    cr_assert_eq(w.copy[0], 0x77);
    cr_assert_eq(io_world_wrong(w.copy, 0), 1u, "what waited was dropped");
    cr_assert_eq(atomic_load(&gate.inside), 1u);
    io_world_close(&other);
}

/* ---- what io_new() chooses */

static void setup_choice(void);

TestSuite(choice, .init = setup_choice, .fini = teardown, .timeout = 120);

static struct {
    int init, probe, submit, buffers; /* what they answer, if not 0 */
    int calls;                        /* countdown: this one fails */
    int threads;                      /* so many can be made */
} broken;

static void setup_choice(void)
{
    memset(&broken, 0, sizeof(broken));
    broken.calls = -1;
    setup();
}

static int broken_init(unsigned entries, struct io_uring *ring, struct io_uring_params *p)
{
    return broken.init ? broken.init : io_uring_queue_init_params(entries, ring, p);
}

static int broken_probe(struct io_uring *ring, struct io_uring_probe *probe, unsigned n)
{
    int r = io_uring_register_probe(ring, probe, n);

    if (broken.probe == -EOPNOTSUPP) /* known, but not all that is needed */
        probe->ops[IORING_OP_WRITE].flags = 0;
    else if (broken.probe)
        r = broken.probe;
    return r;
}

static int broken_submit(struct io_uring *ring)
{
    return broken.submit ? broken.submit : io_uring_submit(ring);
}

static int broken_buffers(struct io_uring *ring, const struct iovec *iov, unsigned n)
{
    return broken.buffers ? broken.buffers : io_uring_register_buffers(ring, iov, n);
}

static bool fails_now(int error)
{
    errno = error;
    return broken.calls >= 0 && broken.calls-- == 0;
}

static void *broken_calloc(size_t n, size_t bytes)
{
    return fails_now(ENOMEM) ? NULL : calloc(n, bytes);
}

static int broken_eventfd(unsigned count, int flags)
{
    return fails_now(EMFILE) ? -1 : eventfd(count, flags);
}

static int broken_dup(int fd)
{
    return fails_now(EMFILE) ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

static int broken_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
                         void *arg)
{
    return broken.threads-- <= 0 ? EAGAIN : pthread_create(thread, attr, run, arg);
}

static const struct io_sys broken_sys = {
    .calloc = broken_calloc,
    .eventfd = broken_eventfd,
    .dup = broken_dup,
    .thread_create = broken_thread,
    .preadv2 = preadv2,
    .pwritev2 = pwritev2,
    .ring_init = broken_init,
    .ring_register_probe = broken_probe,
    .ring_register_eventfd = io_uring_register_eventfd,
    .ring_register_files = io_uring_register_files,
    .ring_register_buffers = broken_buffers,
    .ring_submit = broken_submit,
    .ring_get_events = io_uring_get_events,
};

static int broken_new(enum io_backend backend, char note[256], struct io **ret_io)
{
    static struct io_window window;
    struct io_options o = {.fd = w.fd,
                           .depth = 8,
                           .backend = backend,
                           .windows = &window,
                           .n_windows = 1,
                           .sys = &broken_sys};

    window = (struct io_window){w.mem, WORLD_BYTES};
    broken.threads = 100;
    return io_new(&o, note, 256, ret_io);
}

Test(choice, without_io_uring_there_are_threads_and_a_note_with_cause_and_cure)
{
    static const struct {
        int init, probe, submit;
        const char *cause, *cure;
    } cases[] = {
        {.init = -EPERM, .cause = "not permitted", .cure = "seccomp"},
        {.init = -EPERM, .cause = "not permitted", .cure = "kernel.io_uring_disabled"},
        {.init = -EACCES, .cause = "denied", .cure = "seccomp"},
        {.init = -ENOSYS, .cause = "not implemented", .cure = "Linux 5.6"},
        {.init = -EINVAL, .cause = "Invalid", .cure = "Linux 5.6"},
        {.init = -ENOMEM, .cause = "memory", .cure = "RLIMIT_MEMLOCK"},
        {.init = -EMFILE, .cause = "open files", .cure = "LimitNOFILE"},
        {.init = -EIO, .cause = "output error", .cure = "io_uring_setup(2)"},
        {.probe = -EPERM, .cause = "not permitted", .cure = "_register"},
        {.probe = -EOPNOTSUPP, .cause = "not supported", .cure = "Linux 5.6"},
        {.submit = -EPERM, .cause = "not permitted", .cure = "_enter"},
        {.submit = -ENOSYS, .cause = "not implemented", .cure = "seccomp"},
    };
    uint32_t before = io_world_descriptors();

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int error = cases[i].init + cases[i].probe + cases[i].submit;
        struct io_op op = io_world_op(&w, false, 3, 1);
        struct io *io = NULL;
        char note[256];

        broken.init = cases[i].init;
        broken.probe = cases[i].probe;
        broken.submit = cases[i].submit;
        cr_assert_eq(broken_new(IO_URING, note, &io), error, "%zu", i);
        cr_assert_null(io);
        cr_assert_not_null(strstr(note, cases[i].cause), "%s", note);
        cr_assert_null(strstr(note, "threads"), "%s", note);
        cr_assert_eq(io_world_descriptors(), before, "a ring was left open");

        cr_assert_eq(broken_new(IO_AUTO, note, &io), 0, "%zu", i);
        cr_assert_eq(strcmp(io->ops->name, "threads"), 0);
        cr_assert_not_null(strstr(note, cases[i].cause), "%s", note);
        cr_assert_not_null(strstr(note, cases[i].cure), "%s", note);
        cr_assert_not_null(strstr(note, "threads"), "%s", note);
        cr_assert_lt(strlen(note), 250u, "cut off");
        cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
        io_free(io);
    }
}

Test(choice, buffers_that_cannot_be_registered_are_a_note)
{
    const int errors[] = {-ENOMEM, -EOPNOTSUPP, -EFAULT};
    const char *says[] = {"RLIMIT_MEMLOCK", "not supported", "Bad address"};

    for (int i = 0; i < 3; i++) {
        struct io_op op = io_world_op(&w, false, 3, 1);
        struct io *io;
        char note[256];

        broken.buffers = errors[i];
        cr_assert_eq(broken_new(IO_AUTO, note, &io), 0);
        cr_assert_eq(strcmp(io->ops->name, "io_uring"), 0);
        cr_assert_not(io->registered);
        cr_assert_not_null(strstr(note, says[i]), "%s", note);
        cr_assert_lt(strlen(note), 250u, "cut off");
        cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
        io_free(io);
    }
}

Test(choice, a_failure_while_making_one_leaves_nothing)
{
    const enum io_backend backends[] = {IO_THREADS, IO_URING};
    uint32_t before = io_world_descriptors();

    for (int i = 0; i < 2; i++) {
        struct io *io = NULL;
        char note[256];
        int failures = 0, r;

        for (;; failures++) {
            broken.calls = failures;
            r = broken_new(backends[i], note, &io);
            if (r == 0)
                break;
            cr_assert(r == -ENOMEM || r == -EMFILE, "%d", r);
            cr_assert_null(io);
            cr_assert_eq(io_world_descriptors(), before);
        }
        /* threads: itself, helpers, two queues, eventfd, dup. io_uring: itself,
         * eventfd; the buffers are only a note. */
        cr_assert_eq(failures, backends[i] == IO_THREADS ? 6 : 2);
        io_free(io);
    }
}

Test(choice, fewer_threads_will_do_but_none_is_an_error)
{
    struct io_options o = {.fd = w.fd, .depth = 8, .backend = IO_THREADS, .sys = &broken_sys};
    uint32_t before = io_world_descriptors();
    struct io_op op = io_world_op(&w, false, 3, 1);
    struct io *io = NULL;
    char note[256];

    broken.threads = 0;
    cr_assert_eq(io_new(&o, note, sizeof(note), &io), -EAGAIN);
    cr_assert_null(io);
    cr_assert_eq(io_world_descriptors(), before);
    broken.threads = 2;
    cr_assert_eq(io_new(&o, note, sizeof(note), &io), 0);
    cr_assert_eq(io_world_run(io, &op), IO_BLOCK);
    io_free(io);
}

/* ---- what the system really does: in a child, since filters and limits stay */

enum {
    CHILD_OK,
    CHILD_SETUP,
    CHILD_NEW,
    CHILD_NAME,
    CHILD_REGISTERED,
    CHILD_NOTE,
    CHILD_BYTES,
};

/* In a child nothing is asserted; it tells by its exit status. */
static int child_transfers(const char *name, bool registered, const char *note_says)
{
    const struct io_window window = {w.mem, WORLD_BYTES};
    struct io_options o = {.fd = w.fd, .depth = 4, .windows = &window, .n_windows = 1};
    struct io_op op = io_world_op(&w, false, 0, WORLD_BLOCKS);
    struct io_done done;
    struct io *io;
    char note[256];
    int n = 0;

    if (io_new(&o, note, sizeof(note), &io) != 0)
        return CHILD_NEW;
    if (name && strcmp(io->ops->name, name) != 0)
        return CHILD_NAME;
    if (io->registered != registered)
        return CHILD_REGISTERED;
    if (!strstr(note, note_says))
        return CHILD_NOTE;
    memset(w.mem, 0xee, WORLD_BYTES);
    if (io_submit(io, &op, 1) != 1)
        return CHILD_BYTES;
    while (n == 0) {
        if (!io_world_readable(io->fd))
            continue;
        n = io_reap(io, &done, 1);
    }
    io_free(io);
    return done.result == WORLD_BYTES && io_world_wrong(w.mem, 0) == 0 ? CHILD_OK : CHILD_BYTES;
}

static void must_end_well(pid_t child, const char *what)
{
    int status;

    cr_assert_gt(child, 0);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status), "%s: signal %d", what, WTERMSIG(status));
    cr_assert_eq(WEXITSTATUS(status), CHILD_OK, "%s: step %d", what, WEXITSTATUS(status));
}

static bool deny(int call, int error)
{
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
    bool ok = filter && seccomp_rule_add(filter, SCMP_ACT_ERRNO((uint16_t)error), call, 0) == 0 &&
              seccomp_load(filter) == 0;

    seccomp_release(filter);
    return ok;
}

Test(choice, a_seccomp_filter_that_denies_any_part_of_io_uring)
{
    static const struct {
        const char *what;
        int call, error;
        const char *note;
    } filters[] = {
        {"setup EPERM", SCMP_SYS(io_uring_setup), EPERM, "seccomp"},
        {"setup ENOSYS", SCMP_SYS(io_uring_setup), ENOSYS, "not implemented"},
        {"enter EPERM", SCMP_SYS(io_uring_enter), EPERM, "seccomp"},
        {"enter ENOSYS", SCMP_SYS(io_uring_enter), ENOSYS, "not implemented"},
        {"register EPERM", SCMP_SYS(io_uring_register), EPERM, "seccomp"},
    };

    for (size_t i = 0; i < sizeof(filters) / sizeof(filters[0]); i++) {
        pid_t child = fork();

        if (child == 0)
            _exit(deny(filters[i].call, filters[i].error)
                      ? child_transfers("threads", false, filters[i].note)
                      : CHILD_SETUP);
        must_end_well(child, filters[i].what);
    }
}

/* root is not held to the limit, so the child becomes nobody. */
static void locked_memory_limited(rlim_t bytes, const char *name)
{
    const struct rlimit limit = {bytes, bytes};
    pid_t child = fork();

    if (child == 0) {
        if (setrlimit(RLIMIT_MEMLOCK, &limit) < 0)
            _exit(CHILD_SETUP);
        if (geteuid() == 0 && (setgid(65534) < 0 || setuid(65534) < 0))
            _exit(CHILD_SETUP);
        _exit(child_transfers(name, false, "RLIMIT_MEMLOCK"));
    }
    must_end_well(child, name ? name : "none");
}

Test(choice, too_little_locked_memory_for_an_ordinary_user)
{
    locked_memory_limited(WORLD_BYTES / 2, "io_uring"); /* for the ring, not for the buffers */
    locked_memory_limited(0, NULL); /* some kernels count the ring as well: threads, then */
}

Test(choice, an_ordinary_system_gives_io_uring_with_registered_buffers)
{
    cr_assert_eq(child_transfers("io_uring", true, ""), CHILD_OK);
}
