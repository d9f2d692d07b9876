/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds, ratios, the table. */
#include <errno.h>
#include <json-c/json.h>
#include <libsmartcols/libsmartcols.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

struct report {
    bool json;
    bool judge; /* say whether goals were met */
    struct libscols_table *table;
    unsigned rows, missed, broken;
};

/* ---- rounds */

struct samples {
    sample_fn sample;
    double *v;
};

static int take(struct samples *s, void *arg, unsigned round)
{
    double v = NAN;
    int r = s->sample(arg, &v);

    if (r == 0)
        s->v[round] = v;
    return r;
}

/* Forwards and backwards by turns, so that nobody always comes after the same one. */
static int measure(unsigned rounds, struct samples *s, size_t n, void *arg)
{
    int r = 0;

    for (unsigned round = 0; round < rounds && r == 0; round++)
        for (size_t i = 0; i < n && r == 0; i++)
            r = take(&s[round % 2 ? n - 1 - i : i], arg, round);
    return r;
}

static double middle(const double *v, size_t n)
{
    double *copy = malloc(n * sizeof(*copy)), m;

    if (!copy)
        return NAN;
    memcpy(copy, v, n * sizeof(*copy));
    m = median(copy, n);
    free(copy);
    return m;
}

/* The best of several floors by their medians. */
static size_t best(const struct samples *s, size_t n, unsigned rounds, bool more)
{
    size_t at = 1;

    for (size_t i = 2; i < n; i++) {
        double a = middle(s[at].v, rounds), b = middle(s[i].v, rounds);

        if (more ? b > a : b < a)
            at = i;
    }
    return at;
}

int bench_compare(struct bench *b, const struct figure *f, void *arg, sample_fn ours,
                  const struct contender *floors, size_t n)
{
    struct samples s[CONTENDERS_MAX + 1] = {{.sample = ours}};
    struct result result = {.n = b->rounds};
    int r = 0;

    for (size_t i = 0; i < n; i++)
        s[i + 1].sample = floors[i].sample;
    for (size_t i = 0; i <= n && r == 0; i++) {
        s[i].v = calloc(b->rounds, sizeof(*s[i].v));
        r = s[i].v ? 0 : -ENOMEM;
    }
    if (r == 0)
        r = measure(b->rounds, s, n + 1, arg);
    if (r == 0) {
        size_t at = n ? best(s, n + 1, b->rounds, f->more_is_better) : 0;

        result.ours = s[0].v;
        result.floor = n ? s[at].v : NULL;
        result.floor_name = n ? floors[at - 1].name : NULL;
        report_add(b->report, f, &result);
    }
    for (size_t i = 0; i <= n; i++)
        free(s[i].v);
    return r;
}

/* ---- rows */

struct row {
    double ours, least, most; /* median and extremes of the rounds */
    double floor;             /* NAN: none */
    double ratio; /* the median of the rounds' own ratios: each round has its own weather */
    const char *verdict;
};

static double ratio_of(const struct result *x)
{
    double *v = calloc(x->n, sizeof(*v)), m;

    if (!v)
        return NAN;
    for (size_t i = 0; i < x->n; i++)
        v[i] = x->ours[i] / x->floor[i];
    m = median(v, x->n);
    free(v);
    return m;
}

static bool met(const struct figure *f, double ours, double ratio)
{
    switch (f->goal) {
    case GOAL_RATIO_AT_MOST:
        return ratio <= f->limit;
    case GOAL_RATIO_AT_LEAST:
        return ratio >= f->limit;
    case GOAL_OURS_AT_MOST:
        return ours <= f->limit;
    case GOAL_OURS_AT_LEAST:
        return ours >= f->limit;
    case GOAL_NONE:
        break;
    }
    return true;
}

/* "busy": the machine could not have met the goal just now, since its floor has not either. */
static const char *verdict(const struct figure *f, const struct row *row)
{
    bool absolute = f->goal == GOAL_OURS_AT_MOST || f->goal == GOAL_OURS_AT_LEAST;

    if (f->goal == GOAL_NONE)
        return "";
    if (met(f, row->ours, row->ratio))
        return "ok";
    return absolute && !isnan(row->floor) && !met(f, row->floor, NAN) ? "busy" : "MISS";
}

static struct row row_of(const struct figure *f, const struct result *x)
{
    struct row row = {.ours = middle(x->ours, x->n),
                      .least = x->ours[0],
                      .most = x->ours[0],
                      .floor = NAN,
                      .ratio = NAN};

    for (size_t i = 1; i < x->n; i++) {
        row.least = fmin(row.least, x->ours[i]);
        row.most = fmax(row.most, x->ours[i]);
    }
    if (x->floor) {
        row.floor = middle(x->floor, x->n);
        row.ratio = ratio_of(x);
    }
    row.verdict = verdict(f, &row);
    return row;
}

static const char *goal_sign(enum goal g)
{
    return g == GOAL_RATIO_AT_MOST || g == GOAL_OURS_AT_MOST ? "<=" : ">=";
}

static bool of_ratio(enum goal g)
{
    return g == GOAL_RATIO_AT_MOST || g == GOAL_RATIO_AT_LEAST;
}

/* ---- JSON */

static void add_number(struct json_object *o, const char *key, double v)
{
    char text[32];

    snprintf(text, sizeof(text), "%.6g", v);
    json_object_object_add(o, key, isfinite(v) ? json_object_new_double_s(v, text) : NULL);
}

static void add_text(struct json_object *o, const char *key, const char *v)
{
    json_object_object_add(o, key, json_object_new_string(v));
}

static void print_json(const struct figure *f, const struct result *x, const struct row *row)
{
    struct json_object *o = json_object_new_object();

    json_object_object_add(o, "schema", json_object_new_int(1));
    add_text(o, "name", f->name);
    add_text(o, "unit", f->unit);
    json_object_object_add(o, "rounds", json_object_new_int((int)x->n));
    add_number(o, "ours", row->ours);
    add_number(o, "ours_least", row->least);
    add_number(o, "ours_most", row->most);
    if (x->floor) {
        add_text(o, "floor_name", x->floor_name);
        add_number(o, "floor", row->floor);
        add_number(o, "ratio", row->ratio);
    }
    if (f->goal != GOAL_NONE) {
        add_text(o, "goal_of", of_ratio(f->goal) ? "ratio" : "ours");
        add_text(o, "goal", goal_sign(f->goal));
        add_number(o, "limit", f->limit);
        add_text(o, "verdict", row->verdict);
    }
    puts(
        json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
    fflush(stdout);
    json_object_put(o);
}

/* ---- table */

enum column {
    NAME,
    OURS,
    UNIT,
    FLOOR,
    RATIO,
    GOAL,
    VERDICT,
    AGAINST,
    COLUMNS,
};

static struct libscols_table *table_new(void)
{
    static const struct {
        const char *title;
        int flags;
    } columns[COLUMNS] = {
        [NAME] = {"FIGURE", 0},
        [OURS] = {"OURS", SCOLS_FL_RIGHT},
        [UNIT] = {"UNIT", 0},
        [FLOOR] = {"FLOOR", SCOLS_FL_RIGHT},
        [RATIO] = {"RATIO", SCOLS_FL_RIGHT},
        [GOAL] = {"GOAL", SCOLS_FL_RIGHT},
        [VERDICT] = {"", 0},
        [AGAINST] = {"THE FLOOR IS", 0},
    };
    struct libscols_table *t = scols_new_table();

    if (!t)
        return NULL;
    for (int i = 0; i < COLUMNS; i++)
        if (!scols_table_new_column(t, columns[i].title, 0, columns[i].flags)) {
            scols_unref_table(t);
            return NULL;
        }
    return t;
}

static void set_number(struct libscols_line *line, enum column column, double v)
{
    char text[32];

    if (isnan(v))
        return;
    snprintf(text, sizeof(text), fabs(v) >= 1000 ? "%.0f" : "%.3g", v);
    scols_line_set_data(line, column, text);
}

static void add_line(struct report *r, const struct figure *f, const struct result *x,
                     const struct row *row)
{
    struct libscols_line *line = scols_table_new_line(r->table, NULL);
    char goal[48];

    if (!line)
        return;
    scols_line_set_data(line, NAME, f->name);
    scols_line_set_data(line, UNIT, f->unit);
    set_number(line, OURS, row->ours);
    set_number(line, FLOOR, row->floor);
    set_number(line, RATIO, row->ratio);
    if (f->goal != GOAL_NONE) {
        snprintf(goal, sizeof(goal), "%s%s %g", of_ratio(f->goal) ? "" : "ours ",
                 goal_sign(f->goal), f->limit);
        scols_line_set_data(line, GOAL, goal);
        scols_line_set_data(line, VERDICT, row->verdict);
    }
    if (x->floor)
        scols_line_set_data(line, AGAINST, x->floor_name);
}

/* ---- */

int report_new(bool json, bool judge, struct report **ret)
{
    struct report *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    r->json = json;
    r->judge = judge;
    r->table = json ? NULL : table_new();
    if (!json && !r->table) {
        free(r);
        return -ENOMEM;
    }
    *ret = r;
    return 0;
}

void report_add(struct report *r, const struct figure *figure, const struct result *result)
{
    struct figure without_goal = *figure;
    const struct figure *f = r->judge ? figure : &without_goal;
    struct row row;

    without_goal.goal = GOAL_NONE;
    row = row_of(f, result);

    r->rows++;
    r->missed += strcmp(row.verdict, "MISS") == 0;
    r->broken += !isfinite(row.ours) || (result->floor && !isfinite(row.floor));
    if (r->json)
        print_json(f, result, &row);
    else
        add_line(r, f, result, &row);
}

unsigned report_rows(const struct report *r)
{
    return r->rows;
}

unsigned report_missed(const struct report *r)
{
    return r->missed;
}

unsigned report_broken(const struct report *r)
{
    return r->broken;
}

void report_end(struct report *r)
{
    if (!r)
        return;
    if (r->table) {
        scols_print_table(r->table);
        scols_unref_table(r->table);
    }
    free(r);
}
