/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "conn.h"
#include "proto/frame.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; younger than the libc headers */
#endif

#define MILLISECOND UINT64_C(1000000)
#define SECOND      (1000 * MILLISECOND)

enum {
    ACCEPTS_PER_TURN = 64,
    PAUSE_MS = 100, /* before accepting again without descriptors or memory */
    NOTE_MAX = 512,
};

void server_note(const struct server *server, const struct conn *conn, int status,
                 const char *format, ...)
{
    char text[NOTE_MAX];
    va_list args;

    if (!server->options.ops->note)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    server->options.ops->note(server->options.ctx, conn, status, text);
}

/* ---- the lock of a runtime directory */

static pid_t read_holder(int fd)
{
    char text[32] = {0};

    if (pread(fd, text, sizeof(text) - 1, 0) <= 0)
        return 0;
    return (pid_t)strtol(text, NULL, 10);
}

static int write_holder(int fd)
{
    char text[32];
    int n = snprintf(text, sizeof(text), "%ld\n", (long)getpid());

    ssize_t written;

    if (ftruncate(fd, 0) < 0)
        return -errno;
    written = pwrite(fd, text, (size_t)n, 0);
    if (written < 0)
        return -errno;
    return written == n ? 0 : -EIO;
}

static int lock_file(int fd, pid_t *ret_holder)
{
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        return write_holder(fd);
    if (errno != EWOULDBLOCK)
        return -errno;
    if (ret_holder)
        *ret_holder = read_holder(fd);
    return -EADDRINUSE;
}

int server_lock(const char *runtime_dir, int *ret_fd, pid_t *ret_holder)
{
    int dir = open(runtime_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd, err;

    if (dir < 0)
        return -errno;
    fd = openat(dir, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    /* Nobody else may open it: whoever can, can lock it, and keep us from starting. */
    err = fd < 0 || fchmod(fd, 0600) < 0 ? -errno : lock_file(fd, ret_holder);
    close(dir);
    if (err) {
        if (fd >= 0)
            close(fd);
        return err;
    }
    *ret_fd = fd;
    return 0;
}

/* ---- the server */

static int pidfd_open_syscall(pid_t pid, unsigned flags)
{
    return (int)syscall(SYS_pidfd_open, pid, flags);
}

static int getsockopt_libc(int sock, int level, int name, void *value, socklen_t *len)
{
    return getsockopt(sock, level, name, value, len);
}

static int accept4_libc(int sock, struct sockaddr *addr, socklen_t *len, int flags)
{
    return accept4(sock, addr, len, flags);
}

static void set_defaults(struct server_options *o)
{
    if (!o->max_frame_bytes)
        o->max_frame_bytes = (1 << 20) + (64 << 10);
    if (!o->max_queue_bytes)
        o->max_queue_bytes = 8 << 20;
    if (!o->first_request_ns)
        o->first_request_ns = 10 * SECOND;
    if (!o->requests_per_turn)
        o->requests_per_turn = 16;
    if (!o->sys.accept4)
        o->sys.accept4 = accept4_libc;
    if (!o->sys.getsockopt)
        o->sys.getsockopt = getsockopt_libc;
    if (!o->sys.pidfd_open)
        o->sys.pidfd_open = pidfd_open_syscall;
}

/* The deadline may have been lifted since the timer was armed: then this only arms it anew. */
static void deadline_passed(void *arg)
{
    struct server *server = arg;
    uint64_t now = loop_now(server->options.loop);

    while (!list_empty(&server->waiting)) {
        struct conn *conn = conn_of_waiting(server->waiting.next);

        if (conn_deadline(conn) > now)
            break;
        conn_expire(conn);
    }
    server_arm(server);
}

void server_arm(struct server *server)
{
    if (!list_empty(&server->waiting) && !loop_timer_armed(server->timer))
        loop_timer_arm(server->timer, conn_deadline(conn_of_waiting(server->waiting.next)), 0);
}

static int open_reserve(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

int server_new(const struct server_options *options, struct server **ret_server)
{
    struct server *server = calloc(1, sizeof(*server));
    int err;

    if (!server)
        return -ENOMEM;
    server->options = *options;
    set_defaults(&server->options);
    list_init(&server->listeners);
    list_init(&server->conns);
    list_init(&server->waiting);
    server->reserve_fd = open_reserve();
    err = server->reserve_fd < 0 ? -errno : 0;
    if (!err)
        err = loop_timer_new(options->loop, deadline_passed, server, &server->timer);
    if (err) {
        if (server->reserve_fd >= 0)
            close(server->reserve_fd);
        free(server);
        return err;
    }
    *ret_server = server;
    return 0;
}

static void listener_free(struct listener *l)
{
    list_remove(&l->link);
    loop_timer_free(l->resume);
    free(l);
}

void server_free(struct server *server)
{
    struct list *pos, *tmp;

    if (!server)
        return;
    server_stop_listening(server);
    while (!list_empty(&server->conns)) {
        struct conn *conn = conn_of_list(server->conns.next);

        conn_close(conn);
        conn_bury(conn);
    }
    kvd_list_for_each (pos, tmp, &server->listeners)
        listener_free(list_entry(pos, struct listener, link));
    loop_timer_free(server->timer);
    if (server->reserve_fd >= 0)
        close(server->reserve_fd);
    free(server);
}

unsigned server_connections(const struct server *server, const struct server_socket *socket)
{
    struct list *pos, *tmp;

    if (!socket)
        return server->connections;
    kvd_list_for_each (pos, tmp, &server->listeners) {
        struct listener *l = list_entry(pos, struct listener, link);

        if (l->config == socket)
            return l->connections;
    }
    return 0;
}

const struct server_stats *server_stats(const struct server *server)
{
    return &server->stats;
}

void server_event(struct server *server, Kvd__Proto__Event__Kind kind)
{
    struct list *pos, *tmp;

    kvd_list_for_each (pos, tmp, &server->conns) {
        struct conn *conn = conn_of_list(pos);
        int err = conn_has_spoken(conn) ? conn_event(conn, kind) : 0;

        if (err && err != -ENOTCONN)
            server_note(server, conn, err, "cannot send an event");
    }
}

/* ---- who is there */

/* Field 22; the command name before it may contain anything, also ')' and blanks. */
static uint64_t read_start_time(pid_t pid)
{
    char path[64], text[1024], *p;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    p = strrchr(text, ')');
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p ? strtoull(p, NULL, 10) : 0;
}

static bool has_exited(int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};

    return poll(&p, 1, 0) != 0;
}

static int open_pidfd(const struct server_sys *sys, int fd, pid_t pid)
{
    int pidfd = -1;
    socklen_t len = sizeof(pidfd);

    if (sys->getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len) == 0)
        return pidfd;
    if (errno != ENOPROTOOPT)
        return -errno;
    pidfd = sys->pidfd_open(pid, 0); /* always close-on-exec */
    return pidfd < 0 ? -errno : pidfd;
}

static int get_cred(const struct server_sys *sys, int fd, struct peer *peer)
{
    struct ucred cred;
    socklen_t len = sizeof(cred);

    if (sys->getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
        return -errno;
    *peer = (struct peer){.pid = cred.pid, .uid = cred.uid, .gid = cred.gid, .pidfd = -1};
    return 0;
}

/* The start time belongs to the process of the pidfd only if that lived after we read it: till then
 * its pid cannot have been given to another. That the process of a pidfd_open() is the one that
 * connected cannot be seen here; the client's Hello has its start time to compare. */
static int get_process(const struct server_sys *sys, int fd, struct peer *peer)
{
    int pidfd = open_pidfd(sys, fd, peer->pid);

    if (pidfd < 0)
        return pidfd;
    peer->start_time = read_start_time(peer->pid);
    if (has_exited(pidfd)) {
        close(pidfd);
        return -ESRCH;
    }
    peer->pidfd = pidfd;
    return 0;
}

/* ---- accepting */

/* Says why, if that can be done without waiting, and hangs up. */
static void refuse(struct listener *l, int fd, int status, const char *message)
{
    Kvd__Proto__ServerFrame frame = KVD__PROTO__SERVER_FRAME__INIT;
    Kvd__Proto__Response response = KVD__PROTO__RESPONSE__INIT;
    struct frame_queue queue;
    struct frame_out *out;

    response.status = status;
    response.message = (char *)message; /* packing only reads it */
    frame.response = &response;
    frame_queue_init(&queue);
    if (frame_out_new(&frame.base, NOTE_MAX * 2, NULL, 0, &out) == 0) {
        frame_queue_push(&queue, out);
        frame_queue_flush(&queue, fd);
        frame_queue_clear(&queue);
    }
    close(fd);
    l->server->stats.refused++;
    server_note(l->server, NULL, status, "%s: refused a connection: %s", l->config->path, message);
}

static bool uid_allowed(const struct server_socket *config, uid_t uid)
{
    for (size_t i = 0; i < config->n_uids; i++)
        if (config->uids[i] == uid)
            return true;
    return config->n_uids == 0;
}

/* 0, or why this peer may not come in. */
static int check_peer(const struct listener *l, int fd, struct peer *peer, char text[NOTE_MAX])
{
    const struct server_socket *config = l->config;
    int err = get_cred(&l->server->options.sys, fd, peer);

    if (err) {
        snprintf(text, NOTE_MAX, "cannot tell who you are: %s", strerror(-err));
        return err;
    }
    if (peer->pid == 0) {
        snprintf(
            text, NOTE_MAX,
            "your process is in a PID namespace that the daemon cannot see, so it could not notice "
            "your end: run the worker in the daemon's PID namespace (containers: --pid=host, or "
            "the daemon and its workers in one pod with a shared process namespace)");
        return -EPERM;
    }
    if (!uid_allowed(config, peer->uid)) {
        snprintf(text, NOTE_MAX, "uid %lu is not in the list of uids of %s",
                 (unsigned long)peer->uid, config->path);
        return -EPERM;
    }
    if (l->connections >= config->max_connections) {
        snprintf(text, NOTE_MAX,
                 "%s has its maximum of %u connections: close some or raise the limit",
                 config->path, config->max_connections);
        return -EUSERS;
    }
    err = get_process(&l->server->options.sys, fd, peer);
    if (err)
        snprintf(text, NOTE_MAX, "cannot watch your process (pid %ld): %s", (long)peer->pid,
                 strerror(-err));
    return err;
}

static void admit(struct listener *l, int fd)
{
    char text[NOTE_MAX];
    struct peer peer;
    int err = check_peer(l, fd, &peer, text);

    if (err) {
        refuse(l, fd, err, text);
        return;
    }
    err = conn_new(l, fd, &peer);
    if (err) {
        close(peer.pidfd);
        refuse(l, fd, err, "the daemon is out of memory or descriptors");
        return;
    }
    l->server->stats.accepted++;
}

static void resume_accepting(void *arg)
{
    struct listener *l = arg;
    int err = loop_modify(l->source, EPOLLIN);

    if (!err)
        return;
    server_note(l->server, NULL, err, "%s: cannot accept again yet", l->config->path);
    loop_timer_arm(l->resume, loop_now(l->server->options.loop) + PAUSE_MS * MILLISECOND, 0);
}

/* The connection stays in the backlog, which would wake us again and again: look away. */
static void pause_accepting(struct listener *l, int err)
{
    uint64_t now = loop_now(l->server->options.loop);

    if (!l->starved)
        server_note(l->server, NULL, err, "%s: cannot accept for now: %s", l->config->path,
                    strerror(-err));
    l->starved = true;
    if (loop_modify(l->source, 0) == 0)
        loop_timer_arm(l->resume, now + PAUSE_MS * MILLISECOND, 0);
}

static int accept_one(struct listener *l)
{
    int fd = l->server->options.sys.accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    return fd < 0 ? -errno : fd;
}

/* Without descriptors left, the reserve lets us tell one peer per pause instead of nobody. */
static void refuse_one(struct listener *l)
{
    struct server *server = l->server;
    int fd;

    if (server->reserve_fd < 0)
        return;
    close(server->reserve_fd);
    fd = accept_one(l);
    if (fd >= 0)
        refuse(
            l, fd, -EMFILE,
            "the daemon has no file descriptors left: raise its LimitNOFILE or close connections");
    server->reserve_fd = open_reserve();
}

static bool is_passing(int err)
{
    return err == -EINTR || err == -ECONNABORTED;
}

static void accept_ready(void *arg, uint32_t events)
{
    struct listener *l = arg;

    (void)events;
    if (l->server->reserve_fd < 0)
        l->server->reserve_fd = open_reserve();
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept_one(l);

        if (fd >= 0) {
            l->starved = false;
            admit(l, fd);
            continue;
        }
        if (is_passing(fd))
            continue;
        if (fd == -EMFILE || fd == -ENFILE)
            refuse_one(l);
        if (fd != -EAGAIN)
            pause_accepting(l, fd);
        return;
    }
}

/* ---- listening */

static int make_address(const char *path, struct sockaddr_un *ret_addr)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    if (path[0] != '/')
        return -EINVAL;
    if (strlen(path) >= sizeof(addr.sun_path))
        return -ENAMETOOLONG;
    memcpy(addr.sun_path, path, strlen(path));
    *ret_addr = addr;
    return 0;
}

/* Does somebody listen at this socket file? A full backlog (EAGAIN) is somebody, too. */
static int probe(const struct sockaddr_un *addr)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int err;

    if (fd < 0)
        return -errno;
    err = connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) < 0 ? -errno : 0;
    close(fd);
    if (err == 0 || err == -EAGAIN || err == -EPROTOTYPE)
        return -EADDRINUSE;
    return err == -ECONNREFUSED || err == -ENOENT ? 0 : err;
}

/* Makes room for a new socket file: removes one whose owner is dead, and nothing else. */
static int clear_path(const char *path, const struct sockaddr_un *addr)
{
    struct stat st;
    int err;

    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(st.st_mode))
        return -ENOTSOCK;
    err = probe(addr);
    if (err)
        return err;
    return unlink(path) < 0 && errno != ENOENT ? -errno : 0;
}

/* The umask makes the mode right at birth. (It is the whole process's: no other thread may create
 * files now.) A default ACL on the folder overrides it, hence the chmod(); and nobody can connect
 * before listen(). */
static int bind_socket(int fd, const struct server_socket *config, const struct sockaddr_un *addr)
{
    mode_t old = umask(~config->mode & 0777);
    int err = bind(fd, (const struct sockaddr *)addr, sizeof(*addr)) < 0 ? -errno : 0;

    umask(old);
    if (err)
        return err;
    if ((config->group != (gid_t)-1 && chown(config->path, (uid_t)-1, config->group) < 0) ||
        chmod(config->path, config->mode) < 0 || listen(fd, SOMAXCONN) < 0) {
        err = -errno;
        unlink(config->path);
    }
    return err;
}

#define LOCK_TRIES    50
#define LOCK_PAUSE_US 10000

/* Of two daemons that find the same dead socket, the slower one would remove what the faster one
 * has just bound. The lock on the folder keeps them apart even when they do not share a runtime
 * directory. A daemon holds it for moments; who can read the folder can hold it for ever, so after a
 * while we go on without it. */
static int lock_folder(const char *path)
{
    char copy[sizeof(((struct sockaddr_un *)0)->sun_path)];
    int fd;

    snprintf(copy, sizeof(copy), "%s", path);
    fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB) < 0; tries++) {
        int err = -errno;

        if (err == -EWOULDBLOCK && tries < LOCK_TRIES) {
            usleep(LOCK_PAUSE_US);
            continue;
        }
        if (err == -EWOULDBLOCK)
            return fd;
        close(fd);
        return err;
    }
    return fd;
}

static int make_socket(const struct server_socket *config, int *ret_fd)
{
    struct sockaddr_un addr;
    int err = make_address(config->path, &addr);
    int folder, fd;

    if (err)
        return err;
    folder = lock_folder(config->path);
    if (folder < 0)
        return folder;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    err = fd < 0 ? -errno : clear_path(config->path, &addr);
    if (!err)
        err = bind_socket(fd, config, &addr);
    close(folder);
    if (err) {
        if (fd >= 0)
            close(fd);
        return err;
    }
    *ret_fd = fd;
    return 0;
}

static bool is_bound_to(int fd, const char *path)
{
    struct sockaddr_un addr = {0};
    socklen_t len = sizeof(addr) - 1; /* keeps a 0 at the end */
    int type = 0, listening = 0;
    socklen_t n = sizeof(int);

    return getsockname(fd, (struct sockaddr *)&addr, &len) == 0 && addr.sun_family == AF_UNIX &&
           strcmp(addr.sun_path, path) == 0 &&
           getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0 && type == SOCK_STREAM &&
           getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &n) == 0 && listening;
}

/* -1 when the service manager gave us none for this path. */
static int find_inherited(const struct server_options *o, const char *path)
{
    for (size_t i = 0; i < o->n_inherited; i++)
        if (is_bound_to(o->inherited[i], path))
            return o->inherited[i];
    return -1;
}

static int adopt(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return -errno;
    return 0;
}

static void note_failure(struct server *server, const struct server_socket *socket, int err)
{
    const char *why = strerror(-err);

    if (err == -EADDRINUSE)
        why = "another process listens there";
    else if (err == -ENOTSOCK)
        why = "something that is not a socket has this name: remove it or configure another path";
    else if (err == -EINVAL)
        why = "the path must be absolute";
    server_note(server, NULL, err, "cannot listen on %s: %s", socket->path, why);
}

static int open_listener(struct listener *l)
{
    struct stat st;
    int err;

    l->fd = find_inherited(&l->server->options, l->config->path);
    if (l->fd >= 0)
        return adopt(l->fd);
    err = make_socket(l->config, &l->fd);
    if (err)
        return err;
    l->made = stat(l->config->path, &st) == 0;
    l->dev = l->made ? st.st_dev : 0;
    l->ino = l->made ? st.st_ino : 0;
    return 0;
}

/* The file goes only if it is still ours: somebody may have removed it and made another. */
static void close_listener(struct listener *l)
{
    struct stat st;

    if (l->fd < 0)
        return;
    loop_remove(l->source);
    l->source = NULL;
    if (l->resume)
        loop_timer_disarm(l->resume);
    if (l->made && lstat(l->config->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->config->path);
    close(l->fd);
    l->fd = -1;
}

int server_listen(struct server *server, const struct server_socket *socket)
{
    struct listener *l = calloc(1, sizeof(*l));
    int err;

    if (!l)
        return -ENOMEM;
    *l = (struct listener){.server = server, .config = socket, .fd = -1};
    list_append(&server->listeners, &l->link);
    err = loop_timer_new(server->options.loop, resume_accepting, l, &l->resume);
    if (!err)
        err = open_listener(l);
    if (!err)
        err = loop_add(server->options.loop, l->fd, EPOLLIN, accept_ready, l, &l->source);
    if (err) {
        note_failure(server, socket, err);
        close_listener(l);
        listener_free(l);
    }
    return err;
}

void server_stop_listening(struct server *server)
{
    struct list *pos, *tmp;

    kvd_list_for_each (pos, tmp, &server->listeners)
        close_listener(list_entry(pos, struct listener, link));
}
