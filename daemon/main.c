/* SPDX-License-Identifier: Apache-2.0 */
/* kvd: command line, start, signals, stop. */
#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/guard.h"
#include "daemon/log.h"
#include "daemon/service.h"
#include "daemon/spill/spill.h"
#include "daemon/stale.h"
#include "version.h"

/* How long answers may take to leave after SIGTERM. */
#define GOODBYE_NS 500000000u
#define FLUSH_NS   20000000u /* how often it is looked whether all is written */

struct app {
    struct config *config;
    struct log log;
    struct core *core;
    struct loop *loop;
    struct server *server;
    struct service service;
    struct server_socket sockets[CONFIG_SOCKETS_MAX];
    const char *patterns[CONFIG_SOCKETS_MAX][CONFIG_PATTERNS_MAX];
    struct loop_source *signals;
    struct loop_timer *watchdog, *goodbye, *flush;
    uint64_t flush_until_ns;
    int lock_fd, signal_fd;
    atomic_bool cancel;
    uint64_t told_ms; /* when progress was last logged */
};

static uint64_t monotonic_ns(void *arg)
{
    struct timespec t;

    (void)arg;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void usage(FILE *f)
{
    fputs(
        "Usage: kvd [-c FILE] [--check]\n"
        "Keeps the KV cache of language models in shared memory, for all workers of this host.\n\n"
        "  -c, --config FILE  configuration (default " CONFIG_FILE
        ", then conf.d/*.conf beside it)\n"
        "      --check        read the configuration, print every problem, and exit\n"
        "  -h, --help         this text\n"
        "  -V, --version      version\n\n"
        "Runs in the foreground and logs to stderr or the journal. SIGTERM or SIGINT: clean stop.\n"
        "Exit status: 0 stopped as asked, 1 could not start or run, 2 wrong usage.\n"
        "Look at it with kvctl(1): `kvctl status`, `kvctl check`. Manual: kvd(8), kvd.conf(5).\n",
        f);
}

/* ---- start */

static int take_signals(struct app *a)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    signal(SIGPIPE, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return -errno;
    a->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return a->signal_fd < 0 ? -errno : 0;
}

static void raise_limits(struct app *a)
{
    struct rlimit l;

    if (getrlimit(RLIMIT_NOFILE, &l) < 0)
        return;
    l.rlim_cur = l.rlim_max;
    setrlimit(RLIMIT_NOFILE, &l);
    if (l.rlim_max < a->config->daemon.max_connections * 2)
        log_write(
            &a->log, LOG_WARNING, NULL,
            "only %llu file descriptors for max_connections = %u; fix: LimitNOFILE=%u in the unit",
            (unsigned long long)l.rlim_max, a->config->daemon.max_connections,
            a->config->daemon.max_connections * 4);
}

static bool term_is_pending(struct app *a)
{
    struct signalfd_siginfo info;

    return read(a->signal_fd, &info, sizeof(info)) == sizeof(info) &&
           (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT);
}

/* Called about ten times a second while pools are populated. */
static void on_progress(uint64_t done, uint64_t total, void *arg)
{
    struct app *a = arg;
    uint64_t now = monotonic_ns(NULL) / 1000000;

    if (term_is_pending(a))
        atomic_store(&a->cancel, true);
    if (now - a->told_ms < 1000)
        return;
    a->told_ms = now;
    log_write(&a->log, LOG_INFO, NULL, "populating pools: %llu of %llu MiB",
              (unsigned long long)done >> 20, (unsigned long long)total >> 20);
    sd_notifyf(0, "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=Populating pools: %llu of %llu MiB",
               (unsigned long long)done >> 20, (unsigned long long)total >> 20);
}

static void on_stores(const char *what, uint64_t done, uint64_t total, void *arg)
{
    struct app *a = arg;
    uint64_t now = monotonic_ns(NULL) / 1000000;

    if (term_is_pending(a))
        atomic_store(&a->cancel, true);
    if (now - a->told_ms < 1000)
        return;
    a->told_ms = now;
    log_write(&a->log, LOG_INFO, NULL, "spill stores: %s, %llu of %llu MiB", what,
              (unsigned long long)done >> 20, (unsigned long long)total >> 20);
    sd_notifyf(0, "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=Spill stores: %s, %llu of %llu MiB", what,
               (unsigned long long)done >> 20, (unsigned long long)total >> 20);
}

/* Whoever may write to it can put sockets and files of his own in place of ours. */
static int check_runtime_dir(struct app *a, const char *dir)
{
    struct stat st;
    const char *why = NULL;

    if (lstat(dir, &st) < 0)
        return -errno;
    if (!S_ISDIR(st.st_mode))
        why = "is no directory, or a link to one";
    else if (st.st_uid != geteuid() && st.st_uid != 0)
        why = "belongs to another user";
    else if (st.st_mode & (S_IWGRP | S_IWOTH))
        why = "can be written by others";
    if (!why)
        return 0;
    log_write(&a->log, LOG_ERR, NULL, "runtime_dir %s %s; fix: give kvd one of its own (mode 0755)",
              dir, why);
    return -EPERM;
}

static int take_lock(struct app *a)
{
    const char *dir = a->config->daemon.runtime_dir;
    pid_t holder = 0;
    int r;

    if (mkdir(dir, 0755) < 0 && errno != EEXIST) {
        r = -errno;
        log_write(&a->log, LOG_ERR, NULL, "cannot make runtime_dir %s: %s", dir, strerror(-r));
        return r;
    }
    r = check_runtime_dir(a, dir);
    if (r < 0)
        return r;
    r = server_lock(dir, &a->lock_fd, &holder);
    if (r == -EADDRINUSE)
        log_write(
            &a->log, LOG_ERR, NULL,
            "another kvd (pid %d) uses %s; it was left alone. Stop it first, or give this one "
            "another runtime_dir",
            (int)holder, dir);
    else if (r < 0)
        log_write(&a->log, LOG_ERR, NULL, "cannot lock %s: %s", dir, strerror(-r));
    return r;
}

static int make_core(struct app *a)
{
    struct core_options o = {.config = a->config,
                             .log = &a->log,
                             .clock = {.now_ns = monotonic_ns},
                             .progress = on_progress,
                             .progress_arg = a,
                             .cancel = &a->cancel};
    const struct config_daemon *d = &a->config->daemon;
    const char *huge = d->hugetlbfs[0] ? d->hugetlbfs : segment_hugetlbfs_dir(d->page_size);
    char why[768];
    int r;

    stale_sweep(d->runtime_dir, &a->log);
    if (huge)
        stale_sweep_hugetlbfs(huge, d->runtime_dir, &a->log);
    r = core_new(&o, why, sizeof(why), &a->core);
    if (r < 0)
        log_write(&a->log, LOG_ERR, NULL, "%s", why);
    else if (a->core->nvme)
        nvme_wait(a->core->nvme, d->spill_start_ns, on_stores, a);
    return r;
}

static int find_group(struct app *a, const char *name, gid_t *ret)
{
    struct group *g;
    char *end;
    unsigned long n = strtoul(name, &end, 10);

    if (!name[0]) {
        *ret = (gid_t)-1;
        return 0;
    }
    if (!*end) {
        *ret = (gid_t)n;
        return 0;
    }
    g = getgrnam(name);
    if (!g) {
        log_write(&a->log, LOG_ERR, NULL, "no group \"%s\"; fix: groupadd --system %s", name, name);
        return -ENOENT;
    }
    *ret = g->gr_gid;
    return 0;
}

static int listen_on(struct app *a, uint32_t i)
{
    const struct config_socket *from = &a->config->sockets[i];
    struct server_socket *to = &a->sockets[i];
    int r;

    for (uint32_t k = 0; k < from->spaces.count; k++)
        a->patterns[i][k] = from->spaces.list[k];
    *to = (struct server_socket){.path = from->path,
                                 .role = (enum server_role)from->role,
                                 .spaces = a->patterns[i],
                                 .n_spaces = from->spaces.count,
                                 .mode = from->mode,
                                 .uids = from->uids.list,
                                 .n_uids = from->uids.count,
                                 .max_connections = from->max_connections};
    r = find_group(a, from->group, &to->group);
    return r < 0 ? r : server_listen(a->server, to);
}

static int open_sockets(struct app *a)
{
    struct server_options o = {.loop = a->loop,
                               .ops = &service_ops,
                               .ctx = &a->service,
                               .max_frame_bytes = a->config->daemon.max_frame};
    int r = server_new(&o, &a->server);

    a->service.server = a->server;
    for (uint32_t i = 0; i < a->config->socket_count && r == 0; i++)
        r = listen_on(a, i);
    return r;
}

/* ---- run and stop */

static void on_watchdog(void *arg)
{
    (void)arg;
    sd_notify(0, "WATCHDOG=1");
}

static void on_goodbye(void *arg)
{
    struct app *a = arg;

    loop_stop(a->loop);
}

static void say_goodbye(struct app *a)
{
    loop_timer_disarm(a->flush);
    server_event(a->server, KVD__PROTO__EVENT__KIND__GOING);
    loop_timer_arm(a->goodbye,
                   monotonic_ns(NULL) + (server_connections(a->server, NULL) ? GOODBYE_NS : 0), 0);
}

/* What is only in ram is lost by stopping: it is written first, for a while. */
static void on_flush(void *arg)
{
    struct app *a = arg;
    uint64_t now = monotonic_ns(NULL), left = a->core->nvme ? nvme_unwritten(a->core->nvme) : 0;

    if (left && now < a->flush_until_ns) {
        if (now / 1000000 - a->told_ms < 1000)
            return;
        a->told_ms = now / 1000000;
        sd_notifyf(0, "EXTEND_TIMEOUT_USEC=5000000\nSTATUS=Stopping: %llu objects to write",
                   (unsigned long long)left);
        return;
    }
    if (left)
        log_write(&a->log, LOG_WARNING, NULL,
                  "%llu objects were not written to spill stores in time (stop_flush)",
                  (unsigned long long)left);
    say_goodbye(a);
}

static void begin_stop(struct app *a)
{
    if (a->core->stopping) {
        loop_stop(a->loop); /* asked twice: at once */
        return;
    }
    a->core->stopping = true;
    log_write(&a->log, LOG_INFO, NULL, "stopping");
    sd_notify(0, "STOPPING=1\nSTATUS=Stopping");
    server_stop_listening(a->server);
    if (a->core->nvme)
        nvme_stop(a->core->nvme);
    a->flush_until_ns = monotonic_ns(NULL) + a->config->daemon.stop_flush_ns;
    loop_timer_arm(a->flush, monotonic_ns(NULL), FLUSH_NS);
}

static void on_signal(void *arg, uint32_t events)
{
    struct app *a = arg;
    struct signalfd_siginfo info;

    (void)events;
    while (read(a->signal_fd, &info, sizeof(info)) == sizeof(info)) {
        if (info.ssi_signo == SIGHUP)
            log_write(&a->log, LOG_NOTICE, NULL,
                      "SIGHUP: the configuration is read at start only; restart kvd");
        else
            begin_stop(a);
    }
}

static int make_loop(struct app *a)
{
    static const char *const modes[] = {[CONFIG_HUGEPAGES_OFF] = "off",
                                        [CONFIG_HUGEPAGES_TRY] = "try",
                                        [CONFIG_HUGEPAGES_REQUIRE] = "require"};
    uint64_t usec = 0;
    int r = loop_new(NULL, &a->loop);

    if (r == 0)
        r = loop_add(a->loop, a->signal_fd, EPOLLIN, on_signal, a, &a->signals);
    if (r == 0)
        r = loop_timer_new(a->loop, on_goodbye, a, &a->goodbye);
    if (r == 0)
        r = loop_timer_new(a->loop, on_flush, a, &a->flush);
    if (r == 0)
        r = loop_timer_new(a->loop, on_watchdog, a, &a->watchdog);
    if (r < 0)
        return r;
    if (sd_watchdog_enabled(0, &usec) > 0)
        loop_timer_arm(a->watchdog, monotonic_ns(NULL), usec * 1000 / 2);
    a->service = (struct service){.core = a->core,
                                  .loop = a->loop,
                                  .log = &a->log,
                                  .sockets = a->sockets,
                                  .n_sockets = a->config->socket_count,
                                  .hugepages = modes[a->config->daemon.hugepages],
                                  .spin_ns = a->config->daemon.core_spin_ns};
    return service_start(&a->service);
}

static int run(struct app *a)
{
    uint64_t start = monotonic_ns(NULL);
    int r = take_lock(a);

    if (r == 0)
        r = make_core(a);
    if (r == 0 && atomic_load(&a->cancel)) /* by a SIGTERM that came too late to stop anything */
        r = -ECANCELED;
    if (r == 0)
        r = make_loop(a);
    if (r == 0)
        r = open_sockets(a);
    if (r < 0)
        return r;
    log_write(&a->log, LOG_INFO, NULL, "kvd %s ready after %llu ms: %u spaces, %u pools",
              KVD_VERSION, (unsigned long long)(monotonic_ns(NULL) - start) / 1000000,
              a->core->n_spaces, a->core->n_pools);
    sd_notifyf(0, "READY=1\nSTATUS=Ready: %u spaces, %u pools", a->core->n_spaces,
               a->core->n_pools);
    return loop_run(a->loop);
}

static void stop(struct app *a)
{
    server_free(a->server);
    core_free(a->core); /* lets go of its watches, so the loop comes after it */
    if (a->loop) {
        service_stop(&a->service);
        loop_timer_free(a->watchdog);
        loop_timer_free(a->goodbye);
        loop_timer_free(a->flush);
        loop_remove(a->signals);
        loop_free(a->loop);
    }
    if (a->signal_fd >= 0)
        close(a->signal_fd);
    if (a->lock_fd >= 0)
        close(a->lock_fd);
    config_free(a->config);
}

static int load(struct app *a, const char *path)
{
    int r = config_load(path, &a->config, config_problem_print, stderr);
    struct log_options o = {.fd = STDERR_FILENO, .journal_stream = getenv("JOURNAL_STREAM")};

    if (r == -ENOENT && strcmp(path, CONFIG_FILE) == 0)
        fprintf(stderr, "kvd: start with an example: /usr/share/doc/kvd/kvd.conf, or -c FILE\n");
    if (r < 0)
        return r;
    o.level = (int)a->config->daemon.log_level;
    o.target = (enum log_target)a->config->daemon.log_target;
    log_init(&a->log, &o);
    return 0;
}

static int serve(const char *path, bool check_only)
{
    struct app *a = calloc(1, sizeof(*a)); /* large: it holds all sockets' tables */
    int r;

    if (!a)
        return 1;
    a->lock_fd = a->signal_fd = -1;
    r = load(a, path);
    if (r == 0 && check_only) {
        printf("%s: %u spaces, %u pools, %u sockets: good\n", path, a->config->space_count,
               a->config->pool_count, a->config->socket_count);
    } else if (r == 0) {
        raise_limits(a);
        r = guard_install();
        if (r == 0)
            r = take_signals(a);
        if (r == 0)
            r = run(a);
        if (r == -ECANCELED)
            r = 0; /* SIGTERM while starting */
        if (r < 0)
            sd_notifyf(0, "ERRNO=%d\nSTATUS=%s", -r, strerror(-r));
    }
    stop(a);
    free(a);
    return r < 0 ? 1 : 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},
        {"check", no_argument, NULL, 'C'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    const char *path = CONFIG_FILE;
    bool check = false;
    int c;

    while ((c = getopt_long(argc, argv, "c:hV", options, NULL)) != -1) {
        switch (c) {
        case 'c':
            path = optarg;
            break;
        case 'C':
            check = true;
            break;
        case 'h':
            usage(stdout);
            return 0;
        case 'V':
            printf("kvd %s\n", KVD_VERSION);
            return 0;
        default:
            usage(stderr);
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "kvd: what is \"%s\"?\n", argv[optind]);
        usage(stderr);
        return 2;
    }
    return serve(path, check);
}
