/* SPDX-License-Identifier: Apache-2.0 */
/* The tier of the daemon: what all stores share, making pools' stores, and the turn of the wheel. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/log.h"
#include "daemon/spill/engine.h"
#include "shm/header.h"

#define DIGEST_DEPTH 4096u
#define REAP         64u

/* What one turn takes at most, so that rings and sockets have theirs. */
#define TURN    512u

#define HANG_NS 1000000000u
#define WAIT_MS 50

/* At the end: so often nothing may happen before what is with the devices is left to them. */
#define LAST_WAITS 40

int nvme_new(struct core *core, const struct nvme_options *options, struct nvme **ret_nvme)
{
    struct nvme *n = calloc(1, sizeof(*n));
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct epoll_event e = {.events = EPOLLIN};
    uint32_t threads = options->digest_threads ? options->digest_threads : cpus > 1 ? 2 : 1;
    int r;

    if (!n)
        return -ENOMEM;
    *n = (struct nvme){.core = core, .options = *options, .event_fd = -1, .epoll_fd = -1};
    list_init(&n->stores);
    list_init(&n->waiting);
    list_init(&n->held);
    r = digest_pool_new(threads, DIGEST_DEPTH, &n->digest);
    if (r < 0)
        goto fail;
    n->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    n->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (n->event_fd < 0 || n->epoll_fd < 0 ||
        epoll_ctl(n->epoll_fd, EPOLL_CTL_ADD, n->event_fd, &e) < 0 ||
        epoll_ctl(n->epoll_fd, EPOLL_CTL_ADD, digest_pool_fd(n->digest), &e) < 0) {
        r = -errno;
        goto fail;
    }
    *ret_nvme = n;
    return 0;
fail:
    nvme_free(n);
    return r;
}

static bool is_quiet(const struct nvme *n)
{
    for (const struct list *i = n->stores.next; i != &n->stores; i = i->next) {
        const struct store *st = list_entry(i, struct store, in_nvme);

        if (st->in_io || st->n_transfers || !sectors_idle(st) || st->super_issued)
            return false;
    }
    return true;
}

void nvme_free(struct nvme *n)
{
    int waits = 0;

    if (!n)
        return;
    n->stopping = true;
    for (struct list *i = n->stores.next; i != &n->stores; i = i->next)
        store_abandon(list_entry(i, struct store, in_nvme));
    while (!is_quiet(n) && waits < LAST_WAITS) {
        struct pollfd p = {.fd = n->epoll_fd, .events = POLLIN};

        waits += poll(&p, 1, WAIT_MS) <= 0;
        nvme_news(n);
        nvme_run(n);
    }
    while (!list_empty(&n->stores)) {
        struct spill *s = list_entry(n->stores.next, struct store, in_nvme)->spill;

        s->pool->spill = NULL;
        spill_free(s);
    }
    digest_pool_free(n->digest);
    if (n->event_fd >= 0)
        close(n->event_fd);
    if (n->epoll_fd >= 0)
        close(n->epoll_fd);
    free(n);
}

int nvme_fd(const struct nvme *n)
{
    return n->epoll_fd;
}

/* ---- a pool's stores */

/* The size of a device, without opening it: a device that hangs must not delay the start. */
static uint64_t device_bytes(const char *path)
{
    char name[64];
    unsigned long long sectors = 0;
    struct stat st;
    FILE *f;

    if (stat(path, &st) < 0 || !S_ISBLK(st.st_mode))
        return 0;
    snprintf(name, sizeof(name), "/sys/dev/block/%u:%u/size", major(st.st_rdev), minor(st.st_rdev));
    f = fopen(name, "re");
    if (!f)
        return 0;
    if (fscanf(f, "%llu", &sectors) != 1)
        sectors = 0;
    fclose(f);
    return sectors * 512;
}

void pool_geometry(const struct pool *p, struct format_geometry *ret)
{
    char text[sizeof(p->space->scheme) + sizeof(p->space->identity) + 2];
    int n = snprintf(text, sizeof(text), "%s\n%s", p->space->scheme, p->space->identity);
    XXH128_canonical_t digest;

    *ret = (struct format_geometry){.part_bytes = p->part_bytes, .parts = p->parts};
    snprintf(ret->space, sizeof(ret->space), "%s", p->space->name);
    snprintf(ret->pool, sizeof(ret->pool), "%s", p->name);
    XXH128_canonicalFromHash(&digest, XXH3_128bits(text, (size_t)n));
    memcpy(ret->identity, digest.digest, sizeof(ret->identity));
}

static int store_new(struct spill *s, const struct store_config *c, char *ret_why, size_t n,
                     struct store **ret_store)
{
    struct pool *p = s->pool;
    struct format_geometry geometry;
    struct format_super plan;
    struct store *st = calloc(1, sizeof(*st));
    uint64_t bytes = c->bytes ? c->bytes : device_bytes(c->path);
    int r;

    if (!st)
        return -ENOMEM;
    *st = (struct store){.nvme = s->nvme,
                         .spill = s,
                         .bytes = c->bytes,
                         .second_touch = c->second_touch,
                         .bandwidth = c->bandwidth,
                         .wear = c->wear,
                         .depth = c->queue_depth,
                         .backend = c->backend,
                         .register_pages = c->register_pages,
                         .file = {.fd = -1},
                         .super_copy = -1,
                         .then = -1};
    list_init(&st->in_nvme);
    list_init(&st->reads);
    list_init(&st->writes);
    snprintf(st->name, sizeof(st->name), "%s", c->name);
    snprintf(st->path, sizeof(st->path), "%s", c->path);
    snprintf(st->full_name, sizeof(st->full_name), "%s/%s/%s", p->space->name, p->name, c->name);
    pool_geometry(p, &geometry);
    r = format_plan(&geometry, bytes, &plan);
    if (r < 0 || plan.records > FORMAT_RECORDS_MAX) {
        free(st);
        snprintf(ret_why, n, "store %s/%s/%s: %s", p->space->name, p->name, c->name,
                 bytes ? "too small for even one object, or too large"
                       : "no size given, and its path is no block device");
        return -EINVAL;
    }
    st->planned = (uint32_t)plan.records;
    st->base = s->n_records;
    s->n_records += st->planned;
    *ret_store = st;
    return 0;
}

static int make_store(struct spill *s, const struct store_config *c, char *ret_why, size_t n)
{
    struct store *st;
    int r = store_new(s, c, ret_why, n, &st);

    if (r < 0)
        return r;
    s->stores[s->n_stores++] = st;
    st->id = s->nvme->n_stores++;
    list_append(&s->nvme->stores, &st->in_nvme);
    st->free_bits = calloc((st->planned + 63) / 64, sizeof(uint64_t));
    return st->free_bits ? policy_lru.make(st->planned, &st->policy) : -ENOMEM;
}

/* At most two thirds full: a store has many times the pool's objects, and who looks here is about to read
 * from a disk. */
static uint64_t lines_for(uint64_t records)
{
    uint64_t lines = 16;

    while (lines < records + records / 2)
        lines *= 2;
    return lines;
}

static int make_index(struct spill *s)
{
    struct pool *p = s->pool;
    uint64_t lines = lines_for(s->n_records);
    int r = pool_make_small(p, "nvme", SHM_NVME, shm_index_bytes(lines), lines, &s->index_segment,
                            &s->index_map);

    if (r < 0)
        return r;
    p->nvme_index = s->index_map.addr;
    if (getrandom(p->nvme_index->seed, sizeof(p->nvme_index->seed), 0) !=
        sizeof(p->nvme_index->seed))
        return -EIO;
    p->nvme_index->slots = s->n_records;
    atomic_store(&p->nvme_index->epoch, p->space->epoch);
    return 0;
}

static int make_arrays(struct spill *s)
{
    struct pool *p = s->pool;

    slot_list_init(&s->queue);
    slot_list_init(&s->blocked);
    s->records = calloc(s->n_records, sizeof(*s->records));
    s->slots = calloc(p->slots, sizeof(*s->slots));
    s->links = calloc(p->slots, sizeof(*s->links));
    if (!s->records || !s->slots || !s->links)
        return -ENOMEM;
    for (uint32_t i = 0; i < s->n_records; i++)
        s->records[i].parent = s->records[i].slot = NO_RECORD;
    return pool_hold_new(p);
}

int spill_new(struct nvme *n, struct pool *p, const struct store_config *stores, uint32_t n_stores,
              char *ret_why, size_t why_bytes)
{
    struct spill *s = calloc(1, sizeof(*s));
    int r = 0;

    if (!s)
        return -ENOMEM;
    *s = (struct spill){.nvme = n, .pool = p, .index_segment = {.fd = -1, .reader_fd = -1}};
    p->spill = s;
    if (n_stores > sizeof(s->stores) / sizeof(s->stores[0])) {
        snprintf(ret_why, why_bytes, "pool %s/%s: at most %zu stores", p->space->name, p->name,
                 sizeof(s->stores) / sizeof(s->stores[0]));
        r = -EINVAL;
    }
    for (uint32_t i = 0; i < n_stores && r == 0; i++)
        r = make_store(s, &stores[i], ret_why, why_bytes);
    if (r == 0)
        r = make_arrays(s);
    if (r == 0)
        r = make_index(s);
    for (uint32_t i = 0; i < n_stores && r == 0; i++)
        r = store_start(s->stores[i], STORE_OPEN, false);
    if (r < 0)
        spill_free(s);
    return r;
}

void spill_free(struct spill *s)
{
    if (!s)
        return;
    s->pool->spill = NULL;
    for (uint32_t i = 0; i < s->n_stores; i++)
        store_free(s->stores[i]);
    pool_drop_small(&s->index_segment, &s->index_map);
    s->pool->nvme_index = NULL;
    free(s->records);
    free(s->slots);
    free(s->links);
    free(s);
}

int spill_index_fd(const struct pool *p)
{
    return p->spill->index_segment.reader_fd;
}

/* ---- running */

static struct store *by_id(const struct nvme *n, uint32_t id)
{
    return nvme_store(n, id);
}

static uint32_t reap_digests(struct nvme *n)
{
    struct digest_done done[REAP];
    uint32_t got, all = 0;

    do {
        got = digest_reap(n->digest, done, REAP);
        for (uint32_t i = 0; i < got; i++) {
            struct store *st = by_id(n, (uint32_t)(done[i].cookie >> 16) & 0xfff);

            if (st)
                piece_hash_done(st, (uint32_t)done[i].cookie & 0xffff,
                                (uint32_t)(done[i].cookie >> 32), &done[i]);
        }
        all += got;
    } while (got == REAP && all < TURN);
    return all;
}

static void dispatch(struct store *st, const struct io_done *d)
{
    uint32_t index = (uint32_t)d->cookie & 0xffff, generation = (uint32_t)(d->cookie >> 32);

    switch ((enum cookie_kind)(d->cookie >> 28 & 0xf)) {
    case COOKIE_PIECE:
        piece_io_done(st, index, generation, d->result);
        break;
    case COOKIE_SECTOR:
        sector_io_done(st, index, generation, d->result);
        break;
    case COOKIE_SUPER:
        store_super_done(st, generation, d->result);
        break;
    }
}

static uint32_t reap_store(struct store *st)
{
    struct io_done done[REAP];
    uint32_t all = 0;
    int got = REAP;

    if (st->has_refused) {
        st->has_refused = false;
        dispatch(st, &st->refused);
    }
    while (st->io && got == REAP && all < TURN) {
        got = io_reap(st->io, done, REAP);
        for (int i = 0; i < got; i++)
            dispatch(st, &done[i]);
        all += got > 0 ? (uint32_t)got : 0;
    }
    return all;
}

static bool run_store(struct store *st, uint64_t now)
{
    bool more;

    if (st->retry_ns && now >= st->retry_ns) {
        st->retry_ns = 0;
        pieces_retry(st);
    }
    more = store_run(st);
    sectors_run(st);
    pieces_begin(st);
    store_submit(st);
    pieces_hash(st);
    return more;
}

/* The digest of what is being written is most often there long before the device has answered, which wakes
 * us anyway; to be woken for it as well would double what a write costs. */
static void choose_quiet(struct nvme *n)
{
    bool quiet = true;

    for (const struct list *i = n->stores.next; i != &n->stores && quiet; i = i->next)
        quiet = !list_entry(i, struct store, in_nvme)->awaited;
    if (quiet == n->quiet)
        return;
    n->quiet = quiet;
    digest_announce(n->digest, !quiet);
}

static void check_hang(struct nvme *n, uint64_t now)
{
    if (now < n->next_hang_ns)
        return;
    n->next_hang_ns = now + HANG_NS;
    for (struct list *i = n->stores.next; i != &n->stores; i = i->next)
        store_check_hang(list_entry(i, struct store, in_nvme), now);
}

void nvme_news(struct nvme *n)
{
    uint64_t news;

    while (read(n->event_fd, &news, sizeof(news)) == sizeof(news))
        ;
}

bool nvme_run(struct nvme *n)
{
    uint64_t now = nvme_now(n);
    uint32_t done = 0;
    bool more = false;

    for (struct list *i = n->stores.next; i != &n->stores; i = i->next)
        done += reap_store(list_entry(i, struct store, in_nvme));
    done += reap_digests(n);
    fetches_check(n);
    for (struct list *i = n->stores.next; i != &n->stores; i = i->next) {
        struct store *st = list_entry(i, struct store, in_nvme);

        if (st == st->spill->stores[0]) {
            more |= record_purge(st->spill);
            more |= writes_run(st->spill);
        }
    }
    for (struct list *i = n->stores.next; i != &n->stores; i = i->next)
        more |= run_store(list_entry(i, struct store, in_nvme), now);
    choose_quiet(n);
    check_hang(n, now);
    return more || done >= TURN;
}

static void earlier(uint64_t *a, uint64_t b)
{
    if (b && (!*a || b < *a))
        *a = b;
}

uint64_t nvme_deadline(const struct nvme *n)
{
    uint64_t next = 0;

    if (!list_empty(&n->waiting))
        earlier(&next, n->next_check_ns);
    if (!list_empty(&n->held))
        earlier(&next, n->next_held_ns);
    for (const struct list *i = n->stores.next; i != &n->stores; i = i->next) {
        const struct store *st = list_entry(i, struct store, in_nvme);

        earlier(&next, st->retry_ns);
        if (st->in_io || !sectors_idle(st) || st->super_issued)
            earlier(&next, n->next_hang_ns);
        if (st->scrubbing && st->scrub_rate)
            earlier(&next, st->scrub_due_ns);
        if (st->swept)
            earlier(&next, n->next_check_ns);
    }
    return next;
}

/* Else what waits waits in vain. */
static bool can_write(const struct spill *s)
{
    for (uint32_t i = 0; i < s->n_stores; i++)
        if (store_writable(s->stores[i]) || s->stores[i]->state == STORE_STARTING)
            return true;
    return false;
}

uint64_t nvme_unwritten(const struct nvme *n)
{
    uint64_t all = 0;

    for (const struct list *i = n->stores.next; i != &n->stores; i = i->next) {
        const struct store *st = list_entry(i, struct store, in_nvme);
        const struct spill *s = st->spill;

        if (st == s->stores[0] && can_write(s))
            all += s->queue.n + s->writing;
    }
    return all;
}

void nvme_stop(struct nvme *n)
{
    n->stopping = true;
    for (struct list *i = n->stores.next; i != &n->stores; i = i->next)
        fetch_fail_queued(list_entry(i, struct store, in_nvme), -ESHUTDOWN);
}

/* ---- start */

static const char *what_of(const struct store *st)
{
    struct store_status x;

    store_status(st, &x);
    return x.state;
}

void nvme_wait(struct nvme *n, uint64_t patience_ns,
               void (*progress)(const char *what, uint64_t done, uint64_t total, void *arg),
               void *arg)
{
    uint64_t last = nvme_now(n), seen = 0;

    for (;;) {
        struct pollfd p = {.fd = n->epoll_fd, .events = POLLIN};
        uint64_t done = 0, total = 0, used = 0;
        const char *what = NULL;
        bool more;

        nvme_news(n);
        more = nvme_run(n);

        for (struct list *i = n->stores.next; i != &n->stores; i = i->next) {
            struct store *st = list_entry(i, struct store, in_nvme);

            used += st->used;
            if (st->state != STORE_STARTING)
                continue;
            what = what_of(st);
            done += st->last_task.done;
            total += st->last_task.total;
        }
        if (!what)
            break;
        if (done + used != seen)
            last = nvme_now(n);
        seen = done + used;
        if (nvme_now(n) - last > patience_ns)
            break;
        if (progress)
            progress(what, done, total, arg);
        if (n->core->cancel && atomic_load(n->core->cancel))
            break;
        if (!more)
            poll(&p, 1, WAIT_MS);
    }
    n->ready = true;
}

/* ---- for administrators */

uint32_t nvme_stores(const struct nvme *n)
{
    return n ? n->n_stores : 0;
}

struct store *nvme_store(const struct nvme *n, uint32_t i)
{
    for (struct list *k = n->stores.next; k != &n->stores; k = k->next)
        if (list_entry(k, struct store, in_nvme)->id == i)
            return list_entry(k, struct store, in_nvme);
    return NULL;
}

struct store *nvme_find(const struct nvme *n, const char *name)
{
    for (struct list *k = n ? n->stores.next : NULL; n && k != &n->stores; k = k->next)
        if (strcmp(list_entry(k, struct store, in_nvme)->full_name, name) == 0)
            return list_entry(k, struct store, in_nvme);
    return NULL;
}

struct pool *store_pool(const struct store *st)
{
    return st->spill->pool;
}
