/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What drives the core: the loop's hooks (rings, background work, sleeping), the pidfds of attached
 * processes, and the requests of the control sockets. All three end in the same core functions.
 */
#ifndef KVD_DAEMON_SERVICE_H
#define KVD_DAEMON_SERVICE_H

#include <stdint.h>

#include "daemon/core.h"
#include "daemon/log.h"
#include "daemon/loop.h"
#include "daemon/server.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "proto/frame.h"

struct service {
    struct core *core;
    struct loop *loop;
    struct server *server;
    struct log *log;
    const struct server_socket *sockets;
    size_t n_sockets;
    const char *hugepages;  /* the configured mode, for status */
    uint64_t spin_ns;       /* how long the core looks at the rings at most before it sleeps */
    uint64_t busy_until_ns; /* 0: no ring has been served since it slept */
    uint32_t fruitless;     /* looks that have found nothing; each halves the next one */
    uint64_t work_due_ns;   /* when a busy loop looks after the core's own work again */
    struct loop_timer *tick, *work;
    struct loop_source *nvme; /* completions of I/O and of helper threads */
    struct list resets;       /* SpaceReset requests that are answered when stores have the epoch */
    struct log_limit notes, deaths; /* a hostile peer must not fill the log */
    uint32_t since_serve;           /* control requests since the rings were looked at */
};

/* The rest of *s is filled in by the caller. */
int service_start(struct service *s);
void service_stop(struct service *s);

/* server_ops of a service; ctx is the struct service. */
extern const struct server_ops service_ops;

/* One request of one connection: dispatch.c. */
void dispatch(struct service *s, struct conn *conn, const Kvd__Proto__Request *request);

/* ---- for dispatch.c, data.c and admin.c */

/* Watches the death of the session's process; becomes the owner of pidfd. */
int service_watch(struct service *s, struct session *session, int pidfd);

/* SIGKILL through the pidfd: it cannot hit another process. */
int service_kill(struct session *session);

/* May connections of this socket see the space? */
bool service_allows(const struct server_socket *socket, const struct space *space);

/* Cuts the session from its connection, which then ends when its output is sent. */
void service_part(struct session *session);

struct call {
    struct service *service;
    struct conn *conn;
    struct session *session; /* NULL before Hello */
    const Kvd__Proto__Request *request;
    Kvd__Proto__Response response;
    char message[512];
    int fds[FRAME_MAX_FDS];
    unsigned n_fds;
};

/* Sets the sentence and returns the status. */
int call_fail(struct call *c, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The pool that a request names, if this socket may see it and its space is online. */
int call_pool(struct call *c, uint32_t id, struct pool **ret_pool);

/* Keys of the protocol. -EINVAL with a sentence: length. */
int call_key(struct call *c, const Kvd__Proto__Key *from, struct shm_key *ret_key);

/* Answers those whose time has come; drops those of a session that is cut off. */
void service_answer_resets(struct service *s);
void service_drop_resets(struct service *s, const struct session *session);

void call_pool_info(const struct pool *p, Kvd__Proto__PoolInfo *ret);

/* Answers of the data path (data.c) and for administrators (admin.c); they fill c->response, send
 * it with call_reply() and return its status; a failure is sent by the caller. */
int call_reply(struct call *c);
int data_call(struct call *c);
int admin_call(struct call *c);
int spill_call(struct call *c);
int stats_call(struct call *c);

#endif
