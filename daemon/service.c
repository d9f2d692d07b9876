/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/service.h"

#include <errno.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/spill/spill.h"

/* Requests of one session's ring that are worked off before the next session's turn. */
#define SERVE_BATCH 64u

/* Control requests after which the rings are looked at even if the loop never gets to sleep. */
#define SERVE_EVERY 16u

/* What is due by the clock is looked after at least so often, however busy the loop is. */
#define WORK_EVERY_NS 10000000u

#define SPIN_RETRY    16u

/* While a reset waits for its stores, it is looked after so often. */
#define RESET_MS 100

#define TICK_NS  2000000000u

/* ---- death of processes */

struct watch {
    struct service *service;
    struct session *session;
    struct loop_source *source;
    int pidfd;
};

static void watch_free(struct watch *w)
{
    if (!w)
        return;
    loop_remove(w->source);
    close(w->pidfd);
    free(w);
}

void service_part(struct session *session)
{
    struct conn *conn = session->conn;

    session->conn = NULL;
    session_drop_calls(session);
    if (!conn)
        return;
    conn_set_user(conn, NULL);
    conn_finish(conn);
}

/* The pidfd is readable: the process, all its threads, is gone. */
static void on_death(void *arg, uint32_t events)
{
    struct watch *w = arg;
    struct session *s = w->session;

    (void)events;
    log_write_limited(w->service->log, &w->service->deaths, LOG_INFO,
                      &(struct log_fields){.session = s->id}, "pid %d (%s) is dead", (int)s->pid,
                      s->client);
    service_part(s);
    s->watch = NULL;
    watch_free(w);
    session_end(s, true);
}

static void on_session_gone(void *arg, struct session *s)
{
    service_drop_resets(arg, s);
    service_part(s);
    watch_free(s->watch);
    s->watch = NULL;
}

int service_watch(struct service *s, struct session *session, int pidfd)
{
    struct watch *w = calloc(1, sizeof(*w));
    int r;

    if (!w)
        return -ENOMEM;
    *w = (struct watch){.service = s, .session = session, .pidfd = pidfd};
    r = loop_add(s->loop, pidfd, EPOLLIN, on_death, w, &w->source);
    if (r < 0) {
        free(w);
        return r;
    }
    session->watch = w;
    return 0;
}

int service_kill(struct session *session)
{
    const struct watch *w = session->watch;

    if (!w)
        return -ESRCH; /* dead already: it lingers for the sake of its engine */
    return syscall(SYS_pidfd_send_signal, w->pidfd, SIGKILL, NULL, 0) < 0 ? -errno : 0;
}

/* ---- rings and sleep */

static bool serve_session(struct session *s)
{
    int n = session_serve(s, SERVE_BATCH);
    bool posted = n > 0 || s->posted;

    s->posted = false;
    if (posted && session_must_wake(s) && s->conn) {
        conn_event(s->conn, KVD__PROTO__EVENT__KIND__COMPLETIONS);
        s->core->stats.wakes_sent++;
    }
    if (s->broken && s->conn) {
        conn_status(s->conn, 0, -EPROTO, s->note);
        service_part(s);
        session_hang_up(s);
    }
    return n > 0;
}

static bool serve_all(struct service *s)
{
    struct list *i, *tmp;
    bool any = false;

    s->since_serve = 0;
    kvd_list_for_each (i, tmp, &s->core->sessions) {
        any |= serve_session(list_entry(i, struct session, in_core));
    }
    return any;
}

/* core_work() may have completed fetches after their sessions were served. */
static bool tell_posted(struct service *s)
{
    for (const struct list *i = s->core->sessions.next; s->core->nvme && i != &s->core->sessions;
         i = i->next)
        if (list_entry(i, struct session, in_core)->posted)
            return true;
    return false;
}

static void arm_work(struct service *s)
{
    int64_t ms = core_next_deadline(s->core);

    if (!list_empty(&s->resets) && (ms < 0 || ms > RESET_MS))
        ms = RESET_MS;
    if (ms < 0)
        loop_timer_disarm(s->work);
    else
        loop_timer_arm(s->work, core_now_ns(s->core) + (uint64_t)ms * 1000000 + 1000000, 0);
}

/* A worker's next batch often follows at once; a wake-up costs both sides more than these few
 * microseconds of looking. But one that runs on this very processor, or is busy with something else,
 * posts nothing while we look: so each time that nothing was found, the next look is half as long,
 * and every SPIN_RETRY-th time as long as allowed again. */
static bool spin(struct service *s)
{
    if (!s->busy_until_ns)
        return false;
    while (core_now_ns(s->core) < s->busy_until_ns)
        for (int i = 0; i < 16; i++)
            if (sessions_have_work(s->core)) {
                s->fruitless = 0;
                return true;
            }
    s->busy_until_ns = 0;
    s->fruitless = (s->fruitless + 1) % SPIN_RETRY;
    return false;
}

/* A loop that never gets to sleep must not keep what is due from its turn. */
static void work_when_busy(struct service *s)
{
    uint64_t now = core_now_ns(s->core);

    if (now < s->work_due_ns)
        return;
    s->work_due_ns = now + WORK_EVERY_NS;
    core_work(s->core);
}

/* What completed may be what a worker waits for: it is told in serve_all(). */
static void on_nvme(void *arg, uint32_t events)
{
    struct service *s = arg;

    (void)events;
    nvme_news(s->core->nvme);
    nvme_run(s->core->nvme);
}

static int before_sleep(void *arg)
{
    struct service *s = arg;

    if (serve_all(s)) {
        work_when_busy(s);
        service_answer_resets(s);
        s->busy_until_ns = core_now_ns(s->core) + (s->spin_ns >> s->fruitless);
        return 1;
    }
    if (core_work(s->core) || tell_posted(s) || spin(s))
        return 1;
    service_answer_resets(s);
    arm_work(s);
    shm_going_to_sleep(&s->core->shm->sleeping); /* S1, S2 */
    return sessions_have_work(s->core);          /* S3; S4 is epoll_wait */
}

static void after_wake(void *arg)
{
    struct service *s = arg;

    shm_awake(&s->core->shm->sleeping);
}

static void on_tick(void *arg)
{
    struct service *s = arg;

    log_limit_flush(s->log, &s->notes, LOG_NOTICE, NULL, "refused peers");
    log_limit_flush(s->log, &s->deaths, LOG_INFO, NULL, "dead processes");
    log_limit_flush(s->log, &s->core->breaks, LOG_WARNING, NULL, "broken sessions");
    if (s->core->n_sessions)
        core_tick(s->core);
}

static void on_work(void *arg)
{
    struct service *s = arg;

    core_work(s->core); /* before_sleep goes on with it */
}

/* ---- connections */

bool service_allows(const struct server_socket *socket, const struct space *space)
{
    for (size_t i = 0; i < socket->n_spaces; i++)
        if (fnmatch(socket->spaces[i], space->name, 0) == 0)
            return true;
    return false;
}

static void on_closed(void *ctx, struct conn *conn)
{
    struct session *session = conn_user(conn);

    if (!session)
        return;
    session->conn = NULL;
    service_drop_resets(ctx, session);
    if (session->shm)
        session_hang_up(session); /* it may go on reading; its pidfd tells when not */
    else /* it has nothing mapped, what it held, it held by this socket; but its ranks may be copying */
        session_end(session, session->engine->living > 1);
}

static void on_note(void *ctx, const struct conn *conn, int status, const char *message)
{
    struct service *s = ctx;

    if (conn)
        log_write_limited(s->log, &s->notes, LOG_NOTICE, NULL, "pid %d: %s (%d)",
                          (int)conn_pid(conn), message, status);
    else
        log_write(s->log, status < 0 ? LOG_ERR : LOG_NOTICE, NULL, "%s", message);
}

static void on_request(void *ctx, struct conn *conn, const Kvd__Proto__Request *request)
{
    struct service *s = ctx;

    dispatch(s, conn, request);
    if (++s->since_serve >= SERVE_EVERY) {
        serve_all(s);
        work_when_busy(s);
    }
}

const struct server_ops service_ops = {
    .request = on_request,
    .closed = on_closed,
    .note = on_note,
};

/* ---- */

int service_start(struct service *s)
{
    const struct loop_hooks hooks = {
        .before_sleep = before_sleep, .after_wake = after_wake, .arg = s};
    int r = loop_timer_new(s->loop, on_tick, s, &s->tick);

    s->notes = s->deaths = (struct log_limit){.interval_ns = 10000000000u, .burst = 20};
    list_init(&s->resets);
    if (r == 0)
        r = loop_timer_new(s->loop, on_work, s, &s->work);
    if (r == 0 && s->core->nvme)
        r = loop_add(s->loop, nvme_fd(s->core->nvme), EPOLLIN, on_nvme, s, &s->nvme);
    if (r < 0)
        return r;
    s->core->session_gone = on_session_gone;
    s->core->session_gone_arg = s;
    loop_timer_arm(s->tick, core_now_ns(s->core) + TICK_NS, TICK_NS);
    loop_set_hooks(s->loop, &hooks);
    return 0;
}

void service_stop(struct service *s)
{
    loop_set_hooks(s->loop, NULL);
    if (s->tick)
        loop_timer_free(s->tick);
    if (s->work)
        loop_timer_free(s->work);
    if (s->nvme)
        loop_remove(s->nvme);
    s->tick = s->work = NULL;
    s->nvme = NULL;
}
