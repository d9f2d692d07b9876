/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fake_daemon.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/index.h"
#include "shm/header.h"

#define PAGE 4096u

/* A test cannot go on without its world. */
static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "fake daemon: %s: %s\n", what, strerror(errno));
    abort();
}

/* ---- memory */

static void memory_new(struct fake_memory *m, size_t bytes)
{
    char path[64];

    m->bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    m->fd = memfd_create("fake", MFD_CLOEXEC);
    must(m->fd >= 0 && ftruncate(m->fd, (off_t)m->bytes) == 0, "memfd");
    snprintf(path, sizeof(path), "/proc/self/fd/%d", m->fd);
    m->reader = open(path, O_RDONLY | O_CLOEXEC);
    m->addr = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
    must(m->reader >= 0 && m->addr != MAP_FAILED, "map");
}

static void memory_free(struct fake_memory *m)
{
    if (!m->addr)
        return;
    munmap(m->addr, m->bytes);
    close(m->fd);
    close(m->reader);
    *m = (struct fake_memory){0};
}

static void segment_new(struct fake *f, struct fake_memory *m, enum shm_kind kind, size_t bytes,
                        uint64_t count, uint32_t pool)
{
    memory_new(m, bytes);
    shm_header_fill(m->addr, kind, m->bytes, count, f->instance);
    ((struct shm_header *)m->addr)->pool = pool;
}

static void pool_new(struct fake *f, struct fake_pool *p)
{
    uint64_t lines = index_lines_for(p->slots);

    p->chunks = (p->slots + p->chunk_slots - 1) / p->chunk_slots;
    segment_new(f, &p->index, SHM_INDEX, shm_index_bytes(lines), lines, p->id);
    segment_new(f, &p->metas, SHM_META, shm_metas_bytes(p->slots), p->slots, p->id);
    segment_new(f, &p->pins, SHM_PINS, shm_pins_bytes(p->slots), p->slots, p->id);
    p->ix = p->index.addr;
    p->ix->seed[0] = 0x1234567890abcdef + p->id;
    p->ix->slots = p->slots;
    p->ix->part_bytes = p->part_bytes;
    p->ix->chunk_slots = p->chunk_slots;
    p->ix->parts = p->parts;
    p->ix->chunks = p->chunks;
    atomic_store(&p->ix->epoch, f->epoch);
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        uint32_t first = chunk * p->chunk_slots;
        uint32_t n = p->slots - first < p->chunk_slots ? p->slots - first : p->chunk_slots;

        for (uint32_t part = 0; part < p->parts; part++)
            memory_new(&p->data[chunk * p->parts + part], n * p->part_bytes);
    }
}

static void stores_new(struct fake *f, struct fake_pool *p)
{
    uint64_t lines = index_lines_for(f->records);

    segment_new(f, &p->nvme, SHM_NVME, shm_index_bytes(lines), lines, p->id);
    p->nx = p->nvme.addr;
    p->nx->seed[0] = 0xfedcba0987654321 + p->id;
}

static void pool_free(struct fake_pool *p)
{
    memory_free(&p->index);
    memory_free(&p->metas);
    memory_free(&p->pins);
    memory_free(&p->nvme);
    for (uint32_t i = 0; i < p->chunks * p->parts; i++)
        memory_free(&p->data[i]);
}

static void world_new(struct fake *f)
{
    f->instance[0]++;
    segment_new(f, &f->core, SHM_CORE, sizeof(struct shm_core), 1, 0);
    f->shm = f->core.addr;
    f->pools[0] = (struct fake_pool){.name = "kv",
                                     .id = FAKE_FIRST_POOL + 10u * f->instance[0],
                                     .slots = 56,
                                     .parts = 2,
                                     .part_bytes = PAGE,
                                     .chunk_slots = 16};
    f->pools[1] = (struct fake_pool){.name = "snapshots",
                                     .id = f->pools[0].id + 1,
                                     .slots = 8,
                                     .parts = 1,
                                     .part_bytes = 2 * PAGE,
                                     .chunk_slots = 8};
    for (unsigned i = 0; i < FAKE_POOLS; i++)
        pool_new(f, &f->pools[i]);
    if (f->records)
        stores_new(f, &f->pools[0]);
}

static void world_free(struct fake *f)
{
    for (unsigned i = 0; i < FAKE_POOLS; i++)
        pool_free(&f->pools[i]);
    memory_free(&f->core);
    memory_free(&f->session.memory);
    f->session.shm = NULL;
}

static void session_new(struct fake *f, uint32_t entries)
{
    struct fake_session *s = &f->session;

    memory_free(&s->memory);
    for (unsigned i = 0; i < FAKE_POOLS; i++) { /* pins belong to the session */
        struct fake_pool *p = &f->pools[i];

        memory_free(&p->pins);
        segment_new(f, &p->pins, SHM_PINS, shm_pins_bytes(p->slots), p->slots, p->id);
    }
    s->id++;
    segment_new(f, &s->memory, SHM_SESSION, shm_session_bytes(entries), entries, 0);
    s->shm = s->memory.addr;
    s->requests = (struct shm_cursor){.ring = &s->shm->requests, .entries = entries};
    s->completions = (struct shm_cursor){.ring = &s->shm->completions, .entries = entries};
}

/* ---- publishing */

static struct fake_pool *pool_of(struct fake *f, uint32_t id)
{
    for (unsigned i = 0; i < FAKE_POOLS; i++)
        if (f->pools[i].id == id)
            return &f->pools[i];
    return NULL;
}

static int32_t reserve(struct fake *f, struct fake_pool *p, const struct shm_key *key,
                       const struct shm_key *parent, uint32_t epoch, uint32_t tenant,
                       uint32_t *ret_slot, uint64_t *ret_ticket)
{
    struct shm_entry *e = index_find(p->ix, key, epoch);
    struct shm_meta *m;
    uint32_t slot;

    if (epoch != f->epoch)
        return -ESTALE;
    if (e)
        return shm_word_state(shm_load64(&e->word)) == SHM_PENDING ? 2 : 3;
    if (p->next_slot == p->slots)
        return -ENOSPC;
    slot = p->next_slot++;
    must(index_insert(p->ix, key, epoch, slot, &p->line[slot]) == 0, "insert");
    m = &((struct shm_metas *)p->metas.addr)->metas[slot];
    *m = (struct shm_meta){.key = *key, .tenant = tenant, .epoch = epoch};
    if (parent) {
        m->parent = *parent;
        m->has_parent = 1;
    }
    p->ticket[slot] = ++f->operation << SHM_SLOT_BITS | slot;
    p->parts_done[slot] = 0;
    *ret_slot = slot;
    *ret_ticket = p->ticket[slot];
    return 1;
}

static int commit(struct fake_pool *p, uint64_t ticket, uint32_t part, uint64_t bytes,
                  const struct shm_meta *meta)
{
    uint32_t slot = (uint32_t)ticket & (SHM_SLOTS_MAX - 1);
    struct shm_meta *m;

    if (slot >= p->slots || !ticket || p->ticket[slot] != ticket)
        return -ESTALE;
    if (part >= p->parts || !bytes || bytes > p->part_bytes)
        return -EINVAL;
    p->parts_done[slot] |= 1u << part;
    if (p->parts_done[slot] != (1u << p->parts) - 1)
        return 0;
    m = &((struct shm_metas *)p->metas.addr)->metas[slot];
    m->position = meta->position;
    m->layout = meta->layout;
    m->checksum = meta->checksum;
    m->user_bytes = meta->user_bytes;
    memcpy(m->user, meta->user, sizeof(m->user));
    m->bytes = p->bytes[slot] = bytes;
    index_publish(p->ix, p->line[slot], bytes);
    p->ticket[slot] = 0;
    return 0;
}

static bool give_back(struct fake_pool *p, uint64_t ticket)
{
    uint32_t slot = (uint32_t)ticket & (SHM_SLOTS_MAX - 1);

    if (slot >= p->slots || !ticket || p->ticket[slot] != ticket)
        return false;
    index_remove(p->ix, p->line[slot]);
    p->ticket[slot] = 0;
    return true;
}

static uint8_t *bytes_of(struct fake_pool *p, uint32_t slot, uint32_t part)
{
    struct fake_memory *m = &p->data[slot / p->chunk_slots * p->parts + part];

    return (uint8_t *)m->addr + slot % p->chunk_slots * p->part_bytes;
}

static int32_t store(struct fake *f, struct fake_pool *p, const struct shm_key *key,
                     const struct shm_key *parent, uint64_t bytes, uint32_t *ret_slot)
{
    struct shm_meta meta = {.position = 16, .layout = 77, .checksum = 99, .user_bytes = 3};
    uint64_t ticket;
    int32_t r = reserve(f, p, key, parent, f->epoch, 5, ret_slot, &ticket);

    memcpy(meta.user, "abc", 3);
    for (uint32_t part = 0; r == 1 && part < p->parts; part++) {
        memset(bytes_of(p, *ret_slot, part), (int)(*ret_slot + part), p->part_bytes);
        must(commit(p, ticket, part, bytes, &meta) == 0, "store");
    }
    return r;
}

uint32_t fake_store(struct fake *f, unsigned pool, const struct shm_key *key,
                    const struct shm_key *parent, uint64_t bytes)
{
    uint32_t slot;

    pthread_mutex_lock(&f->lock);
    must(store(f, &f->pools[pool], key, parent, bytes, &slot) == 1, "store");
    pthread_mutex_unlock(&f->lock);
    return slot;
}

void fake_spill(struct fake *f, unsigned pool, const struct shm_key *key)
{
    struct fake_pool *p = &f->pools[pool];
    uint32_t line;

    pthread_mutex_lock(&f->lock);
    must(index_insert(p->nx, key, f->epoch, p->next_record++, &line) == 0, "spill");
    index_publish(p->nx, line, p->part_bytes);
    pthread_mutex_unlock(&f->lock);
}

void fake_lose(struct fake *f, unsigned pool, const struct shm_key *key)
{
    struct fake_pool *p = &f->pools[pool];
    struct shm_entry *e;

    pthread_mutex_lock(&f->lock);
    e = index_find(p->nx, key, f->epoch);
    must(e != NULL, "lose");
    index_remove(p->nx, (uint32_t)(e - p->nx->lines));
    pthread_mutex_unlock(&f->lock);
}

static int32_t fetch(struct fake *f, struct fake_pool *p, const struct shm_key *key, uint32_t epoch)
{
    struct shm_entry *e = index_find(p->ix, key, epoch);
    uint32_t slot;
    int32_t r;

    f->fetches++;
    if (epoch != f->epoch)
        return -ESTALE;
    if (e)
        return shm_word_state(shm_load64(&e->word)) == SHM_PENDING ? -EINPROGRESS : 0;
    if (!p->nx || !index_find(p->nx, key, epoch))
        return -ENOENT;
    r = store(f, p, key, NULL, p->part_bytes, &slot);
    return r < 0 ? r : 0;
}

uint32_t fake_pins(struct fake *f, unsigned pool)
{
    struct shm_pins *pins = f->pools[pool].pins.addr;
    uint32_t n = 0;

    for (uint32_t i = 0; i < f->pools[pool].slots; i++)
        n += atomic_load(&pins->pins[i].count);
    return n;
}

/* ---- rings */

static bool take(struct fake *f, struct shm_request *ret)
{
    struct fake_session *s = &f->session;

    if (!s->shm || shm_ring_waiting(&s->requests) <= 0 || !shm_ring_room(&s->completions))
        return false;
    *ret = s->shm->request[shm_ring_at(&s->requests, s->requests.mine)];
    shm_ring_consume(&s->requests, 1);
    return true;
}

static void answer(struct fake *f, const struct shm_request *q, struct shm_completion *c)
{
    struct fake_pool *p = pool_of(f, q->pool);
    struct shm_meta meta;

    *c = (struct shm_completion){.user_data = q->user_data, .slot = SHM_NO_SLOT};
    if (!p) {
        c->status = -EBADF;
    } else if (q->op == SHM_RESERVE) {
        c->status =
            reserve(f, p, &q->reserve.key, q->flags & SHM_HAS_PARENT ? &q->reserve.parent : NULL,
                    q->epoch, q->tenant, &c->slot, &c->ticket);
    } else if (q->op == SHM_FETCH) {
        if (!(q->flags & SHM_GOES_ON) || f->chain == 0)
            f->chain = fetch(f, p, &q->fetch.key, q->epoch);
        c->status = f->chain;
    } else {
        meta = (struct shm_meta){.position = q->commit.position,
                                 .layout = q->commit.layout,
                                 .checksum = q->commit.checksum,
                                 .user_bytes = q->commit.user_bytes};
        memcpy(meta.user, q->commit.user, sizeof(meta.user));
        c->ticket = q->ticket;
        c->status = commit(p, q->ticket, q->part, q->commit.bytes, &meta);
    }
}

static void post(struct fake *f, const struct shm_completion *c)
{
    struct fake_session *s = &f->session;

    shm_completion_array(
        s->shm, s->completions.entries)[shm_ring_at(&s->completions, s->completions.mine)] = *c;
    shm_ring_produce(&s->completions, 1);
}

static void send_frame(struct fake *f, const Kvd__Proto__ServerFrame *frame, const int *fds,
                       unsigned n_fds)
{
    struct frame_out *out;

    if (frame_out_new(&frame->base, 1 << 20, fds, n_fds, &out) == 0)
        frame_send_wait(f->conn, out, frame_clock() + 10000000000u);
}

static void tell(struct fake *f)
{
    Kvd__Proto__ServerFrame frame = KVD__PROTO__SERVER_FRAME__INIT;
    Kvd__Proto__Event event = KVD__PROTO__EVENT__INIT;

    if (!f->session.shm || !shm_must_wake(&f->session.shm->waiting) || f->conn < 0)
        return;
    shm_awake(&f->session.shm->waiting);
    event.kind = KVD__PROTO__EVENT__KIND__COMPLETIONS;
    frame.event = &event;
    f->events++;
    send_frame(f, &frame, NULL, 0);
}

static void note_cancel(struct fake *f, const struct shm_request *q)
{
    must(f->cancels < FAKE_CANCELS, "too many cancels");
    f->cancel[f->cancels].tag = q->cancel.user_data;
    f->cancel[f->cancels++].n = q->cancel.n;
}

static unsigned serve(struct fake *f, unsigned max)
{
    struct shm_request q;
    struct shm_completion c;
    unsigned n = 0, answers = 0;

    while (n < max && take(f, &q)) {
        n++;
        if (q.op == SHM_CANCEL)
            note_cancel(f, &q);
        if (q.op == SHM_OBSERVE || q.op == SHM_CANCEL)
            continue;
        answer(f, &q, &c);
        post(f, &c);
        answers++;
    }
    if (answers)
        tell(f);
    return n;
}

unsigned fake_serve(struct fake *f, unsigned max)
{
    unsigned n;

    pthread_mutex_lock(&f->lock);
    n = serve(f, max);
    pthread_mutex_unlock(&f->lock);
    return n;
}

bool fake_take(struct fake *f, struct shm_request *ret)
{
    bool ok;

    pthread_mutex_lock(&f->lock);
    ok = take(f, ret);
    pthread_mutex_unlock(&f->lock);
    return ok;
}

void fake_answer(struct fake *f, const struct shm_request *q, struct shm_completion *ret_last)
{
    pthread_mutex_lock(&f->lock);
    answer(f, q, ret_last);
    pthread_mutex_unlock(&f->lock);
}

void fake_post(struct fake *f, const struct shm_completion *c)
{
    pthread_mutex_lock(&f->lock);
    post(f, c);
    tell(f);
    pthread_mutex_unlock(&f->lock);
}

/* ---- requests */

struct answer {
    Kvd__Proto__Response response;
    int fds[FRAME_MAX_FDS];
    unsigned n_fds;
    union {
        Kvd__Proto__HelloReply hello;
        Kvd__Proto__SpaceOpenReply space_open;
        Kvd__Proto__SpaceResetReply space_reset;
        Kvd__Proto__PoolOpenReply pool_open;
        Kvd__Proto__ChunkMapReply chunk_map;
        Kvd__Proto__LookupReply lookup;
        Kvd__Proto__PinReply pin;
        Kvd__Proto__ReadReply read;
        Kvd__Proto__ReserveReply reserve;
        Kvd__Proto__CountReply count;
        Kvd__Proto__FetchReply fetch;
    } body;
    Kvd__Proto__PoolInfo info[FAKE_POOLS], *list[FAKE_POOLS];
    Kvd__Proto__Reservation reservation, *reservations;
    Kvd__Proto__Meta meta;
    Kvd__Proto__Key parent;
    uint64_t number[2];
    uint8_t states[4096];
    int32_t statuses[4096];
    char message[128];
};

static void refuse(struct answer *a, int status, const char *message)
{
    a->response.status = status;
    snprintf(a->message, sizeof(a->message), "%s", message);
    a->response.message = a->message;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY__NOT_SET;
    a->n_fds = 0;
}

static void on_hello(struct fake *f, const Kvd__Proto__Hello *h, struct answer *a)
{
    Kvd__Proto__HelloReply *r = &a->body.hello;
    static uint8_t cookie[16];

    f->hellos++;
    f->start_time = h->start_time;
    f->token_len = (unsigned)h->engine_token.len;
    f->cookie_len = (unsigned)h->resume.len;
    snprintf(f->client, sizeof(f->client), "%s", h->client ? h->client : "");
    if (h->version_min > 1 || h->version_max < 1) {
        refuse(a, -EPROTONOSUPPORT, "no common version");
        return;
    }
    kvd__proto__hello_reply__init(r);
    r->resumed = h->has_resume && f->may_resume && h->resume.data[0] == f->session.id;
    f->resumes += r->resumed;
    if (!r->resumed)
        session_new(f, f->ring_entries       ? f->ring_entries
                       : h->has_ring_entries ? h->ring_entries
                                             : 16);
    cookie[0] = (uint8_t)f->session.id;
    r->version = 1;
    r->instance.data = f->instance;
    r->instance.len = sizeof(f->instance);
    r->session = f->session.id;
    r->has_cookie = r->has_resumed = r->has_max_inline_bytes = 1;
    r->cookie.data = cookie;
    r->cookie.len = sizeof(cookie);
    r->max_inline_bytes = f->max_inline;
    r->role = 2;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_HELLO;
    a->response.hello = r;
    if (!h->shm)
        return;
    a->fds[a->n_fds++] = f->core.reader;
    a->fds[a->n_fds++] = f->session.memory.fd;
}

static void put_info(const struct fake *f, const struct fake_pool *p, Kvd__Proto__PoolInfo *i)
{
    kvd__proto__pool_info__init(i);
    i->has_records = p->nx != NULL;
    i->records = p->nx ? f->records : 0;
    i->pool = p->id;
    i->name = (char *)p->name;
    i->slots = p->slots;
    i->part_bytes = p->part_bytes;
    i->parts = p->parts;
    i->chunk_slots = p->chunk_slots;
    i->chunks = p->chunks;
    i->page_bytes = PAGE;
    i->backing = (char *)"memfd";
}

static void on_space_open(struct fake *f, const Kvd__Proto__SpaceOpen *q, struct answer *a)
{
    Kvd__Proto__SpaceOpenReply *r = &a->body.space_open;

    if (strcmp(q->name, "model") != 0) {
        refuse(a, -ENOENT, "no space of that name");
        return;
    }
    if (q->identity && strcmp(q->identity, "right") != 0) {
        refuse(a, -EPROTOTYPE, "the identity differs");
        return;
    }
    kvd__proto__space_open_reply__init(r);
    for (unsigned i = 0; i < FAKE_POOLS; i++) {
        put_info(f, &f->pools[i], &a->info[i]);
        a->list[i] = &a->info[i];
    }
    r->space = 3;
    r->epoch = f->epoch;
    r->n_pools = FAKE_POOLS;
    r->pools = a->list;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_SPACE_OPEN;
    a->response.space_open = r;
}

static void on_reset(struct fake *f, struct answer *a)
{
    kvd__proto__space_reset_reply__init(&a->body.space_reset);
    f->epoch++;
    for (unsigned i = 0; i < FAKE_POOLS; i++)
        atomic_store(&f->pools[i].ix->epoch, f->epoch);
    a->body.space_reset.epoch = f->epoch;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_SPACE_RESET;
    a->response.space_reset = &a->body.space_reset;
}

static void on_pool_open(struct fake *f, struct fake_pool *p, struct answer *a)
{
    kvd__proto__pool_open_reply__init(&a->body.pool_open);
    put_info(f, p, &a->info[0]);
    a->body.pool_open.info = &a->info[0];
    a->fds[a->n_fds++] = p->index.reader;
    a->fds[a->n_fds++] = p->metas.reader;
    a->fds[a->n_fds++] = p->pins.fd;
    if (p->nx)
        a->fds[a->n_fds++] = p->nvme.reader;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_POOL_OPEN;
    a->response.pool_open = &a->body.pool_open;
}

static void on_chunk_map(struct fake_pool *p, const Kvd__Proto__ChunkMap *q, struct answer *a)
{
    kvd__proto__chunk_map_reply__init(&a->body.chunk_map);
    if (q->chunk >= p->chunks) {
        refuse(a, -EINVAL, "no such chunk");
        return;
    }
    for (int w = 0; w <= q->write; w++)
        for (uint32_t part = 0; part < p->parts; part++) {
            struct fake_memory *m = &p->data[q->chunk * p->parts + part];

            if (q->part_mask >> part & 1)
                a->fds[a->n_fds++] = w ? m->fd : m->reader;
        }
    a->body.chunk_map.bytes = p->data[q->chunk * p->parts].bytes;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_CHUNK_MAP;
    a->response.chunk_map = &a->body.chunk_map;
}

static struct shm_key key_of(const Kvd__Proto__Key *from)
{
    struct shm_key key = {.group = from->group};

    memcpy(key.hash, from->hash.data, from->hash.len < 32 ? from->hash.len : 32);
    return key;
}

static uint64_t word_of(struct fake *f, struct fake_pool *p, const Kvd__Proto__Key *from)
{
    struct shm_key key = key_of(from);
    struct shm_entry *e = index_find(p->ix, &key, f->epoch);

    return e ? shm_load64(&e->word) : 0;
}

static void on_lookup(struct fake *f, struct fake_pool *p, const Kvd__Proto__Lookup *q,
                      struct answer *a)
{
    Kvd__Proto__LookupReply *r = &a->body.lookup;

    kvd__proto__lookup_reply__init(r);
    for (size_t i = 0; i < q->n_keys && i < sizeof(a->states); i++) {
        enum shm_state s = shm_word_state(word_of(f, p, q->keys[i]));

        a->states[i] = s == SHM_LIVE ? 1 : s == SHM_PENDING ? 3 : 0;
    }
    r->states.data = a->states;
    r->states.len = q->n_keys;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_LOOKUP;
    a->response.lookup = r;
}

static void on_pin(struct fake *f, struct fake_pool *p, const Kvd__Proto__Pin *q, struct answer *a)
{
    Kvd__Proto__PinReply *r = &a->body.pin;
    uint64_t w = word_of(f, p, q->keys[0]);

    kvd__proto__pin_reply__init(r);
    r->pinned = shm_word_state(w) == SHM_LIVE;
    a->number[0] = shm_word_slot(w);
    a->number[1] = p->bytes[shm_word_slot(w)];
    r->n_slots = r->n_bytes = r->pinned;
    r->slots = &a->number[0];
    r->bytes = &a->number[1];
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_PIN;
    a->response.pin = r;
}

static void on_read(struct fake *f, struct fake_pool *p, const Kvd__Proto__Read *q,
                    struct answer *a)
{
    Kvd__Proto__ReadReply *r = &a->body.read;
    uint64_t w = word_of(f, p, q->key), bytes;
    uint32_t slot = shm_word_slot(w);
    const struct shm_meta *m = &((struct shm_metas *)p->metas.addr)->metas[slot];

    if (shm_word_state(w) != SHM_LIVE) {
        refuse(a, -ENOENT, "a miss");
        return;
    }
    kvd__proto__read_reply__init(r);
    bytes = p->bytes[slot] - q->offset;
    if (q->bytes < bytes)
        bytes = q->bytes;
    if (f->max_inline < bytes)
        bytes = f->max_inline;
    r->data.data = bytes_of(p, slot, q->part) + q->offset;
    r->data.len = bytes;
    r->part_bytes = p->bytes[slot];
    kvd__proto__meta__init(&a->meta);
    a->meta.has_position = a->meta.has_user = a->meta.has_tenant = 1;
    a->meta.position = m->position;
    a->meta.tenant = m->tenant;
    a->meta.user.data = (uint8_t *)m->user;
    a->meta.user.len = m->user_bytes;
    r->meta = &a->meta;
    if (m->has_parent) {
        kvd__proto__key__init(&a->parent);
        a->parent.hash.data = (uint8_t *)m->parent.hash;
        a->parent.hash.len = 32;
        a->meta.parent = &a->parent;
    }
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_READ;
    a->response.read = r;
}

static void on_reserve(struct fake *f, struct fake_pool *p, const Kvd__Proto__Reserve *q,
                       struct answer *a)
{
    struct shm_key key = key_of(q->keys[0]), parent;
    uint32_t slot = 0;

    if (q->parent)
        parent = key_of(q->parent);
    kvd__proto__reserve_reply__init(&a->body.reserve);
    kvd__proto__reservation__init(&a->reservation);
    a->reservation.status = reserve(f, p, &key, q->parent ? &parent : NULL, q->epoch, q->tenant,
                                    &slot, &a->reservation.ticket);
    a->reservation.has_ticket = a->reservation.has_slot = a->reservation.status == 1;
    a->reservation.slot = slot;
    a->reservations = &a->reservation;
    a->body.reserve.n_reservations = 1;
    a->body.reserve.reservations = &a->reservations;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_RESERVE;
    a->response.reserve = &a->body.reserve;
}

static void on_fetch(struct fake *f, struct fake_pool *p, const Kvd__Proto__Fetch *q,
                     struct answer *a)
{
    Kvd__Proto__FetchReply *r = &a->body.fetch;

    kvd__proto__fetch_reply__init(r);
    f->fetch_messages++;
    must(q->n_keys <= 4096, "keys of one message");
    for (size_t i = 0; i < q->n_keys; i++) {
        struct shm_key key = key_of(q->keys[i]);

        a->statuses[i] = q->chain && i && a->statuses[i - 1] < 0 ? a->statuses[i - 1]
                                                                 : fetch(f, p, &key, q->epoch);
    }
    r->n_statuses = q->n_keys;
    r->statuses = a->statuses;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_FETCH;
    a->response.fetch = r;
}

static void on_write(struct fake_pool *p, const Kvd__Proto__Write *q, struct answer *a)
{
    uint32_t slot = (uint32_t)q->ticket & (SHM_SLOTS_MAX - 1);

    if (slot >= p->slots || p->ticket[slot] != q->ticket || q->offset + q->data.len > p->part_bytes)
        refuse(a, -ESTALE, "that ticket is not yours, or is gone");
    else
        memcpy(bytes_of(p, slot, q->part) + q->offset, q->data.data, q->data.len);
}

static void on_commit(struct fake_pool *p, const Kvd__Proto__Commit *q, struct answer *a)
{
    struct shm_meta meta = {0};
    int r;

    if (q->meta) {
        meta.position = q->meta->position;
        meta.user_bytes = (uint32_t)q->meta->user.len;
        if (q->meta->user.len)
            memcpy(meta.user, q->meta->user.data, q->meta->user.len);
    }
    r = commit(p, q->ticket, q->part, q->bytes, &meta);
    if (r < 0)
        refuse(a, r, "commit failed");
}

static void count_of(struct answer *a, uint64_t n)
{
    kvd__proto__count_reply__init(&a->body.count);
    a->body.count.count = n;
    a->response.body_case = KVD__PROTO__RESPONSE__BODY_COUNT;
    a->response.count = &a->body.count;
}

static void on_abort(struct fake *f, struct fake_pool *p, const Kvd__Proto__Abort *q,
                     struct answer *a)
{
    unsigned n = 0;

    for (size_t i = 0; i < q->n_tickets; i++)
        n += give_back(p, q->tickets[i]);
    f->aborted += n;
    count_of(a, n);
}

static uint32_t pool_named(const Kvd__Proto__Request *q)
{
    switch (q->body_case) {
    case KVD__PROTO__REQUEST__BODY_POOL_OPEN:
        return q->pool_open->pool;
    case KVD__PROTO__REQUEST__BODY_CHUNK_MAP:
        return q->chunk_map->pool;
    case KVD__PROTO__REQUEST__BODY_LOOKUP:
        return q->lookup->pool;
    case KVD__PROTO__REQUEST__BODY_PIN:
        return q->pin->pool;
    case KVD__PROTO__REQUEST__BODY_RELEASE:
        return q->release->pool;
    case KVD__PROTO__REQUEST__BODY_READ:
        return q->read->pool;
    case KVD__PROTO__REQUEST__BODY_RESERVE:
        return q->reserve->pool;
    case KVD__PROTO__REQUEST__BODY_WRITE:
        return q->write->pool;
    case KVD__PROTO__REQUEST__BODY_COMMIT:
        return q->commit->pool;
    case KVD__PROTO__REQUEST__BODY_ABORT:
        return q->abort->pool;
    case KVD__PROTO__REQUEST__BODY_FETCH:
        return q->fetch->pool;
    default:
        return 0;
    }
}

static void on_pool(struct fake *f, struct fake_pool *p, const Kvd__Proto__Request *q,
                    struct answer *a)
{
    if (!p)
        refuse(a, -ENOENT, "no such pool");
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_POOL_OPEN)
        on_pool_open(f, p, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_CHUNK_MAP)
        on_chunk_map(p, q->chunk_map, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_LOOKUP)
        on_lookup(f, p, q->lookup, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_PIN)
        on_pin(f, p, q->pin, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_READ)
        on_read(f, p, q->read, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_RESERVE)
        on_reserve(f, p, q->reserve, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_WRITE)
        on_write(p, q->write, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_COMMIT)
        on_commit(p, q->commit, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_ABORT)
        on_abort(f, p, q->abort, a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_FETCH)
        on_fetch(f, p, q->fetch, a);
    else
        count_of(a, f->released += (unsigned)q->release->n_slots);
}

static void on_request(struct fake *f, const Kvd__Proto__Request *q)
{
    Kvd__Proto__ServerFrame frame = KVD__PROTO__SERVER_FRAME__INIT;
    struct answer a = {.response = KVD__PROTO__RESPONSE__INIT};

    a.response.id = q->id;
    if (q->body_case == KVD__PROTO__REQUEST__BODY_ABORT)
        f->abort_asked += (unsigned)q->abort->n_tickets;
    if (q->body_case == KVD__PROTO__REQUEST__BODY_WAKE) {
        f->wakes++;
        return;
    }
    if (q->body_case == KVD__PROTO__REQUEST__BODY_HELLO)
        on_hello(f, q->hello, &a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_SPACE_OPEN)
        on_space_open(f, q->space_open, &a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_SPACE_RESET)
        on_reset(f, &a);
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_PING)
        f->pings++;
    else if (q->body_case == KVD__PROTO__REQUEST__BODY_BYE)
        f->byes++;
    else
        on_pool(f, pool_of(f, pool_named(q)), q, &a);
    if (f->mute >> q->body_case & 1)
        return;
    if (f->raw) {
        must(send(f->conn, f->raw, f->raw_bytes, MSG_NOSIGNAL) == (ssize_t)f->raw_bytes, "raw");
        f->raw = NULL;
        return;
    }
    a.response.has_fds = a.n_fds > 0;
    a.response.fds = a.n_fds;
    if (f->tweak)
        f->tweak(f, &a.response, a.fds, &a.n_fds);
    frame.response = &a.response;
    if (f->conn >= 0)
        send_frame(f, &frame, a.fds, a.n_fds);
}

/* ---- the thread */

static void drop(struct fake *f)
{
    if (f->conn < 0)
        return;
    shutdown(f->conn, SHUT_RDWR); /* the thread may be polling it, which keeps it alive */
    close(f->conn);
    f->conn = -1;
    frame_reader_destroy(&f->reader);
}

static void on_accept(struct fake *f)
{
    int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);

    if (fd < 0)
        return;
    drop(f);
    f->accepted++;
    f->conn = fd;
    frame_reader_init(&f->reader, 4 << 20, 0);
}

static void on_readable(struct fake *f)
{
    ssize_t n = frame_reader_fill(&f->reader, f->conn);
    struct frame frame;

    if (n == -EAGAIN)
        return;
    if (n <= 0) {
        drop(f);
        return;
    }
    while (f->conn >= 0 && frame_reader_next(&f->reader, &frame) > 0) {
        Kvd__Proto__Request *q = kvd__proto__request__unpack(NULL, frame.len, frame.data);

        must(q != NULL, "the library sent a malformed request");
        on_request(f, q);
        kvd__proto__request__free_unpacked(q, NULL);
    }
}

static bool may_sleep(struct fake *f)
{
    if (f->by_hand)
        return true;
    if (serve(f, UINT32_MAX))
        return false;
    shm_going_to_sleep(&f->shm->sleeping);
    return !f->session.shm || shm_ring_waiting(&f->session.requests) <= 0 ||
           !shm_ring_room(&f->session.completions);
}

static void *run(void *arg)
{
    struct fake *f = arg;

    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct pollfd p[3] = {{.fd = f->nudge, .events = POLLIN},
                              {.fd = f->listener, .events = POLLIN},
                              {.fd = f->conn, .events = POLLIN}};
        bool sleep_ = may_sleep(f);
        uint64_t n;

        p[2].fd = f->conn;
        pthread_mutex_unlock(&f->lock);
        poll(p, 3, sleep_ ? -1 : 0);
        pthread_mutex_lock(&f->lock);
        shm_awake(&f->shm->sleeping);
        if (p[0].revents)
            must(read(f->nudge, &n, sizeof(n)) == sizeof(n), "nudge");
        if (p[2].revents && f->conn == p[2].fd && f->conn >= 0)
            on_readable(f);
        if (p[1].revents && f->listener >= 0)
            on_accept(f);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

void fake_nudge(struct fake *f)
{
    uint64_t one = 1;

    must(write(f->nudge, &one, sizeof(one)) == sizeof(one), "nudge");
}

static void listen_(struct fake *f)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    unlink(f->path);
    strcpy(a.sun_path, f->path);
    f->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    must(f->listener >= 0 && bind(f->listener, (struct sockaddr *)&a, sizeof(a)) == 0 &&
             listen(f->listener, 8) == 0,
         "listen");
}

struct fake *fake_start(void)
{
    return fake_start_stores(0);
}

struct fake *fake_start_stores(uint32_t records)
{
    struct fake *f = calloc(1, sizeof(*f));

    must(f != NULL, "memory");
    strcpy(f->dir, "/tmp/kvd-fake-XXXXXX");
    must(mkdtemp(f->dir) != NULL, "mkdtemp");
    snprintf(f->path, sizeof(f->path), "%s/kvd.sock", f->dir);
    pthread_mutex_init(&f->lock, NULL);
    f->conn = -1;
    f->epoch = 1;
    f->may_resume = true;
    f->max_inline = 1 << 16;
    f->records = records;
    f->nudge = eventfd(0, EFD_CLOEXEC);
    world_new(f);
    listen_(f);
    must(pthread_create(&f->thread, NULL, run, f) == 0, "thread");
    return f;
}

void fake_stop(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    f->stop = true;
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
    pthread_join(f->thread, NULL);
    drop(f);
    if (f->listener >= 0)
        close(f->listener);
    close(f->nudge);
    world_free(f);
    unlink(f->path);
    rmdir(f->dir);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

void fake_hang_up(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    drop(f);
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

void fake_leave(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    drop(f);
    close(f->listener);
    f->listener = -1;
    unlink(f->path);
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

void fake_return(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    listen_(f);
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

void fake_replace(struct fake *f)
{
    pthread_mutex_lock(&f->lock);
    drop(f);
    world_free(f);
    world_new(f);
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}
