/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/stale.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/guard.h"
#include "daemon/log.h"
#include "shm/header.h"
#include "shm/segment.h"

#define HUGETLBFS_MAGIC_NUMBER 0x958458f6

static int mark_retired(void *arg)
{
    struct shm_index *ix = arg;

    atomic_store(&ix->retired, 1);
    return 0;
}

/* Ours by its header, whatever its version: its name and magic are enough to remove it. */
static bool is_segment(int fd, struct shm_header *ret)
{
    return pread(fd, ret, sizeof(*ret), 0) == sizeof(*ret) && ret->magic == SHM_MAGIC;
}

static void retire(int fd, const struct shm_header *h)
{
    struct segment_mapping m;

    if (h->kind != SHM_INDEX || h->version != SHM_VERSION)
        return;
    if (segment_map(NULL, fd, SHM_PAGE, SEGMENT_WRITE, SEGMENT_DONTFORK, &m) < 0)
        return;
    guard_call(mark_retired, m.addr, m.addr, m.bytes);
    segment_unmap(&m);
}

/* 1 removed, 0 not ours. */
static int sweep_one(int dir, const char *name)
{
    struct shm_header h;
    struct stat st;
    int fd = openat(dir, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK), ours;

    if (fd < 0)
        return 0;
    ours = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && is_segment(fd, &h);
    if (ours)
        retire(fd, &h);
    close(fd);
    if (!ours)
        return 0;
    return unlinkat(dir, name, 0) == 0 ? 1 : -errno;
}

/* Small-page pool chunks have no header; their name says whose they are. */
static bool is_data_name(const char *name, const char *runtime_dir)
{
    char prefix[32];

    snprintf(prefix, sizeof(prefix), "kvd-%08x-", XXH32(runtime_dir, strlen(runtime_dir), 0));
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static int sweep(const char *path, const char *runtime_dir, bool headers)
{
    DIR *d = opendir(path);
    struct dirent *e;
    int n = 0, r = 0;

    if (!d)
        return -errno;
    while (r >= 0 && (e = readdir(d))) {
        if (strncmp(e->d_name, "kvd-", 4) != 0)
            continue;
        if (is_data_name(e->d_name, runtime_dir))
            r = unlinkat(dirfd(d), e->d_name, 0) == 0 ? 1 : -errno;
        else
            r = headers ? sweep_one(dirfd(d), e->d_name) : 0;
        n += r > 0;
    }
    closedir(d);
    return r < 0 ? r : n;
}

static int report(int n, const char *path, struct log *log)
{
    if (n > 0)
        log_write(log, LOG_NOTICE, NULL, "removed %d stale segments of an earlier run from %s", n,
                  path);
    return n;
}

int stale_sweep(const char *runtime_dir, struct log *log)
{
    return report(sweep(runtime_dir, runtime_dir, true), runtime_dir, log);
}

int stale_sweep_hugetlbfs(const char *dir, const char *runtime_dir, struct log *log)
{
    struct statfs fs;

    if (statfs(dir, &fs) < 0)
        return -errno;
    if (fs.f_type != HUGETLBFS_MAGIC_NUMBER)
        return -ENOTDIR;
    return report(sweep(dir, runtime_dir, false), dir, log);
}
