/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/spill/store_task.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>

#define TRIM_STEP (1ull << 30) /* some devices take seconds for it */

static bool is_free(const struct store_task *t, uint64_t slot)
{
    return t->free_slots[slot / 8] >> slot % 8 & 1;
}

static int discard(struct store_task *t, uint64_t at, uint64_t bytes)
{
    uint64_t range[2] = {at, bytes};
    int r;

    if (t->file.device)
        r = ioctl(t->file.fd, BLKDISCARD, range);
    else
        r = fallocate(t->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
                      (off_t)bytes);
    if (r == 0)
        return 0;
    if (errno == EOPNOTSUPP || errno == ENOTTY)
        return store_fail(t, -EOPNOTSUPP, "%s; the free slots stay allocated",
                          t->file.device ? "the device cannot discard"
                                         : "the file system cannot punch holes");
    return store_fail_call(t, "discarding free slots", -errno);
}

static int discard_run(struct store_task *t, uint64_t at, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t now = bytes < TRIM_STEP ? bytes : TRIM_STEP;
        int r = store_cancelled(t) ? -ECANCELED : discard(t, at, now);

        if (r < 0)
            return r;
        store_advance(t, now);
        at += now;
        bytes -= now;
    }
    return 0;
}

static uint64_t count_free(const struct store_task *t)
{
    uint64_t n = 0;

    for (uint64_t i = 0; i < t->file.super.records; i++)
        n += is_free(t, i);
    return n;
}

int store_trim(struct store_task *t)
{
    const struct format_super *s = &t->file.super;
    uint64_t slot_bytes = s->geometry.part_bytes * s->geometry.parts, i = 0, end;
    int r = 0;

    store_phase_begin(t, STORE_TRIMMING, count_free(t) * slot_bytes);
    while (r == 0 && i < s->records) {
        for (end = i; end < s->records && is_free(t, end); end++)
            ;
        if (end > i)
            r = discard_run(t, format_slot_offset(s, (uint32_t)i), (end - i) * slot_bytes);
        i = end + 1;
    }
    return r;
}
