/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libFuzzer target: what a hostile peer can send. The input is cut into reads of any size, some
 * with control messages of any shape, and goes through the frame reader and the unpacking of a
 * Request, as in the daemon.
 *
 *     fuzz_frame -max_len=8192 CORPUS
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/frame.h"
#include "proto/kvd.pb-c.h"

enum {
    MAX_FRAME = 4096,
    MAX_FDS = 3,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The socket: what is left of the input. */
static const uint8_t *input;
static size_t left;

static uint8_t next_byte(void)
{
    if (left == 0)
        return 0;
    left--;
    return *input++;
}

/* Descriptors in it are all -1: nothing real may be closed here. */
static void forge_control(struct msghdr *msg)
{
    size_t at = 0;

    memset(msg->msg_control, 0xff, msg->msg_controllen);
    for (int n = next_byte() % 4; n > 0 && at + sizeof(struct cmsghdr) <= msg->msg_controllen;
         n--) {
        struct cmsghdr *c = (struct cmsghdr *)((char *)msg->msg_control + at);
        uint8_t shape = next_byte();

        c->cmsg_level = shape & 1 ? SOL_SOCKET : next_byte();
        c->cmsg_type = shape & 2 ? SCM_RIGHTS : next_byte();
        c->cmsg_len = shape & 4 ? CMSG_LEN(next_byte() % 4 * sizeof(int)) : next_byte() * 7u;
        if (shape & 8)
            c->cmsg_len = SIZE_MAX - next_byte();
        if (c->cmsg_len >= msg->msg_controllen - at)
            return;
        at += CMSG_ALIGN(c->cmsg_len); /* the next header is none of this one's descriptors */
    }
    msg->msg_controllen = at < msg->msg_controllen ? at : msg->msg_controllen;
}

static ssize_t recv_input(int sock, struct msghdr *msg, int flags)
{
    uint8_t how = next_byte();
    size_t n = how & 0x80 ? left : (size_t)(how & 0x1f) + 1;

    (void)sock, (void)flags;
    msg->msg_flags = 0;
    if (msg->msg_control && (how & 0x60) == 0x60) {
        forge_control(msg);
        msg->msg_flags = next_byte() & 1 ? MSG_CTRUNC : 0;
    } else {
        msg->msg_controllen = 0;
    }
    if (n > left)
        n = left;
    if (n > msg->msg_iov->iov_len)
        n = msg->msg_iov->iov_len;
    memcpy(msg->msg_iov->iov_base, input, n);
    input += n;
    left -= n;
    return (ssize_t)n;
}

/* What was unpacked can be packed. (Not always to the same: protobuf-c lets a field 0 in.) */
static void pack_again(const ProtobufCMessage *message)
{
    struct frame_out *out;
    int err = frame_out_new(message, 16 * MAX_FRAME, NULL, 0, &out);

    if (err)
        abort();
    frame_out_free(out);
}

static void check_frame(const struct frame *frame)
{
    struct frame_budget budget;
    ProtobufCMessage *message;

    if (frame->len == 0 || frame->len > MAX_FRAME || frame->n_fds > MAX_FDS)
        abort();
    frame_budget_init(&budget, 8 * MAX_FRAME);
    if (frame_unpack(&kvd__proto__request__descriptor, frame->data, frame->len, &budget, &message) <
        0)
        return;
    pack_again(message);
    frame_unpack_free(message, &budget);
}

static int read_frames(struct frame_reader *reader)
{
    struct frame frame;
    int r;

    while ((r = frame_reader_next(reader, &frame)) == 1)
        check_frame(&frame);
    if (frame_reader_ready(reader) != (r < 0))
        abort();
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct frame_reader reader;

    input = data;
    left = size;
    frame_reader_init(&reader, MAX_FRAME, next_byte() & 1 ? MAX_FDS : 0);
    reader.recvmsg = recv_input;
    while (frame_reader_fill(&reader, -1) > 0 && read_frames(&reader) == 0)
        if (reader.cap > FRAME_HEADER + MAX_FRAME)
            abort();
    frame_reader_destroy(&reader);
    return 0;
}
