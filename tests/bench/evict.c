/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction while many sessions hold many pins: a core without a process around it. The pinned objects are
 * different ones for every session, and the pool is large enough for all of them and for the victims, so
 * the counters that must be looked at lie in 64 segments that no cache holds.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "chain.h"
#include "daemon/config.h"
#include "daemon/core.h"
#include "daemon/guard.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"

#define VICTIMS 1000u
#define FEW     32u /* what a reservation evicts when no slot is free */

/* ---- a core */

struct scene {
    char dir[64];
    struct core *core;
    struct pool *pool;
    struct attach *writer;
    struct attach **holder; /* one per session with pins */
    uint32_t sessions, pins;
    uint64_t next; /* key */
    uint64_t seed;
};

static uint64_t clock_now(void *arg)
{
    (void)arg;
    return now_ns();
}

static int make_core(struct scene *s, uint32_t slots)
{
    struct core_options o = {.clock = {.now_ns = clock_now}};
    struct config *config = NULL;
    char text[512], why[768] = "";
    FILE *f;
    int r;

    snprintf(text, sizeof(text),
             "[daemon]\nruntime_dir = %s\nhugepages = off\n"
             "[space s]\n[pool s/kv]\nslot = 4K\nslots = %u\nlow_water = 0\nhigh_water = 0\n",
             s->dir, slots);
    f = fmemopen(text, strlen(text), "r");
    if (!f)
        return -errno;
    r = config_load_stream(f, "bench", &config, config_problem_print, stderr);
    fclose(f);
    o.config = config;
    if (r == 0)
        r = guard_install();
    if (r == 0)
        r = core_new(&o, why, sizeof(why), &s->core);
    if (r < 0 && why[0])
        fprintf(stderr, "kvd-bench: %s\n", why);
    config_free(config);
    return r;
}

static int attach(struct scene *s, struct attach **ret)
{
    struct session_spec spec = {
        .pid = getpid(), .role = ROLE_WRITER, .client = "bench", .token = (const uint8_t *)""};
    struct session *session;
    int r = session_new(s->core, &spec, &session);

    return r < 0 ? r : session_attach(session, s->pool, true, ret);
}

static int make_sessions(struct scene *s)
{
    int r = attach(s, &s->writer);

    s->holder = calloc(s->sessions, sizeof(*s->holder));
    if (!s->holder)
        return -ENOMEM;
    for (uint32_t i = 0; i < s->sessions && r == 0; i++)
        r = attach(s, &s->holder[i]);
    return r;
}

/* ---- objects */

static int reserve(struct scene *s, uint64_t i, const struct shm_key *parent, uint64_t *ret_ticket)
{
    struct shm_key key = chain_key(i);
    struct reservation r;

    pool_reserve(s->pool, s->writer, &key, parent, s->pool->space->epoch, 0, &r);
    *ret_ticket = r.ticket;
    return r.status == RESERVE_NEW ? 0 : -EIO;
}

static int commit(struct scene *s, uint64_t ticket)
{
    struct commit c = {.ticket = ticket, .bytes = s->pool->part_bytes};

    return pool_commit(s->pool, s->writer, &c);
}

/* Committed in another order than slots were granted, as after a long life: neighbours in age are
 * strangers in memory. */
static int store_shuffled(struct scene *s, uint32_t n)
{
    uint64_t *tickets = calloc(n, sizeof(*tickets));
    int r = tickets ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < n && r == 0; i++)
        r = reserve(s, s->next++, NULL, &tickets[i]);
    for (uint32_t i = n; i > 0 && r == 0; i--) {
        uint32_t k = (uint32_t)(random_next(&s->seed) % i);
        uint64_t t = tickets[k];

        tickets[k] = tickets[i - 1];
        r = commit(s, t);
    }
    free(tickets);
    return r;
}

static int store_chain(struct scene *s, uint32_t n)
{
    struct shm_key parent;
    uint64_t ticket;
    int r = 0;

    for (uint32_t i = 0; i < n && r == 0; i++) {
        r = reserve(s, s->next, i ? &parent : NULL, &ticket);
        if (r == 0)
            r = commit(s, ticket);
        parent = chain_key(s->next++);
    }
    return r;
}

/* Objects 0 .. sessions * pins - 1, each held by one session. */
static int pin_all(struct scene *s)
{
    struct shm_pinned pinned;
    size_t held;

    for (uint32_t i = 0; i < s->sessions * s->pins; i++) {
        struct attach *a = s->holder[i / s->pins];
        struct shm_key key = chain_key(i);

        shm_pin_keys(s->pool->index, a->map.addr, &key, 1, s->pool->space->epoch, false, 0, &pinned,
                     &held);
        if (held != 1)
            return -EIO;
    }
    return 0;
}

/* ---- samples */

static int evict(void *arg, double *ret)
{
    struct scene *s = arg;
    uint64_t start = now_ns();
    uint32_t n = pool_evict(s->pool, VICTIMS, HISTORY_EVICTED);

    *ret = (double)(now_ns() - start) / 1e3 / VICTIMS;
    return n == VICTIMS ? 0 : -EIO;
}

/* Only the looking, twice, at counters of slots all over the pool; nothing of it is prefetched. */
static int look(void *arg, double *ret)
{
    struct scene *s = arg;
    uint64_t start, seed = s->seed++;
    uint32_t pinned = 0;

    start = now_ns();
    for (uint32_t i = 0; i < VICTIMS; i++) {
        uint32_t slot = (uint32_t)(random_next(&seed) % s->pool->slots);

        for (uint32_t k = 0; k < 2 * s->sessions; k++) {
            const struct shm_pins *p = s->holder[k % s->sessions]->map.addr;

            pinned += shm_load32(&p->pins[slot].count);
        }
    }
    *ret = (double)(now_ns() - start) / 1e3 / VICTIMS;
    return pinned ? 0 : -EIO; /* most slots are pinned */
}

/* The pinned objects are the oldest: the first search passes over all of them, and afterwards they are the
 * youngest. */
static int pass_over_pinned(struct scene *s, double *ret_us)
{
    uint64_t start;
    uint32_t n;

    pool_tick(s->pool); /* younger than the last that was stored, too */
    start = now_ns();
    n = pool_evict(s->pool, FEW, HISTORY_EVICTED);
    *ret_us = (double)(now_ns() - start) / 1e3 / ((double)s->sessions * s->pins);
    return n == FEW ? 0 : -EIO;
}

static int scene_open(struct scene *s, uint32_t victims)
{
    int r;

    if (!mkdtemp(s->dir))
        return -errno;
    r = make_core(s, s->sessions * s->pins + victims);
    if (r < 0)
        return r;
    s->pool = s->core->pools[0];
    r = make_sessions(s);
    if (r == 0)
        r = store_shuffled(s, s->sessions * s->pins);
    return r == 0 ? pin_all(s) : r;
}

static void scene_close(struct scene *s)
{
    core_free(s->core);
    free(s->holder);
    rmdir(s->dir);
}

static int measure(struct bench *b, bool chain)
{
    struct scene s = {.dir = "/dev/shm/kvd-bench-XXXXXX",
                      .sessions = b->smoke ? 4 : 64,
                      .pins = b->smoke ? 64 : 4096};
    const struct figure f = {.name = chain ? "eviction of 1,000 of one chain, per victim"
                                           : "eviction of 1,000 victims, per victim",
                             .unit = "us",
                             .goal = GOAL_OURS_AT_MOST,
                             .limit = 3};
    static const struct figure over = {.name = "eviction: one pinned candidate passed over",
                                       .unit = "us"};
    const struct contender floor = {"looking at 64 counters twice", look};
    uint32_t victims = (b->rounds + 1) * VICTIMS;
    double passed;
    int r = scene_open(&s, victims);

    if (r == 0)
        r = chain ? store_chain(&s, victims) : store_shuffled(&s, victims);
    if (r == 0) {
        pin_cpu(0);
        r = pass_over_pinned(&s, &passed);
    }
    if (r == 0) {
        if (!chain)
            report_add(b->report, &over, &(struct result){.ours = &passed, .n = 1});
        r = bench_compare(b, &f, &s, evict, &floor, 1);
    }
    scene_close(&s);
    return r;
}

int case_evict(struct bench *b)
{
    int r = measure(b, false);

    return r < 0 ? r : measure(b, true);
}
