/* SPDX-License-Identifier: Apache-2.0 */
#include "stores.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/loop.h>
#include <sched.h>
#include <seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#define HELD_BPS "64" /* bytes per second: should we die, what is held ends by itself some day */

/* What stores_fini() takes back. */
static char folders[8][64];
static char mounts[4][96];
static struct device *devices[4];
static bool own_mounts;
static char enabled_io[64]; /* subtree_control in which we have enabled the io controller */

static size_t room_in(const char *table, size_t each, size_t n)
{
    size_t i = 0;

    while (i < n && table[i * each])
        i++;
    cr_assert_lt(i, n, "too many of them for stores_fini()");
    return i;
}

void stores_folder(char ret_dir[64])
{
    strcpy(ret_dir, "/var/tmp/kvd-system-XXXXXX");
    cr_assert_not_null(mkdtemp(ret_dir), "%s", strerror(errno));
    strcpy(folders[room_in(folders[0], sizeof(folders[0]), 8)], ret_dir);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    remove(path);
    return 0;
}

static bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return ok;
}

static void need_root(const char *what)
{
    if (geteuid() != 0)
        cr_skip_test("needs root, for %s", what);
}

/* ---- devices */

/* Somebody else may take the free one before us. */
static int loop_configure(struct device *v, const struct loop_config *c)
{
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int r = control < 0 ? -1 : 0;

    for (int tries = 0; r == 0 && tries < 20; tries++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);

        snprintf(v->path, sizeof(v->path), "/dev/loop%d", n);
        v->fd = n < 0 ? -1 : open(v->path, O_RDWR | O_CLOEXEC);
        if (v->fd >= 0 && ioctl(v->fd, LOOP_CONFIGURE, c) == 0)
            break;
        r = n < 0 || errno != EBUSY ? -1 : 0;
        if (v->fd >= 0)
            close(v->fd);
        v->fd = -1;
    }
    if (control >= 0)
        close(control);
    return v->fd >= 0 ? 0 : -1;
}

static void enter_own_mounts(void)
{
    if (own_mounts)
        return;
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        cr_skip_test("no mount namespace of our own: %s", strerror(errno));
    own_mounts = true;
}

static void note_mount(const char *where)
{
    strcpy(mounts[room_in(mounts[0], sizeof(mounts[0]), 4)], where);
}

void device_mount(struct device *v)
{
    int r = -1;

    enter_own_mounts();
    snprintf(v->mount, sizeof(v->mount), "%s/mnt", v->dir);
    mkdir(v->mount, 0755);
    for (int tries = 0; r < 0 && tries < 100; tries++) { /* udev may be looking at it */
        r = mount(v->path, v->mount, "ext4", MS_NOATIME, NULL);
        if (r < 0)
            usleep(10000);
    }
    if (r < 0)
        cr_skip_test("cannot mount %s: %s", v->path, strerror(errno));
    note_mount(v->mount);
}

void device_unmount(struct device *v)
{
    cr_assert_eq(umount2(v->mount, 0), 0, "%s", strerror(errno));
    for (size_t i = 0; i < 4; i++)
        if (strcmp(mounts[i], v->mount) == 0)
            mounts[i][0] = 0;
    v->mount[0] = 0;
}

void stores_mount(const char *type, const char *options, char ret_dir[64])
{
    need_root("a mount");
    enter_own_mounts();
    stores_folder(ret_dir);
    if (mount("none", ret_dir, type, 0, options) < 0)
        cr_skip_test("cannot mount %s: %s", type, strerror(errno));
    note_mount(ret_dir);
}

static void run_mkfs(const struct device *v, const char *mkfs)
{
    char command[256];

    snprintf(command, sizeof(command), "PATH=$PATH:/usr/sbin:/sbin %s %s >/dev/null 2>&1", mkfs,
             v->path);
    if (system(command) != 0)
        cr_skip_test("\"%s\" does not work here", mkfs);
}

void device_make(struct device *v, uint64_t bytes, uint32_t block, const char *mkfs)
{
    char image[96];
    struct loop_config c = {.block_size = block, .info.lo_flags = LO_FLAGS_AUTOCLEAR};
    size_t i = 0;
    int fd;

    need_root("a loop device");
    *v = (struct device){.fd = -1};
    stores_folder(v->dir);
    snprintf(image, sizeof(image), "%s/image", v->dir);
    fd = open(image, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "%s", strerror(errno));
    c.fd = (uint32_t)fd;
    if (loop_configure(v, &c) < 0)
        cr_skip_test("no loop device to be had: %s", strerror(errno));
    close(fd);
    while (devices[i])
        i++;
    devices[i] = v;
    if (mkfs)
        run_mkfs(v, mkfs);
}

/* ---- holding */

static void make_group(struct device *v, const char *root)
{
    snprintf(v->group, sizeof(v->group), "%s/kvd-system-%d", root, (int)getpid());
    if (mkdir(v->group, 0755) < 0) {
        v->group[0] = 0;
        cr_skip_test("no control group of our own: %s", strerror(errno));
    }
}

static bool has_io(const char *file)
{
    char text[256] = " ";
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text + 1, sizeof(text) - 3);

    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return false;
    text[n] = ' '; /* the line feed */
    text[n + 1] = 0;
    return strstr(text, " io ") != NULL;
}

void device_group(struct device *v)
{
    static const char control[] = "/sys/fs/cgroup/cgroup.subtree_control";

    need_root("a control group");
    if (access("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device", F_OK) == 0) {
        make_group(v, "/sys/fs/cgroup/blkio");
        return;
    }
    if (!has_io("/sys/fs/cgroup/cgroup.controllers"))
        cr_skip_test("the kernel has no control groups that limit I/O (blkio.throttle, io.max)");
    if (!has_io(control)) {
        if (!write_text(control, "+io"))
            cr_skip_test("the io controller cannot be enabled: %s", strerror(errno));
        strcpy(enabled_io, control);
    }
    v->v2 = true;
    make_group(v, "/sys/fs/cgroup");
}

int device_join(const struct device *v)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/cgroup.procs", v->group);
    return write_text(path, "0") ? 0 : -1;
}

static bool limit(const struct device *v, const char *file, const char *format, const char *value)
{
    char path[160], text[96];
    struct stat st;
    int n;

    if (fstat(v->fd, &st) < 0)
        return false;
    n = snprintf(text, sizeof(text), "%u:%u ", major(st.st_rdev), minor(st.st_rdev));
    snprintf(text + n, sizeof(text) - (size_t)n, format, value, value);
    snprintf(path, sizeof(path), "%s/%s", v->group, file);
    return write_text(path, text);
}

static bool limit_all(const struct device *v, const char *value)
{
    if (v->v2)
        return limit(v, "io.max", "rbps=%s wbps=%s", value);
    if (!limit(v, "blkio.throttle.read_bps_device", "%s", value))
        return false;
    return limit(v, "blkio.throttle.write_bps_device", "%s", value);
}

void device_hold(const struct device *v)
{
    cr_assert(limit_all(v, HELD_BPS), "%s", strerror(errno));
}

void device_release(const struct device *v)
{
    cr_assert(limit_all(v, v->v2 ? "max" : "0"), "%s", strerror(errno));
}

/* ---- what is said of stores */

static int ask_stores(struct daemon *d, const char *name, int action, bool force,
                      struct control_reply *ret)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Spill q = KVD__PROTO__SPILL__INIT;

    q.store = (char *)(uintptr_t)name;
    q.has_action = true;
    q.action = (Kvd__Proto__Spill__Action)action;
    q.has_force = true;
    q.force = force;
    request.body_case = KVD__PROTO__REQUEST__BODY_SPILL;
    request.spill = &q;
    return daemon_ask(d, &request, ret);
}

static void copy(char *to, size_t n, const char *from)
{
    snprintf(to, n, "%s", from ? from : "");
}

struct store_view daemon_store(struct daemon *d, const char *name)
{
    struct control_reply reply = {0};
    const Kvd__Proto__StoreStatus *s;
    struct store_view v = {.records = 0};

    cr_assert_eq(ask_stores(d, name, KVD__PROTO__SPILL__ACTION__STATUS, false, &reply), 0, "%s",
                 control_error(d->control));
    cr_assert_eq(reply.response->spill->n_stores, 1, "which store is %s?", name);
    s = reply.response->spill->stores[0];
    copy(v.state, sizeof(v.state), s->state);
    copy(v.problem, sizeof(v.problem), s->problem);
    copy(v.fix, sizeof(v.fix), s->fix);
    copy(v.io, sizeof(v.io), s->io);
    copy(v.note, sizeof(v.note), s->note);
    v.records = s->records;
    v.used = s->used;
    v.queued = s->queued;
    v.writing = s->writing;
    v.reading = s->reading;
    v.errors = s->errors;
    if (s->task) {
        copy(v.task_result, sizeof(v.task_result), s->task->result);
        v.task_running = s->task->running;
        v.task_status = s->task->status;
    }
    control_reply_free(&reply);
    return v;
}

bool store_settled(struct daemon *d, const char *name)
{
    struct store_view v = daemon_store(d, name);

    return v.queued == 0 && v.writing == 0;
}

int kvctl(struct daemon *d, char ret_text[8192], const char *arguments)
{
    const char *given = getenv("KVD_KVCTL");
    char command[512];
    size_t n;
    int status;
    FILE *f;

    snprintf(command, sizeof(command), "%s -s %s %s 2>&1 </dev/null", given ? given : KVD_KVCTL,
             d->admin, arguments);
    f = popen(command, "r");
    cr_assert_not_null(f);
    n = fread(ret_text, 1, 8191, f);
    ret_text[n] = 0;
    status = pclose(f);
    cr_assert(WIFEXITED(status), "%s: %x", command, status);
    return WEXITSTATUS(status);
}

unsigned count_statuses(const struct worker *w, int status)
{
    const char *at = strchr(w->reply, ' ');
    unsigned n = 0;

    for (; at; at = strchr(at + 1, ' '))
        n += atoi(at + 1) == status;
    return n;
}

/* ---- denying */

int deny(enum denied what)
{
    scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ALLOW);
    int r = -ENOMEM;

    if (ctx && what == DENY_IO_URING)
        r = seccomp_rule_add(ctx, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(io_uring_setup), 0);
    else if (ctx)
        r = seccomp_rule_add(ctx, SCMP_ACT_ERRNO(0), SCMP_SYS(flock), 0);
    if (r == 0)
        r = seccomp_load(ctx);
    seccomp_release(ctx);
    return r;
}

/* ---- suites */

void stores_init(void)
{
    harness_init();
}

/* What is held goes on first: nobody dies in the middle of it. */
void stores_fini(void)
{
    for (size_t i = 0; i < 4 && devices[i]; i++)
        if (devices[i]->group[0])
            limit_all(devices[i], devices[i]->v2 ? "max" : "0");
    harness_fini();
    for (size_t i = 0; i < 4; i++)
        if (mounts[i][0])
            umount2(mounts[i], MNT_DETACH);
    for (size_t i = 0; i < 4 && devices[i]; i++) {
        if (devices[i]->group[0])
            rmdir(devices[i]->group);
        if (devices[i]->fd >= 0)
            close(devices[i]->fd); /* and it detaches itself */
    }
    if (enabled_io[0])
        write_text(enabled_io, "-io");
    for (size_t i = 0; i < 8; i++)
        if (folders[i][0])
            nftw(folders[i], remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}
