/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A queue of copies, worked off by threads that the caller starts. One mutex guards everything but
 * the copying itself. A copy is one thread's work: who wants several threads on a large object
 * submits it in parts (one core can use up most of a small machine's memory bandwidth, so this is
 * not done unasked).
 */
#include "kvd.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

struct job {
    struct job *next;
    struct kvd_copy copy;
    int64_t status; /* of a result */
};

struct job_list {
    struct job *first;
    struct job **end; /* where the next one is linked */
};

struct kvd_copier {
    pthread_mutex_t lock;
    pthread_cond_t work;
    const uint8_t *alive; /* a page that reads 0 in a forked child: no system call to find out */
    size_t page_bytes;
    int event_fd; /* readable exactly while `done` is not empty; only kvd_copier_drain() reads it */
    bool stopped;
    struct job_list queue;
    struct job_list done;
    struct job *spare; /* used before and free again */
    uint32_t fresh;    /* jobs[fresh..] were never used */
    uint32_t depth;
    struct job jobs[];
};

static void list_init(struct job_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static void list_push(struct job_list *list, struct job *job)
{
    job->next = NULL;
    *list->end = job;
    list->end = &job->next;
}

static struct job *list_pop(struct job_list *list)
{
    struct job *job = list->first;

    list->first = job->next;
    if (!list->first)
        list->end = &list->first;
    return job;
}

static bool forked(const struct kvd_copier *copier)
{
    return !*copier->alive;
}

/* ---- copying */

static void copy_all(const struct kvd_copy *copy)
{
    char *slot = copy->slot;

    for (int32_t i = 0; i < copy->iovcnt; i++) {
        const struct iovec *iov = &copy->iov[i];

        if (!iov->iov_len)
            continue; /* its base may be NULL */
        if (copy->op == KVD_PUT)
            kvd_copy_in(slot, iov->iov_base, iov->iov_len);
        else
            memcpy(iov->iov_base, slot, iov->iov_len);
        slot += iov->iov_len;
    }
}

static void add_result(struct kvd_copier *copier, struct job *job, int64_t status)
{
    /* Under the lock, as is the read in kvd_copier_drain(): the counter is 1 with results and 0
     * without. It cannot overflow, which is the only way for the write to fail. */
    if (!copier->done.first)
        eventfd_write(copier->event_fd, 1);
    job->status = status;
    list_push(&copier->done, job);
}

int kvd_copier_run(struct kvd_copier *copier)
{
    if (forked(copier))
        return -ECHILD;
    pthread_mutex_lock(&copier->lock);
    for (;;) {
        struct job *job;

        while (!copier->queue.first && !copier->stopped)
            pthread_cond_wait(&copier->work, &copier->lock);
        if (copier->stopped)
            break;
        job = list_pop(&copier->queue);
        if (copier->queue.first)
            pthread_cond_signal(&copier->work); /* submitting woke only one of us */
        pthread_mutex_unlock(&copier->lock);
        copy_all(&job->copy);
        /* The unlock that follows publishes the copied bytes, streamed ones included (kvd_copy_in()
         * fences), to the lock in kvd_copier_drain(): who has the result has the bytes. */
        pthread_mutex_lock(&copier->lock);
        add_result(copier, job, (int64_t)job->copy.bytes);
    }
    pthread_mutex_unlock(&copier->lock);
    return 0;
}

void kvd_copier_stop(struct kvd_copier *copier)
{
    if (forked(copier))
        return;
    pthread_mutex_lock(&copier->lock);
    copier->stopped = true;
    while (copier->queue.first)
        add_result(copier, list_pop(&copier->queue), -ECANCELED);
    pthread_cond_broadcast(&copier->work);
    pthread_mutex_unlock(&copier->lock);
}

/* ---- submitting and draining */

static bool valid(const struct kvd_copy *copy)
{
    uint64_t sum = 0;

    if ((copy->op != KVD_PUT && copy->op != KVD_GET) || copy->iovcnt < 1 || !copy->iov ||
        !copy->slot || copy->bytes < 1 || copy->bytes > INT64_MAX)
        return false;
    for (int32_t i = 0; i < copy->iovcnt; i++) {
        const struct iovec *iov = &copy->iov[i];

        if ((iov->iov_len && !iov->iov_base) || __builtin_add_overflow(sum, iov->iov_len, &sum))
            return false;
    }
    return sum == copy->bytes;
}

static struct job *take_job(struct kvd_copier *copier)
{
    struct job *job = copier->spare;

    if (job)
        copier->spare = job->next;
    else if (copier->fresh < copier->depth)
        job = &copier->jobs[copier->fresh++];
    return job;
}

static ssize_t queue_copies(struct kvd_copier *copier, const struct kvd_copy *copies, size_t n)
{
    size_t taken = 0;

    if (copier->stopped)
        return -ECANCELED;
    for (; taken < n; taken++) {
        struct job *job = take_job(copier);

        if (!job)
            break;
        *job = (struct job){.copy = copies[taken]};
        list_push(&copier->queue, job);
    }
    if (taken)
        pthread_cond_signal(&copier->work);
    return (ssize_t)taken;
}

ssize_t kvd_copier_submit(struct kvd_copier *copier, const struct kvd_copy *copies, size_t n)
{
    ssize_t taken;

    if (forked(copier))
        return -ECHILD;
    if (n && !copies)
        return -EINVAL;
    /* All that could be taken, before the first is: a short count must mean nothing but "full". */
    for (size_t i = 0; i < n && i < copier->depth; i++) {
        if (!valid(&copies[i]))
            return -EINVAL;
    }
    pthread_mutex_lock(&copier->lock);
    taken = queue_copies(copier, copies, n);
    pthread_mutex_unlock(&copier->lock);
    return taken;
}

ssize_t kvd_copier_drain(struct kvd_copier *copier, struct kvd_copied *ret, size_t n)
{
    size_t taken = 0;

    if (forked(copier))
        return -ECHILD;
    if (n && !ret)
        return -EINVAL;
    pthread_mutex_lock(&copier->lock);
    for (; taken < n && copier->done.first; taken++) {
        struct job *job = list_pop(&copier->done);

        ret[taken] = (struct kvd_copied){job->copy.user_data, job->status};
        job->next = copier->spare;
        copier->spare = job;
    }
    if (taken && !copier->done.first) {
        eventfd_t count;

        eventfd_read(copier->event_fd, &count); /* it is 1: does not block, does not fail */
    }
    pthread_mutex_unlock(&copier->lock);
    return (ssize_t)taken;
}

int kvd_copier_event_fd(const struct kvd_copier *copier)
{
    return forked(copier) ? -ECHILD : copier->event_fd;
}

/* ---- life */

static int map_alive(struct kvd_copier *copier)
{
    uint8_t *page;
    int r;

    copier->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    page =
        mmap(NULL, copier->page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return -errno;
    if (madvise(page, copier->page_bytes, MADV_WIPEONFORK) < 0) {
        r = -errno;
        munmap(page, copier->page_bytes);
        return r;
    }
    *page = 1;
    copier->alive = page;
    return 0;
}

static int init_locks(struct kvd_copier *copier)
{
    int r = pthread_mutex_init(&copier->lock, NULL);

    if (r)
        return -r;
    r = pthread_cond_init(&copier->work, NULL);
    if (r)
        pthread_mutex_destroy(&copier->lock);
    return -r;
}

int kvd_copier_new(uint32_t depth, struct kvd_copier **ret_copier)
{
    struct kvd_copier *copier;
    size_t bytes;
    int r;

    if (depth < 1)
        return -EINVAL;
    if (__builtin_mul_overflow((size_t)depth, sizeof(copier->jobs[0]), &bytes) ||
        __builtin_add_overflow(bytes, sizeof(*copier), &bytes))
        return -ENOMEM;
    copier = calloc(1, bytes);
    if (!copier)
        return -ENOMEM;
    copier->depth = depth;
    list_init(&copier->queue);
    list_init(&copier->done);
    r = map_alive(copier);
    if (r < 0)
        goto fail;
    copier->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (copier->event_fd < 0) {
        r = -errno;
        goto fail_unmap;
    }
    r = init_locks(copier);
    if (r < 0)
        goto fail_close;
    *ret_copier = copier;
    return 0;

fail_close:
    close(copier->event_fd);
fail_unmap:
    munmap((void *)copier->alive, copier->page_bytes);
fail:
    free(copier);
    return r;
}

void kvd_copier_free(struct kvd_copier *copier)
{
    if (!copier)
        return;
    if (!forked(
            copier)) { /* in a child, a thread that does not exist there may hold or wait on them */
        pthread_cond_destroy(&copier->work);
        pthread_mutex_destroy(&copier->lock);
    }
    close(copier->event_fd);
    munmap((void *)copier->alive, copier->page_bytes);
    free(copier);
}
