/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "client/control.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    /* Of frames from the daemon; its configuration may raise its own limit. Memory grows with what
     * has arrived only. */
    RECEIVE_MAX = 64 << 20,
    UNPACK_MAX = 128 << 20,
    SEND_FIRST = 64 << 10, /* before hello has told the limit */
    ENVELOPE = 4096,       /* a frame's bytes around its data */
    COOKIE_MAX = 64,
    WAKE_ID = 1,
    FIRST_ID = 2,
};

struct control {
    struct control_options options; /* pointers into what follows */
    char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
    char client[128];
    uint8_t token[CONTROL_TOKEN_MAX];

    /* Guards the sending half of the stream, and `fd` against being replaced while in use. */
    pthread_mutex_t send_lock;
    _Atomic bool wake_wanted;
    _Atomic int fd;
    _Atomic bool open;
    _Atomic uint32_t next_id;

    struct frame_reader reader;
    struct control_hello hello;
    uint8_t cookie[COOKIE_MAX];
    size_t cookie_len;
    uint8_t wake[32];
    size_t wake_len;
    char error[512];
};

/* ---- errors */

__attribute__((format(printf, 3, 4))) static int fail(struct control *c, int err,
                                                      const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(c->error, sizeof(c->error), format, args);
    va_end(args);
    return err;
}

/* The descriptor stays open, so that somebody who polls it sees the end, not a stranger's file. */
static void lose(struct control *c)
{
    if (atomic_exchange(&c->open, false))
        shutdown(atomic_load(&c->fd), SHUT_RDWR);
}

static int lose_with(struct control *c, int err)
{
    lose(c);
    switch (err) {
    case -EPIPE:
    case -ECONNRESET:
        return fail(c, err, "the daemon at %s has closed the connection", c->socket);
    case -ETIMEDOUT:
        return fail(c, err, "the daemon at %s took no request in time; is it stopped?", c->socket);
    case -EMSGSIZE:
    case -EBADMSG:
    case -EPROTO:
        return fail(c, -EPROTO, "%s does not speak the kvd protocol (malformed message)",
                    c->socket);
    default:
        return fail(c, err, "the connection to %s failed: %s", c->socket, strerror(-err));
    }
}

const char *control_error(const struct control *c)
{
    return c->error[0] ? c->error : "no error";
}

/* ---- making */

uint64_t control_deadline(uint32_t timeout_ms)
{
    return frame_clock() + (uint64_t)timeout_ms * 1000000u;
}

static void pack_wake(struct control *c)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Wake wake = KVD__PROTO__WAKE__INIT;
    size_t len;

    request.id = WAKE_ID;
    request.body_case = KVD__PROTO__REQUEST__BODY_WAKE;
    request.wake = &wake;
    len = kvd__proto__request__get_packed_size(&request);
    c->wake[0] = (uint8_t)len;
    c->wake_len = FRAME_HEADER + kvd__proto__request__pack(&request, c->wake + FRAME_HEADER);
}

static int copy_options(struct control *c, const struct control_options *o)
{
    const char *path = o->socket ? o->socket : secure_getenv("KVD_SOCKET");

    if (!path || !*path)
        path = CONTROL_SOCKET;
    if (strlen(path) >= sizeof(c->socket) || o->engine_token_len > sizeof(c->token))
        return -EINVAL;
    strcpy(c->socket, path);
    snprintf(c->client, sizeof(c->client), "%s",
             o->client ? o->client : program_invocation_short_name);
    c->options = *o;
    if (o->engine_token_len)
        memcpy(c->token, o->engine_token, o->engine_token_len);
    return 0;
}

int control_new(const struct control_options *options, struct control **ret_control)
{
    struct control *c = calloc(1, sizeof(*c));
    int r;

    if (!c)
        return -ENOMEM;
    r = copy_options(c, options);
    if (r == 0)
        r = -pthread_mutex_init(&c->send_lock, NULL);
    if (r < 0) {
        free(c);
        return r;
    }
    c->fd = -1;
    c->next_id = FIRST_ID;
    c->hello.max_frame = SEND_FIRST;
    frame_reader_init(&c->reader, RECEIVE_MAX, FRAME_MAX_FDS);
    pack_wake(c);
    *ret_control = c;
    return 0;
}

void control_free(struct control *c)
{
    if (!c)
        return;
    if (c->fd >= 0)
        close(c->fd);
    frame_reader_destroy(&c->reader);
    pthread_mutex_destroy(&c->send_lock);
    free(c);
}

const struct control_hello *control_hello(const struct control *c)
{
    return &c->hello;
}

bool control_is_open(const struct control *c)
{
    return atomic_load_explicit(&c->open, memory_order_acquire);
}

int control_fd(const struct control *c)
{
    return atomic_load_explicit(&c->fd, memory_order_acquire);
}

const char *control_socket(const struct control *c)
{
    return c->socket;
}

void control_hang_up(struct control *c)
{
    lose(c);
}

/* ---- sending */

/* The caller holds send_lock. */
static int wake_locked(struct control *c)
{
    ssize_t n;

    if (!control_is_open(c))
        return -EPIPE;
    do
        n = send(c->fd, c->wake, c->wake_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)c->wake_len || (n < 0 && errno == EAGAIN))
        return 0;
    lose(c); /* dead; or cut in the middle, which a stream does not survive */
    return -EPIPE;
}

/* Whoever wants a wake-up sets wake_wanted (K1), then tries the lock (K2); whoever gives the lock
 * back (K3) looks at wake_wanted afterwards (K4). Either K2 sees the lock free or K4 sees the wish.
 */
int control_wake(struct control *c)
{
    int r = 0;

    atomic_store(&c->wake_wanted, true);       /* K1 */
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in send_unlock() */
    while (r == 0 && atomic_load(&c->wake_wanted) &&
           pthread_mutex_trylock(&c->send_lock) == 0) { /* K2 */
        if (atomic_exchange(&c->wake_wanted, false))
            r = wake_locked(c);
        pthread_mutex_unlock(&c->send_lock);
        atomic_thread_fence(memory_order_seq_cst);
    }
    return r;
}

static void send_unlock(struct control *c)
{
    pthread_mutex_unlock(&c->send_lock);       /* K3 */
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fence in control_wake() */
    if (atomic_load(&c->wake_wanted))          /* K4 */
        control_wake(c);
}

/* A request without its answer never has the number of another one that is waited for. */
static void number(struct control *c, Kvd__Proto__Request *request)
{
    uint32_t id;

    do
        id = atomic_fetch_add(&c->next_id, 1);
    while (id < FIRST_ID);
    request->id = request->id >> 32 << 32 | id;
}

static int pack(struct control *c, Kvd__Proto__Request *request, struct frame_out **ret_out)
{
    int r;

    number(c, request);
    r = frame_out_new(&request->base, c->hello.max_frame, NULL, 0, ret_out);
    if (r == -EMSGSIZE)
        fail(c, r, "the request is longer than the %zu bytes that the daemon takes",
             c->hello.max_frame);
    else if (r < 0)
        fail(c, r, "%s", strerror(-r));
    return r;
}

static int send_request(struct control *c, Kvd__Proto__Request *request, uint64_t deadline_ns)
{
    struct frame_out *out;
    int r = pack(c, request, &out);

    if (r < 0)
        return r;
    pthread_mutex_lock(&c->send_lock);
    r = frame_send_wait(c->fd, out, deadline_ns);
    if (r < 0)
        lose_with(c, r);
    send_unlock(c);
    return r;
}

int control_post(struct control *c, Kvd__Proto__Request *request)
{
    struct frame_queue queue;
    struct frame_out *out;
    int r;

    number(c, request);
    r = frame_out_new(&request->base, SEND_FIRST, NULL, 0, &out);
    if (r < 0)
        return r;
    frame_queue_init(&queue);
    frame_queue_push(&queue, out);
    pthread_mutex_lock(&c->send_lock);
    r = control_is_open(c) ? frame_queue_flush(&queue, c->fd) : -EPIPE;
    if (r < 0 && (r != -EAGAIN || queue.first->sent)) {
        lose(c);
        r = -EPIPE;
    }
    send_unlock(c);
    frame_queue_clear(&queue);
    return r;
}

/* ---- receiving */

static int read_frame(struct control *c, uint64_t deadline_ns, struct frame *ret_frame,
                      struct control_reply *reply)
{
    ProtobufCMessage *m;
    int r = frame_recv_wait(c->fd, &c->reader, deadline_ns, ret_frame);

    if (r == -ETIMEDOUT)
        return r;
    if (r == 0) {
        frame_budget_init(&reply->budget, UNPACK_MAX);
        r = frame_unpack(&kvd__proto__server_frame__descriptor, ret_frame->data, ret_frame->len,
                         &reply->budget, &m);
    }
    if (r < 0)
        return lose_with(c, r);
    reply->frame = (Kvd__Proto__ServerFrame *)m;
    reply->response = reply->frame->response;
    reply->n_fds = 0;
    return 0;
}

/* Response 0 belongs to no request: the daemon says why it ends the connection. */
static int refused(struct control *c, const Kvd__Proto__Response *response)
{
    lose(c);
    return fail(c, response->status < 0 ? response->status : -EPROTO, "%s",
                response->message ? response->message : "the daemon has ended the connection");
}

/* Takes what is no answer to a call. 0: it was that; 1: it is a response to look at. */
static int take_other(struct control *c, struct control_reply *reply, uint64_t id)
{
    const Kvd__Proto__Response *response = reply->response;
    int r = 0;

    if (response && response->id == id && id)
        return 1;
    if (response && response->id == 0)
        r = refused(c, response);
    else if (response && c->options.late)
        c->options.late(c->options.arg, response);
    control_reply_free(reply);
    return r;
}

/* The answer to request `id` (0: to none, then anything that comes ends the wait). */
static int receive(struct control *c, uint64_t id, uint64_t deadline_ns,
                   struct control_reply *reply)
{
    struct frame frame;

    for (;;) {
        int r = read_frame(c, deadline_ns, &frame, reply);

        if (r < 0)
            return r;
        r = take_other(c, reply, id);
        if (r == 0 && id)
            continue;
        if (r <= 0)
            return r;
        if (reply->response->fds != frame.n_fds) {
            control_reply_free(reply);
            return lose_with(c, -EPROTO);
        }
        for (unsigned i = 0; i < frame.n_fds; i++)
            reply->fds[i] = frame_take_fd(&frame, i);
        reply->n_fds = frame.n_fds;
        return 0;
    }
}

int control_wait(struct control *c, uint64_t deadline_ns)
{
    struct control_reply reply = {0};

    return control_is_open(c) ? receive(c, 0, deadline_ns, &reply) : -EPIPE;
}

int control_drain(struct control *c)
{
    int r;

    do
        r = control_wait(c, 0);
    while (r == 0);
    return r == -ETIMEDOUT ? 0 : r;
}

/* ---- calls */

int control_take_fd(struct control_reply *reply, unsigned i)
{
    int fd;

    if (i >= reply->n_fds)
        return -1;
    fd = reply->fds[i];
    reply->fds[i] = -1;
    return fd;
}

void control_reply_free(struct control_reply *reply)
{
    if (!reply || !reply->frame)
        return;
    for (unsigned i = 0; i < reply->n_fds; i++)
        if (reply->fds[i] >= 0)
            close(reply->fds[i]);
    frame_unpack_free(&reply->frame->base, &reply->budget);
    reply->frame = NULL;
    reply->response = NULL;
    reply->n_fds = 0;
}

static int check_answer(struct control *c, const Kvd__Proto__Response *response,
                        Kvd__Proto__Response__BodyCase expect)
{
    if (response->status < 0)
        return fail(c, response->status, "%s",
                    response->message ? response->message : strerror(-response->status));
    if (response->status > 0 ||
        (expect != KVD__PROTO__RESPONSE__BODY__NOT_SET && response->body_case != expect))
        return lose_with(c, -EPROTO);
    return 0;
}

/* What the daemon said before it hung up explains more than EPIPE. */
static int last_words(struct control *c)
{
    struct control_reply reply = {0};
    int r;

    do
        r = receive(c, 0, 0, &reply);
    while (r == 0);
    return r == -ECONNRESET || r == -ETIMEDOUT ? lose_with(c, -EPIPE) : r;
}

static int exchange(struct control *c, Kvd__Proto__Request *request,
                    Kvd__Proto__Response__BodyCase expect, uint64_t deadline_ns,
                    struct control_reply *reply)
{
    int r = send_request(c, request, deadline_ns);

    if (r == -EPIPE || r == -ECONNRESET)
        return last_words(c);
    if (r < 0)
        return r;
    r = receive(c, request->id, deadline_ns, reply);
    if (r == -ETIMEDOUT)
        return fail(c, r, "the daemon at %s has not answered in time; is it stopped or overloaded?",
                    c->socket);
    if (r < 0)
        return r;
    r = check_answer(c, reply->response, expect);
    if (r < 0)
        control_reply_free(reply);
    return r;
}

int control_call(struct control *c, Kvd__Proto__Request *request,
                 Kvd__Proto__Response__BodyCase expect, uint64_t deadline_ns,
                 struct control_reply *ret_reply)
{
    struct control_reply own = {0};
    int r;

    if (!control_is_open(c))
        return fail(c, -EPIPE, "not connected to %s", c->socket);
    if (ret_reply)
        return exchange(c, request, expect, deadline_ns, ret_reply);
    r = exchange(c, request, expect, deadline_ns, &own);
    control_reply_free(&own);
    return r;
}

/* ---- connecting */

static int connect_failed(struct control *c, int err)
{
    switch (err) {
    case -ENOENT:
        return fail(c, err,
                    "no daemon: %s does not exist. Start kvd, or name its socket in KVD_SOCKET",
                    c->socket);
    case -ECONNREFUSED:
        return fail(c, err, "nobody listens at %s any more: the daemon has ended. Start kvd again",
                    c->socket);
    case -EACCES:
        return fail(c, err,
                    "uid %u may not connect to %s: join the socket's group or change its mode",
                    (unsigned)geteuid(), c->socket);
    case -EAGAIN:
        return fail(c, -ETIMEDOUT, "the daemon at %s takes no connections; is it stopped?",
                    c->socket);
    default:
        return fail(c, err, "cannot connect to %s: %s", c->socket, strerror(-err));
    }
}

/* Connecting to a full backlog waits for as long as a send would. */
static void limit_wait(int fd, uint64_t deadline_ns)
{
    uint64_t now = frame_clock();
    uint64_t us = now < deadline_ns ? (deadline_ns - now) / 1000 : 0;
    struct timeval t;

    us += !us; /* 0 would be for ever */
    t = (struct timeval){.tv_sec = (time_t)(us / 1000000), .tv_usec = (suseconds_t)(us % 1000000)};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof(t));
}

static int open_socket(struct control *c, uint64_t deadline_ns, int *ret_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), err;

    if (fd < 0)
        return connect_failed(c, -errno);
    strcpy(address.sun_path, c->socket);
    limit_wait(fd, deadline_ns);
    while (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        if (errno == EINTR && frame_clock() < deadline_ns)
            continue;
        err = errno == EINTR ? -EAGAIN : -errno;
        close(fd);
        return connect_failed(c, err);
    }
    *ret_fd = fd;
    return 0;
}

static void install(struct control *c, int fd)
{
    int old;

    pthread_mutex_lock(&c->send_lock);
    old = atomic_exchange(&c->fd, fd);
    if (old >= 0 && old != fd) /* the same: somebody has closed ours, and we got its number again */
        close(old);
    frame_reader_destroy(&c->reader);
    frame_reader_init(&c->reader, RECEIVE_MAX, FRAME_MAX_FDS);
    atomic_store(&c->wake_wanted, false);
    atomic_store(&c->open, true);
    pthread_mutex_unlock(&c->send_lock);
}

/* Field 22 of /proc/self/stat; 0: unknown. The second field, a name in parentheses, may hold
 * anything. */
static uint64_t start_time(void)
{
    char text[1024], *p;
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    p = strrchr(text, ')');
    for (int field = 2; p && field < 22; field++) {
        p = strchr(p, ' ');
        if (p)
            p++;
    }
    return p ? strtoull(p, NULL, 10) : 0;
}

static int say_hello(struct control *c, uint64_t deadline_ns, struct control_reply *reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Hello hello = KVD__PROTO__HELLO__INIT;

    hello.version_min = CONTROL_VERSION_MIN;
    hello.version_max = CONTROL_VERSION_MAX;
    hello.client = c->client;
    hello.has_engine_token = c->options.engine_token_len > 0;
    hello.engine_token.data = c->token;
    hello.engine_token.len = c->options.engine_token_len;
    hello.start_time = start_time();
    hello.has_start_time = hello.start_time != 0;
    hello.has_shm = 1;
    hello.shm = c->options.shm;
    hello.has_ring_entries = c->options.shm;
    hello.ring_entries = c->options.ring_entries;
    hello.has_resume = c->cookie_len > 0;
    hello.resume.data = c->cookie;
    hello.resume.len = c->cookie_len;
    request.body_case = KVD__PROTO__REQUEST__BODY_HELLO;
    request.hello = &hello;
    return control_call(c, &request, KVD__PROTO__RESPONSE__BODY_HELLO, deadline_ns, reply);
}

static int check_hello(struct control *c, const Kvd__Proto__HelloReply *h, unsigned n_fds)
{
    if (h->version < CONTROL_VERSION_MIN || h->version > CONTROL_VERSION_MAX)
        return fail(c, -EPROTO,
                    "the daemon speaks version %u of the protocol, this program %u to %u",
                    h->version, CONTROL_VERSION_MIN, CONTROL_VERSION_MAX);
    if (h->instance.len != sizeof(c->hello.instance) || h->cookie.len > COOKIE_MAX || h->role < 1 ||
        h->role > 3)
        return fail(c, -EPROTO, "the daemon's greeting makes no sense");
    if (n_fds != (c->options.shm ? 2u : 0u))
        return fail(c, -EPROTO, "the daemon's greeting came with %u descriptors", n_fds);
    if (h->resumed && (!c->cookie_len || h->session != c->hello.session))
        return fail(c, -EPROTO, "the daemon took up another session than ours");
    return 0;
}

static size_t bounded(bool has, uint64_t value, size_t fallback, size_t most)
{
    if (!has || !value)
        value = fallback;
    return value < most ? (size_t)value : most;
}

static void note_hello(struct control *c, const Kvd__Proto__HelloReply *h)
{
    struct control_hello *n = &c->hello;

    memcpy(n->instance, h->instance.data, sizeof(n->instance));
    n->session = h->session;
    n->role = h->role;
    n->resumed = h->resumed;
    n->max_frame = bounded(h->has_max_frame_bytes, h->max_frame_bytes, 1 << 20, RECEIVE_MAX);
    if (n->max_frame < 2 * ENVELOPE)
        n->max_frame = 2 * ENVELOPE;
    n->max_inline =
        bounded(h->has_max_inline_bytes, h->max_inline_bytes, 64 << 10, n->max_frame - ENVELOPE);
    snprintf(n->daemon, sizeof(n->daemon), "%s", h->daemon ? h->daemon : "");
    if (!h->has_cookie)
        c->cookie_len = 0;
    else if (h->cookie.len) {
        memcpy(c->cookie, h->cookie.data, h->cookie.len);
        c->cookie_len = h->cookie.len;
    }
}

static int greeting_failed(struct control *c, int err)
{
    if (err == -EPIPE || err == -ECONNRESET)
        return fail(c, -ENOTCONN,
                    "%s closed the connection without an answer: it is stopping, or it is "
                    "not kvd",
                    c->socket);
    return err == -EPROTONOSUPPORT ? -EPROTO : err; /* no common version; the daemon has said it */
}

static int greet(struct control *c, uint64_t deadline_ns, struct control_reply *reply)
{
    int r = say_hello(c, deadline_ns, reply);

    if (r < 0) {
        lose(c);
        return greeting_failed(c, r);
    }
    r = check_hello(c, reply->response->hello, reply->n_fds);
    if (r < 0) {
        lose(c);
        control_reply_free(reply);
        return r;
    }
    note_hello(c, reply->response->hello);
    return 0;
}

int control_connect(struct control *c, uint64_t deadline_ns, struct control_reply *ret_reply)
{
    struct control_reply own = {0};
    int fd = -1, r = open_socket(c, deadline_ns, &fd);

    if (r < 0)
        return r;
    install(c, fd);
    if (ret_reply)
        return greet(c, deadline_ns, ret_reply);
    r = greet(c, deadline_ns, &own);
    control_reply_free(&own);
    return r;
}
