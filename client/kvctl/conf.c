/* SPDX-License-Identifier: Apache-2.0 */
/* `kvctl config check`: the daemon's own reading of a configuration, without a daemon. */
#include <stdio.h>
#include <string.h>

#include "daemon/config.h"
#include "out.h"

struct report {
    const struct ctl *c;
    struct json_object *problems;
};

static void take_problem(void *arg, const struct config_problem *p)
{
    struct report *report = arg;
    struct json_object *row = out_row(report->problems);

    out_text(row, "severity", p->warning ? "warning" : "error");
    out_text(row, "file", p->file);
    if (p->line)
        out_number(row, "line", p->line);
    out_text(row, "text", p->text);
    if (!report->c->json)
        config_problem_print(stdout, p);
}

static uint64_t pool_bytes(const struct config *config)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < config->pool_count; i++)
        sum += config->pools[i].size;
    return sum;
}

/* Of the stores whose size is written. */
static uint64_t store_bytes(const struct config *config)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < config->store_count; i++)
        sum += config->stores[i].size;
    return sum;
}

static void show_stores(const struct config *config)
{
    uint64_t bytes = store_bytes(config);
    char size[SMALL_TEXT_SIZE];

    text_size(bytes, size);
    printf(", %u store%s", config->store_count, config->store_count == 1 ? "" : "s");
    if (bytes)
        printf(" (%s)", size);
}

static const char *plural(uint32_t n)
{
    return n == 1 ? "" : "s";
}

static void show_config(const struct ctl *c, struct json_object *o, const char *path,
                        const struct config *config)
{
    uint64_t bytes = pool_bytes(config);
    char size[SMALL_TEXT_SIZE];

    out_number(o, "spaces", config->space_count);
    out_number(o, "pools", config->pool_count);
    out_number(o, "pool_bytes", bytes);
    out_number(o, "sockets", config->socket_count);
    out_number(o, "stores", config->store_count);
    out_number(o, "store_bytes", store_bytes(config));
    if (c->json)
        return;
    text_size(bytes, size);
    printf("%s: good: %u space%s, %u pool%s (%s), %u socket%s", path, config->space_count,
           plural(config->space_count), config->pool_count, plural(config->pool_count), size,
           config->socket_count, plural(config->socket_count));
    if (config->store_count)
        show_stores(config);
    putchar('\n');
}

int run_config_check(struct ctl *c, char **args, int n)
{
    const char *path = n ? args[0] : CONFIG_FILE;
    struct json_object *o = out_document();
    struct report report = {c, out_array(o, "problems")};
    struct config *config = NULL;
    int r = config_load(path, &config, take_problem, &report);

    out_text(o, "file", path);
    out_flag(o, "good", r == 0);
    if (r == 0)
        show_config(c, o, path, config);
    out_end(c, o);
    config_free(config);
    if (r < 0)
        return ctl_fail(ctl_status_of(r), "the daemon would not take %s", path);
    return 0;
}
