/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "conn.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "proto/frame.h"

/* After this a connection waits for its next turn: others are waiting, too. */
#define TURN_NS 200000u

enum {
    REQUEST_BUDGET = 8,    /* unpacking a request may take this many times max_frame_bytes */
    QUEUE_PAUSE = 4,       /* requests wait while more than 1/4 of the queue limit is filled */
    FDS_UNREAD_MAX = 1012, /* sent or queued, not read: each holds a file open in the kernel */
};

enum conn_state {
    CONN_OPEN,
    CONN_FINISHING, /* sends what waits, reads no more */
    CONN_CLOSED,    /* waits to be buried */
};

struct conn {
    struct server *server;
    struct listener *listener;
    enum conn_state state;
    bool spoke; /* has sent a request */
    bool busy;  /* in handle_input(): answers are gathered and sent after it */
    int fd;
    uint32_t events; /* that the source waits for */
    struct loop_source *source;
    struct loop_deferred work; /* input to handle, or to be buried */
    struct peer peer;
    uint64_t id, active, deadline;
    unsigned fds_unread;
    struct frame_reader in;
    struct frame_queue out;
    struct list link;    /* in server->conns */
    struct list waiting; /* in server->waiting */
    void *user;
};

struct conn *conn_of_list(struct list *item)
{
    return list_entry(item, struct conn, link);
}

struct conn *conn_of_waiting(struct list *item)
{
    return list_entry(item, struct conn, waiting);
}

uint64_t conn_deadline(const struct conn *conn)
{
    return conn->deadline;
}

bool conn_has_spoken(const struct conn *conn)
{
    return conn->spoke;
}

/* ---- ends */

void conn_close(struct conn *conn)
{
    if (conn->state == CONN_CLOSED)
        return;
    conn->state = CONN_CLOSED;
    list_remove(&conn->waiting);
    loop_remove(conn->source);
    conn->source = NULL;
    close(conn->fd);
    conn->fd = -1;
    frame_queue_clear(&conn->out);
    conn->listener->connections--;
    conn->server->connections--;
    loop_defer(conn->server->options.loop, &conn->work);
}

void conn_bury(struct conn *conn)
{
    struct server *server = conn->server;

    loop_undefer(&conn->work);
    server->options.ops->closed(server->options.ctx, conn);
    list_remove(&conn->link);
    if (conn->peer.pidfd >= 0)
        close(conn->peer.pidfd);
    frame_reader_destroy(&conn->in);
    free(conn);
}

/* All deadlines are equally far away, so that the list is in order. */
static void start_deadline(struct conn *conn)
{
    const struct server_options *o = &conn->server->options;

    list_remove(&conn->waiting);
    conn->deadline = loop_now(o->loop) + o->first_request_ns;
    list_append(&conn->server->waiting, &conn->waiting);
    server_arm(conn->server);
}

/* ---- sending */

static bool may_read(const struct conn *conn)
{
    return conn->state == CONN_OPEN &&
           conn->out.bytes <= conn->server->options.max_queue_bytes / QUEUE_PAUSE;
}

/* A peer may be silent as long as it likes, but not in the middle of a frame: half a frame holds memory.
 * While we ourselves do not read, it has time. The first request has a deadline of its own. */
static void watch_frame(struct conn *conn)
{
    if (conn->state != CONN_OPEN || !conn->spoke)
        return;
    if (frame_reader_idle(&conn->in) || !may_read(conn))
        list_remove(&conn->waiting);
    else if (list_empty(&conn->waiting))
        start_deadline(conn);
}

static int watch(struct conn *conn)
{
    uint32_t events = (may_read(conn) ? EPOLLIN : 0) | (conn->out.first ? EPOLLOUT : 0);
    int err;

    if (events == conn->events)
        return 0;
    err = loop_modify(conn->source, events);
    if (!err)
        conn->events = events;
    return err;
}

/* After anything that changed the queue or the input: sends, and decides what to wait for. */
static void settle(struct conn *conn)
{
    int err;

    if (conn->state == CONN_CLOSED)
        return;
    err = frame_queue_flush(&conn->out, conn->fd);
    if (err && err != -EAGAIN && err != -EPIPE && err != -ECONNRESET)
        server_note(conn->server, conn, err, "cannot send");
    if ((err && err != -EAGAIN) || (!err && conn->state == CONN_FINISHING) || watch(conn)) {
        conn_close(conn);
        return;
    }
    watch_frame(conn);
    if (may_read(conn) && frame_reader_ready(&conn->in))
        loop_defer(conn->server->options.loop, &conn->work);
}

static int overflow(struct conn *conn, const char *what)
{
    conn->server->stats.overflowed++;
    server_note(conn->server, conn, -ENOBUFS, "does not read its answers: too many %s wait", what);
    conn_close(conn);
    return -ENOTCONN;
}

static int send_out(struct conn *conn, struct frame_out *out)
{
    size_t limit = conn->server->options.max_queue_bytes;

    frame_queue_push(&conn->out, out);
    if (!conn->busy || conn->out.bytes > limit)
        settle(conn);
    if (conn->state != CONN_CLOSED && conn->out.bytes > limit)
        return overflow(conn, "bytes");
    return conn->state == CONN_CLOSED ? -ENOTCONN : 0;
}

/* Descriptors in flight count against a limit of the daemon's user, so one peer must not pile them
 * up. An empty socket queue says that all of them have arrived. */
static int account_fds(struct conn *conn, unsigned n)
{
    int unread = 0;

    if (n == 0)
        return 0;
    if (frame_queue_empty(&conn->out) && ioctl(conn->fd, SIOCOUTQ, &unread) == 0 && unread == 0)
        conn->fds_unread = 0;
    if (conn->fds_unread + n > FDS_UNREAD_MAX)
        return overflow(conn, "descriptors");
    conn->fds_unread += n;
    return 0;
}

static int new_response(const struct conn *conn, const Kvd__Proto__Response *response,
                        const int *fds, unsigned n_fds, struct frame_out **ret_out)
{
    Kvd__Proto__ServerFrame frame = KVD__PROTO__SERVER_FRAME__INIT;
    Kvd__Proto__Response r = *response;

    r.has_fds = n_fds > 0;
    r.fds = n_fds;
    frame.response = &r;
    return frame_out_new(&frame.base, conn->server->options.max_frame_bytes, fds, n_fds, ret_out);
}

int conn_reply(struct conn *conn, const Kvd__Proto__Response *response, const int *fds,
               unsigned n_fds)
{
    struct frame_out *out;
    int err;

    if (conn->state != CONN_OPEN)
        return -ENOTCONN;
    err = new_response(conn, response, fds, n_fds, &out);
    if (err)
        return err;
    err = account_fds(conn, n_fds);
    if (err) {
        frame_out_free(out);
        return err;
    }
    return send_out(conn, out);
}

int conn_status(struct conn *conn, uint64_t id, int status, const char *message)
{
    Kvd__Proto__Response r = KVD__PROTO__RESPONSE__INIT;

    r.id = id;
    r.status = status;
    r.message = (char *)message; /* packing only reads it */
    return conn_reply(conn, &r, NULL, 0);
}

int conn_event(struct conn *conn, Kvd__Proto__Event__Kind kind)
{
    Kvd__Proto__ServerFrame frame = KVD__PROTO__SERVER_FRAME__INIT;
    Kvd__Proto__Event event = KVD__PROTO__EVENT__INIT;
    struct frame_out *out;
    int err;

    if (conn->state != CONN_OPEN)
        return -ENOTCONN;
    if (frame_queue_tagged(&conn->out, (unsigned)kind))
        return 0;
    event.kind = kind;
    frame.event = &event;
    err = frame_out_new(&frame.base, conn->server->options.max_frame_bytes, NULL, 0, &out);
    if (err)
        return err;
    out->tag = (unsigned)kind;
    return send_out(conn, out);
}

void conn_finish(struct conn *conn)
{
    if (conn->state != CONN_OPEN)
        return;
    conn->state = CONN_FINISHING;
    start_deadline(conn);
    if (!conn->busy)
        settle(conn);
}

/* The last word is best effort: a peer that is being thrown out is not waited for. */
static void fail(struct conn *conn, int status, const char *message)
{
    server_note(conn->server, conn, status, "%s", message);
    if (conn_status(conn, 0, status, message) == 0)
        frame_queue_flush(&conn->out, conn->fd);
    conn_close(conn);
}

void conn_expire(struct conn *conn)
{
    if (conn->state == CONN_OPEN) {
        conn->server->stats.silent++;
        fail(conn, -ETIMEDOUT, "no complete request came in time");
    }
    conn_close(conn);
}

/* ---- receiving */

static void fail_protocol(struct conn *conn, int status, const char *message)
{
    conn->server->stats.protocol_errors++;
    fail(conn, status, message);
}

static void handle_request(struct conn *conn, const Kvd__Proto__Request *request)
{
    struct server *server = conn->server;

    if (request->id == 0) {
        fail_protocol(conn, -EPROTO, "request id 0 is reserved");
        return;
    }
    conn->spoke = true;
    list_remove(&conn->waiting);
    server->stats.requests++;
    server->options.ops->request(server->options.ctx, conn, request);
}

static void handle_frame(struct conn *conn, const struct frame *frame)
{
    ProtobufCMessage *message;
    struct frame_budget budget;
    int err;

    frame_budget_init(&budget, conn->server->options.max_frame_bytes * REQUEST_BUDGET);
    err =
        frame_unpack(&kvd__proto__request__descriptor, frame->data, frame->len, &budget, &message);
    if (err) {
        fail_protocol(conn, err,
                      err == -EMSGSIZE ? "the request takes too much memory to unpack"
                                       : "the frame is not a request of this protocol");
        return;
    }
    handle_request(conn, (const Kvd__Proto__Request *)message);
    frame_unpack_free(message, &budget);
}

/* Answers that wait still go to a peer that has only shut down its sending side. */
static void handle_end(struct conn *conn)
{
    if (!frame_reader_idle(&conn->in)) {
        conn->server->stats.protocol_errors++;
        server_note(conn->server, conn, -EPROTO, "hung up in the middle of a frame");
    }
    conn_finish(conn);
}

/* True: something came. */
static bool read_more(struct conn *conn)
{
    ssize_t n = frame_reader_fill(&conn->in, conn->fd);

    if (n > 0)
        conn->active = loop_now(conn->server->options.loop);
    else if (n == 0)
        handle_end(conn);
    else if (n == -EPROTO)
        fail_protocol(conn, -EPROTO, "descriptors are not accepted from clients");
    else if (n == -ECONNRESET)
        conn_close(conn);
    else if (n != -EAGAIN)
        fail(conn, (int)n, "cannot receive");
    return n > 0;
}

static void handle_bad_length(struct conn *conn, int err)
{
    char text[96];

    if (err == -EMSGSIZE)
        snprintf(text, sizeof(text), "a frame is longer than %zu bytes",
                 conn->server->options.max_frame_bytes);
    else
        snprintf(text, sizeof(text), "a frame of length 0");
    fail_protocol(conn, err, text);
}

/* One read and a bounded number of requests, and time, per turn; epoll or settle() brings us back for
 * the rest. The first request is always served. */
static void handle_input(struct conn *conn)
{
    const struct server_options *o = &conn->server->options;
    uint64_t end = loop_clock(o->loop) + TURN_NS;
    unsigned left = o->requests_per_turn;
    bool may_fill = true;

    conn->busy = true;
    while (left > 0 && may_read(conn) &&
           (left == o->requests_per_turn || loop_clock(o->loop) < end)) {
        struct frame frame;
        int r = frame_reader_next(&conn->in, &frame);

        if (r == 0 && may_fill && read_more(conn)) {
            may_fill = false;
            continue;
        }
        if (r < 0)
            handle_bad_length(conn, r);
        if (r <= 0)
            break;
        handle_frame(conn, &frame);
        left--;
    }
    conn->busy = false;
    settle(conn);
}

static void conn_work(void *arg)
{
    struct conn *conn = arg;

    if (conn->state == CONN_CLOSED)
        conn_bury(conn);
    else
        handle_input(conn);
}

static void conn_ready(void *arg, uint32_t events)
{
    struct conn *conn = arg;

    if (events & EPOLLOUT)
        settle(conn);
    if (conn->state == CONN_CLOSED)
        return;
    if (may_read(conn))
        loop_defer(conn->server->options.loop, &conn->work);
    else if (events & (EPOLLHUP | EPOLLERR))
        conn_close(conn); /* nobody is left to read what we wait to send */
}

/* ---- beginning */

int conn_new(struct listener *listener, int fd, const struct peer *peer)
{
    struct server *server = listener->server;
    struct conn *conn = calloc(1, sizeof(*conn));
    int err;

    if (!conn)
        return -ENOMEM;
    *conn = (struct conn){
        .server = server,
        .listener = listener,
        .fd = fd,
        .events = EPOLLIN,
        .peer = *peer,
        .id = server->last_id + 1,
        .active = loop_now(server->options.loop),
    };
    err = loop_add(server->options.loop, fd, conn->events, conn_ready, conn, &conn->source);
    if (err) {
        free(conn);
        return err;
    }
    frame_reader_init(&conn->in, server->options.max_frame_bytes, 0);
    frame_queue_init(&conn->out);
    loop_deferred_init(&conn->work, conn_work, conn);
    list_init(&conn->waiting);
    list_append(&server->conns, &conn->link);
    server->last_id++;
    server->connections++;
    listener->connections++;
    start_deadline(conn);
    return 0;
}

/* ---- what the dispatcher asks */

void conn_set_user(struct conn *conn, void *user)
{
    conn->user = user;
}

void *conn_user(const struct conn *conn)
{
    return conn->user;
}

uint64_t conn_id(const struct conn *conn)
{
    return conn->id;
}

bool conn_is_open(const struct conn *conn)
{
    return conn->state == CONN_OPEN;
}

const struct server_socket *conn_socket(const struct conn *conn)
{
    return conn->listener->config;
}

pid_t conn_pid(const struct conn *conn)
{
    return conn->peer.pid;
}

uid_t conn_uid(const struct conn *conn)
{
    return conn->peer.uid;
}

gid_t conn_gid(const struct conn *conn)
{
    return conn->peer.gid;
}

uint64_t conn_start_time(const struct conn *conn)
{
    return conn->peer.start_time;
}

int conn_take_pidfd(struct conn *conn)
{
    int fd = conn->peer.pidfd;

    conn->peer.pidfd = -1;
    return fd;
}

uint64_t conn_last_activity(const struct conn *conn)
{
    return conn->active;
}
