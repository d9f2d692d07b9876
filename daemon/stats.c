/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers for `kvctl stats`: OpenMetrics names, base units, one table that says what each is. */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/pool.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"

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

#define SPILL_METRIC(name, field, help)                                                            \
    {                                                                                              \
        name, help, offsetof(struct spill_stats, field)                                            \
    }
#define STORE_METRIC(name, field, help)                                                            \
    {                                                                                              \
        name, help, offsetof(struct store_stats, field)                                            \
    }

/* Keys that were asked for sum up: ram + nvme + miss + refused. Of those in nvme, some time out or fail. */
static const struct metric spill_metrics[] = {
    SPILL_METRIC("kvd_fetch_ram_keys_total", fetch_ram, "Keys fetched that were resident"),
    SPILL_METRIC("kvd_fetch_nvme_keys_total", fetch_nvme, "Keys fetched that a store had"),
    SPILL_METRIC("kvd_fetch_shared_keys_total", fetch_shared,
                 "Of them: somebody else had begun to fetch them"),
    SPILL_METRIC("kvd_fetch_miss_keys_total", fetch_miss, "Keys fetched that are in no tier"),
    SPILL_METRIC("kvd_fetch_refused_keys_total", fetch_refused,
                 "Keys not fetched: no slot, a quota, or a writer has them"),
    SPILL_METRIC("kvd_fetch_timeout_keys_total", fetch_timeout, "Keys whose deadline passed"),
    SPILL_METRIC("kvd_fetch_failed_objects_total", fetch_failed, "Objects that could not be read"),
    SPILL_METRIC("kvd_promoted_objects_total", promoted, "Objects brought back to ram"),
    SPILL_METRIC("kvd_promoted_bytes_total", promoted_bytes, "Bytes of them"),
    SPILL_METRIC("kvd_evicted_clean_objects_total", evicted_clean,
                 "Objects that left ram with a copy in a store"),
    SPILL_METRIC("kvd_evicted_unspilled_objects_total", evicted_unspilled,
                 "Objects admitted to a store that left ram before they were written"),
    SPILL_METRIC("kvd_spill_orphans_total", orphans,
                 "Objects not written because their parent is in no tier"),
    SPILL_METRIC("kvd_spill_refused_total", refused,
                 "Objects not written because no store could take them"),
};

/* Summed over the stores of a pool. */
static const struct metric store_metrics[] = {
    STORE_METRIC("kvd_spilled_objects_total", written_objects, "Objects written to stores"),
    STORE_METRIC("kvd_spilled_bytes_total", written_bytes, "Bytes of them"),
    STORE_METRIC("kvd_store_written_bytes_total", physical_written,
                 "Bytes the devices were asked to write, tables and retries included"),
    STORE_METRIC("kvd_store_read_bytes_total", physical_read,
                 "Bytes the devices were asked to read, tables and retries included"),
    STORE_METRIC("kvd_store_evicted_objects_total", evicted, "Objects that left stores for others"),
    STORE_METRIC("kvd_store_broken_objects_total", broken,
                 "Objects dropped because their bytes were not those written"),
    STORE_METRIC("kvd_store_errors_total", errors, "Transfers that failed"),
    STORE_METRIC("kvd_store_timeouts_total", timeouts, "Times a device did not answer"),
    STORE_METRIC("kvd_store_retries_total", retries,
                 "Transfers that went on after an interruption"),
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
#define PER_POOL                                                                                   \
    (COUNT(pool_metrics) + COUNT(slot_metrics) + 2 + COUNT(spill_metrics) + COUNT(store_metrics) + \
     4)
#define OF_CORE (COUNT(core_metrics) + 2)

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

static uint64_t sum_of_stores(const struct pool *p, size_t offset)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < nvme_stores(p->core->nvme); i++) {
        const struct store *st = nvme_store(p->core->nvme, i);

        if (store_pool(st) == p)
            sum += value_at(store_stats(st), offset);
    }
    return sum;
}

static uint64_t queued_objects(const struct pool *p)
{
    for (uint32_t i = 0; i < nvme_stores(p->core->nvme); i++) {
        struct store_status s;

        if (store_pool(nvme_store(p->core->nvme, i)) != p)
            continue;
        store_status(nvme_store(p->core->nvme, i), &s);
        return s.queued + s.writing;
    }
    return 0;
}

static void add_nvme(struct stats_room *m, const struct pool *p, char *name)
{
    size_t first = m->n;
    struct spill_totals t;

    spill_totals(p, &t);
    for (size_t i = 0; i < COUNT(spill_metrics); i++)
        add(m, spill_metrics[i].name, spill_metrics[i].help,
            value_at(spill_stats(p), spill_metrics[i].offset), false, name);
    for (size_t i = 0; i < COUNT(store_metrics); i++)
        add(m, store_metrics[i].name, store_metrics[i].help,
            sum_of_stores(p, store_metrics[i].offset), false, name);
    add(m, "kvd_stored_objects", "Objects in spill stores", t.used, true, name);
    add(m, "kvd_store_records", "Objects that the stores can hold", t.records, true, name);
    add(m, "kvd_store_bytes", "Bytes that the stores can hold", t.bytes, true, name);
    add(m, "kvd_spill_queued_objects", "Objects that wait to be written", queued_objects(p), true,
        name);
    for (size_t i = first; i < m->n; i++)
        m->stat[i].tier = (char *)"nvme";
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
    if (p->spill)
        add_nvme(m, p, name);
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
