/* SPDX-License-Identifier: Apache-2.0 */
/* The handle: options, connecting and coming back, the sentence, the event fd. */
#define _GNU_SOURCE
#include "client/internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "version.h"

enum {
    TIMEOUT_MS = 10000,
    SPIN_US = 100,
    RING_ENTRIES = 1024,
    LOOK_MS = 1,
    CLOSE_MS = 1000, /* a daemon that hangs must not hang those who leave */
};

/* kvd_connect() has no handle to leave its sentence in; and what kvd_last_error() returns must not
 * change under the caller's eyes when another thread fails. */
static _Thread_local char connect_error[512];
static _Thread_local char shown_error[512];

const char *kvd_version(void)
{
    return KVD_VERSION;
}

/* ---- options */

void kvd_options_init(struct kvd_options *options, size_t size)
{
    const struct kvd_options own = {
        .timeout_ms = TIMEOUT_MS, .spin_us = SPIN_US, .ring_entries = RING_ENTRIES};

    options_init(options, size, &own, sizeof(own));
}

static int check_options(const struct kvd_options *o)
{
    if (o->flags & ~(uint32_t)KVD_NO_SHM)
        return -EINVAL;
    if (o->engine_token_len > CONTROL_TOKEN_MAX || (o->engine_token_len && !o->engine_token))
        return -EINVAL;
    if (o->ring_entries < SHM_RING_MIN || o->ring_entries > SHM_RING_MAX ||
        (o->ring_entries & (o->ring_entries - 1)))
        return -EINVAL;
    return o->timeout_ms ? 0 : -EINVAL;
}

/* ---- the sentence */

int handle_fail(struct kvd *kvd, int err, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    pthread_mutex_lock(&kvd->error_lock);
    vsnprintf(kvd->error, sizeof(kvd->error), format, args);
    pthread_mutex_unlock(&kvd->error_lock);
    va_end(args);
    return err;
}

const char *kvd_last_error(const struct kvd *kvd)
{
    struct kvd *h = (struct kvd *)kvd; /* for its lock only */

    if (!h)
        return connect_error[0] ? connect_error : "no error";
    if (handle_forked(h))
        return "this handle was made before a fork() and belongs to the parent process: connect "
               "anew";
    pthread_mutex_lock(&h->error_lock);
    strcpy(shown_error, h->error[0] ? h->error : "no error");
    pthread_mutex_unlock(&h->error_lock);
    return shown_error;
}

/* ---- locking the control connection */

uint64_t handle_deadline(const struct kvd *kvd)
{
    return control_deadline(kvd->timeout_ms);
}

static struct timespec time_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                             .tv_nsec = (long)(ns % 1000000000u)};
}

/* Has the daemon send a message, the answer to a ping that nobody waits for. */
static int ping_unseen(struct kvd *kvd)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping ping = KVD__PROTO__PING__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_PING;
    request.ping = &ping;
    return control_post(kvd->control, &request);
}

/* The caller holds `gate`. Who sleeps on the socket is woken by any message; if there can be none, that
 * is no news to it either. */
static void wake_patient(struct kvd *kvd)
{
    kvd->patient = false; /* once is enough */
    pthread_mutex_unlock(&kvd->gate);
    ping_unseen(kvd);
    pthread_mutex_lock(&kvd->gate);
}

int handle_lock(struct kvd *kvd, uint64_t deadline_ns)
{
    struct timespec t = time_of(deadline_ns);
    int r = 0;

    pthread_mutex_lock(&kvd->gate);
    kvd->wanted++;
    while (kvd->held && r == 0) {
        if (kvd->patient)
            wake_patient(kvd);
        else
            r = pthread_cond_timedwait(&kvd->freed, &kvd->gate, &t);
    }
    kvd->wanted--;
    if (!kvd->held) {
        kvd->held = true;
        r = 0;
    }
    pthread_mutex_unlock(&kvd->gate);
    return r ? handle_fail(kvd, -ETIMEDOUT,
                           "another thread has been waiting for the daemon all the time")
             : 0;
}

/* The caller holds `gate`. */
static int take_last(struct kvd *kvd, const struct batch *b, uint64_t deadline_ns)
{
    int r = 0;

    while ((kvd->held || kvd->wanted || kvd->poked) && batch_in_flight(b) && r == 0) {
        uint64_t until = kvd->poked ? frame_clock() + LOOK_MS * 1000000u : deadline_ns;
        struct timespec t = time_of(until < deadline_ns ? until : deadline_ns);

        r = pthread_cond_timedwait(&kvd->freed, &kvd->gate, &t);
    }
    if (!batch_in_flight(b))
        return -EALREADY;
    if (!kvd->held && !kvd->wanted && !kvd->poked) {
        kvd->held = kvd->patient = true;
        return 0;
    }
    return frame_clock() < deadline_ns ? -EAGAIN : -ETIMEDOUT;
}

int handle_lock_last(struct kvd *kvd, const struct batch *b, uint64_t deadline_ns)
{
    int r;

    pthread_mutex_lock(&kvd->gate);
    r = take_last(kvd, b, deadline_ns);
    pthread_mutex_unlock(&kvd->gate);
    return r;
}

bool handle_wanted(struct kvd *kvd)
{
    bool wanted, armed;

    pthread_mutex_lock(&kvd->gate);
    wanted = kvd->wanted > 0;
    armed = kvd->armed != ARMED_NO;
    pthread_mutex_unlock(&kvd->gate);
    return wanted || (armed && rings_have_done(kvd));
}

void handle_answered(struct kvd *kvd)
{
    pthread_mutex_lock(&kvd->gate);
    pthread_cond_broadcast(&kvd->freed);
    pthread_mutex_unlock(&kvd->gate);
}

bool handle_try_lock(struct kvd *kvd)
{
    bool mine;

    pthread_mutex_lock(&kvd->gate);
    mine = !kvd->held;
    kvd->held = true;
    pthread_mutex_unlock(&kvd->gate);
    return mine;
}

static void set_armed(struct kvd *kvd, enum armed armed)
{
    pthread_mutex_lock(&kvd->gate);
    kvd->armed = armed;
    kvd->poked = false;
    pthread_mutex_unlock(&kvd->gate);
}

/* Completions wait, but the message that told so has been read by a call that did not care: has the
 * daemon send another one. If even that is impossible, whoever polls sees the connection end. */
static void poke(struct kvd *kvd)
{
    pthread_mutex_lock(&kvd->gate);
    kvd->poked = kvd->armed != ARMED_NO;
    pthread_mutex_unlock(&kvd->gate);
    if (ping_unseen(kvd) < 0)
        control_hang_up(kvd->control);
}

/* Keeps what kvd_drain() has promised, after a call that may have read its wake-up. It stays
 * promised until the next kvd_drain(): the next call may read the poke, too. */
static void serve_armed(struct kvd *kvd)
{
    bool armed;

    if (!kvd->rings.session)
        return;
    pthread_mutex_lock(&kvd->gate);
    armed = kvd->armed != ARMED_NO;
    if (armed)
        kvd->armed = ARMED_SET;
    pthread_mutex_unlock(&kvd->gate);
    if (!armed)
        rings_expect_none(kvd);
    else if (rings_expect(kvd) > 0)
        poke(kvd);
}

/* False: somebody wants to be woken, who has found the lock taken. */
static bool release(struct kvd *kvd)
{
    bool ok;

    pthread_mutex_lock(&kvd->gate);
    ok = kvd->armed != ARMED_WANTED;
    if (ok) {
        kvd->held = kvd->patient = false;
        pthread_cond_broadcast(&kvd->freed); /* not all of those who wait, wait for this */
    }
    pthread_mutex_unlock(&kvd->gate);
    return ok;
}

void handle_unlock(struct kvd *kvd)
{
    do {
        serve_armed(kvd); /* collects, and so finds orphans */
        orphans_send(kvd);
    } while (!release(kvd));
}

/* ---- coming back */

/* Another session than before, or another daemon: what the numbers of the spaces stood for is gone.
 * A session without shared memory has nothing but numbers, and the same daemon still knows them. */
static void mark_stale(struct kvd *kvd)
{
    pthread_mutex_lock(&kvd->ring_lock);
    kvd->incarnation++;
    for (struct kvd_space *s = kvd->spaces; s; s = s->next)
        atomic_store(&s->stale, true);
    pthread_mutex_unlock(&kvd->ring_lock);
}

static int adopt(struct kvd *kvd, const struct control_reply *reply)
{
    const struct control_hello *hello = control_hello(kvd->control);
    bool same = memcmp(kvd->instance, hello->instance, sizeof(kvd->instance)) == 0;
    struct rings fresh;
    int r = 0;

    if (!(kvd->flags & KVD_NO_SHM)) {
        r = rings_new(reply->fds, hello->instance, &fresh);
        if (r < 0)
            return handle_fail(kvd, r, "cannot map the session's memory: %s", strerror(-r));
    }
    /* Spaces are stale before anybody can post into the new rings. */
    if (!same || !(kvd->flags & KVD_NO_SHM))
        mark_stale(kvd);
    orphans_forget(kvd);
    memcpy(kvd->instance, hello->instance, sizeof(kvd->instance));
    if (!(kvd->flags & KVD_NO_SHM))
        rings_replace(kvd, &fresh);
    return 0;
}

static int come_back(struct kvd *kvd, uint64_t deadline_ns)
{
    struct control_reply reply = {0};
    int r = control_connect(kvd->control, deadline_ns, &reply);

    if (r < 0)
        return handle_fail(kvd, -ENOTCONN, "%s", control_error(kvd->control));
    /* Resumed, nothing has changed; and Hello was wake-up enough for what waits in the ring. */
    if (!control_hello(kvd->control)->resumed)
        r = adopt(kvd, &reply);
    control_reply_free(&reply);
    if (r < 0) {
        control_hang_up(kvd->control);
        return -ENOTCONN;
    }
    return 0;
}

int handle_ready(struct kvd *kvd, uint64_t deadline_ns)
{
    int r;

    if (control_is_open(kvd->control))
        return 0;
    r = come_back(kvd, deadline_ns);
    if (r < 0)
        rings_give_up(kvd);
    return r;
}

int handle_call_long(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                     Kvd__Proto__Response__BodyCase expect, unsigned flags, uint32_t more_ms,
                     struct control_reply *ret_reply)
{
    for (bool again = true;; again = false) {
        uint64_t deadline = handle_deadline(kvd);
        int r = handle_ready(kvd, deadline);

        if (r < 0)
            return r;
        if (space && atomic_load(&space->stale))
            return handle_fail(kvd, -ESTALE,
                               "another daemon, or another session, has taken over: "
                               "refresh the space");
        deadline += (uint64_t)more_ms * 1000000;
        r = control_call(kvd->control, request, expect, deadline, ret_reply);
        if (r >= 0)
            return 0;
        if (!control_is_open(kvd->control) && again &&
            (r == -EPIPE || (r == -ECONNRESET && flags & CALL_AGAIN)))
            continue;
        if (space && r == -ESTALE)
            atomic_store(&space->moved, true);
        return handle_fail(kvd, r == -EPIPE || r == -ECONNRESET ? -ENOTCONN : r, "%s",
                           control_error(kvd->control));
    }
}

int handle_call(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                Kvd__Proto__Response__BodyCase expect, unsigned flags,
                struct control_reply *ret_reply)
{
    return handle_call_long(kvd, space, request, expect, flags, 0, ret_reply);
}

int handle_round_trip(struct kvd *kvd, struct kvd_space *space, Kvd__Proto__Request *request,
                      Kvd__Proto__Response__BodyCase expect, unsigned flags,
                      struct control_reply *ret_reply)
{
    int r = handle_lock(kvd, handle_deadline(kvd));

    if (r < 0)
        return r;
    r = handle_call(kvd, space, request, expect, flags, ret_reply);
    handle_unlock(kvd);
    return r;
}

/* ---- making and closing */

/* The answer to a Reserve that came too late: what it grants is for nobody. */
static void on_late(void *arg, const Kvd__Proto__Response *response)
{
    struct kvd *kvd = arg;

    if (response->status < 0 || response->body_case != KVD__PROTO__RESPONSE__BODY_RESERVE)
        return;
    for (size_t i = 0; i < response->reserve->n_reservations; i++) {
        const Kvd__Proto__Reservation *got = response->reserve->reservations[i];

        if (got->status == KVD_NEW && got->has_ticket)
            orphans_add(kvd, (uint32_t)(response->id >> 32), got->ticket);
    }
}

static int make_page(_Atomic uint32_t **ret_page)
{
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int r;

    if (page == MAP_FAILED)
        return -errno;
    if (madvise(page, bytes, MADV_WIPEONFORK) < 0) {
        r = -errno;
        munmap(page, bytes);
        return r;
    }
    *ret_page = page;
    atomic_store(*ret_page, 1);
    return 0;
}

static void init_condition(pthread_cond_t *c)
{
    pthread_condattr_t a;

    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(c, &a);
    pthread_condattr_destroy(&a);
}

/* Everything but the connection. Mutexes and conditions cannot fail in glibc. */
static int handle_new(const struct kvd_options *o, struct kvd **ret_kvd)
{
    struct kvd *kvd = calloc(1, sizeof(*kvd));
    struct control_options c = {
        .socket = o->socket,
        .client = o->client,
        .engine_token = o->engine_token,
        .engine_token_len = o->engine_token_len,
        .shm = !(o->flags & KVD_NO_SHM),
        .ring_entries = o->ring_entries,
        .late = on_late,
        .arg = kvd,
    };
    int r = kvd ? make_page(&kvd->alive) : -ENOMEM;

    if (r == 0)
        r = control_new(&c, &kvd->control);
    if (r < 0) {
        if (kvd && kvd->alive)
            munmap(kvd->alive, (size_t)sysconf(_SC_PAGESIZE));
        free(kvd);
        return r;
    }
    kvd->timeout_ms = o->timeout_ms;
    kvd->spin_us = o->spin_us;
    kvd->flags = o->flags;
    pthread_mutex_init(&kvd->gate, NULL);
    init_condition(&kvd->freed);
    pthread_mutex_init(&kvd->ring_lock, NULL);
    pthread_mutex_init(&kvd->pinset_lock, NULL);
    pthread_mutex_init(&kvd->error_lock, NULL);
    *ret_kvd = kvd;
    return 0;
}

static void handle_free(struct kvd *kvd, bool forked)
{
    struct kvd_space *next;

    for (struct kvd_space *s = kvd->spaces; s; s = next) {
        next = s->next;
        space_free(s);
    }
    views_free(kvd, forked);
    rings_free(&kvd->rings, forked);
    free(kvd->orphans);
    if (forked) {
        free(kvd); /* the connection belongs to the parent */
        return;
    }
    control_free(kvd->control);
    pthread_cond_destroy(&kvd->freed);
    pthread_mutex_destroy(&kvd->gate);
    pthread_mutex_destroy(&kvd->ring_lock);
    pthread_mutex_destroy(&kvd->pinset_lock);
    pthread_mutex_destroy(&kvd->error_lock);
    munmap(kvd->alive, (size_t)sysconf(_SC_PAGESIZE));
    free(kvd);
}

static int attach(struct kvd *kvd)
{
    struct control_reply reply = {0};
    int r = control_connect(kvd->control, handle_deadline(kvd), &reply);

    if (r < 0)
        return handle_fail(kvd, r, "%s", control_error(kvd->control));
    r = adopt(kvd, &reply);
    control_reply_free(&reply);
    return r;
}

int kvd_connect(const struct kvd_options *options, struct kvd **ret_kvd)
{
    struct kvd_options o;
    struct kvd *kvd = NULL;
    int r = ret_kvd ? 0 : -EINVAL;

    kvd_options_init(&o, sizeof(o));
    if (r == 0 && options)
        r = options_copy(&o, sizeof(o), options);
    if (r == 0)
        r = check_options(&o);
    if (r == 0)
        r = handle_new(&o, &kvd);
    if (r < 0) {
        snprintf(connect_error, sizeof(connect_error), "cannot connect: %s%s", strerror(-r),
                 r == -EINVAL ? " in kvd_options (was kvd_options_init() called?)" : "");
        return r;
    }
    r = attach(kvd);
    if (r < 0) {
        strcpy(connect_error, kvd->error);
        handle_free(kvd, false);
        return r;
    }
    *ret_kvd = kvd;
    return 0;
}

/* Reservations go back at once instead of with the process. If the connection is dead and the
 * daemon is not, the session is taken up once more to end it. */
static void say_bye(struct kvd *kvd)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Bye bye = KVD__PROTO__BYE__INIT;
    uint64_t deadline =
        control_deadline(kvd->timeout_ms < CLOSE_MS ? kvd->timeout_ms : (uint32_t)CLOSE_MS);
    struct control_reply reply = {0};

    request.body_case = KVD__PROTO__REQUEST__BODY_BYE;
    request.bye = &bye;
    for (int tries = 0; tries < 2; tries++) {
        if (!control_is_open(kvd->control)) {
            if (control_connect(kvd->control, deadline, &reply) < 0)
                return;
            control_reply_free(&reply);
        }
        if (control_call(kvd->control, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET, deadline,
                         NULL) != -EPIPE)
            return;
    }
}

void kvd_close(struct kvd *kvd)
{
    if (!kvd)
        return;
    if (handle_forked(kvd)) {
        handle_free(kvd, true);
        return;
    }
    pinsets_detach(kvd);
    views_free(kvd, false); /* pins go to zero before the daemon is told that they have */
    say_bye(kvd);
    handle_free(kvd, false);
}

/* ---- control calls of the handle itself */

int kvd_ping(struct kvd *kvd)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping ping = KVD__PROTO__PING__INIT;

    if (!kvd)
        return -EINVAL;
    if (handle_forked(kvd))
        return -ECHILD;
    request.body_case = KVD__PROTO__REQUEST__BODY_PING;
    request.ping = &ping;
    return handle_round_trip(kvd, NULL, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET, CALL_AGAIN,
                             NULL);
}

int kvd_event_fd(const struct kvd *kvd)
{
    if (!kvd)
        return -EINVAL;
    return handle_forked(kvd) ? -ECHILD : control_fd(kvd->control);
}

/* Reads what has arrived, unless another thread is at it; that one sees the wish when it is done. */
static int drain_socket(struct kvd *kvd)
{
    int r = 0;

    set_armed(kvd, ARMED_WANTED);
    if (!handle_try_lock(kvd))
        return 0;
    if (control_drain(kvd->control) < 0)
        r = handle_fail(kvd, -ENOTCONN, "%s", control_error(kvd->control));
    handle_unlock(kvd);
    return r;
}

ssize_t kvd_drain(struct kvd *kvd)
{
    ssize_t n;
    int r;

    if (!kvd)
        return -EINVAL;
    if (handle_forked(kvd))
        return -ECHILD;
    if (kvd->flags & KVD_NO_SHM)
        return handle_fail(kvd, -EOPNOTSUPP, "the handle was made with KVD_NO_SHM");
    n = rings_take(kvd, NULL, 0);
    r = n ? 0 : drain_socket(kvd);
    if (!n)
        n = rings_take(kvd, NULL, 0);
    if (n)
        set_armed(kvd, ARMED_NO); /* the caller knows */
    return n ? n : r;
}
