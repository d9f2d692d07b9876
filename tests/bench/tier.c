/* SPDX-License-Identifier: Apache-2.0 */
#include "tier.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chain.h"
#include "client/control.h"
#include "daemon/spill/format.h"
#include "shm/lookup.h"
#include "spill_floor.h"

#define BATCH    64u
#define LONG_NS  60000000000u
#define LOOK_US  50u
#define LOOK_ALL 256u

/* ---- from beginning to end */

uint64_t tier_store_bytes(const struct tier_spec *spec)
{
    uint64_t tables = spec->stored * FORMAT_RECORD_BYTES * 2;

    return FORMAT_TABLE + spec->stored * spec->object + (tables / MIB + 3) * MIB;
}

static const struct shm_index *find_nvme(void)
{
    const struct shm_index *index = NULL;
    unsigned long from;
    char line[512];
    FILE *f = fopen("/proc/self/maps", "re");

    while (f && !index && fgets(line, sizeof(line), f))
        if (strstr(line, "kvd-nvme") && sscanf(line, "%lx-", &from) == 1)
            index = (const struct shm_index *)from;
    if (f)
        fclose(f);
    return index && index->header.kind == SHM_NVME ? index : NULL;
}

static int tier_session(struct tier *t)
{
    int r = session_open(&t->daemon, 0, &t->session);

    if (r == 0)
        r = kvd_pinset_new(t->session.kvd, t->spec.slots, &t->pins);
    if (r < 0)
        return r;
    t->nvme = find_nvme();
    return t->nvme ? 0 : -ENOENT;
}

int tier_open(const struct bench *b, const struct tier_spec *spec, struct tier *ret)
{
    struct tier t = {.spec = *spec, .keys = calloc(spec->slots, sizeof(*t.keys))};
    char sections[512];
    int r = t.keys ? disk_dir_new(b, t.dir, sizeof(t.dir)) : -ENOMEM;

    unpin_cpu();
    snprintf(t.store, sizeof(t.store), "%s/store", t.dir);
    snprintf(sections, sizeof(sections),
             "slot = %zu\nslots = %zu\nlow_water = 0\nhigh_water = 0\n"
             "[spill s/kv/disk]\npath = %s\nsize = %llu\nqueue_depth = %u\n",
             spec->object, spec->slots, t.store, (unsigned long long)tier_store_bytes(spec),
             TIER_DEPTH);
    if (r == 0)
        r = daemon_start(b, spec->huge ? DAEMON_HUGEPAGES : DAEMON_SMALL_PAGES, sections,
                         &t.daemon);
    if (r == 0)
        r = tier_session(&t);
    if (r < 0)
        tier_close(&t);
    else
        *ret = t;
    return r;
}

void tier_close(struct tier *t)
{
    kvd_pinset_free(t->pins);
    session_close(&t->session);
    daemon_stop(&t->daemon);
    disk_dir_free(t->dir);
    free(t->keys);
    *t = (struct tier){.dir = ""};
}

/* ---- objects */

static struct kvd_key key_of(uint64_t i)
{
    struct shm_key k = chain_key(i);
    struct kvd_key key;

    memcpy(&key, &k, sizeof(key));
    return key;
}

void tier_keys(struct tier *t, uint64_t first, size_t n)
{
    for (size_t i = 0; i < n; i++)
        t->keys[i] = key_of(first + i);
}

static int publish_some(struct session *s, uint64_t first, size_t n, size_t bytes)
{
    struct kvd_key keys[BATCH];
    struct kvd_reservation granted[BATCH];
    struct kvd_commit commits[BATCH];
    struct kvd_reserve q = {.keys = keys, .n = n};
    ssize_t r;

    for (size_t i = 0; i < n; i++)
        keys[i] = key_of(first + i);
    r = kvd_reserve(s->pool, &q, granted);
    if (r != (ssize_t)n)
        return r < 0 ? (int)r : -ENOSPC;
    for (size_t i = 0; i < n; i++)
        commits[i] = (struct kvd_commit){.ticket = granted[i].ticket, .bytes = bytes};
    r = kvd_commit(s->pool, commits, n);
    return r == (ssize_t)n ? 0 : r < 0 ? (int)r : -EIO;
}

int tier_publish(struct tier *t, struct session *s, uint64_t first, size_t n)
{
    int r = 0;

    for (size_t i = 0; i < n && r == 0; i += BATCH)
        r = publish_some(s, first + i, n - i < BATCH ? n - i : BATCH, t->spec.object);
    return r;
}

/* How many of them, in order, the store has. */
static size_t stored(const struct tier *t, uint64_t first, size_t n)
{
    struct shm_key keys[LOOK_ALL];

    n = n < LOOK_ALL ? n : LOOK_ALL;
    for (size_t i = 0; i < n; i++)
        keys[i] = chain_key(first + i);
    return shm_lookup(t->nvme, NULL, keys, n, atomic_load(&t->nvme->epoch), NULL);
}

int tier_wait_stored(struct tier *t, uint64_t first, size_t n)
{
    uint64_t until = now_ns() + LONG_NS;
    size_t done = 0;

    while (done < n && now_ns() < until) {
        size_t some = stored(t, first + done, n - done);

        done += some;
        if (!some)
            usleep(LOOK_US);
    }
    return done < n ? -ETIMEDOUT : 0;
}

/* ---- what the daemon says */

static uint64_t sum_of(const Kvd__Proto__StatsReply *reply, const char *name)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < reply->n_stats; i++)
        if (strcmp(reply->stats[i]->name, name) == 0)
            sum += reply->stats[i]->value;
    return sum;
}

int tier_stat(const struct tier *t, const char *name, uint64_t *ret)
{
    struct control_options o = {.socket = t->daemon.socket, .client = "kvd-bench"};
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Stats stats = KVD__PROTO__STATS__INIT;
    struct control_reply reply;
    struct control *c;
    int r = control_new(&o, &c);

    if (r < 0)
        return r;
    request.body_case = KVD__PROTO__REQUEST__BODY_STATS;
    request.stats = &stats;
    r = control_connect(c, control_deadline(10000), NULL);
    if (r == 0)
        r = control_call(c, &request, KVD__PROTO__RESPONSE__BODY_STATS, control_deadline(10000),
                         &reply);
    if (r == 0) {
        *ret = sum_of(reply.response->stats, name);
        control_reply_free(&reply);
    }
    control_free(c);
    return r;
}

/* ---- what the kernel says of it */

static uint64_t first_number(const char *path)
{
    unsigned long long n = 0;
    FILE *f = fopen(path, "re");

    if (f && fscanf(f, "%llu", &n) != 1)
        n = 0;
    if (f)
        fclose(f);
    return n;
}

int tier_cpu(const struct tier *t, struct tier_cpu *ret)
{
    struct tier_cpu u = {0};
    char path[320];
    struct dirent *e;
    DIR *d;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)t->daemon.pid);
    d = opendir(path);
    if (!d)
        return -errno;
    while ((e = readdir(d))) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "/proc/%d/task/%s/schedstat", (int)t->daemon.pid, e->d_name);
        *(atoi(e->d_name) == t->daemon.pid ? &u.core : &u.helpers) += first_number(path);
    }
    closedir(d);
    *ret = u;
    return 0;
}

int tier_memory(pid_t pid, uint64_t *ret)
{
    char path[64], line[256];
    unsigned long long kib, all = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    f = fopen(path, "re");
    if (!f)
        return -errno;
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "RssAnon: %llu", &kib) == 1 || sscanf(line, "RssShmem: %llu", &kib) == 1)
            all += kib;
    fclose(f);
    *ret = all * 1024;
    return all ? 0 : -ENODATA;
}
