/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Output. A command builds one JSON document with raw numbers in base units; with -o json that is
 * printed, else tables are made of it: a column is a key of the rows and a way to show its value.
 * So both always say the same.
 */
#ifndef KVD_KVCTL_OUT_H
#define KVD_KVCTL_OUT_H

#include <json-c/json.h>

#include "kvctl.h"

#define OUT_SCHEMA 1

enum out_kind {
    OUT_TEXT,
    OUT_NUMBER,
    OUT_SIZE,     /* bytes */
    OUT_DURATION, /* seconds */
    OUT_USER,     /* uid */
    OUT_LIST,     /* of strings, joined by commas */
    OUT_STATE,    /* text, coloured when it is bad news */
    OUT_TASK,     /* an object as store_add() makes it */
};

enum out_flags {
    OUT_CUT = 1 << 0,   /* may be cut when the terminal is narrow */
    OUT_MAYBE = 1 << 1, /* no column when no row has a value */
};

struct out_column {
    const char *title; /* NULL: the end */
    const char *key;   /* "a.b": of the object in a */
    enum out_kind kind;
    unsigned flags;
};

/* {"schema": 1} */
struct json_object *out_document(void);

/* Adding to an object; what is added belongs to it. A NULL text adds nothing. */
void out_text(struct json_object *o, const char *key, const char *text);
void out_number(struct json_object *o, const char *key, uint64_t value);
void out_flag(struct json_object *o, const char *key, bool value);
void out_texts(struct json_object *o, const char *key, char *const *texts, size_t n);
void out_hex(struct json_object *o, const char *key, const uint8_t *bytes, size_t n);
struct json_object *out_array(struct json_object *o, const char *key);
struct json_object *out_object(struct json_object *o, const char *key);
struct json_object *out_row(struct json_object *array);

void out_signed(struct json_object *o, const char *key, int64_t value);

/* A table of an array of objects. */
void out_table(const struct ctl *c, struct json_object *rows, const struct out_column *columns);

/* One object as lines "title  value". */
void out_fields(const struct ctl *c, struct json_object *o, const struct out_column *columns);

/* Prints the document (with -o json, else nothing) and gives it back. */
void out_end(const struct ctl *c, struct json_object *document);

/* The document on a line of its own: for one of many. */
void out_line(struct json_object *document);

/* A line of others' text: control characters come out as '?'. */
void out_clean(const char *text);

/* Long work, on a terminal only; done == total takes the line away. */
void out_progress(const struct ctl *c, const char *what, uint64_t done, uint64_t total);

/* The same in words; NULL takes them away. */
void out_progress_text(const struct ctl *c, const char *text);

/* An array of the document as a table; a note when it is empty. */
void out_rows(struct ctl *c, struct json_object *o, const char *key,
              const struct out_column *columns, const char *none);

#endif
