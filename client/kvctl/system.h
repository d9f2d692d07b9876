/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What /proc, /sys and the mounts say. Every path is looked for below `root`, so a folder with a
 * few files in it is a machine to check.
 */
#ifndef KVD_KVCTL_SYSTEM_H
#define KVD_KVCTL_SYSTEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

struct system {
    const char *root; /* "": this machine */
};

/* Of a file with one number ("max": UINT64_MAX). */
bool system_number(const struct system *s, const char *path, uint64_t *ret);

/* The number that follows a line's beginning, as in /proc/meminfo and /proc/PID/status. */
bool system_field(const struct system *s, const char *path, const char *name, int base,
                  uint64_t *ret);

/* The first line of a file, without its end. */
bool system_line(const struct system *s, const char *path, char *ret, size_t size);

/* In bytes. */
bool system_meminfo(const struct system *s, const char *name, uint64_t *ret);

bool system_is_directory(const struct system *s, const char *path);

/* Bytes free on the file system that holds path. */
bool system_room(const struct system *s, const char *path, uint64_t *ret);

/* stat(2) and the first bytes of a file; 0, or a negative errno. Of a shorter file the rest is zeros. */
int system_stat(const struct system *s, const char *path, struct stat *ret);
int system_read(const struct system *s, const char *path, void *ret, size_t size, uint64_t offset);

/* Bytes that a file takes of its file system; 0: it is not there. */
uint64_t system_allocated(const struct system *s, const char *path);

struct mount {
    char point[256];
    char type[32];
    uint64_t page_bytes; /* of a hugetlbfs, as far as it is written there; 0: the default */
};

/* The mount on which a path is or would be. */
bool system_mount_of(const struct system *s, const char *path, struct mount *ret);

/* A hugetlbfs with such pages. */
bool system_hugetlbfs(const struct system *s, uint64_t page_bytes, uint64_t default_bytes,
                      struct mount *ret);

struct hugepages {
    uint64_t total, surplus;
    uint64_t available; /* free, promised to nobody, or to be had by overcommit */
};

bool system_hugepages(const struct system *s, uint64_t page_bytes, struct hugepages *ret);

/* What a limit of the control group of `pid` (0: ours) leaves; the tightest of it and those above
 * it. `v2` and `v1` name files: "memory.max" with "memory.current", say. false: no limit. */
struct cgroup_files {
    const char *controller; /* of version 1 */
    const char *v2_limit, *v2_used;
    const char *v1_limit, *v1_used;
};

bool system_cgroup_room(const struct system *s, pid_t pid, const struct cgroup_files *files,
                        uint64_t *ret_room);

#endif
