/* SPDX-License-Identifier: Apache-2.0 */
/* A server whose clock is the test's, in a folder of its own, with clients in the same process:
 * nothing moves but in turn(). */
#ifndef KVD_TESTS_SERVER_WORLD_H
#define KVD_TESTS_SERVER_WORLD_H

#include "daemon/server.h"
#include "proto/frame.h"

#define SECOND UINT64_C(1000000000)

enum {
    MAX_FRAME = 256 << 10,
    MAX_QUEUE = 1 << 20,
};

struct world {
    int fds_before;
    uint64_t now;
    int last_timeout; /* of the loop's last wait */
    struct loop *loop;
    struct server *server;
    struct server_options options;
    struct server_socket socket;
    char dir[64], path[100];
    void (*behave)(struct world *w, struct conn *conn, const Kvd__Proto__Request *request);
    int requests, closed, notes; /* calls of the server's callbacks */
    int bodies;                  /* requests with a known body */
    int last_status;             /* of the last note */
    char last_note[512];
    struct conn *conn; /* of the last request */
    size_t answer_bytes;
    int null; /* a descriptor to pass around */
};

/* setup() is setup_folder(), where options may then be changed, and start(). */
void setup_folder(struct world *w);
int start(struct world *w);
void setup(struct world *w);
void stop(struct world *w);

/* Checks that nothing leaked. */
void teardown(struct world *w);

void turn(struct world *w, int n);
int count_fds(void);

/* Field 22 of our /proc/self/stat. */
uint64_t own_start_time(void);

/* ---- a client */

struct client {
    int fd;
    struct frame_reader in;
};

int try_connect(const char *path); /* a descriptor, or -errno */
void connect_client(struct world *w, struct client *c);
void close_client(struct client *c);
struct frame_out *new_ping(uint64_t id);
void send_ping(struct client *c, uint64_t id);
void send_raw(struct client *c, const void *data, size_t len);

/* What has arrived: an answer (its id, status and message), an event, or what frame_recv_wait()
 * said. */
struct answer {
    int result;
    uint64_t id;
    int status;
    char message[512];
    unsigned fds;
    int event;
    size_t bytes;
};

struct answer receive(struct client *c);
void expect_answer(struct client *c, uint64_t id, int status);
void expect_end(struct client *c);

#endif
