/* SPDX-License-Identifier: Apache-2.0 */
/* What server.c (sockets, accepting) and conn.c (connections) share. Nobody else includes this. */
#ifndef KVD_DAEMON_CONN_H
#define KVD_DAEMON_CONN_H

#include "list.h"
#include "loop.h"
#include "server.h"

struct listener {
    struct server *server;
    const struct server_socket *config;
    int fd; /* -1: no longer listening */
    struct loop_source *source;
    struct loop_timer *resume; /* armed while accepting is paused */
    bool starved;              /* said so already */
    bool made;                 /* we made the file, as which inode: */
    dev_t dev;
    ino_t ino;
    unsigned connections;
    struct list link; /* in server->listeners */
};

struct server {
    struct server_options options;
    struct list listeners;
    struct list conns;
    struct list waiting;      /* conns with a deadline, the earliest first */
    struct loop_timer *timer; /* of the first of them */
    int reserve_fd;           /* given up to tell a peer that there are no descriptors left */
    unsigned connections;
    uint64_t last_id;
    struct server_stats stats;
};

/* The process at the other end. pidfd is owned. */
struct peer {
    pid_t pid;
    uid_t uid;
    gid_t gid;
    int pidfd;
    uint64_t start_time;
};

/* Becomes the owner of fd and peer->pidfd only on success. */
int conn_new(struct listener *listener, int fd, const struct peer *peer);

/* Gives a closed connection to ops.closed and frees it. */
void conn_bury(struct conn *conn);

/* The first of server->waiting is overdue. */
void conn_expire(struct conn *conn);

struct conn *conn_of_list(struct list *item);
struct conn *conn_of_waiting(struct list *item);
uint64_t conn_deadline(const struct conn *conn);
bool conn_has_spoken(const struct conn *conn);

/* Arms the timer for the first of server->waiting. */
void server_arm(struct server *server);

void server_note(const struct server *server, const struct conn *conn, int status,
                 const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
