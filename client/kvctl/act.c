/* SPDX-License-Identifier: Apache-2.0 */
/* Commands that do something: ping, wait, evict, flush, kill; and version. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "out.h"
#include "version.h"

/* ---- ping, wait, version */

static const char *role_name(uint32_t role)
{
    static const char *const names[] = {"?", "reader", "writer", "admin"};

    return role < sizeof(names) / sizeof(names[0]) ? names[role] : names[0];
}

static int ping(struct ctl *c, uint64_t *ret_ns)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping body = KVD__PROTO__PING__INIT;
    struct control_reply reply;
    uint64_t start = frame_clock();
    int r;

    request.body_case = KVD__PROTO__REQUEST__BODY_PING;
    request.ping = &body;
    r = ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET, &reply);
    if (r)
        return r;
    *ret_ns = frame_clock() - start;
    control_reply_free(&reply);
    return 0;
}

/* What the greeting said. */
static void add_daemon(struct json_object *o, const struct ctl *c)
{
    const struct control_hello *h = control_hello(c->control);

    out_text(o, "daemon", h->daemon);
    out_text(o, "socket", control_socket(c->control));
    out_text(o, "role", role_name(h->role));
    out_hex(o, "instance", h->instance, sizeof(h->instance));
}

int run_ping(struct ctl *c, char **args, int n)
{
    struct json_object *o;
    uint64_t ns;
    int r = ctl_connect(c);

    (void)args;
    (void)n;
    if (r == 0)
        r = ping(c, &ns);
    if (r)
        return r;
    o = out_document();
    add_daemon(o, c);
    json_object_object_add(o, "round_trip_s", json_object_new_double((double)ns / 1e9));
    if (!c->json)
        printf("%s at %s: %" PRIu64 " us\n", control_hello(c->control)->daemon,
               control_socket(c->control), ns / 1000);
    out_end(c, o);
    return 0;
}

#define WAIT_DEFAULT_MS 30000u
#define WAIT_STEP_MS    50u

static uint32_t ms_until(uint64_t deadline)
{
    uint64_t now = frame_clock();

    return now < deadline ? (uint32_t)((deadline - now) / 1000000) : 0;
}

static void pause_before_retry(uint64_t deadline)
{
    uint32_t left = ms_until(deadline), ms = left < WAIT_STEP_MS ? left : WAIT_STEP_MS;
    struct timespec t = {.tv_nsec = (long)ms * 1000000};

    nanosleep(&t, NULL);
}

enum { SILENT, ANSWERS, SERVES };

/* How far a connected daemon is. A connection lost meanwhile is no failure: it restarts. */
static int look(struct ctl *c, uint32_t ms, char *state, size_t size)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
    struct control_reply reply;
    bool serves;

    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    if (control_call(c->control, &request, KVD__PROTO__RESPONSE__BODY_STATUS_REPLY,
                     control_deadline(ms), &reply) < 0) {
        snprintf(state, size, "it does not answer");
        return SILENT;
    }
    snprintf(state, size, "it is %s", reply.response->status_reply->state);
    serves = strcmp(reply.response->status_reply->state, "ready") == 0 ||
             strcmp(reply.response->status_reply->state, "degraded") == 0;
    control_reply_free(&reply);
    return serves ? SERVES : ANSWERS;
}

/* Waiting does not help against these. */
static bool is_final(int error)
{
    return error == -EACCES || error == -EPERM || error == -EPROTO || error == -EINVAL;
}

int run_wait(struct ctl *c, char **args, int n)
{
    uint32_t ms = c->timeout_given ? c->timeout_ms : WAIT_DEFAULT_MS;
    uint64_t deadline = control_deadline(ms);
    int wanted = ctl_option(c, "ready") ? SERVES : ANSWERS;
    char state[64] = "";
    struct ctl_failure f;
    int r;

    (void)args;
    (void)n;
    for (;;) {
        uint32_t left = ms_until(deadline);

        left = left < WAIT_STEP_MS ? WAIT_STEP_MS : left; /* the last attempt too is a fair one */
        r = ctl_try_connect(c, left, &f);
        if (r == 0 && look(c, left, state, sizeof(state)) >= wanted)
            return 0;
        if (is_final(r) || ms_until(deadline) == 0)
            break;
        ctl_disconnect(c);
        pause_before_retry(deadline);
    }
    if (r == 0)
        return ctl_fail(EXIT_UNHEALTHY, "waited %g s; the daemon is not ready: %s", ms / 1e3,
                        state);
    if (is_final(r))
        return ctl_fail(ctl_status_of(r), "%s", f.text);
    return ctl_fail(EXIT_UNREACHABLE, "waited %g s: %s", ms / 1e3, f.text);
}

int run_version(struct ctl *c, char **args, int n)
{
    struct json_object *o = out_document();
    struct ctl_failure f;
    int r = ctl_try_connect(c, c->timeout_ms, &f);

    (void)args;
    (void)n;
    out_text(o, "kvctl", KVD_VERSION);
    out_number(o, "protocol", CONTROL_VERSION_MAX);
    if (r == 0)
        add_daemon(o, c);
    if (!c->json) {
        printf("kvctl %s\n", KVD_VERSION);
        if (r == 0)
            printf("%s at %s\n", control_hello(c->control)->daemon, control_socket(c->control));
        else
            ctl_note("the daemon's version is unknown: %s", f.text);
    }
    out_end(c, o);
    return 0; /* its own version it knows */
}

/* ---- taking out */

struct removal {
    const char *asked; /* name of the pool as given */
    struct pool_ref pool;
    uint64_t count;
    uint64_t skipped; /* pinned */
    uint64_t next;    /* slot to go on from; 0: done */
};

static int call_count(struct ctl *c, Kvd__Proto__Request *request, struct removal *m)
{
    struct control_reply reply;
    const Kvd__Proto__CountReply *n;
    int r = ctl_call(c, request, KVD__PROTO__RESPONSE__BODY_COUNT, &reply);

    if (r)
        return r;
    n = reply.response->count;
    m->count += n->count;
    m->skipped += n->has_skipped ? n->skipped : 0;
    if (n->has_next && n->next <= m->next)
        r = ctl_fail(EXIT_FAILED,
                     "the daemon goes round in circles: slot %" PRIu64 " comes after %" PRIu64,
                     n->next, m->next);
    m->next = n->has_next ? n->next : 0;
    control_reply_free(&reply);
    return r;
}

static void show_removal(const struct ctl *c, const struct removal *m)
{
    if (c->json)
        return;
    printf("%s: %" PRIu64 " removed", m->pool.name, m->count);
    if (m->skipped)
        printf(", %" PRIu64 " pinned and kept", m->skipped);
    putchar('\n');
}

static void add_removal(struct json_object *o, const struct removal *m)
{
    out_text(o, "pool", m->pool.name);
    out_number(o, "removed", m->count);
    out_number(o, "pinned", m->skipped);
}

static int end_removal(struct ctl *c, const struct removal *m)
{
    struct json_object *o = out_document();

    add_removal(o, m);
    show_removal(c, m);
    out_end(c, o);
    return 0;
}

/* ---- evict */

enum {
    KEYS_AT_ONCE = 512
}; /* fit into the smallest message that a daemon may be configured to take */

static int send_keys(struct ctl *c, struct removal *m, const struct kvd_key *keys, size_t n)
{
    Kvd__Proto__Key key[KEYS_AT_ONCE], *list[KEYS_AT_ONCE];
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;

    for (size_t i = 0; i < n; i++) {
        kvd__proto__key__init(&key[i]);
        key[i].hash =
            (ProtobufCBinaryData){.data = (uint8_t *)keys[i].hash, .len = sizeof(keys[i].hash)};
        key[i].has_group = true;
        key[i].group = keys[i].group;
        list[i] = &key[i];
    }
    q.pool = m->pool.id;
    q.n_keys = n;
    q.keys = list;
    request.body_case = KVD__PROTO__REQUEST__BODY_EVICT;
    request.evict = &q;
    return call_count(c, &request, m);
}

static int evict_keys(struct ctl *c, struct removal *m, char **args, size_t n)
{
    struct kvd_key *keys = calloc(n, sizeof(*keys));
    int r = 0;

    if (!keys)
        ctl_out_of_memory();
    for (size_t i = 0; i < n && r == 0; i++)
        r = parse_key(args[i], &keys[i]);
    if (r == 0)
        r = ctl_find_pool(c, m->asked, &m->pool);
    for (size_t i = 0; i < n && r == 0; i += KEYS_AT_ONCE)
        r = send_keys(c, m, keys + i, n - i < KEYS_AT_ONCE ? n - i : KEYS_AT_ONCE);
    free(keys);
    if (r == 0)
        r = end_removal(c, m);
    if (r == 0 && m->count + m->skipped < n)
        return ctl_fail(EXIT_NOT_FOUND,
                        "%" PRIu64
                        " of %zu keys are not in %s; `kvctl why` tells what became of one",
                        n - m->count - m->skipped, n, m->pool.name);
    if (r == 0 && m->skipped)
        return ctl_fail(EXIT_FAILED,
                        "%" PRIu64 " of %zu are pinned; `kvctl sessions` shows by whom", m->skipped,
                        n);
    return r;
}

static int evict_coldest(struct ctl *c, struct removal *m, const char *text)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;
    uint64_t want = 0;
    int r = parse_number("--count", text, 1, UINT32_MAX, &want);

    if (r == 0)
        r = ctl_find_pool(c, m->asked, &m->pool);
    q.pool = m->pool.id;
    q.has_count = true;
    request.body_case = KVD__PROTO__REQUEST__BODY_EVICT;
    request.evict = &q;
    while (r == 0 && m->count < want) {
        uint64_t before = m->count;

        q.count = want - before; /* the daemon takes as much at once as it likes */
        r = call_count(c, &request, m);
        out_progress(c, m->pool.name, m->count, want);
        if (m->count == before)
            break;
    }
    out_progress(c, "", 0, 0);
    if (r == 0)
        r = end_removal(c, m);
    if (r == 0 && m->count < want)
        ctl_note("no more could be evicted: the rest of %s is free, pinned or being written",
                 m->pool.name);
    return r;
}

/* Steps through the pool's slots: request's cursor is at `cursor`. */
static int step_through(struct ctl *c, struct removal *m, Kvd__Proto__Request *request,
                        uint64_t *cursor)
{
    int r;

    do {
        r = call_count(c, request, m);
        *cursor = m->next;
        out_progress(c, m->pool.name, m->next ? m->next : m->pool.slots, m->pool.slots);
    } while (r == 0 && m->next);
    out_progress(c, "", 0, 0);
    return r;
}

static int evict_tenant(struct ctl *c, struct removal *m, const char *text)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;
    uint64_t tenant = 0;
    int r = parse_number("--tenant", text, 0, UINT32_MAX, &tenant);

    if (r == 0)
        r = ctl_find_pool(c, m->asked, &m->pool);
    if (r)
        return r;
    q.pool = m->pool.id;
    q.has_tenant = q.has_cursor = true;
    q.tenant = (uint32_t)tenant;
    request.body_case = KVD__PROTO__REQUEST__BODY_EVICT;
    request.evict = &q;
    r = step_through(c, m, &request, &q.cursor);
    return r ? r : end_removal(c, m);
}

int run_evict(struct ctl *c, char **args, int n)
{
    const char *count = ctl_option(c, "count"), *tenant = ctl_option(c, "tenant");
    struct removal m = {.asked = args[0]};

    if ((n > 1) + (count != NULL) + (tenant != NULL) != 1)
        return ctl_fail(
            EXIT_USAGE,
            "give keys, or --count, or --tenant: one of the three; see `kvctl evict --help`");
    if (count)
        return evict_coldest(c, &m, count);
    if (tenant)
        return evict_tenant(c, &m, tenant);
    return evict_keys(c, &m, args + 1, (size_t)n - 1);
}

/* ---- flush */

static int flush_pool(struct ctl *c, struct removal *m)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Flush q = KVD__PROTO__FLUSH__INIT;

    q.pool = m->pool.id;
    q.has_cursor = true;
    request.body_case = KVD__PROTO__REQUEST__BODY_FLUSH;
    request.flush = &q;
    return step_through(c, m, &request, &q.cursor);
}

static int flush_space(struct ctl *c, const Kvd__Proto__StatusReply *s, const char *space,
                       struct json_object *rows)
{
    int r = ctl_find_space(s, space);

    for (size_t i = 0; i < s->n_pools && r == 0; i++) {
        struct removal m = {.count = 0};

        if (!s->pools[i]->info->space || strcmp(s->pools[i]->info->space, space) != 0)
            continue;
        ctl_pool_ref(s->pools[i]->info, &m.pool);
        r = flush_pool(c, &m);
        if (r)
            break;
        add_removal(out_row(rows), &m);
        show_removal(c, &m);
    }
    return r;
}

int run_flush(struct ctl *c, char **args, int n)
{
    struct control_reply reply;
    struct json_object *o;
    int r = ctl_get_status(c, &reply);

    (void)n;
    if (r)
        return r;
    o = out_document();
    out_text(o, "space", args[0]);
    r = flush_space(c, reply.response->status_reply, args[0], out_array(o, "pools"));
    if (r == 0)
        out_end(c, o);
    else
        json_object_put(o);
    control_reply_free(&reply);
    return r;
}

/* ---- kill */

/* Its pid, to be told afterwards. */
static int find_session(struct ctl *c, uint32_t session, uint32_t *ret_pid)
{
    const Kvd__Proto__SessionsReply *s;
    struct control_reply reply;
    int r = ctl_get_sessions(c, &reply);

    if (r)
        return r;
    s = reply.response->sessions;
    if (session == control_hello(c->control)->session)
        r = ctl_fail(EXIT_USAGE, "session %u is this command itself", session);
    else
        r = EXIT_NOT_FOUND;
    for (size_t i = 0; i < s->n_sessions && r == EXIT_NOT_FOUND; i++)
        if (s->sessions[i]->session == session) {
            *ret_pid = s->sessions[i]->pid;
            r = 0;
        }
    control_reply_free(&reply);
    if (r == EXIT_NOT_FOUND)
        ctl_fail(r, "there is no session %u; `kvctl sessions` lists them", session);
    return r;
}

int run_kill(struct ctl *c, char **args, int n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Kill q = KVD__PROTO__KILL__INIT;
    struct control_reply reply;
    struct json_object *o;
    uint64_t session = 0;
    uint32_t pid = 0;
    int r = parse_number("a session", args[0], 1, UINT32_MAX, &session);

    (void)n;
    if (r == 0)
        r = find_session(c, (uint32_t)session, &pid);
    if (r)
        return r;
    q.session = (uint32_t)session;
    request.body_case = KVD__PROTO__REQUEST__BODY_KILL;
    request.kill = &q;
    r = ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET, &reply);
    if (r)
        return r;
    control_reply_free(&reply);
    o = out_document();
    out_number(o, "session", session);
    out_number(o, "pid", pid);
    if (!c->json)
        printf("session %" PRIu64 " (pid %u) killed\n", session, pid);
    out_end(c, o);
    return 0;
}
