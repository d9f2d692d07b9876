/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_POPULATE_H
#define KVD_DAEMON_POPULATE_H

/*
 * Prefaulting. The first touch of shared memory is where the kernel finds, clears and maps a page:
 * slow (seconds per 10 GiB), and deadly when there is none, since a fault cannot answer an error
 * but by SIGBUS. So a whole range is touched before anybody maps it, by several threads, in slices.
 *
 * On which NUMA node a page ends up is decided by the thread that touches it first; a caller who
 * cares runs with the policy he wants, helper threads inherit it.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As in libc; NULL stands for the real ones. */
struct populate_sys {
    int (*madvise)(void *addr, size_t len, int advice);
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                         void *arg);
};

struct populate_options {
    unsigned threads; /* helpers, at most 64 are started; 0: one */
    size_t slice;     /* bytes a helper takes at a time; 0: 32 MiB. Rounded up to whole pages */

    /*
     * Called on the caller's thread only: after slices are done, at least about ten times a second
     * while helpers are busy, and once at the end. `done` never goes back. May be NULL.
     */
    void (*progress)(uint64_t done, uint64_t total, void *userdata);
    void *userdata;

    const atomic_bool *cancel; /* set from anywhere: no further slice is begun. May be NULL */
    const struct populate_sys *sys;
};

/*
 * Makes all pages of the writable mapping [addr, addr + bytes) present. Contents do not change; the
 * range may be in use meanwhile. Returns when every helper has ended. NULL options are defaults.
 *  -ENOMEM     the system ran out of such pages, or a limit of the mount or the cgroup was met
 *  -EHWPOISON  a page is broken
 *  -ECANCELED
 *  -EINVAL     addr, bytes or page_size are not whole pages of each other, or the kernel lacks
 *              MADV_POPULATE_WRITE (before 5.14) and guard_install() did not run: the pages are
 *              then touched one by one under a guard
 * After a failure some pages are present: whoever made the segment gives them back.
 */
int populate_range(void *addr, size_t bytes, size_t page_size, const struct populate_options *o);

#endif
