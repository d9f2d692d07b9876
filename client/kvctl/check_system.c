/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the machine: what pools and workers need of it. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* ---- kernel */

void check_kernel(struct check *k)
{
    char release[128];
    unsigned major, minor;

    if (!system_line(&k->system, "/proc/sys/kernel/osrelease", release, sizeof(release)) ||
        sscanf(release, "%u.%u", &major, &minor) != 2) {
        check_add(k, CHECK_SKIP, "kernel", "its version cannot be read from /proc");
        return;
    }
    if (major > 6 || (major == 6 && minor >= 1)) {
        check_add(k, CHECK_OK, "kernel", "Linux %s", release);
        return;
    }
    check_add(k, CHECK_FAIL, "kernel", "Linux %s; kvd needs 6.1 or later", release);
    check_fix(
        k, "apt install linux-image-$(dpkg --print-architecture) (Debian 12 has 6.1), then reboot");
}

/* ---- pidfds: by them the daemon notices that a worker has died */

static int try_pidfd(void)
{
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);

    if (fd < 0)
        return -errno;
    close(fd);
    return 0;
}

static int try_peer_pidfd(void)
{
    int pair[2], fd = -1, r = 0;
    socklen_t len = sizeof(fd);

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    if (getsockopt(pair[0], SOL_SOCKET, SO_PEERPIDFD, &fd, &len) < 0)
        r = -errno;
    else
        close(fd);
    close(pair[0]);
    close(pair[1]);
    return r;
}

void check_pidfd(struct check *k)
{
    int peer = try_peer_pidfd(), pidfd = try_pidfd();

    if (peer == 0)
        check_add(k, CHECK_OK, "pidfd", "SO_PEERPIDFD works");
    else if (peer == -ENOPROTOOPT && pidfd == 0)
        check_add(k, CHECK_OK, "pidfd", "pidfd_open() works (SO_PEERPIDFD needs Linux 6.5)");
    else {
        check_add(k, CHECK_FAIL, "pidfd", "kvd cannot notice the death of workers: %s: %s",
                  peer == -ENOPROTOOPT ? "pidfd_open()" : "SO_PEERPIDFD",
                  strerror(peer == -ENOPROTOOPT ? -pidfd : -peer));
        check_fix(k, "allow pidfd_open in the container's seccomp profile (docker: --security-opt "
                     "seccomp=FILE)");
    }
}

/* ---- hugepages */

static uint64_t pool_bytes(const struct check_pool *p)
{
    return p->slots * p->part_bytes * p->parts;
}

/* Chunks are whole pages but for the last, so how a pool is cut does not matter. */
static uint64_t pool_pages(const struct check_pool *p, uint64_t page)
{
    return p->parts * ((p->slots * p->part_bytes + page - 1) / page);
}

struct huge_need {
    uint64_t page;  /* 0: unknown */
    uint64_t dflt;  /* the system's size */
    uint64_t pages; /* that all pools need */
    uint64_t held;  /* that the running daemon has of these */
    bool counted;
    struct hugepages have;
};

static uint64_t missing_pages(const struct huge_need *h)
{
    uint64_t have = h->held + h->have.available;

    return h->pages > have ? h->pages - have : 0;
}

static uint64_t page_of_plan(struct check *k, uint64_t dflt)
{
    const struct check_plan *p = &k->plan;
    struct mount m;

    if (p->page_size)
        return p->page_size;
    for (size_t i = 0; i < p->n; i++)
        if (p->pools[i].huge_page)
            return p->pools[i].huge_page;
    if (p->hugetlbfs[0] && system_mount_of(&k->system, p->hugetlbfs, &m) &&
        strcmp(m.type, "hugetlbfs") == 0 && m.page_bytes)
        return m.page_bytes;
    return dflt;
}

static struct huge_need huge_need(struct check *k)
{
    struct huge_need h = {.page = 0};

    system_meminfo(&k->system, "Hugepagesize:", &h.dflt);
    h.page = page_of_plan(k, h.dflt);
    if (!h.page)
        return h;
    h.counted = system_hugepages(&k->system, h.page, &h.have);
    for (size_t i = 0; i < k->plan.n; i++)
        h.pages += pool_pages(&k->plan.pools[i], h.page);
    for (size_t i = 0; i < k->running.n; i++)
        if (k->running.pools[i].huge_page == h.page)
            h.held += pool_pages(&k->running.pools[i], h.page);
    return h;
}

static enum check_level lack(const struct check *k)
{
    return k->plan.hugepages == CONFIG_HUGEPAGES_REQUIRE ? CHECK_FAIL : CHECK_WARN;
}

static void fix_hugepages(struct check *k, const struct huge_need *h, uint64_t missing)
{
    uint64_t wanted = h->have.total - h->have.surplus + missing, free = 0;
    char size[SMALL_TEXT_SIZE];

    if (h->page == h->dflt) {
        check_fix(k, "sysctl vm.nr_hugepages=%" PRIu64, wanted);
        check_fix(k,
                  "echo vm.nr_hugepages=%" PRIu64 " > /etc/sysctl.d/kvd.conf (for the next boot)",
                  wanted);
    } else {
        check_fix(
            k, "echo %" PRIu64 " > /sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB/nr_hugepages",
            wanted, h->page / 1024);
    }
    if (k->plan.made)
        check_fix_service(k, "restart");
    if (!system_meminfo(&k->system, "MemAvailable:", &free) || free >= missing * h->page)
        return;
    text_size(free, size);
    check_fix(k, "smaller pools: this machine has only %s of memory left for hugepages", size);
}

static void report_hugepages(struct check *k, const struct huge_need *h)
{
    uint64_t missing = missing_pages(h);
    char size[SMALL_TEXT_SIZE];

    text_size(h->page, size);
    if (missing) {
        check_add(k, lack(k), "hugepages",
                  "%s need %" PRIu64 " pages of %s%s, there are %" PRIu64 "%s", k->plan.source,
                  h->pages, size,
                  k->plan.made && !h->held ? " (if page_size is auto; else give -c FILE)" : "",
                  h->held + h->have.available,
                  k->plan.hugepages == CONFIG_HUGEPAGES_TRY
                      ? "; the rest falls back on small pages, which are slower"
                      : "");
        fix_hugepages(k, h, missing);
    } else if (k->plan.made && h->held < h->pages) {
        check_add(k, lack(k), "hugepages",
                  "there are enough now, but the daemon began without them");
        check_fix_service(k, "restart");
    } else {
        check_add(k, CHECK_OK, "hugepages",
                  "%s need %" PRIu64 " pages of %s; %" PRIu64 " are theirs, %" PRIu64 " free",
                  k->plan.source, h->pages, size, h->held, h->have.available);
    }
}

void check_hugepages(struct check *k)
{
    struct huge_need h = huge_need(k);

    if (k->plan.known && k->plan.hugepages == CONFIG_HUGEPAGES_OFF) {
        check_add(k, CHECK_OK, "hugepages", "not wanted (hugepages = off)");
    } else if (h.page && !h.counted && system_is_directory(&k->system, "/sys/kernel/mm")) {
        check_add(k, lack(k), "hugepages", "this kernel has no hugepages of %" PRIu64 " KiB",
                  h.page / 1024);
        check_fix(k, "\"page_size = auto\" in [daemon], or boot with hugepagesz=%" PRIu64 "K",
                  h.page / 1024);
    } else if (!h.counted) {
        check_add(k, CHECK_SKIP, "hugepages", "this kernel does not tell about hugepages");
    } else if (!k->plan.known) {
        check_add(k, CHECK_SKIP, "hugepages",
                  "%" PRIu64 " pages of %" PRIu64 " KiB free; what pools need is unknown",
                  h.have.available, h.page / 1024);
    } else {
        report_hugepages(k, &h);
    }
}

/* ---- hugetlbfs: files on it outlive the daemon */

static void fix_mount(struct check *k, uint64_t page, uint64_t dflt)
{
    char dir[64] = "/dev/hugepages";

    if (page == dflt && system_is_directory(&k->system, "/run/systemd/system")) {
        check_fix(k, "systemctl start dev-hugepages.mount");
        return;
    }
    if (page != dflt)
        snprintf(dir, sizeof(dir), "/dev/hugepages-%" PRIu64 "kB", page / 1024);
    check_fix(k, "mkdir -p %s && mount -t hugetlbfs -o pagesize=%" PRIu64 "K none %s", dir,
              page / 1024, dir);
}

static void check_hugetlbfs_dir(struct check *k, const struct huge_need *h)
{
    const char *dir = k->plan.hugetlbfs;
    struct mount m = {.point = ""}, any;
    bool mounted = system_mount_of(&k->system, dir, &m) && strcmp(m.type, "hugetlbfs") == 0;
    uint64_t page = m.page_bytes ? m.page_bytes : h->dflt;

    if (!mounted) {
        check_add(k, CHECK_WARN, "hugetlbfs",
                  "%s is not on a hugetlbfs: pools become memfds, which end with the daemon", dir);
        if (!system_hugetlbfs(&k->system, h->page, h->dflt, &any))
            fix_mount(k, h->page, h->dflt);
        else
            check_fix(k, "\"hugetlbfs = %s/kvd\" in [daemon]", any.point);
    } else if (page != h->page) {
        check_add(k, CHECK_WARN, "hugetlbfs",
                  "%s has pages of %" PRIu64 " KiB, not of %" PRIu64 " KiB", dir, page / 1024,
                  h->page / 1024);
        check_fix(k, "\"page_size = auto\" in [daemon]");
    } else if (!system_is_directory(&k->system, dir)) {
        check_add(k, CHECK_WARN, "hugetlbfs",
                  "%s does not exist: pools become memfds, which end with the daemon", dir);
        check_fix(k, "install -d -m 0700 -o kvd -g kvd %s", dir);
    } else {
        check_add(k, CHECK_OK, "hugetlbfs", "%s is on the mount %s", dir, m.point);
    }
}

void check_hugetlbfs(struct check *k)
{
    struct huge_need h = huge_need(k);
    struct mount m;

    if (!k->plan.known || k->plan.hugepages == CONFIG_HUGEPAGES_OFF || !h.page)
        return; /* said already */
    if (k->plan.hugetlbfs[0]) {
        check_hugetlbfs_dir(k, &h);
    } else if (system_hugetlbfs(&k->system, h.page, h.dflt, &m)) {
        check_add(k, CHECK_OK, "hugetlbfs", "mounted on %s", m.point);
    } else {
        check_add(k, CHECK_WARN, "hugetlbfs",
                  "no mount for pages of %" PRIu64
                  " KiB: pools become memfds, which end with the daemon",
                  h.page / 1024);
        fix_mount(k, h.page, h.dflt);
    }
}

/* ---- memory */

/* Bytes of pools that are still to be made of small pages. */
static uint64_t small_need(struct check *k)
{
    struct huge_need h = huge_need(k);
    uint64_t sum = 0;

    if (!k->plan.known || k->plan.made)
        return 0;
    for (size_t i = 0; i < k->plan.n; i++)
        sum += pool_bytes(&k->plan.pools[i]);
    if (k->plan.hugepages == CONFIG_HUGEPAGES_OFF || !h.counted)
        return sum;
    return k->plan.hugepages == CONFIG_HUGEPAGES_TRY ? missing_pages(&h) * h.page : 0;
}

/* The running daemon's small pages are free again before the next one starts. */
static uint64_t small_held(const struct check *k)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < k->running.n; i++)
        if (!k->running.pools[i].huge_page)
            sum += pool_bytes(&k->running.pools[i]);
    return sum;
}

static void lacks_memory(struct check *k, enum check_level level, uint64_t need, uint64_t room,
                         const char *where)
{
    char a[SMALL_TEXT_SIZE], b[SMALL_TEXT_SIZE];

    text_size(need, a);
    text_size(room, b);
    check_add(k, level, "memory", "%s need %s on small pages, %s leaves %s", k->plan.source, a,
              where, b);
}

/* vm.overcommit_memory = 2: the kernel promises no more than it has. */
static bool commit_room(struct check *k, uint64_t *ret)
{
    uint64_t mode = 0, limit, used;

    if (!system_number(&k->system, "/proc/sys/vm/overcommit_memory", &mode) || mode != 2 ||
        !system_meminfo(&k->system, "CommitLimit:", &limit) ||
        !system_meminfo(&k->system, "Committed_AS:", &used))
        return false;
    *ret = limit > used ? limit - used : 0;
    return true;
}

static bool check_small(struct check *k, uint64_t need)
{
    static const struct cgroup_files files = {"memory", "memory.max", "memory.current",
                                              "memory.limit_in_bytes", "memory.usage_in_bytes"};
    uint64_t held = small_held(k), room;
    bool good = true;

    if (system_meminfo(&k->system, "MemAvailable:", &room) && room + held < need) {
        lacks_memory(k, CHECK_FAIL, need, room + held, "this machine");
        check_fix(k, "a smaller \"size\" (or \"slots\") in [pool %s]", k->plan.pools[0].name);
        good = false;
    }
    if (commit_room(k, &room) && room + held < need) {
        lacks_memory(k, CHECK_FAIL, need, room + held, "vm.overcommit_memory = 2");
        check_fix(k, "sysctl vm.overcommit_memory=0");
        good = false;
    }
    if (system_cgroup_room(&k->system, k->daemon_pid, &files, &room) && room + held < need) {
        lacks_memory(
            k, k->daemon_pid ? CHECK_FAIL : CHECK_WARN, need, room + held,
            k->daemon_pid
                ? "the memory limit of the daemon's control group"
                : "the memory limit of this shell's control group (and of a daemon started here)");
        check_fix(k, "systemctl set-property kvd.service MemoryMax=infinity (docker: --memory)");
        good = false;
    }
    return good;
}

/* Hugepages have a limit of their own. */
static bool check_huge_group(struct check *k)
{
    struct huge_need h = huge_need(k);
    char v2[2][48], v1[2][64], name[24];
    struct cgroup_files files = {"hugetlb", v2[0], v2[1], v1[0], v1[1]};
    uint64_t room;

    if (!k->plan.known || k->plan.hugepages == CONFIG_HUGEPAGES_OFF || !h.page)
        return true;
    if (h.page >= 1u << 30)
        snprintf(name, sizeof(name), "%" PRIu64 "GB", h.page >> 30);
    else if (h.page >= 1u << 20)
        snprintf(name, sizeof(name), "%" PRIu64 "MB", h.page >> 20);
    else
        snprintf(name, sizeof(name), "%" PRIu64 "KB", h.page >> 10);
    snprintf(v2[0], sizeof(v2[0]), "hugetlb.%s.max", name);
    snprintf(v2[1], sizeof(v2[1]), "hugetlb.%s.current", name);
    snprintf(v1[0], sizeof(v1[0]), "hugetlb.%s.limit_in_bytes", name);
    snprintf(v1[1], sizeof(v1[1]), "hugetlb.%s.usage_in_bytes", name);
    if (!system_cgroup_room(&k->system, k->daemon_pid, &files, &room) ||
        room + h.held * h.page >= h.pages * h.page)
        return true;
    check_add(k, lack(k), "memory",
              "%s need %" PRIu64 " hugepages, but %s of the control group allows %" PRIu64,
              k->plan.source, h.pages, v2[0], room / h.page + h.held);
    check_fix(k,
              "echo max > .../%s of that control group (Kubernetes: hugepages-%" PRIu64
              "Mi in the pod's limits)",
              v2[0], h.page >> 20);
    return false;
}

void check_memory(struct check *k)
{
    uint64_t need = small_need(k);
    bool good = check_huge_group(k);
    char size[SMALL_TEXT_SIZE];

    if (need)
        good = check_small(k, need) && good;
    text_size(need, size);
    if (!k->plan.known)
        check_add(k, CHECK_SKIP, "memory", "what pools need is unknown");
    else if (good && k->plan.made)
        check_add(k, CHECK_OK, "memory", "the daemon has all of it");
    else if (good && need)
        check_add(k, CHECK_OK, "memory", "%s need %s on small pages, which can be had",
                  k->plan.source, size);
    else if (good)
        check_add(k, CHECK_OK, "memory", "%s need hugepages only", k->plan.source);
}

/* ---- the runtime directory */

static void check_tmpfs_room(struct check *k, const struct mount *m)
{
    uint64_t need = small_need(k), held = small_held(k), room;
    char a[SMALL_TEXT_SIZE], b[SMALL_TEXT_SIZE];

    if (!need || !system_room(&k->system, m->point, &room) || room == UINT64_MAX ||
        room + held >= need) {
        check_add(k, CHECK_OK, "runtime_dir", "%s is on a tmpfs", k->plan.runtime_dir);
        return;
    }
    text_size(need, a);
    text_size(room + held, b);
    check_add(k, CHECK_WARN, "runtime_dir",
              "%s need %s on small pages, the tmpfs %s has %s free: they become memfds, which end "
              "with the daemon",
              k->plan.source, a, m->point, b);
    check_fix(k, "mount -o remount,size=%" PRIu64 "M %s", ((need + (need >> 3)) >> 20) + 1,
              m->point);
}

void check_runtime_dir(struct check *k)
{
    const char *dir = k->plan.runtime_dir;
    struct mount m;

    if (!dir[0]) {
        check_add(k, CHECK_SKIP, "runtime_dir", "it is unknown");
    } else if (!system_mount_of(&k->system, dir, &m)) {
        check_add(k, CHECK_SKIP, "runtime_dir", "mounts cannot be read from /proc");
    } else if (strcmp(m.type, "tmpfs") == 0) {
        check_tmpfs_room(k, &m);
    } else {
        check_add(k, CHECK_WARN, "runtime_dir",
                  "%s is on %s, not on a tmpfs: what lies there becomes memfds, which end with the "
                  "daemon",
                  dir, m.type);
        check_fix(k, "\"runtime_dir = /run/kvd\" in [daemon]");
    }
}

/* ---- RLIMIT_MEMLOCK: kvd itself locks nothing, but who registers a pool with a device does */

#define CAP_IPC_LOCK_BIT 14u

void check_memlock(struct check *k)
{
    uint64_t limit, caps = 0, need = 0;
    char a[SMALL_TEXT_SIZE], b[SMALL_TEXT_SIZE];

    for (size_t i = 0; i < k->plan.n; i++)
        need += pool_bytes(&k->plan.pools[i]);
    system_field(&k->system, "/proc/self/status", "CapEff:", 16, &caps);
    if (!system_field(&k->system, "/proc/self/limits", "Max locked memory", 10, &limit)) {
        check_add(k, CHECK_SKIP, "memlock", "limits cannot be read from /proc");
    } else if (limit == UINT64_MAX) {
        check_add(k, CHECK_OK, "memlock", "no limit");
    } else if (caps >> CAP_IPC_LOCK_BIT & 1) {
        check_add(k, CHECK_OK, "memlock", "the limit does not bind this user (CAP_IPC_LOCK)");
    } else if (limit >= need) {
        text_size(limit, a);
        check_add(k, CHECK_OK, "memlock", "a process may lock %s", a);
    } else {
        text_size(limit, a);
        text_size(need, b);
        check_add(k, CHECK_WARN, "memlock",
                  "a worker started like this shell may lock %s, %s are %s: it cannot register "
                  "them for RDMA or io_uring",
                  a, k->plan.source, b);
        check_fix(k, "LimitMEMLOCK=infinity in the worker's unit (shell: ulimit -l unlimited; "
                     "docker: --ulimit memlock=-1)");
    }
}
