/* SPDX-License-Identifier: Apache-2.0 */
#include "stores.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool stores_try(struct ctl *c, struct control_reply *ret_reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Spill q = KVD__PROTO__SPILL__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_SPILL;
    request.spill = &q;
    if (control_call(c->control, &request, KVD__PROTO__RESPONSE__BODY_SPILL,
                     control_deadline(c->timeout_ms), ret_reply) < 0)
        return false;
    if (ret_reply->response->spill->n_stores)
        return true;
    control_reply_free(ret_reply);
    return false;
}

bool store_is_unwell(const Kvd__Proto__StoreStatus *s)
{
    static const char *const unwell[] = {"offline", "read-only", "waiting"};

    for (size_t i = 0; i < sizeof(unwell) / sizeof(unwell[0]); i++)
        if (strcmp(s->state, unwell[i]) == 0)
            return true;
    return s->problem && s->problem[0];
}

bool store_is_of(const Kvd__Proto__StoreStatus *s, const char *pool)
{
    size_t n = strlen(pool);

    return strncmp(s->name, pool, n) == 0 && s->name[n] == '/';
}

/* ---- as a document */

/* That a store was opened is said by its state. */
static bool is_worth_telling(const Kvd__Proto__StoreTask *t)
{
    return t && (t->running || t->status < 0 || strcmp(t->name, "open") != 0);
}

static void add_task(struct json_object *row, const Kvd__Proto__StoreTask *t)
{
    struct json_object *o = out_object(row, "task");

    out_text(o, "name", t->name);
    out_number(o, "done", t->done);
    out_number(o, "total", t->total);
    out_text(o, "unit", t->unit);
    out_flag(o, "running", t->running);
    out_text(o, "result", t->result && t->result[0] ? t->result : NULL);
    if (t->has_status && !t->running)
        out_signed(o, "status", t->status);
}

static void add_optional(struct json_object *row, const char *key, int has, uint64_t value)
{
    if (has)
        out_number(row, key, value);
}

static void add_some_text(struct json_object *row, const char *key, const char *text)
{
    out_text(row, key, text && text[0] ? text : NULL);
}

static void add_store(struct json_object *rows, const Kvd__Proto__StoreStatus *x)
{
    struct json_object *row = out_row(rows);

    out_text(row, "name", x->name);
    out_text(row, "path", x->path);
    out_text(row, "state", x->state);
    add_some_text(row, "problem", x->problem);
    add_some_text(row, "fix", x->fix);
    add_some_text(row, "io", x->io);
    add_some_text(row, "note", x->note);
    add_optional(row, "bytes", x->has_bytes, x->bytes);
    add_optional(row, "records", x->has_records, x->records);
    add_optional(row, "used", x->has_used, x->used);
    add_optional(row, "queued", x->has_queued, x->queued);
    add_optional(row, "writing", x->has_writing, x->writing);
    add_optional(row, "reading", x->has_reading, x->reading);
    add_optional(row, "written_bytes", x->has_written_bytes, x->written_bytes);
    add_optional(row, "read_bytes", x->has_read_bytes, x->read_bytes);
    add_optional(row, "errors", x->has_errors, x->errors);
    add_optional(row, "epoch", x->has_epoch, x->epoch);
    add_some_text(row, "admission", x->admission);
    add_optional(row, "bandwidth", x->has_bandwidth, x->bandwidth);
    if (is_worth_telling(x->task))
        add_task(row, x->task);
}

void stores_add(struct json_object *o, const Kvd__Proto__SpillReply *s)
{
    struct json_object *rows = out_array(o, "stores");

    for (size_t i = 0; i < s->n_stores; i++)
        add_store(rows, s->stores[i]);
}

/* ---- for people */

static const struct out_column columns[] = {
    {"STORE", "name", OUT_TEXT, 0},
    {"STATE", "state", OUT_STATE, 0},
    {"SIZE", "bytes", OUT_SIZE, 0},
    {"RECORDS", "records", OUT_NUMBER, 0},
    {"USED", "used", OUT_NUMBER, 0},
    {"QUEUED", "queued", OUT_NUMBER, 0},
    {"WRITING", "writing", OUT_NUMBER, 0},
    {"READING", "reading", OUT_NUMBER, 0},
    {"WRITTEN", "written_bytes", OUT_SIZE, 0},
    {"READ", "read_bytes", OUT_SIZE, 0},
    {"ERRORS", "errors", OUT_NUMBER, 0},
    {"TASK", "task", OUT_TASK, OUT_MAYBE},
    {"IO", "io", OUT_TEXT, OUT_CUT | OUT_MAYBE},
    {"PATH", "path", OUT_TEXT, OUT_CUT},
    {NULL, NULL, OUT_TEXT, 0},
};

static void print_line(const char *what, const char *store, const char *text, const char *fix)
{
    char *line;

    if (asprintf(&line, "%s: %s %s%s%s", what, store, text, fix ? "; fix: " : "", fix ? fix : "") <
        0)
        ctl_out_of_memory();
    out_clean(line);
    free(line);
}

bool store_is_mentioned(const Kvd__Proto__StatusReply *s, const char *store)
{
    for (size_t i = 0; i < s->n_problems; i++)
        if (strstr(s->problems[i], store))
            return true;
    return false;
}

/* Unless it was ended on purpose, or is why the store is as it is. */
static bool is_failure(const Kvd__Proto__StoreStatus *x)
{
    const Kvd__Proto__StoreTask *t = x->task;

    return t && !t->running && t->status < 0 && t->status != -ECANCELED && t->result &&
           !(store_is_unwell(x) && x->problem && strcmp(x->problem, t->result) == 0);
}

static void print_troubles(const Kvd__Proto__StoreStatus *x, bool said)
{
    char text[1024];

    if (store_is_unwell(x) && !said) {
        snprintf(text, sizeof(text), "is %s%s%s", x->state, x->problem && x->problem[0] ? ": " : "",
                 x->problem ? x->problem : "");
        print_line("problem", x->name, text, x->fix && x->fix[0] ? x->fix : NULL);
    }
    if (is_failure(x)) {
        snprintf(text, sizeof(text), "(%s failed): %s", x->task->name, x->task->result);
        print_line("problem", x->name, text, NULL);
    }
    if (x->note && x->note[0]) {
        snprintf(text, sizeof(text), "could be better: %s", x->note);
        print_line("note", x->name, text, NULL);
    }
}

void stores_print(struct ctl *c, struct json_object *o, const Kvd__Proto__SpillReply *s,
                  const Kvd__Proto__StatusReply *said)
{
    if (c->json)
        return;
    out_rows(c, o, "stores", columns,
             "the daemon has no spill store; a section [spill SPACE/POOL/NAME] makes one, see "
             "kvd.conf(5)");
    for (size_t i = 0; i < s->n_stores; i++)
        print_troubles(s->stores[i], said && store_is_mentioned(said, s->stores[i]->name));
}
