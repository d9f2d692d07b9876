/* SPDX-License-Identifier: Apache-2.0 */
/* Storing objects: 1 MiB each with their bytes, and none of their bytes. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain.h"
#include "daemon.h"

#define OBJECT    MIB
#define BATCH_MAX 64u

/* ---- the best plain copy */

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static void copy_streaming(char *dst, const char *src,
                                                              size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 256) {
        __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
        __m512i c = _mm512_loadu_si512(src + i + 128), e = _mm512_loadu_si512(src + i + 192);

        _mm512_stream_si512((__m512i *)(void *)(dst + i), a);
        _mm512_stream_si512((__m512i *)(void *)(dst + i + 64), b);
        _mm512_stream_si512((__m512i *)(void *)(dst + i + 128), c);
        _mm512_stream_si512((__m512i *)(void *)(dst + i + 192), e);
    }
    _mm_sfence();
}

static void copy_string(char *dst, const char *src, size_t bytes)
{
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
}
#endif

/* ---- one worker that stores, and a floor that copies the same bytes */

struct publisher {
    struct session session;
    struct memory source, warm; /* as many objects in each */
    size_t objects;
    size_t batch;
    uint64_t next;      /* key */
    size_t from, where; /* next object of the source; of the warm memory */
    size_t batches;     /* in a sample */
};

static const char *source_of(struct publisher *p)
{
    return (const char *)p->source.rw + p->from++ % p->objects * OBJECT;
}

static int publish_batch(struct publisher *p)
{
    struct kvd_key keys[BATCH_MAX];
    struct kvd_reservation granted[BATCH_MAX];
    struct kvd_commit commits[BATCH_MAX];
    struct kvd_reserve q = {.keys = keys, .n = p->batch};

    for (size_t i = 0; i < p->batch; i++) {
        struct shm_key k = chain_key(p->next++);

        memcpy(&keys[i], &k, sizeof(k));
    }
    if (kvd_reserve(p->session.pool, &q, granted) != (ssize_t)p->batch)
        return -ENOSPC;
    for (size_t i = 0; i < p->batch; i++) {
        kvd_copy_in(kvd_slot_rw(p->session.pool, granted[i].slot, 0), source_of(p), OBJECT);
        commits[i] = (struct kvd_commit){.ticket = granted[i].ticket, .bytes = OBJECT};
    }
    return kvd_commit(p->session.pool, commits, p->batch) == (ssize_t)p->batch ? 0 : -EIO;
}

static double gigabytes_per_second(const struct publisher *p, uint64_t start)
{
    return (double)(p->batches * p->batch * OBJECT) / (double)(now_ns() - start);
}

static int publish(void *arg, double *ret)
{
    struct publisher *p = arg;
    uint64_t start = now_ns();
    int r = 0;

    for (size_t i = 0; i < p->batches && r == 0; i++)
        r = publish_batch(p);
    *ret = gigabytes_per_second(p, start);
    return r;
}

/* ---- the same while the daemon works: the next batch is being reserved while this one is copied */

#define OF_COMMIT 1000u /* user_data of commits begins here */

struct ahead {
    struct kvd_key keys[BATCH_MAX];
    struct kvd_completion granted[BATCH_MAX]; /* of the batch that comes next */
    struct kvd_commit commits[BATCH_MAX];
    size_t reserving, committing; /* completions that are to come */
};

static int submit_reserve(struct publisher *p, struct ahead *a)
{
    struct kvd_reserve q = {.keys = a->keys, .n = p->batch};

    for (size_t i = 0; i < p->batch; i++) {
        struct shm_key k = chain_key(p->next++);

        memcpy(&a->keys[i], &k, sizeof(k));
    }
    a->reserving += p->batch;
    return kvd_submit_reserve(p->session.pool, &q, 0) == (ssize_t)p->batch ? 0 : -EBUSY;
}

static int submit_commit(struct publisher *p, struct ahead *a)
{
    a->committing += p->batch;
    return kvd_submit_commit(p->session.pool, a->commits, p->batch, OF_COMMIT) == (ssize_t)p->batch
               ? 0
               : -EBUSY;
}

static int take_completion(struct ahead *a, const struct kvd_completion *c)
{
    bool commit = c->user_data >= OF_COMMIT;

    if (c->status != (commit ? 0 : KVD_NEW))
        return c->status < 0 ? c->status : -EEXIST;
    if (commit) {
        a->committing--;
    } else {
        a->granted[c->user_data] = *c;
        a->reserving--;
    }
    return 0;
}

/* Until the next batch is granted, or all is answered. */
static int collect(struct publisher *p, struct ahead *a, bool all)
{
    struct kvd_completion c[BATCH_MAX];
    int r = 0;

    while (r == 0 && (a->reserving || (all && a->committing))) {
        ssize_t n = kvd_completions(p->session.kvd, c, BATCH_MAX);

        if (n < 0)
            return (int)n;
        for (ssize_t i = 0; i < n && r == 0; i++)
            r = take_completion(a, &c[i]);
    }
    return r;
}

static int copy_granted(struct publisher *p, struct ahead *a, bool more)
{
    struct kvd_completion now[BATCH_MAX];
    int r = 0;

    memcpy(now, a->granted, sizeof(now));
    if (more)
        r = submit_reserve(p, a);
    for (size_t i = 0; i < p->batch && r == 0; i++) {
        kvd_copy_in(kvd_slot_rw(p->session.pool, now[i].slot, 0), source_of(p), OBJECT);
        a->commits[i] = (struct kvd_commit){.ticket = now[i].ticket, .bytes = OBJECT};
    }
    if (r == 0)
        r = submit_commit(p, a);
    return r == 0 ? collect(p, a, !more) : r;
}

static int publish_ahead(void *arg, double *ret)
{
    struct publisher *p = arg;
    struct ahead a = {.reserving = 0};
    uint64_t start = now_ns();
    int r = submit_reserve(p, &a);

    if (r == 0)
        r = collect(p, &a, true);
    for (size_t i = 0; i < p->batches && r == 0; i++)
        r = copy_granted(p, &a, i + 1 < p->batches);
    *ret = gigabytes_per_second(p, start);
    return r;
}

/* ---- the floor's loop */

typedef void (*copy_fn)(char *dst, const char *src, size_t bytes);

static void copy_memory(char *dst, const char *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

static int copy_with(struct publisher *p, copy_fn copy, double *ret)
{
    uint64_t start = now_ns();

    for (size_t i = 0; i < p->batches * p->batch; i++) {
        copy((char *)p->warm.rw + p->where++ % p->objects * OBJECT, source_of(p), OBJECT);
        __asm__ volatile("" ::: "memory");
    }
    *ret = gigabytes_per_second(p, start);
    return 0;
}

static int floor_memcpy(void *arg, double *ret)
{
    return copy_with(arg, copy_memory, ret);
}

#if defined(__x86_64__)
static int floor_streaming(void *arg, double *ret)
{
    return copy_with(arg, copy_streaming, ret);
}

static int floor_string(void *arg, double *ret)
{
    return copy_with(arg, copy_string, ret);
}
#endif

static size_t floors(struct contender ret[CONTENDERS_MAX])
{
    size_t n = 0;

    ret[n++] = (struct contender){"memcpy", floor_memcpy};
#if defined(__x86_64__)
    ret[n++] = (struct contender){"rep movsb", floor_string};
    if (__builtin_cpu_supports("avx512f"))
        ret[n++] = (struct contender){"AVX-512 streaming stores", floor_streaming};
#endif
    return n;
}

static int compare(struct bench *b, struct publisher *p, const char *pages)
{
    static const struct {
        const char *name;
        size_t batch;
        sample_fn sample;
        double limit;
    } ways[] = {
        {"publish 1 MiB, batches of 16", 16, publish, 0.85},
        {"publish 1 MiB, batches of 4", 4, publish, 0},
        {"publish 1 MiB, batches of 4, reserved ahead", 4, publish_ahead, 0},
    };
    struct contender f[CONTENDERS_MAX];
    size_t n = floors(f);
    int r = 0;

    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]) && r == 0; i++) {
        char name[96];
        struct figure figure = {.name = name,
                                .unit = "GB/s",
                                .goal = ways[i].limit > 0 ? GOAL_RATIO_AT_LEAST : GOAL_NONE,
                                .limit = ways[i].limit,
                                .more_is_better = true};

        snprintf(name, sizeof(name), "%s%s", ways[i].name, pages);
        p->batch = ways[i].batch < p->objects / 2 ? ways[i].batch : p->objects / 2;
        p->batches = p->objects / p->batch;
        r = bench_compare(b, &figure, p, ways[i].sample, f, n);
    }
    return r;
}

/* The pool and the warm memory have as many pages each; the source is of small pages, as a worker's own
 * memory is. */
static int open_all(const struct bench *b, bool huge, struct publisher *p, struct daemon *d)
{
    char pool[128];
    int r = memory_new(p->objects * OBJECT, PAGES_SMALL, &p->source);

    snprintf(pool, sizeof(pool), "slot = 1M\nslots = %zu\nlow_water = 0\nhigh_water = 0",
             p->objects);
    if (r == 0) {
        memset(p->source.rw, 0x5a, p->source.bytes);
        r = memory_new(p->objects * OBJECT, huge ? PAGES_HUGE : PAGES_SMALL, &p->warm);
    }
    if (r == 0)
        r = daemon_start(b, huge ? DAEMON_HUGEPAGES : DAEMON_SMALL_PAGES, pool, d);
    return r == 0 ? session_open(d, 0, &p->session) : r;
}

static void close_all(struct publisher *p, struct daemon *d)
{
    session_close(&p->session);
    daemon_stop(d);
    memory_free(&p->source);
    memory_free(&p->warm);
}

static int measure(struct bench *b, bool huge)
{
    struct publisher p = {.objects = b->smoke ? 8 : 64, .batch = 4};
    struct daemon d = {0};
    double warm_up;
    int r = open_all(b, huge, &p, &d);

    if (r == 0) {
        pin_cpu(0);
        p.batches = p.objects / p.batch;
        r = publish(&p, &warm_up); /* maps the pool's pages, and fills it: from now on it evicts */
    }
    if (r == 0)
        r = compare(b, &p, huge ? "" : ", small pages");
    close_all(&p, &d);
    return r;
}

/* Hugepages may have gone to somebody else since they were counted. */
int case_publish(struct bench *b)
{
    bool huge = !b->smoke && hugepages_free() >= 64;
    int r = measure(b, huge);

    return huge && (r == -ENOMEM || r == -ECHILD) ? measure(b, false) : r;
}
