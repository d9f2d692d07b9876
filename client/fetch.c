/* SPDX-License-Identifier: Apache-2.0 */
/* Bringing objects back from the spill stores, with and without waiting, and giving that up. */
#include "client/internal.h"

#include <errno.h>

static int check(struct kvd_pool *pool, const struct kvd_fetch *q)
{
    int r = pool_check(pool);

    if (r < 0)
        return r;
    if (!q || (q->n && !q->keys) || q->n > UINT32_MAX || q->chain > 1)
        return handle_fail(pool->kvd, -EINVAL,
                           "a fetch needs an array of keys, and chain is 0 or 1");
    return pool_check_current(pool);
}

static uint64_t until(const struct kvd_fetch *q)
{
    return q->deadline_ms ? control_deadline(q->deadline_ms) : 0;
}

ssize_t kvd_fetch(struct kvd_pool *pool, const struct kvd_fetch *request, int32_t *ret_status)
{
    struct batch b = {.pool = pool, .op = SHM_FETCH, .fetch = request, .statuses = ret_status};
    ssize_t resident = 0;
    int r = check(pool, request);

    if (r < 0 && r != -ESTALE)
        return r; /* nothing is known of the arrays */
    b.n = request->n;
    b.until_ns = until(request);
    if (b.n && !ret_status)
        return handle_fail(pool->kvd, -EINVAL, "no room for the statuses");
    for (size_t i = 0; i < b.n; i++)
        ret_status[i] = UNANSWERED;
    if (r == 0)
        r = batch_run(pool->kvd, &b);
    for (size_t i = 0; i < b.n; i++) {
        if (ret_status[i] == UNANSWERED)
            ret_status[i] = r;
        resident += ret_status[i] == 0;
    }
    return r < 0 ? r : resident;
}

ssize_t kvd_submit_fetch(struct kvd_pool *pool, const struct kvd_fetch *request, uint64_t user_data)
{
    struct batch b = {
        .pool = pool, .op = SHM_FETCH, .fetch = request, .async = true, .user_data = user_data};
    int r = check(pool, request);

    if (r < 0)
        return r;
    b.n = request->n;
    b.until_ns = until(request);
    return batch_submit(pool->kvd, &b);
}

int kvd_fetch_cancel(struct kvd_pool *pool, uint64_t user_data, size_t n)
{
    struct batch room = {.pool = pool, .op = SHM_CANCEL, .n = 1};
    int r = pool_check(pool);
    uint64_t deadline;

    if (r < 0)
        return r;
    deadline = handle_deadline(pool->kvd);
    while ((r = rings_cancel(pool, user_data, n)) != 0) {
        r = r > 0 ? batch_wait(pool->kvd, &room, deadline) : handle_connected(pool->kvd);
        if (r < 0)
            return r; /* what lies in the ring will be found when the daemon is back */
    }
    return 0;
}
