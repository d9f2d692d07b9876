/* SPDX-License-Identifier: Apache-2.0 */
#include "system.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* ---- files */

static FILE *open_below(const struct system *s, const char *path)
{
    char full[PATH_MAX];
    int n = snprintf(full, sizeof(full), "%s%s", s->root, path);

    return n > 0 && (size_t)n < sizeof(full) ? fopen(full, "re") : NULL;
}

bool system_line(const struct system *s, const char *path, char *ret, size_t size)
{
    FILE *f = open_below(s, path);
    bool ok = f && fgets(ret, (int)size, f);

    if (ok)
        ret[strcspn(ret, "\n")] = '\0';
    if (f)
        fclose(f);
    return ok;
}

bool system_number(const struct system *s, const char *path, uint64_t *ret)
{
    char line[64], *end;
    uint64_t value;

    if (!system_line(s, path, line, sizeof(line)))
        return false;
    value = strcmp(line, "max") == 0 ? UINT64_MAX : strtoull(line, &end, 10);
    if (value != UINT64_MAX && end == line)
        return false;
    *ret = value;
    return true;
}

bool system_field(const struct system *s, const char *path, const char *name, int base,
                  uint64_t *ret)
{
    FILE *f = open_below(s, path);
    char line[512], *end;
    bool found = false;

    while (f && !found && fgets(line, sizeof(line), f)) {
        const char *at = line + strlen(name);

        if (strncmp(line, name, strlen(name)) != 0)
            continue;
        at += strspn(at, " \t");
        *ret = strncmp(at, "unlimited", 9) == 0 ? UINT64_MAX : strtoull(at, &end, base);
        found = *ret == UINT64_MAX || end != at;
    }
    if (f)
        fclose(f);
    return found;
}

bool system_meminfo(const struct system *s, const char *name, uint64_t *ret)
{
    uint64_t kb;

    if (!system_field(s, "/proc/meminfo", name, 10, &kb))
        return false;
    *ret = kb * 1024;
    return true;
}

bool system_is_directory(const struct system *s, const char *path)
{
    char full[PATH_MAX];
    struct stat st;

    snprintf(full, sizeof(full), "%s%s", s->root, path);
    return stat(full, &st) == 0 && S_ISDIR(st.st_mode);
}

bool system_room(const struct system *s, const char *path, uint64_t *ret)
{
    char full[PATH_MAX];
    struct statvfs fs;

    snprintf(full, sizeof(full), "%s%s", s->root, path);
    if (statvfs(full, &fs) < 0)
        return false;
    *ret = fs.f_blocks ? (uint64_t)fs.f_bavail * fs.f_frsize : UINT64_MAX; /* 0: without a limit */
    return true;
}

int system_stat(const struct system *s, const char *path, struct stat *ret)
{
    char full[PATH_MAX];

    snprintf(full, sizeof(full), "%s%s", s->root, path);
    return stat(full, ret) == 0 ? 0 : -errno;
}

int system_read(const struct system *s, const char *path, void *ret, size_t size, uint64_t offset)
{
    char full[PATH_MAX];
    ssize_t n;
    int fd, r;

    snprintf(full, sizeof(full), "%s%s", s->root, path);
    fd = open(full, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    memset(ret, 0, size);
    if (fd < 0)
        return -errno;
    n = pread(fd, ret, size, (off_t)offset);
    r = n < 0 ? -errno : 0;
    close(fd);
    return r;
}

uint64_t system_allocated(const struct system *s, const char *path)
{
    char full[PATH_MAX];
    struct stat st;

    snprintf(full, sizeof(full), "%s%s", s->root, path);
    return stat(full, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

/* ---- mounts: /proc/self/mountinfo, see proc(5) */

/* "\040" is a blank. In place. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *p = text; *p; to++) {
        if (p[0] == '\\' && strspn(p + 1, "01234567") >= 3) {
            *to = (char)((p[1] - '0') << 6 | (p[2] - '0') << 3 | (p[3] - '0'));
            p += 4;
        } else {
            *to = *p++;
        }
    }
    *to = '\0';
}

static uint64_t page_option(const char *options)
{
    const char *p = strstr(options, "pagesize=");
    unsigned long long n;
    char *end;

    if (!p)
        return 0;
    n = strtoull(p + strlen("pagesize="), &end, 10);
    switch (*end) {
    case 'G':
        return n << 30;
    case 'M':
        return n << 20;
    case 'K':
        return n << 10;
    default:
        return n;
    }
}

/* id parent device root POINT options optional... - TYPE source OPTIONS */
static bool parse_mount(char *line, struct mount *ret)
{
    char *rest = strstr(line, " - ");
    char type[sizeof(ret->type)], options[512];

    if (!rest || sscanf(line, "%*s %*s %*s %*s %255s", ret->point) != 1)
        return false;
    if (sscanf(rest, " - %31s %*s %511s", type, options) != 2)
        return false;
    unescape(ret->point);
    strcpy(ret->type, type);
    ret->page_bytes = page_option(options);
    return true;
}

/* How long the path of a mount is, of those that hold `path`; 0: it does not. */
static size_t holds(const struct mount *m, const char *path)
{
    size_t n = strlen(m->point);

    if (strcmp(m->point, "/") == 0)
        return 1;
    return strncmp(m->point, path, n) == 0 && (path[n] == '/' || path[n] == '\0') ? n : 0;
}

/* The last mount of which `judge` thinks most; what is mounted later hides what was there. */
static bool best_mount(const struct system *s,
                       size_t (*judge)(const struct mount *m, const void *arg), const void *arg,
                       struct mount *ret)
{
    FILE *f = open_below(s, "/proc/self/mountinfo");
    size_t best = 1, size = 0;
    char *line = NULL;
    bool found = false;

    while (f && getline(&line, &size, f) > 0) {
        struct mount m;
        size_t n = parse_mount(line, &m) ? judge(&m, arg) : 0;

        if (n < best)
            continue;
        best = n;
        *ret = m;
        found = true;
    }
    free(line);
    if (f)
        fclose(f);
    return found;
}

static size_t judge_path(const struct mount *m, const void *arg)
{
    return holds(m, arg);
}

bool system_mount_of(const struct system *s, const char *path, struct mount *ret)
{
    char real[PATH_MAX];

    if (!s->root[0] && realpath(path, real)) /* /var/run is a link to /run */
        path = real;
    return best_mount(s, judge_path, path, ret);
}

struct wanted_pages {
    uint64_t page_bytes, default_bytes;
};

static size_t judge_hugetlbfs(const struct mount *m, const void *arg)
{
    const struct wanted_pages *w = arg;
    uint64_t bytes = m->page_bytes ? m->page_bytes : w->default_bytes;

    return strcmp(m->type, "hugetlbfs") == 0 && bytes == w->page_bytes;
}

bool system_hugetlbfs(const struct system *s, uint64_t page_bytes, uint64_t default_bytes,
                      struct mount *ret)
{
    struct wanted_pages w = {page_bytes, default_bytes};

    return best_mount(s, judge_hugetlbfs, &w, ret);
}

/* ---- hugepages */

static bool counter(const struct system *s, uint64_t page_bytes, const char *name, uint64_t *ret)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-%llukB/%s",
             (unsigned long long)page_bytes / 1024, name);
    return system_number(s, path, ret);
}

bool system_hugepages(const struct system *s, uint64_t page_bytes, struct hugepages *ret)
{
    uint64_t idle, reserved, overcommit;

    if (!counter(s, page_bytes, "nr_hugepages", &ret->total) ||
        !counter(s, page_bytes, "free_hugepages", &idle) ||
        !counter(s, page_bytes, "resv_hugepages", &reserved) ||
        !counter(s, page_bytes, "surplus_hugepages", &ret->surplus) ||
        !counter(s, page_bytes, "nr_overcommit_hugepages", &overcommit))
        return false;
    ret->available = idle > reserved ? idle - reserved : 0;
    ret->available += overcommit > ret->surplus ? overcommit - ret->surplus : 0;
    return true;
}

/* ---- control groups */

/* The group's path in the hierarchy; *ret_v1 says in which. */
static bool group_path(const struct system *s, pid_t pid, const char *controller, char *ret,
                       size_t size, bool *ret_v1)
{
    char path[64], line[PATH_MAX];
    bool found = false;
    FILE *f;

    if (pid)
        snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)pid);
    else
        strcpy(path, "/proc/self/cgroup");
    f = open_below(s, path);
    while (f && fgets(line, sizeof(line), f)) {
        char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;

        if (!group)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (strcmp(list + 1, controller) != 0 && (list[1] || found))
            continue;
        found = true;
        *ret_v1 = list[1]; /* version 2 has no names of controllers */
        snprintf(ret, size, "%s", strcmp(group, "/") == 0 ? "" : group);
        if (*ret_v1)
            break;
    }
    if (f)
        fclose(f);
    return found;
}

static void narrow(const struct system *s, const char *dir, const char *limit, const char *used,
                   uint64_t *room)
{
    char path[PATH_MAX + 192];
    uint64_t max, now;

    snprintf(path, sizeof(path), "%s/%s", dir, limit);
    if (!system_number(s, path, &max) ||
        max >= INT64_MAX / 2) /* version 1 writes a large number for none */
        return;
    snprintf(path, sizeof(path), "%s/%s", dir, used);
    if (!system_number(s, path, &now))
        now = 0;
    max = max > now ? max - now : 0;
    if (max < *room)
        *room = max;
}

bool system_cgroup_room(const struct system *s, pid_t pid, const struct cgroup_files *files,
                        uint64_t *ret_room)
{
    char group[PATH_MAX], dir[PATH_MAX + 64];
    uint64_t room = UINT64_MAX;
    bool v1;

    if (!group_path(s, pid, files->controller, group, sizeof(group), &v1))
        return false;
    for (;;) { /* upwards: each group is bound by those above it, and in a container the path may
                  not exist */
        char *slash = strrchr(group, '/');

        snprintf(dir, sizeof(dir), "/sys/fs/cgroup%s%s%s", v1 ? "/" : "",
                 v1 ? files->controller : "", group);
        narrow(s, dir, v1 ? files->v1_limit : files->v2_limit, v1 ? files->v1_used : files->v2_used,
               &room);
        if (!slash)
            break;
        *slash = '\0';
    }
    if (room == UINT64_MAX)
        return false;
    *ret_room = room;
    return true;
}
