/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the NVMe tier: the daemon's stores, and where configured ones will lie. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
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
    if (!strstr(text, "; fix: "))
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
              "%s (%s) has had %" PRIu64 " errors; what they hit is a miss", x->name, x->path,
              x->errors);
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

static void check_type(struct check *k, const struct check_store *x, const struct mount *m)
{
    static const char *const remote[] = {"nfs", "cifs", "smb3", "9p", "fuse", "overlay"};

    if (strcmp(m->type, "tmpfs") == 0 || strcmp(m->type, "ramfs") == 0) {
        check_add(k, CHECK_WARN, "stores",
                  "%s is on a %s: it takes memory, and a reboot empties it", x->path, m->type);
        check_fix(k, "\"path\" in [spill %s]: below /var/lib/kvd, or another folder on a drive",
                  x->name);
        return;
    }
    for (size_t i = 0; i < sizeof(remote) / sizeof(remote[0]); i++)
        if (strncmp(m->type, remote[i], strlen(remote[i])) == 0) {
            check_add(k, CHECK_WARN, "stores",
                      "%s is on %s, which may do without direct I/O, or slowly", x->path, m->type);
            check_fix(k,
                      "\"path\" in [spill %s]: on ext4 or XFS on a local drive, or the drive "
                      "itself",
                      x->name);
            return;
        }
    check_add(k, CHECK_OK, "stores", "%s: %s is on %s", x->name, x->path, m->type);
}

static void check_file(struct check *k, const struct check_store *x, const char *dir)
{
    uint64_t room, there = system_allocated(&k->system, x->path);
    char a[SMALL_TEXT_SIZE], b[SMALL_TEXT_SIZE];
    struct mount m;

    if (system_room(&k->system, dir, &room) &&
        room < x->size - (there < x->size ? there : x->size)) {
        text_size(x->size - there, a);
        text_size(room, b);
        check_add(k, CHECK_WARN, "stores", "%s will take %s, but %s has %s free", x->path, a, dir,
                  b);
        check_fix(k, "\"size = %" PRIu64 "M\" in [spill %s], or space",
                  (there + room - (room >> 4)) >> 20, x->name);
    } else if (system_mount_of(&k->system, x->path, &m)) {
        check_type(k, x, &m);
    } else {
        check_add(k, CHECK_SKIP, "stores", "mounts cannot be read from /proc");
    }
}

static void check_place(struct check *k, const struct check_store *x)
{
    char dir[sizeof(x->path)];

    snprintf(dir, sizeof(dir), "%s", x->path);
    *strrchr(dir, '/') = '\0';
    if (!dir[0])
        strcpy(dir, "/");
    if (x->size == 0) {
        check_add(k, CHECK_OK, "stores", "%s: %s is a block device", x->name, x->path);
    } else if (!system_is_directory(&k->system, dir)) {
        check_add(k, CHECK_FAIL, "stores", "%s does not exist, in which store %s is to be made",
                  dir, x->name);
        check_fix(k, "install -d -m 0700 -o kvd -g kvd %s", dir);
    } else if (strncmp(dir, "/dev", 4) != 0) {
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
