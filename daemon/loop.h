/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop of the core thread: descriptors, timers, deferred work, and the two hooks around
 * sleep.
 *
 * One turn: sleep until a descriptor is ready or a timer is due, call the sources, the due timers,
 * then the work that was deferred before this step. Nothing is due: the loop sleeps without a time
 * limit, so an idle daemon does not wake up at all.
 *
 * Everything may be added, changed and removed from inside any callback; what is removed is not
 * called any more, not even for an event that was already fetched. One thread; times are in
 * nanoseconds of the loop's clock.
 */
#ifndef KVD_DAEMON_LOOP_H
#define KVD_DAEMON_LOOP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "list.h"

struct loop;
struct loop_source;
struct loop_timer;

typedef void (*loop_source_fn)(void *arg, uint32_t events);
typedef void (*loop_fn)(void *arg);

struct loop_options {
    uint64_t (*clock)(void *arg); /* NULL: CLOCK_MONOTONIC */
    int (*wait)(void *arg, int epoll_fd, struct epoll_event *events, int max,
                int timeout_ms); /* NULL: epoll_wait(2) */
    void *arg;
};

/* options may be NULL. */
int loop_new(const struct loop_options *options, struct loop **ret_loop);

/* Sources, timers and deferred work must be gone by then. */
void loop_free(struct loop *loop);

/* Turns until loop_stop(), which counts also when it came first: 0, or what epoll_wait() failed
 * with. */
int loop_run(struct loop *loop);
void loop_stop(struct loop *loop);

/* One turn. With may_sleep false it only takes what is ready. */
int loop_turn(struct loop *loop, bool may_sleep);

/* The clock itself, now. */
uint64_t loop_clock(const struct loop *loop);

/* The time at which this turn woke up. Cheap; as old as the turn. */
uint64_t loop_now(const struct loop *loop);

struct loop_hooks {
    /* Called when the loop is about to sleep. > 0: there is work after all, do not. */
    int (*before_sleep)(void *arg);
    /* Follows each before_sleep, whatever it said, before any callback. */
    void (*after_wake)(void *arg);
    void *arg;
};

/* A turn that has deferred work or a due timer does not sleep and calls neither. NULL: none. */
void loop_set_hooks(struct loop *loop, const struct loop_hooks *hooks);

/* ---- descriptors: level-triggered, events as in epoll_ctl(2). The loop never owns a descriptor;
 * remove the source before closing it. EPOLLERR and EPOLLHUP always come, also with events 0. */

int loop_add(struct loop *loop, int fd, uint32_t events, loop_source_fn fn, void *arg,
             struct loop_source **ret_source);
int loop_modify(struct loop_source *source, uint32_t events);
void loop_remove(struct loop_source *source);

/* ---- timers */

/* Not armed. Arming cannot fail later. */
int loop_timer_new(struct loop *loop, loop_fn fn, void *arg, struct loop_timer **ret_timer);
void loop_timer_free(struct loop_timer *timer);

/* Due at `deadline` of the loop's clock, and then each `period`, if that is not 0; periods that
 * were missed are not made up for. Arming again moves the timer. A timer that arms itself in the
 * past is due in the next turn. */
void loop_timer_arm(struct loop_timer *timer, uint64_t deadline, uint64_t period);
void loop_timer_disarm(struct loop_timer *timer);
bool loop_timer_armed(const struct loop_timer *timer);

/* ---- deferred work: called once, at the end of the turn; work deferred by deferred work waits for
 * the next turn, which then does not sleep. */

struct loop_deferred {
    struct list link;
    loop_fn fn;
    void *arg;
};

void loop_deferred_init(struct loop_deferred *deferred, loop_fn fn, void *arg);

/* Deferring what is deferred changes nothing. */
void loop_defer(struct loop *loop, struct loop_deferred *deferred);
void loop_undefer(struct loop_deferred *deferred);

static inline bool loop_is_deferred(const struct loop_deferred *deferred)
{
    return !list_empty(&deferred->link);
}

#endif
