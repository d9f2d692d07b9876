/* SPDX-License-Identifier: Apache-2.0 */
/* Publishing: reserve, commit, abort; with and without waiting. */
#include "client/internal.h"

#include <errno.h>
#include <string.h>

enum {
    SPINS_PER_CLOCK = 64, /* reading the clock costs as much as many looks at the ring */
    ABORT_MAX = 4096,     /* tickets in one message */
    ROOM_MS = 1,          /* that the ring has room is not announced */
    NAP_MS = 1,           /* between two looks at a batch that is far from done */
    NAP_ABOVE = 4,        /* so many answers of it are still to come */
};

/* ---- arguments */

static int check_writer(struct kvd_pool *pool)
{
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (!pool->space->write)
        return handle_fail(pool->kvd, -EACCES,
                           "space %s was opened for reading: set `write` in "
                           "kvd_space_options",
                           pool->space->name);
    return 0;
}

static int moved_on(const struct kvd_pool *pool)
{
    return handle_fail(pool->kvd, -ESTALE,
                       "another daemon, or another session, has taken over: refresh space %s",
                       pool->space->name);
}

int pool_check_current(const struct kvd_pool *pool)
{
    return atomic_load(&pool->space->stale) ? moved_on(pool) : 0;
}

static int check_reserve(struct kvd_pool *pool, const struct kvd_reserve *q)
{
    int r = check_writer(pool);

    if (r < 0)
        return r;
    if (!q || (q->n && !q->keys) || q->n > UINT32_MAX)
        return handle_fail(pool->kvd, -EINVAL, "a reservation needs an array of keys");
    return pool_check_current(pool);
}

static int check_commits(struct kvd_pool *pool, const struct kvd_commit *commits, size_t n)
{
    int r = check_writer(pool);

    if (r < 0)
        return r;
    if ((n && !commits) || n > UINT32_MAX)
        return handle_fail(pool->kvd, -EINVAL, "a commit needs an array of parts");
    for (size_t i = 0; i < n; i++) {
        const struct kvd_commit *c = &commits[i];

        if (c->part >= pool->info.parts || c->user_bytes > SHM_USER_BYTES ||
            (c->user_bytes && !c->user))
            return handle_fail(pool->kvd, -EINVAL,
                               "commit %zu: part %u of %u, %u bytes of metadata of at most %u", i,
                               c->part, pool->info.parts, c->user_bytes, SHM_USER_BYTES);
    }
    return pool_check_current(pool);
}

/* ---- posting and waiting */

/* A connection that is known to be dead is made again before anything is posted: afterwards the
 * space may be stale, and the caller should hear that. */
int handle_connected(struct kvd *kvd)
{
    uint64_t deadline;
    int r;

    if (control_is_open(kvd->control))
        return 0;
    deadline = handle_deadline(kvd);
    r = handle_lock(kvd, deadline);
    if (r < 0)
        return r;
    r = handle_ready(kvd, deadline);
    handle_unlock(kvd);
    return r;
}

static inline void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* Looks at the ring for up to spin_us. No system call: the clock is read in user space. */
static bool spin(struct kvd *kvd, struct batch *b)
{
    uint64_t until = frame_clock() + (uint64_t)kvd->spin_us * 1000;

    do {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            if (batch_settled(kvd, b, true))
                return true;
            cpu_pause();
        }
    } while (frame_clock() < until);
    return false;
}

static int too_late(struct kvd *kvd, struct batch *b)
{
    return batch_settled(kvd, b, false)
               ? 0
               : handle_fail(kvd, -ETIMEDOUT, "the daemon at %s has not answered in time",
                             control_socket(kvd->control));
}

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Many objects are on their way, one after the other: to be woken for each would cost the daemon more than
 * reading them. A look now and then will do; for the last ones we ask to be woken. */
static bool is_far_from_done(const struct batch *b)
{
    return b->op == SHM_FETCH && b->posted - atomic_load(&b->done) > NAP_ABOVE;
}

/* Whatever the socket brings, the ring decides. A dead connection is made again; the session may
 * have survived, and then the answers will come. -EAGAIN: somebody else should have the socket, which
 * only a fetch lets happen. */
static int sleep_on_socket(struct kvd *kvd, struct batch *b, uint64_t deadline)
{
    while (!batch_settled(kvd, b, false)) {
        int r = handle_ready(kvd, sooner(deadline, handle_deadline(kvd)));
        bool room = !batch_in_flight(b), nap;

        if (r < 0)
            return r;
        nap = is_far_from_done(b);
        if (!nap)
            rings_expect(kvd);
        if (batch_settled(kvd, b, false))
            return 0;
        if (b->op == SHM_FETCH && handle_wanted(kvd))
            return -EAGAIN;
        r = control_wait(kvd->control, room  ? sooner(deadline, control_deadline(ROOM_MS))
                                       : nap ? sooner(deadline, control_deadline(NAP_MS))
                                             : deadline);
        if (frame_clock() >= deadline)
            return too_late(kvd, b);
    }
    return 0;
}

/* Others may need the lock sooner than a fetch is done. Who waits for room has nothing in flight, and
 * nobody would tell. */
static int lock_to_wait(struct kvd *kvd, struct batch *b, uint64_t deadline)
{
    if (b->op == SHM_FETCH && batch_in_flight(b))
        return handle_lock_last(kvd, b, deadline);
    return batch_settled(kvd, b, false) ? -EALREADY : handle_lock(kvd, deadline);
}

int batch_wait(struct kvd *kvd, struct batch *b, uint64_t deadline_ns)
{
    int r;

    if (control_is_open(kvd->control) && spin(kvd, b))
        return 0;
    do {
        r = lock_to_wait(kvd, b, deadline_ns);
        if (r == -ETIMEDOUT && b->op == SHM_FETCH)
            return too_late(kvd, b);
        if (r == -EALREADY || (r == -EAGAIN && batch_settled(kvd, b, false)))
            return 0;
        if (r == 0) {
            r = sleep_on_socket(kvd, b, deadline_ns);
            handle_unlock(kvd);
        }
    } while (r == -EAGAIN);
    return r;
}

static uint64_t ringful_deadline(const struct kvd *kvd, const struct batch *b)
{
    uint64_t ms = b->op == SHM_FETCH ? batch_fetch_ms(b) : 0;

    if (b->op == SHM_FETCH && !b->until_ns)
        ms = FETCH_MS;
    return handle_deadline(kvd) + ms * 1000000;
}

static int one_ringful(struct kvd *kvd, struct batch *b)
{
    uint64_t deadline = ringful_deadline(kvd, b);
    ssize_t n = batch_post(kvd, b);
    int r;

    if (n == -ESTALE)
        return moved_on(b->pool);
    r = batch_wait(kvd, b, deadline); /* also when the daemon could not be woken: that comes back or
                                         fails there */
    if (r == 0 && atomic_load(&b->error))
        r = handle_fail(kvd, atomic_load(&b->error), "the daemon has gone before it answered");
    return r;
}

/* The rest of a chain has the status of the first that cannot be had. True: there was one. */
static bool chain_ends(struct batch *b, size_t from)
{
    int32_t status = 0;

    if (b->op != SHM_FETCH || !b->fetch->chain)
        return false;
    for (size_t i = from; i < b->posted && !status; i++)
        status = b->statuses[i];
    for (size_t i = b->posted; status && i < b->n; i++)
        b->statuses[i] = status;
    return status != 0;
}

/* All of the batch, ringful by ringful. */
int batch_run(struct kvd *kvd, struct batch *b)
{
    int r = handle_connected(kvd);

    while (r == 0 && b->posted < b->n) {
        size_t from = b->posted;

        r = one_ringful(kvd, b);
        if (r == 0 && chain_ends(b, from))
            break;
    }
    if (r < 0)
        batch_abandon(kvd, b);
    /* Whoever has the lock instead will do it when giving it back. */
    if (atomic_load_explicit(&kvd->n_orphans, memory_order_relaxed) && handle_try_lock(kvd))
        handle_unlock(kvd);
    return r;
}

/* ---- reserve and commit */

ssize_t kvd_reserve(struct kvd_pool *pool, const struct kvd_reserve *request,
                    struct kvd_reservation *ret)
{
    struct batch b = {.pool = pool, .op = SHM_RESERVE, .reserve = request, .reservations = ret};
    ssize_t granted = 0;
    int r = check_reserve(pool, request);

    if (r < 0 && r != -ESTALE)
        return r; /* nothing is known of the arrays */
    b.n = request->n;
    if (b.n && !ret)
        return handle_fail(pool->kvd, -EINVAL, "no room for the reservations");
    for (size_t i = 0; i < b.n; i++)
        ret[i] = (struct kvd_reservation){.slot = SHM_NO_SLOT};
    if (r == 0)
        r = batch_run(pool->kvd, &b);
    for (size_t i = 0; r < 0 && i < b.n; i++)
        ret[i] = (struct kvd_reservation){.status = r, .slot = SHM_NO_SLOT};
    if (r < 0)
        return r;
    for (size_t i = 0; i < b.n; i++)
        granted += ret[i].status == KVD_NEW;
    return granted;
}

ssize_t kvd_commit(struct kvd_pool *pool, struct kvd_commit *commits, size_t n)
{
    struct batch b = {
        .pool = pool, .op = SHM_COMMIT, .commits = commits, .results = commits, .n = n};
    ssize_t committed = 0;
    int r = check_commits(pool, commits, n);

    if (r < 0 && r != -ESTALE)
        return r;
    for (size_t i = 0; i < n; i++)
        commits[i].status = UNANSWERED;
    if (r == 0)
        r = batch_run(pool->kvd, &b);
    for (size_t i = 0; i < n; i++) {
        if (commits[i].status == UNANSWERED)
            commits[i].status = r;
        committed += commits[i].status == 0;
    }
    return r < 0 ? r : committed;
}

/* Accepted requests will be answered one way or the other, so only a batch of which nothing was
 * accepted has failed. */
ssize_t batch_submit(struct kvd *kvd, struct batch *b)
{
    ssize_t n;
    int r = handle_connected(kvd);

    if (r < 0)
        return r;
    n = batch_post(kvd, b);
    if (n == -ENOTCONN)
        handle_connected(kvd);
    if (n == -ESTALE)
        return moved_on(b->pool);
    return (ssize_t)b->posted;
}

ssize_t kvd_submit_reserve(struct kvd_pool *pool, const struct kvd_reserve *request,
                           uint64_t user_data)
{
    struct batch b = {
        .pool = pool, .op = SHM_RESERVE, .reserve = request, .async = true, .user_data = user_data};
    int r = check_reserve(pool, request);

    if (r < 0)
        return r;
    b.n = request->n;
    return batch_submit(pool->kvd, &b);
}

ssize_t kvd_submit_commit(struct kvd_pool *pool, const struct kvd_commit *commits, size_t n,
                          uint64_t user_data)
{
    struct batch b = {.pool = pool,
                      .op = SHM_COMMIT,
                      .commits = commits,
                      .n = n,
                      .async = true,
                      .user_data = user_data};
    int r = check_commits(pool, commits, n);

    return r < 0 ? r : batch_submit(pool->kvd, &b);
}

ssize_t kvd_completions(struct kvd *kvd, struct kvd_completion *ret, size_t n)
{
    ssize_t r;

    if (!kvd || (n && !ret))
        return -EINVAL;
    if (handle_forked(kvd))
        return -ECHILD;
    if (!n)
        return 0;
    r = rings_take(kvd, ret, n);
    if (r < 0)
        return handle_fail(kvd, (int)r, "the completion ring makes no sense");
    return r;
}

/* ---- abort */

static ssize_t abort_some(struct kvd_pool *pool, const uint64_t *tickets, size_t n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Abort abort_ = KVD__PROTO__ABORT__INIT;
    struct control_reply reply = {0};
    ssize_t count;
    int r;

    abort_.pool = pool->id;
    abort_.n_tickets = n;
    abort_.tickets = (uint64_t *)tickets; /* only read */
    request.body_case = KVD__PROTO__REQUEST__BODY_ABORT;
    request.abort = &abort_;
    r = handle_round_trip(pool->kvd, pool->space, &request, KVD__PROTO__RESPONSE__BODY_COUNT,
                          CALL_AGAIN, &reply);
    if (r < 0)
        return r;
    count = reply.response->count->count < n ? (ssize_t)reply.response->count->count : (ssize_t)n;
    control_reply_free(&reply);
    return count;
}

ssize_t kvd_abort(struct kvd_pool *pool, const uint64_t *tickets, size_t n)
{
    ssize_t total = 0;

    if (!pool || (n && !tickets))
        return -EINVAL;
    if (handle_forked(pool->kvd))
        return -ECHILD;
    while (n) {
        size_t k = n < ABORT_MAX ? n : ABORT_MAX;
        ssize_t r = abort_some(pool, tickets, k);

        if (r < 0)
            return r;
        total += r;
        tickets += k;
        n -= k;
    }
    return total;
}
