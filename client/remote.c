/* SPDX-License-Identifier: Apache-2.0 */
/* The data path through the socket: bytes are copied, nothing is mapped. */
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEYS_MAX = 1024, /* in one message */
};

static int check(struct kvd_pool *pool)
{
    if (!pool)
        return -EINVAL;
    return handle_forked(pool->kvd) ? -ECHILD : 0;
}

static int nonsense(struct kvd *kvd, const char *what)
{
    return handle_fail(kvd, -EPROTO, "the daemon's answer to %s makes no sense", what);
}

static uint32_t epoch_of(const struct kvd_pool *pool)
{
    return atomic_load(&pool->space->epoch);
}

static void put_key(Kvd__Proto__Key *to, const struct kvd_key *from)
{
    kvd__proto__key__init(to);
    to->hash.data = (uint8_t *)from->hash; /* only read */
    to->hash.len = sizeof(from->hash);
    to->has_group = 1;
    to->group = from->group;
}

/* The keys of one message. */
struct key_list {
    Kvd__Proto__Key key[KEYS_MAX], *list[KEYS_MAX];
};

static void put_keys(struct key_list *to, const struct kvd_key *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        put_key(&to->key[i], &keys[i]);
        to->list[i] = &to->key[i];
    }
}

/* ---- lookup */

static int take_states(struct kvd *kvd, const Kvd__Proto__LookupReply *reply, size_t n,
                       uint8_t *states)
{
    if (reply->states.len != n)
        return nonsense(kvd, "Lookup");
    for (size_t i = 0; i < n; i++)
        if (reply->states.data[i] > KVD_PENDING)
            return nonsense(kvd, "Lookup");
    memcpy(states, reply->states.data, n);
    return 0;
}

static int lookup_some(struct kvd_pool *pool, const struct kvd_key *keys, size_t n, uint8_t *states)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Lookup lookup = KVD__PROTO__LOOKUP__INIT;
    struct control_reply reply = {0};
    struct key_list some;
    int r;

    put_keys(&some, keys, n);
    lookup.pool = pool->id;
    lookup.epoch = epoch_of(pool);
    lookup.n_keys = n;
    lookup.keys = some.list;
    request.body_case = KVD__PROTO__REQUEST__BODY_LOOKUP;
    request.lookup = &lookup;
    r = handle_round_trip(pool->kvd, pool->space, &request, KVD__PROTO__RESPONSE__BODY_LOOKUP,
                          CALL_AGAIN, &reply);
    if (r < 0)
        return r;
    r = take_states(pool->kvd, reply.response->lookup, n, states);
    control_reply_free(&reply);
    return r;
}

static size_t cached(const uint8_t *states, size_t n)
{
    size_t i = 0;

    while (i < n && (states[i] == KVD_RAM || states[i] == KVD_NVME))
        i++;
    return i;
}

ssize_t kvd_remote_lookup(struct kvd_pool *pool, const struct kvd_key *keys, size_t n,
                          uint8_t *ret_states)
{
    uint8_t states[KEYS_MAX];
    size_t leading = 0, at = 0;
    int r = check(pool);

    if (r < 0)
        return r;
    if (n && !keys)
        return handle_fail(pool->kvd, -EINVAL, "no keys");
    while (at < n && (ret_states || leading == at)) {
        size_t k = n - at < KEYS_MAX ? n - at : KEYS_MAX;

        r = lookup_some(pool, keys + at, k, states);
        if (r < 0)
            return r;
        if (ret_states)
            memcpy(ret_states + at, states, k);
        if (leading == at)
            leading += cached(states, k);
        at += k;
    }
    return (ssize_t)leading;
}

/* ---- fetch */

static int take_statuses(struct kvd *kvd, const Kvd__Proto__FetchReply *reply, size_t n,
                         int32_t *statuses)
{
    if (reply->n_statuses != n)
        return nonsense(kvd, "Fetch");
    for (size_t i = 0; i < n; i++)
        if (reply->statuses[i] > 0)
            return nonsense(kvd, "Fetch");
    memcpy(statuses, reply->statuses, n * sizeof(*statuses));
    return 0;
}

/* At most KEYS_MAX keys; under handle_lock(). `ms`: 0: as many as the daemon gives. */
static int fetch_some(struct kvd_pool *pool, const struct kvd_key *keys, size_t n, bool chain,
                      uint32_t ms, int32_t *statuses)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Fetch fetch = KVD__PROTO__FETCH__INIT;
    struct control_reply reply = {0};
    struct key_list some;
    int r;

    put_keys(&some, keys, n);
    fetch.pool = pool->id;
    fetch.epoch = epoch_of(pool);
    fetch.n_keys = n;
    fetch.keys = some.list;
    fetch.has_chain = 1;
    fetch.chain = chain;
    fetch.has_deadline_ms = ms != 0;
    fetch.deadline_ms = ms;
    request.body_case = KVD__PROTO__REQUEST__BODY_FETCH;
    request.fetch = &fetch;
    r = handle_call_long(pool->kvd, pool->space, &request, KVD__PROTO__RESPONSE__BODY_FETCH,
                         CALL_AGAIN, ms ? ms : FETCH_MS, &reply);
    if (r < 0)
        return r;
    r = take_statuses(pool->kvd, reply.response->fetch, n, statuses);
    control_reply_free(&reply);
    return r;
}

/* With the lock for one message at a time, so that others get a turn. */
static int fetch_locked(struct kvd_pool *pool, const struct kvd_fetch *q, size_t at, size_t n,
                        uint32_t ms, int32_t *statuses)
{
    int r = handle_lock(pool->kvd, handle_deadline(pool->kvd));

    if (r < 0)
        return r;
    r = fetch_some(pool, q->keys + at, n, q->chain, ms, statuses + at);
    handle_unlock(pool->kvd);
    return r;
}

static uint32_t left_ms(const struct kvd_fetch *q, uint64_t until_ns)
{
    uint64_t now = frame_clock();

    if (!q->deadline_ms)
        return 0;
    return until_ns > now + 1000000 ? (uint32_t)((until_ns - now) / 1000000) : 1;
}

/* The first status that is not 0 is also that of the rest of a chain. */
static bool chain_ends(const struct kvd_fetch *q, size_t at, size_t n, int32_t *statuses)
{
    int32_t status = 0;

    for (size_t i = at; q->chain && i < at + n && !status; i++)
        status = statuses[i];
    for (size_t i = at + n; status && i < q->n; i++)
        statuses[i] = status;
    return status != 0;
}

static int fetch_all(struct kvd_pool *pool, const struct kvd_fetch *q, int32_t *statuses)
{
    uint64_t until_ns = control_deadline(q->deadline_ms);
    int r = 0;

    for (size_t at = 0, n; at < q->n && r == 0; at += n) {
        n = q->n - at < KEYS_MAX ? q->n - at : KEYS_MAX;
        r = fetch_locked(pool, q, at, n, left_ms(q, until_ns), statuses);
        if (r == 0 && chain_ends(q, at, n, statuses))
            break;
    }
    return r;
}

ssize_t kvd_remote_fetch(struct kvd_pool *pool, const struct kvd_fetch *request,
                         int32_t *ret_status)
{
    ssize_t resident = 0;
    int r = check(pool);

    if (r < 0)
        return r;
    if (!request || request->chain > 1 || (request->n && (!request->keys || !ret_status)))
        return handle_fail(pool->kvd, -EINVAL,
                           "kvd_remote_fetch: keys, room for their statuses, chain is 0 or 1");
    for (size_t i = 0; i < request->n; i++)
        ret_status[i] = UNANSWERED;
    r = fetch_all(pool, request, ret_status);
    for (size_t i = 0; i < request->n; i++) {
        if (ret_status[i] == UNANSWERED)
            ret_status[i] = r;
        resident += ret_status[i] == 0;
    }
    return r < 0 ? r : resident;
}

/* ---- get */

struct getting {
    struct kvd_pool *pool;
    const struct kvd_key *key;
    uint32_t part;
    uint8_t *buf;
    uint64_t bytes;        /* of buf */
    uint64_t length;       /* committed */
    struct kvd_meta *meta; /* NULL: not wanted */
    uint64_t piece;        /* copied by the last read */
};

static int take_meta(struct kvd *kvd, const Kvd__Proto__Meta *from, struct kvd_meta *to)
{
    *to = (struct kvd_meta){0};
    if (!from)
        return 0;
    if (from->user.len > sizeof(to->user) ||
        (from->parent && from->parent->hash.len > sizeof(to->parent.hash)))
        return nonsense(kvd, "Read");
    to->position = from->position;
    to->layout = from->layout;
    to->checksum = from->checksum;
    to->tenant = from->tenant;
    to->user_bytes = (uint32_t)from->user.len;
    if (from->user.len)
        memcpy(to->user, from->user.data, from->user.len);
    if (from->parent) {
        to->has_parent = 1;
        to->parent.group = from->parent->group;
        memcpy(to->parent.hash, from->parent->hash.data, from->parent->hash.len);
    }
    return 0;
}

static int take_piece(struct getting *g, uint64_t offset, uint64_t wanted,
                      const Kvd__Proto__ReadReply *reply)
{
    struct kvd *kvd = g->pool->kvd;
    uint64_t got = reply->data.len;

    if (reply->part_bytes > g->pool->info.part_bytes || reply->part_bytes < offset ||
        got > wanted || got > reply->part_bytes - offset)
        return nonsense(kvd, "Read");
    /* Nothing came although something is left: the next answer would not be better. */
    if (!got && wanted && reply->part_bytes > offset)
        return nonsense(kvd, "Read");
    if (offset && reply->part_bytes != g->length)
        return nonsense(kvd, "Read");
    if (got)
        memcpy(g->buf + offset, reply->data.data, got);
    g->length = reply->part_bytes;
    g->piece = got;
    return g->meta && !offset ? take_meta(kvd, reply->meta, g->meta) : 0;
}

static int read_piece(struct getting *g, uint64_t offset)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Read read_ = KVD__PROTO__READ__INIT;
    uint64_t most = control_hello(g->pool->kvd->control)->max_inline;
    struct control_reply reply = {0};
    Kvd__Proto__Key key;
    int r;

    put_key(&key, g->key);
    read_.pool = g->pool->id;
    read_.epoch = epoch_of(g->pool);
    read_.key = &key;
    read_.has_part = read_.has_offset = read_.has_bytes = 1;
    read_.part = g->part;
    read_.offset = offset;
    read_.bytes = g->bytes - offset < most ? g->bytes - offset : most;
    request.body_case = KVD__PROTO__REQUEST__BODY_READ;
    request.read = &read_;
    r = handle_call(g->pool->kvd, g->pool->space, &request, KVD__PROTO__RESPONSE__BODY_READ,
                    CALL_AGAIN, &reply);
    if (r < 0)
        return r;
    r = take_piece(g, offset, read_.bytes, reply.response->read);
    control_reply_free(&reply);
    return r;
}

static int read_all(struct getting *g)
{
    uint64_t at = 0;
    int r;

    do {
        r = read_piece(g, at);
        at += g->piece;
    } while (r == 0 && at < g->bytes && at < g->length);
    return r;
}

static int take_pin(struct kvd *kvd, const Kvd__Proto__PinReply *reply, uint64_t *ret_slot)
{
    if (!reply->pinned)
        return handle_fail(kvd, -ENOENT, "a miss");
    if (reply->pinned != 1 || reply->n_slots != 1)
        return nonsense(kvd, "Pin");
    *ret_slot = reply->slots[0];
    return 0;
}

static int pin(const struct getting *g, uint64_t *ret_slot)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Pin pin_ = KVD__PROTO__PIN__INIT;
    struct control_reply reply = {0};
    Kvd__Proto__Key key, *list = &key;
    int r;

    put_key(&key, g->key);
    pin_.pool = g->pool->id;
    pin_.epoch = epoch_of(g->pool);
    pin_.n_keys = 1;
    pin_.keys = &list;
    request.body_case = KVD__PROTO__REQUEST__BODY_PIN;
    request.pin = &pin_;
    r = handle_call(g->pool->kvd, g->pool->space, &request, KVD__PROTO__RESPONSE__BODY_PIN, 0,
                    &reply);
    if (r < 0)
        return r;
    r = take_pin(g->pool->kvd, reply.response->pin, ret_slot);
    control_reply_free(&reply);
    return r;
}

/* Posted, not called: its answer matters to nobody, and it must not cover up the error of a read.
 */
static void unpin(const struct getting *g, uint64_t slot)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Release release = KVD__PROTO__RELEASE__INIT;

    release.pool = g->pool->id;
    release.n_slots = 1;
    release.slots = &slot;
    request.body_case = KVD__PROTO__REQUEST__BODY_RELEASE;
    request.release = &release;
    if (control_post(g->pool->kvd->control, &request) < 0)
        control_hang_up(g->pool->kvd->control);
}

/* What comes in pieces is pinned meanwhile: all pieces are of one object. A session that is lost
 * takes the pin along, so then the pieces are not joined. */
static int get_resident(struct getting *g)
{
    struct kvd *kvd = g->pool->kvd;
    uint32_t session;
    uint64_t slot = 0;
    int r;

    if (g->bytes <= control_hello(kvd->control)->max_inline)
        return read_all(g);
    r = pin(g, &slot);
    if (r < 0)
        return r;
    session = control_hello(kvd->control)->session;
    r = read_all(g);
    if (control_hello(kvd->control)->session != session)
        return r < 0 ? r : handle_fail(kvd, -ENOTCONN, "the session was lost while reading");
    unpin(g, slot);
    return r;
}

/* A miss may be in a spill store: then it is brought back, once. */
static int get_locked(struct getting *g)
{
    int r = get_resident(g);
    int32_t status;

    if (r != -ENOENT || !g->pool->info.records)
        return r;
    r = fetch_some(g->pool, g->key, 1, false, 0, &status);
    if (r < 0)
        return r;
    if (status < 0)
        return handle_fail(g->pool->kvd, status == -EINPROGRESS ? -ENOENT : status,
                           "a miss in ram, and not to be had from the spill store: %s",
                           strerror(-status));
    return get_resident(g);
}

ssize_t kvd_remote_get(struct kvd_pool *pool, const struct kvd_key *key, uint32_t part, void *buf,
                       size_t bytes, struct kvd_meta *ret_meta)
{
    struct kvd_meta meta;
    struct getting g = {.pool = pool, .key = key, .part = part, .buf = buf, .bytes = bytes};
    int r = check(pool);

    if (r < 0)
        return r;
    if (!key || (bytes && !buf) || part >= pool->info.parts)
        return handle_fail(pool->kvd, -EINVAL,
                           "kvd_remote_get: no key, no buffer, or no such part");
    g.meta = ret_meta ? &meta : NULL;
    r = handle_lock(pool->kvd, handle_deadline(pool->kvd));
    if (r < 0)
        return r;
    r = get_locked(&g);
    handle_unlock(pool->kvd);
    if (r < 0)
        return r;
    if (ret_meta)
        *ret_meta = meta;
    return (ssize_t)g.length;
}

/* ---- put */

struct putting {
    struct kvd_pool *pool;
    const struct kvd_key *key;
    const struct kvd_meta *meta;
    const uint8_t *buf;
    uint64_t bytes;
    uint64_t ticket;
};

static int take_ticket(struct putting *p, const Kvd__Proto__ReserveReply *reply)
{
    struct kvd *kvd = p->pool->kvd;
    int32_t status;

    if (reply->n_reservations != 1)
        return nonsense(kvd, "Reserve");
    status = reply->reservations[0]->status;
    p->ticket = reply->reservations[0]->ticket;
    if (status < 0)
        return handle_fail(kvd, status, "the daemon refused a slot: %s", strerror(-status));
    if (status == KVD_PRESENT || status == KVD_IN_PROGRESS)
        return handle_fail(kvd, -EEXIST,
                           status == KVD_PRESENT ? "the object is stored already"
                                                 : "another writer is at it");
    return status == KVD_NEW && reply->reservations[0]->has_ticket ? 0 : nonsense(kvd, "Reserve");
}

/* Should the answer come too late, the id tells whose slot has to be given back. */
static int reserve(struct putting *p)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Reserve reserve_ = KVD__PROTO__RESERVE__INIT;
    struct control_reply reply = {0};
    Kvd__Proto__Key key, parent, *list = &key;
    int r;

    put_key(&key, p->key);
    reserve_.pool = p->pool->id;
    reserve_.epoch = epoch_of(p->pool);
    reserve_.n_keys = 1;
    reserve_.keys = &list;
    if (p->meta && p->meta->has_parent) {
        put_key(&parent, &p->meta->parent);
        reserve_.parent = &parent;
    }
    reserve_.has_tenant = p->meta != NULL;
    reserve_.tenant = p->meta ? p->meta->tenant : 0;
    request.id = (uint64_t)p->pool->id << 32;
    request.body_case = KVD__PROTO__REQUEST__BODY_RESERVE;
    request.reserve = &reserve_;
    r = handle_call(p->pool->kvd, p->pool->space, &request, KVD__PROTO__RESPONSE__BODY_RESERVE, 0,
                    &reply);
    if (r < 0)
        return r;
    r = take_ticket(p, reply.response->reserve);
    control_reply_free(&reply);
    return r;
}

static int write_piece(const struct putting *p, uint64_t offset, uint64_t bytes)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Write write_ = KVD__PROTO__WRITE__INIT;

    write_.pool = p->pool->id;
    write_.ticket = p->ticket;
    write_.has_offset = 1;
    write_.offset = offset;
    write_.data.data = (uint8_t *)p->buf + offset; /* only read */
    write_.data.len = bytes;
    request.body_case = KVD__PROTO__REQUEST__BODY_WRITE;
    request.write = &write_;
    return handle_call(p->pool->kvd, p->pool->space, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                       CALL_AGAIN, NULL);
}

static int commit(const struct putting *p)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Commit commit_ = KVD__PROTO__COMMIT__INIT;
    Kvd__Proto__Meta meta = KVD__PROTO__META__INIT;

    if (p->meta) {
        meta.has_position = meta.has_layout = meta.has_checksum = 1;
        meta.position = p->meta->position;
        meta.layout = p->meta->layout;
        meta.checksum = p->meta->checksum;
        meta.has_user = p->meta->user_bytes > 0;
        meta.user.data = (uint8_t *)p->meta->user;
        meta.user.len = p->meta->user_bytes;
        commit_.meta = &meta;
    }
    commit_.pool = p->pool->id;
    commit_.ticket = p->ticket;
    commit_.bytes = p->bytes;
    request.body_case = KVD__PROTO__REQUEST__BODY_COMMIT;
    request.commit = &commit_;
    return handle_call(p->pool->kvd, p->pool->space, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                       CALL_AGAIN, NULL);
}

static int put_locked(struct putting *p)
{
    int r = reserve(p);

    if (r < 0)
        return r;
    for (uint64_t at = 0; at < p->bytes && r == 0;) {
        uint64_t most = control_hello(p->pool->kvd->control)->max_inline;
        uint64_t piece = p->bytes - at < most ? p->bytes - at : most;

        r = write_piece(p, at, piece);
        at += piece;
    }
    if (r == 0)
        r = commit(p);
    if (r < 0 && !atomic_load(&p->pool->space->stale))
        orphans_add(p->pool->kvd, p->pool->id, p->ticket);
    return r;
}

int kvd_remote_put(struct kvd_pool *pool, const struct kvd_key *key, const struct kvd_meta *meta,
                   const void *buf, size_t bytes)
{
    struct putting p = {.pool = pool, .key = key, .meta = meta, .buf = buf, .bytes = bytes};
    int r = check(pool);

    if (r < 0)
        return r;
    if (!key || !buf || !bytes || bytes > pool->info.part_bytes || pool->info.parts != 1 ||
        (meta && meta->user_bytes > sizeof(meta->user)))
        return handle_fail(pool->kvd, -EINVAL,
                           "kvd_remote_put: an object of 1 to %llu bytes and at most %zu bytes of "
                           "metadata, into a pool of one part (this has %u)",
                           (unsigned long long)pool->info.part_bytes, sizeof(meta->user),
                           pool->info.parts);
    r = handle_lock(pool->kvd, handle_deadline(pool->kvd));
    if (r < 0)
        return r;
    r = put_locked(&p);
    handle_unlock(pool->kvd);
    return r;
}
