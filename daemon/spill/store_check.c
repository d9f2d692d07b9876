/* SPDX-License-Identifier: Apache-2.0 */
/* What is in the file? Superblocks, signatures of others, nothing; and what may be done with it. */
#include "daemon/spill/store_task.h"

#include <blkid/blkid.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t copies[2] = {0, FORMAT_SUPER_COPY};

/* Both copies as they are on the medium, and what they mean. */
struct found {
    uint8_t *bytes; /* 2 x FORMAT_SUPER_BYTES, aligned */
    int r[2];
    struct format_super super[2];
};

static void found_free(struct found *f)
{
    free(f->bytes);
}

/* Some file systems take O_DIRECT and refuse the transfers. */
static ssize_t read_head(struct store_task *t, void *buf, size_t bytes, uint64_t offset)
{
    ssize_t n = store_read(t->file.fd, buf, bytes, offset);
    int flags;

    if (!t->file.direct || (n != -EINVAL && n != -EOPNOTSUPP))
        return n;
    flags = fcntl(t->file.fd, F_GETFL);
    if (flags < 0 || fcntl(t->file.fd, F_SETFL, flags & ~O_DIRECT) < 0)
        return n;
    t->file.direct = false;
    return store_read(t->file.fd, buf, bytes, offset);
}

static int read_copies(struct store_task *t, struct found *f)
{
    f->bytes = aligned_alloc(FORMAT_SECTOR, 2 * FORMAT_SUPER_BYTES);
    if (!f->bytes)
        return store_fail(t, -ENOMEM, "out of memory");
    memset(f->bytes, 0, 2 * FORMAT_SUPER_BYTES);
    t->sequence = 0;
    for (int i = 0; i < 2; i++) {
        uint8_t *at = f->bytes + i * FORMAT_SUPER_BYTES;
        ssize_t n = read_head(t, at, FORMAT_SUPER_BYTES, copies[i]);

        f->r[i] = n < 0 ? (int)n : format_super_decode(at, &f->super[i]);
        if (f->r[i] == 0 && f->super[i].sequence > t->sequence)
            t->sequence = f->super[i].sequence;
    }
    return 0;
}

static bool either(const struct found *f, int r)
{
    return f->r[0] == r || f->r[1] == r;
}

/* The copy that counts, 0 or 1, or: -EPROTONOSUPPORT, even if the other copy is ours: a newer kvd
 * was about to convert it. -EIO, -EILSEQ, -EEXIST something else, -ENODATA zeros. */
static int found_judge(const struct found *f)
{
    if (either(f, -EPROTONOSUPPORT))
        return -EPROTONOSUPPORT;
    if (f->r[0] == 0 && f->r[1] == 0)
        return f->super[1].sequence > f->super[0].sequence;
    if (either(f, 0))
        return f->r[1] == 0;
    if (either(f, -EILSEQ) || either(f, -EINVAL))
        return -EILSEQ;
    if (either(f, -EBADMSG))
        return -EEXIST;
    if (f->r[0] == -ENODATA && f->r[1] == -ENODATA)
        return -ENODATA;
    return f->r[0] == -ENODATA ? f->r[1] : f->r[0]; /* of reading */
}

/* ---- what others have put there */

static int probe(int fd, char *ret_name, size_t bytes)
{
    blkid_probe pr = blkid_new_probe();
    const char *name = NULL;
    int r;

    if (!pr)
        return -ENOMEM;
    if (blkid_probe_set_device(pr, fd, 0, 0) < 0) {
        blkid_free_probe(pr);
        return -EIO;
    }
    blkid_probe_enable_superblocks(pr, 1);
    blkid_probe_set_superblocks_flags(pr, BLKID_SUBLKS_TYPE);
    blkid_probe_enable_partitions(pr, 1);
    r = blkid_do_safeprobe(pr);
    if (r == 0 && blkid_probe_lookup_value(pr, "TYPE", &name, NULL) < 0)
        blkid_probe_lookup_value(pr, "PTTYPE", &name, NULL);
    if (r == 0 || r == -2)
        snprintf(ret_name, bytes, "%s", r == -2 ? "several" : name ? name : "unknown");
    blkid_free_probe(pr);
    return r == -1 ? -EIO : r == 1 ? 0 : 1;
}

/* 1 and its name, 0, or a negative errno. libblkid reads as it pleases, which O_DIRECT does not like. */
static int foreign_signature(struct store_task *t, char *ret_name, size_t bytes)
{
    int flags = fcntl(t->file.fd, F_GETFL), r;

    if (flags < 0 || (t->file.direct && fcntl(t->file.fd, F_SETFL, flags & ~O_DIRECT) < 0))
        return store_fail_call(t, "fcntl", -errno);
    r = probe(t->file.fd, ret_name, bytes);
    if (t->file.direct && fcntl(t->file.fd, F_SETFL, flags) < 0)
        return store_fail_call(t, "fcntl", -errno);
    if (r < 0)
        return store_fail(t, r, "cannot look for signatures of others: %s", strerrordesc_np(-r));
    return r;
}

/* 1: everything before the table is zero, so far as there is anything. */
static int head_is_zero(struct store_task *t)
{
    uint8_t *buf = aligned_alloc(FORMAT_SECTOR, FORMAT_TABLE);
    ssize_t n;
    int r;

    if (!buf)
        return store_fail(t, -ENOMEM, "out of memory");
    n = read_head(t, buf, FORMAT_TABLE, 0);
    if (n < 0)
        r = store_fail_call(t, "reading", (int)n);
    else
        r = n == 0 || (buf[0] == 0 && memcmp(buf, buf + 1, (size_t)n - 1) == 0);
    free(buf);
    return r;
}

/* 1: nothing of anybody's. 0: something; its name in `name`. */
static int is_blank(struct store_task *t, char *name, size_t bytes)
{
    int r = foreign_signature(t, name, bytes);

    if (r != 0)
        return r < 0 ? r : 0;
    snprintf(name, bytes, "unknown");
    return head_is_zero(t);
}

/* ---- superblocks */

static int write_copy(struct store_task *t, const uint8_t *image, int i)
{
    int r = store_write(t->file.fd, image, FORMAT_SUPER_BYTES, copies[i]);

    if (r == 0 && fdatasync(t->file.fd) < 0)
        r = -errno;
    return r < 0 ? store_fail_call(t, "writing a superblock", r) : 0;
}

int store_write_supers(struct store_task *t, const struct format_super *super)
{
    uint8_t *image = aligned_alloc(FORMAT_SECTOR, FORMAT_SUPER_BYTES);
    int r;

    if (!image)
        return store_fail(t, -ENOMEM, "out of memory");
    format_super_encode(super, image);
    r = write_copy(t, image, 0);
    if (r == 0)
        r = write_copy(t, image, 1);
    free(image);
    return r;
}

/* Read, and not a superblock: then something other than kvd may have been written over it. */
static bool was_read(int r)
{
    return r == -ENODATA || r == -EBADMSG || r == -EILSEQ || r == -EINVAL;
}

/* A file system made over the store leaves the second copy in place. A copy that could not even be read may
 * be cured by writing it. */
static int repair(struct store_task *t, const struct found *f, int good)
{
    const uint8_t *image = f->bytes + good * FORMAT_SUPER_BYTES;
    const uint8_t *other = f->bytes + !good * FORMAT_SUPER_BYTES;
    char name[64], command[STORE_COMMAND];
    int r;

    if (memcmp(image, other, FORMAT_SUPER_BYTES) == 0)
        return 0;
    if (was_read(f->r[!good])) {
        r = foreign_signature(t, name, sizeof(name));
        if (r > 0)
            return store_fail(t, -EEXIST,
                              "something else (%s) was written over a store of kvd; fix: another "
                              "path, or %s",
                              name, store_format_command(t, true, command));
        if (r < 0)
            return r;
    }
    return write_copy(t, image, !good);
}

/* ---- what to do */

static int refuse(struct store_task *t, int judged)
{
    char command[STORE_COMMAND];

    switch (judged) {
    case -EPROTONOSUPPORT:
        return store_fail(t, judged,
                          "a store of another version of kvd; fix: run that version, or %s, which "
                          "loses its objects",
                          store_format_command(t, true, command));
    case -EILSEQ:
        return store_fail(
            t, judged,
            "both superblocks of the store are damaged; fix: look after the device, then "
            "%s",
            store_format_command(t, false, command));
    default:
        return store_fail_call(t, "reading the superblocks", judged);
    }
}

static int refuse_foreign(struct store_task *t, const char *name)
{
    char command[STORE_COMMAND];

    store_format_command(t, true, command);
    if (strcmp(name, "unknown") == 0)
        return store_fail(t, -EEXIST,
                          "not a store of kvd, but not empty either; nothing was changed; fix: "
                          "another path, or %s if nobody needs it",
                          command);
    return store_fail(t, -EEXIST,
                      "not a store of kvd, but something else (%s); nothing was changed; fix: "
                      "another path, or %s if nobody needs it",
                      name, command);
}

static int use(struct store_task *t, const struct found *f, int good)
{
    const struct format_super *s = &f->super[good];
    char why[STORE_WHY - 64], command[STORE_COMMAND], was[FORMAT_SIZE_TEXT], is[FORMAT_SIZE_TEXT];
    int r;

    if (s->bytes > t->size)
        return store_fail(t, -EINVAL,
                          "truncated: the store was made with %s, now there are %s; fix: %s",
                          format_size(s->bytes, true, was), format_size(t->size, true, is),
                          store_format_command(t, false, command));
    r = format_compare(&s->geometry, &t->spec.geometry, why, sizeof(why));
    if (r < 0) {
        /* Also if they cannot be read: it does no harm to say --force. */
        store_format_command(t, store_has_records(t, s) != 0, command);
        return store_fail(t, r, "%s; fix: another path, or %s", why, command);
    }
    r = repair(t, f, good);
    if (r == 0)
        t->file.super = *s;
    return r;
}

/* Without any superblock. A device is never formatted unasked: who mistypes its name has lost it. */
static int format_unasked(struct store_task *t)
{
    char name[64], command[STORE_COMMAND];
    int r = is_blank(t, name, sizeof(name));

    if (r < 0)
        return r;
    if (r == 0)
        return refuse_foreign(t, name);
    if (t->file.device)
        return store_fail(t, -EEXIST, "not a store of kvd; fix: %s makes it one",
                          store_format_command(t, false, command));
    if (t->spec.bytes == 0)
        return store_fail(t, -EEXIST,
                          "is empty, and no size is given for a new store; fix: give "
                          "it a size, or another path");
    return 1;
}

int store_examine(struct store_task *t)
{
    struct found f;
    int r = read_copies(t, &f), judged;

    if (r < 0)
        return r;
    judged = found_judge(&f);
    if (judged >= 0)
        r = use(t, &f, judged);
    else if (judged == -ENODATA || judged == -EEXIST)
        r = format_unasked(t);
    else
        r = refuse(t, judged);
    found_free(&f);
    return r;
}

static int refuse_records(struct store_task *t, const struct format_super *s)
{
    int r = s->bytes > t->size ? 0 : store_has_records(t, s);
    char command[STORE_COMMAND];

    if (r <= 0)
        return r < 0 ? r : 1;
    return store_fail(t, -EEXIST,
                      "a store of kvd with objects of %s/%s; fix: %s if nobody needs them",
                      s->geometry.space, s->geometry.pool, store_format_command(t, true, command));
}

/* With `force` all. Else what nobody can miss: nothing at all, a store without records, a store that
 * cannot be read any more. */
int store_may_replace(struct store_task *t)
{
    char name[64];
    struct found f;
    int r = read_copies(t, &f), judged;

    if (r < 0)
        return r;
    judged = found_judge(&f);
    if (t->spec.force)
        r = 1;
    else if (judged >= 0)
        r = refuse_records(t, &f.super[judged]);
    else if (judged == -ENODATA || judged == -EEXIST) {
        r = is_blank(t, name, sizeof(name));
        r = r == 0 ? refuse_foreign(t, name) : r;
    } else if (judged == -EILSEQ) {
        r = foreign_signature(t, name, sizeof(name));
        r = r > 0 ? refuse_foreign(t, name) : r == 0 ? 1 : r;
    } else
        r = refuse(t, judged);
    found_free(&f);
    return r;
}
