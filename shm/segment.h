/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_SHM_SEGMENT_H
#define KVD_SHM_SEGMENT_H

/*
 * Mapping of shared-memory segments: the half that daemon and client share. Which memory backs a
 * segment is decided where it is made (daemon/segment_make.h); here a segment is a file descriptor
 * and a length, and a mapping of it is either for reading or for writing, never both: a stray write
 * through a read pointer then faults instead of corrupting a neighbour.
 *
 * Who may do what with a segment's descriptors
 *
 *   writer fd (O_RDWR)    maps writable views. Its holder can also truncate a named file (files on
 * a hugetlbfs or tmpfs mount cannot be sealed) and punch holes into any segment: whoever reads
 * memory that somebody else can write does it under daemon/guard.h. reader fd (O_RDONLY)  maps
 * read-only views; mmap() and mprotect() refuse PROT_WRITE. The file is 0600 and belongs to the
 * daemon, so another uid cannot reopen the fd for writing through /proc/self/fd either.
 *
 * What this does not stop: a process of the daemon's own uid, or one with CAP_DAC_OVERRIDE over
 * that uid (root outside a user namespace), can reopen a reader fd for writing, and with
 * CAP_SYS_PTRACE write into anybody's memory. Give workers a uid of their own when readers are not
 * to be trusted.
 *
 * Nothing here is thread-safe on one object: callers do not change a mapping or a reservation from
 * two threads at once. Errors are negative errno; ret_ parameters are untouched on failure.
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * System calls that can fail. Each behaves as the libc function of its name: -1 (or MAP_FAILED) and
 * errno. Functions below and in daemon/ take a table so that tests can fail any single call; NULL
 * stands for the real ones.
 */
struct segment_sys {
    int (*memfd_create)(const char *name, unsigned flags);
    int (*open)(const char *path, int flags, mode_t mode);
    int (*fallocate)(int fd, int mode, off_t offset, off_t len);
    int (*ftruncate)(int fd, off_t len);
    int (*fchown)(int fd, uid_t uid, gid_t gid);
    int (*fchmod)(int fd, mode_t mode);
    int (*fcntl)(int fd, int cmd, int arg);
    void *(*mmap)(void *addr, size_t len, int prot, int flags, int fd, off_t offset);
    int (*madvise)(void *addr, size_t len, int advice);
};

extern const struct segment_sys segment_sys_real;

enum segment_view {
    SEGMENT_READ,  /* PROT_READ */
    SEGMENT_WRITE, /* PROT_READ | PROT_WRITE; needs a writer fd, else -EACCES */
};

enum segment_flags {
    /* A forked child does not inherit the mapping: it could not be told from its parent. */
    SEGMENT_DONTFORK = 1 << 0,
    /* Core dumps leave it out. A memfd of small pages would be dumped whole, all the pool of it. */
    SEGMENT_DONTDUMP = 1 << 1,
    /* Refuse with -EPERM a file that can still be resized: it must carry the seals of a memfd. */
    SEGMENT_SEALED = 1 << 2,
};

struct segment_mapping {
    void *addr;
    size_t bytes;
};

/*
 * A range of address space, inaccessible until chunks are appended to it: a pool that can grow
 * keeps its base. [0, used) is mapped, [used, bytes) is still reserved.
 */
struct segment_reservation {
    unsigned char *base;
    size_t bytes;
    size_t used;
};

/*
 * The size of the pages behind fd. -EINVAL: neither hugetlbfs nor tmpfs, so not a segment.
 */
int segment_page_size(int fd, size_t *ret_bytes);

/*
 * 0 when nobody can resize fd any more (seals SHRINK, GROW and SEAL), -EPERM when somebody can,
 * -EINVAL when the file knows no seals. Only memfds can be sealed.
 */
int segment_check_sealed(const struct segment_sys *sys, int fd);

/*
 * Maps the first `bytes` of fd. The fd may be closed afterwards.
 *  -EINVAL   bytes is 0 or not a multiple of the segment's page size, or fd is no segment
 *  -ENODATA  the file is shorter: touching the rest would raise SIGBUS
 *  -EACCES   SEGMENT_WRITE through a reader fd
 *  -EPERM    SEGMENT_SEALED and the file is not sealed
 */
int segment_map(const struct segment_sys *sys, int fd, uint64_t bytes, enum segment_view view,
                unsigned flags, struct segment_mapping *ret);

/* NULL and an already unmapped mapping are fine. Never under a live pin (I3). */
void segment_unmap(struct segment_mapping *m);

/*
 * Reserves `bytes` of address space at a multiple of `align`, a power of two: the largest page size
 * of the chunks that are to come. Costs no memory.
 */
int segment_reserve(const struct segment_sys *sys, uint64_t bytes, size_t align,
                    struct segment_reservation *ret);

/*
 * Maps the first `bytes` of fd right after the chunks already there. Errors as segment_map(), and
 *  -ENOSPC   the reservation is too small
 *  -EINVAL   also when the chunk's pages are larger than the place where it would begin is aligned
 * After a failure the chunks before are as they were. When the kernel failed inside mmap(), the
 * reservation may have been cut back to them, and further calls answer -ENOSPC.
 */
int segment_append(const struct segment_sys *sys, struct segment_reservation *r, int fd,
                   uint64_t bytes, enum segment_view view, unsigned flags, void **ret_addr);

/* Unmaps all chunks and gives the address space back. NULL is fine. Never under a live pin (I3). */
void segment_unreserve(struct segment_reservation *r);

#endif
