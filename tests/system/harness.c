/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>

#include "objects.h"

/* What harness_fini() kills and removes, should a test end in its middle. */
static struct daemon *daemons[8];
static struct worker *workers[WORKERS_MAX];
static char folders[16][64];
static char mounts[4][64];
static long hugepages_taken;

const char *const usual_pools =
    "[space one]\n[space two]\n"
    "[pool one/kv]\nslot = 64K\nslots = 64\nlow_water = 0\n"
    "[pool one/parts]\nslot = 32K\nparts = 2\nslots = 16\nlow_water = 0\n"
    "[pool two/kv]\nslot = 64K\nslots = 64\nlow_water = 0\n";

uint64_t clock_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static const char *program(const char *variable, const char *built)
{
    const char *given = getenv(variable);

    return given ? given : built;
}

static void note_pointer(void **table, size_t n, void *what)
{
    size_t i = 0;

    while (i < n && table[i] && table[i] != what)
        i++;
    cr_assert_lt(i, n, "too many of them for harness_fini()");
    table[i] = what;
}

static void note_folder(char (*table)[64], size_t n, const char *what)
{
    size_t i = 0;

    while (i < n && table[i][0])
        i++;
    cr_assert_lt(i, n, "too many of them for harness_fini()");
    snprintf(table[i], sizeof(table[i]), "%s", what);
}

/* ---- processes */

/* In the child: nothing of ours but the standard descriptors, and no life of its own. */
static void become(int in, int out, int err)
{
    sigset_t none;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close_range(3, ~0u, 0);
}

static void drain_notes(const struct daemon *d);

/* d: the daemon whose process it is, or NULL. */
static int wait_exit_of(pid_t pid, const struct daemon *d)
{
    uint64_t until = clock_ms() + PATIENCE_MS;
    int status;

    while (waitpid(pid, &status, WNOHANG) != pid) {
        cr_assert_lt(clock_ms(), until, "process %d does not end", (int)pid);
        if (d && !d->keep_notes)
            drain_notes(d); /* it waits until they are taken */
        usleep(500);
    }
    return status;
}

static int wait_exit(pid_t pid)
{
    return wait_exit_of(pid, NULL);
}

/* ---- the folder of a daemon */

void daemon_configure(struct daemon *d, const char *keys, const char *rest)
{
    FILE *f = fopen(d->config, "w");

    cr_assert_not_null(f);
    fprintf(f, "[daemon]\nruntime_dir = %s\nlog_target = stderr\nlog_level = debug\n", d->runtime);
    if (!keys || !strstr(keys, "hugepages"))
        fputs("hugepages = off\n", f);
    if (!keys || !strstr(keys, "quarantine"))
        fputs("quarantine = 300ms\n", f);
    fprintf(f, "%s\n%s\n", keys ? keys : "", rest);
    fprintf(f, "[socket writer]\npath = %s\nrole = writer\n", d->writer);
    fprintf(f, "[socket reader]\npath = %s\nrole = reader\n", d->reader);
    fprintf(f, "[socket admin]\npath = %s\nrole = admin\nmode = 0600\n", d->admin);
    cr_assert_eq(fclose(f), 0);
}

static void listen_for_notes(struct daemon *d)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", d->notify);
    d->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(d->notify_fd, 0);
    cr_assert_eq(bind(d->notify_fd, (struct sockaddr *)&a, sizeof(a)), 0, "%s", strerror(errno));
}

void daemon_prepare(struct daemon *d, const char *daemon_keys, const char *rest)
{
    strcpy(d->dir, "/dev/shm/kvd-system-XXXXXX");
    cr_assert_not_null(mkdtemp(d->dir));
    note_folder(folders, 16, d->dir);
    snprintf(d->runtime, sizeof(d->runtime), "%s/run", d->dir);
    snprintf(d->config, sizeof(d->config), "%s/kvd.conf", d->dir);
    snprintf(d->log, sizeof(d->log), "%s/log", d->dir);
    snprintf(d->writer, sizeof(d->writer), "%s/run/writer.sock", d->dir);
    snprintf(d->reader, sizeof(d->reader), "%s/run/reader.sock", d->dir);
    snprintf(d->admin, sizeof(d->admin), "%s/run/admin.sock", d->dir);
    snprintf(d->notify, sizeof(d->notify), "%s/notify", d->dir);
    daemon_configure(d, daemon_keys, rest);
    listen_for_notes(d);
}

static void remove_folder(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *e;

    while (dir && (e = readdir(dir))) {
        char name[512];

        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        if (unlink(name) < 0 && errno == EISDIR)
            remove_folder(name);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

/* ---- starting and stopping a daemon */

static void set_environment(const struct daemon *d)
{
    char text[32];

    unsetenv("JOURNAL_STREAM");
    unsetenv("KVD_SOCKET");
    setenv("NOTIFY_SOCKET", d->notify, 1);
    unsetenv("WATCHDOG_PID");
    unsetenv("WATCHDOG_USEC");
    if (d->watchdog_us) {
        snprintf(text, sizeof(text), "%llu", (unsigned long long)d->watchdog_us);
        setenv("WATCHDOG_USEC", text, 1);
    }
}

static _Noreturn void run_daemon(const struct daemon *d)
{
    struct rlimit few = {.rlim_cur = d->max_fds, .rlim_max = d->max_fds};
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const char *kvd = program("KVD_DAEMON", KVD_DAEMON);

    become(null, log, log);
    set_environment(d);
    if (d->max_fds)
        setrlimit(RLIMIT_NOFILE, &few);
    if (d->enter && d->enter(d))
        _exit(125);
    execl(kvd, kvd, "-c", d->config, (char *)NULL);
    _exit(126);
}

/* The daemon is the first process of a namespace that knows nobody else. Signals are passed on to it. */
static pid_t nested;

static void pass_on(int sig)
{
    kill(nested, sig);
}

static _Noreturn void run_nested(const struct daemon *d)
{
    int status;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWPID | CLONE_NEWNS) < 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        _exit(125);
    nested = fork();
    if (nested == 0) {
        if (mount("proc", "/proc", "proc", 0, NULL) < 0)
            _exit(125);
        run_daemon(d);
    }
    signal(SIGTERM, pass_on);
    while (waitpid(nested, &status, 0) < 0 && errno == EINTR)
        ;
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 124);
}

void daemon_spawn(struct daemon *d)
{
    note_pointer((void **)daemons, 8, d);
    fflush(NULL);
    d->pid = fork();
    cr_assert_geq(d->pid, 0);
    if (d->pid == 0) {
        if (d->own_pid_namespace)
            run_nested(d);
        run_daemon(d);
    }
}

static void show_log(const struct daemon *d)
{
    char line[4096];
    FILE *f = fopen(d->log, "r");

    while (f && fgets(line, sizeof(line), f))
        fprintf(stderr, "    kvd: %s", line);
    if (f)
        fclose(f);
}

bool daemon_runs(const struct daemon *d)
{
    siginfo_t info = {0};

    return d->pid > 0 && waitid(P_PID, (id_t)d->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
}

/* One message of the notify socket, as lines; false: none yet. */
static bool take_note(struct daemon *d, char *text, size_t n)
{
    ssize_t got = recv(d->notify_fd, text, n - 1, MSG_DONTWAIT);

    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

static void drain_notes(const struct daemon *d)
{
    char text[2048];

    while (recv(d->notify_fd, text, sizeof(text), MSG_DONTWAIT) > 0)
        ;
}

void daemon_notified(struct daemon *d, const char *line)
{
    uint64_t until = clock_ms() + PATIENCE_MS;
    char text[2048];

    for (;;) {
        while (take_note(d, text, sizeof(text)))
            for (char *l = strtok(text, "\n"); l; l = strtok(NULL, "\n"))
                if (strcmp(l, line) == 0)
                    return;
        if (!daemon_runs(d) || clock_ms() > until) {
            show_log(d);
            cr_assert_fail("the daemon does not say %s", line);
        }
        usleep(500);
    }
}

void daemon_start(struct daemon *d)
{
    char text[2048];

    while (take_note(d, text, sizeof(text))) /* of an earlier run */
        ;
    daemon_spawn(d);
    daemon_notified(d, "READY=1");
}

void daemon_up(struct daemon *d, const char *daemon_keys, const char *rest)
{
    daemon_prepare(d, daemon_keys, rest);
    daemon_start(d);
}

static void forget_control(struct daemon *d)
{
    control_free(d->control);
    d->control = NULL;
}

void daemon_fails(struct daemon *d, int status, const char *text)
{
    int got;

    daemon_spawn(d);
    got = wait_exit(d->pid);
    d->pid = 0;
    if (!WIFEXITED(got) || WEXITSTATUS(got) != status || !daemon_logged(d, text))
        show_log(d);
    cr_assert(WIFEXITED(got), "it was killed by signal %d", WTERMSIG(got));
    cr_assert_eq(WEXITSTATUS(got), status, "exit status %d", WEXITSTATUS(got));
    cr_assert(daemon_logged(d, text), "it did not say \"%s\"", text);
}

void daemon_wait_clean(struct daemon *d)
{
    int status = wait_exit_of(d->pid, d);

    d->pid = 0;
    forget_control(d);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        show_log(d);
    cr_assert(WIFEXITED(status), "the daemon was killed by signal %d", WTERMSIG(status));
    cr_assert_eq(WEXITSTATUS(status), 0, "exit status %d", WEXITSTATUS(status));
    cr_assert_eq(daemon_files(d), 0, "it left files behind in %s", d->runtime);
    cr_assert(access(d->writer, F_OK) < 0 && access(d->admin, F_OK) < 0, "it left its sockets");
}

/* That it had no life left to end is what most of these tests are about. */
void daemon_stop(struct daemon *d)
{
    if (!daemon_runs(d))
        show_log(d);
    cr_assert(daemon_runs(d), "the daemon has died");
    forget_control(d); /* it would wait for us to read its goodbye */
    cr_assert_eq(kill(d->pid, SIGTERM), 0);
    daemon_wait_clean(d);
}

void daemon_kill(struct daemon *d)
{
    cr_assert(daemon_runs(d));
    kill(d->pid, SIGKILL);
    wait_exit(d->pid);
    d->pid = 0;
    forget_control(d);
}

bool daemon_logged(const struct daemon *d, const char *text)
{
    char line[4096];
    FILE *f = fopen(d->log, "r");
    bool found = false;

    while (f && !found && fgets(line, sizeof(line), f))
        found = strstr(line, text) != NULL;
    if (f)
        fclose(f);
    return found;
}

unsigned daemon_files(const struct daemon *d)
{
    DIR *dir = opendir(d->runtime);
    struct dirent *e;
    unsigned n = 0;

    while (dir && (e = readdir(dir)))
        n += e->d_name[0] != '.' && strcmp(e->d_name, "lock") != 0 &&
             strcmp(e->d_name, "epochs") != 0 && !strstr(e->d_name, ".sock");
    if (dir)
        closedir(dir);
    return n;
}

/* ---- asking a daemon */

int daemon_ask(struct daemon *d, Kvd__Proto__Request *request, struct control_reply *ret_reply)
{
    struct control_options o = {.socket = d->admin, .client = "test"};

    if (!d->control) {
        cr_assert_eq(control_new(&o, &d->control), 0);
        if (control_connect(d->control, control_deadline(PATIENCE_MS), NULL) < 0) {
            show_log(d);
            cr_assert_fail("the daemon does not answer: %s", control_error(d->control));
        }
    }
    return control_call(d->control, request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                        control_deadline(PATIENCE_MS), ret_reply);
}

/* A request that must succeed. */
static void ask(struct daemon *d, Kvd__Proto__Request *request, struct control_reply *reply)
{
    int r = daemon_ask(d, request, reply);

    if (r < 0)
        show_log(d);
    cr_assert_eq(r, 0, "%s", control_error(d->control));
}

static void ask_status(struct daemon *d, struct control_reply *reply)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    ask(d, &request, reply);
    cr_assert_not_null(reply->response->status_reply);
}

static const Kvd__Proto__PoolStatus *find_pool(const Kvd__Proto__StatusReply *s, const char *name)
{
    char full[160];

    for (size_t i = 0; i < s->n_pools; i++) {
        snprintf(full, sizeof(full), "%s/%s", s->pools[i]->info->space, s->pools[i]->info->name);
        if (strcmp(full, name) == 0)
            return s->pools[i];
    }
    cr_assert_fail("no pool %s", name);
    return NULL;
}

struct counts daemon_counts(struct daemon *d, const char *pool)
{
    struct control_reply reply = {0};
    const Kvd__Proto__PoolStatus *p;
    struct counts c;

    ask_status(d, &reply);
    p = find_pool(reply.response->status_reply, pool);
    c = (struct counts){.slots = p->info->slots,
                        .free = p->free,
                        .reserved = p->reserved,
                        .live = p->live,
                        .in_flight = p->in_flight,
                        .quarantined = p->quarantined,
                        .pinned = p->pinned,
                        .evicted = p->evicted_total,
                        .committed = p->committed_total};
    control_reply_free(&reply);
    cr_assert_eq(c.free + c.reserved + c.live + c.in_flight + c.quarantined, c.slots, "I4");
    return c;
}

uint32_t daemon_pool(struct daemon *d, const char *pool)
{
    struct control_reply reply = {0};
    uint32_t id;

    ask_status(d, &reply);
    id = find_pool(reply.response->status_reply, pool)->info->pool;
    control_reply_free(&reply);
    return id;
}

uint32_t daemon_sessions(struct daemon *d)
{
    struct control_reply reply = {0};
    uint32_t n;

    ask_status(d, &reply);
    n = reply.response->status_reply->sessions;
    control_reply_free(&reply);
    return n;
}

uint32_t daemon_connections(struct daemon *d)
{
    struct control_reply reply = {0};
    uint32_t n;

    ask_status(d, &reply);
    n = reply.response->status_reply->connections;
    control_reply_free(&reply);
    return n;
}

void daemon_status(struct daemon *d, char *ret_state, char *ret_problems, size_t n)
{
    struct control_reply reply = {0};
    const Kvd__Proto__StatusReply *s;
    size_t used = 0;

    ask_status(d, &reply);
    s = reply.response->status_reply;
    snprintf(ret_state, n, "%s", s->state);
    ret_problems[0] = 0;
    for (size_t i = 0; i < s->n_problems && used < n; i++)
        used += (size_t)snprintf(ret_problems + used, n - used, "%s ", s->problems[i]);
    control_reply_free(&reply);
}

struct session_view daemon_session(struct daemon *d, pid_t pid)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Sessions sessions = KVD__PROTO__SESSIONS__INIT;
    struct session_view v = {.there = false};
    struct control_reply reply = {0};

    request.body_case = KVD__PROTO__REQUEST__BODY_SESSIONS;
    request.sessions = &sessions;
    ask(d, &request, &reply);
    for (size_t i = 0; i < reply.response->sessions->n_sessions; i++) {
        const Kvd__Proto__SessionInfo *s = reply.response->sessions->sessions[i];

        if ((pid_t)s->pid != pid || (v.there && s->session < v.id))
            continue;
        v = (struct session_view){.there = true,
                                  .id = s->session,
                                  .pid = s->pid,
                                  .pinned = s->pinned_objects,
                                  .reserved = s->reserved};
        snprintf(v.state, sizeof(v.state), "%s", s->state);
        snprintf(v.note, sizeof(v.note), "%s", s->note ? s->note : "");
    }
    control_reply_free(&reply);
    return v;
}

int daemon_kill_session(struct daemon *d, uint32_t session)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Kill kill_ = KVD__PROTO__KILL__INIT;

    kill_.session = session;
    request.body_case = KVD__PROTO__REQUEST__BODY_KILL;
    request.kill = &kill_;
    return daemon_ask(d, &request, NULL);
}

uint64_t daemon_evict(struct daemon *d, const char *pool, uint64_t first, uint64_t n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Evict evict = KVD__PROTO__EVICT__INIT;
    Kvd__Proto__Key key[256], *list[256];
    struct kvd_key bytes[256];
    struct control_reply reply = {0};
    uint64_t count;

    cr_assert_leq(n, 256);
    for (uint64_t i = 0; i < n; i++) {
        bytes[i] = object_key(first + i);
        kvd__proto__key__init(&key[i]);
        key[i].hash = (ProtobufCBinaryData){.data = bytes[i].hash, .len = 32};
        list[i] = &key[i];
    }
    evict.pool = daemon_pool(d, pool);
    evict.n_keys = n;
    evict.keys = list;
    request.body_case = KVD__PROTO__REQUEST__BODY_EVICT;
    request.evict = &evict;
    ask(d, &request, &reply);
    count = reply.response->count->count;
    control_reply_free(&reply);
    return count;
}

uint64_t daemon_flush(struct daemon *d, const char *pool)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Flush flush = KVD__PROTO__FLUSH__INIT;
    uint64_t count = 0;

    flush.pool = daemon_pool(d, pool);
    flush.tier = (char *)"ram";
    request.body_case = KVD__PROTO__REQUEST__BODY_FLUSH;
    request.flush = &flush;
    do {
        struct control_reply reply = {0};

        ask(d, &request, &reply);
        count += reply.response->count->count;
        flush.has_cursor = reply.response->count->has_next;
        flush.cursor = reply.response->count->next;
        control_reply_free(&reply);
    } while (flush.has_cursor);
    return count;
}

uint64_t daemon_stat(struct daemon *d, const char *name, const char *pool)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Stats stats = KVD__PROTO__STATS__INIT;
    struct control_reply reply = {0};
    uint64_t value = 0;
    bool found = false;

    request.body_case = KVD__PROTO__REQUEST__BODY_STATS;
    request.stats = &stats;
    ask(d, &request, &reply);
    for (size_t i = 0; i < reply.response->stats->n_stats; i++) {
        const Kvd__Proto__Stat *s = reply.response->stats->stats[i];

        if (strcmp(s->name, name) != 0 || (pool && (!s->pool || strcmp(s->pool, pool) != 0)))
            continue;
        value = s->value;
        found = true;
    }
    control_reply_free(&reply);
    cr_assert(found, "no statistic %s", name);
    return value;
}

void daemon_is_clean(struct daemon *d, const char *const *pools)
{
    eventually(daemon_sessions(d) == 1);
    for (; *pools; pools++) {
        eventually(daemon_counts(d, *pools).reserved == 0);
        eventually(daemon_counts(d, *pools).quarantined == 0);
        eventually(daemon_counts(d, *pools).pinned == 0);
        daemon_flush(d, *pools);
        cr_assert_eq(daemon_counts(d, *pools).free, daemon_counts(d, *pools).slots);
    }
}

/* ---- workers */

void worker_start(struct worker *w)
{
    const char *path = program("KVD_WORKER", KVD_WORKER);
    int in[2], out[2];

    *w = (struct worker){.pid = 0};
    note_pointer((void **)workers, WORKERS_MAX, w);
    cr_assert_eq(pipe2(in, O_CLOEXEC), 0);
    cr_assert_eq(pipe2(out, O_CLOEXEC), 0);
    fflush(NULL);
    w->pid = fork();
    cr_assert_geq(w->pid, 0);
    if (w->pid == 0) {
        become(in[0], out[1], STDERR_FILENO);
        execl(path, path, (char *)NULL);
        _exit(126);
    }
    close(in[0]);
    close(out[1]);
    w->in = in[1];
    w->out = out[0];
}

/* Children go where /proc/self/ns/pid_for_children says; ours come back. */
void worker_start_in(struct worker *w, const struct daemon *d)
{
    char path[64];
    int theirs, ours = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);

    snprintf(path, sizeof(path), "/proc/%d/ns/pid_for_children", (int)d->pid);
    theirs = open(path, O_RDONLY | O_CLOEXEC);
    cr_assert(ours >= 0 && theirs >= 0, "%s: %s", path, strerror(errno));
    cr_assert_eq(setns(theirs, CLONE_NEWPID), 0, "%s", strerror(errno));
    worker_start(w);
    cr_assert_eq(setns(ours, CLONE_NEWPID), 0, "%s", strerror(errno));
    close(theirs);
    close(ours);
}

static void vtell(struct worker *w, const char *format, va_list args)
{
    char line[4096];
    int n = vsnprintf(line, sizeof(line) - 1, format, args);

    cr_assert_lt(n, (int)sizeof(line) - 1);
    line[n++] = '\n';
    cr_assert_eq(write(w->in, line, (size_t)n), n, "worker %d: %s", (int)w->pid, strerror(errno));
}

void worker_tell(struct worker *w, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vtell(w, format, args);
    va_end(args);
}

static void read_more(struct worker *w)
{
    struct pollfd p = {.fd = w->out, .events = POLLIN};
    ssize_t n;

    cr_assert_gt(poll(&p, 1, PATIENCE_MS), 0, "worker %d does not answer", (int)w->pid);
    cr_assert_lt(w->have, sizeof(w->buffer) - 1);
    n = read(w->out, w->buffer + w->have, sizeof(w->buffer) - 1 - w->have);
    cr_assert_gt(n, 0, "worker %d has ended", (int)w->pid);
    w->have += (size_t)n;
}

int worker_answer(struct worker *w)
{
    char *end;
    size_t n;

    while (!(end = memchr(w->buffer, '\n', w->have)))
        read_more(w);
    n = (size_t)(end - w->buffer);
    memcpy(w->reply, w->buffer, n);
    w->reply[n] = 0;
    w->have -= n + 1;
    memmove(w->buffer, end + 1, w->have);
    if (strncmp(w->reply, "ok", 2) == 0) {
        memmove(w->reply, w->reply + (w->reply[2] ? 3 : 2), n);
        return 0;
    }
    cr_assert_eq(strncmp(w->reply, "err ", 4), 0, "what is \"%s\"?", w->reply);
    return atoi(w->reply + 4);
}

const char *worker_do(struct worker *w, const char *format, ...)
{
    va_list args;
    int r;

    va_start(args, format);
    vtell(w, format, args);
    va_end(args);
    r = worker_answer(w);
    cr_assert_eq(r, 0, "worker %d: %s: %s", (int)w->pid, format, w->reply);
    return w->reply;
}

long long worker_n(struct worker *w, const char *format, ...)
{
    va_list args;
    int r;

    va_start(args, format);
    vtell(w, format, args);
    va_end(args);
    r = worker_answer(w);
    cr_assert_eq(r, 0, "worker %d: %s: %s", (int)w->pid, format, w->reply);
    return atoll(w->reply);
}

int worker_try(struct worker *w, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vtell(w, format, args);
    va_end(args);
    return worker_answer(w);
}

void worker_join(struct worker *w, const char *socket, const char *space, const char *pool,
                 const char *flags)
{
    worker_start(w);
    worker_do(w, "connect %s %s", socket, flags);
    worker_do(w, "open %s %s %s", space, pool, strstr(flags, "read") ? "read" : "write");
}

static int bury(struct worker *w)
{
    int status = wait_exit(w->pid);

    w->pid = 0;
    close(w->in);
    close(w->out);
    return status;
}

void worker_quit(struct worker *w)
{
    int status;

    worker_tell(w, "quit");
    status = bury(w);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it ended with %x", status);
}

void worker_kill(struct worker *w)
{
    cr_assert_eq(kill(w->pid, SIGKILL), 0);
    bury(w);
}

void worker_died(struct worker *w, int sig)
{
    int status = bury(w);

    cr_assert(WIFSIGNALED(status), "it ended with %x", status);
    cr_assert_eq(WTERMSIG(status), sig, "it died of signal %d", WTERMSIG(status));
}

void bystander_start(struct worker *w, struct daemon *d)
{
    worker_join(w, d->writer, "two", "kv", "");
    worker_tell(w, "stand by");
}

/* What it says when it is spoken to: how many rounds it has gone, or what went wrong. */
void bystander_check(struct worker *w)
{
    for (int i = 0; i < 2; i++) {
        int r;

        worker_tell(w, "how far");
        r = worker_answer(w);
        cr_assert_eq(r, 0, "the bystander: %s", w->reply);
        cr_assert_gt(atoll(w->reply), 0);
    }
}

void bystander_stop(struct worker *w)
{
    int r;

    bystander_check(w);
    worker_tell(w, "stop");
    r = worker_answer(w);
    cr_assert_eq(r, 0, "the bystander: %s", w->reply);
    worker_quit(w);
}

void processor(pid_t pid, unsigned n)
{
    cpu_set_t ours, one;

    cr_assert_eq(sched_getaffinity(0, sizeof(ours), &ours), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &ours) && n-- == 0)
            CPU_SET(i, &one);
    if (CPU_COUNT(&one))
        cr_assert_eq(sched_setaffinity(pid, sizeof(one), &one), 0);
}

/* ---- hugepages */

static long read_number(const char *path)
{
    long n = -1;
    FILE *f = fopen(path, "r");

    if (f && fscanf(f, "%ld", &n) != 1)
        n = -1;
    if (f)
        fclose(f);
    return n;
}

static bool write_number(const char *path, long n)
{
    FILE *f = fopen(path, "w");

    if (!f)
        return false;
    fprintf(f, "%ld", n);
    return fclose(f) == 0;
}

#define NR_HUGEPAGES "/proc/sys/vm/nr_hugepages"

uint64_t hugepages_free(void)
{
    return (uint64_t)read_number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
}

bool hugepages_take(unsigned n)
{
    long before = read_number(NR_HUGEPAGES), now;

    if (before < 0 || !write_number(NR_HUGEPAGES, before + (long)n))
        return false;
    now = read_number(NR_HUGEPAGES);
    hugepages_taken += now - before;
    return now - before == (long)n;
}

/* Others may have changed the number meanwhile: what we added is taken back, no more. */
void hugepages_give_back(void)
{
    if (hugepages_taken)
        write_number(NR_HUGEPAGES, read_number(NR_HUGEPAGES) - hugepages_taken);
    hugepages_taken = 0;
}

static bool own_mounts(void)
{
    static bool done;

    if (!done)
        done = unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
    return done;
}

bool hugetlbfs_mount(unsigned pages, char ret_dir[64])
{
    char options[64];

    strcpy(ret_dir, "/dev/shm/kvd-system-huge-XXXXXX");
    cr_assert_not_null(mkdtemp(ret_dir));
    note_folder(folders, 16, ret_dir);
    snprintf(options, sizeof(options), "pagesize=2M,size=%uM", 2 * pages);
    if (!own_mounts() || mount("none", ret_dir, "hugetlbfs", 0, options) < 0)
        return false;
    note_folder(mounts, 4, ret_dir);
    return true;
}

unsigned hugetlbfs_used(const char *dir)
{
    struct statfs fs;

    cr_assert_eq(statfs(dir, &fs), 0);
    return (unsigned)(fs.f_blocks - fs.f_bfree);
}

bool hugetlbfs_hide(void)
{
    char line[1024], dir[512], type[64];
    bool again = true;

    if (!own_mounts())
        return false;
    while (again) {
        FILE *f = fopen("/proc/self/mounts", "r");

        again = false;
        while (f && !again && fgets(line, sizeof(line), f))
            again = sscanf(line, "%*s %511s %63s", dir, type) == 2 &&
                    strcmp(type, "hugetlbfs") == 0 && umount2(dir, MNT_DETACH) == 0;
        if (f)
            fclose(f);
    }
    return true;
}

/* ---- suites */

void harness_init(void)
{
    struct rlimit l;

    signal(SIGPIPE, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &l) == 0) {
        l.rlim_cur = l.rlim_max;
        setrlimit(RLIMIT_NOFILE, &l);
    }
}

void harness_fini(void)
{
    for (size_t i = 0; i < WORKERS_MAX && workers[i]; i++)
        if (workers[i]->pid > 0) {
            kill(workers[i]->pid, SIGKILL);
            waitpid(workers[i]->pid, NULL, 0);
        }
    for (size_t i = 0; i < 8 && daemons[i]; i++) {
        if (daemons[i]->pid > 0) {
            kill(daemons[i]->pid, SIGKILL);
            waitpid(daemons[i]->pid, NULL, 0);
        }
        control_free(daemons[i]->control);
    }
    for (size_t i = 0; i < 4 && mounts[i][0]; i++)
        umount2(mounts[i], MNT_DETACH);
    for (size_t i = 0; i < 16 && folders[i][0]; i++)
        remove_folder(folders[i]);
    hugepages_give_back();
}
