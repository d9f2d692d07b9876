/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon adds to storing: reserve and commit of objects whose bytes nobody writes. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain.h"
#include "daemon.h"

#define BATCH_MAX 64u
#define TRIPS_MAX 512u

/* ---- the floor: one byte to another process and back, which sleeps in between */

struct echo {
    int fd;
    pid_t pid;
};

static int echo_start(struct echo *ret)
{
    int fds[2];
    pid_t pid;
    char c;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin_cpu(1);
        close(fds[0]);
        while (read(fds[1], &c, 1) == 1 && write(fds[1], &c, 1) == 1)
            ;
        _exit(0);
    }
    close(fds[1]);
    if (pid < 0) {
        close(fds[0]);
        return -errno;
    }
    *ret = (struct echo){.fd = fds[0], .pid = pid};
    return 0;
}

static void echo_stop(struct echo *e)
{
    if (!e->pid)
        return;
    close(e->fd);
    waitpid(e->pid, NULL, 0);
}

/* ---- */

struct trips {
    struct session session;
    struct echo echo;
    size_t batch;
    unsigned n;       /* in a sample */
    unsigned rest_us; /* between two: longer than the daemon looks for more work */
    double p;         /* percentile that is asked for */
    uint64_t next;    /* key */
};

static int one_trip(struct trips *t, double *ret_us)
{
    struct kvd_key keys[BATCH_MAX];
    struct kvd_reservation granted[BATCH_MAX];
    struct kvd_commit commits[BATCH_MAX];
    struct kvd_reserve q = {.keys = keys, .n = t->batch};
    uint64_t start;

    for (size_t i = 0; i < t->batch; i++) {
        struct shm_key k = chain_key(t->next++);

        memcpy(&keys[i], &k, sizeof(k));
    }
    start = now_ns();
    if (kvd_reserve(t->session.pool, &q, granted) != (ssize_t)t->batch)
        return -ENOSPC;
    for (size_t i = 0; i < t->batch; i++)
        commits[i] = (struct kvd_commit){.ticket = granted[i].ticket, .bytes = 4096};
    if (kvd_commit(t->session.pool, commits, t->batch) != (ssize_t)t->batch)
        return -EIO;
    *ret_us = (double)(now_ns() - start) / 1e3;
    return 0;
}

static int reserve_and_commit(void *arg, double *ret)
{
    struct trips *t = arg;
    double us[TRIPS_MAX];
    int r = 0;

    for (unsigned i = 0; i < t->n && r == 0; i++) {
        if (t->rest_us)
            usleep(t->rest_us);
        r = one_trip(t, &us[i]);
    }
    if (r == 0)
        *ret = percentile(us, t->n, t->p);
    return r;
}

/* Two of them, since ours are two. */
static int echo_twice(void *arg, double *ret)
{
    struct trips *t = arg;
    double us[TRIPS_MAX];
    char c = 0;

    for (unsigned i = 0; i < t->n; i++) {
        uint64_t start;

        if (t->rest_us)
            usleep(t->rest_us);
        start = now_ns();
        for (int k = 0; k < 2; k++)
            if (write(t->echo.fd, &c, 1) != 1 || read(t->echo.fd, &c, 1) != 1)
                return -EPIPE;
        us[i] = (double)(now_ns() - start) / 1e3;
    }
    *ret = percentile(us, t->n, t->p);
    return 0;
}

static int compare(struct bench *b, struct trips *t)
{
    static const struct contender floor = {"two echoes over a socket", echo_twice};
    static const struct {
        const char *name;
        size_t batch;
        unsigned rest_us;
        double p;
    } ways[] = {
        {"reserve + commit, 1 object, p50", 1, 0, 0.5},
        {"reserve + commit, 1 object, p99", 1, 0, 0.99},
        {"reserve + commit, 64 objects, p50", 64, 0, 0.5},
        {"reserve + commit, 64 objects, p99", 64, 0, 0.99},
        {"reserve + commit, 1 object, of a sleeping daemon, p50", 1, 2000, 0.5},
    };
    int r = 0;

    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]) && r == 0; i++) {
        struct figure f = {.name = ways[i].name, .unit = "us"};

        t->batch = ways[i].batch;
        t->p = ways[i].p;
        t->rest_us = ways[i].rest_us;
        t->n = b->smoke ? 5 : ways[i].rest_us ? 50 : 300;
        r = bench_compare(b, &f, t, reserve_and_commit, &floor, 1);
    }
    return r;
}

/* The pool is full all the time: every reservation evicts, as in life. */
int case_round_trip(struct bench *b)
{
    struct trips t = {.next = 0};
    struct daemon d = {0};
    int r = echo_start(&t.echo);

    if (r == 0)
        r = daemon_start(b, DAEMON_SMALL_PAGES,
                         "slot = 4K\nslots = 4096\nlow_water = 128\nhigh_water = 256", &d);
    if (r == 0)
        r = session_open(&d, 0, &t.session);
    if (r == 0) {
        r = session_fill(&t.session, 0, 4096);
        t.next = 4096;
    }
    if (r == 0) {
        pin_cpu(0);
        r = compare(b, &t);
    }
    session_close(&t.session);
    daemon_stop(&d);
    echo_stop(&t.echo);
    return r;
}
