/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker notices of a daemon that writes to a store as fast as it can. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "spill_floor.h"
#include "tier.h"

#define HOT   32u /* objects that are looked up, pinned and released together */
#define BATCH 16u
#define AHEAD 96u /* objects that wait to be written */

struct worker {
    struct tier tier;
    struct session publisher;
    struct kvd_pinset *held; /* the hot ones stay */
    uint64_t next;           /* key */
    uint64_t run_ns;
    double *ns; /* per turn */
    size_t max;
    double *gbs; /* written meanwhile; a value per round */
    unsigned n_gbs;
    atomic_bool go;
    int error; /* the publisher's */
};

/* ---- the daemon is kept busy */

/* There are always some that wait, and never so many that they must be evicted unwritten. */
static void *publisher_main(void *arg)
{
    struct worker *w = arg;
    uint64_t first = w->next;

    pin_cpu(1);
    while (atomic_load(&w->go) && w->error == 0) {
        w->error = tier_publish(&w->tier, &w->publisher, w->next, BATCH);
        w->next += BATCH;
        if (w->error == 0 && w->next - first > AHEAD)
            w->error = tier_wait_stored(&w->tier, w->next - BATCH - AHEAD, BATCH);
    }
    if (w->error == 0 && w->next - first > AHEAD)
        w->error = tier_wait_stored(&w->tier, w->next - AHEAD, AHEAD);
    else if (w->error == 0)
        w->error = tier_wait_stored(&w->tier, first, w->next - first);
    return NULL;
}

/* ---- turns */

static int turn(struct worker *w)
{
    struct kvd_pool *pool = w->tier.session.pool;
    struct kvd_pinset *pins = w->tier.pins;
    bool all = kvd_lookup(pool, w->tier.keys, HOT, NULL) == HOT &&
               kvd_pin(pins, pool, w->tier.keys, HOT, 0) == HOT;

    kvd_pinset_release(pins);
    return all ? 0 : -ENOENT;
}

/* p99, us */
static int turns(struct worker *w, double *ret)
{
    uint64_t until = now_ns() + w->run_ns, start = now_ns();
    size_t n = 0;
    int r = 0;

    while (r == 0 && start < until && n < w->max) {
        uint64_t end;

        r = turn(w);
        end = now_ns();
        w->ns[n++] = (double)(end - start);
        start = now_ns();
    }
    *ret = percentile(w->ns, n, 0.99) / 1e3;
    return r;
}

static int sample_idle(void *arg, double *ret)
{
    return turns(arg, ret);
}

static int sample_spilling(void *arg, double *ret)
{
    struct worker *w = arg;
    uint64_t before = 0, after = 0, start;
    pthread_t thread;
    int r = 0;

    atomic_store(&w->go, true);
    if (pthread_create(&thread, NULL, publisher_main, w) != 0)
        return -EAGAIN;
    usleep(w->run_ns / 10000); /* until the queue is full */
    start = now_ns();
    r = tier_stat(&w->tier, "kvd_spilled_bytes_total", &before);
    if (r == 0)
        r = turns(w, ret);
    if (r == 0)
        r = tier_stat(&w->tier, "kvd_spilled_bytes_total", &after);
    if (r == 0 && w->gbs)
        w->gbs[w->n_gbs++] = (double)(after - before) / (double)(now_ns() - start);
    atomic_store(&w->go, false);
    pthread_join(thread, NULL);
    return r < 0 ? r : w->error;
}

/* ---- */

static int prepare(struct worker *w)
{
    struct tier *t = &w->tier;
    ssize_t n;
    int r = session_open(&t->daemon, 0, &w->publisher);

    if (r == 0)
        r = kvd_pinset_new(t->session.kvd, HOT, &w->held);
    if (r == 0)
        r = tier_publish(t, &t->session, 0, HOT);
    if (r < 0)
        return r;
    w->next = HOT;
    tier_keys(t, 0, HOT);
    n = kvd_pin(w->held, t->session.pool, t->keys, HOT, 0);
    return n == HOT ? tier_wait_stored(t, 0, HOT) : -ENOENT;
}

/* Every place of the store has been written once. */
static int warm_up(struct worker *w)
{
    double ignored;
    int r = 0;

    for (uint64_t i = 0; i < w->tier.spec.stored && r == 0; i += HOT) {
        r = tier_publish(&w->tier, &w->publisher, w->next, HOT);
        if (r == 0)
            r = tier_wait_stored(&w->tier, w->next, HOT);
        w->next += HOT;
    }
    return r == 0 ? sample_spilling(w, &ignored) : r;
}

static int compare(struct bench *b, struct worker *w)
{
    static const struct figure p99 = {"lookup + pin + release 32 while spilling, p99", "us",
                                      GOAL_RATIO_AT_MOST, 1.5, false};
    static const struct figure meanwhile = {"spilled meanwhile", "GB/s", GOAL_NONE, 0, true};
    const struct contender idle = {"the same, the daemon at rest", sample_idle};
    int r;

    w->gbs = calloc(b->rounds, sizeof(*w->gbs));
    if (!w->gbs)
        return -ENOMEM;
    r = bench_compare(b, &p99, w, sample_spilling, &idle, 1);
    if (r == 0)
        report_add(b->report, &meanwhile, &(struct result){.ours = w->gbs, .n = w->n_gbs});
    free(w->gbs);
    return r;
}

int case_spilling(struct bench *b)
{
    struct tier_spec spec = {.object = b->smoke ? 65536 : MIB, .slots = 256, .stored = 1024};
    struct worker w = {.run_ns = b->smoke ? 20000000 : 400000000, .max = 1u << 20};
    int r = 0;

    spec.huge = !b->smoke && hugepages_free() >= spec.slots * spec.object / HUGEPAGE;
    w.ns = calloc(w.max, sizeof(*w.ns));
    if (!w.ns)
        return -ENOMEM;
    memset(w.ns, 0, w.max * sizeof(*w.ns)); /* no page fault in between */
    r = tier_open(b, &spec, &w.tier);
    if (r == 0)
        r = prepare(&w);
    pin_cpu(0);
    if (r == 0)
        r = warm_up(&w);
    if (r == 0)
        r = compare(b, &w);
    kvd_pinset_free(w.held);
    session_close(&w.publisher);
    tier_close(&w.tier);
    free(w.ns);
    return r;
}
