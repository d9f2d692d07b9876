/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon and whoever starts it: the service manager, signals, the command line. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "harness.h"

TestSuite(notify, .init = harness_init, .fini = harness_fini);

static struct daemon d;
static struct worker a, b, c;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

/* The next message on the notify socket, whole. False: there is none, and none is waited for. */
static bool next_note(char *text, size_t n, bool wait)
{
    uint64_t until = clock_ms() + PATIENCE_MS;
    ssize_t got;

    while ((got = recv(d.notify_fd, text, n - 1, MSG_DONTWAIT)) < 0 && wait) {
        cr_assert(daemon_runs(&d), "the daemon has ended");
        cr_assert_lt(clock_ms(), until, "the daemon says nothing");
        usleep(500);
    }
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

static bool has_line(const char *text, const char *line)
{
    size_t n = strlen(line);

    for (; text; text = strchr(text, '\n')) {
        text += *text == '\n';
        if (strncmp(text, line, n) == 0 && (text[n] == '\n' || !text[n]))
            return true;
    }
    return false;
}

/* A worker's loop ends with the next command, here a check of all that it holds. Neither has
 * seen anything wrong. */
static void end_loop(struct worker *w)
{
    worker_tell(w, "check");
    for (int i = 0; i < 2; i++) {
        int r = worker_answer(w);

        cr_assert_eq(r, 0, "worker %d: %s", (int)w->pid, w->reply);
    }
}

/* ---- the service manager */

Test(notify, says_ready_with_a_status)
{
    char text[1024];

    daemon_prepare(&d, NULL, usual_pools);
    daemon_spawn(&d);
    do
        next_note(text, sizeof(text), true);
    while (!has_line(text, "READY=1"));
    cr_assert(has_line(text, "STATUS=Ready: 2 spaces, 3 pools"), "%s", text);

    /* Ready means that the next connection is served. */
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    worker_quit(&a);
    daemon_stop(&d);
    while (next_note(text, sizeof(text), false))
        cr_assert_not(has_line(text, "WATCHDOG=1"), "nobody has asked for that");
}

Test(notify, feeds_the_watchdog)
{
    daemon_prepare(&d, NULL, usual_pools);
    d.watchdog_us = 200000;
    daemon_start(&d);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_do(&a, "churn 1 96");
    for (int i = 0; i < 5; i++)
        daemon_notified(&d, "WATCHDOG=1");
    end_loop(&a);
    worker_quit(&a);

    /* It is the core that says so, not something beside it. */
    cr_assert_eq(kill(d.pid, SIGSTOP), 0);
    cr_assert_eq(waitpid(d.pid, NULL, WUNTRACED), d.pid);
    for (char text[1024]; next_note(text, sizeof(text), false);)
        ;
    usleep(5 * d.watchdog_us);
    for (char text[1024]; next_note(text, sizeof(text), false);)
        cr_assert_not(has_line(text, "WATCHDOG=1"));
    kill(d.pid, SIGCONT);
    daemon_notified(&d, "WATCHDOG=1");
    daemon_stop(&d);
}

/* ---- stopping */

/* While they use it as hard as they can. They go on living. */
static void stop_under_load(int signal)
{
    char text[1024];
    bool said = false;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "parts", "");
    worker_join(&c, d.reader, "one", "kv", "read");
    worker_do(&a, "churn 1 96");
    worker_do(&b, "churn 2 24");
    worker_tell(&c, "watch 0 96");
    cr_assert_eq(kill(d.pid, signal), 0);
    d.keep_notes = true;
    daemon_wait_clean(&d);
    while (next_note(text, sizeof(text), false))
        said |= has_line(text, "STOPPING=1");
    cr_assert(said);

    /* What was pinned has its bytes; nothing is hit in memory that nobody tends any more. */
    end_loop(&a);
    end_loop(&b);
    end_loop(&c);
    cr_assert_eq(worker_n(&c, "lookup 0 96"), 0);
    cr_assert_eq(worker_n(&c, "pin 0 96 all"), 0);
    cr_assert_eq(worker_try(&a, "publish 0 8"), -ENOTCONN);
    worker_quit(&a);
    worker_quit(&b);
    worker_quit(&c);
}

Test(notify, sigterm_stops_it_under_load)
{
    stop_under_load(SIGTERM);
}

Test(notify, sigint_stops_it_under_load)
{
    stop_under_load(SIGINT);
}

Test(notify, sighup_changes_nothing)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
    cr_assert_eq(kill(d.pid, SIGHUP), 0);
    eventually(daemon_logged(&d, "SIGHUP: the configuration is read at start only; restart kvd"));
    cr_assert_eq(kill(d.pid, SIGHUP), 0);
    cr_assert_eq(worker_n(&a, "publish 8 8"), 8);
    cr_assert_eq(worker_n(&a, "check"), 8);
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 16);
    worker_quit(&a);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* ---- the command line */

static const char *kvd_path(void)
{
    const char *given = getenv("KVD_DAEMON");

    return given ? given : KVD_DAEMON;
}

/* Blocks SIGTERM, and has it pending already; both survive the exec. */
static void terminate_beforehand(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGTERM);
}

/* Runs the program to its end; its exit status, and what it has said on either stream. */
static int run(char **argv, bool terminated, char *ret_text, size_t n)
{
    uint64_t until = clock_ms() + PATIENCE_MS;
    int fds[2], status;
    size_t have = 0;
    ssize_t got;
    pid_t pid;

    cr_assert_eq(pipe2(fds, O_CLOEXEC), 0);
    fflush(NULL);
    pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        unsetenv("NOTIFY_SOCKET");
        unsetenv("JOURNAL_STREAM");
        dup2(fds[1], STDOUT_FILENO);
        dup2(fds[1], STDERR_FILENO);
        if (terminated)
            terminate_beforehand();
        execv(kvd_path(), argv);
        _exit(126);
    }
    close(fds[1]);
    cr_assert_eq(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    while ((got = read(fds[0], ret_text + have, n - 1 - have)) != 0) {
        if (got > 0) {
            have += (size_t)got;
        } else if (clock_ms() > until) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            ret_text[have] = 0;
            cr_assert_fail("it does not end: %s", ret_text);
        } else {
            usleep(500);
        }
    }
    close(fds[0]);
    ret_text[have] = 0;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status), "killed by signal %d: %s", WTERMSIG(status), ret_text);
    return WEXITSTATUS(status);
}

#define arguments(...) ((char *[]){(char *)"kvd", __VA_ARGS__, NULL})

static void says(const char *text, const char *what)
{
    cr_assert(strstr(text, what), "\"%s\" is not in: %s", what, text);
}

Test(notify, check_of_a_good_configuration)
{
    char text[4096];

    daemon_prepare(&d, NULL, usual_pools);
    cr_assert_eq(run(arguments("--check", "-c", d.config), false, text, sizeof(text)), 0, "%s",
                 text);
    says(text, d.config);
    says(text, "2 spaces, 3 pools, 3 sockets: good");
    cr_assert(access(d.runtime, F_OK) < 0, "looking has made a folder");

    /* A daemon that runs is not in the way of looking, nor the other way round. */
    daemon_start(&d);
    cr_assert_eq(run(arguments("--check", "-c", d.config), false, text, sizeof(text)), 0);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    worker_quit(&a);
    daemon_stop(&d);
}

/* Number of the line with that text. */
static unsigned line_of(const char *path, const char *what)
{
    FILE *f = fopen(path, "r");
    unsigned n = 0, found = 0;
    char line[512];

    cr_assert_not_null(f);
    while (!found && fgets(line, sizeof(line), f)) {
        n++;
        found = strstr(line, what) ? n : 0;
    }
    fclose(f);
    cr_assert(found, "%s", what);
    return found;
}

static void says_at(const char *text, const char *what)
{
    char place[160];

    snprintf(place, sizeof(place), "%s:%u:", d.config, line_of(d.config, what));
    says(text, place);
}

/* All problems at once, each with its place. Starting it anyway says the same. */
Test(notify, check_of_a_bad_configuration)
{
    char text[8192];

    daemon_prepare(&d, NULL,
                   "[space one]\n[pool one/kv]\nslot = 65000\nslots = 64\n"
                   "[pool nowhere/kv]\nslot = 64K\nslots = 64\n"
                   "[pool one/other]\nslot = 64K\nslots = 64\nlow_watr = 0\n");
    cr_assert_eq(run(arguments("--check", "-c", d.config), false, text, sizeof(text)), 1, "%s",
                 text);
    says_at(text, "slot = 65000");
    says_at(text, "[pool nowhere/kv]");
    says_at(text, "low_watr");
    says(text, "low_water");
    cr_assert_null(strstr(text, ": good"));
    cr_assert_eq(run(arguments("-c", d.config), false, text, sizeof(text)), 1);
    says_at(text, "slot = 65000");
    cr_assert(access(d.runtime, F_OK) < 0, "it has begun to start");
}

Test(notify, check_of_no_configuration)
{
    char text[4096], path[128];

    daemon_prepare(&d, NULL, usual_pools);
    snprintf(path, sizeof(path), "%s/nothing.conf", d.dir);
    cr_assert_eq(run(arguments("--check", "-c", path), false, text, sizeof(text)), 1);
    says(text, path);
}

Test(notify, wrong_usage)
{
    char text[4096];

    cr_assert_eq(run(arguments("--unheard-of"), false, text, sizeof(text)), 2);
    says(text, "Usage: kvd");
    cr_assert_eq(run(arguments("-c"), false, text, sizeof(text)), 2);
    says(text, "Usage: kvd");
    cr_assert_eq(run(arguments("start"), false, text, sizeof(text)), 2);
    says(text, "what is \"start\"?");
    cr_assert_eq(run(arguments("--help"), false, text, sizeof(text)), 0);
    says(text, "Usage: kvd");
    cr_assert_eq(run(arguments("--version"), false, text, sizeof(text)), 0);
    cr_assert_eq(strncmp(text, "kvd ", 4), 0, "%s", text);
}

/* Whether or not there is anything to break off when it comes. */
Test(notify, sigterm_before_it_is_ready)
{
    static const char *const sizes[] = {"64K", "1M", "4M"}; /* of 64 slots */
    static struct daemon daemons[3];
    char text[8192], rest[128];

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct daemon *one = &daemons[i];

        snprintf(rest, sizeof(rest), "[space one]\n[pool one/kv]\nslot = %s\nslots = 64\n",
                 sizes[i]);
        daemon_prepare(one, NULL, rest);
        cr_assert_eq(run(arguments("-c", one->config), true, text, sizeof(text)), 0, "%s", text);
        cr_assert_eq(daemon_files(one), 0, "%s left something behind: %s", one->runtime, text);
    }
}
