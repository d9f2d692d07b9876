/* SPDX-License-Identifier: Apache-2.0 */
/* What administrators ask. Status and Stats answer any role, about the spaces of its socket. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"
#include "version.h"

#define BLOCKS_MAX   1024u
#define STORES_SHOWN 256u

/* Records that one request looks at: there may be many free ones. */
#define LOOKS_MAX 65536u

static int need_admin(struct call *c)
{
    if (c->session->role == ROLE_ADMIN)
        return 0;
    return call_fail(c, -EACCES,
                     "this needs an administrator's socket (role = admin); kvctl takes "
                     "it with -s PATH");
}

/* ---- status */

static void space_status(const struct service *s, struct space *space, Kvd__Proto__SpaceStatus *ret)
{
    kvd__proto__space_status__init(ret);
    ret->name = space->name;
    ret->epoch = space->epoch;
    ret->scheme = space->scheme;
    ret->identity = space->identity;
    ret->pools = space->n_pools;
    ret->offline = (char *)space->offline;
    ret->has_block_tokens = ret->has_objects = true;
    ret->block_tokens = space->block_tokens;
    for (uint32_t i = 0; i < space->n_pools; i++)
        ret->objects += space->pools[i]->count[SHM_SLOT_LIVE];
    for (struct list *i = s->core->sessions.next; i != &s->core->sessions; i = i->next) {
        struct session *x = list_entry(i, struct session, in_core);

        for (struct list *k = x->attaches.next; k != &x->attaches; k = k->next)
            if (list_entry(k, struct attach, in_session)->pool->space == space) {
                ret->sessions++;
                break;
            }
    }
}

static void pool_status(struct pool *p, Kvd__Proto__PoolStatus *ret, Kvd__Proto__PoolInfo *info)
{
    kvd__proto__pool_status__init(ret);
    call_pool_info(p, info);
    ret->info = info;
    ret->free = p->count[SHM_SLOT_FREE];
    ret->reserved = p->count[SHM_SLOT_RESERVED];
    ret->live = p->count[SHM_SLOT_LIVE];
    ret->in_flight = p->count[SHM_SLOT_IN_FLIGHT];
    ret->quarantined = p->count[SHM_SLOT_QUARANTINED];
    ret->pinned = pool_count_pinned(p);
    ret->evicted_total = p->stats.evicted;
    ret->committed_total = p->stats.committed;
    ret->ladder = p->ladder;
    ret->has_low_water = true;
    ret->low_water = p->low_water;
    ret->policy = (char *)p->ops->name;
}

#define PROBLEMS_MAX (CORE_MAX_SPACES + CORE_MAX_POOLS + STORES_SHOWN)

/* What a status message points into. */
struct status_room {
    Kvd__Proto__SpaceStatus space[CORE_MAX_SPACES], *spaces[CORE_MAX_SPACES];
    Kvd__Proto__PoolStatus pool[CORE_MAX_POOLS], *pools[CORE_MAX_POOLS];
    Kvd__Proto__PoolInfo info[CORE_MAX_POOLS];
    Kvd__Proto__SocketStatus socket[64], *sockets[64];
    char problem[PROBLEMS_MAX][1280];
    char *problems[PROBLEMS_MAX];
};

static void add_store_problems(struct call *c, struct status_room *m,
                               Kvd__Proto__StatusReply *reply)
{
    const struct nvme *n = c->service->core->nvme;

    for (uint32_t i = 0; i < nvme_stores(n) && i < STORES_SHOWN; i++) {
        const struct store *st = nvme_store(n, i);
        struct store_status s;

        store_status(st, &s);
        if ((strcmp(s.state, "online") == 0 && !s.problem) ||
            !service_allows(conn_socket(c->conn), store_pool(st)->space))
            continue;
        m->problems[reply->n_problems] = m->problem[reply->n_problems];
        snprintf(m->problem[reply->n_problems++], sizeof(m->problem[0]), "store %s is %s%s%s%s%s",
                 s.name, s.state, s.problem ? ": " : "", s.problem ? s.problem : "",
                 s.fix ? "; fix: " : "", s.fix ? s.fix : "");
    }
}

static void add_problems(struct call *c, struct status_room *m, Kvd__Proto__StatusReply *reply)
{
    for (size_t i = 0; i < reply->n_spaces; i++)
        if (m->space[i].offline) {
            m->problems[reply->n_problems] = m->problem[reply->n_problems];
            snprintf(m->problem[reply->n_problems++], sizeof(m->problem[0]),
                     "space %s is offline: %s; fix: restart kvd", m->space[i].name,
                     m->space[i].offline);
        }
    for (size_t i = 0; i < reply->n_pools; i++) {
        const struct pool *p = core_pool(c->service->core, m->info[i].pool);

        if (p->rung < SEGMENT_TMPFS || strcmp(c->service->hugepages, "off") == 0)
            continue;
        m->problems[reply->n_problems] = m->problem[reply->n_problems];
        snprintf(m->problem[reply->n_problems++], sizeof(m->problem[0]),
                 "pool %s/%s has no hugepages: %s", p->space->name, p->name, p->ladder);
    }
    add_store_problems(c, m, reply);
    reply->problems = m->problems;
}

static int send_status(struct call *c, struct status_room *m)
{
    Kvd__Proto__StatusReply reply = KVD__PROTO__STATUS_REPLY__INIT;
    struct service *s = c->service;
    struct core *core = s->core;

    for (uint32_t i = 0; i < core->n_spaces; i++) {
        if (!service_allows(conn_socket(c->conn), &core->spaces[i]))
            continue;
        m->spaces[reply.n_spaces] = &m->space[reply.n_spaces];
        space_status(s, &core->spaces[i], &m->space[reply.n_spaces++]);
    }
    for (uint32_t i = 0; i < core->n_pools; i++) {
        if (!service_allows(conn_socket(c->conn), core->pools[i]->space))
            continue;
        m->pools[reply.n_pools] = &m->pool[reply.n_pools];
        pool_status(core->pools[i], &m->pool[reply.n_pools], &m->info[reply.n_pools]);
        reply.n_pools++;
    }
    for (size_t i = 0; i < s->n_sockets && i < 64; i++, reply.n_sockets++) {
        m->sockets[i] = &m->socket[i];
        kvd__proto__socket_status__init(&m->socket[i]);
        m->socket[i].path = (char *)s->sockets[i].path;
        m->socket[i].role = (char *)session_role_name((enum session_role)s->sockets[i].role);
        m->socket[i].n_spaces = s->sockets[i].n_spaces;
        m->socket[i].spaces = (char **)s->sockets[i].spaces;
        m->socket[i].connections = server_connections(s->server, &s->sockets[i]);
    }
    reply.spaces = m->spaces;
    reply.pools = m->pools;
    reply.sockets = m->sockets;
    add_problems(c, m, &reply);
    reply.version = (char *)KVD_VERSION;
    reply.pid = (uint64_t)getpid();
    reply.uptime_s = (core_now_ms(core) - core->started_ms) / 1000;
    reply.state = (char *)(core->stopping ? "stopping" : reply.n_problems ? "degraded" : "ready");
    reply.sessions = core->n_sessions;
    reply.connections = server_connections(s->server, NULL);
    reply.runtime_dir = core->runtime_dir;
    reply.hugepages = (char *)s->hugepages;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_STATUS_REPLY;
    c->response.status_reply = &reply;
    return call_reply(c);
}

static int status(struct call *c)
{
    struct status_room *m = calloc(1, sizeof(*m));
    int r = m ? send_status(c, m) : -ENOMEM;

    free(m);
    return r;
}

/* ---- sessions */

struct session_room {
    char engine[20];
    char *spaces[CORE_MAX_SPACES];
    Kvd__Proto__SessionInfo info;
};

static void list_spaces(struct session *s, struct session_room *m)
{
    for (struct list *k = s->attaches.next; k != &s->attaches; k = k->next) {
        struct space *space = list_entry(k, struct attach, in_session)->pool->space;
        size_t i = 0;

        while (i < m->info.n_spaces && m->spaces[i] != space->name)
            i++;
        if (i == m->info.n_spaces)
            m->spaces[m->info.n_spaces++] = space->name;
    }
    m->info.spaces = m->spaces;
}

static void session_info(struct session *s, struct session_room *m)
{
    Kvd__Proto__SessionInfo *x = &m->info;
    uint64_t now = core_now_ms(s->core);
    struct session_pins pins = {.objects = 0};

    kvd__proto__session_info__init(x);
    session_count_pins(s, NULL, &pins);
    x->session = s->id;
    x->pid = (uint32_t)s->pid;
    x->has_uid = x->has_oldest_pin_age_s = x->has_idle_s = true;
    x->uid = s->uid;
    x->role = (char *)session_role_name(s->role);
    x->client = s->client;
    x->state = (char *)session_state_name(s);
    x->age_s = (now - s->created_ms) / 1000;
    x->idle_s = (now - s->active_ms) / 1000;
    x->pinned_objects = pins.objects;
    x->pinned_bytes = pins.bytes;
    x->oldest_pin_age_s = pins.oldest_ms / 1000;
    x->reserved = s->n_reserved;
    x->note = (char *)s->note;
    if (s->engine->token_len) {
        snprintf(m->engine, sizeof(m->engine), "%016llx",
                 (unsigned long long)XXH3_64bits(s->engine->token, s->engine->token_len));
        x->engine = m->engine;
    }
    list_spaces(s, m);
}

static int sessions(struct call *c)
{
    Kvd__Proto__SessionsReply reply = KVD__PROTO__SESSIONS_REPLY__INIT;
    struct core *core = c->service->core;
    struct session_room *m = calloc(core->n_sessions + 1, sizeof(*m));
    Kvd__Proto__SessionInfo **list = calloc(core->n_sessions + 1, sizeof(*list));
    int r = m && list ? need_admin(c) : -ENOMEM;

    for (struct list *i = core->sessions.next; r == 0 && i != &core->sessions; i = i->next) {
        session_info(list_entry(i, struct session, in_core), &m[reply.n_sessions]);
        list[reply.n_sessions] = &m[reply.n_sessions].info;
        reply.n_sessions++;
    }
    if (r == 0) {
        reply.sessions = list;
        c->response.body_case = KVD__PROTO__RESPONSE__BODY_SESSIONS;
        c->response.sessions = &reply;
        r = call_reply(c);
    }
    free(list);
    free(m);
    return r;
}

static int kill_session(struct call *c)
{
    struct session *s = session_by_id(c->service->core, c->request->kill->session);
    int r = need_admin(c);

    if (r < 0)
        return r;
    if (!s)
        return call_fail(c, -ENOENT, "no session %u; `kvctl sessions` lists them",
                         c->request->kill->session);
    r = service_kill(s);
    if (r < 0)
        return call_fail(c, r, "cannot kill pid %d: %s%s", (int)s->pid, strerror(-r),
                         r == -EPERM ? "; kvd does not run as root or as that user" : "");
    log_write(c->service->log, LOG_NOTICE, &(struct log_fields){.session = s->id},
              "pid %d killed by pid %d", (int)s->pid, (int)conn_pid(c->conn));
    return call_reply(c);
}

/* ---- blocks */

struct block_room {
    Kvd__Proto__BlockInfo info;
    Kvd__Proto__Key key, parent;
    Kvd__Proto__Meta meta;
    struct shm_key stored; /* what `key` points to, when it is not in ram */
};

static void fill_key(Kvd__Proto__Key *k, const struct shm_key *from)
{
    kvd__proto__key__init(k);
    k->hash = (ProtobufCBinaryData){.data = (uint8_t *)from->hash, .len = sizeof(from->hash)};
    k->has_group = true;
    k->group = from->group;
}

static void block_info(struct pool *p, uint32_t slot, struct block_room *m)
{
    const struct shm_slot *t = &p->table->slots[slot];
    const struct shm_meta *x = &p->metas->metas[slot];
    Kvd__Proto__BlockInfo *b = &m->info;

    kvd__proto__block_info__init(b);
    kvd__proto__meta__init(&m->meta);
    fill_key(&m->key, &x->key);
    b->slot = slot;
    b->key = &m->key;
    b->state = (char *)(t->state == SHM_SLOT_LIVE ? "live" : "reserved");
    b->bytes = t->state == SHM_SLOT_LIVE ? x->bytes : 0;
    b->pins = pool_pins_of(p, slot);
    b->has_epoch = b->has_parts_done = b->has_age_s = true;
    b->epoch = t->epoch;
    b->parts_done = t->parts_done;
    b->age_s = (core_now_ms(p->core) - p->slot[slot].since_ms) / 1000;
    b->store = (char *)spill_store_of(p, slot);
    b->has_session = t->state == SHM_SLOT_RESERVED;
    b->session = t->session;
    b->meta = &m->meta;
    m->meta.has_position = m->meta.has_tenant = m->meta.has_layout = m->meta.has_checksum = true;
    m->meta.position = x->position;
    m->meta.tenant = x->tenant;
    m->meta.layout = x->layout;
    m->meta.checksum = x->checksum;
    m->meta.has_user = x->user_bytes > 0;
    m->meta.user = (ProtobufCBinaryData){.data = (uint8_t *)x->user, .len = x->user_bytes};
    if (x->has_parent) {
        fill_key(&m->parent, &x->parent);
        m->meta.parent = &m->parent;
    }
}

/* An object as a spill store has it. */
static void stored_info(const struct spill_entry *x, struct block_room *m)
{
    Kvd__Proto__BlockInfo *b = &m->info;

    kvd__proto__block_info__init(b);
    kvd__proto__meta__init(&m->meta);
    m->stored = x->key;
    fill_key(&m->key, &m->stored);
    b->slot = x->number;
    b->key = &m->key;
    b->state = (char *)"stored";
    b->bytes = x->bytes;
    b->has_epoch = true;
    b->epoch = x->epoch;
    b->store = (char *)x->store;
    b->meta = &m->meta;
    m->meta.has_tenant = true;
    m->meta.tenant = x->tenant;
}

/* The records from `cursor` on; returns where to go on. */
static uint64_t list_stored(struct pool *p, uint64_t cursor, uint32_t limit, struct block_room *m,
                            Kvd__Proto__BlockInfo **list, size_t *ret_n)
{
    uint64_t looked = 0;
    struct spill_entry x;

    for (; cursor < spill_records(p) && *ret_n < limit && looked < LOOKS_MAX; cursor++, looked++) {
        if (!spill_entry(p, (uint32_t)cursor, &x))
            continue;
        stored_info(&x, &m[*ret_n]);
        list[*ret_n] = &m[*ret_n].info;
        (*ret_n)++;
    }
    return cursor;
}

static int blocks(struct call *c)
{
    const Kvd__Proto__Blocks *q = c->request->blocks;
    Kvd__Proto__BlocksReply reply = KVD__PROTO__BLOCKS_REPLY__INIT;
    uint32_t limit = q->has_limit && q->limit < BLOCKS_MAX ? q->limit : BLOCKS_MAX;
    uint64_t slot = q->has_cursor ? q->cursor : 0;
    struct block_room *m = calloc(limit + 1, sizeof(*m));
    Kvd__Proto__BlockInfo **list = calloc(limit + 1, sizeof(*list));
    bool nvme = q->tier && strcmp(q->tier, "nvme") == 0;
    struct pool *p = NULL;
    int r = m && list ? need_admin(c) : -ENOMEM;

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r == 0 && nvme)
        slot = list_stored(p, slot, limit, m, list, &reply.n_blocks);
    for (; r == 0 && !nvme && slot < p->slots && reply.n_blocks < limit; slot++) {
        uint32_t state = p->table->slots[slot].state;

        if (state != SHM_SLOT_LIVE && state != SHM_SLOT_RESERVED)
            continue;
        block_info(p, (uint32_t)slot, &m[reply.n_blocks]);
        list[reply.n_blocks] = &m[reply.n_blocks].info;
        reply.n_blocks++;
    }
    if (r == 0) {
        reply.blocks = list;
        reply.has_next = slot < (nvme ? spill_records(p) : p->slots);
        reply.next = slot;
        c->response.body_case = KVD__PROTO__RESPONSE__BODY_BLOCKS;
        c->response.blocks = &reply;
        r = call_reply(c);
    }
    free(list);
    free(m);
    return r;
}

static void why_gone(const struct pool *p, const struct shm_key *key, Kvd__Proto__WhyReply *reply,
                     char *detail, size_t n)
{
    const struct history_record *h = history_find(p->history, key);

    reply->state = (char *)history_name(h ? (enum history_event)h->event : HISTORY_NONE);
    reply->detail = detail;
    if (spill_away(p)) {
        reply->state = (char *)"unknown";
        snprintf(detail, n, "not in memory; spill store %s is not online and may have it",
                 spill_away(p));
        return;
    }
    if (!h) {
        snprintf(detail, n, "no trace of it; the daemon remembers the last events only");
        return;
    }
    reply->has_age_s = true;
    reply->age_s = (core_now_ms(p->core) - h->when_ms) / 1000;
    switch ((enum history_event)h->event) {
    case HISTORY_EVICTED:
        snprintf(detail, n, "it was the coldest object when memory was needed%s",
                 h->detail ? "; it had not been written to a spill store yet" : "");
        break;
    case HISTORY_REFUSED:
        snprintf(detail, n, "%s",
                 (int)h->detail == ENOSPC   ? "every slot was pinned, reserved or quarantined"
                 : (int)h->detail == EDQUOT ? "a quota was used up"
                                            : strerror((int)h->detail));
        break;
    case HISTORY_ABORTED:
        snprintf(detail, n, "session %u gave its slot back", h->detail);
        break;
    case HISTORY_ORPHANED:
        snprintf(detail, n, "session %u died before it committed", h->detail);
        break;
    case HISTORY_RESET:
        snprintf(detail, n, "the space was reset; it is at epoch %u now", p->space->epoch);
        break;
    case HISTORY_REMOVED:
        snprintf(detail, n, "removed by an administrator");
        break;
    case HISTORY_NONE:
        break;
    }
}

static int why(struct call *c)
{
    Kvd__Proto__WhyReply reply = KVD__PROTO__WHY_REPLY__INIT;
    char detail[320] = "";
    struct block_room m;
    struct spill_entry x;
    struct shm_entry *e;
    struct shm_key key;
    struct pool *p;
    int r = need_admin(c);

    if (r == 0)
        r = call_pool(c, c->request->why->pool, &p);
    if (r == 0)
        r = call_key(c, c->request->why->key, &key);
    if (r < 0)
        return r;
    e = index_find(p->index, &key, p->space->epoch);
    if (!e && spill_entry(p, spill_record_of(p, &key, p->space->epoch), &x)) {
        stored_info(&x, &m);
        reply.state = (char *)"present";
        reply.detail = detail;
        reply.block = &m.info;
        snprintf(detail, sizeof(detail), "not in memory; spill store %s/%s/%s has it",
                 p->space->name, p->name, x.store);
    } else if (e) {
        uint64_t word = shm_load64(&e->word);

        block_info(p, shm_word_slot(word), &m);
        reply.state = (char *)(shm_word_state(word) == SHM_PENDING ? "pending" : "present");
        reply.block = &m.info;
    } else {
        why_gone(p, &key, &reply, detail, sizeof(detail));
    }
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_WHY;
    c->response.why = &reply;
    return call_reply(c);
}

/* ---- taking out */

/* Slots that one request goes through: a client asks again, so that nobody waits for the core. */
#define REMOVE_STEP 4096u

static int send_count(struct call *c, uint64_t n, uint64_t skipped, uint64_t next)
{
    Kvd__Proto__CountReply reply = KVD__PROTO__COUNT_REPLY__INIT;

    reply.count = n;
    reply.has_skipped = true;
    reply.skipped = skipped;
    reply.has_next = next != 0;
    reply.next = next;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_COUNT;
    c->response.count = &reply;
    return call_reply(c);
}

/* A step of removing all live objects, or those of a tenant. `after`: where it goes on behind the last
 * slot; 0: nowhere. */
static int remove_step(struct call *c, struct pool *p, const uint32_t *tenant, uint64_t cursor,
                       uint64_t after, uint32_t copies)
{
    uint32_t slots[REMOVE_STEP], n = 0, removed;
    uint64_t end = cursor + REMOVE_STEP < p->slots ? cursor + REMOVE_STEP : p->slots;

    for (uint64_t i = cursor; i < end; i++)
        if (p->table->slots[i].state == SHM_SLOT_LIVE && (!tenant || p->slot[i].tenant == *tenant))
            slots[n++] = (uint32_t)i;
    removed = pool_remove(p, slots, n, HISTORY_REMOVED, copies);
    return send_count(c, removed, n - removed, end < p->slots ? end : after);
}

static int evict_keys(struct call *c, struct pool *p)
{
    const Kvd__Proto__Evict *q = c->request->evict;
    uint64_t n = 0, skipped = 0;

    for (size_t i = 0; i < q->n_keys; i++) {
        struct shm_key key;
        struct shm_entry *e;
        uint32_t slot;
        int r = call_key(c, q->keys[i], &key);

        if (r < 0)
            return r;
        e = index_find(p->index, &key, p->space->epoch);
        slot = e ? shm_word_slot(shm_load64(&e->word)) : SLOT_NONE;
        if (e && !pool_remove(p, &slot, 1, HISTORY_REMOVED, REMOVE_FORGET))
            skipped++;
        else if ((spill_remove(p, &key, p->space->epoch) > 0) | (e != NULL))
            n++;
    }
    return send_count(c, n, skipped, 0);
}

/* First ram, then the records: the cursor goes on behind the last slot. */
static int remove_both(struct call *c, struct pool *p, const uint32_t *tenant, uint64_t cursor)
{
    uint32_t record, removed;

    if (cursor < p->slots)
        return remove_step(c, p, tenant, cursor, p->spill ? p->slots : 0, REMOVE_FORGET);
    record = (uint32_t)(cursor - p->slots);
    removed = spill_remove_tenant(p, tenant, &record);
    return send_count(c, removed, 0, record ? (uint64_t)p->slots + record : 0);
}

static int evict(struct call *c)
{
    const Kvd__Proto__Evict *q = c->request->evict;
    uint64_t n = 0, want = q->has_count ? q->count : 0;
    struct pool *p;
    int r = need_admin(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r < 0)
        return r;
    if (q->n_keys)
        return evict_keys(c, p);
    if (q->has_tenant)
        return remove_both(c, p, &q->tenant, q->has_cursor ? q->cursor : 0);
    if (want > REMOVE_STEP)
        want = REMOVE_STEP;
    while (n < want) {
        uint32_t got = pool_evict(p, (uint32_t)(want - n), HISTORY_REMOVED);

        if (!got)
            break;
        n += got;
    }
    return send_count(c, n, 0, 0);
}

static int flush(struct call *c)
{
    const Kvd__Proto__Flush *q = c->request->flush;
    struct pool *p = NULL;
    int r = need_admin(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r < 0)
        return r;
    if (q->tier && strcmp(q->tier, "ram") == 0)
        return remove_step(c, p, NULL, q->has_cursor ? q->cursor : 0, 0, 0);
    return remove_both(c, p, NULL, q->has_cursor ? q->cursor : 0);
}

int admin_call(struct call *c)
{
    switch (c->request->body_case) {
    case KVD__PROTO__REQUEST__BODY_STATUS:
        return status(c);
    case KVD__PROTO__REQUEST__BODY_SESSIONS:
        return sessions(c);
    case KVD__PROTO__REQUEST__BODY_BLOCKS:
        return blocks(c);
    case KVD__PROTO__REQUEST__BODY_WHY:
        return why(c);
    case KVD__PROTO__REQUEST__BODY_STATS:
        return stats_call(c);
    case KVD__PROTO__REQUEST__BODY_EVICT:
        return evict(c);
    case KVD__PROTO__REQUEST__BODY_FLUSH:
        return flush(c);
    case KVD__PROTO__REQUEST__BODY_KILL:
        return kill_session(c);
    case KVD__PROTO__REQUEST__BODY_SPILL:
        return spill_call(c);
    default:
        return -ENOSYS;
    }
}
