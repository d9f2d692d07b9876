/* SPDX-License-Identifier: Apache-2.0 */
/* Workers that do whatever they can to the memory that they share with the daemon. It lives, says what
 * has happened, and everybody else reads the right bytes. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "harness.h"
#include "shm/layout.h"

TestSuite(memory, .init = harness_init, .fini = harness_fini);

#define ROUNDS 4

static struct daemon d;
static struct worker bystander, writer, reader, bad;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

/* A writer of space one, a reader that holds objects 0 to 7 of it, somebody in space two, and the bad. */
static void gather(const char *daemon_keys, const char *rest)
{
    daemon_up(&d, daemon_keys, rest);
    bystander_start(&bystander, &d);
    worker_join(&writer, d.writer, "one", "kv", "");
    worker_join(&reader, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&writer, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&reader, "pin 0 8"), 8);
    worker_start(&bad);
    worker_do(&bad, "raw connect %s", d.writer);
    worker_do(&bad, "raw open %u", daemon_pool(&d, "one/kv"));
}

static void part(void)
{
    bystander_stop(&bystander);
    worker_quit(&reader);
    worker_quit(&writer);
}

/* ---- any bytes, changing while the daemon looks */

static void scribble(const char *how)
{
    for (int round = 0; round < ROUNDS; round++) {
        long long before;

        if (round) {
            worker_start(&bad);
            worker_do(&bad, "raw connect %s", d.writer);
            worker_do(&bad, "raw open %u", daemon_pool(&d, "one/kv"));
        }
        worker_do(&bad, "raw scribble %s", how);
        before = 0;
        for (int i = 0; i < 8; i++) {
            /* It may all be refused: the bad one may hold every slot of its space. */
            worker_do(&writer, "publish %d 32", 1000 * (round + 1) + 40 * i);
            cr_assert_eq(worker_n(&reader, "check"), 8);
            bystander_check(&bystander);
            daemon_counts(&d, "one/kv");
            daemon_session(&d, bad.pid);
            eventually(worker_n(&bad, "raw how-much") > before + 2000);
            before = worker_n(&bad, "raw how-much");
        }
        worker_kill(&bad);
    }
    cr_assert_eq(worker_n(&reader, "lookup 0 8"), 8);
}

/* `broken`: the sessions that the daemon must have given up, because their rings made no sense. */
static void scribbled(const char *how, uint64_t broken)
{
    gather(NULL, usual_pools);
    scribble(how);
    cr_assert_eq(daemon_stat(&d, "kvd_sessions_broken_total", NULL), broken);
    cr_log_info("%llu requests",
                (unsigned long long)daemon_stat(&d, "kvd_ring_requests_total", NULL));
    part();
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

Test(memory, of_a_session_is_scribbled_over, .timeout = 120)
{
    scribbled("all", ROUNDS);
}

Test(memory, of_pin_counters_is_scribbled_over, .timeout = 120)
{
    scribbled("pins", 0);
}

Test(memory, of_requests_is_scribbled_over, .timeout = 120)
{
    scribbled("requests", 0);
}

/* ---- memory that goes away */

/* What it has pinned stands as long as it lives, unless it is that which it has destroyed. */
static void truncated(const char *segment, long long bytes, bool post, const char *note,
                      bool pins_stand)
{
    struct session_view v;
    pid_t pid;

    gather(NULL, usual_pools);
    cr_assert_eq(worker_n(&writer, "publish 50 1"), 1);
    worker_do(&writer, "pin 50 1");
    worker_do(&bad, "raw count %lld 1", worker_n(&writer, "slot 0"));
    worker_do(&writer, "release 0");
    cr_assert_eq(daemon_evict(&d, "one/kv", 50, 1), 0);

    worker_do(&bad, "raw truncate %s %lld", segment, bytes);
    if (post)
        worker_do(&bad, "raw tail 1");
    worker_try(&bad, "raw ping");
    for (int i = 0; i < 4; i++)
        worker_do(&writer, "publish %d 64", 1000 * (i + 1)); /* has everything looked at */
    eventually(strcmp((v = daemon_session(&d, bad.pid)).state, "broken") == 0);
    cr_assert_str_eq(v.note, note);
    cr_assert(daemon_logged(&d, note));
    eventually(worker_try(&bad, "raw ping") == -EPROTO || worker_try(&bad, "raw ping") == -EPIPE);
    cr_assert_eq(worker_n(&writer, "lookup 50 1"), pins_stand ? 1 : 0);
    cr_assert_eq(worker_n(&reader, "check"), 8);
    bystander_check(&bystander);

    pid = bad.pid;
    worker_kill(&bad);
    eventually(!daemon_session(&d, pid).there);
    daemon_evict(&d, "one/kv", 50, 1);
    cr_assert_eq(worker_n(&writer, "lookup 50 1"), 0);
    part();
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

#define NO_SESSION "its session segment was truncated"
#define NO_PINS    "its pin segment cannot be read: truncated, or a hole that no page is left for"

Test(memory, of_a_session_is_truncated)
{
    truncated("session", 0, false, NO_SESSION, true);
}

/* The indices are there, the requests are not. */
Test(memory, of_requests_is_truncated)
{
    truncated("session", SHM_PAGE, true, NO_SESSION, true);
}

/* The request is there, room for its answer is not. */
Test(memory, of_completions_is_truncated)
{
    truncated("session", (long long)shm_completions_offset(64), true, NO_SESSION, true);
}

Test(memory, of_pin_counters_is_truncated)
{
    truncated("pins", 0, false, NO_PINS, false);
}

static void expect_offline(void)
{
    char state[512], problems[512];

    daemon_status(&d, state, problems, sizeof(state));
    cr_assert_str_eq(state, "degraded");
    cr_assert_not_null(strstr(problems,
                              "space one is offline: a writer has truncated the memory of "
                              "its pool; fix: restart kvd"),
                       "%s", problems);
    cr_assert(daemon_logged(&d, "a writer has truncated"));
}

/* The pool of space one is gone. The daemon finds out when it has to touch it. */
static void lose_pool(const char *how, void (*then)(void))
{
    static struct worker remote;
    char state[512], problems[512];

    worker_join(&remote, d.writer, "one", "kv", "noshm");
    cr_assert_eq(worker_n(&remote, "get 3"), 65536);
    worker_do(&bad, "raw chunk %u", daemon_pool(&d, "one/kv"));
    worker_do(&bad, "%s", how);
    if (then)
        then();
    daemon_status(&d, state, problems, sizeof(state));
    cr_assert_str_eq(state, "ready", "%s", problems);
    cr_assert_eq(worker_try(&remote, "get 3"), -EIO);
    cr_assert_not_null(strstr(remote.reply, "truncated"), "%s", remote.reply);
    expect_offline();

    /* Everybody in that space is told; nobody is hung or killed. */
    cr_assert_eq(worker_try(&remote, "put 99"), -EIO);
    worker_do(&writer, "reserve 200 2");
    cr_assert_str_eq(writer.reply, "0 -5 -5");
    cr_assert_eq(worker_n(&writer, "lookup 0 8"), 0);
    cr_assert_eq(worker_try(&writer, "current"), -ESTALE);
    cr_assert_eq(worker_try(&writer, "refresh"), -EIO);
    cr_assert_not_null(strstr(writer.reply, "truncated"), "%s", writer.reply);
    cr_assert_eq(worker_try(&writer, "open one kv write"), -EIO);
    bystander_check(&bystander);
    worker_quit(&remote);
    worker_quit(&bad);
    part();
    eventually(daemon_sessions(&d) == 1);
    eventually(daemon_counts(&d, "two/kv").pinned == 0);
    daemon_stop(&d);
}

Test(memory, of_a_pool_is_truncated)
{
    gather(NULL, usual_pools);
    lose_pool("raw truncate data 0", NULL);
}

/* The write that finds out, instead of the read. */
Test(memory, of_a_pool_is_truncated_under_a_writer)
{
    static struct worker remote;

    gather(NULL, usual_pools);
    worker_join(&remote, d.writer, "one", "kv", "noshm");
    worker_do(&bad, "raw chunk %u", daemon_pool(&d, "one/kv"));
    worker_do(&bad, "raw truncate data 4096");
    cr_assert_eq(worker_try(&remote, "put 77"), -EIO);
    expect_offline();
    bystander_check(&bystander);
    worker_quit(&remote);
    worker_quit(&bad);
    part();
    daemon_stop(&d);
}

static char huge[64];

/* Somebody else may take what was free a moment ago. */
static void gather_on(const char *keys, const char *backing)
{
    gather(keys, usual_pools);
    if (strcmp(worker_do(&writer, "backing"), backing) != 0)
        cr_skip_test("others use the hugepages of this machine");
}

static void gather_on_hugepages(void)
{
    char keys[160];

    if (!hugepages_take(8) || !hugetlbfs_mount(6, huge))
        cr_skip_test("no hugepages, or no hugetlbfs, to be had");
    snprintf(keys, sizeof(keys), "hugepages = try\nhugetlbfs = %s\n", huge);
    gather_on(keys, "hugetlbfs 2097152");
}

Test(memory, of_a_hugetlbfs_pool_is_truncated)
{
    gather_on_hugepages();
    lose_pool("raw truncate data 0", NULL);
    cr_assert_eq(hugetlbfs_used(huge), 0);
}

/* A memfd cannot be made smaller by anybody; it can be filled with nonsense, which is its writer's affair. */
Test(memory, of_a_memfd_pool_is_sealed)
{
    if (!hugepages_take(8) || !hugetlbfs_hide())
        cr_skip_test("no hugepages to be had, or no mount namespace of our own");
    gather_on("hugepages = try\n", "memfd-hugetlb 2097152");
    worker_do(&bad, "raw chunk %u", daemon_pool(&d, "one/kv"));
    cr_assert_eq(worker_try(&bad, "raw truncate data 0"), -EPERM);
    cr_assert_eq(worker_try(&bad, "raw truncate data 8388608"), -EPERM);
    cr_assert_eq(worker_n(&reader, "check"), 8);
    bystander_check(&bystander);
    worker_quit(&bad);
    part();
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* The mount has as many pages as the pools need: here go those of the hole. */
static void take_pages(void)
{
    char path[96];
    size_t bytes = 4 << 20;
    void *at;
    int fd;

    snprintf(path, sizeof(path), "%s/other", huge);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(ftruncate(fd, (off_t)bytes), 0);
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(at, MAP_FAILED, "%s", strerror(errno));
    memset(at, 1, bytes);
    close(fd);
    unlink(path);
}

/* A hole in a hugetlbfs file is not full of zeros: touching it takes a page, and there is none. */
Test(memory, of_a_hugetlbfs_pool_is_punched)
{
    gather_on_hugepages();
    lose_pool("raw punch data", take_pages);
}
