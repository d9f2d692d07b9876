/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Promotion: a key that is in a store gets a slot, PENDING in the pool's index and IN_FLIGHT in the slot
 * table, and a transfer that fills it. When record, data and digest agree, the object is LIVE; when not, it
 * was a miss and its record is dropped (I1).
 *
 * Nobody waits while holding what somebody else could wait for: a slot is had at once or not at all, so two
 * who fetch into a pool that is pinned all over both get -ENOSPC and none hangs.
 *
 * A WAITER is one session's interest in one key. Several share a transfer. Past its deadline a waiter is
 * answered, and the transfer goes on: its slot belongs to the device until the completion has come. What a
 * waiter got is held for it by the pool's own pins until its session has pinned it, or for a while.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/guard.h"
#include "daemon/spill/engine.h"

/* How often deadlines and holds are looked at. */
#define CHECK_NS      5000000u
#define CHECK_HELD_NS 50000000u

/* Holds of a session in a pool: who asks for more lets go of the oldest. */
#define HELD_MAX 16384u

/* Keys that a session waits for in a pool; and how long at most. */
#define WAITING_MAX  16384u
#define DEADLINE_MAX 600000u /* ms */

/* ---- waiters */

static void waiter_free(struct waiter *w)
{
    if (w->state == WAITER_HELD) {
        pool_hold(w->attach->pool, w->slot, -1);
        w->attach->n_held--;
    }
    list_remove(&w->in_attach);
    list_remove(&w->in_transfer);
    list_remove(&w->in_nvme);
    free(w);
}

static void answer_call(struct fetch_call *call, uint32_t index, int status)
{
    call->statuses[index] = status;
    if (--call->left == 0)
        call->done(call);
}

/* Completions of what was promised have room kept for them: take() in daemon/rings.c. */
static void answer(struct waiter *w, int status)
{
    struct shm_completion c = {.user_data = w->tag, .status = status, .slot = SHM_NO_SLOT};

    if (w->call)
        answer_call(w->call, w->index, status);
    else
        session_post(w->attach->session, &c);
    w->call = NULL;
}

struct seen {
    const struct shm_pin *pin;
    uint32_t count, stamp;
};

static int look(void *arg)
{
    struct seen *x = arg;

    x->count = atomic_load_explicit(&x->pin->count, memory_order_acquire); /* pairs with R2 */
    x->stamp = shm_load32(&x->pin->stamp);
    return 0;
}

/* The session's counter and stamp of a slot; zeroes when there are none. */
static struct seen look_at(const struct attach *a, uint32_t slot)
{
    struct seen x = {.pin = NULL};

    if (!a->map.addr)
        return x;
    x.pin = &((const struct shm_pins *)a->map.addr)->pins[slot];
    if (guard_call(look, &x, x.pin, sizeof(*x.pin)) < 0)
        x.count = x.stamp = 0;
    return x;
}

/* The session has pinned what is held for it, perhaps released it, too. (A second pin within the tick of an
 * earlier one leaves no trace: then the hold stays for its time.) */
static bool has_pinned(const struct waiter *w)
{
    const struct attach *a = w->attach;
    struct seen x = look_at(a, w->slot);

    return (a->own && shm_load32(&a->own->pins[w->slot].count)) || x.count || x.stamp != w->stamp;
}

static void free_oldest_hold(struct attach *a)
{
    for (struct list *i = a->waiters.next; i != &a->waiters; i = i->next) {
        struct waiter *w = list_entry(i, struct waiter, in_attach);

        if (w->state != WAITER_HELD)
            continue;
        waiter_free(w);
        return;
    }
}

static void hold_for(struct waiter *w, uint32_t slot)
{
    struct nvme *n = w->attach->pool->core->nvme;

    if (w->attach->n_held >= HELD_MAX)
        free_oldest_hold(w->attach);
    w->state = WAITER_HELD;
    w->attach->n_held++;
    w->slot = slot;
    w->stamp = look_at(w->attach, slot).stamp;
    w->until_ns = core_now_ns(w->attach->pool->core) + n->options.fetch_hold_ns;
    pool_hold(w->attach->pool, slot, 1);
    list_append(&n->held, &w->in_nvme);
}

static void answered(struct waiter *w, int status, uint32_t slot)
{
    w->attach->n_waiting--;
    list_remove(&w->in_transfer);
    list_remove(&w->in_nvme);
    w->state = WAITER_IDLE;
    if (status == 0)
        hold_for(w, slot);
    answer(w, status);
    if (status != 0)
        waiter_free(w);
}

static struct waiter *waiter_new(struct attach *a, const struct fetch_ask *ask)
{
    struct nvme *n = a->pool->core->nvme;
    struct waiter *w = calloc(1, sizeof(*w));
    uint32_t ms = ask->deadline_ms < DEADLINE_MAX ? ask->deadline_ms : DEADLINE_MAX;
    uint64_t ns = ms ? (uint64_t)ms * 1000000 : n->options.fetch_deadline_ns;

    if (!w)
        return NULL;
    *w = (struct waiter){.attach = a,
                         .tag = ask->tag,
                         .call = ask->call,
                         .index = ask->index,
                         .slot = SLOT_NONE,
                         .until_ns = core_now_ns(a->pool->core) + ns};
    list_init(&w->in_transfer);
    list_init(&w->in_nvme);
    list_append(&a->waiters, &w->in_attach);
    return w;
}

/* What is held counts as pinned. */
static bool may_hold(const struct attach *a)
{
    uint64_t max = a->pool->space->max_pinned_bytes;

    return !max || (a->n_held + a->n_waiting + 1) * a->pool->part_bytes * a->pool->parts <= max;
}

/* It is in ram: held, and the status is the answer. */
static int hold_resident(struct attach *a, const struct fetch_ask *ask, uint32_t slot)
{
    struct nvme *n = a->pool->core->nvme;
    struct waiter *w;

    slot_touch(a->pool, slot);
    if (!n || !may_hold(a) || pool_hold_new(a->pool) < 0)
        return 0;
    w = waiter_new(a, ask);
    if (!w)
        return 0; /* it may leave before it is pinned: a miss */
    w->call = NULL;
    hold_for(w, slot);
    return 0;
}

static int join(struct attach *a, const struct fetch_ask *ask, struct transfer *t)
{
    struct waiter *w = a->n_waiting < WAITING_MAX ? waiter_new(a, ask) : NULL;

    if (!w)
        return a->n_waiting < WAITING_MAX ? -ENOMEM : -EDQUOT;
    a->n_waiting++;
    w->state = WAITER_WAITING;
    w->transfer = t;
    list_append(&t->waiters, &w->in_transfer);
    list_append(&a->pool->core->nvme->waiting, &w->in_nvme);
    t->cancelled = false;
    return 1;
}

/* ---- a slot in flight */

/* As publishing a reservation, but that the daemon is the writer. */
static int slot_for(struct spill *s, const struct shm_key *key, uint32_t *ret_slot)
{
    struct pool *p = s->pool;
    uint32_t slot, line;
    int e = slot_take(p, &slot);

    if (e < 0)
        return e;
    p->table->slots[slot] = (struct shm_slot){.state = SHM_SLOT_FREE, .epoch = p->space->epoch};
    e = index_insert(p->index, key, p->space->epoch, slot, &line);
    if (e < 0)
        return e;
    p->table->slots[slot].line = line;
    p->metas->metas[slot] = (struct shm_meta){.key = *key, .epoch = p->space->epoch};
    p->slot[slot].tenant = 0;
    p->slot[slot].tick = shm_load32(&p->index->tick);
    slot_set(p, slot, SHM_SLOT_IN_FLIGHT); /* before any I/O is submitted */
    *ret_slot = slot;
    return 0;
}

static void slot_back(struct pool *p, uint32_t slot)
{
    index_remove(p->index, p->table->slots[slot].line);
    slot_unlink_parent(p, slot);
    p->slot[slot].use++; /* children that named it are orphans */
    p->slot[slot].children = 0;
    slot_set(p, slot, SHM_SLOT_FREE);
    spill_unblock(p->spill);
}

static void link_resident_parent(struct pool *p, uint32_t slot)
{
    const struct shm_meta *m = &p->metas->metas[slot];
    struct shm_entry *e = m->has_parent ? index_find(p->index, &m->parent, m->epoch) : NULL;
    uint32_t up = e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;

    if (up != SLOT_NONE && up != slot)
        slot_link_parent(p, slot, up);
}

static void fill_meta(struct shm_meta *m, const struct transfer *t)
{
    m->parent = t->meta.parent;
    m->has_parent = t->meta.has_parent;
    m->tenant = t->meta.tenant;
    m->position = t->meta.position;
    m->layout = t->meta.layout;
    m->checksum = t->meta.checksum;
    m->bytes = t->meta.bytes;
    m->user_bytes = t->meta.user_bytes;
    memset(m->user, 0, sizeof(m->user));
    memcpy(m->user, t->user, t->meta.user_bytes);
}

/* The bytes are right: IN_FLIGHT -> LIVE, in the order of publishing (C4, C5). */
static int publish(struct pool *p, uint32_t slot, struct transfer *t)
{
    struct spill *s = p->spill;
    struct shm_slot *x = &p->table->slots[slot];
    int e = tenants_want(&p->space->tenants, t->meta.tenant);

    if (e < 0)
        return e;
    fill_meta(&p->metas->metas[slot], t);
    x->bytes = t->meta.bytes;
    x->parts_done = p->parts == 64 ? UINT64_MAX : ((uint64_t)1 << p->parts) - 1;
    p->slot[slot].tenant = t->meta.tenant;
    p->slot[slot].tick = shm_load32(&p->index->tick);
    link_resident_parent(p, slot);
    index_publish(p->index, x->line, t->meta.bytes); /* C4 */
    slot_set(p, slot, SHM_SLOT_LIVE);                /* C5 */
    slot_queue(p, slot, p->slot[slot].tick, true);
    pool_count_insert(p);
    s->slots[slot] =
        (struct spill_slot){.state = SPILLED_STORED, .record = t->record, .touched = true};
    s->records[t->record].slot = slot;
    record_touch(s, t->record);
    s->stats.promoted++;
    s->stats.promoted_bytes += t->meta.bytes * p->parts;
    return 0;
}

/* ---- the transfer */

static int start(struct attach *a, const struct fetch_ask *ask, uint32_t r)
{
    struct spill *s = a->pool->spill;
    struct store *st = record_store_of(s, r);
    struct spill_entry x;
    struct transfer *t;
    uint32_t slot;
    int e = store_usable(st) && !s->records[r].doomed && spill_entry(a->pool, r, &x) ? 0 : -ENOENT;

    if (e == 0 && s->records[r].reads == UINT8_MAX)
        e = -EBUSY;
    if (e < 0)
        return e;
    s->records[r].reads++; /* making room must not take it */
    e = slot_for(s, &ask->key, &slot);
    if (e == 0) {
        e = transfer_new(st, TRANSFER_READ, r, slot, x.bytes, &t);
        if (e < 0)
            slot_back(a->pool, slot);
    }
    if (e < 0) {
        s->records[r].reads--;
        return e;
    }
    t->have_user = !s->records[r].has_user;
    s->slots[slot] = (struct spill_slot){.state = SPILLED_READING, .record = r, .transfer = t};
    list_append(&st->reads, &t->in_store);
    e = join(a, ask, t);
    if (e < 0)
        t->cancelled = st->swept = true;
    return e;
}

static void count(struct spill_stats *c, int status)
{
    switch (status) {
    case 1:
        c->fetch_nvme++;
        break;
    case 0:
        c->fetch_ram++;
        break;
    case -ENOENT:
        c->fetch_miss++;
        break;
    default:
        c->fetch_refused++;
    }
}

static int check_quota(const struct attach *a)
{
    uint64_t max = a->pool->space->max_reserved;

    if (session_over_quota(a->session, a->pool->space) || !may_hold(a))
        return -EDQUOT;
    return max && a->n_waiting + a->n_held + session_reserved_in(a->session, a->pool->space) >= max
               ? -EDQUOT
               : 0;
}

static int fetch_absent(struct attach *a, const struct fetch_ask *ask)
{
    struct pool *p = a->pool;
    uint32_t r = p->spill ? record_find(p->spill, &ask->key, ask->epoch) : NO_RECORD;
    int e = r == NO_RECORD ? -ENOENT : p->core->nvme->stopping ? -ESHUTDOWN : check_quota(a);

    return e < 0 ? e : start(a, ask, r);
}

int spill_fetch(struct attach *a, const struct fetch_ask *ask)
{
    struct pool *p = a->pool;
    struct shm_entry *e;
    uint32_t slot;
    int status;

    if (p->space->offline || ask->epoch != p->space->epoch)
        return p->space->offline ? -EIO : -ESTALE;
    e = index_find(p->index, &ask->key, ask->epoch);
    slot = e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;
    if (!e) {
        status = fetch_absent(a, ask);
    } else if (p->table->slots[slot].state == SHM_SLOT_LIVE) {
        status = hold_resident(a, ask, slot);
    } else if (p->table->slots[slot].state == SHM_SLOT_IN_FLIGHT) {
        status = join(a, ask, p->spill->slots[slot].transfer);
        p->spill->stats.fetch_shared += status == 1;
    } else {
        status = -EINPROGRESS;
    }
    if (p->spill)
        count(&p->spill->stats, status);
    return status;
}

/* Everybody who waits for the transfer gets the answer. */
static void tell_all(struct transfer *t, int status, uint32_t slot)
{
    while (!list_empty(&t->waiters))
        answered(list_entry(t->waiters.next, struct waiter, in_transfer), status, slot);
}

/* The record is wrong, or its data: it is dropped, on the medium, too. */
static void drop_record(struct transfer *t, int error)
{
    struct store *st = t->store;
    struct spill *s = st->spill;

    if (s->records[t->record].use != t->use || s->records[t->record].reads)
        return; /* another one reads it, and will find out, too */
    if (error == -EBADMSG || error == -EILSEQ || error == -ENODATA)
        st->stats.broken++;
    record_free(s, t->record);
    sector_erase(st, t->record);
}

/* Errors after which the record is not worth keeping. */
static bool is_lost(int error)
{
    return error == -EIO || error == -EBADMSG || error == -EILSEQ || error == -ENODATA ||
           error == -EINVAL;
}

static void finish(struct transfer *t, int error)
{
    struct store *st = t->store;
    struct spill *s = st->spill;
    struct pool *p = s->pool;
    uint32_t slot = t->slot;
    int device = error;

    s->records[t->record].reads--;
    if (!error && s->records[t->record].doomed)
        error = -ENOENT;
    if (!error && t->meta.epoch != p->space->epoch)
        error = -ESTALE;
    if (!error)
        error = publish(p, slot, t);
    if (error) {
        s->slots[slot] = (struct spill_slot){.record = NO_RECORD};
        slot_back(p, slot);
        if (is_lost(error))
            drop_record(t, error);
        if (error != -ESTALE && error != -ECANCELED)
            s->stats.fetch_failed++;
    } else {
        st->stats.read_objects++;
        st->stats.read_bytes += t->meta.bytes * p->parts;
    }
    record_read_end(st, t->record);
    if (st->state != STORE_ONLINE && !s->records[t->record].reads &&
        s->records[t->record].use == t->use)
        record_free(s, t->record); /* it closes, and the others have been dropped before */
    if (!t->counted)
        store_count(st, device);
    tell_all(t, is_lost(error) ? -EIO : error, slot);
    transfer_free(t);
}

static void end(struct transfer *t)
{
    int error = t->error ? t->error : transfer_verify(t);

    if (error == -EFAULT)
        space_offline(t->store->spill->pool->space,
                      "a writer has truncated the memory of its pool");
    if (t->kind == TRANSFER_SCRUB) {
        t->error = error;
        scrub_done(t);
    } else {
        finish(t, error);
    }
}

void fetch_pieces_done(struct transfer *t)
{
    t->pieces_done = true;
    if (t->error || (t->have_record && t->have_user))
        end(t);
}

static int decode(struct transfer *t, const uint8_t *bytes)
{
    struct store *st = t->store;
    struct shm_key key = record_key(st->spill, t->record);
    struct format_record m;
    int e = format_record_decode(bytes, &st->file.super, t->record - st->base, &m);

    if (e < 0)
        return e;
    if (memcmp(&m.key, &key, sizeof(key)) != 0 || m.generation != t->use ||
        m.bytes != t->meta.bytes || (m.user_bytes > 0) != st->spill->records[t->record].has_user)
        return -EILSEQ; /* not the one that was stored here */
    t->meta = m;
    return 0;
}

void fetch_sector_read(struct transfer *t, bool user, const uint8_t *bytes, int error)
{
    if (!error && user)
        memcpy(t->user, bytes, sizeof(t->user));
    else if (!error)
        error = decode(t, bytes);
    if (error && !t->error)
        t->error = error;
    if (user)
        t->have_user = true;
    else
        t->have_record = true;
    if (t->running)
        return;
    if (t->error)
        transfer_pieces_done(t);
    else if (t->pieces_done && t->have_record && t->have_user)
        end(t);
}

/* ---- giving up */

/* A transfer that nobody wants and that the device has not seen. */
static void sweep(struct store *st, bool all, int error)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &st->reads) {
        struct transfer *t = list_entry(i, struct transfer, in_store);

        if (t->next || (!all && !(t->cancelled && list_empty(&t->waiters))))
            continue;
        list_remove(i);
        t->error = error;
        fetch_pieces_done(t);
    }
}

void fetch_fail_queued(struct store *st, int error)
{
    sweep(st, true, error);
}

static void unwait(struct waiter *w, int status)
{
    struct transfer *t = w->transfer;

    answered(w, status, SLOT_NONE);
    if (!list_empty(&t->waiters))
        return;
    t->cancelled = true;
    t->store->swept = true;
}

void spill_cancel(struct attach *a, uint64_t tag, uint64_t n)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &a->waiters) {
        struct waiter *w = list_entry(i, struct waiter, in_attach);

        if (w->tag - tag >= n)
            continue;
        if (w->state == WAITER_WAITING)
            unwait(w, -ECANCELED);
        else
            waiter_free(w);
    }
}

/* Its session is about to go: nobody is there to be answered. */
void spill_forget(struct attach *a)
{
    while (!list_empty(&a->waiters)) {
        struct waiter *w = list_entry(a->waiters.next, struct waiter, in_attach);

        if (w->state == WAITER_WAITING)
            unwait(w, -ECANCELED);
        else
            waiter_free(w);
    }
}

static void check_held(struct nvme *n, uint64_t now)
{
    struct list *i, *tmp;

    if (now < n->next_held_ns)
        return;
    kvd_list_for_each (i, tmp, &n->held) {
        struct waiter *w = list_entry(i, struct waiter, in_nvme);

        if (now >= w->until_ns || has_pinned(w))
            waiter_free(w);
    }
    n->next_held_ns = now + CHECK_HELD_NS + 20 * (nvme_now(n) - now);
}

bool spill_let_go(struct pool *p)
{
    struct nvme *n = p->core->nvme;
    uint64_t now = n ? nvme_now(n) : 0;
    struct list *i, *tmp;
    bool any = false;

    if (!n ||
        now < n->next_let_go_ns) /* it looks at all holds: not for everybody who asks in vain */
        return false;
    n->next_let_go_ns = now + CHECK_NS;
    kvd_list_for_each (i, tmp, &n->held) {
        struct waiter *w = list_entry(i, struct waiter, in_nvme);

        if (w->attach->pool != p || !has_pinned(w))
            continue;
        waiter_free(w);
        any = true;
    }
    return any;
}

void fetches_check(struct nvme *n)
{
    uint64_t now = nvme_now(n);
    struct list *i, *tmp;

    if (now < n->next_check_ns)
        return;
    kvd_list_for_each (i, tmp, &n->waiting) {
        struct waiter *w = list_entry(i, struct waiter, in_nvme);

        if (now < w->until_ns)
            continue;
        w->attach->pool->spill->stats.fetch_timeout++;
        unwait(w, -ETIMEDOUT);
    }
    check_held(n, now);
    for (struct list *k = n->stores.next; k != &n->stores; k = k->next) {
        struct store *st = list_entry(k, struct store, in_nvme);

        if (st->swept)
            sweep(st, false, -ECANCELED);
        st->swept = false;
    }
    n->next_check_ns =
        now + CHECK_NS + 20 * (nvme_now(n) - now); /* a twentieth of the core's time */
}
