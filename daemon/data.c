/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data path for programs that map nothing: the same core functions, bytes inline in the
 * messages. Pins taken here are counted in the daemon's memory, in the layout of a pin segment, so
 * that eviction sees no difference.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/guard.h"
#include "daemon/pool.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"
#include "shm/lookup.h"

static int need_writer(struct call *c)
{
    if (c->session->role >= ROLE_WRITER)
        return 0;
    return call_fail(c, -EACCES, "this socket has the role reader");
}

/* What one message may ask for: more would keep others waiting. */
#define KEYS_MAX 4096u

/* All keys of a message, or NULL with *ret_status set. free() them. */
static struct shm_key *copy_keys(struct call *c, Kvd__Proto__Key **from, size_t n, int *ret_status)
{
    struct shm_key *keys;

    if (n > KEYS_MAX) {
        *ret_status = call_fail(c, -E2BIG, "at most %u keys in one message", KEYS_MAX);
        return NULL;
    }
    keys = calloc(n ? n : 1, sizeof(*keys));
    *ret_status = keys ? 0 : -ENOMEM;
    for (size_t i = 0; keys && i < n && *ret_status == 0; i++)
        *ret_status = call_key(c, from[i], &keys[i]);
    if (*ret_status == 0)
        return keys;
    free(keys);
    return NULL;
}

static int check_epoch(struct call *c, const struct pool *p, uint32_t epoch)
{
    if (epoch == p->space->epoch)
        return 0;
    return call_fail(c, -ESTALE, "space %s is at epoch %u, you at %u: its weights have changed",
                     p->space->name, p->space->epoch, epoch);
}

static int lookup(struct call *c)
{
    const Kvd__Proto__Lookup *q = c->request->lookup;
    Kvd__Proto__LookupReply reply = KVD__PROTO__LOOKUP_REPLY__INIT;
    struct shm_key *keys;
    uint8_t *states;
    struct pool *p;
    int r = call_pool(c, q->pool, &p);

    if (r < 0)
        return r;
    keys = copy_keys(c, q->keys, q->n_keys, &r);
    if (!keys)
        return r;
    states = malloc(q->n_keys + 1);
    if (states) {
        reply.leading =
            (uint32_t)shm_lookup(p->index, p->nvme_index, keys, q->n_keys, q->epoch, states);
        reply.states = (ProtobufCBinaryData){.data = states, .len = q->n_keys};
        p->stats.lookups += q->n_keys;
        p->stats.lookup_hits += reply.leading;
        c->response.body_case = KVD__PROTO__RESPONSE__BODY_LOOKUP;
        c->response.lookup = &reply;
        r = call_reply(c);
    } else {
        r = -ENOMEM;
    }
    free(states);
    free(keys);
    return r;
}

static uint64_t pinned_bytes(const struct attach *a, size_t more)
{
    return (a->own_pinned + more) * a->pool->part_bytes * a->pool->parts;
}

static int check_pin_quota(struct call *c, const struct attach *a, size_t n)
{
    const struct pool *p = a->pool;
    uint64_t max = p->space->max_pinned_bytes, sum = pinned_bytes(a, n);
    const struct list *i, *all = &c->session->attaches;

    for (i = all->next; max && i != all; i = i->next) {
        const struct attach *other = list_entry(i, struct attach, in_session);

        sum += other != a && other->pool->space == p->space ? pinned_bytes(other, 0) : 0;
    }
    if (!max || sum <= max)
        return 0;
    return call_fail(c, -EDQUOT, "that would pin more than max_pinned of space %s", p->space->name);
}

static int send_pins(struct call *c, const struct shm_pinned *pinned, size_t n, size_t held)
{
    Kvd__Proto__PinReply reply = KVD__PROTO__PIN_REPLY__INIT;
    uint64_t *slots = calloc(2 * n + 1, sizeof(*slots));
    int r;

    if (!slots)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++) {
        slots[i] = pinned[i].slot;
        slots[n + i] = pinned[i].bytes;
    }
    reply.pinned = (uint32_t)held;
    reply.n_slots = reply.n_bytes = n;
    reply.slots = slots;
    reply.bytes = slots + n;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_PIN;
    c->response.pin = &reply;
    r = call_reply(c);
    free(slots);
    return r;
}

static int pin(struct call *c)
{
    const Kvd__Proto__Pin *q = c->request->pin;
    struct shm_pinned *pinned = NULL;
    struct shm_key *keys = NULL;
    struct attach *a;
    struct pool *p;
    size_t n, held = 0;
    int r = call_pool(c, q->pool, &p);

    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r == 0)
        r = attach_own_pins(a);
    if (r == 0)
        r = check_pin_quota(c, a, q->n_keys);
    if (r == 0)
        keys = copy_keys(c, q->keys, q->n_keys, &r);
    if (!keys)
        return r;
    pinned = calloc(q->n_keys + 1, sizeof(*pinned));
    if (pinned) {
        n = shm_pin_keys(p->index, a->own, keys, q->n_keys, q->epoch, q->has_all && q->all, 0,
                         pinned, &held);
        a->own_pinned += held;
        r = send_pins(c, pinned, n, held);
        if (r < 0) { /* nobody will ever release them */
            shm_unpin(p->index, a->own, pinned, n);
            a->own_pinned -= held;
        }
    } else {
        r = -ENOMEM;
    }
    free(pinned);
    free(keys);
    return r;
}

/* Needs no online space, and makes no attach: only what was pinned through this session's own use of
 * the pool can be released (I6). */
static int release(struct call *c)
{
    const Kvd__Proto__Release *q = c->request->release;
    Kvd__Proto__CountReply reply = KVD__PROTO__COUNT_REPLY__INIT;
    struct pool *p = core_pool(c->service->core, q->pool);
    struct attach *a = p ? session_attached(c->session, p) : NULL;

    if (!a)
        return call_fail(c, -ENOENT, "this session has not used pool %u", q->pool);
    for (size_t i = q->n_slots; i-- > 0 && a->own;) { /* tail first */
        struct shm_pinned one = {.slot = (uint32_t)q->slots[i]};

        if (q->slots[i] >= p->slots || !shm_load32(&a->own->pins[q->slots[i]].count))
            continue;
        shm_unpin(p->index, a->own, &one, 1);
        a->own_pinned--;
        reply.count++;
    }
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_COUNT;
    c->response.count = &reply;
    return call_reply(c);
}

/* Where a part of a slot begins in the daemon's own view. */
static uint8_t *part_of(const struct pool *p, uint32_t slot, uint32_t part)
{
    return p->base[part].base + (uint64_t)slot * p->part_bytes;
}

static int truncated(struct call *c, struct pool *p)
{
    space_offline(p->space, "a writer has truncated the memory of its pool");
    return call_fail(c, -EIO, "space %s is offline: %s", p->space->name, p->space->offline);
}

static void copy_meta(const struct shm_meta *m, Kvd__Proto__Meta *ret, Kvd__Proto__Key *parent)
{
    kvd__proto__meta__init(ret);
    ret->has_position = ret->has_tenant = ret->has_layout = ret->has_checksum = true;
    ret->position = m->position;
    ret->tenant = m->tenant;
    ret->layout = m->layout;
    ret->checksum = m->checksum;
    ret->has_user = m->user_bytes > 0;
    ret->user = (ProtobufCBinaryData){.data = (uint8_t *)m->user, .len = m->user_bytes};
    if (!m->has_parent)
        return;
    kvd__proto__key__init(parent);
    parent->hash =
        (ProtobufCBinaryData){.data = (uint8_t *)m->parent.hash, .len = sizeof(m->parent.hash)};
    parent->has_group = true;
    parent->group = m->parent.group;
    ret->parent = parent;
}

static int send_bytes(struct call *c, struct pool *p, uint32_t slot, uint32_t part, uint64_t offset,
                      uint64_t bytes)
{
    Kvd__Proto__ReadReply reply = KVD__PROTO__READ_REPLY__INIT;
    Kvd__Proto__Meta meta;
    Kvd__Proto__Key parent;
    uint8_t *buf = malloc(bytes + 1);
    int r;

    if (!buf)
        return -ENOMEM;
    if (guard_copy(buf, part_of(p, slot, part) + offset, bytes) < 0) {
        free(buf);
        return truncated(c, p);
    }
    copy_meta(&p->metas->metas[slot], &meta, &parent);
    reply.data = (ProtobufCBinaryData){.data = buf, .len = bytes};
    reply.part_bytes = p->metas->metas[slot].bytes;
    reply.meta = &meta;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_READ;
    c->response.read = &reply;
    r = call_reply(c);
    free(buf);
    return r;
}

static int read_bytes(struct call *c)
{
    const Kvd__Proto__Read *q = c->request->read;
    uint64_t offset = q->has_offset ? q->offset : 0, bytes, max = c->service->core->max_inline;
    uint32_t part = q->has_part ? q->part : 0, slot;
    struct shm_entry *e;
    struct shm_key key;
    struct pool *p;
    int r = call_pool(c, q->pool, &p);

    if (r == 0)
        r = check_epoch(c, p, q->epoch);
    if (r == 0)
        r = call_key(c, q->key, &key);
    if (r < 0)
        return r;
    if (part >= p->parts)
        return call_fail(c, -EINVAL, "pool %s has %u parts", p->name, p->parts);
    e = index_find(p->index, &key, q->epoch);
    if (!e || shm_word_state(shm_load64(&e->word)) != SHM_LIVE)
        return call_fail(c, -ENOENT, "a miss");
    slot = shm_word_slot(shm_load64(&e->word));
    if (offset > p->metas->metas[slot].bytes)
        return call_fail(c, -EINVAL, "offset lies behind the end of the part");
    bytes = p->metas->metas[slot].bytes - offset;
    if (q->has_bytes && q->bytes < bytes)
        bytes = q->bytes;
    slot_touch(p, slot);
    return send_bytes(c, p, slot, part, offset, bytes < max ? bytes : max);
}

static int reserve(struct call *c)
{
    const Kvd__Proto__Reserve *q = c->request->reserve;
    Kvd__Proto__ReserveReply reply = KVD__PROTO__RESERVE_REPLY__INIT;
    Kvd__Proto__Reservation *all = NULL, **list = NULL;
    struct shm_key *keys = NULL, first;
    struct attach *a;
    struct pool *p;
    int r = need_writer(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r == 0 && q->parent)
        r = call_key(c, q->parent, &first);
    if (r == 0)
        keys = copy_keys(c, q->keys, q->n_keys, &r);
    if (!keys)
        return r;
    all = calloc(q->n_keys + 1, sizeof(*all));
    list = calloc(q->n_keys + 1, sizeof(*list));
    for (size_t i = 0; all && list && i < q->n_keys; i++) {
        const struct shm_key *parent = i == 0                     ? (q->parent ? &first : NULL)
                                       : q->has_chain && q->chain ? &keys[i - 1]
                                                                  : NULL;
        struct reservation got;

        pool_reserve(p, a, &keys[i], parent, q->epoch, q->has_tenant ? q->tenant : 0, &got);
        kvd__proto__reservation__init(&all[i]);
        all[i].status = got.status;
        all[i].has_ticket = all[i].has_slot = got.status == RESERVE_NEW;
        all[i].ticket = got.ticket;
        all[i].slot = got.slot;
        list[i] = &all[i];
    }
    reply.n_reservations = q->n_keys;
    reply.reservations = list;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_RESERVE;
    c->response.reserve = &reply;
    r = all && list ? call_reply(c) : -ENOMEM;
    for (size_t i = 0; r < 0 && all && list && i < q->n_keys; i++)
        if (all[i].has_ticket)
            pool_abort(p, a, all[i].ticket);
    free(list);
    free(all);
    free(keys);
    return r;
}

static int write_bytes(struct call *c)
{
    const Kvd__Proto__Write *q = c->request->write;
    uint64_t offset = q->has_offset ? q->offset : 0;
    uint32_t part = q->has_part ? q->part : 0, slot;
    struct attach *a;
    struct pool *p;
    int r = need_writer(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r < 0)
        return r;
    if (part >= p->parts || offset > p->part_bytes || q->data.len > p->part_bytes - offset)
        return call_fail(c, -EINVAL, "outside of the slot: part %u of %u, bytes %llu + %zu of %llu",
                         part, p->parts, (unsigned long long)offset, q->data.len,
                         (unsigned long long)p->part_bytes);
    r = pool_ticket(p, a, q->ticket, &slot);
    if (r < 0)
        return call_fail(c, r, "that ticket is not yours, or is gone");
    if (q->data.len && guard_copy(part_of(p, slot, part) + offset, q->data.data, q->data.len) < 0)
        return truncated(c, p);
    return call_reply(c);
}

static int commit(struct call *c)
{
    const Kvd__Proto__Commit *q = c->request->commit;
    const Kvd__Proto__Meta *m = q->meta;
    struct commit w = {.ticket = q->ticket,
                       .part = q->has_part ? q->part : 0,
                       .bytes = q->bytes,
                       .position = m && m->has_position ? m->position : 0,
                       .layout = m && m->has_layout ? m->layout : 0,
                       .checksum = m && m->has_checksum ? m->checksum : 0};
    struct attach *a;
    struct pool *p;
    int r = need_writer(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r < 0)
        return r;
    if (m && m->has_user) {
        if (m->user.len > SHM_USER_BYTES)
            return call_fail(c, -EINVAL, "user metadata has at most %u bytes", SHM_USER_BYTES);
        w.user_bytes = (uint32_t)m->user.len;
        w.user = m->user.data;
    }
    r = pool_commit(p, a, &w);
    return r < 0 ? r : call_reply(c);
}

static int abort_all(struct call *c)
{
    const Kvd__Proto__Abort *q = c->request->abort;
    Kvd__Proto__CountReply reply = KVD__PROTO__COUNT_REPLY__INIT;
    struct attach *a;
    struct pool *p;
    int r = need_writer(c);

    if (r == 0)
        r = call_pool(c, q->pool, &p);
    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r < 0)
        return r;
    for (size_t i = 0; i < q->n_tickets; i++)
        reply.count += pool_abort(p, a, q->tickets[i]) == 0;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_COUNT;
    c->response.count = &reply;
    return call_reply(c);
}

static int observe(struct call *c)
{
    const Kvd__Proto__Observe *q = c->request->observe;
    struct shm_key *keys;
    struct pool *p;
    int r = call_pool(c, q->pool, &p);

    if (r < 0)
        return r;
    keys = copy_keys(c, q->keys, q->n_keys, &r);
    if (!keys)
        return r;
    for (size_t i = q->n_keys; i-- > 0;) /* tail first: heads stay younger */
        pool_observe(p, &keys[i], q->epoch);
    free(keys);
    return call_reply(c);
}

/* ---- fetch: answered when the last of its keys is */

static void send_fetched(struct fetch_call *call)
{
    Kvd__Proto__FetchReply reply = KVD__PROTO__FETCH_REPLY__INIT;
    Kvd__Proto__Response response = KVD__PROTO__RESPONSE__INIT;

    list_remove(&call->in_session);
    reply.n_statuses = call->n;
    reply.statuses = call->statuses;
    response.id = call->id;
    response.body_case = KVD__PROTO__RESPONSE__BODY_FETCH;
    response.fetch = &reply;
    if (call->session && call->session->conn)
        conn_reply(call->session->conn, &response, NULL, 0);
    free(call);
}

static struct fetch_call *fetch_call_new(struct call *c, uint32_t n)
{
    struct fetch_call *call = calloc(1, sizeof(*call) + n * sizeof(call->statuses[0]));

    if (!call)
        return NULL;
    call->session = c->session;
    call->id = c->request->id;
    call->n = n;
    call->left = n + 1; /* one for us: it must not end while it is being filled */
    call->done = send_fetched;
    list_append(&c->session->calls, &call->in_session);
    return call;
}

static void settle_key(struct fetch_call *call, uint32_t i, int status)
{
    if (status == 1)
        return;
    call->statuses[i] = status;
    call->left--;
}

static int fetch(struct call *c)
{
    const Kvd__Proto__Fetch *q = c->request->fetch;
    bool chain = q->has_chain && q->chain;
    struct fetch_call *call = NULL;
    struct shm_key *keys = NULL;
    struct attach *a;
    struct pool *p;
    int stopped = 0, r = call_pool(c, q->pool, &p);

    if (r == 0)
        r = session_attach(c->session, p, false, &a);
    if (r == 0)
        keys = copy_keys(c, q->keys, q->n_keys, &r);
    if (!keys)
        return r;
    call = fetch_call_new(c, (uint32_t)q->n_keys);
    for (uint32_t i = 0; call && i < q->n_keys; i++) {
        struct fetch_ask ask = {.key = keys[i],
                                .epoch = q->epoch,
                                .deadline_ms = q->has_deadline_ms ? q->deadline_ms : 0,
                                .call = call,
                                .index = i};
        int status = chain && stopped ? stopped : spill_fetch(a, &ask);

        stopped = status < 0 ? status : stopped;
        settle_key(call, i, status);
    }
    free(keys);
    if (!call)
        return -ENOMEM;
    if (--call->left == 0)
        send_fetched(call);
    return 0;
}

int data_call(struct call *c)
{
    switch (c->request->body_case) {
    case KVD__PROTO__REQUEST__BODY_LOOKUP:
        return lookup(c);
    case KVD__PROTO__REQUEST__BODY_PIN:
        return pin(c);
    case KVD__PROTO__REQUEST__BODY_RELEASE:
        return release(c);
    case KVD__PROTO__REQUEST__BODY_READ:
        return read_bytes(c);
    case KVD__PROTO__REQUEST__BODY_RESERVE:
        return reserve(c);
    case KVD__PROTO__REQUEST__BODY_WRITE:
        return write_bytes(c);
    case KVD__PROTO__REQUEST__BODY_COMMIT:
        return commit(c);
    case KVD__PROTO__REQUEST__BODY_ABORT:
        return abort_all(c);
    case KVD__PROTO__REQUEST__BODY_OBSERVE:
        return observe(c);
    case KVD__PROTO__REQUEST__BODY_FETCH:
        return fetch(c);
    default:
        return -ENOSYS;
    }
}
