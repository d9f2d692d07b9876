/* SPDX-License-Identifier: Apache-2.0 */
/* Who may come in, and the files of the sockets. */
#define _GNU_SOURCE
#include "server_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

enum {
    NOBODY = 65534,
};

TestSuite(listen, .timeout = 60);

/* ---- who may come in */

Test(listen, a_thousand_at_once)
{
    enum { N = 1000 };
    struct client *c = calloc(N, sizeof(*c));
    struct rlimit limit = {16384, 16384};
    struct world w;

    if (setrlimit(RLIMIT_NOFILE, &limit) < 0) {
        cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
        if (limit.rlim_cur < 3 * N + 100)
            cr_skip_test("needs %d descriptors", 3 * N + 100);
    }
    setup(&w);
    for (int i = 0; i < N; i++) {
        connect_client(&w, &c[i]);
        send_ping(&c[i], (uint64_t)i + 1);
    }
    turn(&w, 100);
    cr_assert_eq(server_connections(w.server, NULL), N);
    cr_assert_eq(server_stats(w.server)->accepted, N);
    cr_assert_eq(server_stats(w.server)->requests, N);
    for (int i = 0; i < N; i++) {
        expect_answer(&c[i], (uint64_t)i + 1, 0);
        close_client(&c[i]);
    }
    turn(&w, 100);
    cr_assert_eq(w.closed, N);
    cr_assert_eq(server_connections(w.server, NULL), 0);
    free(c);
    teardown(&w);
}

Test(listen, no_more_than_the_limit)
{
    struct client a, b, c;
    struct world w;

    setup_folder(&w);
    w.socket.max_connections = 2;
    cr_assert_eq(start(&w), 0);
    connect_client(&w, &a);
    connect_client(&w, &b);
    connect_client(&w, &c);
    turn(&w, 1);
    expect_answer(&c, 0, -EUSERS);
    expect_end(&c);
    close_client(&c);
    cr_assert_eq(server_stats(w.server)->refused, 1);
    close_client(&b);
    turn(&w, 5);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    close_client(&a);
    close_client(&c);
    teardown(&w);
}

/* Runs fn in a child as user NOBODY while the world turns; its exit status. */
static int run_as_nobody(struct world *w, int (*fn)(const char *path))
{
    int status;
    pid_t pid = fork(), r;

    cr_assert_geq(pid, 0);
    if (pid == 0) {
        if (setresgid(NOBODY, NOBODY, NOBODY) < 0 || setresuid(NOBODY, NOBODY, NOBODY) < 0)
            _exit(99);
        _exit(fn(w->path));
    }
    while ((r = waitpid(pid, &status, WNOHANG)) == 0) {
        turn(w, 1);
        usleep(1000);
    }
    cr_assert_eq(r, pid);
    cr_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* 0 when a ping is answered; the errno of the answer, else of connect(). */
static int ping_once(const char *path)
{
    struct client c;
    struct answer a;

    c.fd = try_connect(path);
    if (c.fd < 0)
        return -c.fd;
    frame_reader_init(&c.in, MAX_FRAME, 0);
    frame_send_wait(c.fd, new_ping(1), frame_clock() + 10 * SECOND);
    while ((a = receive(&c)).result == -ETIMEDOUT)
        usleep(1000);
    return a.result ? -a.result : -a.status;
}

Test(listen, only_listed_uids)
{
    uid_t uids[] = {4242, 0};
    struct world w;

    if (geteuid() != 0)
        cr_skip_test("needs root");
    setup_folder(&w);
    w.socket.mode = 0666;
    w.socket.uids = uids;
    w.socket.n_uids = 2;
    cr_assert_eq(start(&w), 0);
    cr_assert_eq(run_as_nobody(&w, ping_once), EPERM);
    cr_assert_eq(w.requests, 0);
    cr_assert(strstr(w.last_note, "65534"), "%s", w.last_note);
    uids[1] = NOBODY;
    cr_assert_eq(run_as_nobody(&w, ping_once), 0);
    cr_assert_eq(w.requests, 1);
    teardown(&w);
}

Test(listen, the_mode_decides)
{
    struct stat st;
    struct world w;

    if (geteuid() != 0)
        cr_skip_test("needs root");
    setup_folder(&w);
    w.socket.mode = 0660;
    w.socket.group = 4242;
    umask(0);
    cr_assert_eq(start(&w), 0);
    cr_assert_eq(stat(w.path, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0660);
    cr_assert_eq(st.st_gid, 4242);
    cr_assert_eq(umask(0), 0, "the umask is as it was");
    cr_assert_eq(run_as_nobody(&w, ping_once), EACCES);
    stop(&w);
    w.socket.group = NOBODY;
    cr_assert_eq(start(&w), 0);
    cr_assert_eq(run_as_nobody(&w, ping_once), 0);
    teardown(&w);
}

/* In a PID namespace of its own, the server cannot see us, so our pid reads 0 there. */
static void serve_in_namespace(struct world *w, int ready)
{
    char byte = 1;

    if (start(w) < 0 || write(ready, &byte, 1) != 1)
        _exit(1);
    while (server_stats(w->server)->refused == 0) {
        if (loop_turn(w->loop, true) < 0)
            _exit(2);
        usleep(1000);
    }
    _exit(w->requests == 0 && server_stats(w->server)->accepted == 0 ? 0 : 3);
}

static pid_t start_in_namespace(struct world *w, int ready)
{
    pid_t pid = fork(), inner;
    int status;

    cr_assert_geq(pid, 0);
    if (pid > 0)
        return pid;
    if (unshare(CLONE_NEWPID) < 0)
        _exit(77);
    inner = fork();
    if (inner == 0)
        serve_in_namespace(w, ready);
    if (inner < 0 || waitpid(inner, &status, 0) < 0 || !WIFEXITED(status))
        _exit(4);
    _exit(WEXITSTATUS(status));
}

Test(listen, foreign_pid_namespace)
{
    struct client c;
    struct world w;
    struct answer a;
    int ready[2], status;
    char byte;
    pid_t pid;

    if (geteuid() != 0)
        cr_skip_test("needs root");
    setup_folder(&w);
    cr_assert_eq(pipe2(ready, O_CLOEXEC), 0);
    pid = start_in_namespace(&w, ready[1]);
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) {
        cr_assert_eq(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
            cr_skip_test("cannot make a PID namespace");
        cr_assert_fail("the server did not start");
    }
    connect_client(&w, &c);
    cr_assert_eq(frame_send_wait(c.fd, new_ping(1), UINT64_MAX) == 0 || errno == EPIPE, true);
    while ((a = receive(&c)).result == -ETIMEDOUT)
        usleep(1000);
    cr_assert_eq(a.result, 0);
    cr_assert_eq(a.status, -EPERM);
    cr_assert(strstr(a.message, "PID namespace"), "%s", a.message);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(status, 0);
    close_client(&c);
    close(ready[0]);
    close(w.null);
    unlink(w.path);
    cr_assert_eq(rmdir(w.dir), 0);
}

/* ---- the peer's process */

static int no_peerpidfd(int sock, int level, int name, void *value, socklen_t *len)
{
    if (name == SO_PEERPIDFD) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return getsockopt(sock, level, name, value, len);
}

static int connect_and_wait(const char *path)
{
    int fd = try_connect(path);

    if (fd < 0)
        return -fd;
    send(fd, "\x02\0\0\0\x08\x01", 6, MSG_NOSIGNAL);
    pause();
    return 0;
}

static void check_pidfd(struct world *w)
{
    struct pollfd p = {.events = POLLIN};
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0)
        _exit(connect_and_wait(w->path));
    while (!w->conn) {
        turn(w, 1);
        usleep(1000);
    }
    cr_assert_eq(conn_pid(w->conn), pid);
    cr_assert_gt(conn_start_time(w->conn), own_start_time() - 1);
    p.fd = conn_take_pidfd(w->conn);
    cr_assert_geq(p.fd, 0);
    cr_assert(fcntl(p.fd, F_GETFD) & FD_CLOEXEC);
    cr_assert_eq(conn_take_pidfd(w->conn), -1);
    cr_assert_eq(poll(&p, 1, 0), 0);
    kill(pid, SIGKILL);
    cr_assert_eq(poll(&p, 1, -1), 1, "the pidfd is of that process");
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    close(p.fd);
}

Test(listen, pidfd_of_the_peer)
{
    struct world w;

    setup(&w);
    check_pidfd(&w);
    teardown(&w);
}

Test(listen, pidfd_on_an_older_kernel)
{
    struct world w;

    setup_folder(&w);
    w.options.sys.getsockopt = no_peerpidfd;
    cr_assert_eq(start(&w), 0);
    check_pidfd(&w);
    teardown(&w);
}

/* The process that connected is gone; a child of it has the socket. */
static int leave_to_child(const char *path)
{
    int fd = try_connect(path);

    return fd < 0 ? -fd : 0;
}

static void check_gone(struct world *w)
{
    pid_t pid = fork();

    cr_assert_geq(pid, 0);
    if (pid == 0)
        _exit(leave_to_child(w->path));
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    turn(w, 2);
    cr_assert_eq(server_connections(w->server, NULL), 0);
    cr_assert_eq(server_stats(w->server)->refused, 1);
    cr_assert(strstr(w->last_note, "cannot watch"), "%s", w->last_note);
}

Test(listen, the_peer_is_gone)
{
    struct world w;

    setup(&w);
    check_gone(&w);
    teardown(&w);
}

Test(listen, the_peer_is_gone_on_an_older_kernel)
{
    struct world w;

    setup_folder(&w);
    w.options.sys.getsockopt = no_peerpidfd;
    cr_assert_eq(start(&w), 0);
    check_gone(&w);
    teardown(&w);
}

/* ---- without descriptors */

static int accept_errno, accept_failures, accept_calls;

static int failing_accept(int sock, struct sockaddr *addr, socklen_t *len, int flags)
{
    accept_calls++;
    if (accept_failures-- > 0) {
        errno = accept_errno;
        return -1;
    }
    return accept4(sock, addr, len, flags);
}

Test(listen, passing_errors_of_accept)
{
    struct client c;
    struct world w;

    setup_folder(&w);
    w.options.sys.accept4 = failing_accept;
    cr_assert_eq(start(&w), 0);
    accept_failures = 3;
    accept_errno = ECONNABORTED;
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    close_client(&c);
    teardown(&w);
}

static void check_starved(int error, int refused)
{
    struct client a, b;
    struct world w;

    setup_folder(&w);
    w.options.sys.accept4 = failing_accept;
    cr_assert_eq(start(&w), 0);
    connect_client(&w, &a);
    connect_client(&w, &b);
    accept_failures = 1;
    accept_errno = error;
    turn(&w, 1);
    accept_calls = 0;
    turn(&w, 10);
    cr_assert_eq(accept_calls, 0, "it looks away");
    cr_assert_eq((int)server_stats(w.server)->refused, refused);
    cr_assert_eq(server_connections(w.server, NULL), 0);
    w.now += SECOND;
    turn(&w, 5);
    cr_assert_eq((int)server_connections(w.server, NULL), 2 - refused, "and back");
    if (refused) {
        expect_answer(&a, 0, -EMFILE);
        expect_end(&a);
    }
    close_client(&a);
    close_client(&b);
    teardown(&w);
}

Test(listen, accept_without_resources)
{
    check_starved(EMFILE, 1);
    check_starved(ENFILE, 1);
    check_starved(ENOMEM, 0);
}

/* The real limit, with connections that stay: those get in that fit, one at a time hears why it
 * does not, and when there is room again the others get in. */
Test(listen, the_real_descriptor_limit)
{
    enum { N = 30 };
    struct rlimit old, low;
    struct client c[N];
    struct world w;
    unsigned in;

    setup(&w);
    for (int i = 0; i < N; i++)
        connect_client(&w, &c[i]);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = old;
    low.rlim_cur = (rlim_t)c[N - 1].fd + 12;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &low), 0);
    for (int i = 0; i < 5; i++) {
        w.now += SECOND;
        turn(&w, 5);
    }
    in = server_connections(w.server, NULL);
    cr_assert_gt(in, 2);
    cr_assert_lt(in, 8);
    cr_assert_geq(server_stats(w.server)->refused, 5);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    w.now += SECOND;
    turn(&w, 5);
    cr_assert_eq(server_connections(w.server, NULL) + server_stats(w.server)->refused, N);
    for (int i = 0; i < N; i++)
        close_client(&c[i]);
    teardown(&w);
}

/* ---- socket files */

static void bind_stale(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    cr_assert_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(listen(fd, 1), 0);
    close(fd);
}

Test(listen, a_stale_socket_is_replaced)
{
    struct client c;
    struct world w;

    setup_folder(&w);
    bind_stale(w.path);
    cr_assert_eq(try_connect(w.path), -ECONNREFUSED);
    cr_assert_eq(start(&w), 0);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    close_client(&c);
    teardown(&w);
}

Test(listen, a_living_socket_is_left_alone)
{
    struct world first, second;
    struct client c;

    setup(&first);
    connect_client(&first, &c);
    second = first;
    second.options.ctx = &second;
    cr_assert_eq(start(&second), -EADDRINUSE);
    cr_assert_eq(second.notes, 1);
    cr_assert(strstr(second.last_note, first.path), "%s", second.last_note);
    stop(&second);
    send_ping(&c, 1);
    turn(&first, 3);
    expect_answer(&c, 1, 0);
    close_client(&c);
    connect_client(&first, &c);
    send_ping(&c, 2);
    turn(&first, 3);
    expect_answer(&c, 2, 0);
    close_client(&c);
    teardown(&first);
}

/* Even when it is too busy to accept. */
Test(listen, a_full_backlog_is_alive)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd, clients[2];
    struct world w;

    setup_folder(&w);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", w.path);
    cr_assert_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(listen(fd, 0), 0);
    clients[0] = try_connect(w.path);
    cr_assert_geq(clients[0], 0);
    cr_assert_eq(start(&w), -EADDRINUSE);
    clients[1] = access(w.path, F_OK);
    cr_assert_eq(clients[1], 0, "the file is still there");
    close(fd);
    close(clients[0]);
    teardown(&w);
}

Test(listen, other_files_are_left_alone)
{
    struct stat st;
    struct world w;
    int fd;

    setup_folder(&w);
    fd = open(w.path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(write(fd, "precious", 8), 8);
    close(fd);
    cr_assert_eq(start(&w), -ENOTSOCK);
    cr_assert_eq(stat(w.path, &st), 0);
    cr_assert_eq(st.st_size, 8);
    teardown(&w);
}

Test(listen, impossible_paths)
{
    char path[200];
    struct world w;

    setup_folder(&w);
    w.socket.path = "kvd.sock";
    cr_assert_eq(start(&w), -EINVAL);
    memset(path, 'x', sizeof(path));
    path[0] = '/';
    path[sizeof(path) - 1] = 0;
    w.socket.path = path;
    cr_assert_eq(server_listen(w.server, &w.socket), -ENAMETOOLONG);
    w.socket.path = "/nonexistent/kvd.sock";
    cr_assert_eq(server_listen(w.server, &w.socket), -ENOENT);
    cr_assert_eq(w.notes, 3);
    teardown(&w);
}

Test(listen, the_file_goes_with_the_server)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    server_stop_listening(w.server);
    cr_assert_eq(access(w.path, F_OK), -1);
    send_ping(&c, 2);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    expect_answer(&c, 2, 0);
    close_client(&c);
    teardown(&w);
}

Test(listen, somebody_elses_file_stays)
{
    struct world w;

    setup(&w);
    cr_assert_eq(unlink(w.path), 0);
    bind_stale(w.path);
    server_stop_listening(w.server);
    cr_assert_eq(access(w.path, F_OK), 0);
    teardown(&w);
}

Test(listen, a_stranger_locks_the_folder)
{
    struct world w;
    int dir;

    setup_folder(&w);
    dir = open(w.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_eq(flock(dir, LOCK_EX), 0);
    cr_assert_eq(start(&w), 0, "a lock that is held for ever, by whoever can read the folder");
    close(dir);
    teardown(&w);
}

Test(listen, a_socket_of_the_service_manager)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct client c;
    struct world w;
    int fds[2];

    setup_folder(&w);
    fds[0] = socket(AF_UNIX, SOCK_STREAM, 0); /* bound there once, but it does not listen */
    fds[1] = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", w.path);
    cr_assert_eq(bind(fds[0], (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(unlink(w.path), 0);
    cr_assert_eq(bind(fds[1], (struct sockaddr *)&addr, sizeof(addr)), 0);
    cr_assert_eq(listen(fds[1], 10), 0);
    w.options.inherited = fds;
    w.options.n_inherited = 2;
    cr_assert_eq(start(&w), 0);
    cr_assert(fcntl(fds[1], F_GETFD) & FD_CLOEXEC);
    cr_assert(fcntl(fds[1], F_GETFL) & O_NONBLOCK);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    server_stop_listening(w.server);
    cr_assert_eq(access(w.path, F_OK), 0, "the file is the service manager's");
    close_client(&c);
    close(fds[0]);
    teardown(&w);
}

/* Two sockets with different roles in one server. */
Test(listen, several_sockets)
{
    struct server_socket admin;
    struct client a, b;
    char path[128];
    struct world w;

    setup(&w);
    admin = w.socket;
    snprintf(path, sizeof(path), "%s/admin.sock", w.dir);
    admin.path = path;
    admin.role = SERVER_ADMIN;
    cr_assert_eq(server_listen(w.server, &admin), 0);
    connect_client(&w, &a);
    b.fd = try_connect(path);
    frame_reader_init(&b.in, MAX_FRAME, 0);
    send_ping(&b, 1);
    turn(&w, 5);
    expect_answer(&b, 1, 0);
    cr_assert_eq(conn_socket(w.conn)->role, SERVER_ADMIN);
    cr_assert_eq(server_connections(w.server, &admin), 1);
    cr_assert_eq(server_connections(w.server, &w.socket), 1);
    cr_assert_eq(server_connections(w.server, NULL), 2);
    close_client(&a);
    close_client(&b);
    teardown(&w);
}

/* ---- the lock */

Test(listen, one_daemon_per_runtime_directory)
{
    int fd = -1, other = -1, status, ready[2];
    char path[128], byte;
    pid_t holder = 0, pid;
    struct stat st;
    struct world w;

    setup_folder(&w);
    snprintf(path, sizeof(path), "%s/lock", w.dir);
    cr_assert_eq(server_lock("/nonexistent", &fd, &holder), -ENOENT);
    cr_assert_eq(pipe2(ready, O_CLOEXEC), 0);
    pid = fork();
    if (pid == 0) {
        if (server_lock(w.dir, &fd, NULL) == 0 && write(ready[1], "x", 1) == 1)
            pause();
        _exit(1);
    }
    cr_assert_eq(read(ready[0], &byte, 1), 1);
    cr_assert_eq(server_lock(w.dir, &fd, &holder), -EADDRINUSE);
    cr_assert_eq(holder, pid);
    cr_assert_eq(fd, -1);
    kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(truncate(path, 100), 0);
    cr_assert_eq(server_lock(w.dir, &fd, &holder), 0, "the dead hold no lock");
    cr_assert_eq(fstat(fd, &st), 0);
    cr_assert_lt(st.st_size, 20, "nor does anything of theirs stay in it");
    cr_assert_eq(server_lock(w.dir, &other, &holder), -EADDRINUSE);
    cr_assert_eq(holder, getpid());
    close(fd);
    cr_assert_eq(server_lock(w.dir, &fd, NULL), 0);
    close(fd);
    close(ready[0]);
    close(ready[1]);
    unlink(path);
    close(w.null);
    cr_assert_eq(rmdir(w.dir), 0);
    cr_assert_eq(count_fds(), w.fds_before);
}
