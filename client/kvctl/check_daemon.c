/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the daemon: can it be reached, and what does it say of itself. */
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "version.h"

/* ---- the socket */

static void user_name(uid_t uid, char *ret, size_t size)
{
    const struct passwd *p = getpwuid(uid);

    if (p)
        snprintf(ret, size, "%s", p->pw_name);
    else
        snprintf(ret, size, "%u", (unsigned)uid);
}

static void group_name(gid_t gid, char *ret, size_t size)
{
    const struct group *g = getgrgid(gid);

    if (g)
        snprintf(ret, size, "%s", g->gr_name);
    else
        snprintf(ret, size, "%u", (unsigned)gid);
}

/* Listed as a member; whether this process has the group is another question. */
static bool is_member(gid_t gid, const char *user)
{
    const struct group *g = getgrgid(gid);

    for (char **m = g ? g->gr_mem : NULL; m && *m; m++)
        if (strcmp(*m, user) == 0)
            return true;
    return false;
}

static void shut_directory(struct check *k, const char *path, const char *user)
{
    char dir[sizeof(k->failure.socket)];
    char *slash;

    snprintf(dir, sizeof(dir), "%s", path);
    slash = strrchr(dir, '/');
    if (slash && slash != dir)
        *slash = '\0';
    check_add(k, CHECK_FAIL, "daemon", "user %s may not look into %s, where the socket is", user,
              dir);
    check_fix(k, "chmod a+x %s", dir);
}

static void shut_socket(struct check *k)
{
    const char *path = k->failure.socket;
    char user[64], group[64];
    struct stat st;

    user_name(geteuid(), user, sizeof(user));
    if (stat(path, &st) < 0) {
        shut_directory(k, path, user);
        return;
    }
    group_name(st.st_gid, group, sizeof(group));
    check_add(k, CHECK_FAIL, "daemon", "user %s may not connect to %s (mode %04o, group %s)", user,
              path, (unsigned)st.st_mode & 07777, group);
    if (!(st.st_mode & S_IWGRP) || st.st_gid == 0) {
        check_fix(k, "sudo kvctl check");
        check_fix(k, "for users: set \"group\" and \"mode = 0660\" of the socket, see kvd.conf(5)");
    } else if (is_member(st.st_gid, user)) {
        check_fix(k, "log in again, or: newgrp %s (the membership is newer than this login)",
                  group);
    } else {
        check_fix(k, "usermod -aG %s %s", group, user);
        check_fix(k, "log in again");
    }
}

static void unreachable(struct check *k)
{
    const struct ctl_failure *f = &k->failure;

    switch (f->error) {
    case -ENOENT:
        check_add(k, CHECK_FAIL, "daemon", "kvd is not running: %s", f->missing);
        check_fix_service(k, "start");
        break;
    case -ECONNREFUSED:
        check_add(k, CHECK_FAIL, "daemon",
                  "kvd is not running: %s is left over from one that has ended", f->socket);
        check_fix_service(k, "restart");
        check_fix(k, "journalctl -u kvd -e");
        break;
    case -EACCES:
        shut_socket(k);
        break;
    case -ETIMEDOUT:
        check_add(k, CHECK_FAIL, "daemon", "kvd does not answer: %s", f->text);
        check_fix_service(k, "restart");
        break;
    default: /* the daemon's own sentence, with its cure */
        check_add(k, CHECK_FAIL, "daemon", "%s", f->text);
        break;
    }
}

static void check_version(struct check *k)
{
    const char *daemon = control_hello(k->c->control)->daemon;

    if (strcmp(daemon, "kvd " KVD_VERSION) == 0) {
        check_add(k, CHECK_OK, "version", "kvctl and kvd are both %s", KVD_VERSION);
        return;
    }
    check_add(k, CHECK_WARN, "version", "kvctl is %s, but the daemon is %s", KVD_VERSION,
              daemon[0] ? daemon : "of an unknown version");
    check_fix_service(k, "restart");
}

void check_socket(struct check *k)
{
    char user[64];

    if (!k->reachable) {
        unreachable(k);
        return;
    }
    if (!k->running.known) {
        check_add(k, CHECK_FAIL, "daemon", "kvd does not say how it is: %s",
                  control_error(k->c->control));
        check_fix_service(k, "restart");
        return;
    }
    user_name(k->daemon_uid, user, sizeof(user));
    check_add(k, CHECK_OK, "daemon", "%s answers at %s (pid %d, user %s)",
              control_hello(k->c->control)->daemon, control_socket(k->c->control),
              (int)k->daemon_pid, user);
    check_version(k);
}

/* ---- what it says of itself */

static const char cure[] = "fix: ", joint[] = "; ";

/* The next of the pieces of *at that is a cure, or is none; NULL: there are no more. */
static const char *next_piece(const char **at, bool cures, size_t *ret_len)
{
    while (**at) {
        const char *piece = *at, *end = strstr(piece, joint);

        *ret_len = end ? (size_t)(end - piece) : strlen(piece);
        *at = piece + *ret_len + (end ? strlen(joint) : 0);
        if ((strncmp(piece, cure, strlen(cure)) == 0) == cures)
            return piece;
    }
    return NULL;
}

void check_add_advice(struct check *k, enum check_level level, const char *item, const char *advice)
{
    char *text = calloc(1, strlen(advice) + 1);
    const char *at = advice, *piece;
    size_t len;

    if (!text)
        ctl_out_of_memory();
    while ((piece = next_piece(&at, false, &len))) {
        strcat(text, text[0] ? joint : "");
        strncat(text, piece, len);
    }
    check_add(k, level, item, "%s", text);
    free(text);
    for (at = advice; (piece = next_piece(&at, true, &len));)
        check_fix(k, "%.*s", (int)(len - strlen(cure)), piece + strlen(cure));
}

void check_state(struct check *k)
{
    const Kvd__Proto__StatusReply *s = k->status.response->status_reply;
    char up[SMALL_TEXT_SIZE];

    text_duration(s->uptime_s, up);
    if (strcmp(s->state, "ready") == 0)
        check_add(k, CHECK_OK, "state", "ready, up %s", up);
    else if (s->n_problems == 0)
        check_add(k, CHECK_WARN, "state", "%s, up %s", s->state, up);
    for (size_t i = 0; i < s->n_problems; i++)
        check_add_advice(k, CHECK_FAIL, "problem", s->problems[i]);
}

/* ---- pins */

enum { NAMED_MAX = 3 };

static bool uses(const Kvd__Proto__SessionInfo *x, const char *space)
{
    for (size_t i = 0; i < x->n_spaces; i++)
        if (space && strcmp(x->spaces[i], space) == 0)
            return true;
    return false;
}

static int compare_pins(const void *a, const void *b)
{
    uint64_t x = (*(Kvd__Proto__SessionInfo *const *)a)->pinned_bytes;
    uint64_t y = (*(Kvd__Proto__SessionInfo *const *)b)->pinned_bytes;

    return (x < y) - (x > y);
}

/* Those who hold most, first. The daemon counts pins by session, not by pool. */
static void name_holders(struct check *k, const Kvd__Proto__PoolInfo *pool)
{
    const Kvd__Proto__SessionsReply *s = k->sessions.frame ? k->sessions.response->sessions : NULL;
    unsigned named = 0;

    if (!s)
        return;
    qsort(s->sessions, s->n_sessions, sizeof(s->sessions[0]), compare_pins);
    for (size_t i = 0; i < s->n_sessions && named < NAMED_MAX; i++) {
        const Kvd__Proto__SessionInfo *x = s->sessions[i];
        char size[SMALL_TEXT_SIZE], age[SMALL_TEXT_SIZE];

        if (!x->pinned_objects || !uses(x, pool->space))
            continue;
        text_size(x->pinned_bytes, size);
        text_duration(x->oldest_pin_age_s, age);
        check_fix(k,
                  "kvctl kill %u (ends pid %u, %s: it pins %" PRIu64
                  " object%s, %s, the oldest for %s)",
                  x->session, x->pid, x->client && x->client[0] ? x->client : "unnamed",
                  x->pinned_objects, x->pinned_objects == 1 ? "" : "s", size, age);
        named++;
    }
}

/* Few of its slots are free or could be made so. */
static bool is_short(const Kvd__Proto__PoolStatus *p)
{
    uint64_t evictable = p->live > p->pinned ? p->live - p->pinned : 0;

    return p->free + evictable <= p->info->slots / 10;
}

static void report_short(struct check *k, const Kvd__Proto__PoolStatus *p)
{
    uint64_t evictable = p->live > p->pinned ? p->live - p->pinned : 0;
    struct pool_ref ref;

    ctl_pool_ref(p->info, &ref);
    check_add(k, p->free + evictable ? CHECK_WARN : CHECK_FAIL, "pins",
              "%s is nearly used up: of %" PRIu64 " slots %" PRIu64 " are pinned, %" PRIu64
              " reserved, %" PRIu64 " quarantined; %" PRIu64 " can be had",
              ref.name, p->info->slots, p->pinned, p->reserved, p->quarantined,
              p->free + evictable);
    name_holders(k, p->info);
    check_fix(k, "a larger \"size\" (or \"slots\") in [pool %s], or \"max_pinned\" in [space %s]",
              ref.name, p->info->space ? p->info->space : "?");
}

void check_pins(struct check *k)
{
    const Kvd__Proto__StatusReply *s = k->status.response->status_reply;
    unsigned n = 0;

    for (size_t i = 0; i < s->n_pools; i++)
        if (is_short(s->pools[i])) {
            report_short(k, s->pools[i]);
            n++;
        }
    if (n == 0)
        check_add(k, CHECK_OK, "pins", "every pool has slots that are free or can be evicted");
}

/* ---- sessions */

static const char *admin_socket(const Kvd__Proto__StatusReply *s)
{
    for (size_t i = 0; i < s->n_sockets; i++)
        if (strcmp(s->sockets[i]->role, "admin") == 0)
            return s->sockets[i]->path;
    return NULL;
}

static void sessions_unknown(struct check *k)
{
    const char *path = admin_socket(k->status.response->status_reply);

    check_add(k, CHECK_SKIP, "sessions", "only an administrator's socket shows them");
    if (path)
        check_fix(k, "sudo kvctl -s %s check", path);
    else
        check_fix(k, "a [socket] with \"role = admin\", see kvd.conf(5)");
}

void check_sessions(struct check *k)
{
    const Kvd__Proto__SessionsReply *s;
    unsigned bad = 0;

    if (!k->sessions.frame) {
        sessions_unknown(k);
        return;
    }
    s = k->sessions.response->sessions;
    for (size_t i = 0; i < s->n_sessions; i++) {
        const Kvd__Proto__SessionInfo *x = s->sessions[i];

        if (strcmp(x->state, "broken") != 0 && !(x->note && x->note[0]))
            continue;
        bad++;
        check_add(k, CHECK_WARN, "sessions", "session %u (pid %u, %s) is %s: %s", x->session,
                  x->pid, x->client && x->client[0] ? x->client : "unnamed", x->state,
                  x->note ? x->note : "its memory made no sense");
        check_fix(k, "kvctl kill %u (ends pid %u), or restart that worker", x->session, x->pid);
    }
    if (bad == 0)
        check_add(k, CHECK_OK, "sessions", "%zu attached, this command included; none is broken",
                  s->n_sessions);
}
