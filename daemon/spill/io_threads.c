/* SPDX-License-Identifier: Apache-2.0 */
/* The backend that works everywhere: threads with pread and pwrite. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/spill/helpers.h"
#include "daemon/spill/io_sys.h"

enum {
    THREADS_DEFAULT = 16,
};

struct threads_io {
    struct io io;
    const struct io_sys *sys;
    struct helpers *helpers;
    /*
     * Our own descriptor of the same open file: a thread that was left behind must not find another
     * file under the caller's number, and the open file, with its lock, outlives what it does.
     */
    int fd;
};

_Static_assert(sizeof(struct io_op) <= HELPERS_VALUE_BYTES, "io_op fits into a job");
_Static_assert(sizeof(struct io_done) <= HELPERS_VALUE_BYTES, "io_done fits into a result");

static struct threads_io *threads_of(struct io *io)
{
    return (struct threads_io *)io;
}

static void run(void *arg, const void *job, void *ret_result)
{
    const struct threads_io *t = arg;
    const struct io_op *op = job;
    struct iovec iov = {.iov_base = op->buf, .iov_len = op->bytes};
    int flags = op->write && op->durable ? RWF_DSYNC : 0;
    ssize_t n;

    if (op->write)
        n = t->sys->pwritev2(t->fd, &iov, 1, (off_t)op->offset, flags);
    else
        n = t->sys->preadv2(t->fd, &iov, 1, (off_t)op->offset, flags);
    *(struct io_done *)ret_result =
        (struct io_done){.cookie = op->cookie, .result = n < 0 ? -errno : n};
}

static int threads_submit(struct io *io, const struct io_op *ops, uint32_t n)
{
    return (int)helpers_submit(threads_of(io)->helpers, ops, n);
}

static int threads_reap(struct io *io, struct io_done *ret, uint32_t max)
{
    return (int)helpers_reap(threads_of(io)->helpers, ret, max);
}

/* Partner: io_threads_new(). Runs on the last thread that needs it. */
static void threads_end(void *arg)
{
    struct threads_io *t = arg;

    close(t->fd);
    free(t);
}

/* With operations in flight the process is about to end: a device that hangs must not hold it up. */
static void threads_destroy(struct io *io)
{
    struct helpers *helpers = threads_of(io)->helpers;

    helpers_free(helpers, helpers_in_flight(helpers) == 0);
}

static const struct io_ops threads_ops = {
    .name = "threads",
    .submit = threads_submit,
    .reap = threads_reap,
    .destroy = threads_destroy,
};

static uint32_t threads_wanted(const struct io_options *o)
{
    uint32_t n = o->threads ? o->threads : THREADS_DEFAULT;

    return n < o->depth ? n : o->depth;
}

int io_threads_new(const struct io_options *o, struct io **ret_io)
{
    struct threads_io *t = o->sys->calloc(1, sizeof(*t));
    struct helpers_spec spec = {
        .threads = threads_wanted(o),
        .depth = o->depth,
        .job_bytes = sizeof(struct io_op),
        .result_bytes = sizeof(struct io_done),
        .run = run,
        .end = threads_end,
        .arg = t,
        .sys = o->sys,
    };
    int r;

    if (!t)
        return -ENOMEM;
    *t = (struct threads_io){.io = {.ops = &threads_ops, .depth = o->depth}, .sys = o->sys};
    t->fd = o->sys->dup(o->fd);
    if (t->fd < 0) {
        r = -errno;
        goto err_free;
    }
    r = helpers_new(&spec, &t->helpers);
    if (r < 0)
        goto err_close;
    t->io.fd = helpers_fd(t->helpers);
    *ret_io = &t->io;
    return 0;

err_close:
    close(t->fd);
err_free:
    free(t);
    return r;
}
