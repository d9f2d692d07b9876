/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "fail.h"

enum {
    TICKET_SLOT_BITS = 28,
};

/* ---- slots */

static bool is_free(const struct model *m, const struct m_slot *s)
{
    return s->state == M_FREE || (s->state == M_QUARANTINED && s->until_ms <= m->now_ms);
}

static bool holds_object(const struct m_slot *s)
{
    return s->state == M_RESERVED || s->state == M_LIVE;
}

uint32_t model_count(const struct model *m, int pool, enum m_state state)
{
    const struct m_pool *p = &m->pool[pool];
    uint32_t n = 0;

    for (uint32_t i = 0; i < p->slots; i++)
        n += state == M_FREE          ? is_free(m, &p->slot[i])
             : state == M_QUARANTINED ? p->slot[i].state == state && !is_free(m, &p->slot[i])
                                      : p->slot[i].state == state;
    return n;
}

int model_find(const struct model *m, int pool, int key, uint32_t epoch)
{
    const struct m_pool *p = &m->pool[pool];
    int slot = p->where[key];

    if (epoch != m->space[p->space].epoch || slot == MODEL_NONE)
        return MODEL_NONE;
    return p->slot[slot].state == M_LIVE ? slot : MODEL_NONE;
}

/* The slot of the object that this one names as parent, if that is still there. */
static int parent_of(const struct m_pool *p, const struct m_slot *s)
{
    if (s->parent == MODEL_NONE || !holds_object(&p->slot[s->parent]) ||
        p->slot[s->parent].ticket != s->parent_ticket)
        return MODEL_NONE;
    return s->parent;
}

/* A head is not older than a tail that leaves. */
static void bequeath(struct m_pool *p, const struct m_slot *s)
{
    for (int up = parent_of(p, s); up != MODEL_NONE; up = parent_of(p, &p->slot[up]))
        if (p->slot[up].used_max < s->used_max)
            p->slot[up].used_max = s->used_max;
}

static bool is_current(const struct model *m, const struct m_pool *p, const struct m_slot *s)
{
    return s->epoch == m->space[p->space].epoch;
}

/* The object is no more. */
static void empty(struct model *m, struct m_pool *p, struct m_slot *s, bool quarantine)
{
    if (is_current(m, p, s))
        p->where[s->key] = MODEL_NONE;
    s->state = quarantine ? M_QUARANTINED : M_FREE;
    s->from_quarantine = quarantine;
    s->until_ms = m->now_ms + m->quarantine_ms;
}

static void unreserve(struct model *m, struct m_pool *p, struct m_slot *s, bool quarantine)
{
    bequeath(p, s);
    empty(m, p, s, quarantine);
    s->ticket = 0;
}

void model_release(struct model *m)
{
    for (int i = 0; i < MODEL_POOLS; i++)
        for (uint32_t n = 0; n < m->pool[i].slots; n++)
            if (is_free(m, &m->pool[i].slot[n]))
                m->pool[i].slot[n].state = M_FREE;
}

/* ---- operations */

void model_begin(struct model *m)
{
    m->disturbed = false;
    for (int i = 0; i < MODEL_POOLS; i++) {
        struct m_pool *p = &m->pool[i];

        p->free_before = model_count(m, i, M_FREE);
        for (uint32_t n = 0; n < p->slots; n++) {
            struct m_slot *s = &p->slot[n];

            s->gone = s->stirred = false;
            s->touched = m->held[i][n] != 0;
            s->leaf = s->state == M_LIVE;
        }
        for (uint32_t n = 0; n < p->slots; n++) {
            int up = holds_object(&p->slot[n]) ? parent_of(p, &p->slot[n]) : MODEL_NONE;

            if (up != MODEL_NONE)
                p->slot[up].leaf = false;
        }
    }
}

static uint32_t youngest_stamp(const struct model *m, int pool, uint32_t slot, uint32_t tick)
{
    uint32_t best = 0;

    for (int i = 0; i < MODEL_SESSIONS; i++)
        for (int k = 0; k < M_SOURCES; k++) {
            const struct m_session *s = &m->session[i];
            uint32_t stamp = s->counters[pool][k].stamp[slot];

            if (s->state == M_NOBODY || (k == M_SHARED && s->lost[pool]))
                continue;
            if (stamp <= tick && stamp > best) /* the future does not count */
                best = stamp;
        }
    return best;
}

/* Somebody live whom nobody has held since the operation began. While others come and go, somebody of whose
 * last use only a stamp tells may be looked at too late. */
static bool has_idle(const struct model *m, int pool, bool leaf, uint32_t tick)
{
    const struct m_pool *p = &m->pool[pool];

    for (uint32_t n = 0; n < p->slots; n++) {
        const struct m_slot *s = &p->slot[n];

        if ((s->state != M_LIVE && !s->gone) || s->touched || (leaf && !s->leaf))
            continue;
        if (!m->disturbed || youngest_stamp(m, pool, n, tick) <= s->used)
            return true;
    }
    return false;
}

bool model_had_idle(const struct model *m, int pool, uint32_t tick)
{
    return has_idle(m, pool, false, tick);
}

/* Nobody stays who is colder than this victim and could have gone. Victims are taken in batches: somebody
 * whose last use is found out in the middle of one may stay, and younger ones of the batch go. */
static void judge_coldest(const struct model *m, int pool, uint32_t victim, uint32_t tick)
{
    const struct m_pool *p = &m->pool[pool];
    uint32_t used = p->slot[victim].used, stamp = youngest_stamp(m, pool, victim, tick), gone = 0;

    if (stamp > used)
        used = stamp;
    for (uint32_t n = 0; n < p->slots; n++)
        gone += p->slot[n].gone;
    for (uint32_t n = 0; n < p->slots; n++) {
        const struct m_slot *s = &p->slot[n];

        if (gone > 1 && youngest_stamp(m, pool, n, tick) > s->used)
            continue;
        expect(s->state != M_LIVE || s->gone || s->touched || !s->leaf || s->used_max >= used,
               "pool %d: slot %u (key %d), used at tick %u, was evicted before slot %u (key %d), "
               "which was not used after tick %u",
               pool, victim, p->slot[victim].key, used, n, s->key, s->used_max);
    }
}

/* I2: an object with children leaves only when no childless one could. */
static void judge_tail_first(struct model *m, int pool, uint32_t victim, uint32_t tick)
{
    struct m_pool *p = &m->pool[pool];
    bool orphans = false;

    for (uint32_t n = 0; n < p->slots; n++) {
        const struct m_slot *s = &p->slot[n];

        if (!holds_object(s) || s->gone || parent_of(p, s) != (int)victim)
            continue;
        orphans = true;
        m->orphans++;
    }
    if (orphans)
        expect(!has_idle(m, pool, true, tick),
               "I2: pool %d: slot %u (key %d) was evicted before its children, and unheld tails "
               "were left",
               pool, victim, p->slot[victim].key);
    m->orphans_forced += orphans;
    if (!orphans && !m->disturbed)
        judge_coldest(m, pool, victim, tick);
}

static void count_gone(struct m_pool *p, enum m_reason reason)
{
    p->evicted += reason == M_EVICT;
    p->removed += reason == M_REMOVE;
    p->reset += reason == M_RESET;
}

/* What the search for victims may have noted: the held ones are in use now. */
static void note_uses(struct model *m, int pool, uint32_t tick)
{
    struct m_pool *p = &m->pool[pool];

    for (uint32_t n = 0; n < p->slots; n++) {
        struct m_slot *s = &p->slot[n];

        if (s->touched && s->state == M_LIVE)
            s->used_max = tick;
        if (s->gone)
            bequeath(p, s);
    }
}

void model_gone(struct model *m, int pool, enum m_reason reason, uint32_t tick)
{
    struct m_pool *p = &m->pool[pool];

    note_uses(m, pool, tick);
    for (uint32_t n = 0; n < p->slots; n++) {
        struct m_slot *s = &p->slot[n];

        if (!s->gone || s->state != M_LIVE)
            continue;
        expect(reason != M_NOT_AT_ALL,
               "pool %d: the object in slot %u (key %d) has left without reason", pool, n, s->key);
        /* Who counts while the core is at work is in time or not: whether the pin was good, its owner
         * knows. */
        expect(!m->held[pool][n] || s->stirred,
               "I3: pool %d: slot %u (key %d) has left although it is pinned", pool, n, s->key);
        expect(reason != M_RESET || !is_current(m, p, s),
               "pool %d: slot %u (key %d) of the current epoch was purged", pool, n, s->key);
        if (reason == M_EVICT)
            judge_tail_first(m, pool, n, tick);
    }
    for (uint32_t n = 0; n < p->slots; n++) {
        if (!p->slot[n].gone || p->slot[n].state != M_LIVE)
            continue;
        empty(m, p, &p->slot[n], false);
        p->slot[n].gone = reason != M_RESET; /* the search for room comes after the purge */
        count_gone(p, reason);
    }
}

/* ---- publishing */

static uint32_t reserved_by(const struct model *m, int session, int space)
{
    uint32_t n = 0;

    for (int i = 0; i < MODEL_POOLS; i++)
        for (uint32_t k = 0; m->pool[i].space == space && k < m->pool[i].slots; k++)
            n += m->pool[i].slot[k].state == M_RESERVED && m->pool[i].slot[k].writer == session;
    return n;
}

static bool tenant_may(const struct model *m, int pool, uint32_t tenant)
{
    int space = m->pool[pool].space;
    const struct m_tenant_limit *l = &m->space[space].limit[tenant];
    uint64_t bytes = m->pool[pool].part_bytes * m->pool[pool].parts;
    uint32_t reserved = 0;

    for (int i = 0; i < MODEL_POOLS; i++) {
        const struct m_pool *p = &m->pool[i];

        for (uint32_t k = 0; p->space == space && k < p->slots; k++) {
            if (!holds_object(&p->slot[k]) || p->slot[k].tenant != tenant)
                continue;
            reserved += p->slot[k].state == M_RESERVED;
            bytes += p->part_bytes * p->parts;
        }
    }
    if (l->max_reserved && reserved >= l->max_reserved)
        return false;
    return !l->max_resident || bytes <= l->max_resident;
}

static int ask_new(struct model *m, const struct m_reserve *q)
{
    struct m_pool *p = &m->pool[q->pool];
    const struct m_space *space = &m->space[p->space];

    if (m->session[q->session].over_quota[p->space])
        return -EDQUOT;
    if (space->max_reserved && reserved_by(m, q->session, p->space) >= space->max_reserved)
        return -EDQUOT;
    return tenant_may(m, q->pool, q->tenant) ? 1 : -EDQUOT;
}

int model_ask_reserve(struct model *m, const struct m_reserve *q, uint32_t tick)
{
    struct m_pool *p = &m->pool[q->pool];
    int slot = p->where[q->key];

    if (q->epoch != m->space[p->space].epoch)
        return -ESTALE;
    if (slot == MODEL_NONE) {
        if (q->parent != MODEL_NONE)
            model_use(m, q->pool, q->parent, q->epoch, tick);
        return ask_new(m, q);
    }
    if (p->slot[slot].state == M_RESERVED)
        return 2;
    model_use(m, q->pool, q->key, q->epoch, tick);
    return 3;
}

/* What was quarantined is used again last: something late may still be on its way into it. */
static void judge_choice(const struct model *m, int pool, uint32_t slot)
{
    const struct m_pool *p = &m->pool[pool];

    for (uint32_t n = 0; n < p->slots && p->slot[slot].from_quarantine; n++)
        expect(
            !is_free(m, &p->slot[n]) || p->slot[n].from_quarantine,
            "pool %d: slot %u was granted, which was quarantined, and slot %u is free, which was "
            "not",
            pool, slot, n);
}

static void grant(struct model *m, const struct m_reserve *q, uint32_t slot, uint64_t ticket)
{
    struct m_pool *p = &m->pool[q->pool];
    struct m_slot *s = &p->slot[slot];
    int up;

    expect(slot < p->slots && is_free(m, s), "pool %d: slot %u was granted in state %d", q->pool,
           slot, slot < p->slots ? (int)s->state : -1);
    expect((ticket & ((1u << TICKET_SLOT_BITS) - 1)) == slot &&
               ticket >> TICKET_SLOT_BITS > m->last_operation,
           "pool %d: ticket %llx for slot %u is not new", q->pool, (unsigned long long)ticket,
           slot);
    judge_choice(m, q->pool, slot);
    m->last_operation = ticket >> TICKET_SLOT_BITS;
    p->where[q->key] = (int)slot;
    *s = (struct m_slot){
        .state = M_RESERVED,
        .ticket = ticket,
        .key = q->key,
        .epoch = q->epoch,
        .tenant = q->tenant,
        .writer = q->session,
        .engine = m->session[q->session].engine,
        .parent_key = q->parent,
        .parent = MODEL_NONE,
    };
    up = q->parent == MODEL_NONE ? MODEL_NONE : p->where[q->parent];
    if (up != MODEL_NONE && up != (int)slot) {
        s->parent = up;
        s->parent_ticket = p->slot[up].ticket;
    }
}

void model_reserved(struct model *m, const struct m_reserve *q, int expected, int status,
                    uint32_t slot, uint64_t ticket, uint32_t tick)
{
    struct m_pool *p = &m->pool[q->pool];
    bool gone = false, idle = has_idle(m, q->pool, false, tick);

    for (uint32_t n = 0; n < p->slots; n++)
        gone |= p->slot[n].gone;
    if (status == -ENOSPC && expected == 1) {
        expect(!p->free_before && !idle && !gone,
               "pool %d: no slot for key %d, but %u were free%s%s", q->pool, q->key, p->free_before,
               idle ? ", somebody unheld could have left" : "", gone ? ", somebody has left" : "");
        return;
    }
    expect(status == expected, "pool %d: reserve of key %d: %d, not %d", q->pool, q->key, status,
           expected);
    if (status != 1)
        return;
    expect(!p->free_before || !gone, "pool %d: evicted although %u slots were free", q->pool,
           p->free_before);
    grant(m, q, slot, ticket);
}

/* NULL: not a ticket of the slot that it names. */
static struct m_slot *slot_of(struct m_pool *p, uint64_t ticket)
{
    uint64_t slot = ticket & ((1u << TICKET_SLOT_BITS) - 1);

    return ticket && slot < p->slots && p->slot[slot].ticket == ticket ? &p->slot[slot] : NULL;
}

static int check_commit(const struct model *m, const struct m_commit *c, const struct m_slot *s)
{
    const struct m_pool *p = &m->pool[c->pool];

    if (s->state == M_LIVE) /* the answer was lost, and it was posted again */
        return is_current(m, p, s) ? 0 : -ESTALE;
    if (s->state != M_RESERVED)
        return -ESTALE;
    if (s->engine != m->session[c->session].engine)
        return -EPERM;
    if (c->part >= p->parts || c->bad_user || !c->bytes || c->bytes > p->part_bytes)
        return -EINVAL;
    return s->parts && c->bytes != s->bytes ? -EINVAL : 0;
}

int model_commit(struct model *m, const struct m_commit *c, uint32_t tick)
{
    struct m_pool *p = &m->pool[c->pool];
    struct m_slot *s = slot_of(p, c->ticket);
    int r;

    if (!s)
        return -ESTALE;
    r = check_commit(m, c, s);
    if (r < 0 || s->state == M_LIVE)
        return r;
    s->bytes = c->bytes;
    s->parts |= (uint64_t)1 << c->part;
    if (s->parts != (p->parts == 64 ? UINT64_MAX : ((uint64_t)1 << p->parts) - 1))
        return 0;
    s->state = M_LIVE;
    s->meta = c->meta;
    s->used = s->used_max = tick;
    s->held_since_reset = m->held[c->pool][s - p->slot] != 0;
    p->committed++;
    return 0;
}

int model_abort(struct model *m, int session, int pool, uint64_t ticket)
{
    struct m_pool *p = &m->pool[pool];
    struct m_slot *s = slot_of(p, ticket);

    if (!s || s->state != M_RESERVED || s->engine != m->session[session].engine)
        return -ENOENT;
    unreserve(m, p, s, false);
    p->aborted++;
    return 0;
}

void model_reset(struct model *m, int space)
{
    for (int i = 0; i < MODEL_POOLS; i++) {
        struct m_pool *p = &m->pool[i];

        if (p->space != space)
            continue;
        for (uint32_t n = 0; n < p->slots; n++) {
            p->slot[n].held_since_reset = m->held[i][n] != 0;
            if (p->slot[n].state != M_RESERVED)
                continue;
            unreserve(m, p, &p->slot[n], true);
            p->reset++;
        }
        for (int k = 0; k < MODEL_KEYS; k++)
            p->where[k] = MODEL_NONE;
    }
    m->space[space].epoch++;
}

void model_use(struct model *m, int pool, int key, uint32_t epoch, uint32_t tick)
{
    struct m_pool *p = &m->pool[pool];
    int slot = p->where[key];

    if (slot != MODEL_NONE && epoch == m->space[p->space].epoch)
        p->slot[slot].used = p->slot[slot].used_max = tick;
}

/* ---- pins */

static bool counts(const struct m_session *s, int pool, enum m_source source)
{
    return s->state != M_NOBODY && !(source == M_SHARED && s->lost[pool]);
}

void model_count_pin(struct model *m, int session, int pool, enum m_source source, uint32_t slot,
                     uint32_t count, uint32_t stamp)
{
    struct m_session *s = &m->session[session];
    struct m_counters *c = &s->counters[pool][source];
    struct m_slot *t = &m->pool[pool].slot[slot];

    if (counts(s, pool, source))
        m->held[pool][slot] += (uint32_t)(count != 0) - (uint32_t)(c->count[slot] != 0);
    c->count[slot] = count;
    c->stamp[slot] = stamp;
    t->touched = t->stirred = true;
    t->held_since_reset = true;
    if (t->used_max < stamp)
        t->used_max = stamp;
    m->disturbed = true;
}

static void forget_pins(struct model *m, int session, int pool, enum m_source source)
{
    struct m_counters *c = &m->session[session].counters[pool][source];

    for (uint32_t n = 0; n < m->pool[pool].slots; n++)
        m->held[pool][n] -= c->count[n] != 0;
    memset(c, 0, sizeof(*c));
}

void model_lose(struct model *m, int session, int pool)
{
    if (!m->session[session].lost[pool])
        forget_pins(m, session, pool, M_SHARED);
    m->session[session].lost[pool] = true;
}

static uint64_t pinned_bytes(const struct model *m, int session, int space)
{
    uint64_t bytes = 0;

    for (int i = 0; i < MODEL_POOLS; i++)
        for (int k = 0; m->pool[i].space == space && k < M_SOURCES; k++)
            for (uint32_t n = 0; n < m->pool[i].slots; n++)
                if (m->session[session].counters[i][k].count[n])
                    bytes += m->pool[i].part_bytes * m->pool[i].parts;
    return bytes;
}

void model_check_pins(struct model *m)
{
    for (int i = 0; i < MODEL_SESSIONS; i++)
        for (int k = 0; m->session[i].state != M_NOBODY && k < MODEL_SPACES; k++)
            m->session[i].over_quota[k] =
                m->space[k].max_pinned && pinned_bytes(m, i, k) > m->space[k].max_pinned;
}

/* ---- sessions */

int model_engine_of(struct model *m)
{
    return ++m->engines;
}

bool model_engine_lives(const struct model *m, int engine)
{
    for (int i = 0; i < MODEL_SESSIONS; i++) {
        const struct m_session *s = &m->session[i];

        if (s->engine == engine && (s->state == M_ATTACHED || s->state == M_HUNG_UP))
            return true;
    }
    return false;
}

void model_attach(struct model *m, int session, int engine, bool writer)
{
    m->session[session] =
        (struct m_session){.state = M_ATTACHED, .engine = engine, .writer = writer};
}

static bool has_peers(const struct model *m, int session)
{
    for (int i = 0; i < MODEL_SESSIONS; i++) {
        const struct m_session *s = &m->session[i];

        if (i != session && s->engine == m->session[session].engine &&
            (s->state == M_ATTACHED || s->state == M_HUNG_UP))
            return true;
    }
    return false;
}

/* `died`: somebody may still be writing into its slots; or its peers may. */
static void bury(struct model *m, int session, bool died)
{
    struct m_session *s = &m->session[session];
    bool written = died || has_peers(m, session);

    for (int i = 0; i < MODEL_POOLS; i++) {
        struct m_pool *p = &m->pool[i];

        for (int k = 0; k < M_SOURCES; k++)
            if (counts(s, i, k))
                forget_pins(m, session, i, k);
        for (uint32_t n = 0; n < p->slots; n++) {
            if (p->slot[n].state != M_RESERVED || p->slot[n].writer != session)
                continue;
            unreserve(m, p, &p->slot[n], written);
            p->orphaned += died;
            p->aborted += !died;
        }
    }
    s->state = M_NOBODY;
}

static void bury_engine(struct model *m, int engine)
{
    for (int i = 0; i < MODEL_SESSIONS; i++)
        if (m->session[i].state == M_LINGERING && m->session[i].engine == engine)
            bury(m, i, true);
}

void model_end(struct model *m, int session, bool died)
{
    struct m_session *s = &m->session[session];

    if (s->state == M_NOBODY || s->state == M_LINGERING)
        return;
    if (died) {
        s->state = M_LINGERING;
        s->linger_until_ms = m->now_ms + m->linger_ms;
    } else {
        bury(m, session, false);
    }
    if (!model_engine_lives(m, s->engine))
        bury_engine(m, s->engine);
}

void model_linger(struct model *m)
{
    for (int i = 0; i < MODEL_SESSIONS; i++)
        if (m->session[i].state == M_LINGERING && m->session[i].linger_until_ms <= m->now_ms)
            bury(m, i, true);
}

int64_t model_deadline(const struct model *m)
{
    uint64_t next = UINT64_MAX;

    for (int i = 0; i < MODEL_SESSIONS; i++)
        if (m->session[i].state == M_LINGERING && m->session[i].linger_until_ms < next)
            next = m->session[i].linger_until_ms;
    for (int i = 0; i < MODEL_POOLS; i++)
        for (uint32_t n = 0; n < m->pool[i].slots; n++)
            if (m->pool[i].slot[n].state == M_QUARANTINED && m->pool[i].slot[n].until_ms < next)
                next = m->pool[i].slot[n].until_ms;
    return next == UINT64_MAX ? -1 : (int64_t)(next - m->now_ms);
}
