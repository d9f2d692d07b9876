/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Write-behind: what is committed is written to a store before its memory is needed, in the order of
 * commits, parents first.
 *
 * I2: an object whose parent is in ram but not stored takes its parent along, before itself; one whose
 * parent a writer has only reserved waits for it; one whose parent is in no tier is not written, since
 * nobody could reach it.
 *
 * While its data is being read by the device, the slot is held by the pool's own pins, so eviction passes it
 * over like any other pinned one.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/spill/engine.h"

/* Objects of one store that are being written; many only when they are small. */
#define WRITES_MAX 256u

static void set_state(struct spill *s, uint32_t slot, enum spilled state)
{
    s->slots[slot].state = (uint8_t)state;
}

static void enqueue(struct spill *s, uint32_t slot)
{
    set_state(s, slot, SPILLED_QUEUED);
    slot_list_push_back(&s->queue, s->links, slot);
}

static void enqueue_first(struct spill *s, uint32_t slot)
{
    set_state(s, slot, SPILLED_QUEUED);
    slot_list_push_front(&s->queue, s->links, slot);
}

/* Out of whatever list it is in. */
static void dequeue(struct spill *s, uint32_t slot)
{
    if (s->slots[slot].state == SPILLED_QUEUED)
        slot_list_remove(&s->queue, s->links, slot);
    else if (s->slots[slot].state == SPILLED_BLOCKED)
        slot_list_remove(&s->blocked, s->links, slot);
    set_state(s, slot, SPILLED_NO);
}

static bool admits(const struct store *st, const struct spill_slot *x)
{
    return !st->second_touch || x->touched;
}

/* It takes objects, or will: one that closes comes back only when somebody has asked for it. */
static bool is_coming(const struct store *st)
{
    return st->state == STORE_ONLINE || st->state == STORE_STARTING ||
           (st->state == STORE_CLOSING && st->then >= 0);
}

static bool wanted(const struct spill *s, uint32_t slot)
{
    for (uint32_t i = 0; i < s->n_stores; i++)
        if (is_coming(s->stores[i]) && admits(s->stores[i], &s->slots[slot]))
            return true;
    return false;
}

static void consider(struct spill *s, uint32_t slot)
{
    if (s->slots[slot].state == SPILLED_NO && !s->nvme->stopping && wanted(s, slot))
        enqueue(s, slot);
}

void spill_consider_all(struct spill *s)
{
    for (uint32_t i = 0; i < s->pool->slots; i++)
        if (s->pool->table->slots[i].state == SHM_SLOT_LIVE)
            consider(s, i);
}

void spill_unblock(struct spill *s)
{
    uint32_t slot;

    while ((slot = s->blocked.first) != SLOT_NONE) {
        slot_list_remove(&s->blocked, s->links, slot);
        enqueue(s, slot);
    }
}

void spill_committed(struct pool *p, uint32_t slot)
{
    struct spill *s = p->spill;
    bool awaited;

    if (!s)
        return;
    awaited = s->slots[slot].awaited;
    s->slots[slot] = (struct spill_slot){.record = NO_RECORD};
    consider(s, slot);
    if (awaited)
        spill_unblock(s);
}

void spill_touched(struct pool *p, uint32_t slot)
{
    struct spill *s = p->spill;

    if (!s || p->table->slots[slot].state != SHM_SLOT_LIVE)
        return;
    s->slots[slot].touched = true;
    consider(s, slot);
}

bool spill_is_unwritten(const struct pool *p, uint32_t slot)
{
    const struct spill *s = p->spill;

    return s && (s->slots[slot].state == SPILLED_QUEUED || s->slots[slot].state == SPILLED_BLOCKED);
}

void spill_left(struct pool *p, uint32_t slot, bool forget)
{
    struct spill *s = p->spill;
    struct spill_slot *x = s ? &s->slots[slot] : NULL;
    bool awaited;

    if (!x)
        return;
    switch ((enum spilled)x->state) {
    case SPILLED_STORED:
        s->stats.evicted_clean += !forget;
        s->records[x->record].slot = SLOT_NONE;
        if (forget)
            record_forget(s, x->record);
        else
            record_touch(s, x->record);
        break;
    case SPILLED_WRITING: /* its data is out, its record is not: that goes on without the slot */
        s->stats.evicted_clean += !forget;
        x->transfer->slot = SLOT_NONE;
        x->transfer->cancelled = forget;
        break;
    case SPILLED_QUEUED:
    case SPILLED_BLOCKED:
        s->stats.evicted_unspilled += !forget && !x->orphan; /* that is told already */
        dequeue(s, slot);
        break;
    case SPILLED_NO:
    case SPILLED_READING:
        break;
    }
    awaited = x->awaited;
    *x = (struct spill_slot){.record = NO_RECORD};
    if (awaited) /* its children wait no more */
        spill_unblock(s);
}

/* ---- beginning */

enum verdict {
    WRITE_NOW,
    WRITE_PARENT, /* first: *ret_parent */
    WRITE_LATER,
    WRITE_NEVER,
};

/* A snapshot's parent may be a block, in another pool of the space: that is no dependency between records. */
static bool is_elsewhere(const struct pool *p, const struct shm_key *key)
{
    const struct space *space = p->space;

    for (uint32_t i = 0; i < space->n_pools; i++) {
        struct pool *other = space->pools[i];

        if (other != p &&
            (index_find(other->index, key, space->epoch) || spill_has(other, key, space->epoch)))
            return true;
    }
    return false;
}

/* What must be done about the parent of an object that is to be written. */
static enum verdict judge(struct spill *s, uint32_t slot, uint32_t *ret_parent,
                          uint32_t *ret_record)
{
    struct pool *p = s->pool;
    const struct shm_meta *m = &p->metas->metas[slot];
    struct shm_entry *e = m->has_parent ? index_find(p->index, &m->parent, m->epoch) : NULL;
    uint32_t up = e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;

    *ret_record = NO_RECORD;
    if (!m->has_parent || up == slot)
        return WRITE_NOW;
    if (up != SLOT_NONE && s->slots[up].state == SPILLED_WRITING)
        *ret_record = s->slots[up].transfer->record;
    else
        *ret_record = record_find(s, &m->parent, m->epoch);
    if (*ret_record != NO_RECORD)
        return WRITE_NOW;
    if (up == SLOT_NONE)
        return is_elsewhere(p, &m->parent) ? WRITE_NOW : WRITE_NEVER;
    *ret_parent = up;
    return p->table->slots[up].state == SHM_SLOT_LIVE ? WRITE_PARENT : WRITE_LATER;
}

/* The topmost ancestor that is in ram but in no store; or the slot itself. An ancestor that waits for somebody
 * already is waited for, without looking further up. */
static enum verdict topmost(struct spill *s, uint32_t *slot, uint32_t *ret_record, uint32_t *left)
{
    uint32_t parent = SLOT_NONE;
    enum verdict v;

    for (uint32_t steps = 0; steps < s->pool->slots; steps++) {
        *left -= *left > 0;
        v = judge(s, *slot, &parent, ret_record);
        if (v == WRITE_LATER)
            s->slots[parent].awaited = true;
        if (v != WRITE_PARENT)
            return v;
        if (s->slots[parent].state == SPILLED_BLOCKED)
            return WRITE_LATER;
        *slot = parent;
    }
    return WRITE_NEVER; /* parents in a circle: their writer talks nonsense */
}

static void fill_meta(const struct pool *p, uint32_t slot, struct transfer *t)
{
    const struct shm_meta *m = &p->metas->metas[slot];

    t->meta = (struct format_record){
        .key = m->key,
        .parent = m->parent,
        .has_parent = m->has_parent,
        .checksum = m->checksum,
        .layout = m->layout,
        .position = m->position,
        .bytes = m->bytes,
        .epoch = m->epoch,
        .generation = t->use,
        .tenant = m->tenant,
        .user_bytes = m->user_bytes,
    };
    memcpy(t->user, m->user, sizeof(t->user));
}

static int begin(struct store *st, uint32_t slot, uint32_t parent)
{
    struct spill *s = st->spill;
    struct transfer *t;
    uint32_t r = record_take(st, parent);
    int e;

    if (r == NO_RECORD)
        return st->take_again ? -EAGAIN : -ENOSPC;
    e = transfer_new(st, TRANSFER_WRITE, r, slot, s->pool->metas->metas[slot].bytes, &t);
    if (e < 0) {
        record_free(s, r);
        return e;
    }
    fill_meta(s->pool, slot, t);
    s->records[r].tenant = t->meta.tenant;
    if (parent != NO_RECORD) {
        t->meta.linked = true;
        t->parent = parent;
        t->parent_use = s->records[parent].use;
    }
    pool_hold(s->pool, slot, 1);
    s->slots[slot].transfer = t;
    set_state(s, slot, SPILLED_WRITING);
    s->writing++;
    list_append(&st->writes, &t->in_store);
    pieces_begin(st);
    return 0;
}

static bool takes_more(const struct store *st, const struct spill_slot *x)
{
    return store_writable(st) && admits(st, x) && list_empty(&st->writes) &&
           st->n_transfers < WRITES_MAX && st->in_io < st->depth &&
           st->busy_pieces < st->n_pieces * 3 / 4;
}

/* What the device will be asked to write: whole blocks, and the record's sector. */
static uint64_t physical_bytes(const struct pool *p, uint32_t slot)
{
    const struct shm_meta *m = &p->metas->metas[slot];
    uint64_t part = (m->bytes + IO_BLOCK - 1) / IO_BLOCK * IO_BLOCK;

    return part * p->parts + FORMAT_SECTOR * (m->user_bytes ? 2 : 1);
}

/* The store that takes it; NULL: none now. *ret_ever: some may later. */
static struct store *choose(struct spill *s, uint32_t slot, bool *ret_ever)
{
    const struct pool *p = s->pool;

    *ret_ever = false;
    for (uint32_t i = 0; i < s->n_stores; i++) {
        struct store *st = s->stores[(s->next_store + i) % s->n_stores];

        if (!is_coming(st) || st->read_only || !admits(st, &s->slots[slot]))
            continue;
        *ret_ever = true;
        if (takes_more(st, &s->slots[slot]) && store_may_write(st, physical_bytes(p, slot))) {
            s->next_store = (s->next_store + i + 1) % s->n_stores;
            return st;
        }
    }
    return NULL;
}

/* All of them at once, so that nobody climbs that way again before the one they wait for has come. */
static void block_path(struct spill *s, uint32_t from, uint32_t to)
{
    const struct pool *p = s->pool;

    for (uint32_t i = from;;) {
        const struct shm_meta *m = &p->metas->metas[i];
        const struct shm_entry *e;

        dequeue(s, i);
        set_state(s, i, SPILLED_BLOCKED);
        slot_list_push_back(&s->blocked, s->links, i);
        if (i == to)
            return;
        e = index_find(p->index, &m->parent, m->epoch);
        i = shm_word_slot(shm_load64(&e->word)); /* topmost() has just come this way */
    }
}

/* Counted once, however often a use makes it be considered again. */
static void refuse_orphan(struct spill *s, uint32_t slot)
{
    dequeue(s, slot);
    s->stats.orphans += !s->slots[slot].orphan;
    s->slots[slot].orphan = true;
}

/* False: nothing more can be begun now. */
static bool begin_next(struct spill *s, uint32_t *left)
{
    uint32_t first = s->queue.first, slot = first, parent;
    struct store *st;
    bool ever, queued;
    enum verdict v;
    int e;

    if (s->pool->table->slots[first].epoch != s->pool->space->epoch) {
        dequeue(s, first);
        return true;
    }
    v = topmost(s, &slot, &parent, left);
    if (v == WRITE_LATER) {
        block_path(s, first, slot);
        return true;
    }
    if (v == WRITE_NEVER) {
        refuse_orphan(s, slot);
        refuse_orphan(s, first);
        return true;
    }
    s->slots[slot].touched |= s->slots[first].touched; /* it is admitted for its child's sake */
    st = choose(s, slot, &ever);
    if (!st && ever)
        return false;
    queued = s->slots[slot].state == SPILLED_QUEUED;
    dequeue(s, slot);
    e = st ? begin(st, slot, parent) : -ENOSPC;
    if (e == 0)
        return true;
    if (st)
        store_unwrite(st, physical_bytes(s->pool, slot));
    if (e == -EAGAIN) {
        /* An ancestor that was in no queue is in none again: `first` comes back to it. */
        if (queued)
            enqueue_first(s, slot);
        s->again = true;
        return false;
    }
    s->stats.refused++;
    if (slot != first) /* nor can the one that wanted it to go first */
        dequeue(s, first);
    return true;
}

bool writes_run(struct spill *s)
{
    uint32_t left = 1024;

    s->again = false;
    while (s->queue.n && left && begin_next(s, &left))
        left -= left > 0;
    return s->queue.n && (!left || s->again);
}

/* ---- ending */

void write_adopt(struct spill *s, uint32_t r, const struct shm_key *key, uint32_t epoch)
{
    struct shm_entry *e = index_find(s->pool->index, key, epoch);
    uint32_t slot = e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;
    struct spill_slot *x = e ? &s->slots[slot] : NULL;

    if (!x || s->pool->table->slots[slot].state != SHM_SLOT_LIVE ||
        (x->state != SPILLED_NO && x->state != SPILLED_QUEUED && x->state != SPILLED_BLOCKED))
        return;
    dequeue(s, slot);
    *x = (struct spill_slot){.state = SPILLED_STORED, .record = r, .touched = true};
    s->records[r].slot = slot;
}

/* The table may have its record, or that of the object which had to leave for it: neither must come back. */
static void give_up(struct transfer *t, int error)
{
    struct store *st = t->store;
    struct spill *s = st->spill;
    uint32_t r = t->record;

    if (error == -ENOSPC)
        store_failed(st, error, NULL, "no space is left on its file system");
    if (error == -ENODATA)
        s->stats.orphans++;
    else if (!t->counted)
        store_count(st, error);
    if (t->slot != SLOT_NONE)
        s->slots[t->slot] = (struct spill_slot){.record = NO_RECORD, .touched = true};
    record_free(s, r);
    s->writing--;
    transfer_free(t);
    sector_erase(st, r);
}

void write_pieces_done(struct transfer *t)
{
    struct spill *s = t->store->spill;
    struct pool *p = s->pool;

    pool_hold(p, t->slot, -1);
    if (t->error == -EFAULT)
        space_offline(p->space, "a writer has truncated the memory of its pool");
    if (t->error || t->store->state != STORE_ONLINE) {
        give_up(t, t->error ? t->error : -ECANCELED);
        return;
    }
    t->meta.digest =
        format_digest(&t->meta, &t->store->file.super, t->user, t->digests, t->n_pieces);
    sector_write(t, t->meta.user_bytes > 0);
}

static void stored(struct transfer *t)
{
    struct store *st = t->store;
    struct spill *s = st->spill;
    uint32_t slot = t->slot;

    if (slot != SLOT_NONE) {
        s->slots[slot].state = SPILLED_STORED;
        s->slots[slot].record = t->record;
        s->slots[slot].transfer = NULL;
        s->records[t->record].slot = slot;
    }
    st->stats.written_objects++;
    st->stats.written_bytes += t->meta.bytes * s->pool->parts;
    store_count(st, 0);
    s->writing--;
    transfer_free(t);
}

void write_recorded(struct transfer *t, bool user, int error)
{
    struct spill *s = t->store->spill;
    struct shm_key key = t->meta.key;
    uint32_t r = t->record, epoch = t->meta.epoch;

    t->cancelled |= s->records[r].doomed;
    if (!error && user) {
        sector_write(t, false);
        return;
    }
    if (!error && !t->cancelled && t->meta.epoch == s->pool->space->epoch &&
        t->store->state == STORE_ONLINE)
        error = record_store(s, r, &t->meta);
    else if (!error)
        error = -ECANCELED;
    if (error) {
        give_up(t, error == -EEXIST ? -ECANCELED : error);
        if (error == -EEXIST) /* a store has come online that has it, too */
            write_adopt(s, record_find(s, &key, epoch), &key, epoch);
        return;
    }
    stored(t);
}
