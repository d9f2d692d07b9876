/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "populate.h"

#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define POPULATE_THREADS_MAX 64
#define POPULATE_SLICE       ((size_t)32 << 20)
#define POPULATE_TICK_NS     100000000L

static const struct populate_sys populate_sys_real = {
    .madvise = madvise,
    .thread_create = pthread_create,
};

struct populate_work {
    unsigned char *base;
    size_t bytes, page, slice;
    const struct populate_options *options;
    const struct populate_sys *sys;

    atomic_size_t next; /* offset of the first slice that nobody has taken */
    atomic_size_t done;
    atomic_int error; /* the first one; 0 while all is well */

    pthread_mutex_t lock;
    pthread_cond_t wake; /* a slice is done, or a helper has ended */
    unsigned running;    /* helpers, under lock */
};

struct touch {
    unsigned char *at, *end;
    size_t page;
};

/* An atomic or with 0 is a write fault that keeps the byte, whoever else writes to it. */
static int touch_run(void *arg)
{
    struct touch *t = arg;

    for (; t->at < t->end; t->at += t->page)
        __atomic_fetch_or(t->at, 0, __ATOMIC_RELAXED);
    return 0;
}

static int slice_populate(const struct populate_work *w, unsigned char *at, size_t bytes)
{
    struct touch t = {.at = at, .end = at + bytes, .page = w->page};
    int r;

    if (w->sys->madvise(at, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return errno == EFAULT ? -ENOMEM : -errno; /* EFAULT: a touch would have raised SIGBUS */
    r = guard_call(touch_run, &t, at, bytes);
    return r == -EFAULT ? -ENOMEM : r;
}

static bool work_stopped(const struct populate_work *w)
{
    const atomic_bool *cancel = w->options->cancel;

    return atomic_load(&w->error) != 0 || (cancel && atomic_load(cancel));
}

/* One slice. False when there is nothing left to do. */
static bool work_step(struct populate_work *w)
{
    size_t at, n;
    int r, none = 0;

    if (work_stopped(w))
        return false;
    at = atomic_fetch_add(&w->next, w->slice);
    if (at >= w->bytes)
        return false;
    n = w->bytes - at < w->slice ? w->bytes - at : w->slice;
    r = slice_populate(w, w->base + at, n);
    if (r < 0) {
        atomic_compare_exchange_strong(&w->error, &none, r);
        return false;
    }
    atomic_fetch_add(&w->done, n);
    return true;
}

static void work_report(struct populate_work *w)
{
    const struct populate_options *o = w->options;

    if (o->progress)
        o->progress(atomic_load(&w->done), w->bytes, o->userdata);
}

static void *helper_main(void *arg)
{
    struct populate_work *w = arg;

    while (work_step(w)) {
        pthread_mutex_lock(&w->lock);
        pthread_cond_signal(&w->wake);
        pthread_mutex_unlock(&w->lock);
    }
    pthread_mutex_lock(&w->lock);
    w->running--;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/*
 * Helpers take no signals: they belong to the threads that wait for them. SIGBUS and SIGSEGV are
 * left open, because the guard needs them and blocking what an instruction raises only makes it
 * deadlier.
 */
static unsigned helpers_start(struct populate_work *w, unsigned wanted, pthread_t *threads)
{
    sigset_t all, before;
    unsigned n = 0;

    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&w->lock);
    while (n < wanted && w->sys->thread_create(&threads[n], NULL, helper_main, w) == 0)
        n++;
    w->running = n;
    pthread_mutex_unlock(&w->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

static void tick_after(struct timespec *t)
{
    clock_gettime(CLOCK_MONOTONIC, t);
    t->tv_nsec += POPULATE_TICK_NS;
    if (t->tv_nsec >= 1000000000L) {
        t->tv_sec++;
        t->tv_nsec -= 1000000000L;
    }
}

static void helpers_wait(struct populate_work *w)
{
    struct timespec until;

    pthread_mutex_lock(&w->lock);
    while (w->running > 0) {
        tick_after(&until);
        pthread_cond_clockwait(&w->wake, &w->lock, CLOCK_MONOTONIC, &until);
        pthread_mutex_unlock(&w->lock); /* the callback may take its time */
        work_report(w);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
}

/* With fewer threads than wished for, or none at all, it takes longer: no reason to fail. */
static void work_run(struct populate_work *w)
{
    pthread_t threads[POPULATE_THREADS_MAX];
    size_t slices = (w->bytes - 1) / w->slice + 1;
    unsigned n = w->options->threads ? w->options->threads : 1;

    n = n < POPULATE_THREADS_MAX ? n : POPULATE_THREADS_MAX;
    n = helpers_start(w, n < slices ? n : (unsigned)slices, threads);
    helpers_wait(w);
    for (unsigned i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    while (n == 0 && work_step(w))
        work_report(w);
    work_report(w);
}

int populate_range(void *addr, size_t bytes, size_t page_size, const struct populate_options *o)
{
    static const struct populate_options defaults = {0};
    struct populate_work w = {
        .base = addr,
        .bytes = bytes,
        .page = page_size,
        .options = o ? o : &defaults,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .wake = PTHREAD_COND_INITIALIZER,
    };
    size_t slice;

    if (page_size == 0 || bytes == 0 || bytes % page_size || (uintptr_t)addr % page_size)
        return -EINVAL;
    w.sys = w.options->sys ? w.options->sys : &populate_sys_real;
    slice = w.options->slice ? w.options->slice : POPULATE_SLICE;
    slice = slice < bytes ? slice : bytes; /* also keeps the rounding below from overflowing */
    w.slice = (slice + page_size - 1) / page_size * page_size;
    work_run(&w);
    pthread_cond_destroy(&w.wake);
    pthread_mutex_destroy(&w.lock);
    if (atomic_load(&w.error))
        return atomic_load(&w.error);
    return atomic_load(&w.done) == bytes ? 0 : -ECANCELED;
}
