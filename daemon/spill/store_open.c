/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the file or device, and getting it for oneself. */
#include "daemon/spill/store_task.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define LOCK_TRY_MS 50u
#define BUSY_TRIES                                                                                 \
    20u /* so often a device is claimed and yet not locked before it counts as in use */
#define REPLACED_MAX 16u
#define STORE_DIR    192
#define OPEN_FLAGS   (O_RDWR | O_CLOEXEC | O_NOCTTY)
#define TRY_AGAIN    2 /* the path means another file by now */
#define HELD         3 /* by another program, so far */

static bool is_below_dev(const char *path)
{
    return strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0;
}

/* ---- why not, for those who have to mend it */

static const char *directory_of(const struct store_task *t, char buf[static STORE_DIR])
{
    const char *slash = strrchr(t->spec.path, '/');
    int n = slash && slash > t->spec.path ? (int)(slash - t->spec.path) : 1;

    snprintf(buf, STORE_DIR, "%.*s", n, slash ? t->spec.path : ".");
    return buf;
}

/* Open to the user that we are. */
static const char *install_command(const char *dir, char buf[static STORE_COMMAND])
{
    if (geteuid() == 0)
        snprintf(buf, STORE_COMMAND, "install -d -m 0700 %s", dir);
    else
        snprintf(buf, STORE_COMMAND, "install -d -m 0700 -o %u -g %u %s", geteuid(), getegid(),
                 dir);
    return buf;
}

static int cannot_make(struct store_task *t, int error)
{
    char dir[STORE_DIR], command[STORE_COMMAND];

    directory_of(t, dir);
    switch (error) {
    case -ENOENT:
        if (access(dir, F_OK) == 0) /* as in /proc */
            return store_fail(t, error, "no file can be made in %s; fix: another path", dir);
        return store_fail(t, error, "the directory %s does not exist; fix: %s", dir,
                          install_command(dir, command));
    case -ENOTDIR:
        return store_fail(t, error, "%s is no directory; fix: another path", dir);
    case -EACCES:
    case -EPERM:
        return store_fail(t, error, "user %u may not make files in %s; fix: chown %u %s", geteuid(),
                          dir, geteuid(), dir);
    case -EROFS:
        return store_fail(t, error,
                          "%s is read-only here; fix: mount it for writing, or in a unit of "
                          "systemd ReadWritePaths=%s",
                          dir, dir);
    default:
        return store_fail_call(t, "cannot be made", error);
    }
}

static int cannot_open(struct store_task *t, const struct stat *st, int error)
{
    if (error != -EACCES && error != -EPERM)
        return store_fail_call(t, "cannot be opened", error);
    if (st && S_ISBLK(st->st_mode))
        return store_fail(t, error,
                          "user %u may not open the device (mode %04o, user %u, group %u); fix: a "
                          "udev rule that gives it to this user, and in a unit of systemd "
                          "DeviceAllow=%s rw",
                          geteuid(), st->st_mode & 07777, st->st_uid, st->st_gid, t->spec.path);
    if (st)
        return store_fail(t, error,
                          "user %u may not open it (mode %04o, user %u); fix: chown %u %s",
                          geteuid(), st->st_mode & 07777, st->st_uid, geteuid(), t->spec.path);
    return store_fail(t, error,
                      "user %u may not look into its directory; fix: chmod a+x on the directories "
                      "above it, or another path",
                      geteuid());
}

static int make_file(struct store_task *t)
{
    if (is_below_dev(t->spec.path)) /* a file there would fill the memory of the host */
        return store_fail(t, -ENOENT, "there is no such device; fix: check the path and the cable");
    if (t->spec.bytes == 0)
        return store_fail(t, -ENOENT,
                          "there is no such file, and no size for a new one; fix: give "
                          "the store a size, or the path of a block device");
    t->file.fd = open(t->spec.path, OPEN_FLAGS | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
    if (t->file.fd < 0)
        return errno == EEXIST ? TRY_AGAIN : cannot_make(t, -errno);
    t->made = true;
    return 0;
}

/* A link may stand for a device, as udev makes them; whoever may change a link could lead us to
 * any file of root's. */
static int path_stat(struct store_task *t, struct stat *ret)
{
    struct stat st;

    if (lstat(t->spec.path, &st) < 0)
        return errno == ENOENT ? -ENOENT : cannot_open(t, NULL, -errno);
    if (S_ISLNK(st.st_mode)) {
        if (stat(t->spec.path, &st) < 0)
            return store_fail_call(t, "stat", -errno);
        if (!S_ISBLK(st.st_mode))
            return store_fail(t, -ELOOP,
                              "is a symbolic link to something that is not a block "
                              "device; fix: give the path of the file itself");
    }
    if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        return store_fail(t, -EINVAL, "is neither a regular file nor a block device");
    *ret = st;
    return 0;
}

/* ---- devices */

/* A device that is claimed may be held by a predecessor's I/O: then it is locked as well, and one waits. A
 * claim without a lock is a mount or another program. (The kernel drops the lock just before the
 * claim, hence the tries.) Read-only: closing a writable descriptor makes udev look at the device. */
static int device_claimed(struct store_task *t, unsigned *tries)
{
    int fd = open(t->spec.path, O_RDONLY | O_CLOEXEC | O_NOCTTY), r;

    if (fd < 0)
        return store_fail_call(t, "open", -errno);
    r = t->spec.no_lock || flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : -errno;
    close(fd);
    if (r == -EWOULDBLOCK) {
        *tries = 0;
        return HELD;
    }
    if (++*tries < BUSY_TRIES)
        return HELD;
    return store_fail(t, -EBUSY,
                      "the device is mounted or used by another program (see lsblk and "
                      "fuser); fix: free it, or give another path");
}

static int open_device(struct store_task *t, const struct stat *st, unsigned *tries)
{
    t->file.fd = open(t->spec.path, OPEN_FLAGS | O_EXCL);
    if (t->file.fd >= 0)
        return 0;
    return errno == EBUSY ? device_claimed(t, tries) : cannot_open(t, st, -errno);
}

static int device_size(struct store_task *t)
{
    int sector = 0;

    if (ioctl(t->file.fd, BLKSSZGET, &sector) < 0 || ioctl(t->file.fd, BLKGETSIZE64, &t->size) < 0)
        return store_fail_call(t, "ioctl", -errno);
    if (sector <= 0 || FORMAT_SECTOR % (unsigned)sector)
        return store_fail(t, -EINVAL,
                          "the device has sectors of %d bytes; at most %u are supported", sector,
                          FORMAT_SECTOR);
    return 0;
}

/* ---- opening and locking */

static int open_existing(struct store_task *t, const struct stat *st, unsigned *tries)
{
    if (S_ISBLK(st->st_mode))
        return open_device(t, st, tries);
    t->file.fd = open(t->spec.path, OPEN_FLAGS | O_NOFOLLOW);
    if (t->file.fd >= 0)
        return 0;
    return errno == ENOENT ? TRY_AGAIN : cannot_open(t, st, -errno);
}

static int open_once(struct store_task *t, unsigned *tries)
{
    struct stat st;
    int r = path_stat(t, &st);

    t->made = false;
    if (r == -ENOENT)
        return make_file(t);
    return r == 0 ? open_existing(t, &st, tries) : r;
}

/* What others could write, they could fill with records that fit. */
static int check_owner(struct store_task *t, const struct stat *st)
{
    mode_t others = S_ISBLK(st->st_mode) ? S_IWOTH : S_IWGRP | S_IWOTH;

    if (st->st_uid != 0 && st->st_uid != geteuid())
        return store_fail(t, -EACCES, "belongs to user %u; fix: chown %u %s", st->st_uid, geteuid(),
                          t->spec.path);
    if (st->st_mode & others)
        return store_fail(t, -EACCES, "others may write it (mode %04o); fix: chmod go-w %s",
                          st->st_mode & 07777, t->spec.path);
    return 0;
}

static int check_kind(struct store_task *t)
{
    struct stat st;

    if (fstat(t->file.fd, &st) < 0)
        return store_fail_call(t, "fstat", -errno);
    if (!S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
        return TRY_AGAIN;
    t->file.device = S_ISBLK(st.st_mode);
    return check_owner(t, &st);
}

static int lock(struct store_task *t)
{
    int r = 0;

    while (!t->spec.no_lock && flock(t->file.fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return store_fail_call(t, "flock", -errno);
        if (atomic_load(&t->phase) != STORE_LOCKING)
            store_phase_begin(t, STORE_LOCKING, 0);
        r = store_pause(t, LOCK_TRY_MS);
        if (r < 0)
            return r;
    }
    return 0;
}

/* While we waited, the holder may have removed the file, or another may have taken its place. */
static int check_still_there(struct store_task *t)
{
    struct stat st, now;

    if (fstat(t->file.fd, &st) < 0)
        return store_fail_call(t, "fstat", -errno);
    if (stat(t->spec.path, &now) < 0 || now.st_ino != st.st_ino || now.st_dev != st.st_dev)
        return TRY_AGAIN;
    t->size = (uint64_t)st.st_size;
    if (t->made && t->size > 0) /* another formatted it between our open and our lock */
        t->made = false;
    return t->file.device ? device_size(t) : 0;
}

static int attach_once(struct store_task *t, unsigned *tries)
{
    int r = open_once(t, tries);

    r = r ? r : check_kind(t);
    r = r ? r : lock(t);
    r = r ? r : check_still_there(t);
    if (r != 0 && t->file.fd >= 0) {
        close(t->file.fd);
        t->file.fd = -1;
    }
    return r;
}

/* A file system without O_DIRECT says so here, after the file was opened: open() may have made it by then
 * and fail all the same. */
static void set_direct(struct store_task *t)
{
    int flags = fcntl(t->file.fd, F_GETFL);

    t->file.direct = flags >= 0 && fcntl(t->file.fd, F_SETFL, flags | O_DIRECT) == 0;
}

int store_attach(struct store_task *t)
{
    unsigned tries = 0, replaced = 0;
    int r;

    for (;;) {
        r = attach_once(t, &tries);
        if (r == TRY_AGAIN && ++replaced > REPLACED_MAX)
            return store_fail(t, -ESTALE, "the file is replaced again and again");
        if (r == HELD) {
            if (atomic_load(&t->phase) != STORE_LOCKING)
                store_phase_begin(t, STORE_LOCKING, 0);
            r = store_pause(t, LOCK_TRY_MS);
            if (r < 0)
                return r;
            continue;
        }
        if (r != TRY_AGAIN)
            break;
    }
    if (r == 0)
        set_direct(t);
    return r;
}
