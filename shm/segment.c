/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define RESERVE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static int real_open(const char *path, int flags, mode_t mode)
{
    return open(path, flags, mode);
}

static int real_fcntl(int fd, int cmd, int arg)
{
    return fcntl(fd, cmd, arg);
}

const struct segment_sys segment_sys_real = {
    .memfd_create = memfd_create,
    .open = real_open,
    .fallocate = fallocate,
    .ftruncate = ftruncate,
    .fchown = fchown,
    .fchmod = fchmod,
    .fcntl = real_fcntl,
    .mmap = mmap,
    .madvise = madvise,
};

static const struct segment_sys *sys_or_real(const struct segment_sys *sys)
{
    return sys ? sys : &segment_sys_real;
}

/*
 * fstatfs() and not st_blksize: a tmpfs mounted with huge=always reports 2 MiB there, though its
 * pages may be mapped at any 4 KiB boundary.
 */
int segment_page_size(int fd, size_t *ret_bytes)
{
    struct statfs fs;

    if (fstatfs(fd, &fs) < 0)
        return -errno;
    if (fs.f_type != HUGETLBFS_MAGIC && fs.f_type != TMPFS_MAGIC)
        return -EINVAL;
    *ret_bytes = fs.f_type == HUGETLBFS_MAGIC ? (size_t)fs.f_bsize : (size_t)sysconf(_SC_PAGESIZE);
    return 0;
}

int segment_check_sealed(const struct segment_sys *sys, int fd)
{
    const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int seals = sys_or_real(sys)->fcntl(fd, F_GET_SEALS, 0);

    if (seals < 0)
        return -errno;
    return (seals & wanted) == wanted ? 0 : -EPERM;
}

/* What could raise SIGBUS later is refused now. */
static int file_check(const struct segment_sys *sys, int fd, uint64_t bytes, unsigned flags,
                      size_t *ret_page)
{
    struct stat st;
    size_t page;
    int r = segment_page_size(fd, &page);

    if (r < 0)
        return r;
    if (bytes == 0 || bytes > INT64_MAX || bytes % page != 0)
        return -EINVAL;
    if ((flags & SEGMENT_SEALED) && (r = segment_check_sealed(sys, fd)) < 0)
        return r;
    if (fstat(fd, &st) < 0)
        return -errno;
    if ((uint64_t)st.st_size < bytes)
        return -ENODATA;
    *ret_page = page;
    return 0;
}

static int advise(const struct segment_sys *sys, void *addr, size_t bytes, unsigned flags)
{
    if ((flags & SEGMENT_DONTFORK) && sys->madvise(addr, bytes, MADV_DONTFORK) < 0)
        return -errno;
    if ((flags & SEGMENT_DONTDUMP) && sys->madvise(addr, bytes, MADV_DONTDUMP) < 0)
        return -errno;
    return 0;
}

static int view_prot(enum segment_view view)
{
    return view == SEGMENT_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
}

int segment_map(const struct segment_sys *sys, int fd, uint64_t bytes, enum segment_view view,
                unsigned flags, struct segment_mapping *ret)
{
    size_t page;
    void *addr;
    int r;

    sys = sys_or_real(sys);
    r = file_check(sys, fd, bytes, flags, &page);
    if (r < 0)
        return r;
    addr = sys->mmap(NULL, bytes, view_prot(view), MAP_SHARED, fd, 0);
    if (addr == MAP_FAILED)
        return -errno;
    r = advise(sys, addr, bytes, flags);
    if (r < 0) {
        munmap(addr, bytes);
        return r;
    }
    *ret = (struct segment_mapping){.addr = addr, .bytes = bytes};
    return 0;
}

void segment_unmap(struct segment_mapping *m)
{
    if (!m || !m->addr)
        return;
    munmap(m->addr, m->bytes);
    *m = (struct segment_mapping){0};
}

int segment_reserve(const struct segment_sys *sys, uint64_t bytes, size_t align,
                    struct segment_reservation *ret)
{
    size_t system_page = (size_t)sysconf(_SC_PAGESIZE), total;
    unsigned char *got, *base;

    if (align < system_page || (align & (align - 1)) || bytes == 0 || bytes % align ||
        bytes > INT64_MAX - align)
        return -EINVAL;
    total = bytes + align;
    got = sys_or_real(sys)->mmap(NULL, total, PROT_NONE, RESERVE_FLAGS, -1, 0);
    if (got == MAP_FAILED)
        return -errno;
    base = (unsigned char *)(((uintptr_t)got + align - 1) & ~((uintptr_t)align - 1));
    if (base > got)
        munmap(got, (size_t)(base - got));
    if (base + bytes < got + total)
        munmap(base + bytes, (size_t)(got + total - (base + bytes)));
    *ret = (struct segment_reservation){.base = base, .bytes = bytes};
    return 0;
}

/*
 * mmap(MAP_FIXED) that fails may have unmapped the range before (kernels differ), and then any
 * thread of the process can get that address for something else, which segment_unreserve() would
 * later tear away. So: take the hole back if it is one; if something is there, we cannot know
 * whether it is our reservation or a stranger, and never touch that range again.
 */
static void reservation_repair(struct segment_reservation *r, size_t bytes)
{
    unsigned char *at = r->base + r->used, *end = r->base + r->bytes;

    if (mmap(at, bytes, PROT_NONE, RESERVE_FLAGS | MAP_FIXED_NOREPLACE, -1, 0) != MAP_FAILED)
        return;
    if (at + bytes < end)
        munmap(at + bytes, (size_t)(end - (at + bytes)));
    r->bytes = r->used;
}

int segment_append(const struct segment_sys *sys, struct segment_reservation *r, int fd,
                   uint64_t bytes, enum segment_view view, unsigned flags, void **ret_addr)
{
    unsigned char *at = r->base + r->used;
    size_t page;
    int e;

    sys = sys_or_real(sys);
    e = file_check(sys, fd, bytes, flags, &page);
    if (e < 0)
        return e;
    if (bytes > r->bytes - r->used)
        return -ENOSPC;
    if ((uintptr_t)at % page != 0)
        return -EINVAL;
    if (sys->mmap(at, bytes, view_prot(view), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        e = -errno;
        /* EACCES is decided before anything is unmapped: the wrong fd costs no address space. */
        if (e != -EACCES)
            reservation_repair(r, bytes);
        return e;
    }
    e = advise(sys, at, bytes, flags);
    if (e < 0) {
        /* Should this fail too, the chunk stays mapped behind `used`: ours, to be replaced. */
        mmap(at, bytes, PROT_NONE, RESERVE_FLAGS | MAP_FIXED, -1, 0);
        return e;
    }
    r->used += bytes;
    *ret_addr = at;
    return 0;
}

void segment_unreserve(struct segment_reservation *r)
{
    if (!r || !r->base)
        return;
    if (r->bytes > 0)
        munmap(r->base, r->bytes);
    *r = (struct segment_reservation){0};
}
