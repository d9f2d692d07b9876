/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random-core: random operations on a core, judged by a simple reference model after each one.
 *
 *   random-core [--seed N] [--ops N] [--seconds S]
 *
 * Runs one seed after the other, each with so many operations, until the time is over; with --seed that one
 * only. The same seed does the same. The first thing that is wrong ends it with status 1, after the seed,
 * the operation's number and the last operations have been printed. (-ENOSPC is right only if nothing
 * could have left, a victim only if nothing colder could, and so on: model.h.)
 */
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core.h"
#include "daemon/config.h"
#include "daemon/guard.h"
#include "fail.h"

enum {
    WALK_EVERY = 250,
    OPS = 20000,
    SECONDS = 10,
};

/* What handlers and wrapped functions, which get no argument, must reach. */
static struct run the_run;
static unsigned int passed;

/* ---- failing */

static void remove_files(const struct run *r)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf '%s'", r->dir);
    if (r->dir[0] && system(command) != 0)
        fprintf(stderr, "%s is left\n", r->dir);
}

static void report(const struct run *r)
{
    uint64_t first = r->op >= RUN_LOG ? r->op - RUN_LOG + 1 : 0;

    for (uint64_t i = first; i <= r->op; i++)
        printf("  %8llu %s\n", (unsigned long long)i, r->log[i % RUN_LOG]);
    printf("random-core: seed %llu failed at operation %llu; again: random-core --seed %llu --ops "
           "%llu\n"
           "%u passed, 1 failed\n",
           (unsigned long long)r->seed, (unsigned long long)r->op, (unsigned long long)r->seed,
           (unsigned long long)r->ops, passed);
    fflush(stdout);
    remove_files(r);
}

void run_fail(const char *format, ...)
{
    va_list args;

    fputs("random-core: ", stdout);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    report(&the_run);
    exit(1);
}

/* An assertion of the core, on this very thread. */
static void on_abort(int sig)
{
    (void)sig;
    report(&the_run);
    _exit(1);
}

/* ---- where the core can be looked at while it works */

int __real_guard_call(int (*fn)(void *arg), void *arg, const volatile void *addr, size_t bytes);
int __wrap_guard_call(int (*fn)(void *arg), void *arg, const volatile void *addr, size_t bytes);

/* The linker puts this in place of guard_call(): every look at pin counters goes through it. */
int __wrap_guard_call(int (*fn)(void *arg), void *arg, const volatile void *addr, size_t bytes)
{
    int result;

    run_interleave(&the_run);
    result = __real_guard_call(fn, arg, addr, bytes);
    run_interleave(&the_run);
    return result;
}

static uint64_t clock_ns(void *arg)
{
    struct run *r = arg;

    run_interleave(r);
    return r->now_ns;
}

static void on_session_gone(void *arg, struct session *s)
{
    struct run *r = arg;

    for (int i = 0; i < MODEL_SESSIONS; i++) {
        if (r->process[i].session != s)
            continue;
        r->process[i].session = NULL;
        r->process[i].alive = false;
        run_drop_pins(r, i, MODEL_NONE);
    }
}

/* ---- making a world */

static void random_pool(struct run *r, int i, int space, uint32_t slots, uint32_t parts, FILE *f)
{
    static const char *const names[] = {"a/kv", "a/snapshots", "b/kv", "b/few"};
    struct m_pool *p = &r->model.pool[i];

    *p = (struct m_pool){.slots = slots, .parts = parts, .part_bytes = 4096, .space = space};
    if (slots > 8 && rng_once_in(&r->rng, 2)) {
        p->low_water = rng_between(&r->rng, 1, slots / 4);
        p->high_water = rng_between(&r->rng, p->low_water + 1, slots / 4 * 3);
    }
    for (int k = 0; k < MODEL_KEYS; k++)
        p->where[k] = MODEL_NONE;
    for (uint32_t k = 0; k < slots; k++)
        p->slot[k].parent = MODEL_NONE;
    fprintf(f, "[pool %s]\nslot = %uK\nparts = %u\nslots = %u\nlow_water = %u\nhigh_water = %u\n",
            names[i], 4 * parts, parts, slots, p->low_water, p->high_water);
}

static void random_space(struct run *r, int i, FILE *f)
{
    struct m_space *s = &r->model.space[i];

    s->epoch = 1;
    if (rng_once_in(&r->rng, 2))
        s->max_reserved = rng_between(&r->rng, 1, 12);
    if (rng_once_in(&r->rng, 2))
        s->max_pinned = rng_between(&r->rng, 1, 64) * 4096;
    fprintf(f, "[space %c]\nmax_reserved = %u\nmax_pinned = %llu\n", 'a' + i, s->max_reserved,
            (unsigned long long)s->max_pinned);
}

static void random_tenants(struct run *r, FILE *f)
{
    uint64_t resident = rng_between(&r->rng, 1, 40) * 4096;
    uint32_t reserved = rng_between(&r->rng, 1, 8);
    bool any = rng_once_in(&r->rng, 3);

    for (int i = 0; i < MODEL_SPACES; i++) {
        for (int k = 0; k < MODEL_TENANTS; k++)
            r->model.space[i].limit[k].max_reserved = any ? 4 * reserved : 0;
        r->model.space[i].limit[1] = (struct m_tenant_limit){resident, reserved};
    }
    fprintf(f, "[tenant 1]\nmax_resident = %llu\nmax_reserved = %u\n", (unsigned long long)resident,
            reserved);
    if (any)
        fprintf(f, "[tenant *]\nmax_reserved = %u\n", 4 * reserved);
}

static void random_config(struct run *r, FILE *f)
{
    bool big = rng_once_in(&r->rng, 4);

    r->max_sessions = rng_between(&r->rng, 2, MODEL_SESSIONS);
    r->model.quarantine_ms = rng_once_in(&r->rng, 8) ? 0 : rng_between(&r->rng, 1, 30000);
    r->model.linger_ms = rng_once_in(&r->rng, 8) ? 0 : rng_between(&r->rng, 1, 30000);
    fprintf(f,
            "[daemon]\nruntime_dir = %s\nhugepages = off\npopulate_threads = 1\n"
            "quarantine = %llums\nengine_linger = %llums\nmax_sessions = %u\n",
            r->dir, (unsigned long long)r->model.quarantine_ms,
            (unsigned long long)r->model.linger_ms, r->max_sessions);
    random_space(r, 0, f);
    random_space(r, 1, f);
    random_pool(r, 0, 0, big ? MODEL_SLOTS : rng_between(&r->rng, 8, 96), 1, f);
    random_pool(r, 1, 0, rng_between(&r->rng, 2, 12), rng_between(&r->rng, 2, 4), f);
    random_pool(r, 2, 1, rng_between(&r->rng, 4, 64), 2, f);
    random_pool(r, 3, 1, rng_between(&r->rng, 1, 4), rng_once_in(&r->rng, 4) ? 64 : 1, f);
    random_tenants(r, f);
}

/* Hashes, and some that differ in the last byte, in the second half, or in the group only. */
static void random_keys(struct run *r)
{
    for (int i = 0; i < MODEL_KEYS; i++) {
        struct shm_key *k = &r->keys[i];

        *k = (struct shm_key){.group = 0};
        for (size_t n = 0; n < sizeof(k->hash); n += 8) {
            uint64_t x = rng_next(&r->rng);

            memcpy(k->hash + n, &x, sizeof(x));
        }
        k->hash[16] = k->hash[31] = 255; /* i is less, so no two keys become equal */
        if (!i || !rng_once_in(&r->rng, 3))
            continue;
        *k = r->keys[i - 1];
        if (rng_once_in(&r->rng, 3))
            k->group = (uint32_t)i;
        else
            k->hash[rng_once_in(&r->rng, 2) ? 31 : 16] = (uint8_t)i;
    }
}

static void make_core(struct run *r, char *text)
{
    struct core_options o = {.clock = {.now_ns = clock_ns, .arg = r}};
    FILE *f = fmemopen(text, strlen(text), "r");
    struct config *config;
    char why[768];

    expect(f && config_load_stream(f, "random", &config, config_problem_print, stdout) == 0,
           "the configuration is refused:\n%s", text);
    fclose(f);
    o.config = config;
    expect(core_new(&o, why, sizeof(why), &r->core) == 0, "no core: %s", why);
    config_free(config);
    r->core->session_gone = on_session_gone;
    r->core->session_gone_arg = r;
    for (int i = 0; i < MODEL_POOLS; i++) /* nothing is in them yet */
        for (int k = 0; k < 2; k++)
            run_pool(r, i)->index->seed[k] = rng_next(&r->rng);
}

static void make_world(struct run *r, uint64_t seed, uint64_t ops)
{
    char text[2048] = "";
    FILE *f = fmemopen(text, sizeof(text), "w");

    memset(r, 0, sizeof(*r));
    *r = (struct run){.seed = seed, .ops = ops, .rng = {.state = seed}, .next_pid = 1000};
    r->now_ns = 1000000000;
    r->model.now_ms = r->now_ns / 1000000;
    strcpy(r->dir, "/dev/shm/kvd-random-XXXXXX");
    expect(f && mkdtemp(r->dir), "cannot make %s", r->dir);
    random_config(r, f);
    fclose(f);
    random_keys(r);
    make_core(r, text);
}

/* ---- a life */

struct operation {
    void (*run)(struct run *r);
    uint32_t weight;
};

static const struct operation operations[] = {
    {op_publish, 56},    {op_reserve, 30},    {op_commit, 50},     {op_abort, 8},
    {op_late_write, 4},  {op_evict, 8},       {op_remove_keys, 8}, {op_remove_many, 3},
    {op_reset, 3},       {op_work, 20},       {op_tick, 12},       {op_wait, 16},
    {op_deadline, 4},    {op_pin, 50},        {op_unpin, 20},      {op_half_pin, 8},
    {op_socket_pin, 8},  {op_lookup, 10},     {op_observe, 10},    {op_play_dirty, 3},
    {op_attach, 24},     {op_new_session, 8}, {op_hang_up, 3},     {op_resume, 8},
    {op_end_session, 3}, {op_truncate, 1},    {op_post, 30},       {op_serve, 30},
    {op_collect, 20},    {op_break_ring, 1},
};

static void step(struct run *r)
{
    uint32_t all = 0, x;

    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++)
        all += operations[i].weight;
    x = rng_below(&r->rng, all);
    r->log[r->op % RUN_LOG][0] = 0;
    for (size_t i = 0;; i++) {
        if (x < operations[i].weight) {
            operations[i].run(r);
            return;
        }
        x -= operations[i].weight;
    }
}

/* Everybody goes; then everything must be free. */
static void end_world(struct run *r)
{
    char epochs[128];

    for (int i = 0; i < 64; i++)
        for (int k = 0; k < MODEL_SESSIONS; k++)
            op_end_session(r);
    r->model.now_ms += r->model.linger_ms + r->model.quarantine_ms;
    r->now_ns = r->model.now_ms * 1000000;
    op_work(r);
    r->model.now_ms += r->model.quarantine_ms; /* of those that lingered until now */
    r->now_ns = r->model.now_ms * 1000000;
    op_work(r);
    expect(!r->core->n_sessions && list_empty(&r->core->engines), "%u sessions are left",
           r->core->n_sessions);
    for (int i = 0; i < MODEL_POOLS; i++) {
        struct pool *p = run_pool(r, i);

        run_begin(r, i);
        pool_evict(p, p->slots, HISTORY_EVICTED);
        run_end(r, M_EVICT);
        while (p->count[SHM_SLOT_LIVE]) {
            run_begin(r, i);
            expect(pool_evict(p, p->slots, HISTORY_EVICTED) > 0, "nobody holds, nothing leaves");
            run_end(r, M_EVICT);
        }
        expect(p->count[SHM_SLOT_FREE] == p->slots, "I4: pool %d: %u of %u slots are free", i,
               p->count[SHM_SLOT_FREE], p->slots);
    }
    run_walk(r);
    core_free(r->core);
    snprintf(epochs, sizeof(epochs), "%s/epochs", r->dir);
    unlink(epochs); /* outlives the daemon */
    expect(rmdir(r->dir) == 0, "%s is not empty: segments were left behind", r->dir);
}

static void run_seed(struct run *r, uint64_t seed, uint64_t ops)
{
    make_world(r, seed, ops);
    for (r->op = 0; r->op < ops; r->op++) {
        step(r);
        if (r->op % WALK_EVERY == 0)
            run_walk(r);
    }
    r->log[r->op % RUN_LOG][0] = 0;
    end_world(r);
    passed++;
}

/* ---- */

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int usage(void)
{
    fputs("usage: random-core [--seed N] [--ops N] [--seconds S]\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},
        {"ops", required_argument, NULL, 'o'},
        {"seconds", required_argument, NULL, 't'},
        {NULL, 0, NULL, 0},
    };
    uint64_t seed = (uint64_t)time(NULL) * 1000, ops = OPS, end = now_ms() + SECONDS * 1000;
    bool one = false;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        uint64_t n = c == '?' ? 0 : strtoull(optarg, NULL, 10);

        if (c == 's') {
            seed = n;
            one = true;
        } else if (c == 'o') {
            ops = n;
        } else if (c == 't') {
            end = now_ms() + n * 1000;
        } else {
            return usage();
        }
    }
    signal(SIGABRT, on_abort);
    if (guard_install() < 0)
        return 1;
    printf("random-core: from seed %llu, %llu operations each\n", (unsigned long long)seed,
           (unsigned long long)ops);
    do {
        fflush(stdout);
        run_seed(&the_run, seed++, ops);
        printf("seed %llu: %llu slots granted, %llu refused, %llu pins, %llu of them and releases "
               "in the "
               "middle of something; %llu heads evicted before %llu tails, all forced\n",
               (unsigned long long)the_run.seed, (unsigned long long)the_run.granted,
               (unsigned long long)the_run.refused, (unsigned long long)the_run.pinned,
               (unsigned long long)the_run.stepped_in,
               (unsigned long long)the_run.model.orphans_forced,
               (unsigned long long)the_run.model.orphans);
    } while (!one && now_ms() < end);
    printf("%u passed, 0 failed\n", passed);
    return 0;
}
