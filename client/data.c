/* SPDX-License-Identifier: Apache-2.0 */
/* The data path: shared-memory loads and one atomic per key. No system call, no lock. */
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int pool_check(const struct kvd_pool *pool)
{
    if (!pool)
        return -EINVAL;
    if (handle_forked(pool->kvd))
        return -ECHILD;
    if (!pool->view)
        return handle_fail(pool->kvd, -EOPNOTSUPP,
                           "nothing is mapped (KVD_NO_SHM): use kvd_remote_*");
    return 0;
}

static inline uint32_t epoch_of(const struct kvd_pool *pool)
{
    return atomic_load_explicit(&pool->space->epoch, memory_order_relaxed);
}

/* The memory is that of a daemon that has gone: what lies there is right but will never change
 * again. */
static inline bool is_stale(const struct kvd_pool *pool)
{
    return atomic_load_explicit(&pool->space->stale, memory_order_relaxed);
}

ssize_t kvd_lookup(const struct kvd_pool *pool, const struct kvd_key *keys, size_t n,
                   uint8_t *ret_states)
{
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (n && !keys)
        return handle_fail(pool->kvd, -EINVAL, "no keys");
    if (is_stale(pool)) {
        if (ret_states && n)
            memset(ret_states, KVD_MISS, n);
        return 0;
    }
    return (ssize_t)shm_lookup(pool->view->index, pool->view->nvme, (const struct shm_key *)keys, n,
                               epoch_of(pool), ret_states);
}

ssize_t kvd_observe(struct kvd_pool *pool, const struct kvd_key *keys, size_t n)
{
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (n && !keys)
        return handle_fail(pool->kvd, -EINVAL, "no keys");
    return rings_observe(pool, keys, n);
}

/* ---- pinsets */

static int grow(struct kvd_pinset *set, size_t more)
{
    size_t capacity = set->capacity ? set->capacity : 16;
    struct shm_pinned *p;

    if (more <= set->capacity - set->count)
        return 0;
    if (more > SIZE_MAX / 4 / sizeof(*p) - set->count)
        return handle_fail(set->kvd, -ENOMEM, "a pinset of %zu references", more);
    while (capacity < set->count + more)
        capacity *= 2;
    p = realloc(set->refs, capacity * sizeof(*p));
    if (!p)
        return handle_fail(set->kvd, -ENOMEM, "out of memory");
    set->refs = p;
    set->capacity = capacity;
    return 0;
}

int kvd_pinset_new(struct kvd *kvd, size_t capacity, struct kvd_pinset **ret_pinset)
{
    struct kvd_pinset *set;
    int r;

    if (!kvd || !ret_pinset)
        return -EINVAL;
    if (handle_forked(kvd))
        return -ECHILD;
    set = calloc(1, sizeof(*set));
    if (!set)
        return handle_fail(kvd, -ENOMEM, "out of memory");
    set->kvd = kvd;
    set->alive = kvd->alive;
    r = grow(set, capacity);
    if (r < 0) {
        free(set);
        return r;
    }
    pthread_mutex_lock(&kvd->pinset_lock);
    set->next = kvd->pinsets;
    if (set->next)
        set->next->prev = set;
    kvd->pinsets = set;
    pthread_mutex_unlock(&kvd->pinset_lock);
    *ret_pinset = set;
    return 0;
}

/* Open, and in the process that made it. A child does not even have the handle's memory for sure.
 */
static inline bool usable(const struct kvd_pinset *set)
{
    return set->kvd && atomic_load_explicit(set->alive, memory_order_relaxed);
}

void kvd_pinset_free(struct kvd_pinset *pinset)
{
    struct kvd *kvd;

    if (!pinset)
        return;
    if (usable(pinset)) {
        kvd = pinset->kvd;
        kvd_pinset_release(pinset);
        pthread_mutex_lock(&kvd->pinset_lock);
        if (pinset->next)
            pinset->next->prev = pinset->prev;
        if (pinset->prev)
            pinset->prev->next = pinset->next;
        else
            kvd->pinsets = pinset->next;
        pthread_mutex_unlock(&kvd->pinset_lock);
    }
    free(pinset->refs);
    free(pinset);
}

void pinsets_detach(struct kvd *kvd)
{
    struct kvd_pinset *next;

    for (struct kvd_pinset *set = kvd->pinsets; set; set = next) {
        next = set->next;
        set->kvd = NULL;
        set->next = set->prev = NULL;
        set->count = 0;
    }
    kvd->pinsets = NULL;
}

static ssize_t pin_nothing(struct kvd_pinset *set, const struct kvd_pool *pool, size_t n, bool all)
{
    for (size_t i = 0; all && i < n; i++)
        set->refs[set->count++] =
            (struct shm_pinned){.slot = SHM_NO_SLOT, .view = pool->view->number};
    return 0;
}

ssize_t kvd_pin(struct kvd_pinset *pinset, struct kvd_pool *pool, const struct kvd_key *keys,
                size_t n, uint32_t flags)
{
    bool all = flags & KVD_PIN_ALL;
    size_t pinned = 0;
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (!pinset || pinset->kvd != pool->kvd || (n && !keys) || flags & ~(uint32_t)KVD_PIN_ALL)
        return handle_fail(pool->kvd, -EINVAL,
                           "kvd_pin: a pinset of the same handle, keys, and no "
                           "flags but KVD_PIN_ALL");
    r = grow(pinset, n);
    if (r < 0)
        return r;
    if (is_stale(pool))
        return pin_nothing(pinset, pool, n, all);
    pinset->count += shm_pin_keys(pool->view->index, pool->view->pins, (const struct shm_key *)keys,
                                  n, epoch_of(pool), all, pool->view->number,
                                  &pinset->refs[pinset->count], &pinned);
    return (ssize_t)pinned;
}

/* A reserved slot has no word to re-read, and none is needed: nobody evicts it, and the core looks
 * at the counters (A0) only after it has read the commit, which is posted (release) after this. */
int kvd_pin_reserved(struct kvd_pinset *pinset, struct kvd_pool *pool,
                     const struct kvd_reservation *reservation)
{
    struct shm_pin *pin;
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (!pinset || pinset->kvd != pool->kvd || !reservation || reservation->status != KVD_NEW ||
        reservation->slot >= pool->view->slots)
        return handle_fail(
            pool->kvd, -EINVAL,
            "kvd_pin_reserved: a pinset of the same handle, and a reservation that is "
            "KVD_NEW");
    if (is_stale(pool))
        return handle_fail(pool->kvd, -ESTALE, "the reservation is gone: refresh space %s",
                           pool->space->name);
    r = grow(pinset, 1);
    if (r < 0)
        return r;
    pin = &pool->view->pins->pins[reservation->slot];
    atomic_fetch_add_explicit(&pin->count, 1, memory_order_seq_cst);
    atomic_store_explicit(&pin->stamp,
                          atomic_load_explicit(&pool->view->index->tick, memory_order_relaxed),
                          memory_order_relaxed);
    pinset->refs[pinset->count++] = (struct shm_pinned){
        .slot = reservation->slot, .view = pool->view->number, .bytes = pool->view->part_bytes};
    return 0;
}

size_t kvd_pinset_count(const struct kvd_pinset *pinset)
{
    return pinset ? pinset->count : 0;
}

const struct kvd_ref *kvd_pinset_refs(const struct kvd_pinset *pinset)
{
    return pinset ? (const struct kvd_ref *)pinset->refs : NULL;
}

/* The view of the i-th reference, if that holds a pin. */
static const struct view *view_of(const struct kvd_pinset *set, size_t i)
{
    const struct view *v;

    if (!set || !usable(set) || i >= set->count || set->refs[i].slot == SHM_NO_SLOT)
        return NULL;
    v = views_get(set->kvd, set->refs[i].view);
    return v && v->index && set->refs[i].slot < v->slots ? v : NULL;
}

const void *kvd_pinset_data(const struct kvd_pinset *pinset, size_t i, uint32_t part)
{
    const struct view *v = view_of(pinset, i);

    if (!v || part >= v->parts || !v->read[part].base)
        return NULL;
    return v->read[part].base + pinset->refs[i].slot * v->part_bytes;
}

/* Tails first, across pools too: the head of a chain is stamped last. A view without memory has no
 * pins: its references were never pinned. */
void kvd_pinset_truncate(struct kvd_pinset *pinset, size_t keep)
{
    if (!pinset)
        return;
    if (!usable(pinset)) {
        pinset->count = keep < pinset->count ? keep : pinset->count;
        return;
    }
    while (pinset->count > keep) {
        size_t end = pinset->count, from = end - 1;
        const struct view *v = views_get(pinset->kvd, pinset->refs[from].view);

        while (from > keep && pinset->refs[from - 1].view == pinset->refs[end - 1].view)
            from--;
        if (v && v->index)
            shm_unpin(v->index, v->pins, &pinset->refs[from], end - from);
        pinset->count = from;
    }
}

void kvd_pinset_release(struct kvd_pinset *pinset)
{
    kvd_pinset_truncate(pinset, 0);
}

int kvd_pinset_meta(const struct kvd_pinset *pinset, size_t i, struct kvd_meta *ret_meta)
{
    const struct view *v = view_of(pinset, i);
    const struct shm_meta *m;

    if (!pinset || !ret_meta)
        return -EINVAL;
    if (pinset->kvd && !usable(pinset))
        return -ECHILD;
    if (!v)
        return -ENOENT;
    m = &v->metas->metas[pinset->refs[i].slot]; /* does not change while the pin holds */
    *ret_meta = (struct kvd_meta){
        .position = m->position,
        .layout = m->layout,
        .checksum = m->checksum,
        .has_parent = m->has_parent != 0,
        .tenant = m->tenant,
        .user_bytes = m->user_bytes < SHM_USER_BYTES ? m->user_bytes : SHM_USER_BYTES,
    };
    memcpy(&ret_meta->parent, &m->parent, sizeof(ret_meta->parent));
    memcpy(ret_meta->user, m->user, ret_meta->user_bytes);
    return 0;
}
