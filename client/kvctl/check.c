/* SPDX-License-Identifier: Apache-2.0 */
/* `kvctl check`: gathering, and the report. */
#include "check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "stores.h"

/* ---- items */

static const struct {
    const char *name, *color;
} levels[] = {
    [CHECK_OK] = {"ok", "\033[32m"},
    [CHECK_SKIP] = {"skip", "\033[2m"},
    [CHECK_WARN] = {"warn", "\033[33m"},
    [CHECK_FAIL] = {"FAIL", "\033[1;31m"},
};

static char *format(const char *fmt, va_list args)
{
    char *text;

    if (vasprintf(&text, fmt, args) < 0)
        ctl_out_of_memory();
    return text;
}

void check_add(struct check *k, enum check_level level, const char *item, const char *fmt, ...)
{
    va_list args;
    char *text;

    va_start(args, fmt);
    text = format(fmt, args);
    va_end(args);
    k->counts[level]++;
    k->last = out_row(k->items);
    out_text(k->last, "item", item);
    out_text(k->last, "level", levels[level].name);
    out_text(k->last, "text", text);
    if (!k->c->json) {
        printf("%s%-4s%s  %-11s  ", k->c->color ? levels[level].color : "", levels[level].name,
               k->c->color ? "\033[0m" : "", item);
        out_clean(text);
    }
    free(text);
}

void check_fix(struct check *k, const char *fmt, ...)
{
    struct json_object *fixes;
    va_list args;
    char *text;

    va_start(args, fmt);
    text = format(fmt, args);
    va_end(args);
    if (!json_object_object_get_ex(k->last, "fix", &fixes))
        fixes = out_array(k->last, "fix");
    if (!k->c->json) {
        printf("%19sfix: ", "");
        out_clean(text);
    }
    if (json_object_array_add(fixes, json_object_new_string(text)) < 0)
        ctl_out_of_memory();
    free(text);
}

void check_fix_service(struct check *k, const char *verb)
{
    if (system_is_directory(&k->system, "/run/systemd/system"))
        check_fix(k, "systemctl %s kvd", verb);
    else
        check_fix(k, "%s kvd, however that is done here (by hand: kvd -c FILE)", verb);
}

/* ---- the daemon */

static void find_peer(struct check *k)
{
    struct ucred cred;
    socklen_t len = sizeof(cred);

    if (getsockopt(control_fd(k->c->control), SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
        return;
    k->daemon_pid = cred.pid;
    k->daemon_uid = cred.uid;
}

/* Silently: what is missing is an item of the report. */
static void ask_daemon(struct check *k)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
    Kvd__Proto__Sessions sessions = KVD__PROTO__SESSIONS__INIT;

    k->reachable = ctl_try_connect(k->c, k->c->timeout_ms, &k->failure) == 0;
    if (!k->reachable)
        return;
    find_peer(k);
    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    if (control_call(k->c->control, &request, KVD__PROTO__RESPONSE__BODY_STATUS_REPLY,
                     control_deadline(k->c->timeout_ms), &k->status) < 0) {
        k->status.frame = NULL;
        return;
    }
    request.body_case = KVD__PROTO__REQUEST__BODY_SESSIONS;
    request.sessions = &sessions;
    if (control_call(k->c->control, &request, KVD__PROTO__RESPONSE__BODY_SESSIONS,
                     control_deadline(k->c->timeout_ms), &k->sessions) < 0)
        k->sessions.frame = NULL;
    k->has_stores = stores_try(k->c, &k->stores);
}

/* ---- plans */

static struct check_pool *new_pools(size_t n)
{
    struct check_pool *pools = calloc(n + 1, sizeof(*pools));

    if (!pools)
        ctl_out_of_memory();
    return pools;
}

static bool is_huge(const char *backing)
{
    return strcmp(backing, "hugetlbfs") == 0 || strcmp(backing, "memfd-hugetlb") == 0;
}

static void plan_pool(struct check_pool *to, const Kvd__Proto__PoolInfo *from)
{
    struct pool_ref ref;

    ctl_pool_ref(from, &ref);
    strcpy(to->name, ref.name);
    to->slots = from->slots;
    to->parts = from->parts;
    to->part_bytes = from->part_bytes;
    to->huge_page = is_huge(from->backing) ? from->page_bytes : 0;
}

static void plan_from_status(struct check_plan *p, const Kvd__Proto__StatusReply *s)
{
    static const char *const modes[] = {"off", "try", "require"};

    p->known = p->made = true;
    p->source = "the daemon's pools";
    p->hugepages = CONFIG_HUGEPAGES_TRY;
    for (uint32_t i = 0; s->hugepages && i < sizeof(modes) / sizeof(modes[0]); i++)
        if (strcmp(s->hugepages, modes[i]) == 0)
            p->hugepages = i;
    snprintf(p->runtime_dir, sizeof(p->runtime_dir), "%s", s->runtime_dir ? s->runtime_dir : "");
    p->n = s->n_pools;
    p->pools = new_pools(p->n);
    for (size_t i = 0; i < p->n; i++)
        plan_pool(&p->pools[i], s->pools[i]->info);
}

static void plan_stores(struct check_plan *p, const struct config *config)
{
    p->n_stores = config->store_count;
    p->stores = calloc(p->n_stores + 1, sizeof(*p->stores));
    if (!p->stores)
        ctl_out_of_memory();
    for (size_t i = 0; i < p->n_stores; i++) {
        const struct config_store *from = &config->stores[i];
        struct check_store *to = &p->stores[i];

        snprintf(to->name, sizeof(to->name), "%s/%s", p->pools[from->pool].name, from->name);
        strcpy(to->path, from->path);
        to->size = from->size;
        to->io = from->io;
    }
}

static void plan_from_config(struct check_plan *p, const struct config *config)
{
    p->known = true;
    p->source = "the configured pools";
    p->hugepages = config->daemon.hugepages;
    p->page_size = config->daemon.page_size;
    strcpy(p->hugetlbfs, config->daemon.hugetlbfs);
    strcpy(p->runtime_dir, config->daemon.runtime_dir);
    p->n = config->pool_count;
    p->pools = new_pools(p->n);
    for (size_t i = 0; i < p->n; i++) {
        const struct config_pool *from = &config->pools[i];

        snprintf(p->pools[i].name, sizeof(p->pools[i].name), "%s/%s",
                 config->spaces[from->space].name, from->name);
        p->pools[i].slots = from->slots;
        p->pools[i].parts = from->parts;
        p->pools[i].part_bytes = from->part_bytes;
    }
    plan_stores(p, config);
}

enum { PROBLEM_SIZE = 1024 };

/* The first error; the rest is for `kvctl config check`. */
static void note_problem(void *arg, const struct config_problem *p)
{
    char *text = arg;

    if (p->warning || text[0])
        return;
    if (p->line)
        snprintf(text, PROBLEM_SIZE, "%s:%u: %s", p->file, p->line, p->text);
    else
        snprintf(text, PROBLEM_SIZE, "%s: %s", p->file, p->text);
}

/* Without -c, a daemon that runs says itself what it has. */
static void read_config(struct check *k)
{
    const char *given = ctl_option(k->c, "config"), *path = given ? given : CONFIG_FILE;
    struct config *config = NULL;
    char problem[PROBLEM_SIZE] = "";
    int r;

    if (!given && k->running.known) {
        k->plan = k->running;
        return;
    }
    r = config_load(path, &config, note_problem, problem);
    if (r == 0) {
        plan_from_config(&k->plan, config);
        check_add(k, CHECK_OK, "config", "%s can be read", path);
    } else if (r == -EINVAL) {
        check_add(k, CHECK_FAIL, "config", "%s", problem);
        check_fix(k, "kvctl config check %s", path);
    } else {
        check_add(k, given || r == -ENOMEM ? CHECK_FAIL : CHECK_SKIP, "config",
                  "%s: %s; what its pools need is unknown", path, strerror(-r));
        if (r == -EACCES)
            check_fix(k, "sudo kvctl check -c %s", path);
        else
            check_fix(k, "kvctl check -c FILE");
    }
    config_free(config);
}

/* ---- the report */

static void check_all(struct check *k)
{
    check_socket(k);
    if (k->running.known) {
        check_state(k);
        check_pins(k);
        check_sessions(k);
        check_stores(k);
    }
    read_config(k);
    check_kernel(k);
    check_pidfd(k);
    check_hugepages(k);
    check_hugetlbfs(k);
    check_memory(k);
    check_places(k);
    check_io_uring(k);
    check_runtime_dir(k);
    check_memlock(k);
}

int run_check(struct ctl *c, char **args, int n)
{
    const char *root = ctl_option(c, "root");
    struct json_object *o = out_document();
    struct check k = {.c = c, .system.root = root ? root : "", .items = out_array(o, "items")};

    (void)args;
    (void)n;
    ask_daemon(&k);
    if (k.status.frame)
        plan_from_status(&k.running, k.status.response->status_reply);
    check_all(&k);
    out_flag(o, "healthy", !k.counts[CHECK_FAIL]);
    if (!c->json)
        printf("\n%u ok, %u warning%s, %u failure%s, %u skipped\n", k.counts[CHECK_OK],
               k.counts[CHECK_WARN], k.counts[CHECK_WARN] == 1 ? "" : "s", k.counts[CHECK_FAIL],
               k.counts[CHECK_FAIL] == 1 ? "" : "s", k.counts[CHECK_SKIP]);
    out_end(c, o);
    if (k.plan.pools != k.running.pools)
        free(k.plan.pools);
    free(k.running.pools);
    free(k.plan.stores); /* only a configuration has them */
    if (k.has_stores)
        control_reply_free(&k.stores);
    control_reply_free(&k.status);
    control_reply_free(&k.sessions);
    return k.counts[CHECK_FAIL] ? EXIT_UNHEALTHY : EXIT_FINE;
}
