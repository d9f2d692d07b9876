/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"
#include "shm/header.h"

uint64_t core_now_ns(const struct core *c)
{
    return c->clock.now_ns(c->clock.arg);
}

uint64_t core_now_ms(const struct core *c)
{
    return core_now_ns(c) / 1000000;
}

struct pool *core_pool(struct core *c, uint32_t id)
{
    return id < c->n_pools ? c->pools[id] : NULL;
}

static int make_core_segment(struct core *c)
{
    struct segment_spec spec = {.name = "kvd-core",
                                .kind = SEGMENT_SMALL,
                                .bytes = SHM_PAGE,
                                .runtime_dir = c->runtime_dir,
                                .replace = true};
    int r = segment_make(&spec, NULL, &c->core_segment);

    if (r < 0)
        return r;
    r = segment_map(NULL, c->core_segment.fd, c->core_segment.bytes, SEGMENT_WRITE,
                    SEGMENT_DONTFORK, &c->core_map);
    if (r < 0)
        return r;
    c->shm = c->core_map.addr;
    shm_header_fill(&c->shm->header, SHM_CORE, c->core_segment.bytes, 1, c->instance);
    return 0;
}

/* ---- epochs */

#define EPOCHS "epochs" /* a line "SPACE EPOCH" each */

static void epochs_path(const struct core *c, const char *suffix, char *ret, size_t n)
{
    snprintf(ret, n, "%s/" EPOCHS "%s", c->runtime_dir, suffix);
}

static void load_epochs(struct core *c)
{
    char path[160], name[64];
    unsigned int epoch;
    FILE *f;

    epochs_path(c, "", path, sizeof(path));
    f = fopen(path, "re");
    while (f && fscanf(f, "%63s %u", name, &epoch) == 2) {
        struct space *s = core_space(c, name);

        if (s && epoch > s->epoch)
            s->epoch = epoch;
    }
    if (f)
        fclose(f);
}

static int write_epochs(const struct core *c, const char *path)
{
    FILE *f = fopen(path, "we");
    int r = 0;

    if (!f)
        return -errno;
    for (uint32_t i = 0; i < c->n_spaces; i++)
        if (fprintf(f, "%s %u\n", c->spaces[i].name, c->spaces[i].epoch) < 0)
            r = -EIO;
    return fclose(f) == 0 ? r : -errno;
}

void core_save_epochs(struct core *c)
{
    char path[160], fresh[160];
    int r;

    epochs_path(c, "", path, sizeof(path));
    epochs_path(c, ".new", fresh, sizeof(fresh));
    r = write_epochs(c, fresh);
    if (r == 0 && rename(fresh, path) < 0)
        r = -errno;
    if (r < 0)
        log_write(c->log, LOG_ERR, NULL, "cannot write %s: %s", path, strerror(-r));
}

/* ---- what the configuration asks for */

struct progress {
    void (*fn)(uint64_t done, uint64_t total, void *arg);
    void *arg;
    uint64_t before, total; /* bytes of segments that are finished; of all */
    uint64_t segment;       /* of the one under way */
};

static void on_populate(uint64_t done, uint64_t total, void *userdata)
{
    struct progress *x = userdata;

    if (done == total) {
        x->before += total;
        done = 0;
    }
    if (x->fn)
        x->fn(x->before + done, x->total, x->arg);
}

static void fill_space(struct core *c, struct space *s, uint32_t id,
                       const struct config_space *from)
{
    s->core = c;
    s->id = id;
    s->epoch = 1;
    snprintf(s->name, sizeof(s->name), "%s", from->name);
    snprintf(s->scheme, sizeof(s->scheme), "%s", config_scheme_name(from->scheme));
    config_space_identity(from, s->identity, sizeof(s->identity));
    memcpy(s->first_parent, from->first_parent.bytes, sizeof(s->first_parent));
    s->first_parent_len = from->first_parent.len;
    memcpy(s->vector_key, from->vector_key.bytes, sizeof(s->vector_key));
    s->vector_key_len = from->vector_key.len;
    s->block_tokens = from->block_tokens;
    s->max_pinned_bytes = from->max_pinned;
    s->max_reserved = from->max_reserved;
}

static int copy_limits(struct core *c, const struct config *config)
{
    size_t n = config->tenant_count + 1;

    c->limits = calloc(n, sizeof(*c->limits));
    if (!c->limits)
        return -ENOMEM;
    for (uint32_t i = 0; i < config->tenant_count; i++)
        c->limits[i] = (struct tenant_limit){.id = config->tenants[i].tenant,
                                             .max_resident_bytes = config->tenants[i].max_resident,
                                             .max_reserved = config->tenants[i].max_reserved};
    c->limits[n - 1] = (struct tenant_limit){.any = true,
                                             .max_resident_bytes = config->any_tenant.max_resident,
                                             .max_reserved = config->any_tenant.max_reserved};
    for (uint32_t i = 0; i < c->n_spaces; i++) {
        c->spaces[i].tenants.limits = c->limits;
        c->spaces[i].tenants.n_limits = n;
    }
    return 0;
}

static int make_pool(struct core *c, const struct config *config, uint32_t i,
                     struct progress *progress, char *ret_why, size_t why_bytes)
{
    static const enum segment_hugepages modes[] = {
        [CONFIG_HUGEPAGES_OFF] = SEGMENT_HUGEPAGES_OFF,
        [CONFIG_HUGEPAGES_TRY] = SEGMENT_HUGEPAGES_TRY,
        [CONFIG_HUGEPAGES_REQUIRE] = SEGMENT_HUGEPAGES_REQUIRE,
    };
    const struct config_pool *from = &config->pools[i];
    const struct config_daemon *d = &config->daemon;
    struct space *s = &c->spaces[from->space];
    struct populate_options populate = {
        .threads = config_populate_threads(d, (uint32_t)sysconf(_SC_NPROCESSORS_ONLN)),
        .progress = on_populate,
        .userdata = progress,
        .cancel = c->cancel,
    };
    struct segment_spec memory = {
        .hugepages = modes[d->hugepages],
        .page_size = d->page_size,
        .hugetlbfs_dir = d->hugetlbfs[0] ? d->hugetlbfs : NULL,
        .runtime_dir = c->runtime_dir,
        .populate = &populate,
    };
    struct pool_spec spec = {
        .space_name = s->name,
        .name = from->name,
        .slots = from->slots,
        .part_bytes = from->part_bytes,
        .parts = from->parts,
        .chunk_bytes = from->chunk,
        .low_water = (uint32_t)from->low_water,
        .high_water = (uint32_t)from->high_water,
        .policy = "lru",
        .memory = &memory,
    };
    struct pool *p;
    int r = pool_new(c, s, c->n_pools, &spec, ret_why, why_bytes, &p);

    if (r < 0)
        return r;
    c->pools[c->n_pools++] = p;
    s->pools[s->n_pools++] = p;
    log_write(c->log, LOG_INFO, &(struct log_fields){.space = s->name, .pool = p->name},
              "%u slots of %u x %llu KiB: %s", p->slots, p->parts,
              (unsigned long long)p->part_bytes >> 10, p->ladder);
    return 0;
}

static struct store_config store_config(const struct config_store *from)
{
    return (struct store_config){.name = from->name,
                                 .path = from->path,
                                 .bytes = from->size,
                                 .second_touch = from->admission == CONFIG_ADMIT_SECOND_TOUCH,
                                 .bandwidth = from->bandwidth,
                                 .wear = from->wear,
                                 .queue_depth = from->queue_depth,
                                 .backend = from->io,
                                 .register_pages = from->register_buffers};
}

static int make_stores(struct core *c, const struct config *config, char *ret_why, size_t why_bytes)
{
    struct store_config *list = calloc(config->store_count, sizeof(*list));
    int r = list ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < c->n_pools && r == 0; i++) {
        uint32_t n = 0;

        for (uint32_t k = 0; k < config->store_count; k++)
            if (config->stores[k].pool == i)
                list[n++] = store_config(&config->stores[k]);
        if (n)
            r = spill_new(c->nvme, c->pools[i], list, n, ret_why, why_bytes);
    }
    free(list);
    return r;
}

static int make_nvme(struct core *c, const struct core_options *o, char *ret_why, size_t why_bytes)
{
    const struct config_daemon *d = &o->config->daemon;
    struct nvme_options options = {.fetch_deadline_ns = d->fetch_deadline_ns,
                                   .fetch_hold_ns = d->fetch_hold_ns,
                                   .digest_threads = d->digest_threads,
                                   .wrap = o->wrap_io,
                                   .wrap_arg = o->wrap_arg};
    int r;

    if (!o->config->store_count)
        return 0;
    r = nvme_new(c, &options, &c->nvme);
    return r < 0 ? r : make_stores(c, o->config, ret_why, why_bytes);
}

static void fill_core(struct core *c, const struct config_daemon *d)
{
    snprintf(c->runtime_dir, sizeof(c->runtime_dir), "%s", d->runtime_dir);
    c->quarantine_ms = d->quarantine_ns / 1000000;
    c->engine_linger_ms = d->engine_linger_ns / 1000000;
    c->ring_entries_max = d->ring_entries_max;
    c->max_inline = d->max_inline;
    c->max_frame = d->max_frame;
    c->max_sessions = d->max_sessions;
    c->started_ms = core_now_ms(c);
    c->next_session = 1;
    c->next_operation = 1;
}

static int core_fill(struct core *c, const struct config *config, struct progress *progress,
                     char *ret_why, size_t why_bytes)
{
    uint32_t start;
    int r = 0;

    if (getrandom(c->instance, sizeof(c->instance), 0) != sizeof(c->instance))
        return -EIO;
    /* A worker that has missed a restart may still use tickets of the run before: they must not be
     * those of this one. */
    memcpy(&start, c->instance, sizeof(start));
    c->next_operation += start;
    c->spaces = calloc(config->space_count, sizeof(*c->spaces));
    if (!c->spaces)
        return -ENOMEM;
    c->n_spaces = config->space_count;
    for (uint32_t i = 0; i < c->n_spaces; i++)
        fill_space(c, &c->spaces[i], i, &config->spaces[i]);
    load_epochs(c);
    for (uint32_t i = 0; i < c->n_spaces && r == 0; i++)
        r = space_first_parent(&c->spaces[i], config->spaces[i].seed);
    if (r == 0)
        r = copy_limits(c, config);
    if (r == 0)
        r = make_core_segment(c);
    for (uint32_t i = 0; i < config->pool_count; i++)
        progress->total += config->pools[i].size;
    for (uint32_t i = 0; i < config->pool_count && r == 0; i++)
        r = make_pool(c, config, i, progress, ret_why, why_bytes);
    return r;
}

int core_new(const struct core_options *o, char *ret_why, size_t why_bytes, struct core **ret_core)
{
    struct progress progress = {.fn = o->progress, .arg = o->progress_arg};
    struct core *c = calloc(1, sizeof(*c));
    int r;

    if (!c)
        return -ENOMEM;
    c->clock = o->clock;
    c->log = o->log;
    c->breaks = (struct log_limit){.interval_ns = 10000000000u, .burst = 20};
    c->cancel = o->cancel;
    c->core_segment.fd = c->core_segment.reader_fd = -1;
    list_init(&c->sessions);
    list_init(&c->engines);
    fill_core(c, &o->config->daemon);
    if (why_bytes)
        ret_why[0] = 0;
    r = core_fill(c, o->config, &progress, ret_why, why_bytes);
    if (r == 0)
        r = make_nvme(c, o, ret_why, why_bytes);
    if (r < 0) {
        if (why_bytes && !ret_why[0])
            snprintf(ret_why, why_bytes, "%s", strerror(-r));
        core_free(c);
        return r;
    }
    *ret_core = c;
    return 0;
}

void core_free(struct core *c)
{
    if (!c)
        return;
    sessions_bury(c);
    nvme_free(c->nvme);
    for (uint32_t i = 0; i < c->n_pools; i++)
        pool_free(c->pools[i]);
    for (uint32_t i = 0; i < c->n_spaces; i++)
        tenants_free(&c->spaces[i].tenants);
    if (c->core_segment.fd >= 0) {
        if (c->shm)
            segment_unmap(&c->core_map);
        segment_unlink(&c->core_segment);
        segment_close(&c->core_segment);
    }
    free(c->limits);
    free(c->spaces);
    free(c);
}

/* ---- background work */

bool core_work(struct core *c)
{
    uint64_t now = core_now_ms(c);
    bool more = false;

    sessions_linger(c, now);
    if (c->nvme)
        more |= nvme_run(c->nvme);
    for (uint32_t i = 0; i < c->n_spaces; i++)
        more |= space_purge(&c->spaces[i]);
    for (uint32_t i = 0; i < c->n_pools; i++) {
        pool_release_quarantine(c->pools[i], now);
        more |= pool_keep_free(c->pools[i]);
    }
    return more;
}

static int64_t nvme_in_ms(const struct core *c)
{
    uint64_t at = c->nvme ? nvme_deadline(c->nvme) : 0, now = core_now_ns(c);

    return !at ? -1 : at > now ? (int64_t)((at - now) / 1000000) : 0;
}

int64_t core_next_deadline(struct core *c)
{
    uint64_t now = core_now_ms(c);
    int64_t next = sessions_linger(c, now), io = nvme_in_ms(c);

    if (io >= 0 && (next < 0 || io < next))
        next = io;
    for (uint32_t i = 0; i < c->n_pools; i++) {
        int64_t d = pool_release_quarantine(c->pools[i], now);

        if (d >= 0 && (next < 0 || d < next))
            next = d;
    }
    return next;
}

void core_tick(struct core *c)
{
    for (uint32_t i = 0; i < c->n_pools; i++)
        pool_tick(c->pools[i]);
    sessions_check_pins(c);
}
