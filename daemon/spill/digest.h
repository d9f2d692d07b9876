/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helper threads that hash memory (XXH3-64), so that the core thread does not: 65-100 us per MiB is the
 * bandwidth of memory, not a thing to wait for. They decide nothing and own nothing.
 *
 * One thread submits and reaps. The memory of a job is read only, and may vanish under it (a writer may
 * truncate a pool's file): then its status is -EFAULT.
 */
#ifndef KVD_SPILL_DIGEST_H
#define KVD_SPILL_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct digest_pool;

struct digest_job {
    uint64_t cookie;
    const void *addr;
    size_t bytes;
};

struct digest_done {
    uint64_t cookie;
    uint64_t digest; /* XXH3_64bits(addr, bytes) */
    int32_t status;  /* 0 or -EFAULT */
};

/* `depth`: jobs in the pool, waiting, running or not reaped. guard_install() has run. */
int digest_pool_new(uint32_t threads, uint32_t depth, struct digest_pool **ret_pool);

/* Waits for running jobs only. NULL is fine. */
void digest_pool_free(struct digest_pool *pool);

/* How many were taken; 0: full. */
uint32_t digest_submit(struct digest_pool *pool, const struct digest_job *jobs, uint32_t n);

uint32_t digest_reap(struct digest_pool *pool, struct digest_done *ret, uint32_t max);

/* Does somebody wait for digests, so that the descriptor must tell of them? At first, yes. */
void digest_announce(struct digest_pool *pool, bool yes);

/* An eventfd, readable while results wait; reaping clears it. */
int digest_pool_fd(const struct digest_pool *pool);

#endif
