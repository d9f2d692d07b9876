/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two worker processes on the same hot chain against one of them. Rates are per second of the process's own
 * processor time, so what others do on the machine meanwhile counts as little as it can. The floor is two
 * processes on the bare table: what this machine's processors leave each other.
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "api.h"

#define WORKERS 2u

enum work {
    LOOK_UP,
    PIN,
    WORKS,
};

struct order {
    bool floor; /* else libkvd */
    enum work work;
    uint64_t wall_ns;
};

struct worker {
    pid_t pid;
    int fd; /* orders out, keys per second back; NAN: it could not */
};

/* ---- in the worker */

static size_t once(struct subject *s, enum work work)
{
    size_t n;

    if (work == LOOK_UP)
        return s->ops->lookup(s);
    n = s->ops->pin(s);
    s->ops->release(s);
    return n;
}

static double rate(struct subject *s, const struct order *o)
{
    uint64_t until = now_ns() + o->wall_ns, start, keys = 0;

    once(s, o->work); /* warms up */
    start = cpu_ns();
    do {
        size_t n = once(s, o->work);

        if (n != CHAIN)
            return NAN;
        keys += n;
    } while (now_ns() < until);
    return (double)keys / (double)(cpu_ns() - start) * 1e9;
}

static void serve(int fd, struct subject *ours, struct subject *floor)
{
    struct order o;

    while (recv(fd, &o, sizeof(o), 0) == sizeof(o)) {
        double r = rate(o.floor ? floor : ours, &o);

        if (send(fd, &r, sizeof(r), MSG_NOSIGNAL) != sizeof(r))
            return;
    }
}

/* Each has hazard cells of its own on the floor's shared table, as each has pin counters of its own. */
static int work(int fd, unsigned number, const struct daemon *d, struct floor *floor,
                uint64_t objects)
{
    struct floor own = *floor;
    struct subject *ours = NULL, *bare = floor_subject_new(&own);
    struct api a = {0};
    uint64_t seed = 1;
    int r = bare ? api_open(d, objects, &a, &ours) : -ENOMEM;

    own.hazard += number * CHAIN;
    if (r == 0) {
        pin_cpu(number);
        chain_choose(ours, &seed);
        seed = 1;
        chain_choose(bare, &seed);
        serve(fd, ours, bare);
    }
    free(ours);
    free(bare);
    api_close(&a);
    return r;
}

/* ---- in the bench */

static int worker_start(unsigned number, const struct daemon *d, struct floor *floor,
                        uint64_t objects, struct worker *ret)
{
    int fds[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        _exit(work(fds[1], number, d, floor, objects) < 0);
    }
    close(fds[1]);
    if (pid < 0) {
        close(fds[0]);
        return -errno;
    }
    *ret = (struct worker){.pid = pid, .fd = fds[0]};
    return 0;
}

static void worker_stop(struct worker *w)
{
    if (!w->pid)
        return;
    shutdown(w->fd, SHUT_RDWR); /* it leaves its loop; a later one has inherited the descriptor */
    close(w->fd);
    waitpid(w->pid, NULL, 0);
    w->pid = 0;
}

struct team {
    struct worker worker[WORKERS];
    uint64_t wall_ns;
    enum work work;
};

static int ask(struct team *t, unsigned from, unsigned to, bool floor, double *ret_sum)
{
    struct order o = {.floor = floor, .work = t->work, .wall_ns = t->wall_ns};
    double sum = 0, r;

    for (unsigned i = from; i < to; i++)
        if (send(t->worker[i].fd, &o, sizeof(o), MSG_NOSIGNAL) != sizeof(o))
            return -EPIPE;
    for (unsigned i = from; i < to; i++) {
        if (recv(t->worker[i].fd, &r, sizeof(r), 0) != sizeof(r) || isnan(r))
            return -EIO;
        sum += r;
    }
    *ret_sum = sum;
    return 0;
}

/* Both together / the mean of each alone. */
static int scale(struct team *t, bool floor, double *ret)
{
    double first, second, both = 0;
    int r = ask(t, 0, 1, floor, &first);

    if (r == 0)
        r = ask(t, 0, WORKERS, floor, &both);
    if (r == 0)
        r = ask(t, 1, 2, floor, &second);
    if (r == 0)
        *ret = both / ((first + second) / 2);
    return r;
}

static int scale_ours(void *arg, double *ret)
{
    return scale(arg, false, ret);
}

static int scale_floor(void *arg, double *ret)
{
    return scale(arg, true, ret);
}

static int compare(struct bench *b, struct team *t)
{
    static const struct figure figures[WORKS] = {
        [LOOK_UP] = {"lookups per second, 1 -> 2 workers", "x", GOAL_OURS_AT_LEAST, 1.9, true},
        [PIN] = {"pins per second, 1 -> 2 workers", "x", GOAL_OURS_AT_LEAST, 1.9, true},
    };
    const struct contender floor = {"two processes on a bare table", scale_floor};
    int r = 0;

    for (int i = 0; i < WORKS && r == 0; i++) {
        t->work = (enum work)i;
        r = bench_compare(b, &figures[i], t, scale_ours, &floor, 1);
    }
    return r;
}

int case_scaling(struct bench *b)
{
    uint64_t objects = b->smoke ? 2 * CHAIN : API_FEW;
    struct team t = {.wall_ns = b->smoke ? 2000000 : 40000000};
    struct daemon d = {0};
    struct floor f = {0};
    int r = api_daemon(b, objects, &d);

    if (r == 0)
        r = floor_new(b->smoke ? 1 << 13 : 1 << 16, WORKERS * CHAIN, &f);
    for (unsigned i = 0; i < WORKERS && r == 0; i++)
        r = worker_start(i, &d, &f, objects, &t.worker[i]);
    if (r == 0)
        r = compare(b, &t);
    for (unsigned i = 0; i < WORKERS; i++)
        worker_stop(&t.worker[i]);
    floor_free(&f);
    daemon_stop(&d);
    return r;
}
