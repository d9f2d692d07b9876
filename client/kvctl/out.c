/* SPDX-License-Identifier: Apache-2.0 */
#include "out.h"

#include <errno.h>
#include <inttypes.h>
#include <libsmartcols.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- documents */

static struct json_object *need(struct json_object *o)
{
    if (!o)
        ctl_out_of_memory();
    return o;
}

static void add(struct json_object *o, const char *key, struct json_object *value)
{
    if (json_object_object_add(o, key, need(value)) < 0)
        ctl_out_of_memory();
}

struct json_object *out_document(void)
{
    struct json_object *o = need(json_object_new_object());

    out_number(o, "schema", OUT_SCHEMA);
    return o;
}

void out_text(struct json_object *o, const char *key, const char *text)
{
    if (text)
        add(o, key, json_object_new_string(text));
}

void out_number(struct json_object *o, const char *key, uint64_t value)
{
    add(o, key, json_object_new_uint64(value));
}

void out_signed(struct json_object *o, const char *key, int64_t value)
{
    add(o, key, json_object_new_int64(value));
}

void out_flag(struct json_object *o, const char *key, bool value)
{
    add(o, key, json_object_new_boolean(value));
}

void out_texts(struct json_object *o, const char *key, char *const *texts, size_t n)
{
    struct json_object *array = out_array(o, key);

    for (size_t i = 0; i < n; i++)
        if (json_object_array_add(array, need(json_object_new_string(texts[i]))) < 0)
            ctl_out_of_memory();
}

void out_hex(struct json_object *o, const char *key, const uint8_t *bytes, size_t n)
{
    char *text = malloc(2 * n + 1);

    if (!text)
        ctl_out_of_memory();
    text[0] = '\0';
    for (size_t i = 0; i < n; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    out_text(o, key, text);
    free(text);
}

struct json_object *out_array(struct json_object *o, const char *key)
{
    struct json_object *array = need(json_object_new_array());

    add(o, key, array);
    return array;
}

struct json_object *out_object(struct json_object *o, const char *key)
{
    struct json_object *inner = need(json_object_new_object());

    add(o, key, inner);
    return inner;
}

struct json_object *out_row(struct json_object *array)
{
    struct json_object *row = need(json_object_new_object());

    if (json_object_array_add(array, row) < 0)
        ctl_out_of_memory();
    return row;
}

/* ---- values for people */

/* "a.b" is b in a. NULL: not there. */
static struct json_object *value_of(struct json_object *o, const char *key)
{
    const char *dot = strchr(key, '.');
    struct json_object *v = NULL;
    char head[32];

    if (!dot)
        return json_object_object_get_ex(o, key, &v) ? v : NULL;
    snprintf(head, sizeof(head), "%.*s", (int)(dot - key), key);
    return json_object_object_get_ex(o, head, &v) ? value_of(v, dot + 1) : NULL;
}

static void show_list(struct json_object *list, char **ret)
{
    size_t n = json_object_array_length(list), bytes = 1, at = 0;

    for (size_t i = 0; i < n; i++)
        bytes += (size_t)json_object_get_string_len(json_object_array_get_idx(list, i)) + 2;
    *ret = calloc(1, bytes);
    for (size_t i = 0; *ret && i < n; i++)
        at += (size_t)snprintf(*ret + at, bytes - at, "%s%s", i ? ", " : "",
                               json_object_get_string(json_object_array_get_idx(list, i)));
}

static void show_user(uint64_t uid, char **ret)
{
    const struct passwd *p = getpwuid((uid_t)uid);

    if (p)
        *ret = strdup(p->pw_name);
    else if (asprintf(ret, "%" PRIu64, uid) < 0)
        *ret = NULL;
}

/* "scrub 45 %", "scrub done", "trim failed". */
static void show_task(struct json_object *task, char **ret)
{
    struct json_object *name = value_of(task, "name"), *status = value_of(task, "status");
    uint64_t done = json_object_get_uint64(value_of(task, "done"));
    uint64_t total = json_object_get_uint64(value_of(task, "total"));
    char how[32] = "";

    if (!json_object_get_boolean(value_of(task, "running")))
        strcpy(how, json_object_get_int(status) == -ECANCELED ? " stopped"
                    : json_object_get_int(status) < 0         ? " failed"
                                                              : " done");
    else if (total)
        snprintf(how, sizeof(how), " %.0f %%", 100.0 * (double)done / (double)total);
    if (asprintf(ret, "%s%s", json_object_get_string(name), how) < 0)
        *ret = NULL;
}

/* The caller frees. */
static char *show(struct json_object *v, enum out_kind kind)
{
    char small[SMALL_TEXT_SIZE], *text = NULL;

    switch (kind) {
    case OUT_SIZE:
        text_size(json_object_get_uint64(v), small);
        text = strdup(small);
        break;
    case OUT_DURATION:
        text_duration(json_object_get_uint64(v), small);
        text = strdup(small);
        break;
    case OUT_USER:
        show_user(json_object_get_uint64(v), &text);
        break;
    case OUT_LIST:
        show_list(v, &text);
        break;
    case OUT_TASK:
        show_task(v, &text);
        break;
    default:
        text = strdup(json_object_get_string(v));
        break;
    }
    if (!text)
        ctl_out_of_memory();
    return text;
}

static bool is_bad_news(const char *text)
{
    static const char *const bad[] = {"degraded",  "broken",  "offline",
                                      "read-only", "waiting", "stopping"};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (strcmp(text, bad[i]) == 0)
            return true;
    return false;
}

/* ---- tables */

static bool is_right(enum out_kind kind)
{
    return kind == OUT_NUMBER || kind == OUT_SIZE || kind == OUT_DURATION;
}

static bool is_empty(struct json_object *v)
{
    return !v || (json_object_is_type(v, json_type_array) && json_object_array_length(v) == 0);
}

static bool is_wanted(struct json_object *rows, const struct out_column *col)
{
    size_t n = json_object_array_length(rows);

    if (!(col->flags & OUT_MAYBE))
        return true;
    for (size_t i = 0; i < n; i++)
        if (!is_empty(value_of(json_object_array_get_idx(rows, i), col->key)))
            return true;
    return false;
}

static void set_cell(struct libscols_line *line, size_t i, struct json_object *v,
                     const struct out_column *col)
{
    char *text;

    if (is_empty(v)) {
        if (scols_line_set_data(line, i, "-") < 0)
            ctl_out_of_memory();
        return;
    }
    text = show(v, col->kind);
    if (col->kind == OUT_STATE && is_bad_news(text))
        scols_cell_set_color(scols_line_get_cell(line, i), "red");
    if (scols_line_refer_data(line, i, text) < 0) /* takes it over */
        ctl_out_of_memory();
}

static struct libscols_table *new_table(const struct ctl *c, bool headers)
{
    struct libscols_table *t = scols_new_table();

    if (!t)
        ctl_out_of_memory();
    scols_table_enable_noheadings(t, !headers);
    scols_table_enable_colors(t, c->color);
    scols_table_set_column_separator(t, "  ");
    return t;
}

void out_table(const struct ctl *c, struct json_object *rows, const struct out_column *columns)
{
    struct libscols_table *t = new_table(c, c->headers);
    size_t n = json_object_array_length(rows);
    unsigned wanted = 0; /* bit mask */

    for (size_t k = 0; columns[k].title; k++) {
        int flags = (is_right(columns[k].kind) ? SCOLS_FL_RIGHT : 0) |
                    (columns[k].flags & OUT_CUT ? SCOLS_FL_TRUNC : 0);

        if (!is_wanted(rows, &columns[k]))
            continue;
        wanted |= 1u << k;
        if (!scols_table_new_column(t, columns[k].title, 0, flags))
            ctl_out_of_memory();
    }
    for (size_t i = 0; i < n; i++) {
        struct libscols_line *line = scols_table_new_line(t, NULL);
        size_t at = 0;

        if (!line)
            ctl_out_of_memory();
        for (size_t k = 0; columns[k].title; k++)
            if (wanted & 1u << k)
                set_cell(line, at++, value_of(json_object_array_get_idx(rows, i), columns[k].key),
                         &columns[k]);
    }
    scols_print_table(t);
    scols_unref_table(t);
}

void out_fields(const struct ctl *c, struct json_object *o, const struct out_column *columns)
{
    struct libscols_table *t = new_table(c, false);

    if (!scols_table_new_column(t, "name", 0, 0) ||
        !scols_table_new_column(t, "value", 0, SCOLS_FL_WRAP))
        ctl_out_of_memory();
    for (; columns->title; columns++) {
        struct json_object *v = value_of(o, columns->key);
        struct libscols_line *line;

        if (is_empty(v))
            continue;
        line = scols_table_new_line(t, NULL);
        if (!line || scols_line_set_data(line, 0, columns->title) < 0)
            ctl_out_of_memory();
        set_cell(line, 1, v, columns);
    }
    scols_print_table(t);
    scols_unref_table(t);
}

/* ---- ends */

#define JSON_STYLE (JSON_C_TO_STRING_NOSLASHESCAPE)

void out_end(const struct ctl *c, struct json_object *document)
{
    if (c->json)
        puts(json_object_to_json_string_ext(document, JSON_STYLE | JSON_C_TO_STRING_PRETTY |
                                                          JSON_C_TO_STRING_SPACED));
    json_object_put(document);
}

void out_line(struct json_object *document)
{
    puts(json_object_to_json_string_ext(document, JSON_STYLE | JSON_C_TO_STRING_PLAIN));
    json_object_put(document);
}

void out_clean(const char *text)
{
    char *copy = strdup(text);

    if (!copy)
        ctl_out_of_memory();
    ctl_make_printable(copy);
    puts(copy);
    free(copy);
}

void out_progress_text(const struct ctl *c, const char *text)
{
    if (c->json || !isatty(STDERR_FILENO))
        return;
    if (text)
        fprintf(stderr, "\r%s\033[K", text);
    else
        fputs("\r\033[K", stderr);
}

void out_progress(const struct ctl *c, const char *what, uint64_t done, uint64_t total)
{
    char text[256];

    snprintf(text, sizeof(text), "%s: %" PRIu64 " of %" PRIu64 " slots", what, done, total);
    out_progress_text(c, done < total ? text : NULL);
}

void out_rows(struct ctl *c, struct json_object *o, const char *key,
              const struct out_column *columns, const char *none)
{
    struct json_object *rows = NULL;

    json_object_object_get_ex(o, key, &rows);
    if (c->json)
        return;
    if (json_object_array_length(rows))
        out_table(c, rows, columns);
    else
        ctl_note("%s", none);
}
