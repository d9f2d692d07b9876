/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the NVMe tier: the daemon's stores, and where configured ones will lie. */
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "daemon/spill/format.h"
#include "stores.h"

/* ---- what the daemon says of them */

static void report_unwell(struct check *k, const Kvd__Proto__StoreStatus *x)
{
    bool has_problem = x->problem && x->problem[0], has_fix = x->fix && x->fix[0];
    char text[2048];

    snprintf(text, sizeof(text), "%s (%s) is %s%s%s%s%s", x->name, x->path, x->state,
             has_problem ? ": " : "", has_problem ? x->problem : "", has_fix ? "; fix: " : "",
             has_fix ? x->fix : "");
    check_add_advice(k, CHECK_FAIL, "stores", text);
    if (strstr(text, "; fix: "))
        return;
    if (strcmp(x->state, "waiting") == 0)
        check_fix(k, "wait, or end the other daemon that has it open: fuser -v %s", x->path);
    else
        check_fix(k, "kvctl spill online %s", x->name);
}

static void report_busy(struct check *k, const Kvd__Proto__StoreStatus *x)
{
    const Kvd__Proto__StoreTask *t = x->task;

    if (t && t->running && t->total)
        check_add(k, CHECK_WARN, "stores", "%s is not in use yet: %s, %.0f %%", x->name, x->state,
                  100.0 * (double)t->done / (double)t->total);
    else
        check_add(k, CHECK_WARN, "stores", "%s is not in use yet: %s", x->name, x->state);
    check_fix(k, "wait; kvctl spill status %s tells how far it is", x->name);
}

static void report_errors(struct check *k, const Kvd__Proto__StoreStatus *x)
{
    check_add(k, CHECK_WARN, "stores",
              "%s (%s) has had %" PRIu64 " error%s; what was hit is a miss", x->name, x->path,
              x->errors, x->errors == 1 ? "" : "s");
    check_fix(k,
              "journalctl -k -e and smartctl -a say whether the drive fails; kvctl spill scrub %s",
              x->name);
}

/* Whether there was anything to say. */
static bool report_store(struct check *k, const Kvd__Proto__StoreStatus *x)
{
    bool online = strcmp(x->state, "online") == 0, noted = x->note && x->note[0];
    bool said = store_is_mentioned(k->status.response->status_reply, x->name);

    if (store_is_unwell(x) && !said)
        report_unwell(k, x);
    else if (!online && !said)
        report_busy(k, x);
    else if (online && x->has_errors && x->errors)
        report_errors(k, x);
    else if (online && noted)
        check_add_advice(k, CHECK_WARN, "stores", x->note);
    else
        return !online;
    return true;
}

void check_stores(struct check *k)
{
    const Kvd__Proto__SpillReply *s;
    unsigned bad = 0;

    if (!k->has_stores)
        return; /* it needs none */
    s = k->stores.response->spill;
    for (size_t i = 0; i < s->n_stores; i++)
        bad += report_store(k, s->stores[i]);
    if (bad == 0)
        check_add(k, CHECK_OK, "stores", "%zu online", s->n_stores);
}

/* ---- where those of a configuration will lie */

/* Who will run the daemon: who runs it, else the user that the unit has, else this one. */
struct user {
    uid_t uid;
    gid_t gid;
    char name[64];
};

static void find_user(const struct check *k, struct user *ret)
{
    uid_t uid = k->reachable && k->daemon_pid ? k->daemon_uid : geteuid();
    const struct passwd *p = k->reachable && k->daemon_pid ? NULL : getpwnam("kvd");

    p = p ? p : getpwuid(uid);
    *ret = (struct user){.uid = p ? p->pw_uid : uid, .gid = p ? p->pw_gid : getegid()};
    if (p)
        snprintf(ret->name, sizeof(ret->name), "%s", p->pw_name);
    else
        snprintf(ret->name, sizeof(ret->name), "%u", (unsigned)uid);
}

static bool is_of_group(const struct user *u, gid_t gid)
{
    gid_t list[256];
    int n = sizeof(list) / sizeof(list[0]);

    if (u->gid == gid)
        return true;
    if (getgrouplist(u->name, u->gid, list, &n) < 0)
        return false;
    for (int i = 0; i < n; i++)
        if (list[i] == gid)
            return true;
    return false;
}

/* By the mode alone. `want`: of R_OK, W_OK, X_OK. */
static bool may(const struct user *u, const struct stat *st, unsigned want)
{
    unsigned shift = u->uid == st->st_uid ? 6 : is_of_group(u, st->st_gid) ? 3 : 0;

    return u->uid == 0 || (st->st_mode >> shift & want) == want;
}

/* The first folder of the path that the user may not pass; of the last one, `want` more. */
static bool is_shut(const struct check *k, const struct user *u, const char *dir, unsigned want,
                    char *ret, size_t size)
{
    struct stat st;
    size_t n = 0;

    for (bool last = false; !last;) {
        n += 1 + strcspn(dir + n + 1, "/");
        last = !dir[n] || !dir[1];
        snprintf(ret, size, "%.*s", (int)n, dir);
        if (system_stat(&k->system, ret, &st) == 0 && !may(u, &st, X_OK | (last ? want : 0)))
            return true;
    }
    return false;
}

/* ---- on which file system */

static bool is_one_of(const char *type, const char *const *list, size_t n, bool beginning)
{
    for (size_t i = 0; i < n; i++)
        if (beginning ? strncmp(type, list[i], strlen(list[i])) == 0 : strcmp(type, list[i]) == 0)
            return true;
    return false;
}

static bool is_remote(const char *type)
{
    static const char *const list[] = {"nfs", "cifs", "smb3", "9p", "fuse", "overlay"};

    return is_one_of(type, list, sizeof(list) / sizeof(list[0]), true);
}

/* Those that hold no files of ours. */
static bool is_pseudo(const char *type)
{
    static const char *const list[] = {
        "proc",   "sysfs",    "cgroup",     "cgroup2", "debugfs",   "tracefs",
        "devpts", "devtmpfs", "securityfs", "mqueue",  "configfs",  "bpf",
        "pstore", "efivarfs", "hugetlbfs",  "fusectl", "selinuxfs", "binfmt_misc"};

    return is_one_of(type, list, sizeof(list) / sizeof(list[0]), false);
}

static void check_type(struct check *k, const struct check_store *x, const struct mount *m)
{
    if (strcmp(m->type, "tmpfs") == 0 || strcmp(m->type, "ramfs") == 0) {
        check_add(k, CHECK_WARN, "stores",
                  "%s is on a %s: it takes memory, and a reboot empties it", x->path, m->type);
        check_fix(k, "\"path\" in [spill %s]: below /var/lib/kvd, or another folder on a drive",
                  x->name);
    } else if (is_remote(m->type)) {
        check_add(k, CHECK_WARN, "stores",
                  "%s is on %s, which may do without direct I/O, or slowly", x->path, m->type);
        check_fix(k, "\"path\" in [spill %s]: on ext4 or XFS on a local drive, or the drive itself",
                  x->name);
    } else {
        check_add(k, CHECK_OK, "stores", "%s: %s is on %s", x->name, x->path, m->type);
    }
}

static void too_large(struct check *k, const struct check_store *x, const char *dir, uint64_t room,
                      uint64_t there)
{
    uint64_t fits = there + room - (room >> 4);
    char a[SMALL_TEXT_SIZE], b[SMALL_TEXT_SIZE];
    bool large = fits >> 30 >= 2;

    text_size(x->size - there, a);
    text_size(room, b);
    check_add(k, CHECK_FAIL, "stores", "%s will take %s, but %s has %s free", x->path, a, dir, b);
    check_fix(k, "\"size = %" PRIu64 "%c\" in [spill %s], or space", fits >> (large ? 30 : 20),
              large ? 'G' : 'M', x->name);
}

/* ---- what is there already */

enum found { FOUND_STORE, FOUND_BLANK, FOUND_OTHER };

static uint8_t *new_buffer(size_t size)
{
    uint8_t *buffer = malloc(size);

    if (!buffer)
        ctl_out_of_memory();
    return buffer;
}

/* As the daemon sees it, but for the signatures that libblkid knows. Or a negative errno. */
static int look_into(const struct check *k, const char *path)
{
    static const uint64_t copies[] = {0, FORMAT_SUPER_COPY};
    uint8_t *bytes = new_buffer(FORMAT_TABLE);
    struct format_super super;
    int r = 0, found;

    r = system_read(&k->system, path, bytes, FORMAT_TABLE, 0);
    found = bytes[0] || memcmp(bytes, bytes + 1, FORMAT_TABLE - 1) != 0 ? FOUND_OTHER : FOUND_BLANK;
    for (size_t i = 0; i < 2; i++) {
        int as = format_super_decode(bytes + copies[i], &super);

        if (as != -ENODATA && as != -EBADMSG)
            found = FOUND_STORE; /* whatever is the matter with it: the daemon says */
    }
    free(bytes);
    return r < 0 ? r : found;
}

/* Whether there is something that keeps the store offline, which was told. */
static bool is_foreign(struct check *k, const struct check_store *x, bool device, int found)
{
    if (found == FOUND_STORE || (found == FOUND_BLANK && !device))
        return false;
    if (found < 0) {
        check_add(k, CHECK_SKIP, "stores", "%s cannot be looked into: %s", x->path,
                  strerror(-found));
        check_fix(k, "sudo kvctl check -c FILE");
        return true;
    }
    check_add(k, CHECK_FAIL, "stores",
              found == FOUND_BLANK ? "%s is no store yet: a device stays offline until it has been "
                                     "formatted, once"
                                   : "%s is not empty and no store of kvd: kvd will not touch it",
              x->path);
    check_fix(k, "%swhen kvd runs: kvctl spill format %s%s",
              found == FOUND_BLANK ? "" : "another path; or if nobody needs what is there, ",
              x->name, found == FOUND_BLANK ? "" : " --force");
    return true;
}

/* Whether the user may not open it, which was told. */
static bool is_forbidden(struct check *k, const struct check_store *x, const struct stat *st)
{
    bool device = S_ISBLK(st->st_mode);
    struct user u;

    if (k->system.root[0]) /* there owners mean nothing */
        return false;
    find_user(k, &u);
    if (st->st_mode & (device ? S_IWOTH : S_IWGRP | S_IWOTH)) {
        check_add(k, CHECK_FAIL, "stores", "others than its owner may write %s (mode %04o)",
                  x->path, (unsigned)st->st_mode & 07777);
        check_fix(k, "chmod go-w %s", x->path);
        return true;
    }
    if (may(&u, st, R_OK | W_OK) && (st->st_uid == 0 || st->st_uid == u.uid))
        return false;
    check_add(k, CHECK_FAIL, "stores", "%s belongs to user %u, mode %04o: user %s cannot use it",
              x->path, (unsigned)st->st_uid, (unsigned)st->st_mode & 07777, u.name);
    if (device)
        check_fix(k, "a udev rule: SUBSYSTEM==\"block\", KERNEL==\"...\", OWNER=\"%s\"", u.name);
    else
        check_fix(k, "chown %s %s", u.name, x->path);
    return true;
}

/* ---- what is to be made */

static void no_directory(struct check *k, const struct check_store *x, const char *dir)
{
    struct user u;

    find_user(k, &u);
    check_add(k, CHECK_FAIL, "stores", "%s does not exist, in which store %s is to be made", dir,
              x->name);
    if (k->system.root[0])
        check_fix(k, "install -d -m 0700 -o kvd -g kvd %s", dir);
    else if (u.uid == 0)
        check_fix(k, "install -d -m 0700 %s", dir);
    else
        check_fix(k, "install -d -m 0700 -o %s -g %u %s", u.name, (unsigned)u.gid, dir);
}

/* Whether it is where no file can be made, which was told. */
static bool is_nowhere(struct check *k, const struct check_store *x)
{
    struct mount m;

    if (!system_mount_of(&k->system, x->path, &m) || !is_pseudo(m.type))
        return false;
    check_add(k, CHECK_FAIL, "stores", "%s is on a %s, which holds no stores", x->path, m.type);
    check_fix(k, "\"path\" in [spill %s]: below /var/lib/kvd, or another folder on a drive",
              x->name);
    return true;
}

/* Whether none can be made there, which was told. */
static bool is_denied(struct check *k, const struct check_store *x, const char *dir)
{
    char shut[sizeof(x->path)];
    struct user u;

    find_user(k, &u);
    if (k->system.root[0] || !is_shut(k, &u, dir, W_OK, shut, sizeof(shut)))
        return false;
    if (strcmp(shut, dir) == 0) {
        check_add(k, CHECK_FAIL, "stores", "user %s may not make files in %s", u.name, dir);
        check_fix(k, "chown %s %s", u.name, dir);
    } else {
        check_add(k, CHECK_FAIL, "stores", "user %s may not look into %s, below which store %s is",
                  u.name, shut, x->name);
        check_fix(k, "chmod a+x %s", shut);
    }
    return true;
}

static void check_file(struct check *k, const struct check_store *x, const char *dir)
{
    uint64_t room, there = system_allocated(&k->system, x->path);
    struct mount m;

    if (!system_mount_of(&k->system, dir, &m))
        check_add(k, CHECK_SKIP, "stores", "mounts cannot be read from /proc");
    else if (is_denied(k, x, dir))
        return;
    else if (system_room(&k->system, dir, &room) &&
             room < x->size - (there < x->size ? there : x->size))
        too_large(k, x, dir, room, there);
    else
        check_type(k, x, &m);
}

static void check_present(struct check *k, const struct check_store *x, const struct stat *st,
                          const char *dir)
{
    bool device = S_ISBLK(st->st_mode);
    int found;
    struct mount m;

    if (is_forbidden(k, x, st))
        return;
    found = look_into(k, x->path);
    if (is_foreign(k, x, device, found))
        return;
    if (device)
        check_add(k, CHECK_OK, "stores", "%s: %s is a block device", x->name, x->path);
    else if (found == FOUND_BLANK) /* to be made anew, with another size perhaps */
        check_file(k, x, dir);
    else if (system_mount_of(&k->system, x->path, &m))
        check_type(k, x, &m);
    else
        check_add(k, CHECK_SKIP, "stores", "mounts cannot be read from /proc");
}

static bool is_below_dev(const char *path)
{
    return strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0;
}

static void check_place(struct check *k, const struct check_store *x)
{
    char dir[sizeof(x->path)];
    struct stat st;
    int r = system_stat(&k->system, x->path, &st);

    snprintf(dir, sizeof(dir), "%s", x->path);
    *strrchr(dir, '/') = '\0';
    if (!dir[0])
        strcpy(dir, "/");
    if (r == -EACCES) {
        check_add(k, CHECK_SKIP, "stores", "%s cannot be looked at: %s", x->path, strerror(-r));
        check_fix(k, "sudo kvctl check -c FILE");
    } else if (r == 0 && (S_ISBLK(st.st_mode) || st.st_size > 0)) {
        check_present(k, x, &st, dir);
    } else if (r == 0 && is_forbidden(k, x, &st)) {
        return;
    } else if (r < 0 && is_below_dev(x->path)) {
        check_add(k, CHECK_FAIL, "stores", "%s: there is no such device", x->path);
        check_fix(k, "lsblk lists them; \"path\" in [spill %s]", x->name);
    } else if (is_nowhere(k, x)) {
        return;
    } else if (!system_is_directory(&k->system, dir)) {
        no_directory(k, x, dir);
    } else {
        check_file(k, x, dir);
    }
}

void check_places(struct check *k)
{
    for (size_t i = 0; i < k->plan.n_stores; i++)
        check_place(k, &k->plan.stores[i]);
}

/* ---- io_uring */

/* 0: it can be had. As this process, not as the daemon. */
static int try_io_uring(void)
{
    /* No entries and no parameters: EINVAL or EFAULT, unless it is denied before it looks. */
    if (syscall(SYS_io_uring_setup, 0, NULL) >= 0 || errno == EINVAL || errno == EFAULT)
        return 0;
    return -errno;
}

void check_io_uring(struct check *k)
{
    enum check_level level = CHECK_WARN;
    uint64_t disabled = 0;
    bool wanted = false;
    int r;

    for (size_t i = 0; i < k->plan.n_stores; i++) {
        wanted |= k->plan.stores[i].io != CONFIG_IO_THREADS;
        if (k->plan.stores[i].io == CONFIG_IO_URING)
            level = CHECK_FAIL;
    }
    if (!wanted)
        return;
    r = try_io_uring();
    if (system_number(&k->system, "/proc/sys/kernel/io_uring_disabled", &disabled) && disabled) {
        check_add(k, level, "io_uring",
                  "kernel.io_uring_disabled = %" PRIu64 ": stores get by with threads", disabled);
        check_fix(k, "sysctl kernel.io_uring_disabled=0");
    } else if (r == -EPERM) {
        check_add(k, level, "io_uring", "it is denied here: stores get by with threads");
        check_fix(k, "a seccomp profile that allows io_uring_setup, io_uring_enter and "
                     "io_uring_register (docker: --security-opt seccomp=FILE)");
    } else if (r < 0) {
        check_add(k, level, "io_uring",
                  "the kernel does not have it (%s): stores get by with threads", strerror(-r));
        check_fix(k, "a kernel with CONFIG_IO_URING");
    } else {
        check_add(k, CHECK_OK, "io_uring", "can be had");
    }
}
