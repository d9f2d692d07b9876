/* SPDX-License-Identifier: Apache-2.0 */
/* The task itself: its thread, its queue, its end. What the thread does is in the other store_*.c. */
#include "daemon/spill/store_task.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define QUEUE      8192u /* loaded records that nobody has taken yet */
#define AGAIN_MAX  100   /* tries of a transfer that answers -EAGAIN */
#define AGAIN_NSEC 1000000L

/* ---- helpers of the thread */

int store_fail(struct store_task *t, int error, const char *fmt, ...)
{
    int n = snprintf(t->why, sizeof(t->why), "%.200s: ", t->spec.path);
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(t->why + n, sizeof(t->why) - (size_t)n, fmt, ap);
    va_end(ap);
    return error;
}

int store_fail_call(struct store_task *t, const char *call, int error)
{
    const char *text = strerrordesc_np(-error);

    return store_fail(t, error, "%s: %s", call, text ? text : "unknown error");
}

const char *store_format_command(const struct store_task *t, bool force,
                                 char buf[static STORE_COMMAND])
{
    snprintf(buf, STORE_COMMAND, "`kvctl spill format %s%s`", t->spec.name ? t->spec.name : "STORE",
             force ? " --force" : "");
    return buf;
}

static void tell(struct store_task *t)
{
    const uint64_t one = 1;

    if (t->event_fd >= 0 && write(t->event_fd, &one, sizeof(one)) < 0) {
        /* The counter is full: the caller has not looked for a while, and will find all of it. */
    }
}

static void tell_locked(struct store_task *t)
{
    pthread_mutex_lock(&t->lock);
    tell(t);
    pthread_mutex_unlock(&t->lock);
}

void store_phase_begin(struct store_task *t, enum store_phase phase, uint64_t total)
{
    atomic_store(&t->done, 0);
    atomic_store(&t->total, total);
    atomic_store(&t->phase, (int)phase);
    tell_locked(t);
}

void store_advance(struct store_task *t, uint64_t bytes)
{
    atomic_fetch_add(&t->done, bytes);
    tell_locked(t);
}

bool store_cancelled(const struct store_task *t)
{
    return atomic_load(&t->cancel);
}

static struct timespec in_ms(unsigned ms)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    ts.tv_nsec += (long)(ms % 1000) * 1000000;
    ts.tv_sec += ms / 1000 + ts.tv_nsec / 1000000000;
    ts.tv_nsec %= 1000000000;
    return ts;
}

int store_pause(struct store_task *t, unsigned ms)
{
    struct timespec until = in_ms(ms);
    int r = 0;

    pthread_mutex_lock(&t->lock);
    while (!store_cancelled(t) && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&t->wake, &t->lock, &until);
    pthread_mutex_unlock(&t->lock);
    return store_cancelled(t) ? -ECANCELED : 0;
}

static void queue_append(struct store_task *t, const struct store_loaded *list, uint32_t n)
{
    uint32_t tail = (t->head + t->count) % QUEUE, first = QUEUE - tail < n ? QUEUE - tail : n;

    memcpy(t->queue + tail, list, first * sizeof(*list));
    memcpy(t->queue, list + first, (n - first) * sizeof(*list));
    t->count += n;
}

int store_push(struct store_task *t, const struct store_loaded *list, uint32_t n)
{
    pthread_mutex_lock(&t->lock);
    while (n > 0 && !store_cancelled(t)) {
        uint32_t room = QUEUE - t->count, now = n < room ? n : room;

        if (now == 0) {
            pthread_cond_wait(&t->wake, &t->lock);
            continue;
        }
        queue_append(t, list, now);
        list += now;
        n -= now;
        tell(t);
    }
    pthread_mutex_unlock(&t->lock);
    return store_cancelled(t) ? -ECANCELED : 0;
}

/* -EAGAIN and -EINTR are no answer; some drivers give the former under load. */
static bool again(int error, int *tries)
{
    const struct timespec pause = {.tv_nsec = AGAIN_NSEC};

    if (error == EINTR)
        return true;
    if (error != EAGAIN || ++*tries > AGAIN_MAX)
        return false;
    nanosleep(&pause, NULL);
    return true;
}

ssize_t store_read(int fd, void *buf, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    int tries = 0;

    while (done < bytes) {
        ssize_t n = pread(fd, (char *)buf + done, bytes - done, (off_t)(offset + done));

        if (n < 0 && again(errno, &tries))
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        done += (size_t)n;
        /* O_DIRECT goes on at a block only; what lies behind half a block is the end of the file. */
        if (done < bytes && done % FORMAT_SECTOR)
            break;
    }
    return (ssize_t)done;
}

int store_write(int fd, const void *buf, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    int tries = 0;

    while (done < bytes) {
        ssize_t n = pwrite(fd, (const char *)buf + done, bytes - done, (off_t)(offset + done));

        if (n < 0 && again(errno, &tries))
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            return -EIO;
        done += (size_t)n / FORMAT_SECTOR * FORMAT_SECTOR;
        if (n < (ssize_t)FORMAT_SECTOR && ++tries > AGAIN_MAX)
            return -EIO;
    }
    return 0;
}

/* ---- the thread */

static int run(struct store_task *t)
{
    int r;

    if (t->job == STORE_TRIM)
        return store_trim(t);
    r = store_attach(t);
    if (r == 0)
        r = t->job == STORE_FORMAT ? store_may_replace(t) : store_examine(t);
    if (r == 1) /* both say so when it is to be formatted */
        return store_format(t);
    return r == 0 ? store_load(t) : r;
}

static void free_names(struct store_task *t)
{
    free((char *)(uintptr_t)t->spec.path);
    free((char *)(uintptr_t)t->spec.name);
}

static void task_destroy(struct store_task *t)
{
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->lock);
    free_names(t);
    free(t->free_slots);
    free(t->queue);
    free(t);
}

static void finish(struct store_task *t, int result)
{
    pthread_mutex_lock(&t->lock);
    t->result = result;
    t->finished = true;
    atomic_store(&t->phase, STORE_DONE);
    tell(t);
    /* Closing a device can hang: if nobody wants the file, it is closed here. */
    while (result == 0 && !t->taken && !t->freed)
        pthread_cond_wait(&t->wake, &t->lock);
    if (result == 0 && t->taken && t->job != STORE_TRIM)
        t->file.fd = -1;
    pthread_mutex_unlock(&t->lock);
}

static void *task_main(void *arg)
{
    struct store_task *t = arg;
    int r;
    bool last;

    r = run(t);
    if (r == -ECANCELED)
        store_fail(t, r, "cancelled");
    if (r < 0 && t->file.fd >= 0) { /* before anybody hears of it: then the lock is free again */
        close(t->file.fd);
        t->file.fd = -1;
    }
    finish(t, r);
    if (t->file.fd >= 0)
        close(t->file.fd);
    pthread_mutex_lock(&t->lock);
    t->ended = true;
    last = t->freed;
    pthread_mutex_unlock(&t->lock);
    if (last)
        task_destroy(t);
    return NULL;
}

/* Signals are for the thread of the loop. */
static int thread_start(struct store_task *t)
{
    sigset_t all, before;
    pthread_attr_t attr;
    pthread_t thread;
    int r;

    r = pthread_attr_init(&attr);
    if (r)
        return -r;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    r = pthread_create(&thread, &attr, task_main, t);
    if (r == 0)
        pthread_setname_np(thread, "kvd-store");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return -r;
}

static int sync_init(struct store_task *t)
{
    pthread_condattr_t attr;
    int r = pthread_mutex_init(&t->lock, NULL);

    if (r)
        return -r;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    r = pthread_cond_init(&t->wake, &attr);
    pthread_condattr_destroy(&attr);
    if (r)
        pthread_mutex_destroy(&t->lock);
    return -r;
}

/* ---- the caller's side */

static struct store_task *task_new(const char *path, const char *name, int event_fd)
{
    struct store_task *t = calloc(1, sizeof(*t));

    if (!t)
        return NULL;
    t->file.fd = t->callers_fd = -1;
    t->event_fd = event_fd;
    t->spec.path = strdup(path);
    t->spec.name = name ? strdup(name) : NULL;
    if (!t->spec.path || (name && !t->spec.name) || sync_init(t) < 0) {
        free_names(t);
        free(t);
        return NULL;
    }
    return t;
}

static int task_start(struct store_task *t, struct store_task **ret_task)
{
    int r = thread_start(t);

    if (r < 0) {
        if (t->file.fd >= 0)
            close(t->file.fd);
        task_destroy(t);
        return r;
    }
    *ret_task = t;
    return 0;
}

int store_task_open(const struct store_spec *spec, enum store_job job, int event_fd,
                    struct store_task **ret_task)
{
    struct store_task *t;

    if (!spec->path || job == STORE_TRIM)
        return -EINVAL;
    t = task_new(spec->path, spec->name, event_fd);
    if (!t)
        return -ENOMEM;
    t->job = job;
    t->spec.bytes = spec->bytes;
    t->spec.geometry = spec->geometry;
    t->spec.epoch = spec->epoch;
    t->spec.force = spec->force;
    t->spec.no_lock = spec->no_lock;
    t->queue = calloc(QUEUE, sizeof(*t->queue));
    if (!t->queue) {
        task_destroy(t);
        return -ENOMEM;
    }
    return task_start(t, ret_task);
}

/* A duplicate keeps the open file, and with it the lock, until the last hole is punched; a number that the
 * caller closes meanwhile could come to mean another file. */
int store_task_trim(const struct store_file *file, const uint8_t *free_slots, int event_fd,
                    struct store_task **ret_task)
{
    struct store_task *t = task_new("spill store", NULL, event_fd);
    size_t bytes = (size_t)((file->super.records + 7) / 8);

    if (!t)
        return -ENOMEM;
    t->job = STORE_TRIM;
    t->file = *file;
    t->callers_fd = file->fd;
    t->file.fd = fcntl(file->fd, F_DUPFD_CLOEXEC, 3);
    t->free_slots = malloc(bytes);
    if (t->file.fd < 0 || !t->free_slots) {
        int r = t->file.fd < 0 ? -errno : -ENOMEM;

        if (t->file.fd >= 0)
            close(t->file.fd);
        task_destroy(t);
        return r;
    }
    memcpy(t->free_slots, free_slots, bytes);
    return task_start(t, ret_task);
}

uint32_t store_task_take(struct store_task *t, struct store_loaded *ret, uint32_t max)
{
    uint32_t n, first;

    pthread_mutex_lock(&t->lock);
    n = t->count < max ? t->count : max;
    if (n > 0) {
        first = QUEUE - t->head < n ? QUEUE - t->head : n;
        memcpy(ret, t->queue + t->head, first * sizeof(*ret));
        memcpy(ret + first, t->queue, (n - first) * sizeof(*ret));
        t->head = (t->head + n) % QUEUE;
        t->count -= n;
        pthread_cond_broadcast(&t->wake);
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

void store_task_progress(const struct store_task *t, struct store_progress *ret)
{
    ret->phase = (enum store_phase)atomic_load(&t->phase);
    ret->done = atomic_load(&t->done);
    ret->total = atomic_load(&t->total);
    ret->records = atomic_load(&t->records);
    ret->broken = atomic_load(&t->broken);
}

int store_task_result(struct store_task *t, struct store_file *ret, char *ret_why, size_t why_bytes)
{
    int r;

    pthread_mutex_lock(&t->lock);
    r = t->finished && (t->result < 0 || t->count == 0) ? t->result : -EINPROGRESS;
    if (r == 0 && !t->taken) {
        *ret = t->file;
        if (t->job == STORE_TRIM)
            ret->fd = t->callers_fd;
        t->taken = true;
        pthread_cond_broadcast(&t->wake);
    } else if (r < 0 && r != -EINPROGRESS) {
        snprintf(ret_why, why_bytes, "%s", t->why);
    } else if (r == 0) {
        r = -EALREADY; /* there is one owner of the descriptor */
    }
    pthread_mutex_unlock(&t->lock);
    return r;
}

void store_task_cancel(struct store_task *t)
{
    pthread_mutex_lock(&t->lock);
    atomic_store(&t->cancel, true);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
}

void store_task_free(struct store_task *t)
{
    bool last;

    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    atomic_store(&t->cancel, true);
    t->freed = true;
    t->event_fd = -1;
    last = t->ended;
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->lock);
    if (last)
        task_destroy(t);
}
