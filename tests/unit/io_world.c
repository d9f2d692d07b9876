/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "tests/unit/io_world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

static uint8_t *memory(void)
{
    void *p = mmap(NULL, WORLD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    cr_assert_neq(p, MAP_FAILED);
    memset(p, 0xee, WORLD_BYTES);
    return p;
}

void io_world_open(struct io_world *w)
{
    snprintf(w->dir, sizeof(w->dir), "/tmp/kvd-test-io-XXXXXX");
    cr_assert_not_null(mkdtemp(w->dir));
    snprintf(w->path, sizeof(w->path), "%s/file", w->dir);
    w->fd = open(w->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0666);
    if (w->fd < 0 && errno == EINVAL)
        w->fd = open(w->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    cr_assert_geq(w->fd, 0);
    w->mem = memory();
    w->copy = memory();
    io_world_fill(w, 0);
}

void io_world_close(struct io_world *w)
{
    cr_assert_eq(unlink(w->path), 0);
    cr_assert_eq(rmdir(w->dir), 0);
    close(w->fd);
    munmap(w->mem, WORLD_BYTES);
    munmap(w->copy, WORLD_BYTES);
}

void io_world_pattern(uint8_t *block, uint32_t n, uint32_t seed)
{
    uint64_t x = ((uint64_t)seed << 32 | n) * UINT64_C(0x9e3779b97f4a7c15) + 1;

    for (uint32_t i = 0; i < IO_BLOCK; i += sizeof(x)) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(block + i, &x, sizeof(x));
    }
}

void io_world_fill(const struct io_world *w, uint32_t seed)
{
    for (uint32_t n = 0; n < WORLD_BLOCKS; n++)
        io_world_pattern(w->copy + (size_t)n * IO_BLOCK, n, seed);
    cr_assert_eq(pwrite(w->fd, w->copy, WORLD_BYTES, 0), (ssize_t)WORLD_BYTES);
}

uint32_t io_world_wrong(const uint8_t *mem, uint32_t seed)
{
    uint8_t block[IO_BLOCK];
    uint32_t wrong = 0;

    for (uint32_t n = 0; n < WORLD_BLOCKS; n++) {
        io_world_pattern(block, n, seed);
        wrong += memcmp(block, mem + (size_t)n * IO_BLOCK, IO_BLOCK) != 0;
    }
    return wrong;
}

/* ---- the variants */

/* A kernel that knows none of the newer flags. */
static int old_ring_init(unsigned entries, struct io_uring *ring, struct io_uring_params *p)
{
    return p->flags ? -EINVAL : io_uring_queue_init_params(entries, ring, p);
}

static int no_files(struct io_uring *ring, const int *fds, unsigned n)
{
    (void)ring, (void)fds, (void)n;
    return -EMFILE;
}

#define RING_SYS(...)                                                                              \
    {                                                                                              \
        .calloc = calloc, .eventfd = eventfd, .ring_register_probe = io_uring_register_probe,      \
        .ring_register_eventfd = io_uring_register_eventfd,                                        \
        .ring_register_buffers = io_uring_register_buffers, .ring_submit = io_uring_submit,        \
        .ring_get_events = io_uring_get_events, __VA_ARGS__                                        \
    }

static const struct io_sys old_kernel =
    RING_SYS(.ring_init = old_ring_init, .ring_register_files = io_uring_register_files);
static const struct io_sys unregistered =
    RING_SYS(.ring_init = io_uring_queue_init_params, .ring_register_files = no_files);

const struct io_variant io_variants[] = {
    {"io_uring", IO_URING, .windows = true},
    {"io_uring of an old kernel", IO_URING, .sys = &old_kernel, .windows = true},
    {"io_uring with nothing registered", IO_URING, .sys = &unregistered},
    {"threads", IO_THREADS, .threads = 0},
    {"one thread", IO_THREADS, .threads = 1},
    {"a wrapper around io_uring", IO_URING, .windows = true, .wrapped = true},
    {"a wrapper around threads", IO_THREADS, .threads = 3, .wrapped = true},
};
const uint32_t n_io_variants = sizeof(io_variants) / sizeof(io_variants[0]);

struct io *io_world_new(const struct io_world *w, const struct io_variant *v, uint32_t depth)
{
    /* The second half first: the backend sorts. */
    const struct io_window windows[] = {{w->mem + WORLD_BYTES / 2, WORLD_BYTES / 2},
                                        {w->mem, WORLD_BYTES / 2}};
    const struct io_options o = {
        .fd = w->fd,
        .depth = depth,
        .backend = v->backend,
        .threads = v->threads,
        .windows = windows,
        .n_windows = v->windows ? 2 : 0,
        .sys = v->sys,
    };
    struct io *io, *wrapper;
    char note[256];

    cr_assert_eq(io_new(&o, note, sizeof(note), &io), 0, "%s: %s", v->name, note);
    cr_assert_eq(note[0], '\0', "%s: %s", v->name, note);
    cr_assert_eq(io->registered, v->windows, "%s", v->name);
    cr_assert_eq(strcmp(io->ops->name, v->backend == IO_URING ? "io_uring" : "threads"), 0);
    if (!v->wrapped)
        return io;
    cr_assert_eq(io_fault_new(io, NULL, 0, &wrapper), 0);
    return wrapper;
}

/* ---- operations */

struct io_op io_world_op(const struct io_world *w, bool write, uint32_t block, uint32_t blocks)
{
    return (struct io_op){
        .cookie = block,
        .buf = w->mem + (size_t)(block % WORLD_BLOCKS) * IO_BLOCK,
        .offset = (uint64_t)block * IO_BLOCK,
        .bytes = blocks * IO_BLOCK,
        .write = write,
    };
}

bool io_world_readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, 0) == 1;
}

uint32_t io_world_await(struct io *io, struct io_done *ret, uint32_t max)
{
    struct pollfd p = {.fd = io->fd, .events = POLLIN};
    int r;

    do {
        do
            r = poll(&p, 1, 60000);
        while (r < 0 && errno == EINTR);
        cr_assert_eq(r, 1, "no completion shows");
        r = io_reap(io, ret, max);
    } while (r == 0);
    cr_assert_gt(r, 0);
    cr_assert_leq((uint32_t)r, max);
    return (uint32_t)r;
}

int64_t io_world_run(struct io *io, const struct io_op *op)
{
    struct io_done done;

    cr_assert_eq(io_submit(io, op, 1), 1);
    cr_assert_eq(io_world_await(io, &done, 1), 1u);
    cr_assert_eq(done.cookie, op->cookie);
    return done.result;
}

uint32_t io_world_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t n = 0;

    cr_assert_not_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}
