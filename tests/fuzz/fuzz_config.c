/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a configuration: refused with a printable reason, or complete and consistent. */
#define _GNU_SOURCE
#include "daemon/config.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void count(void *arg, const struct config_problem *problem)
{
    unsigned *errors = arg;

    require(problem->file && problem->text[0]);
    for (const char *p = problem->text; *p; p++)
        require(!iscntrl((unsigned char)*p));
    *errors += !problem->warning;
}

static void check_pool(const struct config *c, const struct config_pool *p)
{
    require(p->name[0] && strnlen(p->name, sizeof(p->name)) < sizeof(p->name));
    require(p->space < c->space_count);
    require(p->parts >= 1 && p->parts <= 64);
    require(p->part_bytes > 0 && p->part_bytes % 4096 == 0);
    require(p->slot_bytes == p->part_bytes * p->parts && p->slot_bytes <= 4ull << 30);
    require(p->slots >= 1 && p->slots <= 1u << 28);
    require(p->size == p->slots * p->slot_bytes);
    require(p->chunk > 0);
    require(p->low_water < p->high_water || (p->low_water == 0 && p->high_water == 0));
    require(p->high_water <= p->slots);
}

static void check_socket(const struct config *c, const struct config_socket *s)
{
    require(s->path[0] == '/' && strnlen(s->path, sizeof(s->path)) < sizeof(s->path));
    require(s->role >= CONFIG_ROLE_READER && s->role <= CONFIG_ROLE_ADMIN);
    require(s->mode <= 0777);
    require(s->max_connections >= 1 && s->max_connections <= c->daemon.max_connections);
    require(s->spaces.count >= 1 && s->spaces.count <= CONFIG_PATTERNS_MAX);
    require(s->uids.count <= CONFIG_UIDS_MAX);
    for (uint32_t i = 0; i < c->space_count; i++)
        config_socket_serves(s, c->spaces[i].name);
}

static void check_store(const struct config *c, const struct config_store *s)
{
    require(s->name[0] && strnlen(s->name, sizeof(s->name)) < sizeof(s->name));
    require(s->path[0] == '/' && strnlen(s->path, sizeof(s->path)) < sizeof(s->path));
    require(s->pool < c->pool_count);
    require(s->size == 0 || s->size >= 16 * c->pools[s->pool].slot_bytes);
    require(s->admission <= CONFIG_ADMIT_SECOND_TOUCH && s->io <= CONFIG_IO_THREADS);
    require(s->register_buffers <= CONFIG_REGISTER_NO);
    require(s->queue_depth >= 1 && s->queue_depth <= 256);
}

static void check(const struct config *c)
{
    char identity[CONFIG_IDENTITY_SIZE];

    require(c->space_count >= 1 && c->space_count <= CONFIG_SPACES_MAX);
    require(c->socket_count >= 1 && c->socket_count <= CONFIG_SOCKETS_MAX);
    require(c->pool_count <= CONFIG_POOLS_MAX && c->tenant_count <= CONFIG_TENANTS_MAX);
    require(c->store_count <= CONFIG_STORES_MAX && c->daemon.digest_threads <= 64);
    require(c->daemon.max_inline < c->daemon.max_frame);
    for (uint32_t i = 0; i < c->space_count; i++) {
        require(config_space_identity(&c->spaces[i], identity, sizeof(identity)) >= 0);
        require(!c->spaces[i].seed[0] || !c->spaces[i].first_parent.len);
        require(c->spaces[i].block_tokens >= 1);
    }
    for (uint32_t i = 0; i < c->pool_count; i++)
        check_pool(c, &c->pools[i]);
    for (uint32_t i = 0; i < c->socket_count; i++)
        check_socket(c, &c->sockets[i]);
    for (uint32_t i = 0; i < c->store_count; i++)
        check_store(c, &c->stores[i]);
    for (uint32_t i = 0; i < c->tenant_count; i++)
        require(config_tenant(c, c->tenants[i].tenant) == &c->tenants[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config *config = NULL;
    unsigned errors = 0;
    FILE *f;
    int r;

    if (size == 0) /* fmemopen() may refuse that */
        return 0;
    f = fmemopen((void *)(uintptr_t)data, size, "r");
    if (!f)
        return 0;
    r = config_load_stream(f, "fuzz.conf", &config, count, &errors);
    fclose(f);
    require(r == 0 || r == -EINVAL || r == -ENOMEM);
    require((r == 0) == (config != NULL));
    require((r == -EINVAL) == (errors > 0));
    if (config)
        check(config);
    config_free(config);
    return 0;
}
