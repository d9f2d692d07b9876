/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "frame.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    BUFFER_MIN = 4096,        /* an idle reader keeps no more than this */
    ALLOCATION_OVERHEAD = 16, /* of malloc(), so that a million tiny objects are not nearly free */
    SEND_FRAMES = 16,         /* per sendmsg() */
    SEND_CALLS = 8,           /* per flush: a fast reader must not keep the caller here */
};

static uint32_t get_le32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void put_le32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static void close_fds(const int *fds, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* ---- control messages */

/* Collects the descriptors of one SCM_RIGHTS message, and closes those that are too many. */
static int collect_rights(const struct cmsghdr *c, int fds[FRAME_MAX_FDS], unsigned *n)
{
    size_t bytes = c->cmsg_len - CMSG_LEN(0);
    int err = bytes == 0 || bytes % sizeof(int) != 0 ? -EPROTO : 0;

    for (size_t i = 0; i < bytes / sizeof(int); i++) {
        int fd;

        memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
        if (*n < FRAME_MAX_FDS) {
            fds[(*n)++] = fd;
            continue;
        }
        close_fds(&fd, 1);
        err = -EPROTO;
    }
    return err;
}

/* Walks on after an error: a descriptor that is not seen is a descriptor that leaks. */
static int collect(struct msghdr *msg, int fds[FRAME_MAX_FDS], unsigned *n)
{
    int err = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t room = (size_t)((char *)msg->msg_control + msg->msg_controllen - (char *)c);

        if (c->cmsg_len < CMSG_LEN(0) || c->cmsg_len > room)
            return -EPROTO;
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            err = -EPROTO;
        else if (collect_rights(c, fds, n) < 0)
            err = -EPROTO;
    }
    return err;
}

int frame_take_control(struct msghdr *msg, unsigned max_fds, int fds[FRAME_MAX_FDS],
                       unsigned *ret_n)
{
    unsigned n = 0;
    int err = msg->msg_control ? collect(msg, fds, &n) : 0;

    if (!err && (n > max_fds || msg->msg_flags & MSG_TRUNC))
        err = -EPROTO;
    /* Our buffer holds all that one message may carry. What was cut off found no place in the
     * descriptor table; or, without a buffer, nothing was allowed in the first place. */
    if (!err && msg->msg_flags & MSG_CTRUNC)
        err = max_fds ? -EMFILE : -EPROTO;
    if (err) {
        close_fds(fds, n);
        return err;
    }
    *ret_n = n;
    return 0;
}

/* ---- receiving */

static void drop_fds(struct frame_fds *f)
{
    close_fds(f->fds, f->n);
    free(f->fds);
    *f = (struct frame_fds){0};
}

void frame_reader_init(struct frame_reader *reader, size_t max_frame, unsigned max_fds)
{
    *reader = (struct frame_reader){
        .max_frame = max_frame,
        .max_fds = max_fds < FRAME_MAX_FDS ? max_fds : FRAME_MAX_FDS,
        .recvmsg = recvmsg,
    };
}

void frame_reader_destroy(struct frame_reader *reader)
{
    if (!reader)
        return;
    drop_fds(&reader->current);
    for (unsigned i = 0; i < reader->n_waiting; i++)
        drop_fds(&reader->waiting[i]);
    free(reader->buf);
    reader->buf = NULL;
    reader->off = reader->len = reader->cap = 0;
    reader->n_waiting = 0;
}

/* Length of the message that begins at buf[off]: 1 complete, 0 not yet, or an error. */
static int peek_length(const struct frame_reader *reader, size_t off, size_t *ret_len)
{
    size_t len;

    if (reader->len - off < FRAME_HEADER)
        return 0;
    len = get_le32(reader->buf + off);
    if (len == 0)
        return -EPROTO;
    if (len > reader->max_frame)
        return -EMSGSIZE;
    *ret_len = len;
    return reader->len - off - FRAME_HEADER >= len;
}

bool frame_reader_ready(const struct frame_reader *reader)
{
    size_t len;

    return peek_length(reader, reader->off, &len) != 0;
}

/* Moves what waits to the front and gives memory back that a long frame needed. Best effort: a
 * failed realloc() to less leaves a good buffer. */
static void compact(struct frame_reader *reader)
{
    size_t n = reader->len - reader->off;
    uint8_t *p;

    if (reader->off > 0 && n > 0)
        memmove(reader->buf, reader->buf + reader->off, n);
    reader->off = 0;
    reader->len = n;
    if (reader->cap <= BUFFER_MIN || n > reader->cap / 4)
        return;
    p = realloc(reader->buf, n > BUFFER_MIN ? n : BUFFER_MIN);
    if (!p)
        return;
    reader->buf = p;
    reader->cap = n > BUFFER_MIN ? n : BUFFER_MIN;
}

/* Doubling bounds the buffer by twice what has really arrived. */
static int grow(struct frame_reader *reader)
{
    size_t most = reader->max_frame + FRAME_HEADER;
    size_t cap = reader->cap ? reader->cap * 2 : BUFFER_MIN;
    uint8_t *p;

    if (reader->len < reader->cap)
        return 0;
    if (most < BUFFER_MIN)
        most = BUFFER_MIN;
    if (cap > most)
        cap = most;
    p = realloc(reader->buf, cap);
    if (!p)
        return -ENOMEM;
    reader->buf = p;
    reader->cap = cap;
    return 0;
}

/* Offset in buf of the last frame that begins at or after `from`, or -1. */
static ssize_t last_start(const struct frame_reader *reader, size_t from)
{
    size_t at = reader->off, len;
    ssize_t found = -1;

    while (at < reader->len) {
        if (at >= from)
            found = (ssize_t)at;
        if (peek_length(reader, at, &len) <= 0)
            break;
        at += FRAME_HEADER + len;
    }
    return found;
}

/* Descriptors came with the bytes from buf[from] on. */
static int attach_fds(struct frame_reader *reader, size_t from, const int *fds, unsigned n)
{
    ssize_t at = last_start(reader, from);
    struct frame_fds *f;

    if (at < 0 || reader->n_waiting == 2) {
        close_fds(fds, n);
        return -EPROTO;
    }
    f = &reader->waiting[reader->n_waiting];
    f->fds = malloc(n * sizeof(int));
    if (!f->fds) {
        close_fds(fds, n);
        return -ENOMEM;
    }
    memcpy(f->fds, fds, n * sizeof(int));
    f->n = n;
    f->at = reader->at + ((size_t)at - reader->off);
    reader->n_waiting++;
    return 0;
}

static ssize_t receive(struct frame_reader *reader, int sock, struct msghdr *msg)
{
    ssize_t n;

    do
        n = reader->recvmsg(sock, msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

ssize_t frame_reader_fill(struct frame_reader *reader, int sock)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * FRAME_MAX_FDS)];
    } control;
    struct iovec iov;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    int fds[FRAME_MAX_FDS], err;
    unsigned n_fds = 0;
    size_t from = reader->len;
    ssize_t n;

    if (frame_reader_ready(reader))
        return -EINVAL;
    drop_fds(&reader->current);
    err = grow(reader);
    if (err)
        return err;
    iov = (struct iovec){reader->buf + reader->len, reader->cap - reader->len};
    if (reader->max_fds) {
        msg.msg_control = &control;
        msg.msg_controllen = sizeof(control);
    }
    n = receive(reader, sock, &msg);
    if (n < 0)
        return n;
    err = frame_take_control(&msg, reader->max_fds, fds, &n_fds);
    if (err)
        return err;
    reader->len += (size_t)n;
    if (n_fds)
        err = attach_fds(reader, from, fds, n_fds);
    return err ? err : n;
}

/* Descriptors wait in stream order, so those of this frame can only be the first. */
static void claim_fds(struct frame_reader *reader)
{
    if (!reader->n_waiting || reader->waiting[0].at != reader->at)
        return;
    reader->current = reader->waiting[0];
    reader->waiting[0] = reader->waiting[1];
    reader->n_waiting--;
}

int frame_reader_next(struct frame_reader *reader, struct frame *ret_frame)
{
    size_t len;
    int r;

    drop_fds(&reader->current);
    r = peek_length(reader, reader->off, &len);
    if (r == 0)
        compact(reader);
    if (r <= 0)
        return r;
    claim_fds(reader);
    *ret_frame = (struct frame){
        .data = reader->buf + reader->off + FRAME_HEADER,
        .len = len,
        .fds = reader->current.fds,
        .n_fds = reader->current.n,
    };
    reader->off += FRAME_HEADER + len;
    reader->at += FRAME_HEADER + len;
    return 1;
}

int frame_take_fd(struct frame *frame, unsigned i)
{
    int fd;

    if (i >= frame->n_fds)
        return -1;
    fd = frame->fds[i];
    frame->fds[i] = -1;
    return fd;
}

/* ---- unpacking */

static void *budget_alloc(void *data, size_t size)
{
    struct frame_budget *budget = data;

    if (budget->left < ALLOCATION_OVERHEAD || size > budget->left - ALLOCATION_OVERHEAD) {
        budget->spent = true;
        return NULL;
    }
    budget->left -= size + ALLOCATION_OVERHEAD;
    return malloc(size);
}

static void budget_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

void frame_budget_init(struct frame_budget *budget, size_t bytes)
{
    *budget = (struct frame_budget){
        .allocator = {.alloc = budget_alloc, .free = budget_free, .allocator_data = budget},
        .left = bytes,
    };
}

int frame_unpack(const ProtobufCMessageDescriptor *type, const void *data, size_t len,
                 struct frame_budget *budget, ProtobufCMessage **ret_message)
{
    ProtobufCMessage *m = protobuf_c_message_unpack(type, &budget->allocator, len, data);

    if (!m)
        return budget->spent ? -EMSGSIZE : -EBADMSG;
    *ret_message = m;
    return 0;
}

void frame_unpack_free(ProtobufCMessage *message, struct frame_budget *budget)
{
    if (message)
        protobuf_c_message_free_unpacked(message, &budget->allocator);
}

/* ---- sending */

static void close_out_fds(struct frame_out *out)
{
    close_fds(out->fds, out->n_fds);
    free(out->fds);
    out->fds = NULL;
    out->n_fds = 0;
}

void frame_out_free(struct frame_out *out)
{
    if (!out)
        return;
    close_out_fds(out);
    free(out);
}

static int duplicate_fds(struct frame_out *out, const int *fds, unsigned n)
{
    out->fds = malloc(n * sizeof(int));
    if (!out->fds)
        return -ENOMEM;
    for (; out->n_fds < n; out->n_fds++) {
        int fd = fcntl(fds[out->n_fds], F_DUPFD_CLOEXEC, 0);

        if (fd < 0)
            return -errno;
        out->fds[out->n_fds] = fd;
    }
    return 0;
}

int frame_out_new(const ProtobufCMessage *message, size_t max_frame, const int *fds, unsigned n_fds,
                  struct frame_out **ret_out)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    struct frame_out *out;
    int err = 0;

    if (len == 0 || n_fds > FRAME_MAX_FDS)
        return -EINVAL;
    if (len > max_frame || len > UINT32_MAX)
        return -EMSGSIZE;
    out = malloc(sizeof(*out) + FRAME_HEADER + len);
    if (!out)
        return -ENOMEM;
    *out = (struct frame_out){.len = FRAME_HEADER + len};
    put_le32(out->data, (uint32_t)len);
    protobuf_c_message_pack(message, out->data + FRAME_HEADER);
    if (n_fds)
        err = duplicate_fds(out, fds, n_fds);
    if (err) {
        frame_out_free(out);
        return err;
    }
    *ret_out = out;
    return 0;
}

static size_t footprint(const struct frame_out *out)
{
    return sizeof(*out) + out->len;
}

void frame_queue_init(struct frame_queue *queue)
{
    *queue = (struct frame_queue){.sendmsg = sendmsg};
}

void frame_queue_push(struct frame_queue *queue, struct frame_out *out)
{
    out->next = NULL;
    if (queue->last)
        queue->last->next = out;
    else
        queue->first = out;
    queue->last = out;
    queue->bytes += footprint(out);
    if (out->tag)
        queue->tags |= UINT32_C(1) << out->tag;
}

static void pop(struct frame_queue *queue)
{
    struct frame_out *out = queue->first;

    queue->first = out->next;
    if (!queue->first)
        queue->last = NULL;
    queue->bytes -= footprint(out);
    if (out->tag)
        queue->tags &= ~(UINT32_C(1) << out->tag);
    frame_out_free(out);
}

void frame_queue_clear(struct frame_queue *queue)
{
    while (queue->first)
        pop(queue);
}

/* Bytes of the frames that may share one sendmsg(): none with descriptors but the first, and that
 * one alone (the receiver's rule for whom descriptors belong to). */
static int gather(const struct frame_queue *queue, struct iovec iov[SEND_FRAMES])
{
    int n = 0;

    for (struct frame_out *out = queue->first; out && n < SEND_FRAMES; out = out->next) {
        if (n > 0 && out->n_fds)
            break;
        iov[n++] = (struct iovec){out->data + out->sent, out->len - out->sent};
        if (out->n_fds)
            break;
    }
    return n;
}

static void advance(struct frame_queue *queue, size_t n)
{
    while (n > 0) {
        struct frame_out *out = queue->first;
        size_t left = out->len - out->sent;

        close_out_fds(out);
        if (n < left) {
            out->sent += n;
            return;
        }
        n -= left;
        pop(queue);
    }
}

static void put_rights(struct msghdr *msg, void *space, const int *fds, unsigned n)
{
    struct cmsghdr *c;

    msg->msg_control = space;
    msg->msg_controllen = CMSG_SPACE(n * sizeof(int));
    memset(space, 0, msg->msg_controllen);
    c = CMSG_FIRSTHDR(msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
}

static int send_some(struct frame_queue *queue, int sock)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int) * FRAME_MAX_FDS)];
    } control;
    struct iovec iov[SEND_FRAMES];
    struct msghdr msg = {.msg_iov = iov};
    const struct frame_out *out = queue->first;
    ssize_t n;

    msg.msg_iovlen = (size_t)gather(queue, iov);
    if (out->n_fds)
        put_rights(&msg, &control, out->fds, out->n_fds);
    do
        n = queue->sendmsg(sock, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    advance(queue, (size_t)n);
    return 0;
}

int frame_queue_flush(struct frame_queue *queue, int sock)
{
    for (int i = 0; queue->first && i < SEND_CALLS; i++) {
        int err = send_some(queue, sock);

        if (err)
            return err;
    }
    return queue->first ? -EAGAIN : 0;
}

/* ---- with a deadline */

uint64_t frame_clock(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* Rounds up, so that the last poll() of a wait does not spin through its last millisecond. */
static int remaining_ms(uint64_t deadline_ns)
{
    uint64_t now = frame_clock(), ms;

    if (now >= deadline_ns)
        return 0;
    ms = (deadline_ns - now - 1) / 1000000 + 1;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

/* A readiness that includes errors and hang-ups: the next call will tell which. */
static int wait_for(int sock, short events, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = sock, .events = events};

    for (;;) {
        int ms = remaining_ms(deadline_ns);
        int n = ms > 0 ? poll(&p, 1, ms) : 0;

        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return -errno;
        if (n == 0 && remaining_ms(deadline_ns) == 0)
            return -ETIMEDOUT;
    }
}

int frame_send_wait(int sock, struct frame_out *out, uint64_t deadline_ns)
{
    struct frame_queue queue;
    int err;

    frame_queue_init(&queue);
    frame_queue_push(&queue, out);
    while ((err = frame_queue_flush(&queue, sock)) == -EAGAIN) {
        err = wait_for(sock, POLLOUT, deadline_ns);
        if (err)
            break;
    }
    frame_queue_clear(&queue);
    return err;
}

int frame_recv_wait(int sock, struct frame_reader *reader, uint64_t deadline_ns,
                    struct frame *ret_frame)
{
    for (;;) {
        int r = frame_reader_next(reader, ret_frame);
        ssize_t n;

        if (r != 0)
            return r < 0 ? r : 0;
        n = frame_reader_fill(reader, sock);
        if (n == 0)
            return -ECONNRESET;
        if (n == -EAGAIN)
            n = wait_for(sock, POLLIN, deadline_ns);
        if (n < 0)
            return (int)n;
    }
}
