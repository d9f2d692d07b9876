/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/spill/helpers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/spill/io_sys.h"

/* With `together`: so many results are announced although others are about to come. */
#define TOGETHER 8u

struct queue {
    char *items;
    uint32_t item_bytes;
    uint32_t head, n, depth;
};

struct helpers {
    struct helpers_spec spec;
    int event_fd;
    uint32_t in_flight; /* the submitter's own */
    uint32_t n_threads;

    pthread_mutex_t lock; /* for all below */
    pthread_cond_t work;
    struct queue jobs, results;
    uint32_t idle;  /* threads in pthread_cond_wait() */
    uint32_t refs;  /* threads, and the owner */
    bool waking;    /* one of the idle was signalled, and will signal the next if need be */
    bool signalled; /* event_fd is readable, or the write to it is under way */
    bool silent;    /* nobody is to be told of results */
    bool stopped;

    pthread_t threads[];
};

/* What a thread owes others when it has let go of the lock: a thread that is woken while its waker
 * holds the lock would only run into it. */
struct wakes {
    bool helper, owner;
};

static void *queue_at(const struct queue *q, uint32_t i)
{
    uint32_t at = q->head + i;

    return q->items + (size_t)(at < q->depth ? at : at - q->depth) * q->item_bytes;
}

static void queue_push(struct queue *q, const void *item)
{
    memcpy(queue_at(q, q->n++), item, q->item_bytes);
}

static void queue_pop(struct queue *q, void *ret_item)
{
    memcpy(ret_item, queue_at(q, 0), q->item_bytes);
    q->head = q->head + 1 < q->depth ? q->head + 1 : 0;
    q->n--;
}

/* Whoever leaves jobs behind makes sure that an idle helper is on its way, if there is one. */
static bool needs_helper(struct helpers *h)
{
    if (!h->jobs.n || !h->idle || h->waking)
        return false;
    h->waking = true;
    return true;
}

static void send_wakes(struct helpers *h, struct wakes w)
{
    if (w.helper)
        pthread_cond_signal(&h->work);
    if (w.owner)
        eventfd_write(h->event_fd, 1); /* at most 1 is in it: neither blocks nor fails */
}

/* ---- a helper */

static void deliver(struct helpers *h, const void *result, struct wakes *w)
{
    queue_push(&h->results, result);
    if (h->silent || h->signalled || (h->spec.together && h->jobs.n && h->results.n < TOGETHER))
        return;
    w->owner = true;
    h->signalled = true;
}

static bool take(struct helpers *h, void *ret_job, struct wakes *w)
{
    if (h->stopped || !h->jobs.n)
        return false;
    queue_pop(&h->jobs, ret_job);
    w->helper = needs_helper(h);
    return true;
}

/* False: it is over. */
static bool wait_for_work(struct helpers *h)
{
    bool over;

    pthread_mutex_lock(&h->lock);
    while (!h->stopped && !h->jobs.n) {
        h->idle++;
        pthread_cond_wait(&h->work, &h->lock);
        h->idle--;
        h->waking = false; /* also when it was a spurious one: then one signal too many is sent */
    }
    over = h->stopped;
    pthread_mutex_unlock(&h->lock);
    return !over;
}

static void destroy(struct helpers *h)
{
    if (h->spec.end)
        h->spec.end(h->spec.arg);
    pthread_cond_destroy(&h->work);
    pthread_mutex_destroy(&h->lock);
    if (h->event_fd >= 0)
        close(h->event_fd);
    free(h->jobs.items);
    free(h->results.items);
    free(h);
}

/* Partner: helpers_new() takes one for the owner, threads_start() one for each thread. */
static void release(struct helpers *h)
{
    bool last;

    pthread_mutex_lock(&h->lock);
    last = --h->refs == 0;
    pthread_mutex_unlock(&h->lock);
    if (last)
        destroy(h);
}

static void *helper_main(void *arg)
{
    alignas(max_align_t) char job[HELPERS_VALUE_BYTES], result[HELPERS_VALUE_BYTES];
    struct helpers *h = arg;
    bool busy = false;

    for (;;) {
        struct wakes w = {0};

        pthread_mutex_lock(&h->lock);
        if (busy)
            deliver(h, result, &w);
        busy = take(h, job, &w);
        pthread_mutex_unlock(&h->lock);
        send_wakes(h, w);
        if (busy)
            h->spec.run(h->spec.arg, job, result);
        else if (!wait_for_work(h))
            break;
    }
    release(h);
    return NULL;
}

/* ---- the owner */

uint32_t helpers_submit(struct helpers *h, const void *jobs, uint32_t n)
{
    uint32_t room = h->spec.depth - h->in_flight;
    const char *job = jobs;
    struct wakes w = {0};

    n = n < room ? n : room;
    if (!n)
        return 0;
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < n; i++, job += h->jobs.item_bytes)
        queue_push(&h->jobs, job);
    w.helper = needs_helper(h);
    pthread_mutex_unlock(&h->lock);
    send_wakes(h, w);
    h->in_flight += n;
    return n;
}

/* When the read finds nothing, the write is under way, and what it announces has been taken. */
static void unsignal(struct helpers *h)
{
    eventfd_t ignored;

    if (eventfd_read(h->event_fd, &ignored) == 0)
        h->signalled = false;
}

uint32_t helpers_reap(struct helpers *h, void *ret_results, uint32_t max)
{
    char *result = ret_results;
    uint32_t n = 0;

    pthread_mutex_lock(&h->lock);
    for (; n < max && h->results.n; n++, result += h->results.item_bytes)
        queue_pop(&h->results, result);
    if (!h->results.n && h->signalled)
        unsignal(h);
    pthread_mutex_unlock(&h->lock);
    h->in_flight -= n;
    return n;
}

void helpers_announce(struct helpers *h, bool yes)
{
    struct wakes w = {0};

    pthread_mutex_lock(&h->lock);
    h->silent = !yes;
    w.owner = yes && h->results.n && !h->signalled;
    h->signalled |= w.owner;
    pthread_mutex_unlock(&h->lock);
    send_wakes(h, w);
}

uint32_t helpers_in_flight(const struct helpers *h)
{
    return h->in_flight;
}

int helpers_fd(const struct helpers *h)
{
    return h->event_fd;
}

/* ---- from beginning to end */

/*
 * Helpers take no signals: those belong to the core thread. SIGBUS and SIGSEGV are left open, since
 * the guard needs them, and blocking what an instruction raises only makes it deadlier.
 */
static void threads_start(struct helpers *h)
{
    sigset_t all, before;

    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&h->lock);
    while (h->n_threads < h->spec.threads &&
           h->spec.sys->thread_create(&h->threads[h->n_threads], NULL, helper_main, h) == 0)
        h->n_threads++;
    h->refs += h->n_threads;
    pthread_mutex_unlock(&h->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void threads_stop(struct helpers *h)
{
    pthread_mutex_lock(&h->lock);
    h->stopped = true;
    h->jobs.n = 0;
    pthread_mutex_unlock(&h->lock);
    pthread_cond_broadcast(&h->work);
}

void helpers_free(struct helpers *h, bool wait)
{
    if (!h)
        return;
    threads_stop(h);
    for (uint32_t i = 0; i < h->n_threads; i++)
        if (wait)
            pthread_join(h->threads[i], NULL);
        else
            pthread_detach(h->threads[i]);
    release(h);
}

static int queue_init(struct queue *q, uint32_t depth, uint32_t item_bytes,
                      const struct io_sys *sys)
{
    *q = (struct queue){.item_bytes = item_bytes, .depth = depth};
    q->items = sys->calloc(depth, item_bytes);
    return q->items ? 0 : -ENOMEM;
}

static int parts_init(struct helpers *h)
{
    const struct io_sys *sys = h->spec.sys;
    int r = queue_init(&h->jobs, h->spec.depth, h->spec.job_bytes, sys);

    if (r == 0)
        r = queue_init(&h->results, h->spec.depth, h->spec.result_bytes, sys);
    if (r < 0)
        return r;
    h->event_fd = sys->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return h->event_fd < 0 ? -errno : 0;
}

static bool spec_valid(const struct helpers_spec *spec)
{
    return spec->threads && spec->depth && spec->job_bytes && spec->result_bytes &&
           spec->job_bytes <= HELPERS_VALUE_BYTES && spec->result_bytes <= HELPERS_VALUE_BYTES;
}

int helpers_new(const struct helpers_spec *spec, struct helpers **ret_helpers)
{
    const struct io_sys *sys = spec->sys ? spec->sys : &io_sys_real;
    struct helpers *h;
    int r;

    if (!spec_valid(spec))
        return -EINVAL;
    h = sys->calloc(1, sizeof(*h) + spec->threads * sizeof(h->threads[0]));
    if (!h)
        return -ENOMEM;
    h->spec = *spec;
    h->spec.sys = sys;
    h->spec.end = NULL; /* until it has come up: a failure leaves `arg` to the caller */
    h->event_fd = -1;
    h->refs = 1;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->work, NULL);
    r = parts_init(h);
    if (r == 0) {
        threads_start(h);
        r = h->n_threads ? 0 : -EAGAIN;
    }
    if (r < 0) {
        release(h);
        return r;
    }
    h->spec.end = spec->end;
    *ret_helpers = h;
    return 0;
}
