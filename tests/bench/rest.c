/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon at rest, and a worker's sudden death. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain.h"
#include "daemon.h"

/* ---- at rest */

struct usage {
    uint64_t wakeups; /* voluntary context switches: it slept, and something woke it */
    uint64_t cpu_ns;
};

static uint64_t number_after(const char *path, const char *key)
{
    char line[256];
    uint64_t n = 0;
    FILE *f = fopen(path, "re");

    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, key, strlen(key)) == 0)
            n = strtoull(line + strlen(key), NULL, 10);
    if (f)
        fclose(f);
    return n;
}

/* All threads of a process. Nanoseconds on a processor come first in schedstat. */
static int usage_of(pid_t pid, struct usage *ret)
{
    char path[320];
    struct usage u = {0};
    struct dirent *e;
    DIR *d;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    d = opendir(path);
    if (!d)
        return -errno;
    while ((e = readdir(d))) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "/proc/%d/task/%s/status", (int)pid, e->d_name);
        u.wakeups += number_after(path, "voluntary_ctxt_switches:");
        snprintf(path, sizeof(path), "/proc/%d/task/%s/schedstat", (int)pid, e->d_name);
        u.cpu_ns += number_after(path, "");
    }
    closedir(d);
    *ret = u;
    return 0;
}

static int observe(const struct bench *b, pid_t pid, double *ret_wakeups, double *ret_percent)
{
    struct usage before, after;
    uint64_t start, took;
    int r;

    usleep(b->smoke ? 50000 : 3000000); /* what attaching has started is over */
    start = now_ns();
    r = usage_of(pid, &before);
    usleep(b->smoke ? 300000 : 10000000);
    if (r == 0)
        r = usage_of(pid, &after);
    took = now_ns() - start;
    if (r < 0)
        return r;
    *ret_wakeups = (double)(after.wakeups - before.wakeups) / ((double)took / 1e9);
    *ret_percent = (double)(after.cpu_ns - before.cpu_ns) / (double)took * 100;
    return 0;
}

int case_rest(struct bench *b)
{
    static const struct figure wakeups = {"daemon at rest: wake-ups", "1/s", GOAL_OURS_AT_MOST, 1,
                                          false};
    static const struct figure percent = {"daemon at rest: processor", "%", GOAL_OURS_AT_MOST, 0.1,
                                          false};
    struct session s = {0};
    struct daemon d = {0};
    double per_second, cpu;
    int r = daemon_start(b, DAEMON_SMALL_PAGES, "slot = 4K\nslots = 4096", &d);

    if (r == 0)
        r = session_open(&d, 0, &s);
    if (r == 0)
        r = session_fill(&s, 0, 2048);
    if (r == 0)
        r = observe(b, d.pid, &per_second, &cpu);
    if (r == 0) {
        report_add(b->report, &wakeups, &(struct result){.ours = &per_second, .n = 1});
        report_add(b->report, &percent, &(struct result){.ours = &cpu, .n = 1});
    }
    session_close(&s);
    daemon_stop(&d);
    return r;
}

/* ---- death */

#define OBJECTS    4096u
#define DEATHS_MAX 64u

/* Pins all there is and waits to be killed. */
static void hold_all(const struct daemon *d, int ready)
{
    static struct kvd_key keys[OBJECTS];
    struct kvd_pinset *pins;
    struct session s;
    char ok;

    for (uint64_t i = 0; i < OBJECTS; i++) {
        struct shm_key k = chain_key(i);

        memcpy(&keys[i], &k, sizeof(k));
    }
    ok = session_open(d, 0, &s) == 0 && kvd_pinset_new(s.kvd, OBJECTS, &pins) == 0 &&
         kvd_pin(pins, s.pool, keys, OBJECTS, 0) == OBJECTS;
    if (write(ready, &ok, 1) == 1)
        for (;;)
            pause();
    _exit(1);
}

static int holder_start(const struct daemon *d, pid_t *ret)
{
    int fds[2];
    char ok = 0;
    pid_t pid;

    if (pipe(fds) < 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        hold_all(d, fds[1]);
    }
    close(fds[1]);
    if (pid > 0 && (read(fds[0], &ok, 1) != 1 || !ok)) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    close(fds[0]);
    *ret = pid;
    return pid < 0 ? -EAGAIN : ok ? 0 : -EIO;
}

/* With everything pinned nothing can be stored; when something can, the pins are back. */
static int store_one(struct session *s, uint64_t key)
{
    struct kvd_reservation r;
    struct shm_key k = chain_key(key);
    struct kvd_key keys[1];
    struct kvd_reserve q = {.keys = keys, .n = 1};
    ssize_t n;

    memcpy(keys, &k, sizeof(k));
    n = kvd_reserve(s->pool, &q, &r);
    if (n < 0)
        return (int)n;
    if (r.status != KVD_NEW)
        return r.status < 0 ? r.status : -EEXIST;
    return kvd_abort(s->pool, &r.ticket, 1) == 1 ? 0 : -EIO;
}

static int one_death(struct daemon *d, struct session *s, uint64_t key, double *ret_ms)
{
    uint64_t start;
    pid_t pid = 0;
    int r = holder_start(d, &pid);

    if (r < 0)
        return r;
    r = store_one(s, key);
    if (r != -ENOSPC) { /* else this would measure nothing */
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return r < 0 ? r : -EIO;
    }
    start = now_ns();
    kill(pid, SIGKILL);
    do
        r = store_one(s, key);
    while (r == -ENOSPC && now_ns() - start < 5000000000u);
    *ret_ms = (double)(now_ns() - start) / 1e6;
    waitpid(pid, NULL, 0);
    return r;
}

/* Storing one has cost an object; the next holder needs all. */
static int make_whole(struct session *s)
{
    for (uint64_t i = 0; i < OBJECTS; i++) {
        struct shm_key k = chain_key(i);
        struct kvd_key key;

        memcpy(&key, &k, sizeof(k));
        if (kvd_lookup(s->pool, &key, 1, NULL) == 1)
            continue;
        return session_fill(s, i, 1);
    }
    return 0;
}

int case_death(struct bench *b)
{
    static const struct figure p50 = {"SIGKILL until 4,096 pins are back, p50", "ms",
                                      GOAL_OURS_AT_MOST, 100, false};
    static const struct figure p99 = {"SIGKILL until 4,096 pins are back, p99", "ms",
                                      GOAL_OURS_AT_MOST, 100, false};
    struct session s = {0};
    struct daemon d = {0};
    double ms[DEATHS_MAX], value;
    unsigned n = b->smoke ? 2 : 40;
    int r = daemon_start(b, DAEMON_SMALL_PAGES,
                         "slot = 4K\nslots = 4096\nlow_water = 0\nhigh_water = 0", &d);

    if (r == 0)
        r = session_open(&d, 0, &s);
    if (r == 0)
        r = session_fill(&s, 0, OBJECTS);
    for (unsigned i = 0; i < n && r == 0; i++) {
        r = one_death(&d, &s, OBJECTS + i, &ms[i]);
        if (r == 0)
            r = make_whole(&s);
    }
    if (r == 0) {
        value = percentile(ms, n, 0.5);
        report_add(b->report, &p50, &(struct result){.ours = &value, .n = 1});
        value = percentile(ms, n, 0.99);
        report_add(b->report, &p99, &(struct result){.ours = &value, .n = 1});
    }
    session_close(&s);
    daemon_stop(&d);
    return r;
}
