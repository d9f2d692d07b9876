/* SPDX-License-Identifier: Apache-2.0 */
/* Starting with a store that is full: its table is read and the index rebuilt. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chain.h"
#include "daemon/spill/format.h"
#include "spill_floor.h"
#include "tier.h"

#define OBJECT       4096u
#define CONVERSATION 64u   /* records of a chain */
#define CHUNK        8192u /* records that are encoded at a time */

struct starting {
    const struct bench *bench;
    char dir[96];
    char full[128], empty[128];
    uint64_t store_bytes;
    struct format_super super; /* of the full one */
    double *bytes;             /* of memory per record; a value per round */
    unsigned n;
};

/* ---- a daemon that starts and ends */

/* `store` NULL: the pool has none. */
static int start(const struct starting *s, const char *store, double *ret_seconds,
                 uint64_t *ret_memory)
{
    char sections[512];
    struct daemon d;
    uint64_t begin = now_ns();
    int n = snprintf(sections, sizeof(sections), "slot = %u\nslots = 1024\n", OBJECT), r;

    if (store)
        snprintf(sections + n, sizeof(sections) - (size_t)n,
                 "[spill s/kv/disk]\npath = %s\nsize = %llu\n", store,
                 (unsigned long long)s->store_bytes);
    r = daemon_start(s->bench, DAEMON_SMALL_PAGES, sections, &d);
    if (r < 0)
        return r;
    *ret_seconds = (double)(now_ns() - begin) / 1e9;
    r = tier_memory(d.pid, ret_memory);
    daemon_stop(&d);
    return r;
}

/* ---- the full store */

static int read_super(const char *path, struct format_super *ret)
{
    uint8_t bytes[FORMAT_SUPER_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC), r;

    if (fd < 0)
        return -errno;
    r = pread(fd, bytes, sizeof(bytes), 0) == sizeof(bytes) ? format_super_decode(bytes, ret)
                                                            : -EIO;
    close(fd);
    return r;
}

/* As if written one after the other: conversations of some blocks each. */
static void encode(const struct format_super *super, uint32_t i, uint8_t *to)
{
    struct format_record r = {.key = chain_key(i),
                              .has_parent = i % CONVERSATION > 0,
                              .digest = i,
                              .bytes = OBJECT,
                              .epoch = super->epoch,
                              .generation = i + 1};

    if (r.has_parent)
        r.parent = chain_key(i - 1);
    format_record_encode(&r, super, i, to);
}

static int write_table(int fd, const struct format_super *super)
{
    size_t room = (size_t)CHUNK * FORMAT_RECORD_BYTES;
    uint8_t *bytes = aligned_alloc(FORMAT_SECTOR, room);
    int r = bytes ? 0 : -ENOMEM;

    for (uint64_t i = 0; i < super->records && r == 0; i += CHUNK) {
        memset(bytes, 0, room);
        for (uint64_t k = 0; k < CHUNK && i + k < super->records; k++)
            encode(super, (uint32_t)(i + k), bytes + k * FORMAT_RECORD_BYTES);
        /* what is too much lies in the user table, of which these records use nothing */
        if (pwrite(fd, bytes, room, (off_t)(super->table + i * FORMAT_RECORD_BYTES)) !=
            (ssize_t)room)
            r = -EIO;
    }
    free(bytes);
    return r;
}

static int fill(struct starting *s)
{
    int fd = -1, r = read_super(s->full, &s->super);

    if (r == 0)
        r = disk_open(s->full, O_RDWR, &fd);
    if (r == 0)
        r = write_table(fd, &s->super);
    if (r == 0 && fsync(fd) < 0)
        r = -errno;
    if (fd >= 0)
        close(fd);
    return r;
}

/* ---- samples: how much longer it takes, and the floor */

static int longer(struct starting *s, const char *than, bool memory, double *ret)
{
    double with, without;
    uint64_t used, base;
    int r = start(s, s->full, &with, &used);

    if (r == 0)
        r = start(s, than, &without, &base);
    if (r < 0)
        return r;
    *ret = (with - without) * 1e3;
    if (memory)
        s->bytes[s->n++] = ((double)used - (double)base) / (double)s->super.records;
    return 0;
}

static int sample_than_none(void *arg, double *ret)
{
    return longer(arg, NULL, true, ret);
}

static int sample_than_empty(void *arg, double *ret)
{
    struct starting *s = arg;

    return longer(s, s->empty, false, ret);
}

static int sample_read(void *arg, double *ret)
{
    struct starting *s = arg;
    double seconds;
    int r = disk_read(s->full, s->super.table, s->super.records * FORMAT_RECORD_BYTES, &seconds);

    *ret = seconds * 1e3;
    return r;
}

/* ---- */

static int compare(struct bench *b, struct starting *s)
{
    static const struct {
        struct figure figure;
        sample_fn sample;
    } ways[] = {
        {{"start with a full store, longer than without one", "ms", GOAL_RATIO_AT_MOST, 6, false},
         sample_than_none},
        {{"start with a full store, longer than with an empty one", "ms", GOAL_NONE, 0, false},
         sample_than_empty},
    };
    static const struct figure memory = {"memory for a record", "bytes", GOAL_OURS_AT_MOST, 200,
                                         false};
    const struct contender floor = {"cold O_DIRECT read of the table", sample_read};
    int r = 0;

    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]) && r == 0; i++)
        r = bench_compare(b, &ways[i].figure, s, ways[i].sample, &floor, 1);
    if (r == 0)
        report_add(b->report, &memory, &(struct result){.ours = s->bytes, .n = s->n});
    return r;
}

static int measure(struct bench *b, struct starting *s)
{
    double seconds;
    uint64_t memory;
    int r = start(s, s->full, &seconds, &memory); /* both are formatted by the daemon itself */

    if (r == 0)
        r = start(s, s->empty, &seconds, &memory);
    if (r == 0)
        r = fill(s);
    if (r == 0)
        r = start(s, s->full, &seconds, &memory); /* the kernel has read the programs */
    return r == 0 ? compare(b, s) : r;
}

int case_spill_start(struct bench *b)
{
    const struct tier_spec spec = {.object = OBJECT, .stored = b->smoke ? 1000 : 1000000};
    struct starting s = {.bench = b, .store_bytes = tier_store_bytes(&spec)};
    int r = disk_dir_new(b, s.dir, sizeof(s.dir));

    unpin_cpu();
    snprintf(s.full, sizeof(s.full), "%s/full", s.dir);
    snprintf(s.empty, sizeof(s.empty), "%s/empty", s.dir);
    s.bytes = calloc(b->rounds, sizeof(*s.bytes));
    if (r == 0)
        r = s.bytes ? measure(b, &s) : -ENOMEM;
    disk_dir_free(s.dir);
    free(s.bytes);
    return r;
}
