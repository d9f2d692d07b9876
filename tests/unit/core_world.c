/* SPDX-License-Identifier: Apache-2.0 */
#include "core_world.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core_check.h"
#include "daemon/config.h"
#include "daemon/guard.h"
#include "daemon/spill/spill.h"

static uint64_t world_now(void *arg)
{
    return ((struct world *)arg)->now_ns;
}

void world_open(struct world *w, const char *text)
{
    struct config *config;
    struct core_options o;
    char head[2560], why[768];
    FILE *f;

    *w = (struct world){.now_ns = 1000000000, .wrap_io = w->wrap_io, .wrap_arg = w->wrap_arg};
    snprintf(w->dir, sizeof(w->dir), "/dev/shm/kvd-test-XXXXXX");
    cr_assert(mkdtemp(w->dir));
    snprintf(
        head, sizeof(head),
        "[daemon]\nruntime_dir = %s\nhugepages = off\nquarantine = 30s\nengine_linger = 30s\n%s",
        w->dir, text);
    f = fmemopen(head, strlen(head), "r");
    cr_assert(f);
    cr_assert_eq(config_load_stream(f, "test", &config, config_problem_print, stderr), 0);
    fclose(f);
    cr_assert_eq(guard_install(), 0);
    o = (struct core_options){.config = config,
                              .clock = {.now_ns = world_now, .arg = w},
                              .wrap_io = w->wrap_io,
                              .wrap_arg = w->wrap_arg};
    cr_assert_eq(core_new(&o, why, sizeof(why), &w->core), 0, "%s", why);
    config_free(config);
    if (w->core->nvme)
        nvme_wait(w->core->nvme, UINT64_MAX, NULL, NULL);
    w->space = &w->core->spaces[0];
    w->pool = w->core->pools[0];
}

void world_close(struct world *w)
{
    char epochs[96];

    world_check(w);
    core_free(w->core);
    snprintf(epochs, sizeof(epochs), "%s/epochs", w->dir);
    unlink(epochs); /* outlives the daemon, if there was a reset */
    cr_assert_eq(rmdir(w->dir), 0, "%s is not empty: segments were left behind", w->dir);
}

void world_sleep(struct world *w, uint64_t ms)
{
    w->now_ns += ms * 1000000;
    while (core_work(w->core))
        ;
}

struct session *world_session(struct world *w, const char *token, uint32_t ring_entries)
{
    struct session_spec spec = {.pid = getpid(),
                                .role = ROLE_WRITER,
                                .client = "test",
                                .token = (const uint8_t *)token,
                                .token_len = (uint32_t)strlen(token),
                                .ring_entries = ring_entries};
    struct session *s;

    cr_assert_eq(session_new(w->core, &spec, &s), 0);
    return s;
}

struct attach *world_attach(struct session *s, struct pool *p)
{
    struct attach *a;

    cr_assert_eq(session_attach(s, p, true, &a), 0);
    return a;
}

struct shm_key world_key(uint64_t i)
{
    struct shm_key k = {.group = 0};
    uint64_t x = i;

    for (unsigned int n = 0; n < sizeof(k.hash); n += 8) {
        x = (x + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        x ^= x >> 29;
        memcpy(k.hash + n, &x, 8);
    }
    return k;
}

int world_reserve(struct attach *a, const struct shm_key *key, const struct shm_key *parent,
                  struct reservation *ret)
{
    pool_reserve(a->pool, a, key, parent, a->pool->space->epoch, 0, ret);
    return ret->status;
}

int world_commit(struct attach *a, uint64_t ticket, uint32_t part)
{
    struct commit c = {.ticket = ticket, .part = part, .bytes = a->pool->part_bytes};

    return pool_commit(a->pool, a, &c);
}

int world_put(struct attach *a, const struct shm_key *key, const struct shm_key *parent)
{
    struct reservation r;

    if (world_reserve(a, key, parent, &r) != RESERVE_NEW)
        return r.status;
    for (uint32_t part = 0; part < a->pool->parts; part++)
        cr_assert_eq(world_commit(a, r.ticket, part), 0);
    return RESERVE_NEW;
}

bool world_has(struct pool *p, const struct shm_key *key)
{
    return shm_lookup(p->index, NULL, key, 1, p->space->epoch, NULL) == 1;
}

bool world_pin(struct attach *a, const struct shm_key *key, struct shm_pinned *ret)
{
    size_t held;

    shm_pin_keys(a->pool->index, a->map.addr, key, 1, a->pool->space->epoch, false, 0, ret, &held);
    return held == 1;
}

void world_unpin(struct attach *a, const struct shm_pinned *pinned)
{
    shm_unpin(a->pool->index, a->map.addr, pinned, 1);
}

void world_check(struct world *w)
{
    char why[512];

    cr_assert_eq(core_check(w->core, why, sizeof(why)), 0, "%s", why);
}
