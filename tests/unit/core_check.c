/* SPDX-License-Identifier: Apache-2.0 */
#include "core_check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"

struct check {
    char *why;
    size_t bytes;
};

static int wrong(const struct check *k, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static int wrong(const struct check *k, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(k->why, k->bytes, format, args);
    va_end(args);
    return -EBADMSG;
}

/* All slots of the list are in that state, and the list knows how many it has. */
static int check_list(const struct check *k, const struct pool *p, const struct slot_list *l,
                      uint32_t state, uint32_t *ret_n)
{
    uint32_t n = 0, before = SLOT_NONE;

    for (uint32_t s = l->first; s != SLOT_NONE; before = s, s = p->links[s].next) {
        if (p->table->slots[s].state != state)
            return wrong(k, "slot %u: state %u in a list of state %u", s, p->table->slots[s].state,
                         state);
        if (p->links[s].prev != before || n++ == p->slots)
            return wrong(k, "the list of state %u is not linked right at slot %u", state, s);
    }
    if (n != l->n || l->last != before)
        return wrong(k, "the list of state %u has %u slots and counts %u", state, n, l->n);
    *ret_n = n;
    return 0;
}

static int check_entry(const struct check *k, const struct pool *p, const struct shm_table *t,
                       uint64_t line, uint64_t *passed)
{
    struct shm_entry *e = &p->index->lines[line];
    uint64_t word = shm_load64(&e->word);
    uint32_t slot = shm_word_slot(word);
    const struct shm_meta *m;
    const struct shm_slot *s;

    if (slot >= p->slots)
        return wrong(k, "line %llu names slot %u of %u", (unsigned long long)line, slot, p->slots);
    s = &p->table->slots[slot];
    m = &p->metas->metas[slot];
    if (s->line != line)
        return wrong(k, "slot %u: line %u, but line %llu names it", slot, s->line,
                     (unsigned long long)line);
    if (!(shm_word_state(word) == SHM_LIVE && s->state == SHM_SLOT_LIVE) &&
        !(shm_word_state(word) == SHM_PENDING &&
          (s->state == SHM_SLOT_RESERVED || s->state == SHM_SLOT_IN_FLIGHT)))
        return wrong(k, "slot %u: state %u, its entry %d", slot, s->state, shm_word_state(word));
    if (!shm_entry_is(e, &m->key, s->epoch) || m->epoch != s->epoch)
        return wrong(k, "slot %u: entry and metadata have different keys or epochs", slot);
    *passed += (line - shm_home(t, &m->key)) & t->mask;
    return 0;
}

static int check_index(const struct check *k, const struct pool *p)
{
    uint64_t used = 0, passed = 0, overflow = 0;
    struct shm_table t = shm_table_of(p->index);
    int r = 0;

    for (uint64_t i = 0; i <= t.mask && r == 0; i++) {
        overflow += shm_load32(&p->index->lines[i].overflow);
        if (shm_word_state(shm_load64(&p->index->lines[i].word)) == SHM_EMPTY)
            continue;
        used++;
        r = check_entry(k, p, &t, i, &passed);
    }
    if (r < 0)
        return r;
    if (used !=
        p->count[SHM_SLOT_LIVE] + p->count[SHM_SLOT_RESERVED] + p->count[SHM_SLOT_IN_FLIGHT])
        return wrong(k, "%llu entries for %u live, %u reserved and %u slots in flight",
                     (unsigned long long)used, p->count[SHM_SLOT_LIVE], p->count[SHM_SLOT_RESERVED],
                     p->count[SHM_SLOT_IN_FLIGHT]);
    if (overflow != passed)
        return wrong(k, "overflow counters have rotted: %llu, not %llu",
                     (unsigned long long)overflow, (unsigned long long)passed);
    return 0;
}

static bool is_linked(const struct pool *p, const struct slot *s)
{
    return s->parent != SLOT_NONE && p->slot[s->parent].use == s->parent_use;
}

/* Children are counted where they point to, and whoever has none is a candidate. */
static int check_links(const struct check *k, const struct pool *p)
{
    uint32_t children = 0, links = 0, queued = 0;

    for (uint32_t i = 0; i < p->slots; i++) {
        const struct slot *s = &p->slot[i];
        bool live = p->table->slots[i].state == SHM_SLOT_LIVE;
        bool used = live || p->table->slots[i].state == SHM_SLOT_RESERVED ||
                    p->table->slots[i].state == SHM_SLOT_IN_FLIGHT;

        children += s->children;
        links += is_linked(p, s);
        queued += s->queued;
        if (!used && (s->children || s->parent != SLOT_NONE))
            return wrong(k, "slot %u holds nothing and has %u children, parent %u", i, s->children,
                         s->parent);
        if (s->queued != (live && !s->children))
            return wrong(k, "slot %u: state %u, %u children, %squeued", i, p->table->slots[i].state,
                         s->children, s->queued ? "" : "not ");
        if (is_linked(p, s) && !p->slot[s->parent].children)
            return wrong(k, "slot %u names %u as parent, which has no children", i, s->parent);
    }
    if (children != links)
        return wrong(k, "%u children, %u links to parents", children, links);
    if (queued != p->ops->count(p->policy))
        return wrong(k, "%u slots are queued, the policy has %u", queued, p->ops->count(p->policy));
    return 0;
}

static int check_states(const struct check *k, const struct pool *p)
{
    uint32_t sum = 0, counted[SHM_SLOT_QUARANTINED + 1] = {0};

    for (uint32_t i = 0; i < p->slots; i++) {
        if (p->table->slots[i].state > SHM_SLOT_QUARANTINED)
            return wrong(k, "slot %u: state %u", i, p->table->slots[i].state);
        counted[p->table->slots[i].state]++;
    }
    for (int i = 0; i <= SHM_SLOT_QUARANTINED; i++) {
        if (counted[i] != p->count[i])
            return wrong(k, "state %d: %u in the table, %u counted", i, counted[i], p->count[i]);
        sum += p->count[i];
    }
    return sum == p->slots ? 0 : wrong(k, "%u slots of %u", sum, p->slots);
}

static int check_pool(const struct check *k, struct pool *p)
{
    uint32_t n = 0, reserved = 0;
    int r = check_states(k, p);

    if (r == 0)
        r = check_list(k, p, &p->free, SHM_SLOT_FREE, &n);
    if (r == 0 && n != p->count[SHM_SLOT_FREE])
        r = wrong(k, "%u slots in the list of free ones, %u free", n, p->count[SHM_SLOT_FREE]);
    if (r == 0)
        r = check_list(k, p, &p->quarantine, SHM_SLOT_QUARANTINED, &n);
    if (r == 0 && n != p->count[SHM_SLOT_QUARANTINED])
        r = wrong(k, "%u slots in quarantine, %u counted", n, p->count[SHM_SLOT_QUARANTINED]);
    for (struct list *i = p->attaches.next; r == 0 && i != &p->attaches; i = i->next) {
        r = check_list(k, p, &list_entry(i, struct attach, in_pool)->reserved, SHM_SLOT_RESERVED,
                       &n);
        reserved += n;
    }
    if (r == 0 && reserved != p->count[SHM_SLOT_RESERVED])
        r = wrong(k, "%u slots reserved by sessions, %u counted", reserved,
                  p->count[SHM_SLOT_RESERVED]);
    if (r == 0)
        r = check_links(k, p);
    return r == 0 ? check_index(k, p) : r;
}

static struct tenant held_by(const struct space *s, uint32_t id)
{
    struct tenant sum = {.id = id};

    for (uint32_t i = 0; i < s->n_pools; i++) {
        const struct pool *p = s->pools[i];

        for (uint32_t n = 0; n < p->slots; n++) {
            if (p->slot[n].tenant != id)
                continue;
            if (p->table->slots[n].state == SHM_SLOT_RESERVED) {
                sum.reserved++;
                sum.reserved_bytes += p->part_bytes * p->parts;
            } else if (p->table->slots[n].state == SHM_SLOT_LIVE) {
                sum.resident++;
                sum.resident_bytes += p->part_bytes * p->parts;
            }
        }
    }
    return sum;
}

static int check_tenants(const struct check *k, const struct space *s)
{
    uint64_t resident = 0, live = 0, reserved = 0, held = 0;

    for (size_t i = 0; i < s->tenants.size; i++) {
        const struct tenant *t = &s->tenants.table[i];
        struct tenant real;

        if (!t->used)
            continue;
        real = held_by(s, t->id);
        if (t->reserved != real.reserved || t->resident != real.resident ||
            t->reserved_bytes != real.reserved_bytes || t->resident_bytes != real.resident_bytes)
            return wrong(k, "tenant %u: counted %llu reserved, %llu resident; it is %llu and %llu",
                         t->id, (unsigned long long)t->reserved, (unsigned long long)t->resident,
                         (unsigned long long)real.reserved, (unsigned long long)real.resident);
        resident += t->resident;
        reserved += t->reserved;
    }
    for (uint32_t i = 0; i < s->n_pools; i++) {
        live += s->pools[i]->count[SHM_SLOT_LIVE];
        held += s->pools[i]->count[SHM_SLOT_RESERVED];
    }
    if (resident != live || reserved != held)
        return wrong(k, "tenants hold %llu reserved and %llu resident slots; %llu and %llu are",
                     (unsigned long long)reserved, (unsigned long long)resident,
                     (unsigned long long)held, (unsigned long long)live);
    return 0;
}

static int check_session(const struct check *k, const struct session *s)
{
    uint32_t reserved = 0;

    for (const struct list *i = s->attaches.next; i != &s->attaches; i = i->next)
        reserved += list_entry(i, struct attach, in_session)->reserved.n;
    if (reserved != s->n_reserved)
        return wrong(k, "session %u: %u slots reserved, %u counted", s->id, reserved,
                     s->n_reserved);
    return 0;
}

static int check_engine(const struct check *k, const struct engine *e, uint32_t *sessions)
{
    uint32_t living = 0, members = 0;

    for (const struct list *i = e->members.next; i != &e->members; i = i->next, members++)
        living += list_entry(i, struct session, in_engine)->state != SESSION_LINGERING;
    if (!members || living != e->living || !living)
        return wrong(k, "an engine of %u members, %u of them living, %u counted", members, living,
                     e->living);
    *sessions += members;
    return 0;
}

static int check_sessions(const struct check *k, const struct core *c)
{
    uint32_t n = 0, members = 0;
    int r = 0;

    for (const struct list *i = c->sessions.next; r == 0 && i != &c->sessions; i = i->next, n++)
        r = check_session(k, list_entry(i, struct session, in_core));
    for (const struct list *i = c->engines.next; r == 0 && i != &c->engines; i = i->next)
        r = check_engine(k, list_entry(i, struct engine, in_core), &members);
    if (r == 0 && (n != c->n_sessions || n != members))
        r = wrong(k, "%u sessions, %u in engines, %u counted", n, members, c->n_sessions);
    return r;
}

/* Says where: prefixes the sentence with a name. */
static int in(const struct check *k, int r, const char *space, const char *pool)
{
    char sentence[256];

    if (r == 0)
        return 0;
    snprintf(sentence, sizeof(sentence), "%.200s", k->why);
    return wrong(k, "%s%s%s: %s", space, pool ? "/" : "", pool ? pool : "", sentence);
}

int core_check(struct core *c, char *ret_why, size_t why_bytes)
{
    struct check k = {.why = ret_why, .bytes = why_bytes};
    int r = check_sessions(&k, c);

    for (uint32_t i = 0; i < c->n_pools && r == 0; i++)
        r = in(&k, check_pool(&k, c->pools[i]), c->pools[i]->space->name, c->pools[i]->name);
    for (uint32_t i = 0; i < c->n_spaces && r == 0; i++)
        r = in(&k, check_tenants(&k, &c->spaces[i]), c->spaces[i].name, NULL);
    return r;
}
