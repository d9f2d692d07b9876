/* SPDX-License-Identifier: Apache-2.0 */
#include "raw.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "harness.h"

static uint64_t deadline(void)
{
    return frame_clock() + (uint64_t)PATIENCE_MS * 1000000;
}

void raw_connect(struct raw *r, const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    *r = (struct raw){.next_id = 1};
    snprintf(a.sun_path, sizeof(a.sun_path), "%s", path);
    r->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(r->fd, 0);
    cr_assert_eq(connect(r->fd, (struct sockaddr *)&a, sizeof(a)), 0, "%s: %s", path,
                 strerror(errno));
    frame_reader_init(&r->in, 64 << 20, FRAME_MAX_FDS);
}

static void forget(struct raw *r)
{
    while (r->n_fds)
        close(r->fds[--r->n_fds]);
    if (r->frame)
        frame_unpack_free(&r->frame->base, &r->budget);
    r->frame = NULL;
    r->response = NULL;
}

void raw_close(struct raw *r)
{
    forget(r);
    frame_reader_destroy(&r->in);
    close(r->fd);
    r->fd = -1;
}

bool raw_bytes(struct raw *r, const void *bytes, size_t n)
{
    const char *at = bytes;

    while (n) {
        ssize_t sent = send(r->fd, at, n, MSG_NOSIGNAL);

        if (sent < 0 && (errno == EPIPE || errno == ECONNRESET))
            return false;
        cr_assert_gt(sent, 0, "%s", strerror(errno));
        at += sent;
        n -= (size_t)sent;
    }
    return true;
}

bool raw_send(struct raw *r, Kvd__Proto__Request *request)
{
    struct frame_out *out;
    int err;

    request->id = r->next_id++;
    cr_assert_eq(frame_out_new(&request->base, 64 << 20, NULL, 0, &out), 0);
    err = frame_send_wait(r->fd, out, deadline());
    cr_assert(err == 0 || err == -EPIPE || err == -ECONNRESET, "%s", strerror(-err));
    return err == 0;
}

int32_t raw_answer(struct raw *r)
{
    ProtobufCMessage *m;
    struct frame frame;

    do {
        int err = frame_recv_wait(r->fd, &r->in, deadline(), &frame);

        forget(r);
        if (err == -ECONNRESET || err == -EPIPE)
            return RAW_END;
        cr_assert_eq(err, 0, "%s", strerror(-err));
        frame_budget_init(&r->budget, 64 << 20);
        cr_assert_eq(frame_unpack(&kvd__proto__server_frame__descriptor, frame.data, frame.len,
                                  &r->budget, &m),
                     0);
        r->frame = (Kvd__Proto__ServerFrame *)m;
        for (unsigned i = 0; i < frame.n_fds && i < 8; i++)
            r->fds[r->n_fds++] = frame_take_fd(&frame, i);
    } while (!r->frame->response);
    r->response = r->frame->response;
    return r->response->status;
}

int32_t raw_call(struct raw *r, Kvd__Proto__Request *request)
{
    raw_send(r, request);
    return raw_answer(r);
}

int32_t raw_hello(struct raw *r, void (*edit)(Kvd__Proto__Hello *hello, void *arg), void *arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Hello hello = KVD__PROTO__HELLO__INIT;
    int32_t status;

    hello.version_min = hello.version_max = 1;
    hello.client = (char *)"raw";
    if (edit)
        edit(&hello, arg);
    request.body_case = KVD__PROTO__REQUEST__BODY_HELLO;
    request.hello = &hello;
    status = raw_call(r, &request);
    if (status == 0) {
        const Kvd__Proto__HelloReply *h = r->response->hello;

        cr_assert_not_null(h);
        cr_assert_eq(h->cookie.len, sizeof(r->cookie));
        r->session = h->session;
        r->resumed = h->resumed;
        memcpy(r->cookie, h->cookie.data, sizeof(r->cookie));
    }
    return status;
}

void raw_join(struct raw *r, const char *path)
{
    raw_connect(r, path);
    cr_assert_eq(raw_hello(r, NULL, NULL), 0);
}

void raw_key(Kvd__Proto__Key *to, const struct kvd_key *from)
{
    kvd__proto__key__init(to);
    to->hash = (ProtobufCBinaryData){.data = (uint8_t *)from->hash, .len = sizeof(from->hash)};
}
