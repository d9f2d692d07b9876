/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
    EVENTS_PER_TURN = 64,
    TIMERS_MIN = 8,
    NOT_ARMED = -1,
};

struct loop_source {
    struct loop *loop;
    int fd;
    bool removed; /* lives on until the end of the turn: a fetched event may point to it */
    loop_source_fn fn;
    void *arg;
    struct list link; /* in loop->removed */
};

struct loop_timer {
    struct loop *loop;
    uint64_t deadline, period;
    int at; /* index in the heap, or NOT_ARMED */
    loop_fn fn;
    void *arg;
};

struct loop {
    struct loop_options options;
    struct loop_hooks hooks;
    int epoll_fd;
    bool stopped;
    uint64_t now;
    struct list removed;  /* sources to be freed */
    struct list deferred; /* of the next step */
    struct list running;  /* deferred work of this step */
    struct loop_timer **heap;
    int n_armed, n_timers, cap_timers; /* armed, existing, room for */
};

static uint64_t monotonic(void *arg)
{
    struct timespec t;

    (void)arg;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static int wait_epoll(void *arg, int epoll_fd, struct epoll_event *events, int max, int timeout_ms)
{
    (void)arg;
    return epoll_wait(epoll_fd, events, max, timeout_ms);
}

int loop_new(const struct loop_options *options, struct loop **ret_loop)
{
    struct loop *loop = calloc(1, sizeof(*loop));

    if (!loop)
        return -ENOMEM;
    if (options)
        loop->options = *options;
    if (!loop->options.clock)
        loop->options.clock = monotonic;
    if (!loop->options.wait)
        loop->options.wait = wait_epoll;
    list_init(&loop->removed);
    list_init(&loop->deferred);
    list_init(&loop->running);
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll_fd < 0) {
        int err = -errno;

        free(loop);
        return err;
    }
    loop->now = loop->options.clock(loop->options.arg);
    *ret_loop = loop;
    return 0;
}

static void free_removed(struct loop *loop)
{
    struct list *pos, *tmp;

    kvd_list_for_each (pos, tmp, &loop->removed) {
        list_remove(pos);
        free(list_entry(pos, struct loop_source, link));
    }
}

void loop_free(struct loop *loop)
{
    if (!loop)
        return;
    free_removed(loop);
    close(loop->epoll_fd);
    free(loop->heap);
    free(loop);
}

uint64_t loop_clock(const struct loop *loop)
{
    return loop->options.clock(loop->options.arg);
}

uint64_t loop_now(const struct loop *loop)
{
    return loop->now;
}

void loop_set_hooks(struct loop *loop, const struct loop_hooks *hooks)
{
    loop->hooks = hooks ? *hooks : (struct loop_hooks){0};
}

/* ---- descriptors */

int loop_add(struct loop *loop, int fd, uint32_t events, loop_source_fn fn, void *arg,
             struct loop_source **ret_source)
{
    struct loop_source *source = calloc(1, sizeof(*source));
    struct epoll_event event = {.events = events, .data.ptr = source};

    if (!source)
        return -ENOMEM;
    *source = (struct loop_source){.loop = loop, .fd = fd, .fn = fn, .arg = arg};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        int err = -errno;

        free(source);
        return err;
    }
    list_init(&source->link);
    *ret_source = source;
    return 0;
}

int loop_modify(struct loop_source *source, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = source};

    return epoll_ctl(source->loop->epoll_fd, EPOLL_CTL_MOD, source->fd, &event) < 0 ? -errno : 0;
}

void loop_remove(struct loop_source *source)
{
    if (!source || source->removed)
        return;
    /* Fails only for a descriptor that is closed, which epoll has forgotten already. */
    epoll_ctl(source->loop->epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
    source->removed = true;
    list_append(&source->loop->removed, &source->link);
}

static void call_sources(struct epoll_event *events, int n)
{
    for (int i = 0; i < n; i++) {
        struct loop_source *source = events[i].data.ptr;

        if (!source->removed)
            source->fn(source->arg, events[i].events);
    }
}

/* ---- timers: a binary heap ordered by deadline */

static void place(struct loop *loop, int at, struct loop_timer *timer)
{
    loop->heap[at] = timer;
    timer->at = at;
}

static void sift_up(struct loop *loop, struct loop_timer *timer)
{
    int at = timer->at;

    while (at > 0 && loop->heap[(at - 1) / 2]->deadline > timer->deadline) {
        place(loop, at, loop->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    place(loop, at, timer);
}

static void sift_down(struct loop *loop, struct loop_timer *timer)
{
    int at = timer->at;

    for (;;) {
        int child = 2 * at + 1;

        if (child + 1 < loop->n_armed &&
            loop->heap[child + 1]->deadline < loop->heap[child]->deadline)
            child++;
        if (child >= loop->n_armed || loop->heap[child]->deadline >= timer->deadline)
            break;
        place(loop, at, loop->heap[child]);
        at = child;
    }
    place(loop, at, timer);
}

int loop_timer_new(struct loop *loop, loop_fn fn, void *arg, struct loop_timer **ret_timer)
{
    struct loop_timer *timer;

    if (loop->n_timers == loop->cap_timers) {
        int cap = loop->cap_timers ? loop->cap_timers * 2 : TIMERS_MIN;
        struct loop_timer **heap = realloc(loop->heap, (size_t)cap * sizeof(struct loop_timer *));

        if (!heap)
            return -ENOMEM;
        loop->heap = heap;
        loop->cap_timers = cap;
    }
    timer = calloc(1, sizeof(*timer));
    if (!timer)
        return -ENOMEM;
    *timer = (struct loop_timer){.loop = loop, .fn = fn, .arg = arg, .at = NOT_ARMED};
    loop->n_timers++;
    *ret_timer = timer;
    return 0;
}

void loop_timer_free(struct loop_timer *timer)
{
    if (!timer)
        return;
    loop_timer_disarm(timer);
    timer->loop->n_timers--;
    free(timer);
}

bool loop_timer_armed(const struct loop_timer *timer)
{
    return timer->at != NOT_ARMED;
}

void loop_timer_disarm(struct loop_timer *timer)
{
    struct loop *loop = timer->loop;
    struct loop_timer *last;

    if (timer->at == NOT_ARMED)
        return;
    last = loop->heap[--loop->n_armed];
    if (last != timer) {
        place(loop, timer->at, last);
        sift_up(loop, last);
        sift_down(loop, last);
    }
    timer->at = NOT_ARMED;
}

void loop_timer_arm(struct loop_timer *timer, uint64_t deadline, uint64_t period)
{
    struct loop *loop = timer->loop;

    loop_timer_disarm(timer);
    timer->deadline = deadline;
    timer->period = period;
    place(loop, loop->n_armed++, timer);
    sift_up(loop, timer);
}

static void fire(struct loop *loop, struct loop_timer *timer)
{
    uint64_t next = timer->deadline + timer->period;

    if (next <= loop->now)
        next = loop->now + timer->period;
    if (timer->period)
        loop_timer_arm(timer, next, timer->period);
    else
        loop_timer_disarm(timer);
    timer->fn(timer->arg);
}

/* At most as many as are armed now: one that arms itself in the past must not hold the turn. */
static void call_timers(struct loop *loop)
{
    for (int n = loop->n_armed; n > 0 && loop->n_armed > 0; n--) {
        if (loop->heap[0]->deadline > loop->now)
            return;
        fire(loop, loop->heap[0]);
    }
}

/* ---- deferred work */

void loop_deferred_init(struct loop_deferred *deferred, loop_fn fn, void *arg)
{
    *deferred = (struct loop_deferred){.fn = fn, .arg = arg};
    list_init(&deferred->link);
}

void loop_defer(struct loop *loop, struct loop_deferred *deferred)
{
    if (list_empty(&deferred->link))
        list_append(&loop->deferred, &deferred->link);
}

void loop_undefer(struct loop_deferred *deferred)
{
    list_remove(&deferred->link);
}

static void move_all(struct list *from, struct list *to)
{
    while (!list_empty(from)) {
        struct list *item = from->next;

        list_remove(item);
        list_append(to, item);
    }
}

static void call_deferred(struct loop *loop)
{
    move_all(&loop->deferred, &loop->running);
    while (!list_empty(&loop->running)) {
        struct loop_deferred *d = list_entry(loop->running.next, struct loop_deferred, link);

        list_remove(&d->link);
        d->fn(d->arg);
    }
}

/* ---- turns */

/* Rounded up: waking a millisecond early would spin until the timer is due. */
static int timeout_ms(const struct loop *loop)
{
    uint64_t deadline, ms;

    if (loop->stopped || !list_empty(&loop->deferred))
        return 0;
    if (loop->n_armed == 0)
        return -1;
    deadline = loop->heap[0]->deadline;
    if (deadline <= loop->now)
        return 0;
    ms = (deadline - loop->now - 1) / 1000000 + 1;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

static int wait_events(struct loop *loop, struct epoll_event *events, int timeout)
{
    int n = loop->options.wait(loop->options.arg, loop->epoll_fd, events, EVENTS_PER_TURN, timeout);

    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    return n;
}

static int sleep_or_poll(struct loop *loop, struct epoll_event *events, bool may_sleep)
{
    int timeout = may_sleep ? timeout_ms(loop) : 0;
    const struct loop_hooks *hooks = &loop->hooks;
    int n;

    if (timeout == 0)
        return wait_events(loop, events, 0);
    /* The hook may have armed a timer, deferred work or stopped the loop: look again. */
    if (hooks->before_sleep)
        timeout = hooks->before_sleep(hooks->arg) > 0 ? 0 : timeout_ms(loop);
    n = wait_events(loop, events, timeout);
    if (hooks->after_wake)
        hooks->after_wake(hooks->arg);
    return n;
}

int loop_turn(struct loop *loop, bool may_sleep)
{
    struct epoll_event events[EVENTS_PER_TURN];
    int n;

    loop->now = loop->options.clock(loop->options.arg);
    n = sleep_or_poll(loop, events, may_sleep);
    if (n < 0)
        return n;
    loop->now = loop->options.clock(loop->options.arg);
    call_sources(events, n);
    call_timers(loop);
    call_deferred(loop);
    free_removed(loop);
    return 0;
}

int loop_run(struct loop *loop)
{
    while (!loop->stopped) {
        int err = loop_turn(loop, true);

        if (err)
            return err;
    }
    loop->stopped = false;
    return 0;
}

void loop_stop(struct loop *loop)
{
    loop->stopped = true;
}
