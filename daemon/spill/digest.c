/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/spill/digest.h"

#include <errno.h>
#include <stdlib.h>
#include <xxhash.h>

#include "daemon/guard.h"
#include "daemon/spill/helpers.h"

struct digest_pool {
    struct helpers *helpers;
};

_Static_assert(sizeof(struct digest_job) <= HELPERS_VALUE_BYTES, "a job fits");
_Static_assert(sizeof(struct digest_done) <= HELPERS_VALUE_BYTES, "a result fits");

struct hashing {
    const struct digest_job *job;
    XXH64_hash_t digest;
};

/* Under the guard: holds nothing, and may be left anywhere. */
static int hash(void *arg)
{
    struct hashing *h = arg;

    h->digest = XXH3_64bits(h->job->addr, h->job->bytes);
    return 0;
}

static void run(void *arg, const void *job, void *ret_result)
{
    struct hashing h = {.job = job};
    struct digest_done *done = ret_result;

    (void)arg;
    *done = (struct digest_done){.cookie = h.job->cookie};
    done->status = guard_call(hash, &h, h.job->addr, h.job->bytes);
    if (done->status == 0)
        done->digest = h.digest;
}

static int nothing(void *arg)
{
    (void)arg;
    return 0;
}

int digest_pool_new(uint32_t threads, uint32_t depth, struct digest_pool **ret_pool)
{
    const struct helpers_spec spec = {
        .threads = threads,
        .depth = depth,
        .job_bytes = sizeof(struct digest_job),
        .result_bytes = sizeof(struct digest_done),
        .run = run,
        .together = true,
    };
    struct digest_pool *pool;
    int r = guard_call(nothing, NULL, NULL, 0);

    if (r < 0) /* guard_install() did not run */
        return r;
    pool = calloc(1, sizeof(*pool));
    if (!pool)
        return -ENOMEM;
    r = helpers_new(&spec, &pool->helpers);
    if (r < 0) {
        free(pool);
        return r;
    }
    *ret_pool = pool;
    return 0;
}

void digest_pool_free(struct digest_pool *pool)
{
    if (!pool)
        return;
    helpers_free(pool->helpers, true);
    free(pool);
}

uint32_t digest_submit(struct digest_pool *pool, const struct digest_job *jobs, uint32_t n)
{
    return helpers_submit(pool->helpers, jobs, n);
}

uint32_t digest_reap(struct digest_pool *pool, struct digest_done *ret, uint32_t max)
{
    return helpers_reap(pool->helpers, ret, max);
}

void digest_announce(struct digest_pool *pool, bool yes)
{
    helpers_announce(pool->helpers, yes);
}

int digest_pool_fd(const struct digest_pool *pool)
{
    return helpers_fd(pool->helpers);
}
