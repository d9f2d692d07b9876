/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping the memory of pools, and letting go of it only when no pin lies in it (I3). */
#define _GNU_SOURCE
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "shm/header.h"

enum {
    TABLE_MIN = 16,
    MAP_FLAGS = SEGMENT_DONTFORK | SEGMENT_DONTDUMP,
};

int map_segment(int fd, enum shm_kind kind, const uint8_t instance[16], enum segment_view view,
                struct segment_mapping *ret)
{
    struct segment_mapping map;
    const struct shm_header *h;
    struct stat st;
    int r;

    if (fstat(fd, &st) < 0)
        return -errno;
    r = segment_map(NULL, fd, (uint64_t)st.st_size, view, MAP_FLAGS, &map);
    if (r < 0)
        return r == -EINVAL || r == -EACCES ? -EPROTO : r;
    h = map.addr;
    r = shm_header_check(h, kind, map.bytes);
    if (r == 0 && memcmp(h->instance, instance, sizeof(h->instance)) != 0)
        r = -EPROTO;
    if (r < 0) {
        segment_unmap(&map);
        return r == -ERANGE ? -EPROTO : r;
    }
    *ret = map;
    return 0;
}

/* ---- making */

struct making {
    struct kvd_space *space;
    uint32_t pool;
    const struct kvd_pool_info *info;
    uint64_t mask; /* of parts to map */
    struct view *view;
};

static int wrong(const struct making *m, const char *what)
{
    return handle_fail(m->space->kvd, -EPROTO, "pool %s: %s makes no sense", m->info->name, what);
}

static int map_one(const struct making *m, int fd, enum shm_kind kind, const char *what,
                   struct segment_mapping *ret)
{
    struct kvd *kvd = m->space->kvd;
    int r =
        map_segment(fd, kind, kvd->instance, kind == SHM_PINS ? SEGMENT_WRITE : SEGMENT_READ, ret);

    if (r == -EPROTO)
        return wrong(m, what);
    if (r < 0)
        return handle_fail(kvd, r, "pool %s: cannot map %s: %s", m->info->name, what, strerror(-r));
    if (((const struct shm_header *)ret->addr)->pool != m->pool)
        return wrong(m, what);
    return 0;
}

static int check_index(const struct making *m)
{
    const struct shm_index *x = m->view->index;
    const struct kvd_pool_info *i = m->info;
    uint64_t lines = x->header.count;

    if (lines < 2 || lines & (lines - 1) || x->slots != i->slots ||
        x->part_bytes != i->part_bytes || x->parts != i->parts ||
        x->chunk_slots != i->chunk_slots || x->chunks != i->chunks)
        return wrong(m, "the index's header");
    if (m->view->metas->header.count != i->slots || m->view->pins->header.count != i->slots)
        return wrong(m, "the number of slots");
    return 0;
}

static int map_nvme(struct making *m, int fd)
{
    struct view *v = m->view;
    uint64_t lines;
    int r = map_one(m, fd, SHM_NVME, "the index of the spill stores", &v->nvme_map);

    if (r < 0)
        return r;
    v->nvme = v->nvme_map.addr;
    lines = v->nvme->header.count;
    return lines < 2 || lines & (lines - 1) ? wrong(m, "the header of the spill stores' index") : 0;
}

static int map_tables(struct making *m, const struct control_reply *reply)
{
    struct view *v = m->view;
    const Kvd__Proto__PoolInfo *info = reply->response->pool_open->info;
    bool stores = info->has_records;
    int r;

    if (reply->n_fds != 3u + stores || info->pool != m->pool)
        return wrong(m, "the daemon's answer");
    r = map_one(m, reply->fds[0], SHM_INDEX, "the index", &v->index_map);
    if (r == 0)
        r = map_one(m, reply->fds[1], SHM_META, "the metadata", &v->metas_map);
    if (r == 0)
        r = map_one(m, reply->fds[2], SHM_PINS, "the pin counters", &v->pins_map);
    if (r < 0)
        return r;
    v->index = v->index_map.addr;
    v->metas = v->metas_map.addr;
    v->pins = v->pins_map.addr;
    r = check_index(m);
    return r == 0 && stores ? map_nvme(m, reply->fds[3]) : r;
}

static int open_pool(struct making *m)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__PoolOpen open = KVD__PROTO__POOL_OPEN__INIT;
    struct control_reply reply = {0};
    int r;

    open.pool = m->pool;
    request.body_case = KVD__PROTO__REQUEST__BODY_POOL_OPEN;
    request.pool_open = &open;
    r = handle_call(m->space->kvd, m->space, &request, KVD__PROTO__RESPONSE__BODY_POOL_OPEN,
                    CALL_AGAIN, &reply);
    if (r < 0)
        return r;
    r = map_tables(m, &reply);
    control_reply_free(&reply);
    return r;
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

static int reserve_part(struct making *m, struct segment_reservation *r)
{
    const struct kvd_pool_info *i = m->info;
    uint64_t bytes = round_up(i->chunks * i->chunk_slots * i->part_bytes, i->page_bytes);
    int err = segment_reserve(NULL, bytes, i->page_bytes, r);

    return err < 0 ? handle_fail(m->space->kvd, err,
                                 "pool %s: cannot reserve %llu bytes of address "
                                 "space: %s",
                                 i->name, (unsigned long long)bytes, strerror(-err))
                   : 0;
}

static int reserve_parts(struct making *m)
{
    struct view *v = m->view;
    int r = 0;

    v->read = calloc(v->parts, sizeof(*v->read));
    v->write = calloc(v->parts, sizeof(*v->write));
    if (!v->read || !v->write)
        return handle_fail(m->space->kvd, -ENOMEM, "out of memory");
    for (uint32_t part = 0; part < v->parts && r == 0; part++) {
        if (!(m->mask >> part & 1))
            continue;
        r = reserve_part(m, &v->read[part]);
        if (r == 0 && m->space->write)
            r = reserve_part(m, &v->write[part]);
    }
    return r;
}

/* Descriptors in ascending order of parts, first all for reading, then all for writing. */
static int append_chunk(struct making *m, uint32_t chunk, uint64_t bytes, const int *fds)
{
    struct view *v = m->view;
    unsigned n = 0;

    for (int w = 0; w <= (int)m->space->write; w++) {
        for (uint32_t part = 0; part < v->parts; part++) {
            void *addr;
            int r;

            if (!(m->mask >> part & 1))
                continue;
            r = segment_append(NULL, w ? &v->write[part] : &v->read[part], fds[n++], bytes,
                               w ? SEGMENT_WRITE : SEGMENT_READ, MAP_FLAGS, &addr);
            if (r < 0)
                return handle_fail(m->space->kvd, r, "pool %s: cannot map chunk %u, part %u%s: %s",
                                   m->info->name, chunk, part, w ? ", for writing" : "",
                                   strerror(-r));
        }
    }
    return 0;
}

/* Whole chunks must join without a gap; the last one may be short, but not shorter than its slots.
 */
static bool chunk_fits(const struct kvd_pool_info *i, uint32_t chunk, uint64_t bytes)
{
    uint64_t full = i->chunk_slots * i->part_bytes;
    uint64_t last = (i->slots - (i->chunks - 1) * i->chunk_slots) * i->part_bytes;

    if (chunk + 1 < i->chunks)
        return bytes == full;
    return bytes >= last && bytes <= round_up(full, i->page_bytes);
}

static int map_chunk(struct making *m, uint32_t chunk)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__ChunkMap map = KVD__PROTO__CHUNK_MAP__INIT;
    unsigned parts = (unsigned)__builtin_popcountll(m->mask);
    struct control_reply reply = {0};
    uint64_t bytes;
    int r;

    map.pool = m->pool;
    map.chunk = chunk;
    map.has_part_mask = map.has_write = 1;
    map.part_mask = m->mask;
    map.write = m->space->write;
    request.body_case = KVD__PROTO__REQUEST__BODY_CHUNK_MAP;
    request.chunk_map = &map;
    r = handle_call(m->space->kvd, m->space, &request, KVD__PROTO__RESPONSE__BODY_CHUNK_MAP,
                    CALL_AGAIN, &reply);
    if (r < 0)
        return r;
    bytes = reply.response->chunk_map->bytes;
    if (reply.n_fds != parts * (1 + m->space->write) || !chunk_fits(m->info, chunk, bytes))
        r = wrong(m, "the size or number of a chunk's segments");
    else
        r = append_chunk(m, chunk, bytes, reply.fds);
    control_reply_free(&reply);
    return r;
}

int view_new(struct kvd_space *space, uint32_t pool, const struct kvd_pool_info *info,
             struct view **ret_view)
{
    uint64_t all = info->parts == 64 ? UINT64_MAX : ((uint64_t)1 << info->parts) - 1;
    struct making m = {.space = space, .pool = pool, .info = info, .mask = space->part_mask & all};
    int r;

    m.view = calloc(1, sizeof(*m.view));
    if (!m.view)
        return handle_fail(space->kvd, -ENOMEM, "out of memory");
    m.view->parts = info->parts;
    m.view->slots = (uint32_t)info->slots;
    m.view->part_bytes = info->part_bytes;
    r = open_pool(&m);
    if (r == 0)
        r = reserve_parts(&m);
    for (uint32_t chunk = 0; r == 0 && m.mask && chunk < info->chunks; chunk++)
        r = map_chunk(&m, chunk);
    if (r < 0) {
        view_free(m.view);
        return r;
    }
    *ret_view = m.view;
    return 0;
}

static void unmap(struct view *v)
{
    for (uint32_t part = 0; part < v->parts; part++) {
        if (v->read)
            segment_unreserve(&v->read[part]);
        if (v->write)
            segment_unreserve(&v->write[part]);
    }
    segment_unmap(&v->index_map);
    segment_unmap(&v->metas_map);
    segment_unmap(&v->pins_map);
    segment_unmap(&v->nvme_map);
    v->index = v->nvme = NULL;
    v->metas = NULL;
    v->pins = NULL;
}

static void free_memory(struct view *v)
{
    free(v->read);
    free(v->write);
    free(v);
}

void view_free(struct view *view)
{
    if (!view)
        return;
    unmap(view);
    free_memory(view);
}

/* ---- the table */

static struct view_table *table_grow(struct kvd *kvd, struct view_table *old)
{
    uint32_t n = old ? atomic_load_explicit(&old->n, memory_order_relaxed) : 0;
    uint32_t capacity = old ? old->capacity * 2 : TABLE_MIN;
    struct view_table *t = calloc(1, sizeof(*t) + capacity * sizeof(t->view[0]));

    if (!t)
        return NULL;
    t->older = old;
    t->capacity = capacity;
    if (n)
        memcpy(t->view, old->view, n * sizeof(t->view[0]));
    atomic_store_explicit(&t->n, n, memory_order_relaxed);
    atomic_store_explicit(&kvd->views, t, memory_order_release); /* pairs with views_get() */
    return t;
}

int views_add(struct kvd *kvd, struct view *view)
{
    struct view_table *t = atomic_load_explicit(&kvd->views, memory_order_relaxed);
    uint32_t n;

    if (!t || atomic_load_explicit(&t->n, memory_order_relaxed) == t->capacity)
        t = table_grow(kvd, t);
    if (!t)
        return handle_fail(kvd, -ENOMEM, "out of memory");
    n = atomic_load_explicit(&t->n, memory_order_relaxed);
    view->number = n;
    t->view[n] = view;
    atomic_store_explicit(&t->n, n + 1, memory_order_release); /* pairs with views_get() */
    return 0;
}

struct view *views_get(const struct kvd *kvd, uint32_t number)
{
    const struct view_table *t = atomic_load_explicit(&kvd->views, memory_order_acquire);

    if (!t || number >= atomic_load_explicit(&t->n, memory_order_acquire))
        return NULL;
    return t->view[number];
}

/* Counters are this session's alone, but two spaces of it may share them: then a view stays longer
 * than it must, never shorter. */
static bool pinned(const struct view *v)
{
    for (uint32_t i = 0; i < v->slots; i++)
        if (atomic_load_explicit(&v->pins->pins[i].count, memory_order_acquire))
            return true; /* acquire: pairs with the release of a pin, after which nothing is touched
                          */
    return false;
}

void views_reap(struct kvd *kvd)
{
    struct view *v;

    for (uint32_t i = 0; (v = views_get(kvd, i)); i++)
        if (v->dropped && v->pins && !pinned(v))
            unmap(v);
}

/* Should the daemon not hear our Bye, it still finds that we hold nothing. */
static void unpin_all(struct view *v)
{
    for (uint32_t i = 0; v->pins && i < v->slots; i++)
        if (atomic_load_explicit(&v->pins->pins[i].count, memory_order_relaxed))
            atomic_store_explicit(&v->pins->pins[i].count, 0, memory_order_release);
}

void views_free(struct kvd *kvd, bool forked)
{
    struct view_table *t = atomic_load(&kvd->views), *older;
    struct view *v;

    for (uint32_t i = 0; (v = views_get(kvd, i)); i++) {
        if (!forked) {
            unpin_all(v);
            unmap(v);
        }
        free_memory(v);
    }
    for (; t; t = older) {
        older = t->older;
        free(t);
    }
    atomic_store(&kvd->views, NULL);
}
