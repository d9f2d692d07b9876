/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "daemon/loop.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS UINT64_C(1000000)

/* A loop whose sleep only moves its clock. */
struct world {
    struct loop *loop;
    uint64_t now;
    int waits, last_timeout, fail_errno;
};

static uint64_t world_clock(void *arg)
{
    return ((struct world *)arg)->now;
}

static int world_wait(void *arg, int epoll_fd, struct epoll_event *events, int max, int timeout_ms)
{
    struct world *w = arg;
    int n;

    w->waits++;
    w->last_timeout = timeout_ms;
    if (w->fail_errno) {
        errno = w->fail_errno;
        return -1;
    }
    n = epoll_wait(epoll_fd, events, max, 0);
    if (n == 0 && timeout_ms > 0)
        w->now += (uint64_t)timeout_ms * MS;
    return n;
}

static void setup(struct world *w)
{
    struct loop_options options = {.clock = world_clock, .wait = world_wait, .arg = w};

    *w = (struct world){.now = 1000 * MS};
    cr_assert_eq(loop_new(&options, &w->loop), 0);
}

static int signalled(void)
{
    int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);

    cr_assert_geq(fd, 0);
    return fd;
}

/* ---- descriptors */

struct item {
    struct loop *loop;
    struct loop_source *source, *victim;
    struct loop_timer *timer;
    struct loop_deferred deferred, *other;
    int fd, calls;
    uint32_t events;
    uint64_t at;
};

static void count_event(void *arg, uint32_t events)
{
    struct item *i = arg;

    i->calls++;
    i->events = events;
}

static void remove_both(void *arg, uint32_t events)
{
    struct item *i = arg;

    (void)events;
    i->calls++;
    loop_remove(i->source);
    loop_remove(i->victim);
    close(i->fd);
}

Test(loop, ready_descriptors_are_called)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    a.fd = signalled();
    cr_assert_eq(loop_add(w.loop, a.fd, EPOLLIN, count_event, &a, &a.source), 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 1);
    cr_assert_eq(a.events, EPOLLIN);
    cr_assert_eq(loop_modify(a.source, EPOLLOUT), 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.events, EPOLLOUT);
    cr_assert_eq(loop_modify(a.source, 0), 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 2);
    loop_remove(a.source);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    close(a.fd);
    loop_free(w.loop);
}

/* Two are ready; whichever is called first removes both, frees nothing too early, and the other is
 * not called though its event was already fetched. */
Test(loop, removal_inside_a_callback)
{
    struct item a = {0}, b = {0};
    struct world w;

    setup(&w);
    a.fd = signalled();
    b.fd = signalled();
    cr_assert_eq(loop_add(w.loop, a.fd, EPOLLIN, remove_both, &a, &a.source), 0);
    cr_assert_eq(loop_add(w.loop, b.fd, EPOLLIN, remove_both, &b, &b.source), 0);
    a.victim = b.source;
    b.victim = a.source;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls + b.calls, 1);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls + b.calls, 1);
    close(a.calls ? b.fd : a.fd);
    loop_free(w.loop);
}

/* The number of a closed descriptor is reused inside the turn: the old event is not the new
 * source's. */
struct reuse {
    struct world *w;
    struct item *other, *fresh;
    int calls;
};

static void replace(void *arg, uint32_t events)
{
    struct reuse *r = arg;

    (void)events;
    if (r->calls++)
        return;
    loop_remove(r->other->source);
    close(r->other->fd);
    r->fresh->fd = eventfd(0, EFD_CLOEXEC);
    cr_assert_eq(r->fresh->fd, r->other->fd);
    cr_assert_eq(
        loop_add(r->w->loop, r->fresh->fd, EPOLLIN, count_event, r->fresh, &r->fresh->source), 0);
}

Test(loop, a_reused_number_is_another_source)
{
    struct item first = {0}, second = {0}, fresh = {0};
    struct world w;
    struct reuse r = {.w = &w, .other = &second, .fresh = &fresh};

    setup(&w);
    first.fd = signalled(); /* epoll hands out events in the order in which they became ready */
    second.fd = signalled();
    cr_assert_eq(loop_add(w.loop, first.fd, EPOLLIN, replace, &r, &first.source), 0);
    cr_assert_eq(loop_add(w.loop, second.fd, EPOLLIN, count_event, &second, &second.source), 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(r.calls, 1);
    cr_assert_eq(second.calls, 0);
    cr_assert_eq(fresh.calls, 0);
    loop_remove(first.source);
    loop_remove(fresh.source);
    close(first.fd);
    close(fresh.fd);
    loop_free(w.loop);
}

Test(loop, a_hang_up_comes_unasked)
{
    struct item a = {0};
    struct world w;
    int fds[2];

    setup(&w);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    cr_assert_eq(loop_add(w.loop, fds[0], 0, count_event, &a, &a.source), 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 0);
    close(fds[1]);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.events, EPOLLHUP);
    loop_remove(a.source);
    close(fds[0]);
    loop_free(w.loop);
}

Test(loop, errors)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    cr_assert_eq(loop_add(w.loop, -1, EPOLLIN, count_event, &a, &a.source), -EBADF);
    cr_assert_null(a.source);
    w.fail_errno = EINTR;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    w.fail_errno = EBADF;
    cr_assert_eq(loop_turn(w.loop, true), -EBADF);
    cr_assert_eq(loop_run(w.loop), -EBADF);
    loop_free(w.loop);
}

/* ---- timers */

static void record_time(void *arg)
{
    struct item *i = arg;

    i->calls++;
    i->at = loop_now(i->loop);
}

Test(loop, sleeps_for_ever_without_timers)
{
    struct world w;

    setup(&w);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, -1);
    cr_assert_eq(loop_turn(w.loop, false), 0);
    cr_assert_eq(w.last_timeout, 0);
    loop_free(w.loop);
}

/* Rounded up: a timer is never early, and there is no turn that only finds it not yet due. */
Test(loop, one_wake_up_per_timer)
{
    struct item a = {0};
    struct world w;
    uint64_t due;

    setup(&w);
    a.loop = w.loop;
    due = w.now + 5 * MS + 1;
    cr_assert_eq(loop_timer_new(w.loop, record_time, &a, &a.timer), 0);
    loop_timer_arm(a.timer, due, 0);
    cr_assert(loop_timer_armed(a.timer));
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, 6);
    cr_assert_eq(a.calls, 1);
    cr_assert_geq(a.at, due);
    cr_assert_not(loop_timer_armed(a.timer));
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, -1);
    cr_assert_eq(a.calls, 1);
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

Test(loop, a_far_deadline_does_not_overflow)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    a.loop = w.loop;
    cr_assert_eq(loop_timer_new(w.loop, record_time, &a, &a.timer), 0);
    loop_timer_arm(a.timer, UINT64_MAX, 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_gt(w.last_timeout, 1000000);
    cr_assert_eq(a.calls, 0);
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

Test(loop, missed_periods_are_not_made_up_for)
{
    struct item a = {0};
    struct world w;
    uint64_t start;

    setup(&w);
    a.loop = w.loop;
    start = w.now;
    cr_assert_eq(loop_timer_new(w.loop, record_time, &a, &a.timer), 0);
    loop_timer_arm(a.timer, start + 10 * MS, 10 * MS);
    for (int i = 1; i <= 3; i++) {
        cr_assert_eq(loop_turn(w.loop, true), 0);
        cr_assert_eq(a.calls, i);
        cr_assert_eq(a.at, start + (uint64_t)i * 10 * MS, "no drift");
    }
    w.now += 1000 * MS;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 4);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, 10);
    cr_assert_eq(a.calls, 5);
    loop_timer_disarm(a.timer);
    loop_timer_disarm(a.timer);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, -1);
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

struct heap_test {
    struct world w;
    struct item items[200];
    uint64_t last;
    int fired;
};

static struct heap_test heap;

static void check_order(void *arg)
{
    struct item *i = arg;

    cr_assert_geq(i->at, heap.last, "out of order");
    cr_assert_geq(loop_now(heap.w.loop), i->at, "too early");
    cr_assert_lt(loop_now(heap.w.loop), i->at + MS, "too late");
    heap.last = i->at;
    heap.fired++;
}

/* Random deadlines, some moved, some given up. */
Test(loop, timers_fire_in_order)
{
    enum { N = sizeof(heap.items) / sizeof(heap.items[0]) };
    unsigned seed = (unsigned)getpid();
    int armed = 0;

    fprintf(stderr, "seed %u\n", seed);
    srand(seed);
    setup(&heap.w);
    for (int i = 0; i < N; i++) {
        struct item *t = &heap.items[i];

        cr_assert_eq(loop_timer_new(heap.w.loop, check_order, t, &t->timer), 0);
        t->at = heap.w.now + 1 + (uint64_t)rand() % (50 * MS);
        loop_timer_arm(t->timer, t->at, 0);
    }
    for (int i = 0; i < N; i++) {
        struct item *t = &heap.items[i];

        if (rand() % 3 == 0)
            loop_timer_disarm(t->timer);
        if (rand() % 3 == 0) {
            t->at = heap.w.now + 1 + (uint64_t)rand() % (50 * MS);
            loop_timer_arm(t->timer, t->at, 0);
        }
        armed += loop_timer_armed(t->timer);
    }
    while (heap.fired < armed)
        cr_assert_eq(loop_turn(heap.w.loop, true), 0);
    cr_assert_eq(loop_turn(heap.w.loop, true), 0);
    cr_assert_eq(heap.w.last_timeout, -1);
    cr_assert_eq(heap.fired, armed);
    for (int i = 0; i < N; i++)
        loop_timer_free(heap.items[i].timer);
    loop_free(heap.w.loop);
}

static void arm_in_the_past(void *arg)
{
    struct item *i = arg;

    i->calls++;
    loop_timer_arm(i->timer, 0, 0);
}

static void free_itself_and_other(void *arg)
{
    struct item *i = arg;

    i->calls++;
    loop_timer_free(i->timer);
    if (i->victim)
        return;
    loop_timer_free(((struct item *)(void *)i->other)->timer);
}

Test(loop, a_timer_in_the_past_does_not_hold_the_turn)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    cr_assert_eq(loop_timer_new(w.loop, arm_in_the_past, &a, &a.timer), 0);
    loop_timer_arm(a.timer, 0, 0);
    for (int i = 1; i <= 3; i++) {
        cr_assert_eq(loop_turn(w.loop, true), 0);
        cr_assert_eq(a.calls, i);
        cr_assert_eq(w.last_timeout, 0);
    }
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

Test(loop, timers_are_freed_inside_a_callback)
{
    struct item a = {0}, b = {0};
    struct world w;

    setup(&w);
    a.other = (void *)&b;
    cr_assert_eq(loop_timer_new(w.loop, free_itself_and_other, &a, &a.timer), 0);
    cr_assert_eq(loop_timer_new(w.loop, free_itself_and_other, &b, &b.timer), 0);
    loop_timer_arm(a.timer, w.now, 5 * MS);
    loop_timer_arm(b.timer, w.now + 1, 0);
    w.now += 2;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 1);
    cr_assert_eq(b.calls, 0);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, -1);
    loop_free(w.loop);
}

/* ---- deferred work */

static void defer_again(void *arg)
{
    struct item *i = arg;

    if (++i->calls < 3)
        loop_defer(i->loop, &i->deferred);
}

static void undefer_other(void *arg)
{
    struct item *i = arg;

    i->calls++;
    loop_undefer(i->other);
}

Test(loop, deferred_work_runs_once)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    a.loop = w.loop;
    loop_deferred_init(&a.deferred, record_time, &a);
    cr_assert_not(loop_is_deferred(&a.deferred));
    loop_undefer(&a.deferred);
    loop_defer(w.loop, &a.deferred);
    loop_defer(w.loop, &a.deferred);
    cr_assert(loop_is_deferred(&a.deferred));
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, 0, "no sleep with work to do");
    cr_assert_eq(a.calls, 1);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, -1);
    cr_assert_eq(a.calls, 1);
    loop_free(w.loop);
}

Test(loop, deferring_from_deferred_work_waits_a_turn)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    a.loop = w.loop;
    loop_deferred_init(&a.deferred, defer_again, &a);
    loop_defer(w.loop, &a.deferred);
    for (int i = 1; i <= 3; i++) {
        cr_assert_eq(loop_turn(w.loop, true), 0);
        cr_assert_eq(a.calls, i);
    }
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 3);
    loop_free(w.loop);
}

Test(loop, work_may_cancel_work)
{
    struct item a = {0}, b = {0};
    struct world w;

    setup(&w);
    loop_deferred_init(&a.deferred, undefer_other, &a);
    loop_deferred_init(&b.deferred, record_time, &b);
    a.other = &b.deferred;
    b.loop = w.loop;
    loop_defer(w.loop, &a.deferred);
    loop_defer(w.loop, &b.deferred);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(a.calls, 1);
    cr_assert_eq(b.calls, 0);
    loop_free(w.loop);
}

/* ---- hooks */

struct hook_log {
    struct world *w;
    struct loop_timer *timer;
    struct loop_deferred *work;
    int before, after, more, waits_before;
    bool stop;
};

static int before_sleep(void *arg)
{
    struct hook_log *h = arg;

    cr_assert_eq(h->before, h->after, "each sleep has its wake");
    h->before++;
    h->waits_before = h->w->waits;
    if (h->timer)
        loop_timer_arm(h->timer, h->w->now + 3 * MS, 0);
    if (h->work)
        loop_defer(h->w->loop, h->work);
    if (h->stop)
        loop_stop(h->w->loop);
    return h->more;
}

static void after_wake(void *arg)
{
    struct hook_log *h = arg;

    h->after++;
    cr_assert_eq(h->before, h->after);
    cr_assert_eq(h->w->waits, h->waits_before + 1, "exactly the wait in between");
}

Test(loop, hooks_enclose_sleep_only)
{
    struct world w;
    struct hook_log h = {.w = &w};
    struct loop_hooks hooks = {.before_sleep = before_sleep, .after_wake = after_wake, .arg = &h};
    struct item a = {0};

    setup(&w);
    a.loop = w.loop;
    loop_set_hooks(w.loop, &hooks);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(h.after, 1);
    cr_assert_eq(w.last_timeout, -1);
    cr_assert_eq(loop_turn(w.loop, false), 0);
    cr_assert_eq(h.after, 1, "a poll is no sleep");
    loop_deferred_init(&a.deferred, record_time, &a);
    loop_defer(w.loop, &a.deferred);
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(h.after, 1, "nor is a turn with work");
    h.more = 1;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(h.after, 2);
    cr_assert_eq(w.last_timeout, 0, "there was more work");
    w.fail_errno = EINTR;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(h.after, 3);
    loop_set_hooks(w.loop, NULL);
    w.fail_errno = 0;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(h.after, 3);
    loop_free(w.loop);
}

/* What the hook arms or defers counts for the sleep that follows it. */
Test(loop, hooks_may_shorten_the_sleep)
{
    struct world w;
    struct hook_log h = {.w = &w};
    struct loop_hooks hooks = {.before_sleep = before_sleep, .after_wake = after_wake, .arg = &h};
    struct item a = {0};

    setup(&w);
    a.loop = w.loop;
    loop_set_hooks(w.loop, &hooks);
    cr_assert_eq(loop_timer_new(w.loop, record_time, &a, &a.timer), 0);
    h.timer = a.timer;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, 3);
    cr_assert_eq(a.calls, 1);
    h.timer = NULL;
    loop_deferred_init(&a.deferred, record_time, &a);
    h.work = &a.deferred;
    cr_assert_eq(loop_turn(w.loop, true), 0);
    cr_assert_eq(w.last_timeout, 0);
    cr_assert_eq(a.calls, 2);
    h.work = NULL;
    h.stop = true;
    cr_assert_eq(loop_run(w.loop), 0);
    cr_assert_eq(w.last_timeout, 0, "a stopped loop does not sleep first");
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

/* ---- running */

static void stop_third(void *arg)
{
    struct item *i = arg;

    if (++i->calls == 3)
        loop_stop(i->loop);
}

Test(loop, runs_until_stopped)
{
    struct item a = {0};
    struct world w;

    setup(&w);
    a.loop = w.loop;
    cr_assert_eq(loop_timer_new(w.loop, stop_third, &a, &a.timer), 0);
    loop_timer_arm(a.timer, w.now + MS, MS);
    cr_assert_eq(loop_run(w.loop), 0);
    cr_assert_eq(a.calls, 3);
    loop_stop(w.loop);
    cr_assert_eq(loop_run(w.loop), 0, "a stop that came first counts");
    cr_assert_eq(a.calls, 3);
    a.calls = 0;
    cr_assert_eq(loop_run(w.loop), 0);
    cr_assert_eq(a.calls, 3, "and only once");
    loop_timer_free(a.timer);
    loop_free(w.loop);
}

/* The real clock and the real epoll_wait(), once. */
Test(loop, real_time)
{
    struct item a = {0};
    struct loop *loop;
    uint64_t start;

    cr_assert_eq(loop_new(NULL, &loop), 0);
    a.loop = loop;
    a.calls = 2; /* stops the loop at once */
    start = loop_now(loop);
    cr_assert_eq(loop_timer_new(loop, stop_third, &a, &a.timer), 0);
    loop_timer_arm(a.timer, start + 2 * MS, 0);
    cr_assert_eq(loop_run(loop), 0);
    cr_assert_geq(loop_now(loop), start + 2 * MS);
    loop_timer_free(a.timer);
    loop_free(loop);
}
