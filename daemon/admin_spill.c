/* SPDX-License-Identifier: Apache-2.0 */
/* Spill stores for administrators: how they are, and what is to be done with them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"

struct store_room {
    struct store_status status;
    Kvd__Proto__StoreStatus info;
    Kvd__Proto__StoreTask task;
};

static void task_info(const struct task_status *from, Kvd__Proto__StoreTask *ret)
{
    kvd__proto__store_task__init(ret);
    ret->name = (char *)from->name;
    ret->done = from->done;
    ret->total = from->total;
    ret->unit = (char *)from->unit;
    ret->running = from->running;
    ret->has_status = !from->running;
    ret->status = from->status;
    ret->result = from->running ? NULL : (char *)from->result;
}

#define SET(field, value) (b->has_##field = true, b->field = (value))

static void store_info(const struct store *st, struct store_room *m)
{
    struct store_status *s = &m->status;
    Kvd__Proto__StoreStatus *b = &m->info;

    store_status(st, s);
    kvd__proto__store_status__init(b);
    b->name = s->name;
    b->path = (char *)s->path;
    b->state = (char *)s->state;
    b->problem = (char *)s->problem;
    b->fix = (char *)s->fix;
    b->io = (char *)s->io;
    b->note = (char *)s->note;
    b->admission = (char *)s->admission;
    SET(bytes, s->bytes);
    SET(records, s->records);
    SET(used, s->used);
    SET(queued, s->queued);
    SET(writing, s->writing);
    SET(reading, s->reading);
    SET(written_bytes, s->stats.physical_written);
    SET(read_bytes, s->stats.physical_read);
    SET(errors, s->stats.errors + s->stats.timeouts + s->stats.broken);
    SET(epoch, s->epoch);
    SET(bandwidth, s->bandwidth);
    if (s->task.name) {
        task_info(&s->task, &m->task);
        b->task = &m->task;
    }
}

static int act(struct call *c, struct store *st, enum spill_action action)
{
    const Kvd__Proto__Spill *q = c->request->spill;
    char why[384] = "";
    struct store_status s;
    int r = store_act(st, action, q->has_force && q->force, q->has_rate ? q->rate : 0, why,
                      sizeof(why));

    store_status(st, &s);
    if (r < 0)
        return call_fail(c, r, "store %s: %s", s.name, why[0] ? why : strerror(-r));
    log_write(c->service->log, LOG_NOTICE, NULL, "store %s: %s asked for by pid %d", s.name,
              kvd__proto__spill__action__descriptor.values[q->action].name, (int)conn_pid(c->conn));
    return 0;
}

static bool is_meant(const struct call *c, const struct store *st)
{
    const Kvd__Proto__Spill *q = c->request->spill;
    struct store_status s;

    if (!service_allows(conn_socket(c->conn), store_pool(st)->space))
        return false;
    store_status(st, &s);
    return !q->store || !q->store[0] || strcmp(q->store, s.name) == 0;
}

static int send_stores(struct call *c, uint32_t n)
{
    Kvd__Proto__SpillReply reply = KVD__PROTO__SPILL_REPLY__INIT;
    struct store_room *m = calloc(n + 1, sizeof(*m));
    Kvd__Proto__StoreStatus **list = calloc(n + 1, sizeof(*list));
    int r = m && list ? 0 : -ENOMEM;

    for (uint32_t i = 0; i < n && r == 0; i++) {
        const struct store *st = nvme_store(c->service->core->nvme, i);

        if (!is_meant(c, st))
            continue;
        store_info(st, &m[reply.n_stores]);
        list[reply.n_stores] = &m[reply.n_stores].info;
        reply.n_stores++;
    }
    if (r == 0) {
        reply.stores = list;
        c->response.body_case = KVD__PROTO__RESPONSE__BODY_SPILL;
        c->response.spill = &reply;
        r = call_reply(c);
    }
    free(list);
    free(m);
    return r;
}

static int find_action(struct call *c, enum spill_action *ret)
{
    static const enum spill_action actions[] = {
        [KVD__PROTO__SPILL__ACTION__FORMAT] = SPILL_FORMAT,
        [KVD__PROTO__SPILL__ACTION__SCRUB] = SPILL_SCRUB,
        [KVD__PROTO__SPILL__ACTION__TRIM] = SPILL_TRIM,
        [KVD__PROTO__SPILL__ACTION__ONLINE] = SPILL_ONLINE,
        [KVD__PROTO__SPILL__ACTION__OFFLINE] = SPILL_OFFLINE,
        [KVD__PROTO__SPILL__ACTION__SYNC] = SPILL_SYNC,
        [KVD__PROTO__SPILL__ACTION__STOP] = SPILL_STOP,
    };
    const Kvd__Proto__Spill *q = c->request->spill;

    if ((unsigned)q->action >= sizeof(actions) / sizeof(actions[0]))
        return call_fail(c, -ENOSYS, "this kvd does not know that action");
    if (c->session->role != ROLE_ADMIN)
        return call_fail(c, -EACCES,
                         "this needs an administrator's socket (role = admin); kvctl "
                         "takes it with -s PATH");
    if (q->action == KVD__PROTO__SPILL__ACTION__FORMAT && (!q->store || !q->store[0]))
        return call_fail(c, -EINVAL, "say which store is to be formatted");
    *ret = actions[q->action];
    return 0;
}

int spill_call(struct call *c)
{
    const Kvd__Proto__Spill *q = c->request->spill;
    uint32_t n = nvme_stores(c->service->core->nvme), meant = 0;
    enum spill_action action = SPILL_STOP;
    int r;

    for (uint32_t i = 0; i < n; i++)
        meant += is_meant(c, nvme_store(c->service->core->nvme, i));
    if (q->store && q->store[0] && !meant)
        return call_fail(c, -ENOENT, "no store \"%.200s\" on this socket; `kvctl spill` lists them",
                         q->store);
    if (!q->has_action || q->action == KVD__PROTO__SPILL__ACTION__STATUS)
        return send_stores(c, n);
    r = find_action(c, &action);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < n; i++) {
        struct store *st = nvme_store(c->service->core->nvme, i);

        int one = is_meant(c, st) ? act(c, st, action) : 0;

        r = r < 0 ? r : one; /* the others get their turn all the same */
    }
    return r < 0 ? r : send_stores(c, n);
}
