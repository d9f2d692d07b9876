/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "daemon/guard.h"
#include "daemon/log.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"
#include "shm/header.h"

/* ---- engines */

static struct engine *engine_find(struct core *c, const uint8_t *token, uint32_t len)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &c->engines) {
        struct engine *e = list_entry(i, struct engine, in_core);

        if (e->living && e->token_len == len && memcmp(e->token, token, len) == 0)
            return e;
    }
    return NULL;
}

/* The engine of a token, made if need be. No token: an engine of one. */
static struct engine *engine_get(struct core *c, const uint8_t *token, uint32_t len)
{
    struct engine *e = len ? engine_find(c, token, len) : NULL;

    if (e)
        return e;
    e = calloc(1, sizeof(*e));
    if (!e)
        return NULL;
    list_init(&e->members);
    e->token_len = len;
    if (len)
        memcpy(e->token, token, len);
    list_append(&c->engines, &e->in_core);
    return e;
}

static void engine_put(struct engine *e)
{
    if (!list_empty(&e->members))
        return;
    list_remove(&e->in_core);
    free(e);
}

/* ---- segments that a session's process writes */

/* A segment of our own format in the runtime directory, mapped writable. */
static int make_segment(struct core *c, const char *name, enum shm_kind kind, uint64_t bytes,
                        uint64_t count, struct segment *ret_segment,
                        struct segment_mapping *ret_map)
{
    struct segment_spec spec = {.name = name,
                                .kind = SEGMENT_SMALL,
                                .bytes = bytes,
                                .runtime_dir = c->runtime_dir,
                                .replace = true};
    struct segment segment;
    struct segment_mapping map;
    int r = segment_make(&spec, NULL, &segment);

    if (r < 0)
        return r;
    r = segment_map(NULL, segment.fd, segment.bytes, SEGMENT_WRITE, SEGMENT_DONTFORK, &map);
    if (r < 0) {
        segment_unlink(&segment);
        segment_close(&segment);
        return r;
    }
    shm_header_fill(map.addr, kind, segment.bytes, count, c->instance);
    *ret_segment = segment;
    *ret_map = map;
    return 0;
}

static void drop_segment(struct segment *segment, struct segment_mapping *map)
{
    if (segment->fd < 0)
        return;
    segment_unmap(map);
    segment_unlink(segment);
    segment_close(segment);
    segment->fd = -1;
}

static int make_rings(struct session *s, uint32_t wish)
{
    uint32_t entries = SHM_RING_MIN;
    char name[64];
    int r;

    while (entries < wish && entries < s->core->ring_entries_max && entries < SHM_RING_MAX)
        entries *= 2;
    snprintf(name, sizeof(name), "kvd-session-%u", s->id);
    r = make_segment(s->core, name, SHM_SESSION, shm_session_bytes(entries), entries, &s->segment,
                     &s->map);
    if (r < 0)
        return r;
    s->shm = s->map.addr;
    s->ring_entries = entries;
    s->requests = (struct shm_cursor){.ring = &s->shm->requests, .entries = entries};
    s->completions = (struct shm_cursor){.ring = &s->shm->completions, .entries = entries};
    return 0;
}

/* ---- sessions */

static void set_client(struct session *s, const char *client)
{
    size_t n = 0;

    for (; client && *client && n < sizeof(s->client) - 1; client++)
        s->client[n++] = *client >= ' ' && *client < 127 ? *client : '?';
}

/* Sessions outlive their connections, so they are counted for themselves: whoever uses up those of one
 * socket does not use up those of others. An administrator, who comes to put an end to it, still finds
 * room. */
#define ADMIN_RESERVE 16u

static bool too_many(const struct core *c, const struct session_spec *spec)
{
    uint32_t n = 0;

    if (c->n_sessions >= c->max_sessions + (spec->role == ROLE_ADMIN ? ADMIN_RESERVE : 0))
        return true;
    for (const struct list *i = c->sessions.next; spec->socket_max && i != &c->sessions;
         i = i->next)
        n += list_entry(i, struct session, in_core)->socket == spec->socket;
    return spec->socket_max && n >= spec->socket_max;
}

int session_new(struct core *c, const struct session_spec *spec, struct session **ret_session)
{
    struct session *s;
    int r;

    if (spec->token_len > sizeof(((struct engine *)0)->token))
        return -EINVAL;
    if (too_many(c, spec))
        return -EUSERS;
    s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    *s = (struct session){.core = c,
                          .id = c->next_session++,
                          .role = spec->role,
                          .socket = spec->socket,
                          .pid = spec->pid,
                          .uid = spec->uid,
                          .start_time = spec->start_time,
                          .created_ms = core_now_ms(c),
                          .active_ms = core_now_ms(c),
                          .segment = {.fd = -1, .reader_fd = -1}};
    list_init(&s->attaches);
    list_init(&s->calls);
    set_client(s, spec->client);
    r = getrandom(s->cookie, sizeof(s->cookie), 0) == sizeof(s->cookie) ? 0 : -EIO;
    if (r == 0 && spec->ring_entries)
        r = make_rings(s, spec->ring_entries);
    s->engine = r == 0 ? engine_get(c, spec->token, spec->token_len) : NULL;
    if (!s->engine) {
        drop_segment(&s->segment, &s->map);
        free(s);
        return r < 0 ? r : -ENOMEM;
    }
    s->engine->living++;
    list_append(&s->engine->members, &s->in_engine);
    list_append(&c->sessions, &s->in_core);
    c->n_sessions++;
    c->stats.sessions++;
    *ret_session = s;
    return 0;
}

struct session *session_find(struct core *c, const uint8_t *cookie, size_t len, pid_t pid,
                             uint64_t start_time)
{
    struct list *i, *tmp;

    if (len != sizeof(((struct session *)0)->cookie))
        return NULL;
    kvd_list_for_each (i, tmp, &c->sessions) {
        struct session *s = list_entry(i, struct session, in_core);

        if (s->state != SESSION_LINGERING && s->pid == pid && s->start_time == start_time &&
            CRYPTO_memcmp(s->cookie, cookie, len) == 0)
            return s;
    }
    return NULL;
}

struct session *session_by_id(struct core *c, uint32_t id)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &c->sessions) {
        struct session *s = list_entry(i, struct session, in_core);

        if (s->id == id)
            return s;
    }
    return NULL;
}

/* Who says goodbye writes no more; who is dead may have started a device, and the other members of an
 * engine may be writing into slots that this one had reserved. */
static void attach_free(struct attach *a, bool died)
{
    bool quarantine = died || a->session->engine->living;
    uint32_t slot;

    spill_forget(a);
    pool_drop_sources(a->pool, a);
    while ((slot = a->reserved.first) != SLOT_NONE)
        pool_unreserve(a->pool, slot, quarantine, died ? HISTORY_ORPHANED : HISTORY_ABORTED,
                       a->session->id);
    drop_segment(&a->segment, &a->map);
    if (a->own)
        munmap(a->own, a->own_bytes);
    list_remove(&a->in_session);
    list_remove(&a->in_pool);
    free(a);
}

/* Everything of the session comes back. `died`: somebody may still be writing into its slots. */
static void bury(struct session *s, bool died)
{
    struct list *i, *tmp;

    if (s->core->session_gone)
        s->core->session_gone(s->core->session_gone_arg, s);
    kvd_list_for_each (i, tmp, &s->attaches) {
        attach_free(list_entry(i, struct attach, in_session), died);
    }
    session_drop_calls(s);
    drop_segment(&s->segment, &s->map);
    list_remove(&s->in_engine);
    list_remove(&s->in_core);
    engine_put(s->engine);
    s->core->n_sessions--;
    s->core->stats.reaped++;
    free(s);
}

/* Its last living member is gone: nobody is copying any more. Frees the engine. */
static void bury_members(struct engine *e)
{
    bool more = !list_empty(&e->members);

    while (more) {
        more = e->members.next->next != &e->members; /* with the last one goes the engine */
        bury(list_entry(e->members.next, struct session, in_engine), true);
    }
}

void session_end(struct session *s, bool died)
{
    struct engine *e = s->engine;

    if (s->state == SESSION_LINGERING)
        return;
    e->living--;
    if (died) {
        s->state = SESSION_LINGERING;
        s->linger_until_ms = core_now_ms(s->core) + s->core->engine_linger_ms;
        if (!e->living)
            bury_members(e);
    } else { /* it vouches for itself, not for members that died */
        bool alone = e->members.next->next == &e->members, last = !e->living;

        bury(s, false);
        if (last && !alone)
            bury_members(e);
    }
}

void session_drop_calls(struct session *s)
{
    while (!list_empty(&s->calls)) {
        struct fetch_call *call = list_entry(s->calls.next, struct fetch_call, in_session);

        list_remove(&call->in_session);
        call->session = NULL;
    }
}

void session_hang_up(struct session *s)
{
    session_drop_calls(s);
    s->conn = NULL;
    if (s->state == SESSION_ATTACHED)
        s->state = SESSION_HUNG_UP;
}

void session_break(struct session *s, const char *note)
{
    if (s->broken)
        return;
    s->broken = true;
    s->note = note;
    s->core->stats.broken++;
    log_write_limited(s->core->log, &s->core->breaks, LOG_WARNING,
                      &(struct log_fields){.session = s->id}, "pid %d (%s): %s; no more service",
                      (int)s->pid, s->client, note);
}

int64_t sessions_linger(struct core *c, uint64_t now_ms)
{
    int64_t next = -1;
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &c->sessions) {
        struct session *s = list_entry(i, struct session, in_core);
        int64_t left = (int64_t)(s->linger_until_ms - now_ms);

        if (s->state != SESSION_LINGERING)
            continue;
        if (left <= 0)
            bury(s, true);
        else if (next < 0 || left < next)
            next = left;
    }
    return next;
}

void sessions_bury(struct core *c)
{
    while (!list_empty(&c->sessions))
        bury(list_entry(c->sessions.next, struct session, in_core), false);
}

/* Does the session hold too much of one of its spaces? */
static bool check_pins(struct session *s)
{
    struct list *i, *tmp;
    bool over = false;

    kvd_list_for_each (i, tmp, &s->attaches) {
        struct attach *a = list_entry(i, struct attach, in_session);
        uint64_t max = a->pool->space->max_pinned_bytes;
        struct session_pins pins;

        if (max && session_count_pins(s, a->pool->space, &pins) == 0)
            a->over_quota = pins.bytes > max;
        over |= a->over_quota;
    }
    return over;
}

void sessions_check_pins(struct core *c)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &c->sessions) {
        struct session *s = list_entry(i, struct session, in_core);
        bool over = check_pins(s);

        if (!s->broken)
            s->note = over ? "holds more pinned bytes than max_pinned: no new grants" : NULL;
    }
}

/* ---- attaches */

struct attach *session_attached(const struct session *s, const struct pool *p)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &s->attaches) {
        struct attach *a = list_entry(i, struct attach, in_session);

        if (a->pool == p)
            return a;
    }
    return NULL;
}

static int share_pins(struct attach *a)
{
    struct pool *p = a->pool;
    char name[64];
    int r;

    snprintf(name, sizeof(name), "kvd-pins-%u-%u", a->session->id, p->id);
    r = make_segment(p->core, name, SHM_PINS, shm_pins_bytes(p->slots), p->slots, &a->segment,
                     &a->map);
    if (r < 0)
        return r;
    ((struct shm_header *)a->map.addr)->space = p->space->id;
    ((struct shm_header *)a->map.addr)->pool = p->id;
    r = pool_add_source(p, a->map.addr, a->map.bytes, a);
    if (r < 0)
        drop_segment(&a->segment, &a->map);
    return r;
}

int session_attach(struct session *s, struct pool *p, bool shared, struct attach **ret_attach)
{
    struct attach *a = session_attached(s, p);
    int r;

    if (!a) {
        a = calloc(1, sizeof(*a));
        if (!a)
            return -ENOMEM;
        *a = (struct attach){.session = s, .pool = p, .segment = {.fd = -1, .reader_fd = -1}};
        slot_list_init(&a->reserved);
        list_init(&a->waiters);
        list_append(&s->attaches, &a->in_session);
        list_append(&p->attaches, &a->in_pool);
    }
    r = shared && a->segment.fd < 0 ? share_pins(a) : 0;
    if (r < 0)
        return r; /* the attach stays, harmless and empty */
    *ret_attach = a;
    return 0;
}

int attach_own_pins(struct attach *a)
{
    size_t bytes = shm_pins_bytes(a->pool->slots);
    void *m;
    int r;

    if (a->own)
        return 0;
    m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (m == MAP_FAILED)
        return -errno;
    r = pool_add_source(a->pool, m, bytes, a);
    if (r < 0) {
        munmap(m, bytes);
        return r;
    }
    a->own = m;
    a->own_bytes = bytes;
    return 0;
}

/* ---- what a session holds */

struct pin_count {
    const struct pool *pool;
    const struct shm_pins *pins;
    struct session_pins sum;
};

static int count_pins(void *arg)
{
    struct pin_count *x = arg;

    for (uint32_t i = 0; i < x->pool->slots; i++) {
        const struct shm_pin *pin = &x->pins->pins[i];
        uint64_t age;

        if (!shm_load32(&pin->count))
            continue;
        x->sum.objects++;
        x->sum.bytes += x->pool->part_bytes * x->pool->parts;
        age = pool_tick_age_ms(x->pool, shm_load32(&pin->stamp));
        if (age > x->sum.oldest_ms)
            x->sum.oldest_ms = age;
    }
    return 0;
}

int session_count_pins(struct session *s, const struct space *space, struct session_pins *ret_pins)
{
    struct pin_count x = {.pool = NULL};
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &s->attaches) {
        struct attach *a = list_entry(i, struct attach, in_session);

        x.pool = a->pool;
        if (space && a->pool->space != space)
            continue;
        for (int k = 0; k < 2; k++) {
            size_t bytes = k ? a->own_bytes : a->map.bytes;

            x.pins = k ? a->own : a->segment.fd < 0 ? NULL : a->map.addr;
            if (x.pins && guard_call(count_pins, &x, x.pins, bytes) < 0)
                return -EFAULT;
        }
    }
    *ret_pins = x.sum;
    return 0;
}

bool session_over_quota(const struct session *s, const struct space *space)
{
    for (const struct list *i = s->attaches.next; i != &s->attaches; i = i->next) {
        const struct attach *a = list_entry(i, struct attach, in_session);

        if (a->pool->space == space && a->over_quota)
            return true;
    }
    return false;
}

uint64_t session_reserved_in(const struct session *s, const struct space *space)
{
    uint64_t n = 0;

    for (const struct list *i = s->attaches.next; i != &s->attaches; i = i->next) {
        const struct attach *a = list_entry(i, struct attach, in_session);

        n += a->pool->space == space ? a->reserved.n : 0;
    }
    return n;
}

const char *session_state_name(const struct session *s)
{
    if (s->broken)
        return "broken";
    switch (s->state) {
    case SESSION_ATTACHED:
        return "attached";
    case SESSION_HUNG_UP:
        return "hung-up";
    case SESSION_LINGERING:
        return "lingering";
    }
    return "?";
}

const char *session_role_name(enum session_role role)
{
    return role == ROLE_ADMIN ? "admin" : role == ROLE_WRITER ? "writer" : "reader";
}
