/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The io_uring backend. Nothing is allocated or searched for per operation: the cookie travels as
 * user_data, and which registered buffer a transfer lies in is computed.
 *
 * DEFER_TASKRUN: completions are finished only when this thread enters the kernel for them, in one
 * go and without interrupting it. TASKRUN_FLAG tells that some wait; without it, looking into the
 * completion ring would never show them.
 *
 * The ring's own descriptor does not do for epoll: a completion that is deferred so wakes nobody who
 * polls the ring (seen on 6.18: readable when asked, but no wake-up), only an eventfd registered with
 * it. So that is `fd`. It counts announcements, not completions: reaping clears it, and writes to it
 * again when something was left.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/spill/io_sys.h"

enum {
    BUFFER_SHIFT = 30,                /* a registered buffer is 1 GiB at most */
    BUFFERS_MAX = 1 << 14,            /* the kernel's limit */
    OPERATIONS = IORING_OP_WRITE + 1, /* that we ask about */
    RING_FLAGS = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                 IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_SUBMIT_ALL,
};

/* A window as registered: all buffers but its last are of full size. */
struct span {
    uintptr_t addr;
    uint64_t bytes;
    uint32_t first; /* buffer */
};

struct uring {
    struct io io;
    const struct io_sys *sys;
    struct io_uring ring;
    int fd; /* the file's; io.fd is the eventfd */
    bool fixed_file;
    uint32_t in_flight;
    uint32_t n_spans;
    struct span spans[]; /* by address */
};

static struct uring *uring_of(struct io *io)
{
    return (struct uring *)io;
}

/* ---- submitting */

/* The registered buffer that all of the transfer lies in, or -1. */
static int buffer_find(const struct uring *u, const struct io_op *op)
{
    uintptr_t at = (uintptr_t)op->buf;
    uint32_t lo = 0, hi = u->n_spans;
    const struct span *s;
    uint64_t from;

    while (lo < hi) { /* the first that begins behind `at` */
        uint32_t mid = (lo + hi) / 2;

        if (u->spans[mid].addr <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == 0 || op->bytes == 0)
        return -1;
    s = &u->spans[lo - 1];
    from = at - s->addr;
    if (from >= s->bytes || op->bytes > s->bytes - from ||
        from >> BUFFER_SHIFT != (from + op->bytes - 1) >> BUFFER_SHIFT)
        return -1;
    return (int)(s->first + (from >> BUFFER_SHIFT));
}

static void prepare(const struct uring *u, struct io_uring_sqe *sqe, const struct io_op *op)
{
    int fd = u->fixed_file ? 0 : u->fd, buffer = buffer_find(u, op);

    if (op->write && buffer >= 0)
        io_uring_prep_write_fixed(sqe, fd, op->buf, op->bytes, op->offset, buffer);
    else if (op->write)
        io_uring_prep_write(sqe, fd, op->buf, op->bytes, op->offset);
    else if (buffer >= 0)
        io_uring_prep_read_fixed(sqe, fd, op->buf, op->bytes, op->offset, buffer);
    else
        io_uring_prep_read(sqe, fd, op->buf, op->bytes, op->offset);
    if (op->write && op->durable)
        sqe->rw_flags = RWF_DSYNC;
    if (u->fixed_file)
        sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = op->cookie;
}

/*
 * Entries that the kernel did not take are taken back: it looks at them only inside our own calls,
 * so they can be. What it took is told by its head, whatever the call answered.
 */
static int submit_all_or_take_back(struct uring *u, uint32_t n)
{
    struct io_uring_sq *sq = &u->ring.sq;
    unsigned before = IO_URING_READ_ONCE(*sq->khead), after;
    int r = u->sys->ring_submit(&u->ring);
    uint32_t taken;

    after = io_uring_smp_load_acquire(sq->khead);
    taken = after - before;
    if (taken < n) {
        sq->sqe_head = sq->sqe_tail = after;
        io_uring_smp_store_release(sq->ktail, after);
    }
    u->in_flight += taken;
    if (taken)
        return (int)taken;
    return r < 0 ? r : -EAGAIN;
}

static int uring_submit(struct io *io, const struct io_op *ops, uint32_t n)
{
    struct uring *u = uring_of(io);
    uint32_t room = io->depth - u->in_flight;

    n = n < room ? n : room;
    if (!n)
        return 0;
    for (uint32_t i = 0; i < n; i++) /* the ring has `depth` entries, and is empty */
        prepare(u, io_uring_get_sqe(&u->ring), &ops[i]);
    return submit_all_or_take_back(u, n);
}

/* ---- reaping */

static uint32_t take(struct uring *u, struct io_done *ret, uint32_t max)
{
    struct io_uring_cqe *cqe;
    unsigned head;
    uint32_t n = 0;

    io_uring_for_each_cqe(&u->ring, head, cqe)
    {
        if (n == max)
            break;
        ret[n++] = (struct io_done){.cookie = cqe->user_data, .result = cqe->res};
    }
    io_uring_cq_advance(&u->ring, n);
    u->in_flight -= n;
    return n;
}

static bool kernel_has_more(const struct uring *u)
{
    return IO_URING_READ_ONCE(*u->ring.sq.kflags) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW);
}

static uint32_t gather(struct uring *u, struct io_done *ret, uint32_t max)
{
    uint32_t n = take(u, ret, max);

    while (n < max && kernel_has_more(u)) {
        uint32_t before = n;

        if (u->sys->ring_get_events(&u->ring) == 0)
            n += take(u, ret + n, max - n);
        if (n == before)
            break;
    }
    return n;
}

/*
 * Finishing completions announces them once more, so the eventfd is cleared after that. The second
 * look is for what came before it was cleared; what comes later announces itself.
 */
static int uring_reap(struct io *io, struct io_done *ret, uint32_t max)
{
    struct uring *u = uring_of(io);
    uint32_t n = gather(u, ret, max);
    eventfd_t ignored;

    eventfd_read(io->fd, &ignored);
    n += gather(u, ret + n, max - n);
    if (io_uring_cq_ready(&u->ring) || kernel_has_more(u))
        eventfd_write(io->fd, 1);
    return (int)n;
}

/* ---- from beginning to end */

/*
 * Partner: io_uring_new(). Closing the ring lets go of the file (and the lock on it) and of the
 * buffers some time later; unregistering does it now. With operations in flight it might wait for
 * them, so it is left to the kernel then.
 */
static void uring_destroy(struct io *io)
{
    struct uring *u = uring_of(io);

    if (!u->in_flight && u->fixed_file)
        io_uring_unregister_files(&u->ring);
    if (!u->in_flight && io->registered)
        io_uring_unregister_buffers(&u->ring);
    io_uring_queue_exit(&u->ring);
    close(io->fd);
    free(u);
}

static const struct io_ops uring_ops = {
    .name = "io_uring",
    .submit = uring_submit,
    .reap = uring_reap,
    .destroy = uring_destroy,
};

static int ring_init(struct uring *u)
{
    struct io_uring_params p = {.flags = RING_FLAGS};
    int r = u->sys->ring_init(u->io.depth, &u->ring, &p);

    if (r != -EINVAL)
        return r;
    p = (struct io_uring_params){0}; /* before Linux 6.1 */
    return u->sys->ring_init(u->io.depth, &u->ring, &p);
}

static int ring_knows_operations(struct uring *u)
{
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                 IORING_OP_WRITE_FIXED};
    union {
        struct io_uring_probe probe;
        char room[sizeof(struct io_uring_probe) + OPERATIONS * sizeof(struct io_uring_probe_op)];
    } known = {.room = {0}};
    int r = u->sys->ring_register_probe(&u->ring, &known.probe, OPERATIONS);

    for (size_t i = 0; r == 0 && i < sizeof(needed) / sizeof(needed[0]); i++)
        if (!io_uring_opcode_supported(&known.probe, needed[i]))
            r = -EOPNOTSUPP;
    return r;
}

/* Some sandboxes let a ring be made, but not be used. */
static int ring_works(struct uring *u)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    struct io_done done;
    int r;

    io_uring_prep_nop(sqe);
    sqe->user_data = 0;
    r = submit_all_or_take_back(u, 1);
    if (r < 0)
        return r;
    /* A NOP is done when it has been submitted. */
    return uring_reap(&u->io, &done, 1) == 1 && done.result == 0 ? 0 : -EOPNOTSUPP;
}

static int by_address(const void *a, const void *b)
{
    const struct span *x = a, *y = b;

    return (x->addr > y->addr) - (x->addr < y->addr);
}

/* As many whole buffers as the kernel takes; returns how many. */
static uint32_t spans_make(struct uring *u, const struct io_options *o)
{
    uint64_t n = 0, room;

    for (uint32_t i = 0; i < o->n_windows; i++) {
        struct span s = {.addr = (uintptr_t)o->windows[i].addr, .bytes = o->windows[i].bytes};

        room = (uint64_t)(BUFFERS_MAX - n) << BUFFER_SHIFT;
        s.bytes = s.bytes < room ? s.bytes : room;
        if (!s.bytes)
            continue;
        s.first = (uint32_t)n;
        n += ((s.bytes - 1) >> BUFFER_SHIFT) + 1;
        u->spans[u->n_spans++] = s;
    }
    return (uint32_t)n;
}

static void span_cut(const struct span *s, struct iovec *iov)
{
    const uint64_t full = UINT64_C(1) << BUFFER_SHIFT;

    iov += s->first;
    for (uint64_t at = 0; at < s->bytes; at += full)
        *iov++ = (struct iovec){
            .iov_base = (void *)(s->addr + at),
            .iov_len = s->bytes - at < full ? s->bytes - at : full,
        };
}

static int buffers_register(struct uring *u, const struct io_options *o)
{
    uint32_t n = spans_make(u, o);
    struct iovec *iov;
    int r;

    if (!n)
        return 0;
    iov = o->sys->calloc(n, sizeof(*iov));
    if (!iov) {
        r = -ENOBUFS; /* not the kernel's ENOMEM, which is a limit */
        goto out;
    }
    for (uint32_t i = 0; i < u->n_spans; i++)
        span_cut(&u->spans[i], iov);
    qsort(u->spans, u->n_spans, sizeof(u->spans[0]), by_address);
    r = o->sys->ring_register_buffers(&u->ring, iov, n);
    free(iov);
out:
    u->io.registered = r == 0;
    if (r < 0)
        u->n_spans = 0;
    return r;
}

int io_uring_new(const struct io_options *o, int *ret_buffers, struct io **ret_io)
{
    struct uring *u = o->sys->calloc(1, sizeof(*u) + o->n_windows * sizeof(u->spans[0]));
    int r;

    if (!u)
        return -ENOMEM;
    u->io = (struct io){.ops = &uring_ops, .depth = o->depth};
    u->sys = o->sys;
    u->fd = o->fd;
    u->io.fd = o->sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (u->io.fd < 0) {
        r = -errno;
        goto err_free;
    }
    r = ring_init(u);
    if (r < 0)
        goto err_close;
    r = ring_knows_operations(u);
    if (r == 0)
        r = o->sys->ring_register_eventfd(&u->ring, u->io.fd);
    if (r == 0)
        r = ring_works(u);
    if (r < 0)
        goto err_ring;
    u->fixed_file = o->sys->ring_register_files(&u->ring, &o->fd, 1) == 0;
    *ret_buffers = buffers_register(u, o);
    *ret_io = &u->io;
    return 0;

err_ring:
    io_uring_queue_exit(&u->ring);
err_close:
    close(u->io.fd);
err_free:
    free(u);
    return r;
}
