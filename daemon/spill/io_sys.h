/* SPDX-License-Identifier: Apache-2.0 */
/* What the backends ask of libc and liburing, so that tests can make it fail. Every member is set;
 * answers are theirs: -1 and errno, or a negative errno from liburing. */
#ifndef KVD_SPILL_IO_SYS_H
#define KVD_SPILL_IO_SYS_H

#include <liburing.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "daemon/spill/io.h"

struct io_sys {
    void *(*calloc)(size_t n, size_t bytes);
    int (*eventfd)(unsigned count, int flags);
    int (*dup)(int fd); /* close-on-exec */
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                         void *arg);
    ssize_t (*preadv2)(int fd, const struct iovec *iov, int n, off_t offset, int flags);
    ssize_t (*pwritev2)(int fd, const struct iovec *iov, int n, off_t offset, int flags);

    int (*ring_init)(unsigned entries, struct io_uring *ring, struct io_uring_params *p);
    int (*ring_register_probe)(struct io_uring *ring, struct io_uring_probe *probe, unsigned n);
    int (*ring_register_eventfd)(struct io_uring *ring, int fd);
    int (*ring_register_files)(struct io_uring *ring, const int *fds, unsigned n);
    int (*ring_register_buffers)(struct io_uring *ring, const struct iovec *iov, unsigned n);
    int (*ring_submit)(struct io_uring *ring);
    int (*ring_get_events)(struct io_uring *ring);
};

extern const struct io_sys io_sys_real;

/* The backends; io_new() chooses. *options is valid and has a `sys`. */
int io_threads_new(const struct io_options *options, struct io **ret_io);

/* *ret_buffers: 0, or why buffers are not registered; as a negative errno. */
int io_uring_new(const struct io_options *options, int *ret_buffers, struct io **ret_io);

#endif
