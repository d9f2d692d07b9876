/* SPDX-License-Identifier: Apache-2.0 */
/* Spaces and their pools: opening, refreshing, closing. */
#include "client/internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    POOLS_MAX = 256,
    TRIES = 2, /* the session may be lost half-way through opening; not each time */
};

void kvd_space_options_init(struct kvd_space_options *options, size_t size)
{
    const struct kvd_space_options own = {.part_mask = UINT64_MAX};

    options_init(options, size, &own, sizeof(own));
}

/* ---- the struct */

void space_free(struct kvd_space *space)
{
    if (!space)
        return;
    for (size_t i = 0; i < space->n_pools; i++)
        free(space->pools[i]);
    free(space->pools);
    free(space->name);
    free(space->scheme);
    free(space->identity);
    free(space);
}

static int copy_text(const char *from, char **to)
{
    if (!from)
        return 0;
    *to = strdup(from);
    return *to ? 0 : -ENOMEM;
}

static int copy_bytes(const void *from, size_t bytes, uint8_t to[32], size_t *ret_bytes)
{
    if (bytes > 32 || (bytes && !from))
        return -EINVAL;
    if (bytes)
        memcpy(to, from, bytes);
    *ret_bytes = bytes;
    return 0;
}

static int fill(struct kvd_space *s, const char *name, const struct kvd_space_options *o)
{
    int r = o->write > 1 ? -EINVAL : 0;

    s->part_mask = o->part_mask;
    s->write = o->write == 1;
    s->has_first_parent = o->first_parent != NULL;
    if (r == 0)
        r = copy_bytes(o->first_parent, o->first_parent_len, s->first_parent, &s->first_parent_len);
    if (r == 0)
        r = copy_bytes(o->vector_key, o->vector_key_len, s->vector_key, &s->vector_key_len);
    if (r == 0)
        r = copy_text(name, &s->name);
    if (r == 0)
        r = copy_text(o->scheme, &s->scheme);
    if (r == 0)
        r = copy_text(o->identity, &s->identity);
    return r;
}

static int space_new(struct kvd *kvd, const char *name, const struct kvd_space_options *options,
                     struct kvd_space **ret_space)
{
    struct kvd_space *s = calloc(1, sizeof(*s));
    struct kvd_space_options o;
    int r = s ? 0 : -ENOMEM;

    kvd_space_options_init(&o, sizeof(o));
    if (r == 0 && options)
        r = options_copy(&o, sizeof(o), options);
    if (r == 0)
        r = fill(s, name, &o);
    if (r < 0) {
        space_free(s);
        return handle_fail(kvd, r,
                           r == -EINVAL ? "kvd_space_options: a length or a flag is out of "
                                          "range (was kvd_space_options_init() called?)"
                                        : "out of memory");
    }
    s->kvd = kvd;
    *ret_space = s;
    return 0;
}

/* ---- what the daemon says of a pool */

/* Within these bounds, no product of the numbers overflows. */
static bool pool_sane(const Kvd__Proto__PoolInfo *p)
{
    size_t name = strlen(p->name);
    uint64_t page = p->page_bytes;

    if (!name || name >= sizeof(((struct kvd_pool_info *)0)->name) ||
        strlen(p->backing) >= sizeof(((struct kvd_pool_info *)0)->backing))
        return false;
    if (!p->slots || p->slots > SHM_SLOTS_MAX || !p->parts || p->parts > SHM_PARTS_MAX)
        return false;
    if (!p->part_bytes || p->part_bytes > UINT64_C(1) << 32 || p->part_bytes * p->parts < SHM_PAGE)
        return false;
    if (page < SHM_PAGE || page & (page - 1) || page > UINT64_C(1) << 40)
        return false;
    if (!p->chunk_slots || p->chunk_slots > SHM_SLOTS_MAX ||
        p->chunks != (p->slots + p->chunk_slots - 1) / p->chunk_slots)
        return false;
    return true;
}

static void copy_info(const Kvd__Proto__PoolInfo *from, struct kvd_pool_info *to)
{
    *to = (struct kvd_pool_info){
        .slots = from->slots,
        .slot_bytes = from->parts * from->part_bytes,
        .part_bytes = from->part_bytes,
        .chunk_slots = from->chunk_slots,
        .page_bytes = from->page_bytes,
        .parts = from->parts,
        .chunks = from->chunks,
        .records = from->has_records ? from->records : 0,
    };
    snprintf(to->name, sizeof(to->name), "%s", from->name);
    snprintf(to->backing, sizeof(to->backing), "%s", from->backing);
}

/* ---- opening and refreshing: first plan, then do what can fail, then change the space */

struct planned {
    struct kvd_pool_info info;
    uint32_t id;
    struct kvd_pool *pool; /* existing, or new */
    struct view *view;
    bool is_new, remapped;
};

struct plan {
    struct planned *pools;
    struct kvd_pool **array; /* of the space, as it will be */
    size_t n;
    uint32_t space, epoch;
};

static void plan_clear(struct plan *plan)
{
    for (size_t i = 0; i < plan->n; i++) {
        if (plan->pools[i].is_new)
            free(plan->pools[i].pool);
        if (plan->pools[i].remapped)
            plan->pools[i].view->dropped = true;
    }
    free(plan->pools);
    free(plan->array);
    *plan = (struct plan){0};
}

static struct kvd_pool *find_pool(const struct kvd_space *s, const char *name)
{
    for (size_t i = 0; i < s->n_pools; i++)
        if (!name || strcmp(s->pools[i]->info.name, name) == 0)
            return s->pools[i];
    return NULL;
}

/* The caller has sized its buffers and registered memory by the old geometry. */
static int check_same(struct kvd_space *s, const struct kvd_pool *pool,
                      const struct kvd_pool_info *now)
{
    const struct kvd_pool_info *was = &pool->info;

    if (was->part_bytes == now->part_bytes && was->parts == now->parts)
        return 0;
    return handle_fail(s->kvd, -EPROTOTYPE,
                       "pool %s had %u parts of %llu bytes and now has %u of %llu: "
                       "close the space and open it again",
                       was->name, was->parts, (unsigned long long)was->part_bytes, now->parts,
                       (unsigned long long)now->part_bytes);
}

static int plan_pool(struct kvd_space *s, struct planned *p, const Kvd__Proto__PoolInfo *info)
{
    if (!pool_sane(info))
        return handle_fail(s->kvd, -EPROTO,
                           "space %s: what the daemon says of pool %.64s makes no sense", s->name,
                           info->name);
    copy_info(info, &p->info);
    p->id = info->pool;
    p->pool = find_pool(s, p->info.name);
    if (p->pool)
        return check_same(s, p->pool, &p->info);
    p->pool = calloc(1, sizeof(*p->pool));
    p->is_new = p->pool != NULL;
    return p->pool ? 0 : handle_fail(s->kvd, -ENOMEM, "out of memory");
}

/* Pools that the caller may hold a pointer to must not vanish. */
static int check_all_there(struct kvd_space *s, const struct plan *plan)
{
    for (size_t i = 0; i < s->n_pools; i++) {
        bool found = false;

        for (size_t k = 0; k < plan->n; k++)
            found |= plan->pools[k].pool == s->pools[i];
        if (!found)
            return handle_fail(s->kvd, -ENOENT,
                               "space %s has no pool %s any more: close it and open it "
                               "again",
                               s->name, s->pools[i]->info.name);
    }
    return 0;
}

static int check_names(struct kvd_space *s, const struct plan *plan)
{
    for (size_t i = 0; i < plan->n; i++)
        for (size_t k = 0; k < i; k++)
            if (strcmp(plan->pools[i].info.name, plan->pools[k].info.name) == 0)
                return handle_fail(s->kvd, -EPROTO, "space %s has two pools %s", s->name,
                                   plan->pools[i].info.name);
    return 0;
}

static int plan_make(struct kvd_space *s, const Kvd__Proto__SpaceOpenReply *reply,
                     struct plan *plan)
{
    int r = 0;

    if (!reply->n_pools || reply->n_pools > POOLS_MAX)
        return handle_fail(s->kvd, -EPROTO, "space %s has %zu pools", s->name, reply->n_pools);
    plan->space = reply->space;
    plan->epoch = reply->epoch;
    plan->pools = calloc(reply->n_pools, sizeof(*plan->pools));
    plan->array = calloc(reply->n_pools, sizeof(*plan->array));
    if (!plan->pools || !plan->array)
        return handle_fail(s->kvd, -ENOMEM, "out of memory");
    for (; plan->n < reply->n_pools && r == 0; plan->n++) {
        r = plan_pool(s, &plan->pools[plan->n], reply->pools[plan->n]);
        plan->array[plan->n] = plan->pools[plan->n].pool;
    }
    if (r == 0)
        r = check_names(s, plan);
    return r < 0 ? r : check_all_there(s, plan);
}

/* Memory of this very session, of a pool that has not been made anew. */
static bool still_good(const struct kvd_space *s, const struct planned *p)
{
    const struct kvd_pool *pool = p->pool;

    return !p->is_new && pool->view && s->incarnation == s->kvd->incarnation && pool->id == p->id &&
           pool->info.slots == p->info.slots && !pool->view->nvme == !p->info.records &&
           !atomic_load_explicit(&pool->view->index->retired, memory_order_relaxed);
}

static int plan_map(struct kvd_space *s, struct plan *plan)
{
    int r = 0;

    if (s->kvd->flags & KVD_NO_SHM)
        return 0;
    for (size_t i = 0; i < plan->n; i++) {
        struct planned *p = &plan->pools[i];
        struct view *v;

        if (still_good(s, p)) {
            p->view = p->pool->view;
            continue;
        }
        r = view_new(s, p->id, &p->info, &v);
        if (r < 0)
            return r;
        r = views_add(s->kvd, v);
        if (r < 0) {
            view_free(v);
            return r;
        }
        p->view = v;
        p->remapped = true;
    }
    return 0;
}

/* Nothing can fail any more. */
static void plan_do(struct kvd_space *s, struct plan *plan)
{
    for (size_t i = 0; i < plan->n; i++) {
        struct planned *p = &plan->pools[i];
        struct view *old = p->is_new ? NULL : p->pool->view;

        if (old && old != p->view)
            old->dropped = true;
        *p->pool = (struct kvd_pool){
            .kvd = s->kvd, .space = s, .view = p->view, .id = p->id, .info = p->info};
    }
    free(s->pools);
    s->pools = plan->array;
    s->n_pools = plan->n;
    s->id = plan->space;
    s->incarnation = s->kvd->incarnation;
    atomic_store(&s->epoch, plan->epoch);
    atomic_store(&s->moved, false);
    free(plan->pools);
    *plan = (struct plan){0};
}

static void put_claims(const struct kvd_space *s, Kvd__Proto__SpaceOpen *open)
{
    open->name = s->name;
    open->scheme = s->scheme;
    open->identity = s->identity;
    open->has_first_parent = s->has_first_parent;
    open->first_parent.data = (uint8_t *)s->first_parent; /* only read */
    open->first_parent.len = s->first_parent_len;
    open->has_vector_key = s->vector_key_len > 0;
    open->vector_key.data = (uint8_t *)s->vector_key;
    open->vector_key.len = s->vector_key_len;
    open->has_write = 1;
    open->write = s->write;
}

static int ask(struct kvd_space *s, struct plan *plan)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceOpen open = KVD__PROTO__SPACE_OPEN__INIT;
    struct control_reply reply = {0};
    int r;

    put_claims(s, &open);
    request.body_case = KVD__PROTO__REQUEST__BODY_SPACE_OPEN;
    request.space_open = &open;
    r = handle_call(s->kvd, NULL, &request, KVD__PROTO__RESPONSE__BODY_SPACE_OPEN, CALL_AGAIN,
                    &reply);
    if (r < 0)
        return r;
    r = plan_make(s, reply.response->space_open, plan);
    control_reply_free(&reply);
    return r;
}

static int attach_once(struct kvd_space *s)
{
    bool was_stale = atomic_load(&s->stale);
    struct plan plan = {0};
    int r = ask(s, &plan);

    /* From here on a session that is lost is a failure: handle_call() sees the mark. Requests of
     * other threads cannot come in between, nothing runs beside a refresh. */
    if (r == 0) {
        atomic_store(&s->stale, false);
        r = plan_map(s, &plan);
    }
    if (r == 0)
        plan_do(s, &plan);
    else if (was_stale)
        atomic_store(&s->stale, true);
    plan_clear(&plan);
    return r;
}

static int attach(struct kvd_space *s)
{
    int r = -ESTALE;

    for (int i = 0; i < TRIES && r == -ESTALE; i++)
        r = attach_once(s);
    views_reap(s->kvd);
    return r;
}

static void link_space(struct kvd_space *s)
{
    s->next = s->kvd->spaces;
    s->kvd->spaces = s;
}

static void unlink_space(struct kvd_space *s)
{
    struct kvd_space **p = &s->kvd->spaces;

    while (*p && *p != s)
        p = &(*p)->next;
    if (*p)
        *p = s->next;
}

int kvd_space_open(struct kvd *kvd, const char *name, const struct kvd_space_options *options,
                   struct kvd_space **ret_space)
{
    struct kvd_space *s = NULL;
    int r;

    if (!kvd || !name || !ret_space)
        return -EINVAL;
    if (handle_forked(kvd))
        return -ECHILD;
    r = space_new(kvd, name, options, &s);
    if (r < 0)
        return r;
    r = handle_lock(kvd, handle_deadline(kvd));
    if (r < 0) {
        space_free(s);
        return r;
    }
    link_space(s);
    r = attach(s);
    if (r < 0)
        unlink_space(s);
    handle_unlock(kvd);
    if (r < 0)
        space_free(s);
    else
        *ret_space = s;
    return r;
}

int kvd_space_refresh(struct kvd_space *space)
{
    int r;

    if (!space)
        return -EINVAL;
    if (handle_forked(space->kvd))
        return -ECHILD;
    r = handle_lock(space->kvd, handle_deadline(space->kvd));
    if (r < 0)
        return r;
    r = attach(space);
    handle_unlock(space->kvd);
    return r;
}

/* Closing must not fail, so it waits for the lock as long as it takes; all its holders have
 * deadlines. */
void kvd_space_close(struct kvd_space *space)
{
    struct kvd *kvd;

    if (!space || handle_forked(space->kvd)) /* a child frees it with the handle */
        return;
    kvd = space->kvd;
    handle_lock(kvd, UINT64_MAX);
    unlink_space(space);
    for (size_t i = 0; i < space->n_pools; i++)
        if (space->pools[i]->view)
            space->pools[i]->view->dropped = true;
    views_reap(kvd);
    handle_unlock(kvd);
    space_free(space);
}

/* ---- epochs */

uint32_t kvd_space_epoch(const struct kvd_space *space)
{
    return space ? atomic_load(&space->epoch) : 0;
}

int kvd_space_reset(struct kvd_space *space, uint32_t *ret_epoch)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceReset reset = KVD__PROTO__SPACE_RESET__INIT;
    struct control_reply reply = {0};
    uint32_t epoch;
    int r;

    if (!space)
        return -EINVAL;
    if (handle_forked(space->kvd))
        return -ECHILD;
    r = handle_lock(space->kvd, handle_deadline(space->kvd));
    if (r < 0)
        return r;
    reset.space = space->id;
    request.body_case = KVD__PROTO__REQUEST__BODY_SPACE_RESET;
    request.space_reset = &reset;
    r = handle_call(space->kvd, space, &request, KVD__PROTO__RESPONSE__BODY_SPACE_RESET, 0, &reply);
    if (r == 0) {
        epoch = reply.response->space_reset->epoch;
        control_reply_free(&reply);
        atomic_store(&space->epoch, epoch);
        atomic_store(&space->moved, false);
        if (ret_epoch)
            *ret_epoch = epoch;
    }
    handle_unlock(space->kvd);
    return r;
}

static bool is_current(const struct kvd_pool *pool, uint32_t epoch)
{
    const struct shm_index *x = pool->view ? pool->view->index : NULL;

    return !x || (!atomic_load_explicit(&x->retired, memory_order_relaxed) &&
                  atomic_load_explicit(&x->epoch, memory_order_acquire) == epoch);
}

int kvd_space_current(const struct kvd_space *space)
{
    uint32_t epoch;

    if (!space)
        return -EINVAL;
    if (handle_forked(space->kvd))
        return -ECHILD;
    if (atomic_load(&space->stale) || atomic_load(&space->moved))
        return -ESTALE;
    epoch = atomic_load(&space->epoch);
    for (size_t i = 0; i < space->n_pools; i++)
        if (!is_current(space->pools[i], epoch))
            return -ESTALE;
    return 0;
}

/* ---- pools */

int kvd_pool_get(struct kvd_space *space, const char *name, struct kvd_pool **ret_pool)
{
    struct kvd_pool *pool;

    if (!space || !ret_pool)
        return -EINVAL;
    if (handle_forked(space->kvd))
        return -ECHILD;
    pool = find_pool(space, name);
    if (!pool)
        return handle_fail(space->kvd, -ENOENT, "space %s has no pool %s", space->name, name);
    *ret_pool = pool;
    return 0;
}

void kvd_pool_info(const struct kvd_pool *pool, struct kvd_pool_info *ret_info)
{
    if (pool && ret_info)
        *ret_info = pool->info;
}

/* NULL in a child, too: it does not have the mapping. */
static const struct view *mapped(const struct kvd_pool *pool, uint32_t part)
{
    if (!pool || handle_forked(pool->kvd) || !pool->view || part >= pool->view->parts)
        return NULL;
    return pool->view;
}

const void *kvd_pool_base(const struct kvd_pool *pool, uint32_t part)
{
    const struct view *v = mapped(pool, part);

    return v ? v->read[part].base : NULL;
}

void *kvd_pool_base_rw(const struct kvd_pool *pool, uint32_t part)
{
    const struct view *v = mapped(pool, part);

    return v ? v->write[part].base : NULL;
}

void *kvd_slot_rw(const struct kvd_pool *pool, uint32_t slot, uint32_t part)
{
    unsigned char *base = kvd_pool_base_rw(pool, part);

    return base && slot < pool->view->slots ? base + slot * pool->view->part_bytes : NULL;
}
