/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that take jobs from one queue and put results into another: what the thread backend
 * (io_threads.c) and the digests (digest.c) share. Jobs and results are small values, copied.
 *
 * One thread submits and reaps. No system call per job while the helpers are busy; an idle one is
 * woken by its predecessor when there is more to do, so a batch costs its submitter one wake-up.
 */
#ifndef KVD_SPILL_HELPERS_H
#define KVD_SPILL_HELPERS_H

#include <stdbool.h>
#include <stdint.h>

struct helpers;
struct io_sys;

/* Of a job and of a result, at most. */
#define HELPERS_VALUE_BYTES 64u

struct helpers_spec {
    uint32_t threads; /* fewer are fine, none is an error */
    uint32_t depth;   /* jobs waiting, running or not reaped */
    uint32_t job_bytes, result_bytes;
    void (*run)(void *arg, const void *job, void *ret_result);
    void (*end)(void *arg); /* nobody runs, or will: see helpers_free(). May be NULL */
    void *arg;
    bool together; /* jobs take microseconds: results are announced some at a time */
    const struct io_sys *sys;
};

/* -ENOMEM, -EAGAIN (no thread), -EMFILE, -EINVAL */
int helpers_new(const struct helpers_spec *spec, struct helpers **ret_helpers);

/*
 * Jobs that wait are dropped. With `wait`, jobs that run are waited for; without, their threads are
 * left behind, and the last of them to come back calls end() and frees what is left. NULL is fine.
 */
void helpers_free(struct helpers *h, bool wait);

/* How many were taken; 0: full. */
uint32_t helpers_submit(struct helpers *h, const void *jobs, uint32_t n);

uint32_t helpers_reap(struct helpers *h, void *ret_results, uint32_t max);

/* Submitted and not reaped. */
uint32_t helpers_in_flight(const struct helpers *h);

/* Are results to be announced by the descriptor, as they are at first? Those that came meanwhile are at once
 * when they are. */
void helpers_announce(struct helpers *h, bool yes);

/* An eventfd: readable when results wait. It may be readable once more after the last was taken. */
int helpers_fd(const struct helpers *h);

#endif
