/* SPDX-License-Identifier: Apache-2.0 */
/* Faults around a backend: each kind does what it says, to the operations it names, and to no other. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
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

TestSuite(fault, .init = setup, .fini = teardown, .timeout = 120);

#define for_each_variant(v) for (v = io_variants; v < io_variants + n_io_variants; v++)

static struct io *faulty(const struct io_variant *v, const char *text, uint32_t depth)
{
    struct io_fault faults[4];
    struct io *io = io_world_new(&w, v, depth), *wrapper;
    int n = io_fault_parse(text, faults, 4);

    cr_assert_gt(n, 0, "%s", text);
    cr_assert_eq(io_fault_new(io, faults, (uint32_t)n, &wrapper), 0);
    return wrapper;
}

static int64_t run(struct io *io, bool write, uint32_t block, uint32_t blocks)
{
    struct io_op op = io_world_op(&w, write, block, blocks);

    return io_world_run(io, &op);
}

/* What the file holds in `copy`. */
static void load(void)
{
    cr_assert_eq(pread(w.fd, w.copy, WORLD_BYTES, 0), (ssize_t)WORLD_BYTES);
}

static uint8_t *block_of(uint8_t *mem, uint32_t block)
{
    return mem + (size_t)block * IO_BLOCK;
}

static bool all_bytes(const uint8_t *mem, size_t n, uint8_t byte)
{
    return n == 0 || (mem[0] == byte && memcmp(mem, mem + 1, n - 1) == 0);
}

static unsigned bits_differing(const uint8_t *a, const uint8_t *b, size_t n)
{
    unsigned bits = 0;

    for (size_t i = 0; i < n; i++)
        bits += (unsigned)__builtin_popcount(a[i] ^ b[i]);
    return bits;
}

Test(fault, an_error_hits_what_it_names_and_transfers_nothing)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "write:error=ENOSPC:from=40K:to=80K:after=1:times=2", 4);

        io_world_fill(&w, 0);
        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(run(io, true, 0, 10), 10 * IO_BLOCK, "before from");
        cr_assert_eq(run(io, true, 20, 1), IO_BLOCK, "at to");
        cr_assert_eq(run(io, true, 19, 1), IO_BLOCK, "the first is skipped");
        cr_assert_eq(run(io, false, 10, 1), IO_BLOCK, "a read");
        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(run(io, true, 10, 1), -ENOSPC);
        cr_assert_eq(run(io, true, 30, 1), IO_BLOCK, "elsewhere");
        cr_assert_eq(run(io, true, 9, 2), -ENOSPC, "touches it");
        load();
        cr_assert_neq(block_of(w.copy, 10)[0], 0x55);
        cr_assert_eq(run(io, true, 10, 1), IO_BLOCK, "only twice");
        io_free(io);
    }
}

Test(fault, the_first_fault_that_hits_counts)
{
    struct io *io = faulty(
        &io_variants[0], "any:error=EIO:after=1:times=1,read:error=EINTR:times=1,any:short=4K", 4);

    cr_assert_eq(run(io, false, 0, 2), -EINTR);
    cr_assert_eq(run(io, false, 0, 2), -EIO);
    cr_assert_eq(run(io, false, 0, 2), IO_BLOCK);
    cr_assert_eq(run(io, true, 0, 2), IO_BLOCK);
    io_free(io);
}

Test(fault, short_transfers_are_short)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "any:short=8K", 4), *none = faulty(v, "any:short=0", 4);

        io_world_fill(&w, 0);
        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(run(io, true, 4, 4), 2 * IO_BLOCK);
        cr_assert_eq(run(none, true, 8, 4), 0);
        load();
        cr_assert(all_bytes(block_of(w.copy, 4), 2 * IO_BLOCK, 0x55));
        cr_assert_eq(io_world_wrong(w.copy, 0), 2u);
        cr_assert_eq(run(io, false, 12, 4), 2 * IO_BLOCK);
        cr_assert_eq(run(none, false, 20, 4), 0);
        cr_assert_eq(memcmp(block_of(w.mem, 12), block_of(w.copy, 12), 2 * IO_BLOCK), 0);
        cr_assert(all_bytes(block_of(w.mem, 14), 10 * IO_BLOCK, 0x55));
        cr_assert_eq(run(io, false, 30, 1), IO_BLOCK, "short enough already");
        io_free(io);
        io_free(none);
    }
}

Test(fault, a_torn_write_reports_all_and_writes_its_beginning)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "write:torn=4K:to=64K,write:torn=0", 4);

        io_world_fill(&w, 0);
        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(run(io, true, 4, 4), 4 * IO_BLOCK);
        cr_assert_eq(run(io, true, 100, 2), 2 * IO_BLOCK);
        load();
        cr_assert(all_bytes(block_of(w.copy, 4), IO_BLOCK, 0x55));
        cr_assert_eq(io_world_wrong(w.copy, 0), 1u, "%s", v->name);
        io_free(io);
    }
}

Test(fault, a_flip_is_one_bit)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "any:flip", 4);

        io_world_fill(&w, 0);
        cr_assert_eq(run(io, false, 4, 4), 4 * IO_BLOCK);
        load();
        cr_assert_eq(io_world_wrong(w.copy, 0), 0u, "the file stays");
        cr_assert_eq(bits_differing(block_of(w.mem, 4), block_of(w.copy, 4), 4 * IO_BLOCK), 1u);

        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(run(io, true, 8, 4), 4 * IO_BLOCK);
        cr_assert(all_bytes(w.mem, WORLD_BYTES, 0x55), "the caller's memory stays");
        load();
        cr_assert_eq(bits_differing(block_of(w.mem, 8), block_of(w.copy, 8), 4 * IO_BLOCK), 1u);
        cr_assert_eq(io_world_wrong(w.copy, 0), 4u);
        io_free(io);
    }
}

/* Waits until the file has it, since the completion will not tell. */
static void await_in_file(struct io *io, uint32_t block, uint8_t byte)
{
    struct io_done done;

    do {
        cr_assert_eq(io_reap(io, &done, 1), 0);
        load();
    } while (!all_bytes(block_of(w.copy, block), IO_BLOCK, byte));
}

/* Readable once more than there are completions it may be. */
static void must_fall_silent(struct io *io)
{
    struct io_done done;

    for (int i = 0; io_world_readable(io->fd); i++) {
        cr_assert_lt(i, 3);
        cr_assert_eq(io_reap(io, &done, 1), 0);
    }
}

Test(fault, what_hangs_is_carried_out_and_completes_when_it_is_let_go)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "write:hang:times=2,write:hang:after=1", 3);
        struct io_op ops[4] = {io_world_op(&w, true, 1, 1), io_world_op(&w, true, 2, 1),
                               io_world_op(&w, false, 3, 1), io_world_op(&w, false, 4, 1)};
        struct io_done done[4];
        uint32_t n = 0;

        io_world_fill(&w, 0);
        memset(w.mem, 0x55, WORLD_BYTES);
        cr_assert_eq(io_submit(io, ops, 2), 2);
        await_in_file(io, 1, 0x55);
        await_in_file(io, 2, 0x55);
        cr_assert_eq(io_submit(io, ops + 2, 2), 1, "what hangs is in flight");
        cr_assert_eq(io_world_await(io, done, 4), 1u);
        cr_assert_eq(done[0].cookie, 3u);
        must_fall_silent(io);
        io_fault_release(io);
        cr_assert(io_world_readable(io->fd));
        while (n < 2) {
            uint32_t got = io_world_await(io, done, 1);

            cr_assert_eq(done[0].result, IO_BLOCK);
            n += got;
        }
        must_fall_silent(io);
        cr_assert_eq(run(io, true, 1, 1), IO_BLOCK, "no more hanging");
        io_free(io);
    }
}

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Later than asked for is the machine's right, earlier is not. */
Test(fault, a_delay_delays)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "read:delay=40:to=64K,read:delay=20", 4);
        struct io_op ops[2] = {io_world_op(&w, false, 1, 1), io_world_op(&w, false, 100, 1)};
        uint64_t begin = now_ms();
        struct io_done done;

        cr_assert_eq(run(io, true, 1, 1), IO_BLOCK, "a write is not late");
        cr_assert_eq(io_submit(io, ops, 2), 2);
        for (int i = 0; i < 2; i++) {
            cr_assert_eq(io_world_await(io, &done, 1), 1u);
            cr_assert_eq(done.result, IO_BLOCK);
            cr_assert_geq(now_ms() + 1 - begin, done.cookie == 1 ? 40u : 20u);
        }
        io_free(io);
    }
}

Test(fault, refusals_take_nothing_and_lose_nothing)
{
    const struct io_variant *v;

    for_each_variant(v)
    {
        struct io *io = faulty(v, "read:refused=EAGAIN:after=2:times=3", 8);
        struct io_op ops[6];
        struct io_done done[6];
        unsigned seen = 0;
        uint32_t n = 0;

        for (uint32_t i = 0; i < 6; i++)
            ops[i] = io_world_op(&w, false, i, 1);
        cr_assert_eq(io_submit(io, ops, 6), 2);
        for (int i = 0; i < 3; i++)
            cr_assert_eq(io_submit(io, ops + 2, 4), -EAGAIN, "%s: %d", v->name, i);
        cr_assert_eq(io_submit(io, ops + 2, 4), 4);
        while (n < 6) {
            uint32_t got = io_world_await(io, done, 6);

            for (uint32_t i = 0; i < got; i++) {
                cr_assert_eq(done[i].result, IO_BLOCK);
                seen += 1u << (4 * done[i].cookie);
            }
            n += got;
        }
        cr_assert_eq(seen, 0x111111u);
        io_free(io);
    }
}

Test(fault, a_wrapper_ends_with_what_hangs_or_is_late)
{
    const struct io_variant *v;
    uint32_t before = io_world_descriptors();

    for_each_variant(v)
    {
        struct io *io = faulty(v, "read:hang:to=64K,read:delay=100000", 4);
        struct io_op ops[3] = {io_world_op(&w, false, 1, 1), io_world_op(&w, false, 2, 1),
                               io_world_op(&w, false, 100, 1)};
        struct io_done done;

        cr_assert_eq(io_submit(io, ops, 3), 3);
        for (int taken = 0; taken < 3; taken++) { /* by the wrapper, from the backend */
            uint8_t *first = block_of(w.mem, taken < 2 ? (uint32_t)taken + 1 : 100);

            while (all_bytes(first, IO_BLOCK, 0xee) || io_world_readable(io->fd))
                cr_assert_eq(io_reap(io, &done, 1), 0);
        }
        io_free(io);
        memset(w.mem, 0xee, WORLD_BYTES);
    }
    while (io_world_descriptors() > before) /* a thread may only just be back */
        usleep(1000);
}

Test(fault, wrappers_nest)
{
    struct io *inner = faulty(&io_variants[0], "read:hang:times=1", 4), *io;
    struct io_fault faults[1];
    struct io_op op = io_world_op(&w, false, 1, 1);
    struct io_done done;

    cr_assert_eq(io_fault_parse("read:short=4K", faults, 1), 1);
    cr_assert_eq(io_fault_new(inner, faults, 1, &io), 0);
    cr_assert_eq(io_submit(io, &op, 1), 1);
    while (all_bytes(block_of(w.mem, 1), IO_BLOCK, 0xee))
        cr_assert_eq(io_reap(io, &done, 1), 0);
    io_fault_release(io);
    cr_assert_eq(io_world_await(io, &done, 1), 1u);
    cr_assert_eq(run(io, false, 1, 2), IO_BLOCK);
    io_free(io);
}

Test(fault, what_makes_no_sense_is_refused_and_the_backend_stays_the_callers)
{
    struct io *io = io_world_new(&w, &io_variants[0], 4), *wrapper = NULL;
    const struct io_fault bad[] = {
        {.kind = IO_FAULT_HANG},
        {.kind = IO_FAULT_ERROR, .reads = true},
        {.kind = IO_FAULT_ERROR, .reads = true, .error = EIO},
        {.kind = IO_FAULT_REFUSED, .reads = true, .error = EIO},
        {.kind = IO_FAULT_SHORT, .reads = true, .bytes = 100},
        {.kind = IO_FAULT_TORN, .reads = true, .bytes = 4097},
        {.kind = IO_FAULT_HANG, .reads = true, .from = 4096, .to = 4096},
        {.kind = (enum io_fault_kind)7, .reads = true},
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        cr_assert_eq(io_fault_new(io, &bad[i], 1, &wrapper), -EINVAL, "%zu", i);
        cr_assert_null(wrapper);
    }
    io_fault_release(io); /* no wrapper: nothing */
    cr_assert_eq(run(io, false, 1, 2), 2 * IO_BLOCK);
    io_free(io);
}

/* ---- the text form */

Test(parse, the_examples)
{
    struct io_fault f[8];

    cr_assert_eq(io_fault_parse("write:error=EIO:after=10:times=3,read:hang:from=1M:to=2M", f, 8),
                 2);
    cr_assert(f[0].writes && !f[0].reads && f[0].kind == IO_FAULT_ERROR && f[0].error == -EIO);
    cr_assert(f[0].after == 10 && f[0].times == 3 && f[0].to == 0);
    cr_assert(f[1].reads && !f[1].writes && f[1].kind == IO_FAULT_HANG);
    cr_assert(f[1].from == 1 << 20 && f[1].to == 2 << 20 && f[1].times == 0);

    cr_assert_eq(io_fault_parse("any:delay=250,any:short=8192,write:torn=0,read:flip,"
                                "any:refused=EAGAIN:to=3T,any:error=ETIMEDOUT:from=5G:to=6G",
                                f, 8),
                 6);
    cr_assert(f[0].kind == IO_FAULT_DELAY && f[0].delay_ms == 250 && f[0].reads && f[0].writes);
    cr_assert(f[1].kind == IO_FAULT_SHORT && f[1].bytes == 8192);
    cr_assert(f[2].kind == IO_FAULT_TORN && f[2].bytes == 0);
    cr_assert(f[3].kind == IO_FAULT_FLIP);
    cr_assert(f[4].kind == IO_FAULT_REFUSED && f[4].error == -EAGAIN && f[4].to == 3ull << 40);
    cr_assert(f[5].error == -ETIMEDOUT && f[5].from == 5ull << 30);
    cr_assert_eq(io_fault_parse("", f, 0), 0);
}

Test(parse, anything_else_is_an_error)
{
    static const char *const bad[] = {
        ",",
        "read",
        "read:",
        ":hang",
        "hang",
        "reads:hang",
        "read:hang,",
        ",read:hang",
        "read:hang,,read:hang",
        "read:hung",
        "read:hang=1",
        "read:flip=",
        "read:error",
        "read:error=",
        "read:error=5",
        "read:error=EWHAT",
        "read:error=eio",
        "read:short",
        "read:short=100",
        "read:short=4097",
        "read:short=4k",
        "read:short=4KB",
        "read:short=-4096",
        "read:short=4G",
        "read:torn=+0",
        "read:torn=0x1000",
        "read:delay=",
        "read:delay=1.5",
        "read:delay= 1",
        "read:hang:",
        "read:hang:after",
        "read:hang:after=",
        "read:hang:after=x",
        "read:hang:after=1:after=1",
        "read:hang:until=3",
        "read:hang:times=4294967296",
        "read:hang:from=2M:to=1M",
        "read:hang:from=1M:to=1M",
        "read:hang:to=0",
        "read:hang:from=1M",
        "read:hang:from=16777216T",
        "read:hang:to=99999999999999999999",
        "read:hang:hang",
        " read:hang",
        "read:hang ",
        "read:hang;write:hang",
    };
    struct io_fault f[4], untouched[4];

    memset(untouched, 0x5a, sizeof(untouched));
    memcpy(f, untouched, sizeof(f));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        cr_assert_eq(io_fault_parse(bad[i], f, 4), -EINVAL, "\"%s\"", bad[i]);
    cr_assert_eq(io_fault_parse("read:hang,read:hang,read:hang,read:hang,read:hang", f, 4),
                 -EINVAL);
    cr_assert_eq(io_fault_parse("read:hang,read:hung", f, 4), -EINVAL);
    cr_assert_eq(memcmp(f, untouched, sizeof(f)), 0, "nothing is written on failure");
    cr_assert_eq(io_fault_parse("read:hang,read:hang,read:hang,read:hang", f, 4), 4);
}
