/* SPDX-License-Identifier: Apache-2.0 */
/* Counters and gauges: a table, JSON, or OpenMetrics text. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "out.h"

struct sampling {
    bool one_pool;
    struct pool_ref pool;
    bool openmetrics;
    uint32_t interval_ms; /* 0: once */
    uint64_t count;       /* samples; 0: for ever */
};

/* ---- asking */

static int sample(struct ctl *c, const struct sampling *s, struct control_reply *ret_reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Stats q = KVD__PROTO__STATS__INIT;

    q.has_pool = s->one_pool;
    q.pool = s->pool.id;
    request.body_case = KVD__PROTO__REQUEST__BODY_STATS;
    request.stats = &q;
    return ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_STATS, ret_reply);
}

static bool is_gauge(const Kvd__Proto__Stat *s)
{
    return s->has_gauge && s->gauge;
}

/* ---- OpenMetrics */

static void print_escaped(const char *text)
{
    for (; *text; text++) {
        if (*text == '\\' || *text == '"')
            putchar('\\');
        if (*text == '\n')
            fputs("\\n", stdout);
        else
            putchar(*text);
    }
}

/* A family is called as its samples are, but for the _total of a counter. */
static int family_length(const Kvd__Proto__Stat *s)
{
    size_t n = strlen(s->name), total = strlen("_total");

    if (!is_gauge(s) && n > total && strcmp(s->name + n - total, "_total") == 0)
        n -= total;
    return (int)n;
}

static void print_label(const char *name, const char *value, bool *first)
{
    printf("%s%s=\"", *first ? "{" : ",", name);
    print_escaped(value);
    putchar('"');
    *first = false;
}

static void print_sample(const Kvd__Proto__Stat *s)
{
    bool first = true;
    char tenant[16];

    fputs(s->name, stdout);
    if (s->pool)
        print_label("pool", s->pool, &first);
    if (s->tier)
        print_label("tier", s->tier, &first);
    if (s->has_tenant) {
        snprintf(tenant, sizeof(tenant), "%u", s->tenant);
        print_label("tenant", tenant, &first);
    }
    printf("%s %" PRIu64 "\n", first ? "" : "}", s->value);
}

/* All samples of one name, which must stand together. */
static void print_family(const Kvd__Proto__StatsReply *all, size_t first)
{
    const Kvd__Proto__Stat *s = all->stats[first];
    int n = family_length(s);

    printf("# TYPE %.*s %s\n", n, s->name, is_gauge(s) ? "gauge" : "counter");
    if (s->help) {
        printf("# HELP %.*s ", n, s->name);
        print_escaped(s->help);
        putchar('\n');
    }
    for (size_t i = first; i < all->n_stats; i++)
        if (strcmp(all->stats[i]->name, s->name) == 0)
            print_sample(all->stats[i]);
}

static void print_openmetrics(const Kvd__Proto__StatsReply *all)
{
    for (size_t i = 0; i < all->n_stats; i++) {
        size_t k = 0;

        while (strcmp(all->stats[k]->name, all->stats[i]->name) != 0)
            k++;
        if (k == i) /* the first of its name */
            print_family(all, i);
    }
    puts("# EOF");
}

/* ---- table and JSON */

static const struct out_column stat_columns[] = {
    {"NAME", "name", OUT_TEXT, 0},         {"POOL", "pool", OUT_TEXT, OUT_MAYBE},
    {"TIER", "tier", OUT_TEXT, OUT_MAYBE}, {"TENANT", "tenant", OUT_NUMBER, OUT_MAYBE},
    {"VALUE", "value", OUT_NUMBER, 0},     {"RATE", "rate", OUT_NUMBER, OUT_MAYBE},
    {"HELP", "help", OUT_TEXT, OUT_CUT},   {NULL, NULL, OUT_TEXT, 0},
};

static bool is_same_text(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : a == b;
}

static bool is_same(const Kvd__Proto__Stat *a, const Kvd__Proto__Stat *b)
{
    return strcmp(a->name, b->name) == 0 && is_same_text(a->pool, b->pool) &&
           is_same_text(a->tier, b->tier) && a->has_tenant == b->has_tenant &&
           (!a->has_tenant || a->tenant == b->tenant);
}

/* Per second since the sample before. A counter that has gone back began anew with the daemon. */
static void add_rate(struct json_object *row, const Kvd__Proto__Stat *now,
                     const Kvd__Proto__StatsReply *before, size_t i, double seconds)
{
    char text[32];
    double rate;

    if (is_gauge(now) || !before || i >= before->n_stats || !is_same(now, before->stats[i]) ||
        now->value < before->stats[i]->value)
        return;
    rate = (double)(now->value - before->stats[i]->value) / seconds;
    snprintf(text, sizeof(text), "%.1f", rate);
    json_object_object_add(row, "rate", json_object_new_double_s(rate, text));
}

static void add_stats(struct json_object *o, const Kvd__Proto__StatsReply *now,
                      const Kvd__Proto__StatsReply *before, double seconds)
{
    struct json_object *rows = out_array(o, "stats");

    for (size_t i = 0; i < now->n_stats; i++) {
        const Kvd__Proto__Stat *s = now->stats[i];
        struct json_object *row = out_row(rows);

        out_text(row, "name", s->name);
        out_text(row, "type", is_gauge(s) ? "gauge" : "counter");
        out_text(row, "pool", s->pool);
        out_text(row, "tier", s->tier);
        if (s->has_tenant)
            out_number(row, "tenant", s->tenant);
        out_number(row, "value", s->value);
        add_rate(row, s, before, i, seconds);
        out_text(row, "help", s->help);
    }
}

static struct json_object *document(const Kvd__Proto__StatsReply *now,
                                    const Kvd__Proto__StatsReply *before, double seconds)
{
    struct json_object *o = out_document();

    out_number(o, "time_s", (uint64_t)time(NULL));
    add_stats(o, now, before, seconds);
    return o;
}

static void print_sample_table(const struct ctl *c, struct json_object *o)
{
    struct json_object *rows = NULL;

    json_object_object_get_ex(o, "stats", &rows);
    out_table(c, rows, stat_columns);
}

/* ---- sampling */

static void show_once(const struct ctl *c, const struct sampling *s,
                      const Kvd__Proto__StatsReply *now)
{
    struct json_object *o;

    if (s->openmetrics) {
        print_openmetrics(now);
        return;
    }
    o = document(now, NULL, 1);
    if (!c->json)
        print_sample_table(c, o);
    out_end(c, o);
}

/* JSON: a document per line. */
static void show_again(const struct ctl *c, const Kvd__Proto__StatsReply *now,
                       const Kvd__Proto__StatsReply *before, double seconds)
{
    struct json_object *o = document(now, before, seconds);
    char clock[16];
    time_t t = time(NULL);

    if (c->json) {
        out_line(o);
    } else {
        strftime(clock, sizeof(clock), "%T", localtime(&t));
        printf("%s%s\n", before ? "\n" : "", clock);
        print_sample_table(c, o);
        json_object_put(o);
    }
    fflush(stdout);
}

static void sleep_until(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0)
        ;
}

static int repeat(struct ctl *c, const struct sampling *s)
{
    struct control_reply replies[2];
    uint64_t taken[2], next = frame_clock();
    uint64_t n = 0;
    int r = 0;

    while (r == 0 && (!s->count || n < s->count)) {
        size_t now = n % 2, before = !now;

        if (n)
            sleep_until(next += (uint64_t)s->interval_ms * 1000000);
        taken[now] = frame_clock();
        r = sample(c, s, &replies[now]);
        if (r)
            break;
        show_again(c, replies[now].response->stats, n ? replies[before].response->stats : NULL,
                   n ? (double)(taken[now] - taken[before]) / 1e9 : 1);
        if (n++)
            control_reply_free(&replies[before]);
    }
    if (n)
        control_reply_free(&replies[(n - 1) % 2]);
    return r;
}

static int parse_sampling(const struct ctl *c, struct sampling *ret)
{
    const char *interval = ctl_option(c, "interval"), *count = ctl_option(c, "count");
    int r = 0;

    ret->openmetrics = ctl_option(c, "openmetrics");
    if (count && !interval)
        return ctl_fail(EXIT_USAGE, "--count goes with --interval");
    if (ret->openmetrics && (interval || c->json))
        return ctl_fail(EXIT_USAGE, "--openmetrics goes neither with --interval nor with -o json");
    if (interval)
        r = parse_seconds("--interval", interval, &ret->interval_ms);
    if (r == 0 && count)
        r = parse_number("--count", count, 1, UINT32_MAX, &ret->count);
    return r;
}

int run_stats(struct ctl *c, char **args, int n)
{
    struct sampling s = {.one_pool = n > 0};
    struct control_reply reply;
    int r = parse_sampling(c, &s);

    if (r == 0)
        r = n ? ctl_find_pool(c, args[0], &s.pool) : ctl_connect(c);
    if (r == 0 && s.interval_ms)
        return repeat(c, &s);
    if (r == 0)
        r = sample(c, &s, &reply);
    if (r)
        return r;
    show_once(c, &s, reply.response->stats);
    control_reply_free(&reply);
    return 0;
}
