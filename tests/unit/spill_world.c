/* SPDX-License-Identifier: Apache-2.0 */
#include "spill_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
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

static void remember_io(struct place *p, const char *store, struct io *io)
{
    unsigned int i = 0;

    while (p->io_name[i][0] && strcmp(p->io_name[i], store) != 0)
        cr_assert_lt(++i, 8u);
    snprintf(p->io_name[i], sizeof(p->io_name[i]), "%s", store);
    p->io[i] = io;
}

static int wrap(void *arg, const char *store, struct io *io, struct io **ret_io)
{
    struct place *p = arg;
    struct io_fault faults[16];
    const char *text = !p->faults || (p->faulty && !strstr(store, p->faulty)) ? "" : p->faults;
    int n = io_fault_parse(text, faults, 16);
    int r;

    cr_assert(n >= 0, "%s", text);
    r = io_fault_new(io, faults, (uint32_t)n, ret_io);
    if (r == 0)
        remember_io(p, store, *ret_io);
    return r;
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
    p->faults = faults;
    memset(p->io_name, 0, sizeof(p->io_name));
    p->w = (struct world){.wrap_io = faults ? wrap : NULL, .wrap_arg = p};
    world_open(&p->w, filled);
    p->session = world_session(&p->w, "", 1024);
    p->attach = world_attach(p->session, p->w.pool);
}

void place_open(struct place *p, const char *text)
{
    place_open_faulty(p, text, NULL);
}

void place_check(struct place *p)
{
    for (uint32_t i = 0; i < p->w.core->n_pools; i++)
        spill_check(p->w.core->pools[i]);
    world_check(&p->w);
}

void place_close(struct place *p)
{
    place_check(p);
    world_close(&p->w);
}

void place_release(struct place *p)
{
    for (unsigned int i = 0; i < 8 && p->io_name[i][0]; i++)
        if (place_status(p, p->io_name[i]).io) /* else it was closed */
            io_fault_release(p->io[i]);
}

/* For whoever looks into it. */
static const char *describe(struct place *p, char *ret, size_t n)
{
    struct store_status s;

    store_status(nvme_store(p->w.core->nvme, 0), &s);
    snprintf(ret, n, "%s, %llu queued, %llu writing, %llu reading, %llu used of %llu, %llu refused",
             s.state, (unsigned long long)s.queued, (unsigned long long)s.writing,
             (unsigned long long)s.reading, (unsigned long long)s.used,
             (unsigned long long)s.records, (unsigned long long)spill_stats(p->w.pool)->refused);
    return ret;
}

void place_turn(struct place *p)
{
    struct pollfd f = {.fd = nvme_fd(p->w.core->nvme), .events = POLLIN};
    char text[256];
    int n = 1000;

    p->w.now_ns += 1000000;
    poll(&f, 1, 1);
    nvme_news(p->w.core->nvme);
    while (core_work(p->w.core))
        cr_assert(n-- > 0, "it never comes to rest: %s", describe(p, text, sizeof(text)));
}

void place_turns(struct place *p, int n)
{
    while (n--)
        place_turn(p);
}

static bool is_busy(const struct place *p)
{
    struct store_status s = {0};

    for (uint32_t i = 0; i < nvme_stores(p->w.core->nvme) && !s.reading && !s.writing; i++)
        store_status(nvme_store(p->w.core->nvme, i), &s);
    return s.reading || s.writing;
}

void place_sleep(struct place *p, int seconds)
{
    while (seconds--) {
        p->w.now_ns += 999000000;
        place_turn(p);
        /* The devices' time is real: they must not seem to hang. */
        for (int i = 0; i < 5 && is_busy(p); i++)
            place_turn(p);
    }
}

void place_settle(struct place *p)
{
    struct pool *pool = p->w.pool;
    int i = 0;

    while (pool->count[SHM_SLOT_IN_FLIGHT] || nvme_unwritten(p->w.core->nvme)) {
        cr_assert_lt(i++, 20000, "%u slots in flight, %llu to write",
                     pool->count[SHM_SLOT_IN_FLIGHT],
                     (unsigned long long)nvme_unwritten(p->w.core->nvme));
        place_turn(p);
    }
}

void place_write_all(struct place *p)
{
    for (int i = 0; i < 20000 && nvme_unwritten(p->w.core->nvme); i++)
        place_turn(p);
    cr_assert_eq(nvme_unwritten(p->w.core->nvme), 0u);
}

void place_drop_pool(struct place *p, struct pool *pool)
{
    for (int i = 0; i < 20 && pool->count[SHM_SLOT_LIVE]; i++) {
        world_sleep(&p->w, 6000); /* holds of fetches expire */
        pool_evict(pool, pool->slots, HISTORY_EVICTED);
    }
    cr_assert_eq(pool->count[SHM_SLOT_LIVE], 0u);
}

void place_drop_ram(struct place *p)
{
    place_drop_pool(p, p->w.pool);
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

static uint64_t parent_of(const struct place *p, uint64_t i)
{
    if (p->parent)
        return p->parent(i);
    return i % 100 ? i - 1 : PLACE_ROOT;
}

void place_commit(struct place *p, uint64_t i, const struct reservation *r)
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

        for (uint64_t k = 0; k < pool->part_bytes / 8; k++)
            w[k] = word_of(i, part, k);
        cr_assert_eq(pool_commit(pool, p->attach, &c), 0);
    }
}

int place_reserve(struct place *p, uint64_t i, struct reservation *ret)
{
    uint64_t up = parent_of(p, i);
    struct shm_key k = world_key(i), parent = world_key(up);

    pool_reserve(p->w.pool, p->attach, &k, up == PLACE_ROOT ? NULL : &parent, p->w.space->epoch,
                 (uint32_t)(i % 2), ret);
    return ret->status;
}

int place_put(struct place *p, uint64_t i)
{
    struct reservation r;

    if (place_reserve(p, i, &r) == RESERVE_NEW)
        place_commit(p, i, &r);
    return r.status;
}

void place_put_all(struct place *p, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        cr_assert_eq(place_put(p, i), RESERVE_NEW, "object %llu", (unsigned long long)i);
}

void place_open_filled(struct place *p, const char *text, uint64_t n, const char *faults)
{
    place_open(p, text);
    for (uint64_t i = 0; i < n; i++) {
        cr_assert_eq(place_put(p, i), RESERVE_NEW);
        if (i % 16 == 15)
            place_write_all(p);
    }
    place_write_all(p);
    place_close(p);
    place_open_faulty(p, text, faults);
    cr_assert_eq(place_count_stored(p, n), n);
}

static void check_meta(struct place *p, uint64_t i, uint32_t slot)
{
    const struct shm_meta *m = &p->w.pool->metas->metas[slot];
    uint64_t up = parent_of(p, i);
    struct shm_key parent = world_key(up);
    uint8_t user[SHM_USER_BYTES];

    cr_assert_eq(m->position, i * 16);
    cr_assert_eq(m->layout, 77u);
    cr_assert_eq(m->checksum, i ^ 0x1234);
    cr_assert_eq(m->tenant, i % 2);
    cr_assert_eq(m->user_bytes, user_of(i, user));
    cr_assert_eq(memcmp(m->user, user, m->user_bytes), 0);
    cr_assert_eq(m->has_parent, up != PLACE_ROOT);
    if (m->has_parent)
        cr_assert_eq(memcmp(&m->parent, &parent, sizeof(parent)), 0);
}

bool place_pin(struct place *p, uint64_t i, struct shm_pinned *ret)
{
    struct shm_key k = world_key(i);

    return world_pin(p->attach, &k, ret);
}

void place_check_object(struct place *p, uint64_t i)
{
    struct shm_pinned pin;

    cr_assert(place_pin(p, i, &pin), "object %llu", (unsigned long long)i);
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

bool place_stored(struct place *p, uint64_t i)
{
    struct shm_key k = world_key(i);

    return spill_has(p->w.pool, &k, p->w.space->epoch);
}

uint32_t place_count_stored(struct place *p, uint64_t n)
{
    uint32_t stored = 0;

    for (uint64_t i = 0; i < n; i++)
        stored += place_stored(p, i);
    return stored;
}

uint32_t place_count_orphans(struct place *p, uint64_t n)
{
    uint32_t orphans = 0;

    cr_assert_leq(n, PLACE_SEEN);
    for (uint64_t i = 0; i < n; i++)
        p->seen[i] |= place_stored(p, i);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t up = i;

        while (up != PLACE_ROOT && place_stored(p, up))
            up = parent_of(p, up);
        if (up != i && up != PLACE_ROOT)
            orphans += p->seen[up] || place_find(p, up) != SHM_FOUND_MISS;
    }
    return orphans;
}

int place_ask_of(struct place *p, struct attach *a, uint64_t i, uint64_t tag, uint32_t deadline_ms)
{
    struct fetch_ask ask = {
        .key = world_key(i), .epoch = p->w.space->epoch, .tag = tag, .deadline_ms = deadline_ms};
    int r = spill_fetch(a, &ask);

    a->session->promised += r == 1;
    return r;
}

int place_ask(struct place *p, uint64_t i, uint64_t tag)
{
    return place_ask_of(p, p->attach, i, tag, 0);
}

static struct shm_cursor completions_of(const struct session *s)
{
    return (struct shm_cursor){.ring = &s->shm->completions,
                               .entries = s->ring_entries,
                               .mine = shm_load32(&s->shm->completions.head)};
}

bool place_has_completion(const struct session *s)
{
    struct shm_cursor mine = completions_of(s);

    return shm_ring_waiting(&mine) > 0;
}

int place_completion(struct place *p, uint64_t *ret_tag)
{
    return place_completion_of(p, p->session, ret_tag);
}

int place_completion_of(struct place *p, struct session *s, uint64_t *ret_tag)
{
    struct shm_completion *ring = shm_completion_array(s->shm, s->ring_entries);

    for (int i = 0; i < 20000; i++) {
        struct shm_cursor mine = completions_of(s);

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

void place_await_state(struct place *p, const char *name, const char *state)
{
    for (int i = 0; i < 20000; i++) {
        if (strcmp(place_status(p, name).state, state) == 0)
            return;
        place_turn(p);
    }
    cr_assert(false, "%s is %s (%s), not %s", name, place_status(p, name).state,
              place_status(p, name).problem, state);
}

void place_await_reset(struct place *p)
{
    for (int i = 0; i < 5000 && !spill_reset_done(p->w.space); i++)
        place_turn(p);
    cr_assert(spill_reset_done(p->w.space));
}

void place_act(struct place *p, const char *name, enum spill_action action, bool force)
{
    char why[384] = "";
    int r = store_act(place_store(p, name), action, force, 0, why, sizeof(why));

    cr_assert_eq(r, 0, "%s: %s", name, why);
}

/* ---- files */

static int open_file(const struct place *p, const char *file)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", p->dir, file);
    fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert(fd >= 0, "%s", path);
    return fd;
}

void place_read(struct place *p, const char *file, void *buf, size_t n, uint64_t offset)
{
    int fd = open_file(p, file);

    cr_assert_eq(pread(fd, buf, n, (off_t)offset), (ssize_t)n);
    close(fd);
}

void place_write(struct place *p, const char *file, const void *buf, size_t n, uint64_t offset)
{
    int fd = open_file(p, file);

    cr_assert_eq(pwrite(fd, buf, n, (off_t)offset), (ssize_t)n);
    cr_assert_eq(fsync(fd), 0);
    close(fd);
}

void place_flip(struct place *p, const char *file, uint64_t offset)
{
    uint8_t byte;

    place_read(p, file, &byte, 1, offset);
    byte ^= 1;
    place_write(p, file, &byte, 1, offset);
}

void place_super(struct place *p, const char *file, struct format_super *ret)
{
    uint8_t bytes[FORMAT_SUPER_BYTES];

    place_read(p, file, bytes, sizeof(bytes), 0);
    cr_assert_eq(format_super_decode(bytes, ret), 0);
}

void place_copy(struct place *p, const char *from, const char *to)
{
    char command[320];

    snprintf(command, sizeof(command), "cp --sparse=always %s/%s %s/%s", p->dir, from, p->dir, to);
    cr_assert_eq(system(command), 0);
}

void place_rename(struct place *p, const char *from, const char *to)
{
    char a[128], b[128];

    snprintf(a, sizeof(a), "%s/%s", p->dir, from);
    snprintf(b, sizeof(b), "%s/%s", p->dir, to);
    cr_assert_eq(rename(a, b), 0);
}

uint64_t place_no_parent(uint64_t i)
{
    (void)i;
    return PLACE_ROOT;
}

void place_fill(struct place *p, const char *text, uint64_t n)
{
    p->parent = place_no_parent;
    place_open(p, text);
    place_put_all(p, 0, n);
    place_write_all(p);
}

void place_make_store(struct place *p, const char *text, uint64_t n)
{
    place_fill(p, text, n);
    place_close(p);
}

uint32_t place_fetch_all(struct place *p, uint64_t n)
{
    uint32_t right = 0;

    for (uint64_t i = 0; i < n; i++) {
        if (place_fetch(p, i) != 0)
            continue;
        place_check_object(p, i);
        right++;
    }
    return right;
}
