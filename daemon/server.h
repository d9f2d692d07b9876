/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control sockets and their connections: who may come in, frames in and out, and the limits that
 * keep a hostile, slow or silent peer from harming anybody but itself.
 *
 * A socket has a role and a list of spaces; its mode and group decide who can connect. A connection
 * carries requests to server_ops.request in order and takes answers with conn_reply() and
 * conn_event(), at any time, in any order, never blocking.
 *
 * Limits. What a peer breaks ends that one connection, with a last response of id 0 that says why:
 * a frame over max_frame_bytes, one that is not a Request, descriptors, no first request, or no rest
 * of a request that has begun, within first_request_ns. While more than a quarter of max_queue_bytes waits to be sent, the connection's
 * requests wait too; answers beyond max_queue_bytes end it. In one turn of the loop a connection
 * gets requests_per_turn requests.
 *
 * Ends. conn_close() and conn_finish() may be called anywhere, also from inside server_ops.request.
 * A connection, however it ends, is given to server_ops.closed exactly once, from the loop (or from
 * server_free()) and never from inside a conn_ function; until then its pointer is good and its
 * functions answer -ENOTCONN.
 */
#ifndef KVD_DAEMON_SERVER_H
#define KVD_DAEMON_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "loop.h"
#include "proto/kvd.pb-c.h"

struct server;
struct conn;

/* As in HelloReply.role. Each role may do what the ones before it may. */
enum server_role {
    SERVER_READER = 1,
    SERVER_WRITER = 2,
    SERVER_ADMIN = 3,
};

/* A socket as configured. Strings and arrays are the caller's and outlive the server. */
struct server_socket {
    const char *path; /* absolute */
    enum server_role role;
    const char *const *spaces; /* name patterns, for the dispatcher */
    size_t n_spaces;
    mode_t mode;
    gid_t group;       /* (gid_t)-1: as it comes */
    const uid_t *uids; /* allowed ones; n_uids 0: whoever the mode lets in */
    size_t n_uids;
    unsigned max_connections;
};

struct server_ops {
    /* The request is good until this returns. body_case 0: a request this version does not know. */
    void (*request)(void *ctx, struct conn *conn, const Kvd__Proto__Request *request);
    /* The last that is heard of conn, also of one that never sent a request. */
    void (*closed)(void *ctx, struct conn *conn);
    /* For the log: why a socket cannot be opened, a peer was refused or a connection ended. May be
     * NULL; conn may be NULL. */
    void (*note)(void *ctx, const struct conn *conn, int status, const char *message);
};

/* System calls that a test wants to fail. */
struct server_sys {
    int (*accept4)(int sock, struct sockaddr *addr, socklen_t *len, int flags);
    int (*getsockopt)(int sock, int level, int name, void *value, socklen_t *len);
    int (*pidfd_open)(pid_t pid, unsigned flags);
};

/* A field that is 0 or NULL takes its default. */
struct server_options {
    struct loop *loop;            /* no default */
    const struct server_ops *ops; /* no default */
    void *ctx;
    size_t max_frame_bytes;     /* of requests and answers; 1 MiB + 64 KiB */
    size_t max_queue_bytes;     /* 8 MiB */
    uint64_t first_request_ns;  /* 10 s; also of half a request, and how long conn_finish() waits */
    unsigned requests_per_turn; /* 16 */
    const int *inherited;       /* listening sockets from the service manager */
    size_t n_inherited;
    struct server_sys sys;
};

struct server_stats {
    uint64_t accepted;
    uint64_t refused;         /* by uid, PID namespace, connection limit or lack of descriptors */
    uint64_t requests;        /* given to ops.request */
    uint64_t protocol_errors; /* connections ended for what they sent */
    uint64_t silent;          /* ended without a first request, or in the middle of one */
    uint64_t overflowed;      /* ended because they did not read */
};

/* Takes the lock file of a runtime directory, and writes our pid into it, so that of two daemons
 * that start at once only one goes on. Closing the descriptor (or dying) gives it back.
 * -EADDRINUSE: another one has it; *ret_holder is its pid, 0 when it cannot be read. */
int server_lock(const char *runtime_dir, int *ret_fd, pid_t *ret_holder);

int server_new(const struct server_options *options, struct server **ret_server);

/* Ends and gives to ops.closed all connections, removes the sockets. Not from inside a callback. */
void server_free(struct server *server);

/* Listens on a socket: on the inherited one bound to this path, if there is one; else makes it. A
 * socket file that nobody listens on any more is replaced. -EADDRINUSE: somebody listens;
 * -ENOTSOCK: the path is something else; -EINVAL, -ENAMETOOLONG: no path for a socket; or what a
 * system call said. */
int server_listen(struct server *server, const struct server_socket *socket);

/* Closes the listening sockets and removes their files; connections go on. */
void server_stop_listening(struct server *server);

/* Connections of one socket (NULL: of all). */
unsigned server_connections(const struct server *server, const struct server_socket *socket);
const struct server_stats *server_stats(const struct server *server);

/* conn_event() to all connections that have sent a request. */
void server_event(struct server *server, Kvd__Proto__Event__Kind kind);

/* ---- connections */

/* Sends an answer; fills in response->fds. The descriptors stay the caller's. Those sent but not
 * yet read by the peer are limited. -ENOTCONN: the connection has ended, now or before; -EMSGSIZE:
 * the answer is too long, nothing was sent; -EMFILE, -EBADF, -EINVAL, -ENOMEM: nothing was sent. */
int conn_reply(struct conn *conn, const Kvd__Proto__Response *response, const int *fds,
               unsigned n_fds);

/* A response without a body. message may be NULL. */
int conn_status(struct conn *conn, uint64_t id, int status, const char *message);

/* Wakes the peer. One event of a kind that waits to be sent is enough. 0, -ENOTCONN, -ENOMEM. */
int conn_event(struct conn *conn, Kvd__Proto__Event__Kind kind);

/* Ends the connection at once. */
void conn_close(struct conn *conn);

/* Takes no more requests, and ends when what waits has been sent or the peer has had its time. */
void conn_finish(struct conn *conn);

/* The dispatcher's own; NULL at first. */
void conn_set_user(struct conn *conn, void *user);
void *conn_user(const struct conn *conn);

/* Never 0, never reused by a server. */
uint64_t conn_id(const struct conn *conn);
bool conn_is_open(const struct conn *conn);
const struct server_socket *conn_socket(const struct conn *conn);

/* The process that called connect(), at that moment: a child may be using its socket. */
pid_t conn_pid(const struct conn *conn);
uid_t conn_uid(const struct conn *conn);
gid_t conn_gid(const struct conn *conn);

/* Field 22 of /proc/PID/stat, to compare with what the client says of itself; 0: unreadable. */
uint64_t conn_start_time(const struct conn *conn);

/* The process's pidfd, which is then the caller's; -1 when it was taken before. */
int conn_take_pidfd(struct conn *conn);

/* Loop time of the last byte received, or of the accept. */
uint64_t conn_last_activity(const struct conn *conn);

#endif
