/* SPDX-License-Identifier: Apache-2.0 */
/* Writing objects to a store and bringing them back, against bare I/O on the same file system. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "spill_floor.h"
#include "tier.h"

#define SNAPSHOT 153944064u /* of a linear-attention model with 48 layers */
#define SEEN_US  200000u

struct moving {
    struct tier tier;
    struct drive *drive;
    bool write;
    uint64_t next;  /* write: key */
    unsigned which; /* read: of two sets of objects, the one that is not in the pool */

    /* processor time, per MiB; a value per round */
    double *core, *bare, *helpers, *hash;
    /* GB/s */
    double *ours, *like_pool;
    unsigned n, n_bare;
};

static double mib(const struct moving *m)
{
    return (double)(m->tier.spec.slots * m->tier.spec.object) / (double)MIB;
}

/* ---- ours */

static int write_all(struct moving *m)
{
    struct tier *t = &m->tier;
    uint64_t first = m->next;
    int r;

    m->next += t->spec.slots;
    r = tier_publish(t, &t->session, first, t->spec.slots);
    return r == 0 ? tier_wait_stored(t, first, t->spec.slots) : r;
}

/* All of them are in the store and not in the pool; else reading would be none. */
static int check_away(struct tier *t)
{
    uint8_t *states = calloc(t->spec.slots, 1);
    int r = states ? 0 : -ENOMEM;

    if (r == 0)
        kvd_lookup(t->session.pool, t->keys, t->spec.slots, states);
    for (size_t i = 0; i < t->spec.slots && r == 0; i++)
        r = states[i] == KVD_NVME ? 0 : -ENODATA;
    free(states);
    return r;
}

static int read_all(struct moving *m)
{
    struct tier *t = &m->tier;
    size_t n = t->spec.slots;
    int32_t *status = calloc(n, sizeof(*status));
    struct kvd_fetch f = {.keys = t->keys, .n = n, .deadline_ms = 60000};
    ssize_t r = status ? kvd_fetch(t->session.pool, &f, status) : -ENOMEM;

    for (size_t i = 0; i < n && r >= 0 && r != (ssize_t)n; i++)
        r = status[i] < 0 ? status[i] : r;
    free(status);
    return r == (ssize_t)n ? 0 : r < 0 ? (int)r : -EIO;
}

/* What was fetched is held for us until the daemon sees that we have pinned it: it looks every 50 ms. */
static int let_go(struct tier *t)
{
    ssize_t r = kvd_pin(t->pins, t->session.pool, t->keys, t->spec.slots, 0);

    usleep(SEEN_US);
    kvd_pinset_release(t->pins);
    return r == (ssize_t)t->spec.slots ? 0 : r < 0 ? (int)r : -ENOENT;
}

static int hash_plainly(struct moving *m, double *ret_us)
{
    const struct tier *t = &m->tier;
    uint64_t start = cpu_ns();
    XXH64_hash_t sum = 0;

    for (uint32_t i = 0; i < t->spec.slots; i++) {
        const char *at = kvd_slot_rw(t->session.pool, i, 0);

        if (!at)
            return -EFAULT;
        for (size_t k = 0; k < t->spec.object; k += MIB)
            sum += XXH3_64bits(at + k, t->spec.object - k < MIB ? t->spec.object - k : MIB);
    }
    __asm__ volatile("" : : "r"(sum));
    *ret_us = (double)(cpu_ns() - start) / 1e3 / mib(m);
    return 0;
}

static int prepare(struct moving *m)
{
    if (m->write)
        return 0;
    m->which ^= 1;
    tier_keys(&m->tier, m->which * m->tier.spec.slots, m->tier.spec.slots);
    return check_away(&m->tier);
}

static int sample_ours(void *arg, double *ret)
{
    struct moving *m = arg;
    struct tier_cpu before, after;
    double hash = 0;
    uint64_t start;
    int r = prepare(m);

    if (r == 0)
        r = tier_cpu(&m->tier, &before);
    start = now_ns();
    if (r == 0)
        r = m->write ? write_all(m) : read_all(m);
    *ret = mib(m) * (double)MIB / (double)(now_ns() - start);
    if (r == 0)
        r = tier_cpu(&m->tier, &after);
    if (r == 0 && !m->write)
        r = let_go(&m->tier);
    if (r == 0)
        r = hash_plainly(m, &hash);
    if (r < 0 || !m->core)
        return r;
    m->ours[m->n] = *ret;
    m->core[m->n] = (double)(after.core - before.core) / 1e3 / mib(m);
    m->helpers[m->n] = (double)(after.helpers - before.helpers) / 1e3 / mib(m);
    m->hash[m->n++] = hash;
    return 0;
}

/* ---- floors */

static int sample_loop(void *arg, double *ret)
{
    struct moving *m = arg;
    double cpu;
    int r = drive_loop(m->drive, m->write, ret, &cpu);

    if (r < 0 || !m->bare)
        return r;
    m->bare[m->n_bare] = cpu;
    return drive_like_pool(m->drive, m->write, &m->like_pool[m->n_bare++]);
}

static int sample_fio(void *arg, double *ret)
{
    struct moving *m = arg;

    return drive_fio(m->drive, m->write, ret);
}

/* ---- */

/* Objects of the first samples: two sets that are read by turns, or everything that the store can hold,
 * since what was never written before is not written as fast. */
static int warm_up(struct moving *m)
{
    const struct tier_spec *s = &m->tier.spec;
    double ignored;
    uint64_t n = m->write ? s->stored : 2 * s->slots;
    bool write = m->write;
    int r = 0;

    for (uint64_t i = 0; i < n && r == 0; i += s->slots)
        r = write_all(m);
    m->which = 1; /* the second set is in the pool */
    m->write = write;
    if (r == 0)
        r = sample_ours(m, &ignored);
    if (r == 0)
        r = drive_loop(m->drive, m->write, &ignored, NULL);
    return r;
}

/* Nothing has been given up on the way. */
static int check_nothing_lost(struct moving *m)
{
    static const char *const names[] = {"kvd_evicted_unspilled_objects_total",
                                        "kvd_store_errors_total", "kvd_store_broken_objects_total"};
    uint64_t v, stored = 0;
    int r = tier_stat(&m->tier, "kvd_spilled_objects_total", &stored);

    if (r == 0 && stored != m->next) {
        fprintf(stderr, "kvd-bench: %llu of %llu objects were written to the store\n",
                (unsigned long long)stored, (unsigned long long)m->next);
        r = -EIO;
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && r == 0; i++) {
        r = tier_stat(&m->tier, names[i], &v);
        if (r == 0 && v) {
            fprintf(stderr, "kvd-bench: %s is %llu\n", names[i], (unsigned long long)v);
            r = -EIO;
        }
    }
    return r;
}

struct texts {
    const char *what;
    double limit;
};

static void report_more(struct bench *b, const struct moving *m, const struct texts *x)
{
    char name[96];
    struct figure f = {
        .name = name, .unit = "GB/s", .goal = GOAL_RATIO_AT_LEAST, .limit = x->limit};

    snprintf(name, sizeof(name), "%s, as much memory", x->what);
    report_add(b->report, &f,
               &(struct result){m->ours, m->like_pool, m->n, "a loop with as many buffers"});
    snprintf(name, sizeof(name), "%s: core thread", x->what);
    f.unit = "us/MiB";
    f.goal = GOAL_OURS_AT_MOST;
    f.limit = 15;
    report_add(b->report, &f, &(struct result){m->core, m->bare, m->n, "bare io_uring loop"});
    snprintf(name, sizeof(name), "%s: helper threads", x->what);
    f.goal = GOAL_RATIO_AT_MOST;
    f.limit = 1.2;
    report_add(b->report, &f,
               &(struct result){m->helpers, m->hash, m->n, "XXH3_64bits of the same"});
}

static int compare(struct bench *b, struct moving *m, const struct texts *x)
{
    const struct contender floors[] = {{"bare io_uring loop", sample_loop}, {"fio", sample_fio}};
    const struct figure f = {.name = x->what,
                             .unit = "GB/s",
                             .goal = GOAL_RATIO_AT_LEAST,
                             .limit = x->limit,
                             .more_is_better = true};
    double *v = calloc(6 * b->rounds, sizeof(*v));
    int r;

    if (!v)
        return -ENOMEM;
    m->core = v;
    m->bare = v + b->rounds;
    m->helpers = m->bare + b->rounds;
    m->hash = m->helpers + b->rounds;
    m->ours = m->hash + b->rounds;
    m->like_pool = m->ours + b->rounds;
    r = bench_compare(b, &f, m, sample_ours, floors, drive_has_fio(m->drive) ? 2 : 1);
    if (r == 0)
        report_more(b, m, x);
    if (r == 0)
        r = check_nothing_lost(m);
    free(v);
    return r;
}

static int measure(struct bench *b, const struct tier_spec *spec, bool write, const struct texts *x)
{
    struct moving m = {.write = write};
    struct drive_spec drive = {.step = spec->slots * spec->object,
                               .bytes = write ? spec->stored * spec->object
                                              : 2 * spec->slots * spec->object,
                               .depth = TIER_DEPTH,
                               .pages = spec->huge ? PAGES_HUGE : PAGES_SMALL};
    int r = tier_open(b, spec, &m.tier);

    if (r < 0)
        return r;
    drive.dir = m.tier.dir;
    r = drive_new(&drive, &m.drive);
    if (r == 0)
        r = warm_up(&m);
    if (r == 0)
        r = compare(b, &m, x);
    drive_free(m.drive);
    tier_close(&m.tier);
    return r;
}

/* On hugepages if they are to be had; they may have gone to somebody else since they were counted. */
static int measure_pages(struct bench *b, struct tier_spec *spec, bool write, struct texts *x)
{
    /* the pool's, as much for the loop, and some for fio */
    size_t pages = 2 * (spec->slots * spec->object / HUGEPAGE + 1) + TIER_DEPTH;
    char name[64];
    int r = -ENOMEM;

    /* the kernel takes its time until those of the case before are back */
    for (int tries = 0; !b->smoke && !spec->huge && tries < 20; tries++) {
        spec->huge = hugepages_free() >= pages;
        if (!spec->huge)
            usleep(50000);
    }
    if (spec->huge)
        r = measure(b, spec, write, x);
    if (r == -ENOMEM || (spec->huge && r == -ECHILD)) {
        spec->huge = false;
        snprintf(name, sizeof(name), "%s%s", x->what, ", small pages");
        x->what = name;
        r = measure(b, spec, write, x);
    }
    return r;
}

static struct tier_spec many(const struct bench *b)
{
    size_t slots = b->smoke ? 4 : 192;

    return (struct tier_spec){.object = MIB, .slots = slots, .stored = 4 * slots};
}

int case_spill(struct bench *b)
{
    struct tier_spec spec = many(b);
    struct texts x = {.what = "spill 1 MiB", .limit = 0.95};

    return measure_pages(b, &spec, true, &x);
}

int case_promote(struct bench *b)
{
    struct tier_spec spec = many(b);
    struct texts x = {.what = "promote 1 MiB", .limit = 0.95};

    return measure_pages(b, &spec, false, &x);
}

int case_snapshot(struct bench *b)
{
    struct tier_spec spec = {
        .object = b->smoke ? 3 * MIB + 4096 : SNAPSHOT, .slots = 1, .stored = 16};
    struct texts x = {.what = "promote 1 x 154 MB", .limit = 0.9};

    return measure_pages(b, &spec, false, &x);
}
