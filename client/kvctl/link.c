/* SPDX-License-Identifier: Apache-2.0 */
/* The connection, and names of pools and spaces. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvctl.h"
#include "version.h"

/* An administrator's socket first: it answers everything. */
static const char *const usual_sockets[] = {"/run/kvd/kvd-admin.sock", CONTROL_SOCKET};

enum { BYE_MS = 1000 };

/* ---- connecting */

const char *ctl_socket_at(const struct ctl *c, size_t i)
{
    const char *given = c->socket ? c->socket : getenv("KVD_SOCKET");

    if (given && *given)
        return i == 0 ? given : NULL;
    return i < sizeof(usual_sockets) / sizeof(usual_sockets[0]) ? usual_sockets[i] : NULL;
}

static int try_socket(struct ctl *c, const char *path, uint32_t timeout_ms, struct ctl_failure *f)
{
    struct control_options o = {.socket = path, .client = "kvctl " KVD_VERSION};
    struct control *control;
    int r = control_new(&o, &control);

    snprintf(f->socket, sizeof(f->socket), "%s", path);
    if (r < 0) {
        snprintf(f->text, sizeof(f->text), "%.200s: %s", path,
                 r == -EINVAL ? "the path of a socket has at most 107 bytes" : strerror(-r));
        f->error = r;
        return r;
    }
    r = control_connect(control, control_deadline(timeout_ms), NULL);
    if (r == 0) {
        c->control = control;
        return 0;
    }
    snprintf(f->text, sizeof(f->text), "%s", control_error(control));
    f->error = r;
    control_free(control);
    return r;
}

/* Of several failures the one that says most: a socket that is there but shut rather than none. */
static bool says_more(int error, int than)
{
    return than == 0 || (than == -ENOENT && error != -ENOENT) ||
           (than == -ECONNREFUSED && error != -ENOENT && error != -ECONNREFUSED);
}

/* No socket at all. */
static void explain_missing(const struct ctl *c, struct ctl_failure *f)
{
    const char *first = ctl_socket_at(c, 0), *second = ctl_socket_at(c, 1);

    if (second)
        snprintf(f->missing, sizeof(f->missing), "there is neither %s nor %s", first, second);
    else
        snprintf(f->missing, sizeof(f->missing), "there is no %.107s", first);
    snprintf(f->text, sizeof(f->text),
             "no daemon: %s. Start kvd, or name its socket with -s or in KVD_SOCKET", f->missing);
}

int ctl_try_connect(struct ctl *c, uint32_t timeout_ms, struct ctl_failure *ret_failure)
{
    const char *path;

    *ret_failure = (struct ctl_failure){.error = 0};
    for (size_t i = 0; (path = ctl_socket_at(c, i)); i++) {
        struct ctl_failure f;

        if (try_socket(c, path, timeout_ms, &f) == 0)
            return 0;
        if (says_more(f.error, ret_failure->error))
            *ret_failure = f;
    }
    if (ret_failure->error == -ENOENT)
        explain_missing(c, ret_failure);
    return ret_failure->error;
}

int ctl_status_of(int error)
{
    switch (error) {
    case 0:
        return EXIT_FINE;
    case -EACCES:
    case -EPERM:
        return EXIT_REFUSED;
    case -ENOENT:
        return EXIT_NOT_FOUND;
    case -ECONNREFUSED:
    case -ENOTCONN:
    case -EPIPE:
    case -ECONNRESET:
    case -ETIMEDOUT:
    case -EUSERS:
        return EXIT_UNREACHABLE;
    default:
        return EXIT_FAILED;
    }
}

int ctl_connect(struct ctl *c)
{
    struct ctl_failure f;
    int r;

    if (c->control)
        return 0;
    r = ctl_try_connect(c, c->timeout_ms, &f);
    if (r == 0)
        return 0;
    return ctl_fail(r == -ENOENT ? EXIT_UNREACHABLE : ctl_status_of(r),
                    "%s. `kvctl check` says more", f.text);
}

/* Says good-bye, or the daemon would notice a death, and log it. */
static void part(struct ctl *c)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Bye bye = KVD__PROTO__BYE__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_BYE;
    request.bye = &bye;
    (void)control_call(c->control, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                       control_deadline(BYE_MS), NULL); /* whatever comes: it ends here */
}

void ctl_disconnect(struct ctl *c)
{
    if (c->control && control_is_open(c->control) && !c->gave_up)
        part(c);
    control_free(c->control);
    c->control = NULL;
}

int ctl_call(struct ctl *c, Kvd__Proto__Request *request, Kvd__Proto__Response__BodyCase expect,
             struct control_reply *ret_reply)
{
    int r = control_call(c->control, request, expect, control_deadline(c->timeout_ms), ret_reply);

    c->gave_up |= r == -ETIMEDOUT;
    return r < 0 ? ctl_fail(ctl_status_of(r), "%s", control_error(c->control)) : 0;
}

/* ---- questions that several commands ask */

int ctl_get_status(struct ctl *c, struct control_reply *ret_reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
    int r = ctl_connect(c);

    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    return r ? r : ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_STATUS_REPLY, ret_reply);
}

int ctl_get_sessions(struct ctl *c, struct control_reply *ret_reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Sessions sessions = KVD__PROTO__SESSIONS__INIT;
    int r = ctl_connect(c);

    request.body_case = KVD__PROTO__REQUEST__BODY_SESSIONS;
    request.sessions = &sessions;
    return r ? r : ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_SESSIONS, ret_reply);
}

/* ---- names */

void ctl_pool_ref(const Kvd__Proto__PoolInfo *info, struct pool_ref *ret_pool)
{
    *ret_pool = (struct pool_ref){.id = info->pool, .slots = info->slots, .parts = info->parts};
    snprintf(ret_pool->name, sizeof(ret_pool->name), "%s/%s", info->space ? info->space : "?",
             info->name);
}

struct pool_names {
    size_t n;
    struct pool_ref *refs;
};

static const char *pool_name_at(const void *arg, size_t i)
{
    const struct pool_names *names = arg;

    return i < names->n ? names->refs[i].name : NULL;
}

static int no_pool(const char *text, const struct pool_names *names)
{
    const char *near = ctl_suggest(text, pool_name_at, names);

    if (near)
        return ctl_fail(EXIT_NOT_FOUND, "there is no pool \"%.132s\"; did you mean %s?", text,
                        near);
    return ctl_fail(EXIT_NOT_FOUND,
                    "there is no pool \"%.132s\" on this socket; `kvctl pools` lists them", text);
}

static int choose_pool(const char *text, const struct pool_names *names, struct pool_ref *ret_pool)
{
    char *end;
    unsigned long id = strtoul(text, &end, 10);
    bool is_id = *text >= '0' && *text <= '9' && !*end;

    for (size_t i = 0; i < names->n; i++)
        if (is_id ? names->refs[i].id == id : strcmp(names->refs[i].name, text) == 0) {
            *ret_pool = names->refs[i];
            return 0;
        }
    return no_pool(text, names);
}

int ctl_find_pool(struct ctl *c, const char *text, struct pool_ref *ret_pool)
{
    struct control_reply reply;
    const Kvd__Proto__StatusReply *s;
    struct pool_names names;
    int r = ctl_get_status(c, &reply);

    if (r)
        return r;
    s = reply.response->status_reply;
    names = (struct pool_names){s->n_pools, calloc(s->n_pools + 1, sizeof(*names.refs))};
    if (!names.refs)
        ctl_out_of_memory();
    for (size_t i = 0; i < s->n_pools; i++)
        ctl_pool_ref(s->pools[i]->info, &names.refs[i]);
    r = choose_pool(text, &names, ret_pool);
    free(names.refs);
    control_reply_free(&reply);
    return r;
}

static const char *space_name_at(const void *arg, size_t i)
{
    const Kvd__Proto__StatusReply *s = arg;

    return i < s->n_spaces ? s->spaces[i]->name : NULL;
}

int ctl_find_space(const Kvd__Proto__StatusReply *status, const char *name)
{
    const char *near;

    for (size_t i = 0; i < status->n_spaces; i++)
        if (strcmp(status->spaces[i]->name, name) == 0)
            return 0;
    near = ctl_suggest(name, space_name_at, status);
    if (near)
        return ctl_fail(EXIT_NOT_FOUND, "there is no space \"%.64s\"; did you mean %s?", name,
                        near);
    return ctl_fail(EXIT_NOT_FOUND,
                    "there is no space \"%.64s\" on this socket; `kvctl spaces` lists them", name);
}
