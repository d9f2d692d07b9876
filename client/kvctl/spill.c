/* SPDX-License-Identifier: Apache-2.0 */
/* `kvctl spill`: the stores of the NVMe tier. Long actions run in the daemon; we look on. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stores.h"

#define SPILL(action) KVD__PROTO__SPILL__ACTION__##action
#define STEP_MS       200u /* between two looks at what runs */

struct errand {
    Kvd__Proto__Spill__Action action;
    const char *verb;  /* "scrub" */
    const char *store; /* NULL: all */
    bool force;
    uint64_t rate; /* UINT64_MAX: not given */

    const Kvd__Proto__SpillReply *stores; /* as they were before */
    bool *begun;                          /* at which of these */
};

/* ---- asking */

/* `store` may be NULL: all. */
static int call(struct ctl *c, const struct errand *e, Kvd__Proto__Spill__Action action,
                const char *store, struct control_reply *ret_reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Spill q = KVD__PROTO__SPILL__INIT;

    q.has_action = true;
    q.action = action;
    q.store = (char *)(uintptr_t)store; /* packed only */
    q.has_force = action == SPILL(FORMAT);
    q.force = e->force;
    q.has_rate = action == SPILL(SCRUB) && e->rate != UINT64_MAX;
    q.rate = e->rate;
    request.body_case = KVD__PROTO__REQUEST__BODY_SPILL;
    request.spill = &q;
    return ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_SPILL, ret_reply);
}

static const char *store_name_at(const void *arg, size_t i)
{
    const Kvd__Proto__SpillReply *s = arg;

    return i < s->n_stores ? s->stores[i]->name : NULL;
}

static int no_store(const char *name, const Kvd__Proto__SpillReply *s)
{
    const char *near = ctl_suggest(name, store_name_at, s);

    if (s->n_stores == 0)
        return ctl_fail(EXIT_NOT_FOUND, "there is no store \"%.200s\": the daemon has none", name);
    if (near)
        return ctl_fail(EXIT_NOT_FOUND, "there is no store \"%.200s\"; did you mean %s?", name,
                        near);
    return ctl_fail(EXIT_NOT_FOUND, "there is no store \"%.200s\"; `kvctl spill status` lists them",
                    name);
}

static const Kvd__Proto__StoreStatus *pick(const Kvd__Proto__SpillReply *s, const char *name)
{
    for (size_t i = 0; i < s->n_stores; i++)
        if (strcmp(s->stores[i]->name, name) == 0)
            return s->stores[i];
    return NULL;
}

/* Connects, and sees to it that the store is there. */
static int look(struct ctl *c, const struct errand *e, struct control_reply *ret_reply)
{
    int r = ctl_connect(c);

    if (r == 0)
        r = call(c, e, SPILL(STATUS), NULL, ret_reply);
    if (r == 0 && e->store && !pick(ret_reply->response->spill, e->store)) {
        r = no_store(e->store, ret_reply->response->spill);
        control_reply_free(ret_reply);
    }
    return r;
}

/* ---- status */

static int run_status_of(struct ctl *c, const char *store)
{
    struct errand e = {.store = store};
    struct control_reply reply;
    const Kvd__Proto__SpillReply *s;
    struct json_object *o;
    int r = look(c, &e, &reply);

    if (r == 0 && store) {
        control_reply_free(&reply);
        r = call(c, &e, SPILL(STATUS), store, &reply);
    }
    if (r)
        return r;
    s = reply.response->spill;
    o = out_document();
    stores_add(o, s);
    stores_print(c, o, s, NULL);
    out_end(c, o);
    for (size_t i = 0; i < s->n_stores; i++)
        if (store_is_unwell(s->stores[i]))
            r = EXIT_UNHEALTHY;
    control_reply_free(&reply);
    return r;
}

int run_spill_status(struct ctl *c, char **args, int n)
{
    return run_status_of(c, n ? args[0] : NULL);
}

static const char *action_at(const void *arg, size_t i)
{
    static const char *const names[] = {"status", "format",  "scrub", "trim",
                                        "online", "offline", "sync",  "stop"};

    (void)arg;
    return i < sizeof(names) / sizeof(names[0]) ? names[i] : NULL;
}

int run_spill(struct ctl *c, char **args, int n)
{
    const char *near = n ? ctl_suggest(args[0], action_at, NULL) : NULL;

    if (n == 0)
        return run_status_of(c, NULL);
    if (near)
        return ctl_fail(EXIT_USAGE,
                        "there is no command \"spill %.64s\"; did you mean \"spill %s\"?", args[0],
                        near);
    return ctl_fail(EXIT_USAGE, "there is no command \"spill %.64s\"; see `kvctl spill --help`",
                    args[0]);
}

/* ---- looking on */

static bool is_begun(const struct errand *e, const char *store)
{
    for (size_t i = 0; i < e->stores->n_stores; i++)
        if (e->begun[i] && strcmp(e->stores->stores[i]->name, store) == 0)
            return true;
    return false;
}

/* Answered at once; the others leave a task behind. */
static bool is_quick(const struct errand *e)
{
    return e->action == SPILL(OFFLINE) || e->action == SPILL(STOP);
}

/* The store is opened afterwards. */
static bool opens(const struct errand *e)
{
    return e->action == SPILL(ONLINE) || e->action == SPILL(FORMAT);
}

/* The store's task, if it is the errand's. */
static const Kvd__Proto__StoreTask *task_of(const struct errand *e,
                                            const Kvd__Proto__StoreStatus *x)
{
    if (!x->task)
        return NULL;
    if (strcmp(x->task->name, "open") == 0)
        return opens(e) ? x->task : NULL;
    return strcmp(x->task->name, e->verb) == 0 ? x->task : NULL;
}

static void text_amount(uint64_t n, const char *unit, char buf[static SMALL_TEXT_SIZE])
{
    if (strcmp(unit, "bytes") == 0)
        text_size(n, buf);
    else
        snprintf(buf, SMALL_TEXT_SIZE, "%" PRIu64, n);
}

static void show_progress(const struct ctl *c, const Kvd__Proto__StoreStatus *x,
                          const Kvd__Proto__StoreTask *t)
{
    char text[512], done[SMALL_TEXT_SIZE], total[SMALL_TEXT_SIZE];

    if (t && t->total) {
        text_amount(t->done, t->unit, done);
        text_amount(t->total, t->unit, total);
        snprintf(text, sizeof(text), "%s: %s: %.0f %% (%s of %s%s)", x->name, t->name,
                 100.0 * (double)t->done / (double)t->total, done, total,
                 strcmp(t->unit, "objects") == 0 ? " objects" : "");
    } else {
        snprintf(text, sizeof(text), "%s: %s", x->name, x->state);
    }
    ctl_make_printable(text);
    out_progress_text(c, text);
}

/* A store in use has to let go of what is with the device before its task begins. */
static bool is_pending(const struct errand *e, const Kvd__Proto__StoreStatus *x)
{
    const Kvd__Proto__StoreTask *t = task_of(e, x);

    return opens(e) && strcmp(x->state, "online") != 0 && strcmp(x->state, "read-only") != 0 &&
           !(t && t->status < 0);
}

/* Does it go on anywhere? Of several stores the first is shown. *patience is for what has not begun. */
static bool goes_on(const struct ctl *c, const struct errand *e, const Kvd__Proto__SpillReply *s,
                    uint32_t *patience)
{
    for (size_t i = 0; i < s->n_stores; i++) {
        const Kvd__Proto__StoreStatus *x = s->stores[i];
        const Kvd__Proto__StoreTask *t = task_of(e, x);
        bool runs = t && t->running;

        if (!is_begun(e, x->name) || (!runs && (!is_pending(e, x) || *patience == 0)))
            continue;
        *patience -= !runs;
        show_progress(c, x, runs ? t : NULL);
        return true;
    }
    return false;
}

/* Until it has ended everywhere; *ret_reply is how all stores are then. */
static int look_on(struct ctl *c, const struct errand *e, bool waits,
                   struct control_reply *ret_reply)
{
    const struct timespec step = {.tv_nsec = STEP_MS * 1000000};
    uint32_t patience = c->timeout_ms / STEP_MS;
    struct control_reply reply;
    int r;

    while ((r = call(c, e, SPILL(STATUS), e->store, &reply)) == 0 && waits &&
           goes_on(c, e, reply.response->spill, &patience)) {
        control_reply_free(&reply);
        nanosleep(&step, NULL);
    }
    out_progress_text(c, NULL);
    if (r == 0)
        *ret_reply = reply;
    return r;
}

/* ---- results */

static void describe(const char *what, const char *why, const char *fix, char *text, size_t size)
{
    bool has_why = why && why[0], has_fix = fix && fix[0];

    snprintf(text, size, "%s%s%s%s%s", what, has_why ? ": " : "", has_why ? why : "",
             has_fix ? "; fix: " : "", has_fix ? fix : "");
}

/* How the errand ended at one store: an exit status. `text` gets a sentence. */
static int judge(const struct errand *e, const Kvd__Proto__StoreStatus *x, char *text, size_t size)
{
    const Kvd__Proto__StoreTask *t = task_of(e, x);

    if (e->action == SPILL(STOP)) {
        snprintf(text, size, "the scrub is stopped");
    } else if (is_quick(e)) {
        describe(x->state, NULL, NULL, text, size);
    } else if (t && t->running) {
        snprintf(text, size, "%s has begun", t->name);
    } else if (t && t->status < 0) {
        describe(t->name, t->result && t->result[0] ? t->result : strerror(-t->status), x->fix,
                 text, size);
        return t->status == -EROFS ? EXIT_UNHEALTHY : EXIT_FAILED; /* offline or read-only */
    } else if (store_is_unwell(x)) {
        describe(x->state, x->problem, x->fix, text, size);
        return EXIT_UNHEALTHY;
    } else if (t && strcmp(t->name, "open") != 0) {
        describe(t->name, t->result && t->result[0] ? t->result : "done", NULL, text, size);
    } else {
        describe(x->state, NULL, NULL, text, size);
    }
    return EXIT_FINE;
}

/* A failure counts more than a store that is unwell. */
static int worse(int a, int b)
{
    return a == EXIT_FINE || b == EXIT_FAILED ? b : a;
}

static int conclude(struct ctl *c, const struct errand *e, const Kvd__Proto__SpillReply *s)
{
    struct json_object *o = out_document();
    int worst = EXIT_FINE;

    out_text(o, "action", e->verb);
    stores_add(o, s);
    for (size_t i = 0; i < s->n_stores; i++) {
        char text[1024], line[1280];
        int r;

        if (!is_begun(e, s->stores[i]->name))
            continue;
        r = judge(e, s->stores[i], text, sizeof(text));
        snprintf(line, sizeof(line), "%s: %s", s->stores[i]->name, text);
        if (r)
            worst = worse(worst, ctl_fail(r, "%s", line));
        else if (!c->json)
            out_clean(line);
    }
    out_end(c, o);
    return worst;
}

/* ---- running */

static bool is_scrubbed(const Kvd__Proto__StoreStatus *x)
{
    return x->task && x->task->running && strcmp(x->task->name, "scrub") == 0;
}

/* That a store is not online is no failure of the command, whoever finds it out. */
static int begin_one(struct ctl *c, const struct errand *e, const Kvd__Proto__StoreStatus *x)
{
    struct control_reply reply;
    int r = call(c, e, e->action, x->name, &reply);

    if (r == 0)
        control_reply_free(&reply);
    if (r == EXIT_FAILED && strcmp(x->state, "online") != 0 &&
        (e->action == SPILL(SCRUB) || e->action == SPILL(TRIM) || e->action == SPILL(SYNC)))
        return EXIT_UNHEALTHY;
    return r;
}

/* One by one, so that a store that refuses does not keep the others from it. */
static int begin_all(struct ctl *c, struct errand *e)
{
    int worst = EXIT_FINE;

    for (size_t i = 0; i < e->stores->n_stores; i++) {
        const Kvd__Proto__StoreStatus *x = e->stores->stores[i];
        int r;

        if (e->store ? strcmp(x->name, e->store) != 0 : e->action == SPILL(STOP) && !is_scrubbed(x))
            continue;
        r = begin_one(c, e, x);
        e->begun[i] = r == 0;
        worst = worse(worst, r);
        if (r == EXIT_UNREACHABLE)
            break;
    }
    return worst;
}

static int run_errand(struct ctl *c, struct errand *e, const Kvd__Proto__SpillReply *stores)
{
    bool waits = !is_quick(e) && !ctl_option(c, "no-wait"), any = false;
    struct control_reply reply;
    int worst, r = 0;

    e->stores = stores;
    e->begun = calloc(stores->n_stores + 1, sizeof(*e->begun));
    if (!e->begun)
        ctl_out_of_memory();
    worst = begin_all(c, e);
    for (size_t i = 0; i < stores->n_stores; i++)
        any |= e->begun[i];
    if (any)
        r = look_on(c, e, waits, &reply);
    else if (worst == EXIT_FINE)
        ctl_note("there is nothing to %s", e->verb);
    if (any && r == 0) {
        r = conclude(c, e, reply.response->spill);
        control_reply_free(&reply);
    }
    free(e->begun);
    return worse(worst, r);
}

static int begin(struct ctl *c, struct errand *e, char **args, int n)
{
    struct control_reply reply;
    int r;

    e->store = n ? args[0] : NULL;
    r = look(c, e, &reply);
    if (r)
        return r;
    r = run_errand(c, e, reply.response->spill);
    control_reply_free(&reply);
    return r;
}

/* ---- the other actions */

/* Objects are lost for good, and with --force perhaps something that is not kvd's. */
static int confirm(const Kvd__Proto__StoreStatus *x, bool force)
{
    char text[1024], size[SMALL_TEXT_SIZE], answer[16] = "";

    text_size(x->bytes, size);
    snprintf(text, sizeof(text), "Store %s is %s (%s)", x->name, x->path, size);
    ctl_make_printable(text);
    fprintf(stderr,
            "%s, with %" PRIu64 " object%s of kvd.\nFormatting loses them%s. Format it? [y/N] ",
            text, x->used, x->used == 1 ? "" : "s", force ? ", and whatever else is there" : "");
    if (!fgets(answer, sizeof(answer), stdin) ||
        (strcmp(answer, "y\n") != 0 && strcmp(answer, "yes\n") != 0))
        return ctl_fail(EXIT_FAILED, "nothing was formatted");
    return 0;
}

int run_spill_format(struct ctl *c, char **args, int n)
{
    struct errand e = {.action = SPILL(FORMAT),
                       .verb = "format",
                       .store = args[0],
                       .force = ctl_option(c, "force"),
                       .rate = UINT64_MAX};
    bool asks = isatty(STDIN_FILENO), yes = ctl_option(c, "yes");
    struct control_reply reply;
    int r;

    (void)n;
    if (e.force && !yes && !asks)
        return ctl_fail(EXIT_USAGE, "--force without a terminal to ask on needs --yes");
    r = look(c, &e, &reply);
    if (r)
        return r;
    if (asks && !yes)
        r = confirm(pick(reply.response->spill, e.store), e.force);
    if (r == 0)
        r = run_errand(c, &e, reply.response->spill);
    control_reply_free(&reply);
    return r;
}

int run_spill_scrub(struct ctl *c, char **args, int n)
{
    struct errand e = {.action = SPILL(SCRUB), .verb = "scrub", .rate = UINT64_MAX};
    const char *rate = ctl_option(c, "rate");
    int r = rate ? parse_size("--rate", rate, &e.rate) : 0;

    return r ? r : begin(c, &e, args, n);
}

int run_spill_trim(struct ctl *c, char **args, int n)
{
    return begin(c, &(struct errand){.action = SPILL(TRIM), .verb = "trim"}, args, n);
}

int run_spill_online(struct ctl *c, char **args, int n)
{
    return begin(c, &(struct errand){.action = SPILL(ONLINE), .verb = "online"}, args, n);
}

int run_spill_offline(struct ctl *c, char **args, int n)
{
    return begin(c, &(struct errand){.action = SPILL(OFFLINE), .verb = "offline"}, args, n);
}

int run_spill_sync(struct ctl *c, char **args, int n)
{
    return begin(c, &(struct errand){.action = SPILL(SYNC), .verb = "sync"}, args, n);
}

int run_spill_stop(struct ctl *c, char **args, int n)
{
    return begin(c, &(struct errand){.action = SPILL(STOP), .verb = "stop"}, args, n);
}
