/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a pool's stores hold: an array of records and the nvme index over it.
 *
 * I2 in this tier: a record is a candidate for eviction only while no stored record names it as parent, so
 * tails leave first. A record whose object is in ram as well is worth most, since it saves writing it again;
 * it is passed over.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/spill/engine.h"

/* Candidates that may turn out to be resident or being read before eviction gives up for now. */
#define TAKE_TRIES 64u

#define STEP       1024u

static uint32_t now_of(const struct spill *s)
{
    return shm_load32(&s->pool->index->tick);
}

struct store *record_store_of(const struct spill *s, uint32_t r)
{
    for (uint32_t i = 0; i < s->n_stores; i++)
        if (r - s->stores[i]->base < s->stores[i]->planned)
            return s->stores[i];
    return NULL;
}

struct shm_key record_key(const struct spill *s, uint32_t r)
{
    const struct shm_entry *e = &s->pool->nvme_index->lines[s->records[r].line];
    struct shm_key key = {.group = (uint32_t)shm_load64(&e->scope)};

    for (unsigned int i = 0; i < 4; i++) {
        uint64_t w = shm_load64(&e->key[i]);

        memcpy(key.hash + 8 * i, &w, sizeof(w));
    }
    return key;
}

static uint32_t epoch_of(const struct spill *s, uint32_t r)
{
    return (uint32_t)(shm_load64(&s->pool->nvme_index->lines[s->records[r].line].scope) >> 32);
}

uint32_t record_find(const struct spill *s, const struct shm_key *key, uint32_t epoch)
{
    struct shm_entry *e = index_find(s->pool->nvme_index, key, epoch);

    return e ? shm_word_slot(shm_load64(&e->word)) : NO_RECORD;
}

/* ---- candidates */

static void queue(struct spill *s, uint32_t r, uint32_t tick, bool first)
{
    struct record *x = &s->records[r];
    struct store *st = record_store_of(s, r);

    x->tick = tick;
    if (x->children || x->queued)
        return;
    policy_lru.add(st->policy, r - st->base, now_of(s), tick, first);
    x->queued = true;
}

static void unqueue(struct spill *s, uint32_t r)
{
    struct store *st = record_store_of(s, r);

    if (!s->records[r].queued)
        return;
    policy_lru.remove(st->policy, r - st->base);
    s->records[r].queued = false;
}

void record_touch(struct spill *s, uint32_t r)
{
    unqueue(s, r);
    queue(s, r, now_of(s), true);
}

/* ---- parents */

static void link_parent(struct spill *s, uint32_t r, uint32_t parent)
{
    s->records[r].parent = parent;
    s->records[r].parent_use = s->records[parent].use;
    if (s->records[parent].children++ == 0)
        unqueue(s, parent);
}

static bool has_link(const struct spill *s, const struct record *x)
{
    return x->parent != NO_RECORD && s->records[x->parent].use == x->parent_use;
}

/* One child less, last used at `tick`. */
static void drop_child(struct spill *s, uint32_t parent, uint32_t tick)
{
    struct record *up = &s->records[parent];

    if (--up->children || up->state != RECORD_STORED)
        return;
    queue(s, parent, (int32_t)(tick - up->tick) > 0 ? tick : up->tick, false);
}

static void unlink_parent(struct spill *s, uint32_t r)
{
    struct record *x = &s->records[r];
    uint32_t parent = has_link(s, x) ? x->parent : NO_RECORD; /* else it was taken away first */

    x->parent = NO_RECORD;
    if (parent != NO_RECORD)
        drop_child(s, parent, x->tick);
}

/* ---- free ones */

static void set_free(struct store *st, uint32_t i, bool free)
{
    uint64_t bit = (uint64_t)1 << i % 64;

    if (free)
        st->free_bits[i / 64] |= bit;
    else
        st->free_bits[i / 64] &= ~bit;
}

/* From the rotor on: what is written one after the other shares sectors of the table. */
static uint32_t find_free(struct store *st)
{
    uint32_t words = (st->records + 63) / 64, start = st->rotor / 64;

    for (uint32_t k = 0; k <= words; k++) {
        uint32_t w = (start + k) % words;
        uint64_t bits = st->free_bits[w];

        if (k == 0)
            bits &= ~(uint64_t)0 << st->rotor % 64;
        if (bits)
            return w * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return NO_RECORD;
}

/* The coldest tail that nobody reads and that is not in ram. A step of the search, which gives up when it has
 * met all of them in use. */
static uint32_t find_victim(struct store *st)
{
    struct spill *s = st->spill;
    uint32_t now = now_of(s);

    for (unsigned int i = 0; i < TAKE_TRIES; i++) {
        uint32_t tick, local = policy_lru.take(st->policy, now, &tick), r;

        if (local == SLOT_NONE)
            return NO_RECORD;
        r = st->base + local;
        s->records[r].queued = false;
        if (!s->records[r].reads && s->records[r].slot == SLOT_NONE) {
            st->passed_over = 0;
            return r;
        }
        queue(s, r, now, false);
    }
    st->passed_over += TAKE_TRIES;
    st->take_again = st->passed_over < st->used;
    if (!st->take_again)
        st->passed_over = 0;
    return NO_RECORD;
}

static uint32_t take(struct store *st)
{
    struct spill *s = st->spill;
    uint32_t i = st->used + st->n_transfers < st->records ? find_free(st) : NO_RECORD, r;

    st->take_again = false;
    if (i == NO_RECORD) {
        r = find_victim(st);
        if (r == NO_RECORD)
            return NO_RECORD;
        record_free(s, r);
        st->stats.evicted++;
        i = r - st->base;
    }
    st->rotor = i + 1 < st->records ? i + 1 : 0;
    set_free(st, i, false);
    r = st->base + i;
    s->records[r] = (struct record){.parent = NO_RECORD,
                                    .slot = SLOT_NONE,
                                    .use = ++s->generation,
                                    .tick = now_of(s),
                                    .state = RECORD_WRITING};
    return r;
}

uint32_t record_take(struct store *st, uint32_t parent)
{
    struct spill *s = st->spill;
    uint32_t r;

    if (parent == NO_RECORD)
        return take(st);
    if (s->records[parent].children++ == 0)
        unqueue(s, parent); /* it must not make room for its own child */
    r = take(st);
    if (r == NO_RECORD) {
        drop_child(s, parent, s->records[parent].tick);
        return NO_RECORD;
    }
    s->records[r].parent = parent;
    s->records[r].parent_use = s->records[parent].use;
    return r;
}

void record_free(struct spill *s, uint32_t r)
{
    struct record *x = &s->records[r];
    struct store *st = record_store_of(s, r);

    if (x->state == RECORD_FREE)
        return;
    if (x->state == RECORD_STORED) {
        index_remove(s->pool->nvme_index, x->line);
        unqueue(s, r);
        s->used--;
        st->used--;
        if (x->slot != SLOT_NONE)
            s->slots[x->slot] = (struct spill_slot){.record = NO_RECORD, .touched = true};
    }
    unlink_parent(s, r);
    *x = (struct record){.parent = NO_RECORD, .slot = SLOT_NONE, .use = ++s->generation};
    set_free(st, r - st->base, true);
}

/* ---- storing */

static int insert(struct spill *s, uint32_t r, const struct format_record *m)
{
    struct record *x = &s->records[r];
    uint32_t line;
    int e = index_insert(s->pool->nvme_index, &m->key, m->epoch, r, &line);

    if (e < 0)
        return e;
    index_publish(s->pool->nvme_index, line, m->bytes);
    x->line = line;
    x->state = RECORD_STORED;
    x->tenant = m->tenant;
    x->has_user = m->user_bytes > 0;
    s->used++;
    record_store_of(s, r)->used++;
    return 0;
}

int record_store(struct spill *s, uint32_t r, const struct format_record *m)
{
    int e = record_find(s, &m->key, m->epoch) == NO_RECORD ? insert(s, r, m) : -EEXIST;
    uint32_t parent;

    if (e < 0)
        return e;
    if (!has_link(s, &s->records[r])) {
        parent = m->has_parent ? record_find(s, &m->parent, m->epoch) : NO_RECORD;
        s->records[r].parent = NO_RECORD;
        if (parent != NO_RECORD && parent != r)
            link_parent(s, r, parent);
    }
    queue(s, r, now_of(s), true);
    return 0;
}

/* ---- loading */

/* Records come back with the generation that they had, but nobody has counted their children. */
void record_unlink_store(const struct store *st)
{
    struct spill *s = st->spill;

    for (uint32_t i = 0; i < s->n_records && s->n_stores > 1; i++)
        if (s->records[i].parent != NO_RECORD && s->records[i].parent - st->base < st->planned)
            s->records[i].parent = NO_RECORD;
}

static void remember_parent(struct store *st, uint32_t r, const struct format_record *m)
{
    if (st->n_unresolved == st->max_unresolved) {
        size_t max = st->max_unresolved ? st->max_unresolved * 2 : 1024;
        struct unresolved *more = reallocarray(st->unresolved, max, sizeof(*more));

        if (!more)
            return; /* it will be evicted earlier than it should */
        st->unresolved = more;
        st->max_unresolved = max;
    }
    st->unresolved[st->n_unresolved++] = (struct unresolved){.record = r,
                                                             .use = m->generation,
                                                             .epoch = m->epoch,
                                                             .linked = m->linked,
                                                             .parent = m->parent};
}

void record_prefetch(const struct store *st, const struct store_loaded *l)
{
    struct shm_table t = shm_table_of(st->spill->pool->nvme_index);

    __builtin_prefetch(shm_home_line(&t, &l->record.key), 1, 3);
    __builtin_prefetch(&st->spill->records[st->base + (l->number < st->planned ? l->number : 0)], 1,
                       3);
}

/* A key twice: the younger one counts; the other was evicted and its slot not used since. */
void record_load(struct store *st, const struct store_loaded *l)
{
    struct spill *s = st->spill;
    const struct format_record *m = &l->record;
    uint32_t r = st->base + l->number, other, parent;

    if (l->number >= st->planned || s->records[r].state != RECORD_FREE)
        return;
    other = record_find(s, &m->key, m->epoch);
    if (other != NO_RECORD) {
        if ((int32_t)(m->generation - s->records[other].use) <= 0 || s->records[other].reads) {
            sector_erase(st, r); /* else it would outlive the other one's removal */
            return;
        }
        record_free(s, other);
        sector_erase(record_store_of(s, other), other);
    }
    s->records[r] = (struct record){.parent = NO_RECORD, .slot = SLOT_NONE, .use = m->generation};
    if (insert(s, r, m) < 0)
        return;
    set_free(st, l->number, false);
    if (s->pool->count[SHM_SLOT_LIVE])
        write_adopt(s, r, &m->key, m->epoch);
    if (!s->generation || (int32_t)(m->generation - s->generation) > 0)
        s->generation = m->generation;
    if (!m->has_parent)
        return;
    parent = record_find(s, &m->parent, m->epoch);
    if (parent == NO_RECORD || parent == r)
        remember_parent(st, r, m);
    else
        link_parent(s, r, parent);
}

/* What is linked to a parent that is in no store cannot be reached, nor what hangs on it: it is what a record
 * was before its slot was free and its parent's was written again. */
enum reach {
    REACH_UNKNOWN = 0,
    REACH_GOOD,
    REACH_BAD,
};

static uint32_t up_of(const struct spill *s, uint32_t r)
{
    uint32_t up = s->records[r].parent;

    return up != NO_RECORD && s->records[up].use == s->records[r].parent_use ? up : NO_RECORD;
}

static void mark_path(const struct spill *s, uint8_t *marks, uint32_t r)
{
    uint32_t i, up, steps = 0;
    uint8_t mark = REACH_GOOD;

    for (i = r; i != NO_RECORD && steps <= s->n_records; i = up_of(s, i), steps++)
        if (marks[i] != REACH_UNKNOWN) {
            mark = marks[i];
            break;
        }
    for (i = r; steps && i != NO_RECORD && marks[i] == REACH_UNKNOWN; i = up, steps--) {
        up = up_of(s, i);
        marks[i] = mark;
    }
}

static void prune(struct spill *s, uint8_t *marks)
{
    for (uint32_t i = 0; i < s->n_records; i++)
        if (s->records[i].state == RECORD_STORED)
            mark_path(s, marks, i);
    for (uint32_t i = 0; i < s->n_records; i++)
        if (marks[i] == REACH_BAD && s->records[i].state == RECORD_STORED && !s->records[i].reads)
            record_free(s, i);
}

/* Links what waited for its parent; marks what waits in vain. True: there is some. */
static bool resolve(struct store *st, uint8_t *marks)
{
    struct spill *s = st->spill;
    bool vain = false;

    for (size_t i = 0; i < st->n_unresolved; i++) {
        const struct unresolved *u = &st->unresolved[i];
        struct record *x = &s->records[u->record];
        uint32_t parent;

        if (x->state != RECORD_STORED || x->use != u->use || x->parent != NO_RECORD)
            continue;
        parent = record_find(s, &u->parent, u->epoch);
        if (parent != NO_RECORD && parent != u->record) {
            link_parent(s, u->record, parent);
        } else if (u->linked && marks) {
            marks[u->record] = REACH_BAD;
            vain = true;
        }
    }
    return vain;
}

/* Parents may lie in another store of the pool, which is still being loaded, or offline: then nothing is
 * dropped. */
static void resolve_all(struct spill *s, const struct store *loaded)
{
    bool all = true, loading = false, vain = false;
    uint8_t *marks;

    for (uint32_t i = 0; i < s->n_stores; i++) {
        all &= s->stores[i] == loaded || s->stores[i]->state == STORE_ONLINE;
        loading |= s->stores[i] != loaded && s->stores[i]->state == STORE_STARTING;
    }
    marks = all ? calloc(s->n_records, 1) : NULL;
    for (uint32_t i = 0; i < s->n_stores; i++)
        vain |= resolve(s->stores[i], marks);
    if (vain)
        prune(s, marks);
    free(marks);
    for (uint32_t i = 0; i < s->n_stores && !loading; i++) {
        free(s->stores[i]->unresolved);
        s->stores[i]->unresolved = NULL;
        s->stores[i]->n_unresolved = s->stores[i]->max_unresolved = 0;
    }
}

/* Old ones first, by the order in which they were written. */
void record_loaded(struct store *st)
{
    struct spill *s = st->spill;
    uint32_t now = now_of(s), newest = s->generation;

    resolve_all(s, st);
    for (uint32_t i = 0; i < st->records; i++) {
        const struct record *x = &s->records[st->base + i];
        uint32_t age = newest - x->use;

        if (x->state == RECORD_STORED && !x->queued)
            queue(s, st->base + i, now - 1 - (uint32_t)((uint64_t)age * 1024 / (st->records + 1)),
                  false);
    }
}

/* ---- dropping many */

bool record_purge(struct spill *s)
{
    uint32_t end;

    if (!s->purging)
        return false;
    end = s->n_records - s->purge_cursor < STEP ? s->n_records : s->purge_cursor + STEP;
    for (; s->purge_cursor < end; s->purge_cursor++) {
        const struct record *x = &s->records[s->purge_cursor];

        if (x->state == RECORD_STORED && !x->reads &&
            epoch_of(s, s->purge_cursor) != s->pool->space->epoch)
            record_free(s, s->purge_cursor);
    }
    s->purging = s->purge_cursor < s->n_records;
    return s->purging;
}

bool record_drop_store(struct store *st)
{
    struct spill *s = st->spill;
    uint32_t end;

    if (!st->dropping)
        return false;
    end = st->planned - st->drop_cursor < STEP ? st->planned : st->drop_cursor + STEP;
    for (; st->drop_cursor < end; st->drop_cursor++) {
        const struct record *x = &s->records[st->base + st->drop_cursor];

        if (x->state == RECORD_STORED && !x->reads)
            record_free(s, st->base + st->drop_cursor);
    }
    st->dropping = st->drop_cursor < st->planned;
    return st->dropping;
}

bool spill_has(const struct pool *p, const struct shm_key *key, uint32_t epoch)
{
    return p->spill && record_find(p->spill, key, epoch) != NO_RECORD;
}

const char *spill_away(const struct pool *p)
{
    for (uint32_t i = 0; p->spill && i < p->spill->n_stores; i++)
        if (p->spill->stores[i]->state != STORE_ONLINE)
            return p->spill->stores[i]->full_name;
    return NULL;
}

const char *spill_store_of(const struct pool *p, uint32_t slot)
{
    const struct spill *s = p->spill;

    if (!s || s->slots[slot].state != SPILLED_STORED)
        return NULL;
    return record_store_of(s, s->slots[slot].record)->name;
}

uint32_t spill_records(const struct pool *p)
{
    return p->spill ? p->spill->n_records : 0;
}

uint32_t spill_record_of(const struct pool *p, const struct shm_key *key, uint32_t epoch)
{
    return p->spill ? record_find(p->spill, key, epoch) : SLOT_NONE;
}

void spill_observed(struct pool *p, const struct shm_key *key, uint32_t epoch)
{
    uint32_t r = spill_record_of(p, key, epoch);

    if (r != NO_RECORD)
        record_touch(p->spill, r);
}

/* The object must not come back. Who reads it now gets nothing of it, and then it goes. */
void record_forget(struct spill *s, uint32_t r)
{
    struct store *st = record_store_of(s, r);

    if (s->records[r].reads) {
        s->records[r].doomed = true;
        return;
    }
    record_free(s, r);
    sector_erase(st, r);
}

void record_read_end(struct store *st, uint32_t r)
{
    struct spill *s = st->spill;

    if (s->records[r].state != RECORD_STORED || s->records[r].reads)
        return;
    if (s->records[r].doomed)
        record_forget(s, r);
    else if (epoch_of(s, r) != s->pool->space->epoch)
        record_free(s, r); /* record_purge() has passed it over */
}

static uint32_t remove_record(struct spill *s, uint32_t r)
{
    if (s->records[r].state == RECORD_FREE || s->records[r].doomed)
        return 0;
    if (s->records[r].state == RECORD_WRITING)
        s->records[r].doomed = true; /* write_recorded() sees to it */
    else
        record_forget(s, r);
    return 1;
}

uint32_t spill_remove(struct pool *p, const struct shm_key *key, uint32_t epoch)
{
    uint32_t r = spill_record_of(p, key, epoch);

    return r == NO_RECORD ? 0 : remove_record(p->spill, r);
}

static bool is_meant(const struct record *x, const uint32_t *tenant)
{
    if (x->state == RECORD_FREE)
        return false;
    return tenant ? x->tenant == *tenant : x->slot == SLOT_NONE;
}

uint32_t spill_remove_tenant(struct pool *p, const uint32_t *tenant, uint32_t *cursor)
{
    struct spill *s = p->spill;
    uint32_t n = 0, i = *cursor, end;

    if (!s) {
        *cursor = 0;
        return 0;
    }
    end = s->n_records - i < STEP ? s->n_records : i + STEP;
    for (; i < end; i++)
        if (is_meant(&s->records[i], tenant))
            n += remove_record(s, i);
    *cursor = end < s->n_records ? end : 0;
    return n;
}

bool spill_entry(const struct pool *p, uint32_t record, struct spill_entry *ret)
{
    const struct spill *s = p->spill;
    const struct store *st;

    if (!s || record >= s->n_records || s->records[record].state != RECORD_STORED)
        return false;
    st = record_store_of(s, record);
    *ret = (struct spill_entry){
        .key = record_key(s, record),
        .bytes = (uint64_t)shm_load32(&p->nvme_index->lines[s->records[record].line].last_byte) + 1,
        .epoch = epoch_of(s, record),
        .tenant = s->records[record].tenant,
        .number = record - st->base,
        .store = st->name,
    };
    return true;
}

void spill_totals(const struct pool *p, struct spill_totals *ret)
{
    *ret = (struct spill_totals){.records = 0};
    if (!p->spill)
        return;
    for (uint32_t i = 0; i < p->spill->n_stores; i++)
        ret->records += p->spill->stores[i]->records;
    ret->used = p->spill->used;
    ret->bytes = ret->records * p->part_bytes * p->parts;
}

const struct spill_stats *spill_stats(const struct pool *p)
{
    return p->spill ? &p->spill->stats : NULL;
}

/* ---- invariants */

static void check_record(const struct spill *s, uint32_t r, uint32_t *children)
{
    const struct record *x = &s->records[r];
    const struct store *st = record_store_of(s, r);
    struct shm_key key;

    assert((x->state == RECORD_FREE) ==
           (st->free_bits[(r - st->base) / 64] >> (r - st->base) % 64 & 1));
    if (has_link(s, x))
        children[x->parent]++;
    if (x->state != RECORD_STORED) {
        assert(!x->queued && (x->parent == NO_RECORD || x->state == RECORD_WRITING));
        return;
    }
    key = record_key(s, r);
    assert(record_find(s, &key, epoch_of(s, r)) == r);
    assert(x->queued == !x->children || st->state != STORE_ONLINE);
    if (x->slot != SLOT_NONE)
        assert(s->slots[x->slot].record == r && (s->slots[x->slot].state == SPILLED_STORED ||
                                                 s->slots[x->slot].state == SPILLED_READING));
}

void spill_check(const struct pool *p)
{
    const struct spill *s = p->spill;
    uint32_t used = 0, *children;

    if (!s)
        return;
    children = calloc(s->n_records, sizeof(*children));
    assert(children);
    for (uint32_t k = 0; k < s->n_stores; k++)
        for (uint32_t i = 0; i < s->stores[k]->records; i++) {
            check_record(s, s->stores[k]->base + i, children);
            used += s->records[s->stores[k]->base + i].state == RECORD_STORED;
        }
    for (uint32_t i = 0; i < s->n_records; i++)
        assert(s->records[i].children == children[i]);
    assert(used == s->used);
    free(children);
}
