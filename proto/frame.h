/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Framing and descriptor passing on a UNIX stream socket, for both ends of the control protocol.
 *
 * A frame is a 4-byte little-endian length and a message of that many bytes. Descriptors travel as
 * SCM_RIGHTS with the first byte of their frame, and a sendmsg() that carries descriptors carries
 * bytes of that one frame only. A receiver relies on both: the kernel may put bytes of earlier
 * frames in front of those that came with descriptors, but never bytes of a later sendmsg() behind
 * them (unix(7)), so what a read brought belongs to the last frame that begins in it.
 *
 * The peer is hostile: nothing here trusts a length, a count or a control message. A reader's
 * memory grows with the bytes that have arrived, never with a length that was announced. After any
 * negative return but -EAGAIN the stream is out of step and must be closed.
 *
 * No function blocks, except frame_*_wait().
 */
#ifndef KVD_PROTO_FRAME_H
#define KVD_PROTO_FRAME_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

enum {
    FRAME_HEADER = 4,
    FRAME_MAX_FDS = 253, /* SCM_MAX_FD: the kernel passes no more at once */
};

/* ---- receiving */

/* A received frame. It belongs to the reader and is good until the next call on that reader. */
struct frame {
    const uint8_t *data;
    size_t len;
    int *fds; /* close-on-exec; those not taken are closed by the reader */
    unsigned n_fds;
};

/* Descriptors and the frame that they came with, by its offset in the stream. */
struct frame_fds {
    uint64_t at;
    int *fds;
    unsigned n;
};

typedef ssize_t (*frame_recvmsg_fn)(int sock, struct msghdr *msg, int flags);
typedef ssize_t (*frame_sendmsg_fn)(int sock, const struct msghdr *msg, int flags);

struct frame_reader {
    uint8_t *buf;
    size_t off, len, cap;     /* buf[off, len) waits */
    uint64_t at;              /* offset of buf[off] in the stream */
    size_t max_frame;         /* longest message */
    unsigned max_fds;         /* per frame */
    struct frame_fds current; /* of the frame handed out last */
    struct frame_fds
        waiting[2]; /* one for the incomplete frame, one for a frame of the last read */
    unsigned n_waiting;
    frame_recvmsg_fn recvmsg; /* recvmsg(2); a test may put its own here */
};

/* max_fds 0: descriptors are a protocol error, and the kernel drops them before they reach our
 * table. */
void frame_reader_init(struct frame_reader *reader, size_t max_frame, unsigned max_fds);

/* Frees the buffer and closes every descriptor that was not taken. */
void frame_reader_destroy(struct frame_reader *reader);

/* One recvmsg(), only after frame_reader_next() returned 0. The number of bytes read, 0 at the end
 * of the stream (in the middle of a frame when frame_reader_idle() is false), or -EAGAIN nothing
 * there now; -EPROTO a control message that may not be (any descriptor when max_fds is 0, too many,
 * in the middle of a frame, another kind); -EMFILE the descriptor table is full; -ENOMEM; -EINVAL a
 * complete frame still waits; or what recvmsg() said. On failure what came is closed. */
ssize_t frame_reader_fill(struct frame_reader *reader, int sock);

/* 1 and the next frame; 0 none is complete; -EMSGSIZE longer than max_frame; -EPROTO length 0. */
int frame_reader_next(struct frame_reader *reader, struct frame *ret_frame);

/* Whether frame_reader_next() would return something other than 0. */
bool frame_reader_ready(const struct frame_reader *reader);

/* No byte waits. */
static inline bool frame_reader_idle(const struct frame_reader *reader)
{
    return reader->off == reader->len;
}

/* Makes the caller the owner of descriptor i; -1 when it is already taken or there is none. */
int frame_take_fd(struct frame *frame, unsigned i);

/* What recvmsg() left in msg: up to max_fds descriptors into fds. All are closed on failure.
 * Exposed for tests and fuzzing. */
int frame_take_control(struct msghdr *msg, unsigned max_fds, int fds[FRAME_MAX_FDS],
                       unsigned *ret_n);

/* ---- unpacking */

/* An allocator with a cap on all that is ever asked of it. Freeing gives nothing back: merging
 * repeated submessages copies arrays again and again, and the cap must bound that work too, not
 * just memory. */
struct frame_budget {
    ProtobufCAllocator allocator;
    size_t left;
    bool spent; /* something was refused */
};

void frame_budget_init(struct frame_budget *budget, size_t bytes);

/* -EBADMSG: not such a message, or a required field is missing; -EMSGSIZE: it needs more than the
 * budget. The message is freed with frame_unpack_free() and the same budget. */
int frame_unpack(const ProtobufCMessageDescriptor *type, const void *data, size_t len,
                 struct frame_budget *budget, ProtobufCMessage **ret_message);
void frame_unpack_free(ProtobufCMessage *message, struct frame_budget *budget);

/* ---- sending */

/* A frame on its way out, with its own duplicates of the descriptors. */
struct frame_out {
    struct frame_out *next;
    size_t len, sent; /* of data, header included */
    int *fds;         /* closed as soon as the first byte is sent */
    unsigned n_fds;
    unsigned tag; /* 0..31; 0: none */
    uint8_t data[];
};

/* Packs a message; the caller keeps its descriptors. -EMSGSIZE: longer than max_frame; -EINVAL:
 * empty, or more than FRAME_MAX_FDS descriptors; -EMFILE, -EBADF: they cannot be duplicated;
 * -ENOMEM. */
int frame_out_new(const ProtobufCMessage *message, size_t max_frame, const int *fds, unsigned n_fds,
                  struct frame_out **ret_out);
void frame_out_free(struct frame_out *out);

struct frame_queue {
    struct frame_out *first, *last;
    size_t bytes;  /* of memory held */
    uint32_t tags; /* bit per tag in the queue */
    frame_sendmsg_fn sendmsg;
};

void frame_queue_init(struct frame_queue *queue);

/* Frees everything that was not sent. */
void frame_queue_clear(struct frame_queue *queue);

/* The queue becomes the owner of out. A tag may be in a queue once: see frame_queue_tagged(). */
void frame_queue_push(struct frame_queue *queue, struct frame_out *out);

static inline bool frame_queue_empty(const struct frame_queue *queue)
{
    return !queue->first;
}

static inline bool frame_queue_tagged(const struct frame_queue *queue, unsigned tag)
{
    return queue->tags & (UINT32_C(1) << tag);
}

/* Sends what the socket takes, but not for ever: 0 the queue is empty, -EAGAIN something is left
 * (wait for POLLOUT), else what sendmsg() said. Never raises SIGPIPE. */
int frame_queue_flush(struct frame_queue *queue, int sock);

/* ---- with a deadline, for a client */

/* CLOCK_MONOTONIC in nanoseconds, the clock of deadlines. */
uint64_t frame_clock(void);

/* Sends out, whose owner it becomes in any case. -ETIMEDOUT: the stream may be cut in the middle of
 * the frame: close it. On -EPIPE the peer may have said why before it closed: frame_recv_wait() has
 * it. */
int frame_send_wait(int sock, struct frame_out *out, uint64_t deadline_ns);

/* 0 and a frame; -ETIMEDOUT (the stream is still good); -ECONNRESET at the end of the stream; or as
 * frame_reader_fill() and frame_reader_next(). What has arrived is looked at even after the
 * deadline. */
int frame_recv_wait(int sock, struct frame_reader *reader, uint64_t deadline_ns,
                    struct frame *ret_frame);

#endif
