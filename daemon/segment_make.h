/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SEGMENT_MAKE_H
#define KVD_DAEMON_SEGMENT_MAKE_H

/*
 * Makes shared-memory segments. A pool goes down a ladder until a rung holds:
 *
 *   hugetlbfs      a named file on a hugetlbfs mount; outlives the daemon
 *   memfd-hugetlb  a sealed memfd of hugepages
 *   tmpfs          a named file of small pages in the runtime directory, when that is a tmpfs
 *   memfd          a sealed memfd of small pages
 *
 * A rung is taken only when it has given all the memory: every page is present, so nobody meets a
 * SIGBUS later because pages were short. One that could not is given back whole, and the reason is
 * kept in one line with its cure. A small segment starts at tmpfs.
 *
 * How the memory is allocated. fallocate() clears hugepages on one thread, without a word, under a
 * lock that a second thread would only wait for: seconds per 10 GiB. So pools of hugepages are
 * reserved by mmap() (which fails at once when they are short) and populated by several threads, with
 * progress; see `populate` below. Small pages are fallocated, which is faster for them than faults on
 * any number of threads; those of a pool in slices, with progress.
 *
 * Holes are never punched: io_uring and CUDA registrations would stay on the old pages.
 *
 * libhugetlbfs is behind this file only. Its constructor scans the mounts once, when the program
 * starts, and obeys HUGETLB_PATH and HUGETLB_DEFAULT_PAGE_SIZE; a mount made later needs
 * `hugetlbfs_dir` or a restart.
 */

#include "populate.h"
#include "shm/segment.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum segment_rung {
    SEGMENT_HUGETLBFS,
    SEGMENT_MEMFD_HUGETLB,
    SEGMENT_TMPFS,
    SEGMENT_MEMFD,
    SEGMENT_RUNGS,
};

/* "hugetlbfs", "memfd-hugetlb", "tmpfs", "memfd". Static. */
const char *segment_rung_name(enum segment_rung rung);

enum segment_hugepages {
    SEGMENT_HUGEPAGES_TRY,
    SEGMENT_HUGEPAGES_REQUIRE, /* fail rather than take small pages */
    SEGMENT_HUGEPAGES_OFF,     /* small pages at once */
};

enum segment_kind {
    SEGMENT_POOL,
    SEGMENT_SMALL, /* small pages whatever `hugepages` says */
};

struct segment_spec {
    /*
     * File name of a named segment, and what a memfd is called in /proc. Unique on the machine: a
     * hugetlbfs mount is shared by all who use it. One path component, not beginning with a dot.
     */
    const char *name;
    enum segment_kind kind;
    enum segment_hugepages hugepages;

    /*
     * Rounded up to whole pages of the rung taken. Where several chunks make one pool, ask for
     * multiples of the hugepage size, so that the layout does not depend on the rung.
     */
    uint64_t bytes;
    uint64_t page_size;        /* of hugepages; 0: that of hugetlbfs_dir, else the system default */
    const char *hugetlbfs_dir; /* NULL: the mount that libhugetlbfs finds */
    const char *runtime_dir;

    mode_t mode; /* of the file: 0600 (also 0) or 0640, for `gid`. Nobody else may ever write */
    gid_t gid;   /* used with 0640 only */

    /*
     * A file of that name exists: unlink it first (where hugetlbfs files and runtime files are,
     * whichever rung is then taken: a stale one elsewhere would hold its pages for ever), instead
     * of failing with -EEXIST. Processes that have the old one mapped keep it.
     */
    bool replace;

    /* NULL: the calling thread fallocates. Else threads are started; see populate.h */
    const struct populate_options *populate;
    const struct segment_sys *sys; /* NULL: the real one */
};

struct segment {
    int fd;        /* O_RDWR: for the daemon and for sessions that may write */
    int reader_fd; /* O_RDONLY, another open file of the same segment */
    enum segment_rung rung;
    uint64_t bytes;
    uint64_t page_size;
    char *path; /* NULL for a memfd */
};

/* Why a rung was not taken, best rung first. */
struct segment_reason {
    enum segment_rung rung;
    int error; /* negative errno */
    char text[512];
};

struct segment_reasons {
    unsigned n;
    struct segment_reason list[SEGMENT_RUNGS];
};

/*
 * Makes a segment; ret_reasons (may be NULL) is filled in any case. Populating a pool takes long:
 * not for the core thread while it serves.
 *  -EINVAL     the spec itself is wrong (no reasons)
 *  -EEXIST     a file of that name exists and `replace` was not asked for: never skipped silently
 *  -ECANCELED  through populate->cancel
 *  else        the error of the last rung tried: -ENOMEM when memory is short, -ENOENT when the
 *              kernel has no such hugepages, or what a system call said
 * After a failure nothing is left behind.
 */
int segment_make(const struct segment_spec *spec, struct segment_reasons *ret_reasons,
                 struct segment *ret);

/* The hugepages that a spec asks for, whether there are any or not: what the chunks of a pool are
 * multiples of. 2 MiB when the kernel knows none of that size. */
uint64_t segment_hugepage(const struct segment_spec *spec);

/* The hugetlbfs mount that a spec without hugetlbfs_dir would use for pages of this size (0: the
 * system's default); NULL: there is none. Belongs to libhugetlbfs. */
const char *segment_hugetlbfs_dir(uint64_t page_size);

/* Closes the fds and forgets the path; a named file stays. NULL is fine. */
void segment_close(struct segment *s);

/* Removes the name of a named segment; 0 for a memfd. The memory lives while it is mapped. */
int segment_unlink(const struct segment *s);

#endif
