/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random-processes: a real daemon and real workers, some of which are killed, stopped and replaced at any
 * moment, while readers verify every byte of what they have pinned.
 *
 *   random-processes --kvd PROGRAM [--seconds S] [--seed N] [--workers N] [--keep]
 *
 * At the end everybody goes, by himself or by SIGKILL; then no session, pin, reservation, file or descriptor
 * may be left, and every slot must be free. The seed decides what is done; the machine decides when.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon.h"
#include "fail.h"
#include "worker.h"

enum {
    WRONG_MOST = 20, /* after so many complaints it ends */
    STOP_MS = 800,   /* at most: much less than the quarantine */
    SETTLE_S = 120,  /* until the daemon must have put everything in order; it takes a few */
};

struct child {
    pid_t pid;          /* 0: none */
    bool expected;      /* to die: we have killed it */
    uint64_t wakes_us;  /* stopped until then; 0: it is not */
    uint64_t starts_us; /* dead until then */
};

struct run {
    uint64_t seed;
    struct rng rng;
    struct daemon daemon;
    int board_fd;
    struct board *board;
    uint32_t workers;
    struct child child[BOARD_LANES];
    int engine[BOARD_LANES][2]; /* one pair for each engine */
    uint64_t kills, stops, wrong, leaked;
    bool keep;
};

/* What run_fail() must reach. */
static struct run the_run;

static void kill_children(struct run *r)
{
    for (uint32_t i = 0; i < r->workers; i++)
        if (r->child[i].pid)
            kill(r->child[i].pid, SIGKILL);
    if (r->daemon.pid)
        kill(r->daemon.pid, SIGKILL);
}

static void sum_up(const struct run *r, bool passed)
{
    uint64_t reads = 0, wrong = r->wrong, published = 0, refused = 0, stale = 0, resets = 0;

    for (uint32_t i = 0; i < r->workers && r->board; i++) {
        struct lane *l = &r->board->lane[i];

        reads += atomic_load(&l->reads);
        wrong += atomic_load(&l->wrong);
        published += atomic_load(&l->published);
        refused += atomic_load(&l->refused);
        stale += atomic_load(&l->stale);
        resets += atomic_load(&l->resets);
        if (atomic_load(&l->said))
            printf("worker %u (kind %u): %s\n", i, i % KINDS, l->what);
    }
    passed = passed && !wrong && !r->leaked && reads;
    if (!passed) {
        daemon_show_log(&r->daemon);
        printf("random-processes: again (as far as time allows): --seed %llu --workers %u\n",
               (unsigned long long)r->seed, r->workers);
    }
    printf("seed %llu: %llu objects published, %llu times refused, %llu times stale, %llu resets, "
           "%llu stops\n",
           (unsigned long long)r->seed, (unsigned long long)published, (unsigned long long)refused,
           (unsigned long long)stale, (unsigned long long)resets, (unsigned long long)r->stops);
    printf("random: %llu kills, %llu reads verified, %llu wrong, %llu leaked\n",
           (unsigned long long)r->kills, (unsigned long long)reads, (unsigned long long)wrong,
           (unsigned long long)r->leaked);
    printf("%d passed, %d failed\n", passed, !passed);
    fflush(stdout);
    if (!r->keep)
        daemon_clean(&r->daemon);
    exit(passed ? 0 : 1);
}

void run_fail(const char *format, ...)
{
    va_list args;

    fputs("random-processes: ", stdout);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    kill_children(&the_run);
    sum_up(&the_run, false);
    abort();
}

static void wrong(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void wrong(struct run *r, const char *format, ...)
{
    va_list args;

    r->wrong++;
    expect(r->wrong <= WRONG_MOST, "too much is wrong");
    fputs("random-processes: ", stdout);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

/* ---- workers */

static void exec_worker(const struct run *r, uint32_t i, uint64_t seed)
{
    int engine = r->engine[i / KINDS][i % KINDS == KIND_RANK];
    char text[5][24];

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(engine, F_SETFD, 0);
    fcntl(r->board_fd, F_SETFD, 0);
    snprintf(text[0], sizeof(text[0]), "%u", i % KINDS);
    snprintf(text[1], sizeof(text[1]), "%u", i);
    snprintf(text[2], sizeof(text[2]), "%llu", (unsigned long long)seed);
    snprintf(text[3], sizeof(text[3]), "%d", r->board_fd);
    snprintf(text[4], sizeof(text[4]), "%d", engine);
    execl("/proc/self/exe", "--worker", text[0], text[1], text[2], text[3], text[4],
          r->daemon.writer, r->daemon.reader, (char *)NULL);
    _exit(127);
}

static void start_worker(struct run *r, uint32_t i)
{
    uint64_t seed = rng_next(&r->rng);
    pid_t pid = fork();

    expect(pid >= 0, "cannot fork");
    if (!pid)
        exec_worker(r, i, seed);
    r->child[i] = (struct child){.pid = pid};
}

static void kill_worker(struct run *r, uint32_t i)
{
    struct child *c = &r->child[i];

    if (!c->pid)
        return;
    kill(c->pid, SIGKILL);
    c->expected = true;
    c->starts_us = worker_now_us() + rng_below(&r->rng, 300000);
    r->kills++;
}

static void stop_worker(struct run *r, uint32_t i)
{
    struct child *c = &r->child[i];

    if (!c->pid || c->expected || c->wakes_us)
        return;
    kill(c->pid, SIGSTOP);
    c->wakes_us = worker_now_us() + rng_between(&r->rng, 20, STOP_MS) * 1000;
    r->stops++;
}

static void wake_workers(struct run *r, uint64_t now)
{
    for (uint32_t i = 0; i < r->workers; i++) {
        struct child *c = &r->child[i];

        if (!c->pid || !c->wakes_us || c->wakes_us > now)
            continue;
        kill(c->pid, SIGCONT);
        c->wakes_us = 0;
    }
}

static void on_exit_of(struct run *r, pid_t pid, int status, bool ending)
{
    expect(pid != r->daemon.pid, "the daemon is gone, status %x", status);
    for (uint32_t i = 0; i < r->workers; i++) {
        struct child *c = &r->child[i];

        if (c->pid != pid)
            continue;
        c->pid = 0;
        if (!c->expected && !(ending && status == 0))
            wrong(r, "worker %u (kind %u) has ended by itself, status %x", i, i % KINDS, status);
    }
    /* Others are children of killed workers, for which we are the reaper. */
}

static void reap(struct run *r, bool ending)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        on_exit_of(r, pid, status, ending);
}

static void restart_workers(struct run *r, uint64_t now)
{
    for (uint32_t i = 0; i < r->workers; i++)
        if (!r->child[i].pid && r->child[i].starts_us <= now)
            start_worker(r, i);
}

/* ---- what the coordinator does */

static void check_sums(struct run *r)
{
    struct pool_sums s[DAEMON_POOLS];

    daemon_status(&r->daemon, s);
    for (int i = 0; i < DAEMON_POOLS; i++)
        if (s[i].free + s[i].reserved + s[i].live + s[i].in_flight + s[i].quarantined !=
                s[i].slots ||
            s[i].pinned > s[i].live || s[i].in_flight)
            wrong(r, "I4: %s: %llu free, %llu reserved, %llu live (%llu pinned), %llu quarantined",
                  s[i].name, (unsigned long long)s[i].free, (unsigned long long)s[i].reserved,
                  (unsigned long long)s[i].live, (unsigned long long)s[i].pinned,
                  (unsigned long long)s[i].quarantined);
}

static void administrate(struct run *r)
{
    uint32_t pool = rng_below(&r->rng, DAEMON_POOLS);
    struct kvd_key key = content_key(rng_below(&r->rng, CONTENT_KEYS));

    switch (rng_below(&r->rng, 40)) {
    case 0:
        daemon_reset(&r->daemon, rng_below(&r->rng, 2));
        break;
    case 1:
        daemon_flush(&r->daemon, pool);
        break;
    case 2:
        daemon_evict_tenant(&r->daemon, pool, rng_below(&r->rng, 4));
        break;
    case 3:
    case 4:
    case 5:
    case 6:
        daemon_look(&r->daemon, pool);
        break;
    case 7:
    case 8:
    case 9:
    case 10:
        daemon_evict(&r->daemon, pool, rng_between(&r->rng, 1, 16));
        break;
    default:
        daemon_evict_key(&r->daemon, pool, key.hash, key.group);
    }
}

static void turn(struct run *r)
{
    uint32_t i = rng_below(&r->rng, r->workers);

    usleep(rng_below(&r->rng, 30000));
    wake_workers(r, worker_now_us());
    reap(r, false);
    restart_workers(r, worker_now_us());
    if (rng_once_in(&r->rng, 10))
        kill_worker(r, i);
    else if (rng_once_in(&r->rng, 20))
        stop_worker(r, i);
    if (rng_once_in(&r->rng, 3))
        administrate(r);
    if (rng_once_in(&r->rng, 5))
        check_sums(r);
}

/* ---- the end */

static bool anybody(const struct run *r)
{
    for (uint32_t i = 0; i < r->workers; i++)
        if (r->child[i].pid)
            return true;
    return false;
}

static void end_workers(struct run *r)
{
    uint64_t until = worker_now_us() + SETTLE_S * 1000000ull;

    wake_workers(r, UINT64_MAX);
    atomic_store(&r->board->stop, 1);
    for (uint32_t i = 0; i < r->workers; i++)
        if (rng_once_in(&r->rng, 2))
            kill_worker(r, i);
    while (anybody(r)) {
        reap(r, true);
        expect(worker_now_us() < until, "workers do not end");
        usleep(10000);
    }
}

/* Children of killed workers hold sockets for a while longer. */
static void wait_for_orphans(struct run *r)
{
    uint64_t until = worker_now_us() + SETTLE_S * 1000000ull;
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) >= 0) {
        if (pid > 0)
            on_exit_of(r, pid, status, true);
        else if (kill(r->daemon.pid, 0) == 0 && daemon_count_fds(&r->daemon) <= r->daemon.fds)
            return; /* only the daemon is left, or nobody whom it knows */
        expect(worker_now_us() < until, "descriptors of the daemon: %u, it began with %u",
               daemon_count_fds(&r->daemon), r->daemon.fds);
        usleep(10000);
    }
}

/* What is not in order yet. */
static uint64_t count_leaks(struct run *r, bool tell)
{
    struct pool_sums s[DAEMON_POOLS];
    uint64_t n = daemon_status(&r->daemon, s) - 1, slots = 0; /* the administrator's own */
    unsigned int files = daemon_count_files(&r->daemon, 0);

    if (tell && (n || files))
        printf("%llu sessions and %u of their files are left\n", (unsigned long long)n, files);
    for (int i = 0; i < DAEMON_POOLS; i++) {
        daemon_flush(&r->daemon, s[i].id);
        slots += s[i].slots - s[i].free;
        if (tell && s[i].slots != s[i].free)
            printf("%s: %llu reserved, %llu live (%llu pinned), %llu quarantined\n", s[i].name,
                   (unsigned long long)s[i].reserved, (unsigned long long)s[i].live,
                   (unsigned long long)s[i].pinned, (unsigned long long)s[i].quarantined);
    }
    return n + files + slots;
}

static void settle(struct run *r)
{
    uint64_t until = worker_now_us() + SETTLE_S * 1000000ull;

    while (count_leaks(r, false) && worker_now_us() < until)
        usleep(50000);
    r->leaked = count_leaks(r, true);
}

static void stop_daemon(struct run *r)
{
    int status = daemon_stop(&r->daemon);

    if (status)
        wrong(r, "the daemon's exit status is %x", status);
    r->leaked += daemon_count_files(&r->daemon, 1);
}

/* ---- */

static void make_board(struct run *r)
{
    r->board_fd = memfd_create("board", MFD_CLOEXEC);
    expect(r->board_fd >= 0 && ftruncate(r->board_fd, sizeof(*r->board)) == 0, "no memory");
    r->board = mmap(NULL, sizeof(*r->board), PROT_READ | PROT_WRITE, MAP_SHARED, r->board_fd, 0);
    expect(r->board != MAP_FAILED, "no memory");
    for (uint32_t i = 0; i <= r->workers / KINDS; i++)
        expect(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, r->engine[i]) == 0, "no sockets");
}

static int usage(void)
{
    fputs("usage: random-processes --kvd PROGRAM [--seconds S] [--seed N] [--workers N] [--keep]\n",
          stderr);
    return 2;
}

static int parse(int argc, char **argv, struct run *r, const char **program, uint64_t *seconds)
{
    static const struct option options[] = {
        {"kvd", required_argument, NULL, 'k'},     {"seed", required_argument, NULL, 's'},
        {"seconds", required_argument, NULL, 't'}, {"workers", required_argument, NULL, 'w'},
        {"keep", no_argument, NULL, 'K'},          {NULL, 0, NULL, 0},
    };
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'k')
            *program = optarg;
        else if (c == 's')
            r->seed = strtoull(optarg, NULL, 10);
        else if (c == 't')
            *seconds = strtoull(optarg, NULL, 10);
        else if (c == 'w')
            r->workers = (uint32_t)strtoul(optarg, NULL, 10);
        else if (c == 'K')
            r->keep = true;
        else
            return -EINVAL;
    }
    return *program && r->workers && r->workers <= BOARD_LANES ? 0 : -EINVAL;
}

int main(int argc, char **argv)
{
    struct run *r = &the_run;
    const char *program = NULL;
    uint64_t seconds = 20, until;

    if (argc && strcmp(argv[0], "--worker") == 0)
        return worker_main(argc, argv);
    *r = (struct run){.seed = (uint64_t)time(NULL), .workers = 2 * KINDS};
    if (parse(argc, argv, r, &program, &seconds) < 0)
        return usage();
    r->rng.state = r->seed;
    printf("random-processes: seed %llu, %u workers, %llu s\n", (unsigned long long)r->seed,
           r->workers, (unsigned long long)seconds);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    make_board(r);
    daemon_start(&r->daemon, program);
    until = worker_now_us() + seconds * 1000000;
    while (worker_now_us() < until)
        turn(r);
    end_workers(r);
    wait_for_orphans(r);
    settle(r);
    stop_daemon(r);
    sum_up(r, true);
}
