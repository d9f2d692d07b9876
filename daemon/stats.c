/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers for `kvctl stats`: OpenMetrics names, base units, one table that says what each is. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/pool.h"
#include "daemon/service.h"

struct metric {
    const char *name, *help;
    size_t offset; /* of a uint64_t in its struct */
};

#define POOL_METRIC(name, field, help)                                                             \
    {                                                                                              \
        name, help, offsetof(struct pool_stats, field)                                             \
    }
#define CORE_METRIC(name, field, help)                                                             \
    {                                                                                              \
        name, help, offsetof(struct core_stats, field)                                             \
    }

static const struct metric pool_metrics[] = {
    POOL_METRIC("kvd_committed_objects_total", committed, "Objects that became visible"),
    POOL_METRIC("kvd_committed_bytes_total", committed_bytes, "Bytes of them"),
    POOL_METRIC("kvd_evicted_objects_total", evicted, "Objects evicted for memory"),
    POOL_METRIC("kvd_removed_objects_total", removed, "Objects removed by an administrator"),
    POOL_METRIC("kvd_reset_objects_total", reset, "Objects dropped because the weights changed"),
    POOL_METRIC("kvd_aborted_reservations_total", aborted, "Slots given back by their writer"),
    POOL_METRIC("kvd_orphaned_reservations_total", orphaned, "Slots whose writer died"),
    POOL_METRIC("kvd_reserve_new_total", reserve_new, "Keys reserved: a slot was granted"),
    POOL_METRIC("kvd_reserve_pending_total", reserve_pending, "Keys that another writer had"),
    POOL_METRIC("kvd_reserve_present_total", reserve_present, "Keys that were stored already"),
    POOL_METRIC("kvd_reserve_refused_total", reserve_refused, "Keys refused: no slot, or a quota"),
    POOL_METRIC("kvd_eviction_restored_total", restored,
                "Taken for eviction or removal, then found pinned"),
    POOL_METRIC("kvd_eviction_pinned_total", pins_in_way, "Candidates that were pinned"),
    POOL_METRIC("kvd_observed_keys_total", observed, "Uses reported by engines"),
    POOL_METRIC("kvd_socket_lookup_keys_total", lookups, "Keys looked up through a socket"),
    POOL_METRIC("kvd_socket_lookup_hits_total", lookup_hits, "Leading hits among them"),
};

static const struct metric core_metrics[] = {
    CORE_METRIC("kvd_ring_requests_total", requests, "Requests taken from rings"),
    CORE_METRIC("kvd_wakes_sent_total", wakes_sent, "Wake-ups sent to processes"),
    CORE_METRIC("kvd_sessions_made_total", sessions, "Sessions that were made"),
    CORE_METRIC("kvd_sessions_reaped_total", reaped, "Sessions that were buried"),
    CORE_METRIC("kvd_sessions_broken_total", broken, "Sessions whose memory made no sense"),
};

static const struct {
    const char *name, *help;
    enum shm_slot_state state;
} slot_metrics[] = {
    {"kvd_slots_free", "Slots that are free", SHM_SLOT_FREE},
    {"kvd_slots_reserved", "Slots being written", SHM_SLOT_RESERVED},
    {"kvd_slots_live", "Slots that hold an object", SHM_SLOT_LIVE},
    {"kvd_slots_in_flight", "Slots with an I/O on them", SHM_SLOT_IN_FLIGHT},
    {"kvd_slots_quarantined", "Slots that a dead writer may still write to", SHM_SLOT_QUARANTINED},
};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define PER_POOL (COUNT(pool_metrics) + COUNT(slot_metrics) + 2)
#define OF_CORE  (COUNT(core_metrics) + 2)

struct stats_room {
    size_t n, max;
    Kvd__Proto__Stat *stat, **list;
    char (*names)[132]; /* per pool */
};

static void add(struct stats_room *m, const char *name, const char *help, uint64_t value,
                bool gauge, char *pool)
{
    Kvd__Proto__Stat *s = &m->stat[m->n];

    kvd__proto__stat__init(s);
    s->name = (char *)name;
    s->help = (char *)help;
    s->value = value;
    s->has_gauge = true;
    s->gauge = gauge;
    s->pool = pool;
    s->tier = (char *)(pool ? "ram" : NULL);
    m->list[m->n++] = s;
}

static uint64_t value_at(const void *base, size_t offset)
{
    return *(const uint64_t *)((const char *)base + offset);
}

static void add_pool(struct stats_room *m, const struct pool *p)
{
    char *name = m->names[p->id];

    snprintf(name, sizeof(m->names[0]), "%s/%s", p->space->name, p->name);
    for (size_t i = 0; i < COUNT(pool_metrics); i++)
        add(m, pool_metrics[i].name, pool_metrics[i].help,
            value_at(&p->stats, pool_metrics[i].offset), false, name);
    for (size_t i = 0; i < COUNT(slot_metrics); i++)
        add(m, slot_metrics[i].name, slot_metrics[i].help, p->count[slot_metrics[i].state], true,
            name);
    add(m, "kvd_slots", "Slots of the pool", p->slots, true, name);
    add(m, "kvd_pool_bytes", "Memory of the pool", p->slots * p->part_bytes * p->parts, true, name);
}

static void add_core(struct stats_room *m, const struct service *s)
{
    for (size_t i = 0; i < COUNT(core_metrics); i++)
        add(m, core_metrics[i].name, core_metrics[i].help,
            value_at(&s->core->stats, core_metrics[i].offset), false, NULL);
    add(m, "kvd_sessions", "Attached processes", s->core->n_sessions, true, NULL);
    add(m, "kvd_connections", "Control connections", server_connections(s->server, NULL), true,
        NULL);
}

int stats_call(struct call *c)
{
    Kvd__Proto__StatsReply reply = KVD__PROTO__STATS_REPLY__INIT;
    const Kvd__Proto__Stats *q = c->request->stats;
    struct core *core = c->service->core;
    struct stats_room m = {.max = OF_CORE + core->n_pools * PER_POOL};
    int r = -ENOMEM;

    m.stat = calloc(m.max, sizeof(*m.stat));
    m.list = calloc(m.max, sizeof(*m.list));
    m.names = calloc(core->n_pools + 1, sizeof(*m.names));
    if (m.stat && m.list && m.names) {
        if (!q->has_pool)
            add_core(&m, c->service);
        for (uint32_t i = 0; i < core->n_pools; i++)
            if (service_allows(conn_socket(c->conn), core->pools[i]->space) &&
                (!q->has_pool || q->pool == i))
                add_pool(&m, core->pools[i]);
        reply.n_stats = m.n;
        reply.stats = m.list;
        c->response.body_case = KVD__PROTO__RESPONSE__BODY_STATS;
        c->response.stats = &reply;
        r = call_reply(c);
    }
    free(m.names);
    free(m.list);
    free(m.stat);
    return r;
}
