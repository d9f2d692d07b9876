/* SPDX-License-Identifier: Apache-2.0 */
#include "spill_world.h"

#include <criterion/criterion.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/index.h"
#include "shm/ring.h"

void place_new(struct place *p)
{
    *p = (struct place){.session = NULL};
    snprintf(p->dir, sizeof(p->dir), "/var/tmp/kvd-spill-XXXXXX");
    cr_assert(mkdtemp(p->dir));
}

void place_free(struct place *p)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -r %s", p->dir);
    cr_assert_eq(system(command), 0);
}

static int wrap(void *arg, const char *store, struct io *io, struct io **ret_io)
{
    struct io_fault faults[16];
    int n = io_fault_parse(arg, faults, 16);

    (void)store;
    cr_assert(n >= 0, "%s", (const char *)arg);
    return io_fault_new(io, faults, (uint32_t)n, ret_io);
}

static void fill(const struct place *p, const char *text, char *ret, size_t n)
{
    const char *s;

    for (*ret = 0; (s = strstr(text, "%s")); text = s + 2) {
        strncat(ret, text, (size_t)(s - text) < n - strlen(ret) ? (size_t)(s - text) : 0);
        strncat(ret, p->dir, n - strlen(ret) - 1);
    }
    strncat(ret, text, n - strlen(ret) - 1);
}

void place_open_faulty(struct place *p, const char *text, const char *faults)
{
    char filled[2048];

    fill(p, text, filled, sizeof(filled));
    p->w = (struct world){.wrap_io = faults ? wrap : NULL, .wrap_arg = (void *)faults};
    world_open(&p->w, filled);
    p->session = world_session(&p->w, "", 1024);
    p->attach = world_attach(p->session, p->w.pool);
}

void place_open(struct place *p, const char *text)
{
    place_open_faulty(p, text, NULL);
}

void place_close(struct place *p)
{
    for (uint32_t i = 0; i < p->w.core->n_pools; i++)
        spill_check(p->w.core->pools[i]);
    world_close(&p->w);
}

void place_turn(struct place *p)
{
    struct pollfd f = {.fd = nvme_fd(p->w.core->nvme), .events = POLLIN};

    p->w.now_ns += 1000000;
    poll(&f, 1, 1);
    nvme_news(p->w.core->nvme);
    while (core_work(p->w.core))
        ;
}

void place_write_all(struct place *p)
{
    for (int i = 0; i < 100000 && nvme_unwritten(p->w.core->nvme); i++)
        place_turn(p);
    cr_assert_eq(nvme_unwritten(p->w.core->nvme), 0u);
}

void place_drop_ram(struct place *p)
{
    for (int i = 0; i < 3; i++) {
        pool_evict(p->w.pool, p->w.pool->slots, HISTORY_EVICTED);
        world_sleep(&p->w, 6000); /* holds of fetches expire */
    }
    cr_assert_eq(p->w.pool->count[SHM_SLOT_LIVE], 0u);
}

/* ---- objects */

static uint64_t word_of(uint64_t i, uint32_t part, uint64_t at)
{
    return (i * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)part << 56) ^ (at * 0xbf58476d1ce4e5b9ull);
}

static uint64_t *part_of(struct place *p, uint32_t slot, uint32_t part)
{
    struct pool *pool = p->w.pool;

    return (void *)(pool->base[part].base + (uint64_t)slot * pool->part_bytes);
}

/* Not all are as long as their slot, and few end at a block. */
static uint64_t bytes_of(const struct pool *pool, uint64_t i)
{
    return i % 3 ? pool->part_bytes : pool->part_bytes / 2 + i % 1000 + 8;
}

static uint32_t user_of(uint64_t i, uint8_t ret[SHM_USER_BYTES])
{
    for (uint32_t k = 0; k < SHM_USER_BYTES; k++)
        ret[k] = (uint8_t)(i * 7 + k);
    return i % 5 ? 0 : (uint32_t)(i % SHM_USER_BYTES + 1);
}

static int commit_parts(struct place *p, uint64_t i, const struct reservation *r)
{
    struct pool *pool = p->w.pool;
    uint8_t user[SHM_USER_BYTES];

    for (uint32_t part = 0; part < pool->parts; part++) {
        uint64_t *w = part_of(p, r->slot, part);
        struct commit c = {.ticket = r->ticket,
                           .part = part,
                           .bytes = bytes_of(pool, i),
                           .position = i * 16,
                           .layout = 77,
                           .checksum = i ^ 0x1234,
                           .user_bytes = user_of(i, user),
                           .user = user};
        int e;

        for (uint64_t k = 0; k < pool->part_bytes / 8; k++)
            w[k] = word_of(i, part, k);
        e = pool_commit(pool, p->attach, &c);
        if (e < 0)
            return e;
    }
    return RESERVE_NEW;
}

int place_put(struct place *p, uint64_t i)
{
    struct shm_key k = world_key(i), parent = world_key(i - 1);
    struct reservation r;

    pool_reserve(p->w.pool, p->attach, &k, i % 100 ? &parent : NULL, p->w.space->epoch,
                 (uint32_t)(i % 2), &r);
    return r.status == RESERVE_NEW ? commit_parts(p, i, &r) : r.status;
}

void place_put_all(struct place *p, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        cr_assert_eq(place_put(p, i), RESERVE_NEW, "object %llu", (unsigned long long)i);
}

static void check_meta(struct place *p, uint64_t i, uint32_t slot)
{
    const struct shm_meta *m = &p->w.pool->metas->metas[slot];
    struct shm_key parent = world_key(i - 1);
    uint8_t user[SHM_USER_BYTES];

    cr_assert_eq(m->position, i * 16);
    cr_assert_eq(m->layout, 77u);
    cr_assert_eq(m->checksum, i ^ 0x1234);
    cr_assert_eq(m->tenant, i % 2);
    cr_assert_eq(m->user_bytes, user_of(i, user));
    cr_assert_eq(memcmp(m->user, user, m->user_bytes), 0);
    cr_assert_eq(m->has_parent, i % 100 != 0);
    if (m->has_parent)
        cr_assert_eq(memcmp(&m->parent, &parent, sizeof(parent)), 0);
}

void place_check_object(struct place *p, uint64_t i)
{
    struct shm_key k = world_key(i);
    struct shm_pinned pin;

    cr_assert(world_pin(p->attach, &k, &pin), "object %llu", (unsigned long long)i);
    cr_assert_eq(pin.bytes, bytes_of(p->w.pool, i));
    for (uint32_t part = 0; part < p->w.pool->parts; part++)
        for (uint64_t at = 0; at < pin.bytes / 8; at++)
            cr_assert_eq(part_of(p, pin.slot, part)[at], word_of(i, part, at),
                         "object %llu, part %u, word %llu", (unsigned long long)i, part,
                         (unsigned long long)at); /* I1 */
    check_meta(p, i, pin.slot);
    world_unpin(p->attach, &pin);
}

/* ---- finding */

enum shm_found place_find(struct place *p, uint64_t i)
{
    struct shm_key k = world_key(i);
    uint8_t state;

    shm_lookup(p->w.pool->index, p->w.pool->nvme_index, &k, 1, p->w.space->epoch, &state);
    return (enum shm_found)state;
}

int place_ask(struct place *p, uint64_t i, uint64_t tag)
{
    struct fetch_ask ask = {.key = world_key(i), .epoch = p->w.space->epoch, .tag = tag};
    int r = spill_fetch(p->attach, &ask);

    p->session->promised += r == 1;
    return r;
}

int place_completion(struct place *p, uint64_t *ret_tag)
{
    struct session *s = p->session;
    struct shm_completion *ring = shm_completion_array(s->shm, s->ring_entries);
    struct shm_cursor mine = {.ring = &s->shm->completions, .entries = s->ring_entries};

    for (int i = 0; i < 100000; i++) {
        mine.mine = shm_load32(&s->shm->completions.head);
        if (shm_ring_waiting(&mine) > 0) {
            struct shm_completion c = ring[shm_ring_at(&mine, mine.mine)];

            shm_ring_consume(&mine, 1);
            *ret_tag = c.user_data;
            return c.status;
        }
        place_turn(p);
    }
    cr_assert(false, "no completion");
    return 0;
}

int place_fetch(struct place *p, uint64_t i)
{
    uint64_t tag = 0;
    int r = place_ask(p, i, i + 1000000);

    if (r != 1)
        return r;
    r = place_completion(p, &tag);
    cr_assert_eq(tag, i + 1000000);
    return r;
}

struct store *place_store(struct place *p, const char *name)
{
    struct store *st = nvme_find(p->w.core->nvme, name);

    cr_assert(st, "%s", name);
    return st;
}

struct store_status place_status(struct place *p, const char *name)
{
    struct store_status s;

    store_status(place_store(p, name), &s);
    return s;
}
