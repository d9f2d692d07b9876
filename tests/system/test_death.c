/* SPDX-License-Identifier: Apache-2.0 */
/* Workers that die, at whichever instruction, and those that only seem to: pins of the living hold,
 * everything of the dead comes back. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "harness.h"
#include "raw.h"

TestSuite(death, .init = harness_init, .fini = harness_fini);

static struct daemon d;
static struct worker a, b, c, e;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

/* The promise is 100 ms; on a machine that is busy with other things it is only told. */
static void tell_time(const char *what, uint64_t since_us)
{
    cr_log_info("%s: %.1f ms", what, (double)(clock_us() - since_us) / 1000);
}

static void finish(void)
{
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* ---- 1: killed at a bad moment */

Test(death, holding_pins)
{
    uint64_t t;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_join(&c, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    cr_assert_eq(worker_n(&b, "pin 0 16"), 16);
    cr_assert_eq(worker_n(&c, "pin 0 8"), 8);
    eventually(daemon_counts(&d, "one/kv").pinned == 16);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 16), 0);

    t = clock_us();
    worker_kill(&b);
    eventually(daemon_counts(&d, "one/kv").pinned == 8);
    tell_time("pins of a dead reader", t);

    /* All 64 slots are wanted by others, again and again. */
    worker_do(&a, "publish 100 64");
    worker_do(&a, "publish 200 64");
    worker_do(&a, "publish 300 64");
    cr_assert_eq(worker_n(&c, "check"), 8);
    cr_assert_eq(worker_n(&c, "lookup 0 8"), 8);
    cr_assert_eq(worker_n(&c, "lookup 8 8"), 0);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 16), 0);
    worker_do(&c, "release 0");
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 16), 8);
    worker_quit(&c);
    worker_quit(&a);
    finish();
}

Test(death, holding_reserved_slots)
{
    uint64_t t;

    daemon_up(&d, "quarantine = 2s\n", usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "reserve 0 8"), 8);
    cr_assert_eq(worker_n(&b, "reserve 0 8"), 0);
    cr_assert_str_eq(b.reply, "0 2 2 2 2 2 2 2 2");
    t = clock_us();
    worker_kill(&a);
    eventually(daemon_counts(&d, "one/kv").quarantined == 8);
    tell_time("slots of a dead writer in quarantine", t);
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 0);

    /* The keys are free at once, the slots are not. */
    cr_assert_eq(worker_n(&b, "publish 0 56"), 56);
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 0);
    eventually(daemon_counts(&d, "one/kv").quarantined == 0);
    tell_time("and free again, of 2 s", t);
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 8);
    cr_assert_eq(daemon_stat(&d, "kvd_orphaned_reservations_total", "one/kv"), 8);
    worker_quit(&b);
    finish();
}

Test(death, between_two_part_commits)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "parts", "");
    worker_join(&b, d.writer, "one", "parts", "");
    cr_assert_eq(worker_n(&a, "reserve 0 4"), 4);
    worker_do(&a, "fill 0");
    cr_assert_eq(worker_n(&a, "commit 0"), 4);
    worker_do(&b, "lookup 0 4");
    cr_assert_str_eq(b.reply, "0 3 3 3 3", "half an object is none");
    cr_assert_eq(worker_n(&b, "pin 0 4"), 0);
    worker_kill(&a);
    eventually(daemon_counts(&d, "one/parts").reserved == 0);
    worker_do(&b, "lookup 0 4");
    cr_assert_str_eq(b.reply, "0 0 0 0 0");

    /* What the dead has committed does not count for the next. */
    cr_assert_eq(worker_n(&b, "reserve 0 4"), 4);
    worker_do(&b, "fill 1");
    cr_assert_eq(worker_n(&b, "commit 1"), 4);
    cr_assert_eq(worker_n(&b, "lookup 0 4"), 0);
    worker_do(&b, "fill 0");
    cr_assert_eq(worker_n(&b, "commit 0"), 4);
    cr_assert_eq(worker_n(&b, "pin 0 4"), 4);
    cr_assert_eq(worker_n(&b, "check"), 4);
    worker_quit(&b);
    finish();
}

Test(death, between_counting_and_validating_a_pin)
{
    long long slot;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 2"), 2);
    worker_do(&a, "pin 0 2");
    slot = worker_n(&a, "slot 0");
    worker_do(&a, "release 0");
    cr_assert_eq(worker_n(&b, "bump %lld 1", slot), 1);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 2), 1, "the counter stands");
    cr_assert_eq(worker_n(&a, "lookup 0 1"), 1);
    worker_kill(&b);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 2), 1);
    worker_quit(&a);
    finish();
}

/* Whatever they were doing. Survivors check every byte they hold. */
Test(death, at_any_instruction, .timeout = 120)
{
    static struct worker w[4];
    uint64_t seed = clock_us(), killed = 0;

    cr_log_info("seed %llu", (unsigned long long)seed);
    daemon_up(&d, "quarantine = 5ms\n", usual_pools);
    bystander_start(&e, &d);
    worker_join(&c, d.reader, "one", "kv", "read");
    for (int round = 0; round < 60; round++) {
        int i = round % 4;

        if (w[i].pid) {
            usleep((useconds_t)((seed = seed * 6364136223846793005u + 1) >> 50));
            worker_kill(&w[i]);
            killed++;
        }
        worker_join(&w[i], d.writer, "one", i & 1 ? "parts" : "kv", "");
        worker_do(&w[i], "churn %llu %d", (unsigned long long)seed + (uint64_t)round,
                  i & 1 ? 24 : 96);
        worker_do(&c, "pin 0 96 all");
        worker_do(&c, "check");
        worker_do(&c, "release 0");
    }
    for (int i = 0; i < 4; i++)
        worker_kill(&w[i]);
    cr_assert_eq(killed, 56);
    bystander_stop(&e);
    worker_quit(&c);
    finish();
}

/* Also while it attaches. */
Test(death, while_attaching)
{
    uint64_t seed = clock_us();

    cr_log_info("seed %llu", (unsigned long long)seed);
    daemon_up(&d, NULL, usual_pools);
    bystander_start(&e, &d);
    for (int i = 0; i < 40; i++) {
        worker_start(&a);
        worker_tell(&a, "connect %s %s", d.writer, i % 3 ? "token=engine" : "");
        worker_tell(&a, "open one %s write", i & 1 ? "parts" : "kv");
        worker_tell(&a, "publish 0 8");
        usleep((useconds_t)((seed = seed * 6364136223846793005u + 1) >> 52));
        worker_kill(&a);
    }
    bystander_stop(&e);
    finish();
}

/* A process is dead when its last thread is, not when its first one has left. */
Test(death, of_the_first_thread_only)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&b, "pin 0 8"), 8);
    worker_do(&b, "leave-main");
    cr_assert_eq(worker_n(&b, "check"), 8);
    worker_do(&a, "publish 100 64");
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 0);
    cr_assert_eq(worker_n(&b, "check"), 8);
    worker_kill(&b);
    eventually(daemon_evict(&d, "one/kv", 0, 8) == 8);
    worker_quit(&a);
    finish();
}

/* ---- 2: seeming dead, seeming alive */

Test(death, of_a_parent_whose_child_keeps_the_socket)
{
    long long child;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&a, "reserve 100 4"), 4);
    child = worker_n(&a, "fork");
    cr_assert_gt(child, 0);
    worker_kill(&a);
    eventually(daemon_sessions(&d) == 2);
    eventually(daemon_counts(&d, "one/kv").quarantined == 0);
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 0);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    eventually(daemon_connections(&d) == 2);
    cr_assert_eq(kill((pid_t)child, 0), 0, "the child lives");
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 8);
    kill((pid_t)child, SIGKILL);
    worker_quit(&b);
    finish();
}

/* The child has the pin counters, too, and goes on writing into them: they are nobody's any more. */
Test(death, of_a_parent_whose_child_writes_its_pins)
{
    long long child;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    worker_start(&b);
    worker_do(&b, "raw connect %s", d.writer);
    worker_do(&b, "raw open %u", daemon_pool(&d, "one/kv"));
    child = worker_n(&b, "raw fork");
    eventually(daemon_counts(&d, "one/kv").pinned > 0);
    worker_kill(&b);
    eventually(daemon_sessions(&d) == 2);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 32), 32);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    cr_assert_eq(kill((pid_t)child, SIGKILL), 0, "the child lived");
    worker_quit(&a);
    finish();
}

Test(death, is_not_sigstop)
{
    struct session_view v;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&b, "pin 0 8"), 8);
    cr_assert_eq(kill(b.pid, SIGSTOP), 0);
    cr_assert_eq(waitpid(b.pid, NULL, WUNTRACED), b.pid);
    for (int i = 1; i < 8; i++)
        worker_do(&a, "publish %d 64", i * 100);
    cr_assert_eq(worker_n(&a, "lookup 0 8"), 8);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 0);
    v = daemon_session(&d, b.pid);
    cr_assert(v.there);
    cr_assert_str_eq(v.state, "attached");
    cr_assert_eq(v.pinned, 8);

    kill(b.pid, SIGCONT);
    cr_assert_eq(worker_n(&b, "check"), 8);
    kill(b.pid, SIGSTOP);
    cr_assert_eq(waitpid(b.pid, NULL, WUNTRACED), b.pid);
    cr_assert_eq(daemon_kill_session(&d, v.id), 0);
    worker_died(&b, SIGKILL);
    eventually(!daemon_session(&d, (pid_t)v.pid).there);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 8);
    cr_assert_eq(daemon_kill_session(&d, v.id), -ENOENT);
    worker_quit(&a);
    finish();
}

/* The connection is lost; the session and what it holds are not. */
static void lose_socket(const char *how)
{
    long long session;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    session = worker_n(&b, "session");
    cr_assert_eq(worker_n(&b, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&b, "reserve 100 4"), 4);
    worker_do(&b, "socket %s", how);
    eventually(strcmp(daemon_session(&d, b.pid).state, "hung-up") == 0);
    for (int i = 1; i < 8; i++)
        worker_do(&a, "publish %d 64", i * 1000);
    cr_assert_eq(worker_n(&b, "check"), 8);
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 0);
    cr_assert_eq(worker_n(&b, "lookup 0 8"), 8, "reading needs no socket");
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 4);

    worker_do(&b, "fill");
    cr_assert_eq(worker_n(&b, "commit"), 4, "the library comes back by itself");
    cr_assert_eq(worker_n(&b, "session"), session);
    cr_assert_str_eq(daemon_session(&d, b.pid).state, "attached");
    worker_do(&b, "current");
    cr_assert_eq(worker_n(&b, "pin 100 4"), 4);
    cr_assert_eq(worker_n(&b, "check"), 12);

    /* Again, and this time a call of the control path finds out. */
    worker_do(&b, "socket %s", how);
    eventually(strcmp(daemon_session(&d, b.pid).state, "hung-up") == 0);
    worker_try(&b, "ping"); /* of a socket that somebody else has closed, it may complain once */
    worker_do(&b, "ping");
    cr_assert_eq(worker_n(&b, "session"), session);
    cr_assert_eq(worker_n(&b, "check"), 12);
    /* Before the daemon has noticed that the former connection is dead. */
    for (int i = 0; i < 20; i++) {
        worker_do(&b, "socket %s", how);
        worker_try(&b, "ping");
        worker_do(&b, "ping");
        cr_assert_eq(worker_n(&b, "session"), session);
    }
    cr_assert_eq(worker_n(&b, "check"), 12);
    worker_do(&b, "close");
    eventually(!daemon_session(&d, b.pid).there);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

Test(death, is_not_shutdown_of_the_socket)
{
    lose_socket("shutdown");
}

Test(death, is_not_close_of_the_socket)
{
    lose_socket("close");
}

static void with_cookie(Kvd__Proto__Hello *hello, void *cookie)
{
    hello->has_resume = hello->has_shm = hello->shm = 1;
    hello->resume = (ProtobufCBinaryData){.data = cookie, .len = 16};
}

/* A session is taken up by the process that had it, on a socket that lets it do as much and no more. */
Test(death, does_not_hand_over_a_session)
{
    struct raw writer, other, back;
    uint8_t none[16] = {0};

    daemon_up(&d, NULL, usual_pools);
    raw_connect(&writer, d.writer);
    cr_assert_eq(raw_hello(&writer, with_cookie, none), 0);
    cr_assert_not(writer.resumed);
    raw_connect(&other, d.reader);
    cr_assert_eq(raw_hello(&other, with_cookie, writer.cookie), 0);
    cr_assert_not(other.resumed, "a writer's session on a reader's socket");
    cr_assert_eq(other.response->hello->role, 1);
    raw_close(&other);
    if (fork() == 0) { /* knows the cookie, and is somebody else */
        raw_connect(&other, d.writer);
        _exit(raw_hello(&other, with_cookie, writer.cookie) == 0 && !other.resumed ? 0 : 1);
    } else {
        int status;

        wait(&status);
        cr_assert_eq(status, 0, "another process has taken up the session");
    }
    raw_connect(&back, d.writer);
    cr_assert_eq(raw_hello(&back, with_cookie, writer.cookie), 0);
    cr_assert(back.resumed);
    cr_assert_eq(back.session, writer.session);
    cr_assert_eq(raw_answer(&writer), RAW_END, "the former connection ends");
    raw_close(&writer);
    raw_close(&back);
    daemon_stop(&d);
}

/* It is the daemon that is stopped. Nobody hangs, reading goes on, and what it grants too late comes
 * back. */
Test(death, is_not_sigstop_of_the_daemon)
{
    daemon_up(&d, NULL, usual_pools);
    worker_start(&a);
    worker_do(&a, "connect %s timeout=200", d.writer);
    worker_do(&a, "open one kv write");
    worker_start(&b);
    worker_do(&b, "connect %s timeout=200 noshm", d.writer);
    worker_do(&b, "open one kv write");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    daemon_sessions(&d);
    cr_assert_eq(kill(d.pid, SIGSTOP), 0);
    cr_assert_eq(waitpid(d.pid, NULL, WUNTRACED), d.pid);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&a, "check"), 8);
    cr_assert_eq(worker_try(&a, "reserve 100 8"), -ETIMEDOUT);
    cr_assert_eq(worker_try(&a, "ping"), -ETIMEDOUT);
    cr_assert_eq(worker_try(&b, "put 200"), -ETIMEDOUT);
    cr_assert_eq(worker_try(&b, "get 0"), -ETIMEDOUT);
    worker_start(&c);
    cr_assert_eq(worker_try(&c, "connect %s timeout=200", d.writer), -ETIMEDOUT);
    cr_assert_eq(worker_n(&a, "lookup 0 8"), 8);

    kill(d.pid, SIGCONT);
    eventually((worker_try(&a, "ping"), worker_try(&b, "ping"),
                daemon_counts(&d, "one/kv").reserved == 0));
    eventually(worker_try(&a, "ping") == 0);
    eventually(worker_try(&b, "ping") == 0);
    cr_assert_eq(worker_n(&a, "check"), 8);
    worker_do(&c, "connect %s", d.writer);
    worker_do(&c, "open one kv write");
    cr_assert_eq(worker_n(&c, "publish 100 8"), 8, "nothing of it is still held by anybody");
    worker_do(&c, "put 200");
    cr_assert_eq(worker_n(&c, "get 0"), 65536);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* They are dead before they are accepted, or before their requests are read. */
Test(death, while_nobody_looks)
{
    static struct worker w[12];

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    for (int i = 0; i < 6; i++)
        worker_join(&w[i], d.writer, "one", "kv", i & 1 ? "token=engine" : "noshm");
    daemon_sessions(&d);
    cr_assert_eq(kill(d.pid, SIGSTOP), 0);
    cr_assert_eq(waitpid(d.pid, NULL, WUNTRACED), d.pid);
    for (int i = 0; i < 12; i++) {
        if (i >= 6) {
            worker_start(&w[i]);
            worker_tell(&w[i], "connect %s", d.writer);
        } else if (i & 1) {
            worker_tell(&w[i], "reserve %d 4", i * 10);
        } else {
            worker_tell(&w[i], "put %d", 1000 + i);
        }
    }
    usleep(50000); /* for them to get there; it does not matter if they do not */
    for (int i = 0; i < 12; i++)
        worker_kill(&w[i]);
    kill(d.pid, SIGCONT);
    eventually(daemon_sessions(&d) == 2);
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    worker_quit(&a);
    finish();
}

/* ---- 3: a scheduler and its ranks */

/* The scheduler reserves, the ranks write. It dies; they go on. */
static void scheduler_dies(const char *flags, bool remote)
{
    char tickets[1024];
    struct session_view v;
    pid_t pid;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", flags);
    worker_join(&b, d.writer, "one", "kv", "token=engine");
    worker_join(&c, d.writer, "one", "kv", "token=engine");
    worker_join(&e, d.writer, "one", "kv", "token=another");
    cr_assert_eq(worker_n(&b, "publish 0 8"), 8);
    if (remote) {
        worker_do(&a, "reserve-remote 100");
        worker_do(&a, "reserve-remote 101");
    } else {
        cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
        cr_assert_eq(worker_n(&a, "reserve 100 2"), 2);
    }
    snprintf(tickets, sizeof(tickets), "%s", worker_do(&a, "tickets"));
    worker_do(&b, "take %s", tickets);
    pid = a.pid;
    if (remote) /* for it, that is as good as dead: it holds nothing but by its socket */
        worker_do(&a, "socket shutdown");
    else
        worker_kill(&a);
    eventually(!(v = daemon_session(&d, pid)).there || strcmp(v.state, "lingering") == 0);

    /* Others need room, and must not find it in the slots that the ranks are filling. */
    for (int i = 1; i < 6; i++)
        worker_do(&e, "publish %d 64", i * 1000);
    if (!remote) {
        cr_assert_eq(worker_n(&b, "lookup 0 8"), 8, "its pins stand for its ranks");
        cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 0);
    }
    worker_do(&e, "take %s", tickets);
    worker_do(&e, "commit");
    cr_assert_str_eq(e.reply, "0 -1 -1", "another engine's");
    worker_do(&b, "fill");
    cr_assert_eq(worker_n(&b, "commit"), 2);
    cr_assert_eq(worker_n(&c, "pin 100 2"), 2);
    cr_assert_eq(worker_n(&c, "check"), 2);
    cr_assert(daemon_session(&d, pid).there);
    if (remote)
        worker_kill(&a);
    eventually(daemon_kill_session(&d, daemon_session(&d, pid).id) == -ESRCH);

    worker_kill(&b);
    cr_assert_eq(worker_n(&c, "check"), 2);
    eventually(strcmp(daemon_session(&d, pid).state, "lingering") == 0);
    worker_kill(&c);
    eventually(daemon_sessions(&d) == 2);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    worker_quit(&e);
    finish();
}

Test(death, of_a_scheduler)
{
    scheduler_dies("token=engine", false);
}

Test(death, of_a_scheduler_without_shared_memory)
{
    scheduler_dies("token=engine noshm", true);
}

Test(death, of_a_scheduler_is_over_after_a_while)
{
    uint64_t t;
    pid_t pid;

    daemon_up(&d, "engine_linger = 1s\n", usual_pools);
    worker_join(&a, d.writer, "one", "kv", "token=engine");
    worker_join(&b, d.writer, "one", "kv", "token=engine");
    cr_assert_eq(worker_n(&b, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&a, "reserve 100 2"), 2);
    worker_do(&b, "take %s", worker_do(&a, "tickets"));
    pid = a.pid;
    t = clock_us();
    worker_kill(&a);
    eventually(strcmp(daemon_session(&d, pid).state, "lingering") == 0);
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 2);
    eventually(!daemon_session(&d, pid).there);
    tell_time("engine_linger, of 1 s", t);
    eventually(daemon_counts(&d, "one/kv").quarantined == 0);
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 0);
    worker_do(&b, "commit");
    cr_assert_str_eq(b.reply, "0 -116 -116", "too late");
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 8), 8);
    worker_quit(&b);
    finish();
}

/* The daemon must also come to that when it is never idle: others keep it busy, from another processor. */
static void busy(const char *how)
{
    static struct worker busy[4];
    uint64_t t;

    daemon_up(&d, "engine_linger = 100ms\nquarantine = 100ms\n", usual_pools);
    worker_join(&a, d.writer, "one", "kv", "token=engine");
    worker_join(&b, d.writer, "one", "kv", "token=engine");
    cr_assert_eq(worker_n(&a, "reserve 100 2"), 2);
    processor(d.pid, 0);
    for (int i = 0; i < 4; i++) {
        worker_start(&busy[i]);
        processor(busy[i].pid, 1);
        worker_do(&busy[i], "raw connect %s 4096", d.writer);
        worker_do(&busy[i], "raw open %u", daemon_pool(&d, "one/kv"));
        worker_do(&busy[i], "raw scribble %s", how);
    }
    t = clock_us();
    worker_kill(&a);
    eventually(daemon_counts(&d, "one/kv").free == 64);
    tell_time("both delays, of 0.1 s each", t);
    for (int i = 0; i < 4; i++) {
        cr_assert_gt(worker_n(&busy[i], "raw stop"), 0);
        worker_quit(&busy[i]);
    }
    worker_quit(&b);
    finish();
}

Test(death, comes_to_an_end_while_rings_are_busy)
{
    busy("flood");
}

Test(death, comes_to_an_end_while_sockets_are_busy)
{
    busy("pings");
}
