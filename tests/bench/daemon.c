/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chain.h"

#define START_NS   60000000000u
#define STEP_US    5000u
#define FILL_BATCH 512u

static int write_config(const struct daemon *d, enum daemon_memory memory, const char *pool)
{
    char path[96];
    FILE *f;

    snprintf(path, sizeof(path), "%s/kvd.conf", d->dir);
    f = fopen(path, "we");
    if (!f)
        return -errno;
    fprintf(f,
            "[daemon]\nruntime_dir = %s/run\nhugepages = %s\nlog_level = warning\n"
            "[space s]\n[pool s/kv]\n%s\n[socket w]\nrole = writer\npath = %s\n",
            d->dir, memory == DAEMON_HUGEPAGES ? "require" : "off", pool, d->socket);
    return fclose(f) == 0 ? 0 : -errno;
}

static void become(const char *program, const char *dir)
{
    char conf[96], log[96];
    int fd;

    snprintf(conf, sizeof(conf), "%s/kvd.conf", dir);
    snprintf(log, sizeof(log), "%s/kvd.log", dir);
    fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0)
        dup2(fd, STDERR_FILENO);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    execl(program, program, "-c", conf, (char *)NULL);
    fprintf(stderr, "cannot run %s: %s\n", program, strerror(errno));
    _exit(127);
}

static void show_log(const struct daemon *d)
{
    char path[96], line[512];
    FILE *f;

    snprintf(path, sizeof(path), "%s/kvd.log", d->dir);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        fputs(line, stderr);
    if (f)
        fclose(f);
}

/* It serves when one can connect. */
static int wait_ready(struct daemon *d)
{
    uint64_t until = now_ns() + START_NS;
    struct kvd_options o;
    struct kvd *kvd;

    kvd_options_init(&o, sizeof(o));
    o.socket = d->socket;
    o.flags = KVD_NO_SHM;
    do {
        if (kvd_connect(&o, &kvd) == 0) {
            kvd_close(kvd);
            return 0;
        }
        if (waitpid(d->pid, NULL, WNOHANG) == d->pid) {
            d->pid = 0;
            return -ECHILD;
        }
        usleep(STEP_US);
    } while (now_ns() < until);
    return -ETIMEDOUT;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    return remove(path);
}

void daemon_stop(struct daemon *d)
{
    if (d->pid) {
        kill(d->pid, SIGTERM);
        waitpid(d->pid, NULL, 0);
        d->pid = 0;
    }
    if (d->dir[0])
        nftw(d->dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    d->dir[0] = 0;
}

int daemon_start(const struct bench *b, enum daemon_memory memory, const char *pool,
                 struct daemon *ret)
{
    struct daemon d = {.dir = "/dev/shm/kvd-bench-XXXXXX"};
    int r;

    if (!mkdtemp(d.dir))
        return -errno;
    snprintf(d.socket, sizeof(d.socket), "%s/kvd.sock", d.dir);
    r = write_config(&d, memory, pool);
    if (r == 0) {
        d.pid = fork();
        if (d.pid == 0)
            become(b->daemon, d.dir);
        r = d.pid < 0 ? -errno : wait_ready(&d);
    }
    if (r < 0) {
        fprintf(stderr, "kvd-bench: %s does not serve:\n", b->daemon);
        show_log(&d);
        daemon_stop(&d);
    } else {
        *ret = d;
    }
    return r;
}

int session_open(const struct daemon *d, uint32_t flags, struct session *ret)
{
    struct kvd_space_options space;
    struct kvd_options o;
    struct session s = {0};
    int r;

    kvd_options_init(&o, sizeof(o));
    kvd_space_options_init(&space, sizeof(space));
    o.socket = d->socket;
    o.flags = flags;
    space.write = 1;
    r = kvd_connect(&o, &s.kvd);
    if (r < 0) {
        fprintf(stderr, "kvd-bench: %s\n", kvd_last_error(NULL));
        return r;
    }
    r = kvd_space_open(s.kvd, "s", &space, &s.space);
    if (r == 0)
        r = kvd_pool_get(s.space, "kv", &s.pool);
    if (r < 0) {
        fprintf(stderr, "kvd-bench: %s\n", kvd_last_error(s.kvd));
        session_close(&s);
    } else {
        *ret = s;
    }
    return r;
}

void session_close(struct session *s)
{
    kvd_close(s->kvd);
    *s = (struct session){0};
}

static int fill_some(struct session *s, uint64_t first, size_t n)
{
    struct kvd_key keys[FILL_BATCH];
    struct kvd_reservation granted[FILL_BATCH];
    struct kvd_commit commits[FILL_BATCH];
    struct kvd_reserve q = {.keys = keys, .n = n};
    ssize_t r;

    for (size_t i = 0; i < n; i++) {
        struct shm_key k = chain_key(first + i);

        memcpy(&keys[i], &k, sizeof(k));
    }
    r = kvd_reserve(s->pool, &q, granted);
    if (r < 0)
        return (int)r;
    if ((size_t)r != n)
        return -ENOSPC;
    for (size_t i = 0; i < n; i++)
        commits[i] = (struct kvd_commit){.ticket = granted[i].ticket, .bytes = 4096};
    r = kvd_commit(s->pool, commits, n);
    if (r < 0)
        return (int)r;
    return (size_t)r == n ? 0 : -EIO;
}

int session_fill(struct session *s, uint64_t first, uint64_t n)
{
    int r = 0;

    while (n && r == 0) {
        size_t k = n < FILL_BATCH ? (size_t)n : FILL_BATCH;

        r = fill_some(s, first, k);
        first += k;
        n -= k;
    }
    return r;
}
