/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "segment_make.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <hugetlbfs.h> /* uses size_t without including <stddef.h> */

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif

#define HUGEPAGE_SIZES_MAX 16

/* One rung being tried. */
struct attempt {
    const struct segment_spec *spec;
    const struct segment_sys *sys;
    uint64_t hugepage; /* size in bytes, 0 when the kernel has none */
    const char *dir;   /* of a named rung */
    struct segment seg;
    char *text; /* char[512]: why it failed */
};

struct rung {
    const char *name;
    int (*check)(struct attempt *a); /* cheap, creates nothing */
    int (*create)(struct attempt *a);
};

static int check_hugetlbfs(struct attempt *a);
static int check_hugepages(struct attempt *a);
static int check_tmpfs(struct attempt *a);
static int check_memory(struct attempt *a);
static int create_file(struct attempt *a);
static int create_memfd(struct attempt *a);

static const struct rung rungs[SEGMENT_RUNGS] = {
    [SEGMENT_HUGETLBFS] = {"hugetlbfs", check_hugetlbfs, create_file},
    [SEGMENT_MEMFD_HUGETLB] = {"memfd-hugetlb", check_hugepages, create_memfd},
    [SEGMENT_TMPFS] = {"tmpfs", check_tmpfs, create_file},
    [SEGMENT_MEMFD] = {"memfd", check_memory, create_memfd},
};

const char *segment_rung_name(enum segment_rung rung)
{
    return rungs[rung].name;
}

static bool rung_is_huge(enum segment_rung rung)
{
    return rung <= SEGMENT_MEMFD_HUGETLB;
}

static bool rung_is_named(enum segment_rung rung)
{
    return rungs[rung].create == create_file;
}

/* Notes why the rung is not taken, and returns the error for the caller to pass on. */
static __attribute__((format(printf, 3, 4))) int skip(struct attempt *a, int error, const char *fmt,
                                                      ...)
{
    const size_t size = sizeof(((struct segment_reason *)0)->text);
    int n = snprintf(a->text, size, "%s: ", rungs[a->seg.rung].name);
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(a->text + n, size - (size_t)n, fmt, ap);
    va_end(ap);
    return error;
}

static int skip_call(struct attempt *a, const char *call, int error)
{
    return skip(a, error, "%s: %s", call, strerrordesc_np(-error));
}

static unsigned long long mib(uint64_t bytes)
{
    return bytes >> 20;
}

/* ---- hugepages: sizes, mounts, free pages */

static uint64_t mount_page_size(const char *dir)
{
    struct statfs fs;

    return statfs(dir, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC ? (uint64_t)fs.f_bsize : 0;
}

static bool hugepage_known(uint64_t size)
{
    long sizes[HUGEPAGE_SIZES_MAX];
    int n = gethugepagesizes(sizes, HUGEPAGE_SIZES_MAX);

    for (int i = 0; i < n; i++)
        if ((uint64_t)sizes[i] == size)
            return true;
    return false;
}

/* 0: none such. */
static uint64_t hugepage_wanted(const struct segment_spec *spec)
{
    uint64_t size = spec->page_size;
    long dflt;

    if (size == 0 && spec->hugetlbfs_dir)
        size = mount_page_size(spec->hugetlbfs_dir);
    if (size == 0) {
        dflt = gethugepagesize();
        size = dflt > 0 ? (uint64_t)dflt : 0;
    }
    return size && hugepage_known(size) ? size : 0;
}

/* A counter that cannot be read (a container without /sys) is no reason to refuse: just try. */
static bool counter_read(uint64_t hugepage, const char *what, uint64_t *ret)
{
    unsigned long long value;
    char path[128];
    bool ok;
    FILE *f;

    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-%llukB/%s",
             (unsigned long long)hugepage / 1024, what);
    f = fopen(path, "re");
    if (!f)
        return false;
    ok = fscanf(f, "%llu", &value) == 1;
    fclose(f);
    if (ok)
        *ret = value;
    return ok;
}

struct hugepages {
    uint64_t total;
    uint64_t available; /* free, promised to nobody, or to be had by overcommit */
};

static bool hugepages_count(uint64_t hugepage, struct hugepages *ret)
{
    uint64_t total, idle, reserved, surplus, overcommit;

    if (!counter_read(hugepage, "nr_hugepages", &total) ||
        !counter_read(hugepage, "free_hugepages", &idle) ||
        !counter_read(hugepage, "resv_hugepages", &reserved) ||
        !counter_read(hugepage, "surplus_hugepages", &surplus) ||
        !counter_read(hugepage, "nr_overcommit_hugepages", &overcommit))
        return false;
    ret->total = total;
    ret->available = idle > reserved ? idle - reserved : 0;
    ret->available += overcommit > surplus ? overcommit - surplus : 0;
    return true;
}

static bool hugepage_is_default(uint64_t hugepage)
{
    long dflt = gethugepagesize();

    return dflt > 0 && (uint64_t)dflt == hugepage;
}

static int skip_unknown(struct attempt *a)
{
    long sizes[HUGEPAGE_SIZES_MAX];
    char known[128] = "";
    int n = gethugepagesizes(sizes, HUGEPAGE_SIZES_MAX), used = 0;

    for (int i = 0; i < n && used < (int)sizeof(known) - 24; i++)
        used += snprintf(known + used, sizeof(known) - (size_t)used, " %ld kB", sizes[i] / 1024);
    if (n <= 0)
        return skip(a, -ENOENT, "the kernel has no hugepages; fix: hugepages=off");
    return skip(a, -ENOENT, "the kernel has no hugepages of %llu bytes; fix: choose one of%s",
                (unsigned long long)a->spec->page_size, known);
}

/* `have` pages of those needed are free or allocated already. */
static int skip_pages(struct attempt *a, const char *what, uint64_t have, uint64_t total)
{
    unsigned long long kb = a->hugepage / 1024, need = a->seg.bytes / a->hugepage;
    unsigned long long enough = total + need - have;
    char cure[128];

    if (hugepage_is_default(a->hugepage))
        snprintf(cure, sizeof(cure), "sysctl vm.nr_hugepages=%llu", enough);
    else
        snprintf(cure, sizeof(cure),
                 "echo %llu > /sys/kernel/mm/hugepages/hugepages-%llukB/nr_hugepages", enough, kb);
    return skip(a, -ENOMEM, "only %llu of %llu hugepages %s (%llu kB each); fix: %s",
                (unsigned long long)have, need, what, kb, cure);
}

static int check_hugepages(struct attempt *a)
{
    struct hugepages h;

    if (a->hugepage == 0)
        return skip_unknown(a);
    if (hugepages_count(a->hugepage, &h) && h.available < a->seg.bytes / a->hugepage)
        return skip_pages(a, "free", h.available, h.total);
    return 0;
}

static int skip_mount(struct attempt *a)
{
    unsigned long long kb = a->hugepage / 1024;
    char dir[64] = "/dev/hugepages", owner[64] = "";

    if (!hugepage_is_default(a->hugepage))
        snprintf(dir, sizeof(dir), "/dev/hugepages-%llukB", kb);
    if (geteuid() != 0)
        snprintf(owner, sizeof(owner), ",mode=0700,uid=%u,gid=%u", geteuid(), getegid());
    return skip(a, -ENOENT,
                "no mount for %llu kB pages; fix: mkdir -p %s && mount -t hugetlbfs -o "
                "pagesize=%lluK%s none %s, then restart",
                kb, dir, kb, owner, dir);
}

static int check_hugetlbfs(struct attempt *a)
{
    uint64_t size;

    if (a->hugepage == 0)
        return check_hugepages(a);
    a->dir = a->spec->hugetlbfs_dir;
    if (!a->dir)
        a->dir = hugetlbfs_find_path_for_size((long)a->hugepage);
    if (!a->dir)
        return skip_mount(a);
    size = mount_page_size(a->dir);
    if (size == 0)
        return skip(a, -ENOENT, "%s is not on a hugetlbfs mount", a->dir);
    if (size != a->hugepage)
        return skip(a, -EINVAL, "%s has pages of %llu kB, not %llu kB", a->dir,
                    (unsigned long long)size / 1024, (unsigned long long)a->hugepage / 1024);
    return check_hugepages(a);
}

/* ---- small pages */

static bool memory_available(uint64_t *ret)
{
    unsigned long long kb = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");

    if (!f)
        return false;
    while (kb == 0 && fgets(line, sizeof(line), f))
        if (sscanf(line, "MemAvailable: %llu kB", &kb) != 1)
            kb = 0;
    fclose(f);
    *ret = kb * 1024;
    return kb > 0;
}

/*
 * Small pages that do not exist are not an error but the OOM killer's business: whoever asks for
 * more than there is must be refused beforehand. Small segments are too small to matter.
 */
static int check_memory(struct attempt *a)
{
    uint64_t available;

    if (a->spec->kind == SEGMENT_SMALL || !memory_available(&available) ||
        available >= a->seg.bytes)
        return 0;
    return skip(a, -ENOMEM, "only %llu of %llu MiB of memory available; fix: a smaller pool",
                mib(available), mib(a->seg.bytes));
}

static int check_tmpfs(struct attempt *a)
{
    struct statfs fs;
    uint64_t room;

    a->dir = a->spec->runtime_dir;
    if (!a->dir)
        return skip(a, -ENOENT, "no runtime directory");
    if (statfs(a->dir, &fs) < 0)
        return skip_call(a, a->dir, -errno);
    if (fs.f_type != TMPFS_MAGIC)
        return skip(a, -ENOENT, "%s is not on a tmpfs", a->dir);
    room = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize;
    if (fs.f_blocks > 0 && room < a->seg.bytes) /* no blocks: mounted without a limit */
        return skip(a, -ENOMEM, "only %llu of %llu MiB free on %s; fix: enlarge that tmpfs",
                    mib(room), mib(a->seg.bytes), a->dir);
    return check_memory(a);
}

/* ---- creating */

static int create_file(struct attempt *a)
{
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int r;

    if (asprintf(&a->seg.path, "%s/%s", a->dir, a->spec->name) < 0) {
        a->seg.path = NULL;
        return skip_call(a, "path", -ENOMEM);
    }
    a->seg.fd = a->sys->open(a->seg.path, flags, 0600);
    if (a->seg.fd >= 0)
        return 0;
    r = -errno;
    if (r == -EACCES || r == -EPERM)
        skip(a, r,
             "uid %u may not create files in %s; fix: install -d -m 0700 -o %u %s/kvd, and "
             "configure that directory",
             geteuid(), a->dir, geteuid(), a->dir);
    else
        skip_call(a, a->seg.path, r);
    free(a->seg.path); /* not ours: nobody may unlink it */
    a->seg.path = NULL;
    return r;
}

static int create_memfd(struct attempt *a)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;

    if (rung_is_huge(a->seg.rung))
        flags |= MFD_HUGETLB | ((unsigned)__builtin_ctzll(a->hugepage) << MFD_HUGE_SHIFT);
    /* Unknown before Linux 6.3, and demanded by later ones when vm.memfd_noexec=2. */
    a->seg.fd = a->sys->memfd_create(a->spec->name, flags | MFD_NOEXEC_SEAL);
    if (a->seg.fd < 0 && errno == EINVAL)
        a->seg.fd = a->sys->memfd_create(a->spec->name, flags);
    return a->seg.fd < 0 ? skip_call(a, "memfd_create", -errno) : 0;
}

/*
 * A memfd is born 0777, and then a worker with a read-only fd could reopen it writable through
 * /proc. A file's mode went through the umask.
 */
static int restrict_access(struct attempt *a)
{
    const struct segment_spec *spec = a->spec;

    if (spec->mode == 0640 && a->sys->fchown(a->seg.fd, (uid_t)-1, spec->gid) < 0)
        return skip_call(a, "fchown", -errno);
    if (a->sys->fchmod(a->seg.fd, spec->mode ? spec->mode : 0600) < 0)
        return skip_call(a, "fchmod", -errno);
    return 0;
}

static uint64_t pages_present(int fd, uint64_t page_size)
{
    struct stat st;

    return fstat(fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 / page_size : 0;
}

/* Either such pages are really gone, or there are some and we are not to have them. */
static int skip_hugepages(struct attempt *a)
{
    uint64_t got = pages_present(a->seg.fd, a->hugepage), need = a->seg.bytes / a->hugepage;
    struct hugepages h = {0};

    if (!hugepages_count(a->hugepage, &h) || got + h.available >= need)
        return skip(a, -ENOMEM,
                    "only %llu of %llu hugepages allowed by size= of the mount or by the cgroup; "
                    "fix: raise that limit",
                    (unsigned long long)got, (unsigned long long)need);
    return skip_pages(a, "left when allocating", got + h.available, h.total);
}

static int skip_allocation(struct attempt *a, const char *call, int error)
{
    if (error != -ENOMEM && error != -ENOSPC)
        return skip_call(a, call, error);
    if (rung_is_huge(a->seg.rung))
        return skip_hugepages(a);
    return skip(a, -ENOMEM, "only %llu of %llu MiB could be had",
                mib(pages_present(a->seg.fd, a->seg.page_size) * a->seg.page_size),
                mib(a->seg.bytes));
}

#define SMALL_SLICE ((uint64_t)64 << 20)

static int allocate_alone(struct attempt *a)
{
    int r;

    do /* each round begins with the pages of the one before, or, on tmpfs, anew */
        r = a->sys->fallocate(a->seg.fd, 0, 0, (off_t)a->seg.bytes);
    while (r < 0 && errno == EINTR);
    return r < 0 ? skip_allocation(a, "fallocate", -errno) : 0;
}

static int allocate_parallel(struct attempt *a)
{
    int r;
    /* For hugepages this is a reservation as well: too few, and it fails before any is cleared. */
    void *p = a->sys->mmap(NULL, a->seg.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a->seg.fd, 0);

    if (p == MAP_FAILED)
        return skip_allocation(a, "mmap", -errno);
    r = populate_range(p, a->seg.bytes, a->seg.page_size, a->spec->populate);
    munmap(p, a->seg.bytes);
    return r < 0 ? skip_allocation(a, "populate", r) : 0;
}

/* Small pages: fallocate() is two to three times faster than several threads that fault them in one
 * by one. In slices, for the sake of progress and cancelling. */
static int allocate_slices(struct attempt *a)
{
    const struct populate_options *o = a->spec->populate;

    for (uint64_t at = 0, n; at < a->seg.bytes; at += n) {
        n = a->seg.bytes - at < SMALL_SLICE ? a->seg.bytes - at : SMALL_SLICE;
        if (o->cancel && atomic_load(o->cancel))
            return skip_allocation(a, "populate", -ECANCELED);
        while (a->sys->fallocate(a->seg.fd, 0, (off_t)at, (off_t)n) < 0)
            if (errno != EINTR)
                return skip_allocation(a, "fallocate", -errno);
        if (o->progress)
            o->progress(at + n, a->seg.bytes, o->userdata);
    }
    return 0;
}

static int allocate(struct attempt *a)
{
    if (a->sys->ftruncate(a->seg.fd, (off_t)a->seg.bytes) < 0)
        return skip_call(a, "ftruncate", -errno);
    if (!a->spec->populate)
        return allocate_alone(a);
    return rung_is_huge(a->seg.rung) ? allocate_parallel(a) : allocate_slices(a);
}

/* Not FUTURE_WRITE: nobody, the daemon included, could map it writable again. */
static int seal(struct attempt *a)
{
    if (rung_is_named(a->seg.rung)) /* files on a mount are born sealed against sealing */
        return 0;
    if (a->sys->fcntl(a->seg.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return skip_call(a, "F_ADD_SEALS", -errno);
    return 0;
}

/* Through /proc rather than by path: this cannot be a different file than the one we made. */
static int reopen_for_readers(struct attempt *a)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", a->seg.fd);
    a->seg.reader_fd = a->sys->open(path, O_RDONLY | O_CLOEXEC, 0);
    return a->seg.reader_fd < 0 ? skip_call(a, path, -errno) : 0;
}

/*
 * A failed allocation keeps what it got. Truncating gives the pages back now, even if somebody has
 * the file open; it fails on a sealed memfd, which nobody else has: closing that is enough.
 */
static void attempt_undo(struct attempt *a)
{
    a->sys->ftruncate(a->seg.fd, 0);
    segment_unlink(&a->seg);
    segment_close(&a->seg);
}

static int attempt_run(struct attempt *a)
{
    const struct rung *rung = &rungs[a->seg.rung];
    int r;

    if ((r = rung->check(a)) < 0 || (r = rung->create(a)) < 0)
        return r;
    if ((r = restrict_access(a)) < 0 || (r = allocate(a)) < 0 || (r = seal(a)) < 0 ||
        (r = reopen_for_readers(a)) < 0)
        attempt_undo(a);
    return r;
}

/* ---- the ladder */

static bool name_valid(const char *name)
{
    size_t n = name ? strlen(name) : 0;

    return n > 0 && n < 200 && name[0] != '.' && !strchr(name, '/');
}

static int spec_check(const struct segment_spec *spec)
{
    if (!name_valid(spec->name) || spec->bytes == 0 || spec->bytes > INT64_MAX / 2)
        return -EINVAL;
    if (spec->mode != 0 && spec->mode != 0600 && spec->mode != 0640)
        return -EINVAL;
    if (spec->page_size & (spec->page_size - 1))
        return -EINVAL;
    return 0;
}

/* Errors do not matter here: what is still in the way, O_EXCL will meet and report. */
static void stale_remove(const char *dir, const char *name)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/%s", dir, name);

    if (n > 0 && (size_t)n < sizeof(path))
        unlink(path);
}

uint64_t segment_hugepage(const struct segment_spec *spec)
{
    uint64_t hugepage = hugepage_wanted(spec);

    return hugepage ? hugepage : (uint64_t)2 << 20;
}

const char *segment_hugetlbfs_dir(uint64_t page_size)
{
    struct segment_spec spec = {.page_size = page_size};
    uint64_t hugepage = hugepage_wanted(&spec);

    return hugepage ? hugetlbfs_find_path_for_size((long)hugepage) : NULL;
}

static void stale_remove_all(const struct segment_spec *spec, uint64_t hugepage)
{
    const char *huge = spec->hugetlbfs_dir;

    if (!huge && hugepage)
        huge = hugetlbfs_find_path_for_size((long)hugepage);
    if (huge && spec->kind == SEGMENT_POOL)
        stale_remove(huge, spec->name);
    if (spec->runtime_dir)
        stale_remove(spec->runtime_dir, spec->name);
}

static enum segment_rung rung_first(const struct segment_spec *spec)
{
    bool small = spec->kind == SEGMENT_SMALL || spec->hugepages == SEGMENT_HUGEPAGES_OFF;

    return small ? SEGMENT_TMPFS : SEGMENT_HUGETLBFS;
}

static enum segment_rung rung_last(const struct segment_spec *spec)
{
    bool huge = spec->kind == SEGMENT_POOL && spec->hugepages == SEGMENT_HUGEPAGES_REQUIRE;

    return huge ? SEGMENT_MEMFD_HUGETLB : SEGMENT_MEMFD;
}

/* Errors that a lower rung would only hide. */
static bool error_is_final(int error)
{
    return error == -EEXIST || error == -ECANCELED;
}

static int rung_try(const struct segment_spec *spec, uint64_t hugepage, enum segment_rung rung,
                    struct segment_reasons *reasons, struct segment *ret)
{
    struct segment_reason *reason = &reasons->list[reasons->n];
    uint64_t system_page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t page = rung_is_huge(rung) && hugepage ? hugepage : system_page;
    struct attempt a = {
        .spec = spec,
        .sys = spec->sys ? spec->sys : &segment_sys_real,
        .hugepage = hugepage,
        .seg = {.fd = -1, .reader_fd = -1, .rung = rung, .page_size = page},
        .text = reason->text,
    };
    int r;

    a.seg.bytes = (spec->bytes + page - 1) / page * page;
    r = attempt_run(&a);
    if (r < 0) {
        reason->rung = rung;
        reason->error = r;
        reasons->n++;
        return r;
    }
    *ret = a.seg;
    return 0;
}

int segment_make(const struct segment_spec *spec, struct segment_reasons *ret_reasons,
                 struct segment *ret)
{
    struct segment_reasons own = {.n = 0}, *reasons = ret_reasons ? ret_reasons : &own;
    uint64_t hugepage = 0;
    int r = spec_check(spec);

    reasons->n = 0;
    if (r < 0)
        return r;
    if (spec->kind == SEGMENT_POOL)
        hugepage = hugepage_wanted(spec);
    if (spec->replace)
        stale_remove_all(spec, hugepage);
    for (enum segment_rung rung = rung_first(spec);; rung++) {
        r = rung_try(spec, hugepage, rung, reasons, ret);
        if (r == 0 || error_is_final(r) || rung == rung_last(spec))
            return r;
    }
}

void segment_close(struct segment *s)
{
    if (!s)
        return;
    if (s->fd >= 0)
        close(s->fd);
    if (s->reader_fd >= 0)
        close(s->reader_fd);
    free(s->path);
    s->fd = s->reader_fd = -1;
    s->path = NULL;
}

int segment_unlink(const struct segment *s)
{
    return s->path && unlink(s->path) < 0 ? -errno : 0;
}
