/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The session's rings: posting, collecting, and what becomes of requests whose caller does not wait
 * any more. Every accepted request has exactly one end:
 *
 *      SYNC ──answer──> the batch's arrays             ASYNC ──answer──> DONE ──kvd_completions()
 *        └──timeout──> ABANDONED ──answer──> given back    └──daemon away──> DONE with -ENOTCONN;
 * should an answer come after all, as ABANDONED
 */
#include "client/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    ABORT_TICKETS = 64,
};

/* user_data of requests without completion: should a daemon answer them, it fits no flight. */
#define NO_TAG UINT64_MAX

/* ---- making */

static void rebuild_free(struct rings *r)
{
    r->free_first = NO_FLIGHT;
    for (uint32_t i = r->n_flights; i-- > 0;) {
        if (r->flights[i].state != FLIGHT_FREE)
            continue;
        r->flights[i].next = r->free_first;
        r->free_first = i;
    }
}

static int check_session(const struct rings *r)
{
    uint64_t n = r->session->header.count;

    return n >= SHM_RING_MIN && n <= SHM_RING_MAX && !(n & (n - 1)) ? 0 : -EPROTO;
}

int rings_new(const int fds[2], const uint8_t instance[16], struct rings *ret)
{
    struct rings r = {.done_first = NO_FLIGHT, .done_last = NO_FLIGHT};
    uint32_t entries = 0;
    int err = map_segment(fds[0], SHM_CORE, instance, SEGMENT_READ, &r.core_map);

    if (err == 0)
        err = map_segment(fds[1], SHM_SESSION, instance, SEGMENT_WRITE, &r.session_map);
    r.core = r.core_map.addr;
    r.session = r.session_map.addr;
    if (err == 0)
        err = check_session(&r);
    if (err == 0) {
        entries = (uint32_t)r.session->header.count;
        r.n_flights = 2 * entries;
        r.n_held = r.n_flights;
        r.flights = calloc(r.n_flights, sizeof(*r.flights));
        r.held = calloc(r.n_held, sizeof(*r.held));
        err = r.flights && r.held ? 0 : -ENOMEM;
    }
    if (err < 0) {
        rings_free(&r, false);
        return err;
    }
    rebuild_free(&r);
    r.requests = (struct shm_cursor){.ring = &r.session->requests, .entries = entries};
    r.completions = (struct shm_cursor){.ring = &r.session->completions, .entries = entries};
    r.completion = shm_completion_array(r.session, entries);
    *ret = r;
    return 0;
}

void rings_free(struct rings *r, bool forked)
{
    if (!forked) {
        segment_unmap(&r->core_map);
        segment_unmap(&r->session_map);
    }
    free(r->flights);
    free(r->held);
    *r = (struct rings){.done_first = NO_FLIGHT, .done_last = NO_FLIGHT, .free_first = NO_FLIGHT};
}

/* ---- orphans */

/* The caller holds ring_lock. Without memory the slot stays reserved until the session ends. */
static void orphan(struct kvd *kvd, uint32_t pool, uint64_t ticket)
{
    size_t n = atomic_load_explicit(&kvd->n_orphans, memory_order_relaxed);

    if (n == kvd->max_orphans) {
        size_t max = n ? 2 * n : 16;
        struct orphan *p = realloc(kvd->orphans, max * sizeof(*p));

        if (!p)
            return;
        kvd->orphans = p;
        kvd->max_orphans = max;
    }
    kvd->orphans[n] = (struct orphan){.pool = pool, .ticket = ticket};
    atomic_store_explicit(&kvd->n_orphans, n + 1, memory_order_relaxed);
}

void orphans_add(struct kvd *kvd, uint32_t pool, uint64_t ticket)
{
    pthread_mutex_lock(&kvd->ring_lock);
    orphan(kvd, pool, ticket);
    pthread_mutex_unlock(&kvd->ring_lock);
}

void orphans_forget(struct kvd *kvd)
{
    pthread_mutex_lock(&kvd->ring_lock);
    atomic_store_explicit(&kvd->n_orphans, 0, memory_order_relaxed);
    pthread_mutex_unlock(&kvd->ring_lock);
}

/* Up to ABORT_TICKETS of one pool, from the end. */
static size_t orphans_take(struct kvd *kvd, uint64_t *tickets, uint32_t *ret_pool)
{
    size_t n, k = 0;

    pthread_mutex_lock(&kvd->ring_lock);
    n = atomic_load_explicit(&kvd->n_orphans, memory_order_relaxed);
    while (n && k < ABORT_TICKETS && (!k || kvd->orphans[n - 1].pool == *ret_pool)) {
        *ret_pool = kvd->orphans[n - 1].pool;
        tickets[k++] = kvd->orphans[--n].ticket;
    }
    atomic_store_explicit(&kvd->n_orphans, n, memory_order_relaxed);
    pthread_mutex_unlock(&kvd->ring_lock);
    return k;
}

void orphans_send(struct kvd *kvd)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Abort abort_ = KVD__PROTO__ABORT__INIT;
    uint64_t tickets[ABORT_TICKETS];

    request.body_case = KVD__PROTO__REQUEST__BODY_ABORT;
    request.abort = &abort_;
    abort_.tickets = tickets;
    while (atomic_load_explicit(&kvd->n_orphans, memory_order_relaxed) &&
           control_is_open(kvd->control)) {
        abort_.n_tickets = orphans_take(kvd, tickets, &abort_.pool);
        if (!abort_.n_tickets || control_post(kvd->control, &request) == 0)
            continue;
        while (abort_.n_tickets) /* another time */
            orphans_add(kvd, abort_.pool, tickets[--abort_.n_tickets]);
        return;
    }
}

/* ---- flights */

static void flight_put(struct rings *r, struct flight *f)
{
    f->state = FLIGHT_FREE;
    f->batch = NULL;
    f->generation++;
    f->next = r->free_first;
    r->free_first = (uint32_t)(f - r->flights);
}

static uint64_t flight_tag(const struct rings *r, const struct flight *f)
{
    return (uint64_t)f->generation << 32 | (uint32_t)(f - r->flights);
}

/* NULL: an answer to nothing that is in flight. */
static struct flight *flight_of(struct rings *r, uint64_t tag)
{
    uint32_t i = (uint32_t)tag;

    if (i >= r->n_flights || r->flights[i].generation != (uint32_t)(tag >> 32))
        return NULL;
    return r->flights[i].state != FLIGHT_FREE ? &r->flights[i] : NULL;
}

static void done_push(struct rings *r, struct flight *f)
{
    uint32_t i = (uint32_t)(f - r->flights);

    f->state = FLIGHT_DONE;
    f->next = NO_FLIGHT;
    if (r->done_last == NO_FLIGHT)
        r->done_first = i;
    else
        r->flights[r->done_last].next = i;
    r->done_last = i;
    r->n_done++;
}

/* What the caller is told must not depend on a daemon that talks nonsense. */
static int32_t sane_status(const struct flight *f, int32_t status)
{
    if (status < 0)
        return status;
    if (f->op == SHM_RESERVE)
        return status >= KVD_NEW && status <= KVD_PRESENT ? status : -EPROTO;
    return status == 0 ? 0 : -EPROTO;
}

static void answer_batch(struct flight *f, const struct shm_completion *c)
{
    struct batch *b = f->batch;
    int32_t status = sane_status(f, c->status);

    if (f->op == SHM_RESERVE && status == KVD_NEW && c->slot >= b->pool->info.slots)
        status = -EPROTO;
    if (f->op == SHM_RESERVE)
        b->reservations[f->index] = (struct kvd_reservation){
            .status = status,
            .slot = status == KVD_NEW ? c->slot : SHM_NO_SLOT,
            .ticket = status == KVD_NEW ? c->ticket : 0,
        };
    else if (f->op == SHM_COMMIT)
        b->results[f->index].status = status;
    else
        b->statuses[f->index] = status;
    atomic_fetch_add_explicit(&b->done, 1, memory_order_release); /* pairs with batch_done() */
}

/* What the daemon holds for a fetch that is over can be let go by its tag. */
static void hold(struct rings *r, const struct flight *f)
{
    r->held[r->next_held] = (struct kept){
        .tag = flight_tag(r, f), .user_data = f->done.user_data, .pool = f->pool, .valid = true};
    r->next_held = (r->next_held + 1) % r->n_held;
}

static void answer_async(struct rings *r, struct flight *f, const struct shm_completion *c)
{
    f->done.status = sane_status(f, c->status);
    f->done.slot = f->op == SHM_RESERVE && f->done.status == KVD_NEW ? c->slot : SHM_NO_SLOT;
    f->done.ticket = f->op == SHM_FETCH                                  ? 0
                     : f->op == SHM_RESERVE && f->done.status != KVD_NEW ? 0
                                                                         : c->ticket;
    f->batch = NULL;
    if (f->op == SHM_FETCH && f->done.status == 0 && !f->cancelled)
        hold(r, f);
    done_push(r, f);
}

/* `batch` of a DONE flight that was given up without an answer; never followed. */
static struct batch *const unanswered = (struct batch *)1;

/* True: somebody in handle_lock_last() may have been waiting for this. */
static bool settle(struct kvd *kvd, const struct shm_completion *c)
{
    struct rings *r = &kvd->rings;
    struct flight *f = flight_of(r, c->user_data);
    bool fetch;

    /* Answered before: a daemon that died between answering and taking the request back. */
    if (!f || (f->state == FLIGHT_DONE && f->batch != unanswered))
        return false;
    fetch = f->op == SHM_FETCH;
    r->n_open--;
    r->n_fetches -= fetch;
    if (f->state == FLIGHT_SYNC) {
        answer_batch(f, c);
        flight_put(r, f);
        return fetch;
    }
    if (f->state == FLIGHT_ASYNC) {
        answer_async(r, f, c);
        return false;
    }
    if (f->op == SHM_RESERVE && c->status == KVD_NEW)
        orphan(kvd, f->pool, c->ticket);
    if (f->state == FLIGHT_DONE)
        f->batch = NULL;
    else
        flight_put(r, f);
    return false;
}

/* The caller holds ring_lock. */
static int collect(struct kvd *kvd)
{
    struct rings *r = &kvd->rings;
    int64_t n = r->session ? shm_ring_waiting(&r->completions) : 0;
    bool answered = false;

    if (n < 0)
        return (int)n;
    for (uint32_t i = 0; i < (uint32_t)n; i++) {
        struct shm_completion c =
            r->completion[shm_ring_at(&r->completions, r->completions.mine + i)];

        answered |= settle(kvd, &c);
    }
    if (n)
        shm_ring_consume(&r->completions, (uint32_t)n);
    if (answered)
        handle_answered(kvd);
    return 0;
}

/* ---- cancelling */

/* Requests to give up fetches, one for each run of consecutive tags. */
struct cancel {
    struct rings *r;
    uint32_t pool;
    uint64_t tag, n;
};

static void cancel_post(struct cancel *c)
{
    struct rings *r = c->r;
    struct shm_request *q;

    if (!c->n)
        return;
    q = &r->session->request[shm_ring_at(&r->requests, r->requests.mine)];
    *q = (struct shm_request){.op = SHM_CANCEL, .pool = c->pool, .user_data = NO_TAG};
    q->cancel.user_data = c->tag;
    q->cancel.n = c->n;
    shm_ring_produce(&r->requests, 1); /* W1 */
}

/* False: no room. There always is for what was taken. */
static bool cancel_add(struct cancel *c, uint32_t pool, uint64_t tag)
{
    if (c->n && c->pool == pool && c->tag + c->n == tag) {
        c->n++;
        return true;
    }
    if (shm_ring_room(&c->r->requests) < (c->n ? 2u : 1u))
        return false;
    cancel_post(c);
    c->pool = pool;
    c->tag = tag;
    c->n = 1;
    return true;
}

/* ---- a session ends */

static void fail_batch(struct flight *f)
{
    atomic_store(&f->batch->error, -ENOTCONN);
    f->batch = NULL;
    f->state = FLIGHT_ABANDONED;
}

static void fail_async(struct rings *r, struct flight *f)
{
    f->done.status = -ENOTCONN;
    f->done.slot = SHM_NO_SLOT;
    f->done.ticket = 0;
    f->batch = unanswered;
    done_push(r, f);
}

static void give_up(struct rings *r)
{
    for (uint32_t i = 0; i < r->n_flights; i++) {
        if (r->flights[i].state == FLIGHT_SYNC)
            fail_batch(&r->flights[i]);
        else if (r->flights[i].state == FLIGHT_ASYNC)
            fail_async(r, &r->flights[i]);
    }
}

/* Nobody wants what fetches would bring: should the daemon take the session up again, it finds that in
 * the ring. */
void rings_give_up(struct kvd *kvd)
{
    struct rings *r = &kvd->rings;
    struct cancel c = {.r = r};

    pthread_mutex_lock(&kvd->ring_lock);
    collect(kvd); /* what was answered before */
    give_up(r);
    for (uint32_t i = 0; i < r->n_flights; i++) {
        struct flight *f = &r->flights[i];

        if (f->op == SHM_FETCH && !f->cancelled &&
            (f->state == FLIGHT_ABANDONED || f->batch == unanswered))
            f->cancelled = cancel_add(&c, f->pool, flight_tag(r, f));
    }
    cancel_post(&c);
    handle_answered(kvd);
    pthread_mutex_unlock(&kvd->ring_lock);
}

/* Completions that wait for their owner move to the new table, which is at least as long; places in
 * it are kept. */
static void inherit(struct rings *fresh, struct rings *old)
{
    for (uint32_t i = 0; i < old->n_flights; i++) {
        struct flight *f = &old->flights[i];

        if (f->state == FLIGHT_ABANDONED) {
            f->state = FLIGHT_FREE;
            f->generation++;
        }
        f->batch = NULL;
    }
    if (fresh->n_flights <= old->n_flights) {
        struct flight *spare = fresh->flights;

        fresh->flights = old->flights;
        fresh->n_flights = old->n_flights;
        old->flights = spare;
    } else if (old->n_flights) {
        memcpy(fresh->flights, old->flights, old->n_flights * sizeof(*fresh->flights));
    }
    fresh->n_async = old->n_async;
    fresh->done_first = old->done_first;
    fresh->done_last = old->done_last;
    fresh->n_done = old->n_done;
    rebuild_free(fresh);
}

void rings_replace(struct kvd *kvd, struct rings *fresh)
{
    struct rings old;

    pthread_mutex_lock(&kvd->ring_lock);
    old = kvd->rings;
    if (old.session) {
        collect(kvd);
        old = kvd->rings;
        give_up(&old);
        inherit(fresh, &old);
        handle_answered(kvd);
    }
    kvd->rings = *fresh;
    pthread_mutex_unlock(&kvd->ring_lock);
    rings_free(&old, false);
}

/* ---- posting */

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t less(uint32_t a, uint32_t b)
{
    return a > b ? a - b : 0;
}

/* Never more in flight than the completion ring takes: the daemon answers fetches when they are done,
 * and must find room then. Half of it is not for them, so that publishing goes on while a device is
 * slow. */
static uint32_t room(const struct rings *r, const struct batch *b, uint32_t most)
{
    uint32_t entries = r->requests.entries;
    uint32_t n = least(shm_ring_room(&r->requests), most), i = r->free_first, spare = 0;

    if (b->op == SHM_CANCEL)
        return n;
    n = least(n, less(entries, r->n_open));
    if (b->op == SHM_FETCH)
        n = least(n, less(entries / 2, r->n_fetches));
    if (b->async)
        n = least(n, less(entries, r->n_async));
    for (; spare < n && i != NO_FLIGHT; spare++)
        i = r->flights[i].next;
    return spare;
}

static void write_reserve(struct shm_request *q, const struct batch *b, size_t i)
{
    const struct kvd_reserve *w = b->reserve;
    const struct kvd_key *parent = i == 0 ? w->parent : w->chain ? &w->keys[i - 1] : NULL;

    q->op = SHM_RESERVE;
    q->tenant = w->tenant;
    memcpy(&q->reserve.key, &w->keys[i], sizeof(q->reserve.key));
    if (parent) {
        q->flags = SHM_HAS_PARENT;
        memcpy(&q->reserve.parent, parent, sizeof(q->reserve.parent));
    }
}

static void write_commit(struct shm_request *q, const struct batch *b, size_t i)
{
    const struct kvd_commit *w = &b->commits[i];

    q->op = SHM_COMMIT;
    q->part = (uint16_t)w->part;
    q->ticket = w->ticket;
    q->commit.bytes = w->bytes;
    q->commit.position = w->position;
    q->commit.layout = w->layout;
    q->commit.checksum = w->checksum;
    q->commit.user_bytes = w->user_bytes;
    if (w->user_bytes)
        memcpy(q->commit.user, w->user, w->user_bytes);
}

uint32_t batch_fetch_ms(const struct batch *b)
{
    uint64_t now = b->until_ns ? frame_clock() : 0;

    if (!b->until_ns)
        return 0;
    return b->until_ns > now + 1000000 ? (uint32_t)((b->until_ns - now) / 1000000) : 1;
}

/* `first`: of those that are posted at once. A chain that is posted in several goes is broken off here
 * if one of them has failed, so that the next go need not lean on what lies before it in the ring, which
 * may be another thread's. */
static void write_fetch(struct shm_request *q, const struct batch *b, size_t i, bool first)
{
    q->op = SHM_FETCH;
    q->flags = b->fetch->chain && !first ? SHM_GOES_ON : 0;
    memcpy(&q->fetch.key, &b->fetch->keys[i], sizeof(q->fetch.key));
}

static struct flight *flight_get(struct rings *r, struct batch *b, size_t i)
{
    struct flight *f = &r->flights[r->free_first];

    r->free_first = f->next;
    f->state = b->async ? FLIGHT_ASYNC : FLIGHT_SYNC;
    f->pool = b->pool->id;
    f->op = b->op;
    f->async = b->async;
    f->cancelled = false;
    f->index = (uint32_t)i;
    f->batch = b->async ? NULL : b;
    f->done.user_data = b->user_data + i;
    r->n_async += b->async;
    r->n_open++;
    r->n_fetches += b->op == SHM_FETCH;
    return f;
}

/* Requests b->posted .. + n - 1 of the batch, at the ring's next n entries. */
static void post(struct rings *r, struct batch *b, uint32_t n)
{
    uint32_t epoch = atomic_load(&b->pool->space->epoch);
    uint32_t ms = b->op == SHM_FETCH ? batch_fetch_ms(b) : 0;

    for (uint32_t k = 0; k < n; k++) {
        size_t i = b->posted + k;
        struct shm_request *q =
            &r->session->request[shm_ring_at(&r->requests, r->requests.mine + k)];

        *q = (struct shm_request){
            .pool = b->pool->id,
            .epoch = epoch,
            .user_data = flight_tag(r, flight_get(r, b, i)),
        };
        if (b->op == SHM_RESERVE) {
            write_reserve(q, b, i);
        } else if (b->op == SHM_COMMIT) {
            write_commit(q, b, i);
        } else {
            write_fetch(q, b, i, k == 0);
            q->fetch.deadline_ms = ms;
        }
    }
    b->posted += n;
    shm_ring_produce(&r->requests, n); /* W1 */
}

ssize_t batch_post(struct kvd *kvd, struct batch *b)
{
    struct rings *r = &kvd->rings;
    bool wake = false;
    ssize_t n;

    pthread_mutex_lock(&kvd->ring_lock);
    b->incarnation = kvd->incarnation;
    if (atomic_load(&b->pool->space->stale)) {
        n = -ESTALE;
    } else {
        n = room(r, b, b->n - b->posted < UINT32_MAX ? (uint32_t)(b->n - b->posted) : UINT32_MAX);
        if (n) {
            post(r, b, (uint32_t)n);
            wake = shm_must_wake(&r->core->sleeping); /* W2, W3 */
        }
    }
    pthread_mutex_unlock(&kvd->ring_lock);
    if (wake && control_wake(kvd->control) < 0) /* W4 */
        return -ENOTCONN;
    return n;
}

/* ---- waiting */

/* Acquire: the answers were written before they were counted. Pairs with answer_batch(). */
static bool batch_done(const struct batch *b)
{
    return atomic_load_explicit(&b->done, memory_order_acquire) == b->posted;
}

bool batch_in_flight(const struct batch *b)
{
    return !atomic_load(&b->error) && !batch_done(b);
}

bool batch_settled(struct kvd *kvd, struct batch *b, bool try_only)
{
    int r = try_only ? pthread_mutex_trylock(&kvd->ring_lock) : pthread_mutex_lock(&kvd->ring_lock);
    bool settled;

    if (r != 0)
        return false;
    r = collect(kvd);
    if (r < 0)
        atomic_store(&b->error, r);
    settled =
        atomic_load(&b->error) || (batch_done(b) && (b->posted == b->n || room(&kvd->rings, b, 1)));
    pthread_mutex_unlock(&kvd->ring_lock);
    return settled;
}

/* ---- giving up */

/* An asynchronous fetch that the daemon may still be at. */
static bool cancellable(const struct flight *f)
{
    return f->op == SHM_FETCH && f->async && !f->cancelled &&
           (f->state == FLIGHT_ASYNC || f->state == FLIGHT_ABANDONED ||
            (f->state == FLIGHT_DONE && f->batch == unanswered));
}

/* 1: there are more, and no room. */
static int cancel_flights(struct cancel *c, uint32_t pool, uint64_t user_data, uint64_t n)
{
    struct rings *r = c->r;

    for (uint32_t i = 0; i < r->n_flights; i++) {
        struct flight *f = &r->flights[i];

        if (!cancellable(f) || f->pool != pool || f->done.user_data - user_data >= n)
            continue;
        if (!cancel_add(c, f->pool, flight_tag(r, f)))
            return 1;
        f->cancelled = true;
    }
    return 0;
}

static int cancel_held(struct cancel *c, uint32_t pool, uint64_t user_data, uint64_t n)
{
    for (uint32_t i = 0; i < c->r->n_held; i++) {
        struct kept *h = &c->r->held[i];

        if (!h->valid || h->pool != pool || h->user_data - user_data >= n)
            continue;
        if (!cancel_add(c, h->pool, h->tag))
            return 1;
        h->valid = false;
    }
    return 0;
}

int rings_cancel(struct kvd_pool *pool, uint64_t user_data, uint64_t n)
{
    struct kvd *kvd = pool->kvd;
    struct cancel c = {.r = &kvd->rings};
    bool wake = false;
    int more = 0;

    pthread_mutex_lock(&kvd->ring_lock);
    if (!atomic_load(&pool->space->stale)) { /* else they have ended with their session */
        collect(kvd);
        more = cancel_flights(&c, pool->id, user_data, n);
        if (!more)
            more = cancel_held(&c, pool->id, user_data, n);
        wake = c.n > 0;
        cancel_post(&c);
        wake = wake && shm_must_wake(&kvd->rings.core->sleeping); /* W2, W3 */
    }
    pthread_mutex_unlock(&kvd->ring_lock);
    if (wake && control_wake(kvd->control) < 0) /* W4 */
        return -ENOTCONN;
    return more;
}

/* Fetches are given up as far as there is room; others end soon. */
void batch_abandon(struct kvd *kvd, struct batch *b)
{
    struct rings *r = &kvd->rings;
    struct cancel c = {.r = r};
    bool wake;

    pthread_mutex_lock(&kvd->ring_lock);
    for (uint32_t i = 0; i < r->n_flights; i++) {
        struct flight *f = &r->flights[i];

        if (f->batch != b)
            continue;
        f->state = FLIGHT_ABANDONED;
        f->batch = NULL;
        if (b->op == SHM_FETCH)
            f->cancelled = cancel_add(&c, f->pool, flight_tag(r, f));
    }
    for (size_t i = 0; b->reserve && i < b->posted; i++)
        if (b->reservations[i].status == KVD_NEW && b->incarnation == kvd->incarnation)
            orphan(kvd, b->pool->id, b->reservations[i].ticket);
    wake = c.n > 0;
    cancel_post(&c);
    wake = wake && shm_must_wake(&r->core->sleeping); /* W2, W3 */
    pthread_mutex_unlock(&kvd->ring_lock);
    if (wake)
        control_wake(kvd->control); /* W4; should it fail, the next connection is wake-up enough */
}

/* Requests that the core has left in the ring, because there was no room for their answers, are not
 * looked at again by themselves. */
static bool stuck(const struct rings *r)
{
    return shm_ring_room(&r->requests) < r->requests.entries && shm_must_wake(&r->core->sleeping);
}

bool rings_have_done(struct kvd *kvd)
{
    bool have;

    pthread_mutex_lock(&kvd->ring_lock);
    have = kvd->rings.n_done > 0;
    pthread_mutex_unlock(&kvd->ring_lock);
    return have;
}

ssize_t rings_expect(struct kvd *kvd)
{
    struct rings *r = &kvd->rings;
    bool wake = false;
    ssize_t n = 0;

    pthread_mutex_lock(&kvd->ring_lock);
    if (r->session) {
        shm_going_to_sleep(&r->session->waiting);
        collect(kvd);
        wake = stuck(r);
    }
    n = r->n_done;
    pthread_mutex_unlock(&kvd->ring_lock);
    if (wake)
        control_wake(kvd->control);
    return n;
}

void rings_expect_none(struct kvd *kvd)
{
    pthread_mutex_lock(&kvd->ring_lock);
    if (kvd->rings.session) {
        shm_awake(&kvd->rings.session->waiting);
        collect(kvd);
    }
    pthread_mutex_unlock(&kvd->ring_lock);
}

/* ---- completions */

static void done_pop(struct rings *r, struct kvd_completion *ret)
{
    struct flight *f = &r->flights[r->done_first];

    *ret = f->done;
    r->done_first = f->next;
    if (r->done_first == NO_FLIGHT)
        r->done_last = NO_FLIGHT;
    r->n_done--;
    r->n_async--;
    if (f->batch == unanswered) {
        f->state = FLIGHT_ABANDONED;
        f->batch = NULL;
    } else {
        flight_put(r, f);
    }
}

ssize_t rings_take(struct kvd *kvd, struct kvd_completion *ret, size_t n)
{
    struct rings *r = &kvd->rings;
    ssize_t taken = 0;
    int err;

    pthread_mutex_lock(&kvd->ring_lock);
    err = collect(kvd);
    if (!ret)
        taken = r->n_done;
    for (; ret && (size_t)taken < n && r->n_done; taken++)
        done_pop(r, &ret[taken]);
    pthread_mutex_unlock(&kvd->ring_lock);
    return taken || !err ? taken : err;
}

/* ---- observations */

/* They have no answer and wake nobody, so a ring full of them could stay full: they get half of it.
 */
ssize_t rings_observe(struct kvd_pool *pool, const struct kvd_key *keys, size_t n)
{
    struct rings *r = &pool->kvd->rings;
    uint32_t entries, posted = 0, free_entries;
    size_t taken = 0;

    pthread_mutex_lock(&pool->kvd->ring_lock);
    entries = r->requests.entries;
    free_entries = atomic_load(&pool->space->stale) ? 0 : shm_ring_room(&r->requests);
    for (; taken < n && free_entries - posted > entries / 2; posted++) {
        struct shm_request *q =
            &r->session->request[shm_ring_at(&r->requests, r->requests.mine + posted)];
        uint32_t k = n - taken < SHM_OBSERVE_KEYS ? (uint32_t)(n - taken) : SHM_OBSERVE_KEYS;

        *q = (struct shm_request){
            .op = SHM_OBSERVE, .pool = pool->id, .epoch = atomic_load(&pool->space->epoch)};
        q->observe.n = k;
        memcpy(q->observe.keys, &keys[taken], k * sizeof(q->observe.keys[0]));
        taken += k;
    }
    if (posted)
        shm_ring_produce(&r->requests, posted);
    pthread_mutex_unlock(&pool->kvd->ring_lock);
    return (ssize_t)taken;
}
