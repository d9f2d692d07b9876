/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serving request rings. The bytes of a session segment are whatever its process wants them to be,
 * at any moment: an entry is copied out under a guard, and only the copy is looked at.
 */
#include <errno.h>
#include <string.h>

#include "daemon/guard.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/spill.h"

/* The session's own use of a pool it has opened; requests do not open pools. */
static struct attach *attach_of(struct session *s, uint32_t pool)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &s->attaches) {
        struct attach *a = list_entry(i, struct attach, in_session);

        if (a->pool->id == pool)
            return a;
    }
    return NULL;
}

static void run_reserve(struct attach *a, const struct shm_request *q, struct shm_completion *c)
{
    struct reservation r;

    pool_reserve(a->pool, a, &q->reserve.key, q->flags & SHM_HAS_PARENT ? &q->reserve.parent : NULL,
                 q->epoch, q->tenant, &r);
    c->status = r.status;
    c->slot = r.slot;
    c->ticket = r.ticket;
}

static void run_commit(struct attach *a, const struct shm_request *q, struct shm_completion *c)
{
    struct commit m = {
        .ticket = q->ticket,
        .part = q->part,
        .bytes = q->commit.bytes,
        .position = q->commit.position,
        .layout = q->commit.layout,
        .checksum = q->commit.checksum,
        .user_bytes = q->commit.user_bytes,
        .user = q->commit.user,
    };

    c->ticket = q->ticket;
    c->slot = (uint32_t)q->ticket & (SHM_SLOTS_MAX - 1);
    c->status = pool_commit(a->pool, a, &m);
}

/* Tail first, so that heads are the younger ones. No completion. */
static void run_observe(struct attach *a, const struct shm_request *q)
{
    uint32_t n = q->observe.n <= SHM_OBSERVE_KEYS ? q->observe.n : SHM_OBSERVE_KEYS;

    while (n--)
        pool_observe(a->pool, &q->observe.keys[n], q->epoch);
}

/* No completion follows: they are served although the completion ring is full. */
static bool is_silent(uint8_t op)
{
    return op == SHM_OBSERVE || op == SHM_CANCEL;
}

/* True: the completion comes later. */
static bool run_fetch(struct attach *a, const struct shm_request *q, struct shm_completion *c)
{
    struct session *s = a->session;
    const struct fetch_ask ask = {.key = q->fetch.key,
                                  .epoch = q->epoch,
                                  .deadline_ms = q->fetch.deadline_ms,
                                  .tag = q->user_data};

    if (!(q->flags & SHM_GOES_ON))
        s->stopped = 0;
    if (!s->stopped)
        c->status = spill_fetch(a, &ask);
    else
        c->status = s->stopped;
    if (c->status < 0)
        s->stopped = c->status;
    s->promised += c->status == 1;
    return c->status == 1;
}

/* True: no completion follows now. */
static bool run(struct session *s, const struct shm_request *q, struct shm_completion *c)
{
    struct attach *a = attach_of(s, q->pool);

    if (is_silent(q->op)) {
        if (a && q->op == SHM_OBSERVE)
            run_observe(a, q);
        else if (a)
            spill_cancel(a, q->cancel.user_data, q->cancel.n);
        return true;
    }
    if (a && q->op == SHM_FETCH)
        return run_fetch(a, q, c);
    if (!a)
        c->status = -EBADF;
    else if (s->role < ROLE_WRITER)
        c->status = -EACCES;
    else if (q->op == SHM_RESERVE)
        run_reserve(a, q, c);
    else if (q->op == SHM_COMMIT)
        run_commit(a, q, c);
    else
        c->status = -ENOSYS;
    return false;
}

struct serve {
    struct session *s;
    struct shm_request request;
    struct shm_completion completion;
    bool silent; /* no completion, or not now */
};

/* -EAGAIN: nothing waits, or there is no room for the answer (then the request waits, too). */
static int take(void *arg)
{
    struct serve *x = arg;
    struct session *s = x->s;
    int64_t n = shm_ring_waiting(&s->requests);

    if (n <= 0)
        return n < 0 ? (int)n : -EAGAIN;
    memcpy(&x->request, &s->shm->request[shm_ring_at(&s->requests, s->requests.mine)],
           sizeof(x->request));
    return is_silent(x->request.op) || shm_ring_room(&s->completions) > s->promised ? 0 : -EAGAIN;
}

/* The answer first (C6), then the request is given back (C7): whoever restarts between the two
 * finds the request again, and by the answer before it that only C7 is missing. */
static int give(void *arg)
{
    struct serve *x = arg;
    struct session *s = x->s;

    if (!x->silent) {
        struct shm_completion *ring = shm_completion_array(s->shm, s->ring_entries);

        ring[shm_ring_at(&s->completions, s->completions.mine)] = x->completion;
        shm_ring_produce(&s->completions, 1); /* C6 */
    }
    shm_ring_consume(&s->requests, 1); /* C7 */
    return 0;
}

/* In units of a usual request: a cancel looks at all that the session holds of fetches. */
static uint32_t work_of(struct session *s, const struct shm_request *q)
{
    const struct attach *a = q->op == SHM_CANCEL ? attach_of(s, q->pool) : NULL;

    return a ? 1 + (a->n_held + a->n_waiting) / 64 : 1;
}

int session_serve(struct session *s, uint32_t max)
{
    struct serve x = {.s = s};
    uint32_t n, work = 0;

    if (!s->shm || s->broken || s->state != SESSION_ATTACHED)
        return 0;
    for (n = 0; n < max && work < max; n++) {
        int r = guard_call(take, &x, s->map.addr, s->map.bytes);

        if (r == -EAGAIN)
            break;
        if (r == 0) {
            x.completion =
                (struct shm_completion){.user_data = x.request.user_data, .slot = SHM_NO_SLOT};
            x.silent = run(s, &x.request, &x.completion);
            work += work_of(s, &x.request);
            r = guard_call(give, &x, s->map.addr, s->map.bytes);
        }
        if (r < 0) {
            s->core->stats.ring_errors++;
            session_break(s, r == -EFAULT ? "its session segment was truncated"
                                          : "its request ring made no sense");
            return r;
        }
    }
    s->core->stats.requests += n;
    return (int)n;
}

static int post(void *arg)
{
    struct serve *x = arg;
    struct session *s = x->s;
    struct shm_completion *ring = shm_completion_array(s->shm, s->ring_entries);

    if (!shm_ring_room(&s->completions))
        return -EPROTO; /* it has moved its index back */
    ring[shm_ring_at(&s->completions, s->completions.mine)] = x->completion;
    shm_ring_produce(&s->completions, 1);
    return 0;
}

void session_post(struct session *s, const struct shm_completion *c)
{
    struct serve x = {.s = s, .completion = *c};

    s->promised -= s->promised > 0;
    s->posted = true;
    if (!s->shm || s->broken || s->state == SESSION_LINGERING)
        return;
    if (guard_call(post, &x, s->map.addr, s->map.bytes) < 0)
        session_break(s, "its completion ring cannot be written");
}

static int wants_waking(void *arg)
{
    struct session *s = arg;

    if (!shm_must_wake(
            &s->shm->waiting)) /* pairs with the fence of the process that goes to poll() */
        return 0;
    shm_awake(&s->shm->waiting);
    return 1;
}

bool session_must_wake(struct session *s)
{
    return s->shm && !s->broken && guard_call(wants_waking, s, s->map.addr, s->map.bytes) == 1;
}

static int waiting(void *arg)
{
    struct session *s = arg;

    const struct shm_request *next = &s->shm->request[shm_ring_at(&s->requests, s->requests.mine)];

    return shm_ring_waiting(&s->requests) != 0 && (shm_ring_room(&s->completions) > s->promised ||
                                                   is_silent(*(const volatile uint8_t *)&next->op));
}

bool sessions_have_work(const struct core *c)
{
    const struct list *i;

    for (i = c->sessions.next; i != &c->sessions; i = i->next) {
        struct session *s = list_entry(i, struct session, in_core);

        if (s->shm && !s->broken && s->state == SESSION_ATTACHED &&
            guard_call(waiting, s, s->map.addr, s->map.bytes) != 0)
            return true; /* also when it faults: serving it will find out */
    }
    return false;
}
