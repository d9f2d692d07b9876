/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and pinning as a worker does it: through libkvd, in the memory of a running daemon. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"
#include "shm/index.h"

/* ---- the index that the library has mapped: only to flush it */

static const struct shm_index *index_at(const char *maps_line, size_t *ret_bytes)
{
    unsigned long from, to;
    const struct shm_index *index;

    if (!strstr(maps_line, "kvd-index") || sscanf(maps_line, "%lx-%lx r--s", &from, &to) != 2)
        return NULL;
    index = (const struct shm_index *)from;
    *ret_bytes = to - from;
    return index->header.kind == SHM_INDEX ? index : NULL;
}

static const struct shm_index *find_index(void)
{
    const struct shm_index *index = NULL;
    size_t bytes;
    char line[512];
    FILE *f = fopen("/proc/self/maps", "re");

    while (f && !index && fgets(line, sizeof(line), f))
        index = index_at(line, &bytes);
    if (f)
        fclose(f);
    return index;
}

/* ---- the subject */

static void api_set(struct subject *s, size_t at, uint64_t key)
{
    s->keys[at] = chain_key(key);
}

static void api_flush(struct subject *s)
{
    struct shm_table t = shm_table_of(s->api->index);

    for (size_t i = 0; i < CHAIN; i++) {
        const struct shm_entry *e = shm_home_line(&t, &s->keys[i]);

        for (int line = 0; line < 4; line++, e = shm_next_line(t.lines, t.mask, e))
            flush_line(e);
    }
    flush_wait();
}

static size_t api_lookup(struct subject *s)
{
    ssize_t n = kvd_lookup(s->api->session.pool, (const struct kvd_key *)s->keys, CHAIN, NULL);

    return n < 0 ? 0 : (size_t)n;
}

static size_t api_pin(struct subject *s)
{
    ssize_t n =
        kvd_pin(s->api->pinset, s->api->session.pool, (const struct kvd_key *)s->keys, CHAIN, 0);

    return n < 0 ? 0 : (size_t)n;
}

static void api_release(struct subject *s)
{
    kvd_pinset_release(s->api->pinset);
}

static const struct subject_ops api_subject = {
    .set = api_set,
    .flush = api_flush,
    .lookup = api_lookup,
    .pin = api_pin,
    .release = api_release,
};

int api_open(const struct daemon *d, uint64_t filled, struct api *a, struct subject **ret)
{
    struct subject *s = calloc(1, sizeof(*s));
    int r = s ? session_open(d, 0, &a->session) : -ENOMEM;

    if (r == 0)
        r = kvd_pinset_new(a->session.kvd, CHAIN, &a->pinset);
    if (r == 0) {
        a->index = find_index();
        r = a->index ? 0 : -ENOENT;
    }
    if (r < 0) {
        free(s);
        api_close(a);
        return r;
    }
    *s = (struct subject){.ops = &api_subject, .api = a, .filled = filled};
    *ret = s;
    return 0;
}

void api_close(struct api *a)
{
    kvd_pinset_free(a->pinset);
    session_close(&a->session);
    *a = (struct api){0};
}

/* ---- a daemon with a pool as full as it gets without evicting */

int api_daemon(const struct bench *b, uint64_t objects, struct daemon *ret)
{
    struct session s;
    char pool[128];
    int r;

    snprintf(pool, sizeof(pool), "slot = 4K\nslots = %llu\nlow_water = 1\nhigh_water = 2",
             (unsigned long long)objects + 2);
    r = daemon_start(b, DAEMON_SMALL_PAGES, pool, ret);
    if (r < 0)
        return r;
    r = session_open(ret, 0, &s);
    if (r == 0) {
        r = session_fill(&s, 0, objects);
        session_close(&s);
    }
    if (r < 0)
        daemon_stop(ret);
    return r;
}

/* ---- the case */

static int compare(struct bench *b, struct duel *d)
{
    int r = duel_lookup(b, d, d->cold ? "kvd_lookup, cold" : "kvd_lookup, hot", 1.5);

    if (r < 0)
        return r;
    return duel_pin(b, d, d->cold ? "kvd_pin + release, cold" : "kvd_pin + release, hot",
                    d->cold ? 1.5 : 2.0);
}

static int measure(struct bench *b, bool cold)
{
    uint64_t objects = b->smoke ? CHAIN * 2 : cold ? API_MANY : API_FEW;
    struct duel duel = {.cold = cold, .trials = b->smoke ? 5 : cold ? 40 : 400};
    struct daemon d = {0};
    struct api a = {0};
    struct floor f = {0};
    int r = api_daemon(b, objects, &d);

    if (r == 0)
        r = api_open(&d, objects, &a, &duel.ours);
    if (r == 0)
        r = floor_new(a.index->header.count, CHAIN, &f);
    if (r == 0) {
        duel.floor = floor_subject_new(&f);
        r = duel.floor ? 0 : -ENOMEM;
    }
    if (r == 0) {
        pin_cpu(0);
        r = compare(b, &duel);
    }
    free(duel.floor);
    free(duel.ours);
    floor_free(&f);
    api_close(&a);
    daemon_stop(&d);
    return r;
}

int case_api(struct bench *b)
{
    int r = measure(b, false);

    return r < 0 ? r : measure(b, true);
}
