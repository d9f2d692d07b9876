/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading and writing one open file without waiting: the small interface that io_uring (io_uring.c), a
 * pool of threads with pread and pwrite (io_threads.c) and fault injection around either (io_fault.c)
 * share.
 *
 * An operation that was accepted owns its buffer until its completion was reaped: cancelling is no
 * fence, so there is none. Completions come in any order. The thread that called io_new() submits and
 * reaps; `fd` becomes readable when completions wait (and may once be, although none is left).
 *
 * A backend does not repair anything: short transfers, -EAGAIN and -EINTR are handed on as they come
 * (piece.c deals with them for all backends alike).
 */
#ifndef KVD_SPILL_IO_H
#define KVD_SPILL_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Everything is a multiple of this: address, offset, length. */
#define IO_BLOCK 4096u

struct io_op {
    uint64_t cookie; /* comes back with the completion */
    void *buf;
    uint64_t offset;
    uint32_t bytes;
    bool write;
    bool durable; /* write: it has reached the medium when it completes (RWF_DSYNC) */
};

struct io_done {
    uint64_t cookie;
    int64_t result; /* bytes transferred, perhaps fewer than asked for, or a negative errno */
};

struct io;

struct io_ops {
    const char *name; /* "io_uring", "threads" */
    /* Takes up to n operations; returns how many, 0 when `depth` are in flight, or a negative errno when
     * none could be taken. */
    int (*submit)(struct io *io, const struct io_op *ops, uint32_t n);
    /* Up to max completions, never waits. */
    int (*reap)(struct io *io, struct io_done *ret, uint32_t max);
    /* Everything in flight has been reaped, unless the process is about to end. */
    void (*destroy)(struct io *io);
};

/* The head of every backend's own struct. */
struct io {
    const struct io_ops *ops;
    int fd; /* for epoll, EPOLLIN */
    uint32_t depth;
    bool registered; /* transfers within the windows use buffers registered with the kernel */
};

enum io_backend {
    IO_AUTO, /* io_uring, else threads */
    IO_URING,
    IO_THREADS,
};

/* Memory that most transfers lie in. May be of any size: the backend cuts it to what the kernel takes
 * (1 GiB a buffer), and transfers that lie across a cut, or outside, go unregistered. */
struct io_window {
    void *addr;
    size_t bytes;
};

/* As in liburing and libc (io_sys.h); NULL stands for the real ones. Tests make them fail. */
struct io_sys;

struct io_options {
    int fd;         /* opened by the caller, who also closes it after io_free() */
    uint32_t depth; /* operations in flight, 1 to 1,024 */
    enum io_backend backend;
    uint32_t threads; /* of the thread backend; 0: as many as depth, at most 16 */
    const struct io_window *windows;
    uint32_t n_windows; /* 0: no registered buffers */
    const struct io_sys *sys;
};

/*
 * ret_note (>= 256 bytes) gets a sentence for the log when something is not as good as it could be, with
 * cause and cure: io_uring denied (EPERM: seccomp, kernel.io_uring_disabled; ENOSYS: kernel), buffers not
 * registered (ENOMEM: RLIMIT_MEMLOCK), else "". With IO_AUTO only lack of memory, descriptors or threads
 * is an error; -EBADF and -EINVAL are about the options.
 */
int io_new(const struct io_options *options, char *ret_note, size_t note_bytes, struct io **ret_io);

/* Never waits for operations in flight: their buffers stay theirs, until the process ends. NULL is fine. */
void io_free(struct io *io);

static inline int io_submit(struct io *io, const struct io_op *ops, uint32_t n)
{
    return io->ops->submit(io, ops, n);
}

static inline int io_reap(struct io *io, struct io_done *ret, uint32_t max)
{
    return io->ops->reap(io, ret, max);
}

/* ---- io_fault.c: a wrapper that makes things go wrong. Owns `inner`, unless making it fails. */

enum io_fault_kind {
    IO_FAULT_ERROR,   /* completes with `error`, nothing is transferred */
    IO_FAULT_SHORT,   /* transfers and reports `bytes` only (a multiple of 4,096, or 0) */
    IO_FAULT_TORN,    /* writes `bytes` only and reports all */
    IO_FAULT_FLIP,    /* flips one bit of what is read, or of a copy of what is written */
    IO_FAULT_HANG,    /* is carried out, but completes only after io_fault_release() */
    IO_FAULT_DELAY,   /* completes `delay_ms` late */
    IO_FAULT_REFUSED, /* submit answers `error` */
};

struct io_fault {
    enum io_fault_kind kind;
    bool reads, writes;    /* which operations */
    uint64_t from, to;     /* of the file: only those that touch [from, to); to 0: all */
    uint32_t after, times; /* skip so many of them, then hit so many (0: all) */
    int error;             /* negative errno */
    uint32_t bytes;
    uint32_t delay_ms;
};

/* Per operation, the first of the faults that hits it counts; those after it do not see it. */
int io_fault_new(struct io *inner, const struct io_fault *faults, uint32_t n, struct io **ret_io);

/* Lets go of what hangs, and no more hanging from now on. Of anything but a wrapper: nothing. */
void io_fault_release(struct io *io);

/*
 * "write:error=EIO:after=10:times=3,read:hang:from=1M:to=2M" -> faults, for test programs:
 *   read|write|any : error=NAME|short=BYTES|torn=BYTES|flip|hang|delay=MS|refused=NAME
 *   [:from=BYTES][:to=BYTES][:after=N][:times=N]
 * BYTES take K, M, G, T; `from` needs `to`. Returns how many (none for ""), or -EINVAL.
 */
int io_fault_parse(const char *text, struct io_fault *ret, uint32_t max);

#endif
