/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "server_world.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int count_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    cr_assert(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static uint64_t world_clock(void *arg)
{
    return ((struct world *)arg)->now;
}

static int world_wait(void *arg, int epoll_fd, struct epoll_event *events, int max, int timeout_ms)
{
    ((struct world *)arg)->last_timeout = timeout_ms;
    return epoll_wait(epoll_fd, events, max, 0);
}

static void on_request(void *ctx, struct conn *conn, const Kvd__Proto__Request *request)
{
    struct world *w = ctx;

    w->requests++;
    w->conn = conn;
    w->bodies += request->body_case != KVD__PROTO__REQUEST__BODY__NOT_SET;
    if (w->behave)
        w->behave(w, conn, request);
    else
        cr_assert_eq(conn_status(conn, request->id, 0, NULL), 0);
}

static void on_closed(void *ctx, struct conn *conn)
{
    struct world *w = ctx;

    w->closed++;
    cr_assert_not(conn_is_open(conn));
    cr_assert_eq(conn_status(conn, 1, 0, NULL), -ENOTCONN);
    cr_assert_eq(conn_event(conn, KVD__PROTO__EVENT__KIND__GOING), -ENOTCONN);
    conn_close(conn);
    conn_finish(conn);
    if (w->conn == conn)
        w->conn = NULL;
}

static void on_note(void *ctx, const struct conn *conn, int status, const char *message)
{
    struct world *w = ctx;

    (void)conn;
    w->notes++;
    w->last_status = status;
    snprintf(w->last_note, sizeof(w->last_note), "%s", message);
}

static const struct server_ops ops = {.request = on_request, .closed = on_closed, .note = on_note};

void setup_folder(struct world *w)
{
    *w = (struct world){.now = 1000 * SECOND, .fds_before = count_fds()};
    snprintf(w->dir, sizeof(w->dir), "/tmp/kvd-server-XXXXXX");
    cr_assert(mkdtemp(w->dir));
    cr_assert_eq(chmod(w->dir, 0755), 0);
    snprintf(w->path, sizeof(w->path), "%s/kvd.sock", w->dir);
    w->null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    w->socket = (struct server_socket){
        .path = w->path,
        .role = SERVER_WRITER,
        .mode = 0600,
        .group = (gid_t)-1,
        .max_connections = 2000,
    };
    w->options = (struct server_options){
        .ops = &ops, .ctx = w, .max_frame_bytes = MAX_FRAME, .max_queue_bytes = MAX_QUEUE};
}

int start(struct world *w)
{
    struct loop_options options = {.clock = world_clock, .wait = world_wait, .arg = w};

    cr_assert_eq(loop_new(&options, &w->loop), 0);
    w->options.loop = w->loop;
    cr_assert_eq(server_new(&w->options, &w->server), 0);
    return server_listen(w->server, &w->socket);
}

void setup(struct world *w)
{
    setup_folder(w);
    cr_assert_eq(start(w), 0);
}

void stop(struct world *w)
{
    server_free(w->server);
    loop_free(w->loop);
}

void teardown(struct world *w)
{
    stop(w);
    close(w->null);
    unlink(w->path);
    cr_assert_eq(rmdir(w->dir), 0, "something was left in the folder");
    cr_assert_eq(count_fds(), w->fds_before, "descriptors leak");
}

void turn(struct world *w, int n)
{
    while (n-- > 0)
        cr_assert_eq(loop_turn(w->loop, true), 0);
}

/* ---- a client */

int try_connect(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    cr_assert_geq(fd, 0);
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0)
        return fd;
    close(fd);
    return -errno;
}

void connect_client(struct world *w, struct client *c)
{
    c->fd = try_connect(w->path);
    cr_assert_geq(c->fd, 0);
    frame_reader_init(&c->in, MAX_FRAME, FRAME_MAX_FDS);
}

void close_client(struct client *c)
{
    frame_reader_destroy(&c->in);
    close(c->fd);
}

struct frame_out *new_ping(uint64_t id)
{
    Kvd__Proto__Request r = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping ping = KVD__PROTO__PING__INIT;
    struct frame_out *out = NULL;

    r.id = id;
    r.body_case = KVD__PROTO__REQUEST__BODY_PING;
    r.ping = &ping;
    cr_assert_eq(frame_out_new(&r.base, MAX_FRAME, NULL, 0, &out), 0);
    return out;
}

void send_ping(struct client *c, uint64_t id)
{
    cr_assert_eq(frame_send_wait(c->fd, new_ping(id), 0), 0);
}

void send_raw(struct client *c, const void *data, size_t len)
{
    cr_assert_eq(send(c->fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT), (ssize_t)len);
}

struct answer receive(struct client *c)
{
    struct answer a = {.event = -1};
    Kvd__Proto__ServerFrame *s;
    struct frame f;

    a.result = frame_recv_wait(c->fd, &c->in, 0, &f);
    if (a.result)
        return a;
    s = kvd__proto__server_frame__unpack(NULL, f.len, f.data);
    cr_assert(s);
    a.bytes = f.len;
    if (s->event)
        a.event = (int)s->event->kind;
    if (s->response) {
        a.id = s->response->id;
        a.status = s->response->status;
        a.fds = s->response->has_fds ? s->response->fds : 0;
        cr_assert_eq(a.fds, f.n_fds);
        snprintf(a.message, sizeof(a.message), "%s",
                 s->response->message ? s->response->message : "");
    }
    kvd__proto__server_frame__free_unpacked(s, NULL);
    return a;
}

void expect_answer(struct client *c, uint64_t id, int status)
{
    struct answer a = receive(c);

    cr_assert_eq(a.result, 0, "no answer: %d", a.result);
    cr_assert_eq(a.id, id);
    cr_assert_eq(a.status, status, "status %d: %s", a.status, a.message);
    if (status)
        cr_assert_neq(a.message[0], 0, "no reason given");
}

void expect_end(struct client *c)
{
    cr_assert_eq(receive(c).result, -ECONNRESET);
}

uint64_t own_start_time(void)
{
    char text[1024] = {0}, *p;
    FILE *f = fopen("/proc/self/stat", "r");

    cr_assert_gt(fread(text, 1, sizeof(text) - 1, f), 0);
    fclose(f);
    p = strrchr(text, ')') + 2;
    for (int field = 3; field < 22; field++)
        p = strchr(p, ' ') + 1;
    return strtoull(p, NULL, 10);
}
