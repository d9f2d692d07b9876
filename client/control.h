/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client's end of a control connection: connect, hello, calls with a deadline. Used by the
 * library and by kvctl.
 *
 *     struct control_options o = {.client = "kvctl"};
 *     struct control_reply reply;
 *     struct control *c;
 *
 *     r = control_new(&o, &c);                            // no I/O yet
 *     r = control_connect(c, control_deadline(10000), NULL);
 *
 *     Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
 *     Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
 *     request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
 *     request.status = &status;
 *     r = control_call(c, &request, KVD__PROTO__RESPONSE__BODY_STATUS_REPLY,
 *                      control_deadline(10000), &reply);
 *     if (r < 0)
 *         puts(control_error(c));                         // the daemon's sentence, or ours
 *     else
 *         ... reply.response->status_reply ...
 *     control_reply_free(&reply);                         // only after success; closes descriptors
 *
 *     control_free(c);
 *
 * A control belongs to one thread at a time, except control_post(), control_wake(),
 * control_is_open() and control_fd(), which any thread may call at any time.
 *
 * What comes from the daemon is checked here as far as it concerns the envelope: frame lengths,
 * number of descriptors, kind of the answer. A peer that breaks the protocol loses the connection
 * (-EPROTO).
 */
#ifndef KVD_CLIENT_CONTROL_H
#define KVD_CLIENT_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/kvd.pb-c.h"

#define CONTROL_VERSION_MIN 1u
#define CONTROL_VERSION_MAX 1u
#define CONTROL_SOCKET      "/run/kvd/kvd.sock"
#define CONTROL_TOKEN_MAX   64u

struct control;

/* Copied by control_new(). */
struct control_options {
    const char *socket; /* NULL: $KVD_SOCKET, else CONTROL_SOCKET */
    const char *client; /* NULL: the program's name */
    const void *engine_token;
    size_t engine_token_len;
    bool shm; /* ask for a session segment */
    uint32_t ring_entries;

    /* A response that nobody waits for: its call has timed out, or it was posted. NULL: ignored. */
    void (*late)(void *arg, const Kvd__Proto__Response *response);
    void *arg;
};

/* What the daemon said of itself and us. */
struct control_hello {
    uint8_t instance[16];
    uint32_t session;
    uint32_t role;     /* 1 reader, 2 writer, 3 admin */
    bool resumed;      /* the session of the connection before was taken up again */
    size_t max_inline; /* bytes of data in one message */
    size_t max_frame;
    char daemon[64]; /* name and version, may be empty */
};

struct control_reply {
    const Kvd__Proto__Response *response;
    unsigned n_fds;
    int fds[FRAME_MAX_FDS]; /* -1: taken */
    Kvd__Proto__ServerFrame *frame;
    struct frame_budget budget; /* points to itself: do not copy a reply */
};

/* Deadline that many milliseconds from now. */
uint64_t control_deadline(uint32_t timeout_ms);

/* -EINVAL: the token or the socket's path is too long; -ENOMEM. */
int control_new(const struct control_options *options, struct control **ret_control);

/* NULL is fine. Just closes: see Bye. */
void control_free(struct control *c);

/* Connects and says hello; may be called again whenever the connection is lost, and then asks to
 * take the session up again. With `shm` the reply has two descriptors: core segment, session
 * segment; without, `ret_reply` may be NULL. -ENOENT, -ECONNREFUSED: no daemon there; -EACCES: the
 * socket's mode; -EPROTO: not kvd or no common version; -ENOTCONN: closed without an answer;
 * -ETIMEDOUT; or as the daemon refused. */
int control_connect(struct control *c, uint64_t deadline_ns, struct control_reply *ret_reply);

/* Of the last successful control_connect(). */
const struct control_hello *control_hello(const struct control *c);

/*
 * One request, one response. request->id is filled in: its lower half is a number, its upper half
 * the caller's (it comes back to options.late). `expect` is the body of a successful answer, or
 * KVD__PROTO__RESPONSE__BODY__NOT_SET when there is none or it does not matter. `ret_reply` may be
 * NULL.
 *
 * 0: *ret_reply is set. Negative with control_is_open(): the daemon's refusal, or
 *   -ETIMEDOUT   no answer in time
 *   -EMSGSIZE    the request is longer than the daemon takes
 * Negative without control_is_open():
 *   -EPIPE       the connection was dead, the request has not been received
 *   -ECONNRESET  it died afterwards: nobody knows whether the request was carried out
 *   -EPROTO      the peer breaks the protocol
 *   -ETIMEDOUT   the request could not be sent in time
 *   other        why the daemon has ended the connection
 */
int control_call(struct control *c, Kvd__Proto__Request *request,
                 Kvd__Proto__Response__BodyCase expect, uint64_t deadline_ns,
                 struct control_reply *ret_reply);

/* Makes the caller the owner of descriptor i; -1: there is none. */
int control_take_fd(struct control_reply *reply, unsigned i);

/* NULL is fine. */
void control_reply_free(struct control_reply *reply);

/* Waits until the daemon has sent something that is not an answer to a call, and takes it: 0;
 * -ETIMEDOUT; or the connection is lost. */
int control_wait(struct control *c, uint64_t deadline_ns);

/* Takes all that has arrived, without blocking: 0, or the connection is lost. */
int control_drain(struct control *c);

/* Sends a small request (<= 64 KiB) without waiting, neither for room nor for the answer: 0; -EAGAIN: no room,
 * nothing was sent; or the connection is lost. */
int control_post(struct control *c, Kvd__Proto__Request *request);

/* Wakes the daemon: one system call, no allocation. Never blocks: while another thread is sending,
 * that thread will do it. A full socket is fine, what waits there wakes the daemon too. 0 or
 * -EPIPE. */
int control_wake(struct control *c);

/* Ends the connection; the descriptor stays (at the end of its stream) until the next connection.
 */
void control_hang_up(struct control *c);

bool control_is_open(const struct control *c);

/* The socket, -1 before the first connection. It changes when control_connect() succeeds. */
int control_fd(const struct control *c);

/* Path of the socket. */
const char *control_socket(const struct control *c);

/* Why the last call failed, a sentence with advice; never NULL. */
const char *control_error(const struct control *c);

#endif
