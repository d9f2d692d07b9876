/* SPDX-License-Identifier: Apache-2.0 */
/* Which backend, and what is to be said about it. */
#define _GNU_SOURCE
#include "daemon/spill/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "daemon/spill/io_sys.h"

enum {
    DEPTH_MAX = 1024,
};

static int dup_cloexec(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

const struct io_sys io_sys_real = {
    .calloc = calloc,
    .eventfd = eventfd,
    .dup = dup_cloexec,
    .thread_create = pthread_create,
    .preadv2 = preadv2,
    .pwritev2 = pwritev2,
    .ring_init = io_uring_queue_init_params,
    .ring_register_probe = io_uring_register_probe,
    .ring_register_eventfd = io_uring_register_eventfd,
    .ring_register_files = io_uring_register_files,
    .ring_register_buffers = io_uring_register_buffers,
    .ring_submit = io_uring_submit,
    .ring_get_events = io_uring_get_events,
};

/* ---- notes: cause and cure */

static const char *denied_why(int error)
{
    switch (-error) {
    case EPERM:
    case EACCES:
        return "allow io_uring_setup, _enter and _register in the seccomp filter, and set "
               "kernel.io_uring_disabled to 0";
    case ENOSYS:
    case EOPNOTSUPP:
    case EINVAL:
        return "needs Linux 5.6 with CONFIG_IO_URING, and a seccomp filter that lets it pass";
    case ENOMEM:
        return "raise RLIMIT_MEMLOCK (LimitMEMLOCK= of the unit)";
    case EMFILE:
    case ENFILE:
        return "raise the limit of open files (LimitNOFILE= of the unit)";
    default:
        return "see io_uring_setup(2)";
    }
}

static void note_denied(int error, bool falls_back, char *ret_note, size_t bytes)
{
    snprintf(ret_note, bytes, "io_uring cannot be used (%s)%s: %s", strerrordesc_np(-error),
             falls_back ? ", threads do the I/O at a higher cost" : "", denied_why(error));
}

static void note_buffers(int error, char *ret_note, size_t bytes)
{
    struct rlimit limit = {0};

    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (error == -ENOMEM)
        snprintf(ret_note, bytes,
                 "the pool is not registered with io_uring, transfers cost more: RLIMIT_MEMLOCK "
                 "is %llu KiB, raise it above the size of the pool (LimitMEMLOCK= of the unit)",
                 (unsigned long long)limit.rlim_cur / 1024);
    else
        snprintf(ret_note, bytes,
                 "the pool is not registered with io_uring, transfers cost more: %s, see "
                 "io_uring_register(2)",
                 strerrordesc_np(-error));
}

/* ---- */

static int uring_try(const struct io_options *o, char *ret_note, size_t note_bytes,
                     struct io **ret_io)
{
    int buffers, r = io_uring_new(o, &buffers, ret_io);

    if (r < 0)
        note_denied(r, o->backend == IO_AUTO, ret_note, note_bytes);
    else if (buffers < 0)
        note_buffers(buffers, ret_note, note_bytes);
    return r;
}

static bool options_valid(const struct io_options *o)
{
    return o->depth >= 1 && o->depth <= DEPTH_MAX && o->backend <= IO_THREADS &&
           (o->windows || !o->n_windows);
}

int io_new(const struct io_options *options, char *ret_note, size_t note_bytes, struct io **ret_io)
{
    struct io_options o = *options;
    int r;

    if (!o.sys)
        o.sys = &io_sys_real;
    if (note_bytes)
        ret_note[0] = '\0';
    if (!options_valid(&o))
        return -EINVAL;
    if (fcntl(o.fd, F_GETFD) < 0)
        return -errno;
    if (o.backend != IO_THREADS) {
        r = uring_try(&o, ret_note, note_bytes, ret_io);
        if (r == 0 || o.backend == IO_URING)
            return r;
    }
    return io_threads_new(&o, ret_io);
}

void io_free(struct io *io)
{
    if (io)
        io->ops->destroy(io);
}
