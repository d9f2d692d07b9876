/* SPDX-License-Identifier: Apache-2.0 */
/* Making a store: room, zeros, and last of all the superblocks. Killed before these, it has made
 * nothing but a file that begins with zeros, which the next start formats again. */
#include "daemon/spill/store_task.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define ALLOCATE_STEP (256ull << 20)

/* Bytes that an ordinary user could still get; 0: the file system does not tell. */
static uint64_t space_free(const struct store_task *t)
{
    struct statvfs fs;

    if (fstatvfs(t->file.fd, &fs) < 0 || fs.f_blocks == 0)
        return 0;
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

static int no_space(struct store_task *t, uint64_t free, uint64_t bytes)
{
    char wanted[FORMAT_SIZE_TEXT], there[FORMAT_SIZE_TEXT], less[32] = "a smaller size";

    if (free >> 30 > 1) /* some of it is left to others */
        snprintf(less, sizeof(less), "size = %lluG",
                 (unsigned long long)((free - (free >> 4)) >> 30));
    return store_fail(t, -ENOSPC,
                      "a store of %s does not fit, %s are free there; fix: %s, or make room",
                      format_size(bytes, false, wanted), format_size(free, false, there), less);
}

/* ---- planning */

static int plan(struct store_task *t, struct format_super *ret)
{
    uint64_t bytes = t->spec.bytes ? t->spec.bytes : t->size;
    char text[FORMAT_SIZE_TEXT];
    struct format_super s;
    int r;

    if (t->file.device && bytes > t->size)
        bytes = t->size;
    r = format_plan(&t->spec.geometry, bytes, &s);
    if (r == -ENOSPC)
        return store_fail(t, r, "%s are too small for one slot; fix: a larger size",
                          format_size(bytes, true, text));
    if (r < 0)
        return store_fail(t, r, "the pool's geometry is impossible");
    if (getrandom(s.uuid, sizeof(s.uuid), 0) != sizeof(s.uuid))
        return store_fail_call(t, "getrandom", -errno);
    s.sequence = t->sequence + 1;
    s.created_s = (uint64_t)time(NULL);
    s.epoch = t->spec.epoch;
    *ret = s;
    return 0;
}

/* ---- room */

static int allocate(struct store_task *t, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += ALLOCATE_STEP) {
        uint64_t now = bytes - at < ALLOCATE_STEP ? bytes - at : ALLOCATE_STEP;

        if (store_cancelled(t))
            return -ECANCELED;
        if (fallocate(t->file.fd, 0, (off_t)at, (off_t)now) < 0) {
            /* Then the file stays sparse, and a full disk is met by the writes. */
            if (errno != EOPNOTSUPP)
                return errno == ENOSPC ? -ENOSPC : store_fail_call(t, "fallocate", -errno);
            store_advance(t, bytes - at);
            return 0;
        }
        store_advance(t, now);
    }
    return 0;
}

static int make_room(struct store_task *t, uint64_t bytes)
{
    uint64_t free;

    if (ftruncate(t->file.fd, 0) < 0)
        return store_fail_call(t, "ftruncate", -errno);
    /* Looked at first: a disk that is full for only a moment already hurts others. */
    free = space_free(t);
    if (free > 0 && free < bytes)
        return -ENOSPC;
    if (ftruncate(t->file.fd, (off_t)bytes) < 0)
        return store_fail_call(t, "ftruncate", -errno);
    return allocate(t, bytes);
}

/* After a failure: as little as before. */
static void give_back(struct store_task *t)
{
    struct stat st, now;

    if (t->file.device)
        return;
    if (ftruncate(t->file.fd, 0) < 0)
        return; /* the file system is in a state that we cannot better */
    if (!t->made) {
        if (ftruncate(t->file.fd, (off_t)t->size) < 0)
            return;
    } else if (fstat(t->file.fd, &st) == 0 && lstat(t->spec.path, &now) == 0 &&
               st.st_ino == now.st_ino && st.st_dev == now.st_dev) {
        unlink(t->spec.path);
    }
}

/* ---- zeros */

static int zero_range(struct store_task *t, const uint8_t *zeros, uint64_t at, uint64_t end)
{
    int r = 0;

    while (r == 0 && at < end) {
        size_t now = end - at < STORE_CHUNK ? (size_t)(end - at) : STORE_CHUNK;

        if (store_cancelled(t))
            return -ECANCELED;
        r = store_write(t->file.fd, zeros, now, at);
        at += now;
        if (r == 0)
            store_advance(t, now);
    }
    return r == 0 || r == -ENOSPC ? r : store_fail_call(t, "writing the table", r);
}

/* The end of a device, where partition tables and RAID have copies of what was at its head: they would be
 * found again. */
static uint64_t device_tail(const struct store_task *t, const struct format_super *s)
{
    uint64_t tail = t->size / FORMAT_SECTOR * FORMAT_SECTOR;

    tail = tail > STORE_CHUNK ? tail - STORE_CHUNK : 0;
    return tail > s->data ? tail : s->data;
}

/* Written, not only allocated: then later writes change no metadata of the file system, and a bad
 * block in the table shows up now. */
static int zero_all(struct store_task *t, const struct format_super *s)
{
    uint8_t *zeros = aligned_alloc(FORMAT_SECTOR, STORE_CHUNK);
    int r;

    if (!zeros)
        return store_fail(t, -ENOMEM, "out of memory");
    memset(zeros, 0, STORE_CHUNK);
    r = zero_range(t, zeros, 0, s->data);
    if (r == 0 && t->file.device)
        r = zero_range(t, zeros, device_tail(t, s), t->size / FORMAT_SECTOR * FORMAT_SECTOR);
    free(zeros);
    if (r == 0 && fdatasync(t->file.fd) < 0)
        r = store_fail_call(t, "fdatasync", -errno);
    return r;
}

/* ---- all of it */

static uint64_t work(const struct store_task *t, const struct format_super *s)
{
    if (!t->file.device)
        return s->bytes + s->data;
    return s->data + t->size / FORMAT_SECTOR * FORMAT_SECTOR - device_tail(t, s);
}

static int fill(struct store_task *t, const struct format_super *s)
{
    int r = t->file.device ? 0 : make_room(t, s->bytes);

    if (r == 0)
        r = zero_all(t, s);
    if (r == 0)
        r = store_write_supers(t, s);
    return r;
}

int store_format(struct store_task *t)
{
    struct format_super s;
    int r = plan(t, &s);

    if (r < 0) {
        if (t->made) /* it is empty */
            give_back(t);
        return r;
    }
    store_phase_begin(t, STORE_FORMATTING, work(t, &s));
    r = fill(t, &s);
    if (r < 0) {
        give_back(t);
        return r == -ENOSPC ? no_space(t, space_free(t), s.bytes) : r;
    }
    t->file.super = s;
    return 0;
}
