/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of the control sockets: attaching, spaces, pools. The rest is in data.c and admin.c. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"
#include "version.h"

#define PROTOCOL_MIN 1u
#define PROTOCOL_MAX 1u

int call_fail(struct call *c, int status, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(c->message, sizeof(c->message), fmt, args);
    va_end(args);
    return status;
}

int call_reply(struct call *c)
{
    c->response.id = c->request->id;
    return conn_reply(c->conn, &c->response, c->fds, c->n_fds);
}

int call_pool(struct call *c, uint32_t id, struct pool **ret_pool)
{
    struct pool *p = core_pool(c->service->core, id);

    if (!p || !service_allows(conn_socket(c->conn), p->space))
        return call_fail(c, -ENOENT, "no pool %u on this socket", id);
    if (p->space->offline)
        return call_fail(c, -EIO, "space %s is offline: %s", p->space->name, p->space->offline);
    *ret_pool = p;
    return 0;
}

int call_key(struct call *c, const Kvd__Proto__Key *from, struct shm_key *ret_key)
{
    if (!from->hash.len || from->hash.len > sizeof(ret_key->hash))
        return call_fail(c, -EINVAL, "a key has 1 to 32 bytes, not %zu", from->hash.len);
    *ret_key = (struct shm_key){.group = from->has_group ? from->group : 0};
    memcpy(ret_key->hash, from->hash.data, from->hash.len);
    return 0;
}

/* ---- Hello */

static int check_versions(struct call *c, const Kvd__Proto__Hello *h)
{
    if (h->version_min > PROTOCOL_MAX || h->version_max < PROTOCOL_MIN ||
        h->version_min > h->version_max)
        return call_fail(c, -EPROTONOSUPPORT,
                         "no common protocol version: kvd %s speaks %u to %u, you %u to %u; update "
                         "the older of the two",
                         KVD_VERSION, PROTOCOL_MIN, PROTOCOL_MAX, h->version_min, h->version_max);
    /* The pidfd is that of whoever called connect(). A child that inherited the socket is somebody
     * else. */
    if (h->has_start_time && conn_start_time(c->conn) && h->start_time != conn_start_time(c->conn))
        return call_fail(c, -EPERM,
                         "the process that connected is not the one that says hello; "
                         "connect after fork, not before");
    return 0;
}

static int resume(struct call *c, const Kvd__Proto__Hello *h, struct session **ret_session)
{
    struct session *s;

    if (!h->has_resume)
        return -ENOENT;
    s = session_find(c->service->core, h->resume.data, h->resume.len, conn_pid(c->conn),
                     conn_start_time(c->conn));
    if (!s || s->broken)
        return -ENOENT;
    /* It got its role from its socket, and another socket may show other spaces. */
    if (s->role != (enum session_role)conn_socket(c->conn)->role)
        return -ENOENT;
    service_part(s); /* the old connection, if its end has not been noticed yet */
    s->state = SESSION_ATTACHED;
    *ret_session = s;
    return 0;
}

static int attach_new(struct call *c, const Kvd__Proto__Hello *h, struct session **ret_session)
{
    bool shm = h->has_shm && h->shm;
    uint32_t wish = h->has_ring_entries && h->ring_entries ? h->ring_entries : 1024;
    struct session_spec spec = {
        .pid = conn_pid(c->conn),
        .uid = conn_uid(c->conn),
        .start_time = conn_start_time(c->conn),
        .role = (enum session_role)conn_socket(c->conn)->role,
        .client = h->client,
        .token = h->has_engine_token ? h->engine_token.data : NULL,
        .token_len = h->has_engine_token ? (uint32_t)h->engine_token.len : 0,
        .ring_entries = shm ? wish : 0,
        .socket = conn_socket(c->conn),
        .socket_max = conn_socket(c->conn)->max_connections,
    };
    struct session *s;
    int pidfd, r = session_new(c->service->core, &spec, &s);

    if (r == -EUSERS)
        return call_fail(
            c, r,
            "there are as many sessions as max_sessions, or the socket's max_connections, allows; "
            "`kvctl sessions` lists them");
    if (r < 0)
        return call_fail(c, r, "cannot make a session: %s", strerror(-r));
    pidfd = conn_take_pidfd(c->conn);
    r = pidfd < 0 ? -ESRCH : service_watch(c->service, s, pidfd);
    if (r < 0) {
        if (pidfd >= 0)
            close(pidfd);
        session_end(s, false);
        return call_fail(c, r, "cannot watch your process: %s", strerror(-r));
    }
    *ret_session = s;
    return 0;
}

static int hello(struct call *c)
{
    const Kvd__Proto__Hello *h = c->request->hello;
    Kvd__Proto__HelloReply reply = KVD__PROTO__HELLO_REPLY__INIT;
    struct core *core = c->service->core;
    struct session *s = NULL;
    bool resumed;
    int r;

    if (c->session)
        return call_fail(c, -EALREADY, "this connection has said hello before");
    if (h->has_engine_token && h->engine_token.len > 64)
        return call_fail(c, -EINVAL, "an engine token has at most 64 bytes");
    r = check_versions(c, h);
    if (r < 0)
        return r;
    resumed = resume(c, h, &s) == 0;
    if (!resumed) {
        r = attach_new(c, h, &s);
        if (r < 0)
            return r;
    }
    s->conn = c->conn;
    conn_set_user(c->conn, s);
    reply.version = PROTOCOL_MAX;
    reply.instance = (ProtobufCBinaryData){.data = core->instance, .len = sizeof(core->instance)};
    reply.session = s->id;
    reply.has_cookie = true;
    reply.cookie = (ProtobufCBinaryData){.data = s->cookie, .len = sizeof(s->cookie)};
    reply.role = s->role;
    reply.has_resumed = true;
    reply.resumed = resumed;
    reply.has_max_inline_bytes = reply.has_max_frame_bytes = true;
    reply.max_inline_bytes = core->max_inline;
    reply.max_frame_bytes = core->max_frame;
    reply.daemon = (char *)"kvd " KVD_VERSION;
    if (s->shm) {
        c->fds[c->n_fds++] = core->core_segment.reader_fd;
        c->fds[c->n_fds++] = s->segment.fd;
    }
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_HELLO;
    c->response.hello = &reply;
    return call_reply(c);
}

static int bye(struct call *c)
{
    struct session *s = c->session;
    int r = call_reply(c);

    service_part(s);
    session_end(s, false);
    return r;
}

/* ---- spaces */

void call_pool_info(const struct pool *p, Kvd__Proto__PoolInfo *ret)
{
    kvd__proto__pool_info__init(ret);
    ret->pool = p->id;
    ret->name = (char *)p->name;
    ret->slots = p->slots;
    ret->part_bytes = p->part_bytes;
    ret->parts = p->parts;
    ret->chunk_slots = p->chunk_slots;
    ret->chunks = p->chunks;
    ret->page_bytes = p->page_bytes;
    ret->backing = (char *)segment_rung_name(p->rung);
    ret->space = (char *)p->space->name;
    ret->has_records = p->nvme_index != NULL;
    ret->records = p->nvme_index ? p->nvme_index->slots : 0;
}

/* The space of a request, by number. */
static int space_of(struct call *c, uint32_t id, struct space **ret_space)
{
    struct core *core = c->service->core;

    if (id >= core->n_spaces || !service_allows(conn_socket(c->conn), &core->spaces[id]))
        return call_fail(c, -ENOENT, "no space %u on this socket", id);
    *ret_space = &core->spaces[id];
    return 0;
}

static int send_space(struct call *c, struct space *s)
{
    Kvd__Proto__SpaceOpenReply reply = KVD__PROTO__SPACE_OPEN_REPLY__INIT;
    Kvd__Proto__PoolInfo info[CORE_MAX_POOLS], *list[CORE_MAX_POOLS];

    for (uint32_t i = 0; i < s->n_pools; i++) {
        call_pool_info(s->pools[i], &info[i]);
        list[i] = &info[i];
    }
    reply.space = s->id;
    reply.epoch = s->epoch;
    reply.n_pools = s->n_pools;
    reply.pools = list;
    reply.scheme = s->scheme;
    reply.has_first_parent = s->first_parent_len > 0;
    reply.first_parent = (ProtobufCBinaryData){.data = s->first_parent, .len = s->first_parent_len};
    reply.has_block_tokens = true;
    reply.block_tokens = s->block_tokens;
    reply.identity = s->identity;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_SPACE_OPEN;
    c->response.space_open = &reply;
    return call_reply(c);
}

static int space_open(struct call *c)
{
    const Kvd__Proto__SpaceOpen *q = c->request->space_open;
    struct space *s = core_space(c->service->core, q->name);
    struct space_claim claim = {
        .scheme = q->scheme,
        .identity = q->identity,
        .first_parent = q->first_parent.data,
        .first_parent_len = q->has_first_parent ? q->first_parent.len : 0,
        .vector_key = q->vector_key.data,
        .vector_key_len = q->has_vector_key ? q->vector_key.len : 0,
        .decides = q->has_write && q->write,
    };
    int r;

    if (!s || !service_allows(conn_socket(c->conn), s))
        return call_fail(c, -ENOENT, "no space \"%.64s\" on this socket; `kvctl spaces` lists them",
                         q->name);
    if (s->offline)
        return call_fail(c, -EIO, "space %s is offline: %s", s->name, s->offline);
    if (q->has_write && q->write && c->session->role < ROLE_WRITER)
        return call_fail(c, -EACCES,
                         "this socket has the role reader: open the space without "
                         "write, or use a writer's socket");
    r = space_check_claim(s, &claim, c->message, sizeof(c->message));
    return r < 0 ? r : send_space(c, s);
}

/* A SpaceReset whose epoch is on its way to the stores: answered before, a crash could bring back what the
 * old weights have stored. */
struct pending_reset {
    struct list link; /* in service->resets */
    struct session *session;
    struct space *space;
    uint64_t id;
    uint32_t epoch;
    uint64_t until_ns; /* a store that is being opened, or hangs, is waited for so long */
};

#define RESET_NS 5000000000u

static int remember_reset(struct call *c, struct space *s)
{
    struct pending_reset *p = malloc(sizeof(*p));

    if (!p)
        return -ENOMEM;
    *p = (struct pending_reset){.session = c->session,
                                .space = s,
                                .id = c->request->id,
                                .epoch = s->epoch,
                                .until_ns = core_now_ns(s->core) + RESET_NS};
    list_append(&c->service->resets, &p->link);
    return 0;
}

static void answer_reset(const struct pending_reset *p)
{
    Kvd__Proto__SpaceResetReply reply = KVD__PROTO__SPACE_RESET_REPLY__INIT;
    Kvd__Proto__Response response = KVD__PROTO__RESPONSE__INIT;

    reply.epoch = p->epoch;
    response.id = p->id;
    response.body_case = KVD__PROTO__RESPONSE__BODY_SPACE_RESET;
    response.space_reset = &reply;
    if (p->session->conn)
        conn_reply(p->session->conn, &response, NULL, 0);
}

void service_answer_resets(struct service *s)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &s->resets) {
        struct pending_reset *p = list_entry(i, struct pending_reset, link);

        if (!spill_reset_done(p->space) && core_now_ns(s->core) < p->until_ns)
            continue;
        list_remove(i);
        answer_reset(p);
        free(p);
    }
}

void service_drop_resets(struct service *s, const struct session *session)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &s->resets) {
        struct pending_reset *p = list_entry(i, struct pending_reset, link);

        if (p->session != session)
            continue;
        list_remove(i);
        free(p);
    }
}

static int reset(struct call *c)
{
    Kvd__Proto__SpaceResetReply reply = KVD__PROTO__SPACE_RESET_REPLY__INIT;
    struct space *s = NULL;
    int r = space_of(c, c->request->space_reset->space, &s);

    if (r < 0)
        return r;
    if (c->session->role < ROLE_WRITER)
        return call_fail(c, -EACCES, "only a writer may reset a space");
    space_reset(s);
    if (c->service->core->nvme)
        nvme_run(c->service->core->nvme); /* begins to write it */
    if (!spill_reset_done(s))
        return remember_reset(c, s);
    reply.epoch = s->epoch;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_SPACE_RESET;
    c->response.space_reset = &reply;
    return call_reply(c);
}

static int pool_open(struct call *c)
{
    Kvd__Proto__PoolOpenReply reply = KVD__PROTO__POOL_OPEN_REPLY__INIT;
    Kvd__Proto__PoolInfo info;
    struct attach *a;
    struct pool *p;
    int r = call_pool(c, c->request->pool_open->pool, &p);

    if (r < 0)
        return r;
    if (!c->session->shm)
        return call_fail(c, -EINVAL, "this session has no shared memory: say hello with shm");
    r = session_attach(c->session, p, true, &a);
    if (r < 0)
        return call_fail(c, r, "cannot make the pin segment: %s", strerror(-r));
    call_pool_info(p, &info);
    reply.info = &info;
    c->fds[c->n_fds++] = p->index_segment.reader_fd;
    c->fds[c->n_fds++] = p->meta_segment.reader_fd;
    c->fds[c->n_fds++] = a->segment.fd;
    if (p->spill)
        c->fds[c->n_fds++] = spill_index_fd(p);
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_POOL_OPEN;
    c->response.pool_open = &reply;
    return call_reply(c);
}

static int chunk_map(struct call *c)
{
    const Kvd__Proto__ChunkMap *q = c->request->chunk_map;
    Kvd__Proto__ChunkMapReply reply = KVD__PROTO__CHUNK_MAP_REPLY__INIT;
    uint64_t mask = q->has_part_mask ? q->part_mask : UINT64_MAX;
    int views = q->has_write && q->write ? 2 : 1;
    struct pool *p;
    int r = call_pool(c, q->pool, &p);

    if (r < 0)
        return r;
    if (!c->session->shm)
        return call_fail(c, -EINVAL, "this session has no shared memory: say hello with shm");
    if (views == 2 && c->session->role < ROLE_WRITER)
        return call_fail(c, -EACCES, "only a writer may map a pool writable");
    if (q->chunk >= p->chunks)
        return call_fail(c, -EINVAL, "pool %u has %u chunks", p->id, p->chunks);
    for (int w = 0; w < views; w++)
        for (uint32_t i = 0; i < p->parts; i++) {
            const struct segment *s = &p->data[q->chunk * p->parts + i];

            if (mask >> i & 1)
                c->fds[c->n_fds++] = w ? s->fd : s->reader_fd;
        }
    reply.bytes = p->data[q->chunk * p->parts].bytes;
    c->response.body_case = KVD__PROTO__RESPONSE__BODY_CHUNK_MAP;
    c->response.chunk_map = &reply;
    return call_reply(c);
}

/* ---- */

static int answer(struct call *c)
{
    int r;

    if (c->request->body_case == KVD__PROTO__REQUEST__BODY_HELLO)
        return hello(c);
    if (!c->session)
        return call_fail(c, -EPROTO, "say hello first");
    c->session->active_ms = core_now_ms(c->service->core);
    switch (c->request->body_case) {
    case KVD__PROTO__REQUEST__BODY_BYE:
        return bye(c);
    case KVD__PROTO__REQUEST__BODY_PING:
        return call_reply(c);
    case KVD__PROTO__REQUEST__BODY_WAKE: /* the rings are looked at before the loop sleeps */
        return 0;
    case KVD__PROTO__REQUEST__BODY_SPACE_OPEN:
        return space_open(c);
    case KVD__PROTO__REQUEST__BODY_SPACE_RESET:
        return reset(c);
    case KVD__PROTO__REQUEST__BODY_POOL_OPEN:
        return pool_open(c);
    case KVD__PROTO__REQUEST__BODY_CHUNK_MAP:
        return chunk_map(c);
    default:
        r = data_call(c);
        if (r == -ENOSYS)
            r = admin_call(c);
        return r == -ENOSYS ? call_fail(c, r, "kvd %s does not know this request", KVD_VERSION) : r;
    }
}

void dispatch(struct service *s, struct conn *conn, const Kvd__Proto__Request *request)
{
    struct call c = {.service = s,
                     .conn = conn,
                     .session = conn_user(conn),
                     .request = request,
                     .response = KVD__PROTO__RESPONSE__INIT};
    int r = answer(&c);

    if (r < 0 && conn_is_open(conn))
        conn_status(conn, request->id, r, c.message[0] ? c.message : strerror(-r));
}
