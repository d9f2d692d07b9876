/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many system calls the library makes, counted: a worker process, under ptrace, stops at each.
 * It says where it is by getppid(SECTION), which the library never calls, so one pair of those is a
 * batch. What the C library answers in user space (the vDSO's clock) is no system call here either.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "client/internal.h"
#include "harness.h"
#include "objects.h"

TestSuite(calls, .init = harness_init, .fini = harness_fini);

#define BATCH   64u
#define ROUNDS  16u
#define LONG    (4 * SHM_RING_MIN)
#define FOREVER 300000u /* ms; the test ends before */

static const char *const pools =
    "[space one]\n[pool one/kv]\nslot = 64K\nslots = 256\nlow_water = 0\n";

enum section {
    OUTSIDE,
    CONTROL,
    CLOCK,
    PING,
    LOOKUP,
    LOOKUP_ALL,
    PIN,
    DATA,
    READ,
    META,
    RELEASE,
    OBSERVE,
    CURRENT,
    NO_COMPLETION,
    COMPLETIONS,
    RESERVE,
    SLOT,
    COMMIT,
    SUBMIT_RESERVE,
    SUBMIT_COMMIT,
    RESERVE_ASLEEP,
    COMMIT_ASLEEP,
    SUBMIT_RESERVE_ASLEEP,
    SUBMIT_COMMIT_ASLEEP,
    RESERVE_LONG,
    COMMIT_LONG,
    SECTIONS
};

static const char *const names[SECTIONS] = {
    [OUTSIDE] = "(outside)",
    [CONTROL] = "(three known calls)",
    [CLOCK] = "(the clock)",
    [PING] = "kvd_ping",
    [LOOKUP] = "kvd_lookup",
    [LOOKUP_ALL] = "kvd_lookup, all states",
    [PIN] = "kvd_pin",
    [DATA] = "kvd_pinset_data",
    [READ] = "reading",
    [META] = "kvd_pinset_meta",
    [RELEASE] = "kvd_pinset_release",
    [OBSERVE] = "kvd_observe",
    [CURRENT] = "kvd_space_current",
    [NO_COMPLETION] = "kvd_completions, none",
    [COMPLETIONS] = "kvd_completions",
    [RESERVE] = "kvd_reserve",
    [SLOT] = "kvd_slot_rw, kvd_copy_in",
    [COMMIT] = "kvd_commit",
    [SUBMIT_RESERVE] = "kvd_submit_reserve",
    [SUBMIT_COMMIT] = "kvd_submit_commit",
    [RESERVE_ASLEEP] = "kvd_reserve, daemon asleep",
    [COMMIT_ASLEEP] = "kvd_commit, daemon asleep",
    [SUBMIT_RESERVE_ASLEEP] = "kvd_submit_reserve, daemon asleep",
    [SUBMIT_COMMIT_ASLEEP] = "kvd_submit_commit, daemon asleep",
    [RESERVE_LONG] = "kvd_reserve, four ringfuls",
    [COMMIT_LONG] = "kvd_commit, four ringfuls",
};

/* ---- the worker: it is not the test's process, so it has assertions of its own */

#define need(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "the traced worker, line %d: %s: %s\n", __LINE__, #cond,               \
                    kvd_last_error(kvd));                                                          \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define count(section, code)                                                                       \
    do {                                                                                           \
        syscall(SYS_getppid, section);                                                             \
        code;                                                                                      \
        syscall(SYS_getppid, OUTSIDE);                                                             \
    } while (0)

static struct kvd *kvd;
static struct kvd_space *space;
static struct kvd_pool *pool;
static struct kvd_pinset *pinset;
static struct kvd_pool_info info;
static struct kvd_key keys[BATCH];
static struct kvd_reservation reservations[BATCH];
static struct kvd_commit commits[BATCH];
static struct kvd_completion completions[BATCH];
static uint8_t states[BATCH];
static char page[65536];
static uint64_t next_id;

static void attach(const char *socket, uint32_t ring_entries)
{
    struct kvd_options o;
    struct kvd_space_options s;

    kvd_options_init(&o, sizeof(o));
    o.socket = socket;
    o.timeout_ms = FOREVER;
    o.spin_us = FOREVER * 1000;
    o.ring_entries = ring_entries;
    kvd_space_options_init(&s, sizeof(s));
    s.write = 1;
    need(kvd_connect(&o, &kvd) == 0);
    need(kvd_space_open(kvd, "one", &s, &space) == 0);
    need(kvd_pool_get(space, NULL, &pool) == 0);
    need(kvd_pinset_new(kvd, BATCH, &pinset) == 0);
    kvd_pool_info(pool, &info);
}

/* With nothing to do the daemon sleeps but for its tick. */
static void wait_until_asleep(void)
{
    while (!atomic_load(&kvd->rings.core->sleeping))
        usleep(1000);
}

static struct kvd_reserve fresh_keys(size_t n)
{
    for (size_t i = 0; i < n; i++)
        keys[i] = object_key(next_id++);
    return (struct kvd_reserve){.keys = keys, .n = n, .chain = 1};
}

static void fill(const uint64_t *tickets, const uint32_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        void *at = NULL;

        count(SLOT, {
            at = kvd_slot_rw(pool, slots[i], 0);
            if (at)
                kvd_copy_in(at, page, info.part_bytes);
        });
        need(at);
        commits[i] = (struct kvd_commit){.ticket = tickets[i], .bytes = info.part_bytes};
    }
}

static void publish(size_t n, enum section reserve, enum section commit, bool asleep)
{
    struct kvd_reserve q = fresh_keys(n);
    uint64_t tickets[BATCH];
    uint32_t slots[BATCH];
    ssize_t r = 0;

    if (asleep)
        wait_until_asleep();
    count(reserve, r = kvd_reserve(pool, &q, reservations));
    need(r == (ssize_t)n);
    for (size_t i = 0; i < n; i++) {
        tickets[i] = reservations[i].ticket;
        slots[i] = reservations[i].slot;
    }
    fill(tickets, slots, n);
    if (asleep)
        wait_until_asleep();
    count(commit, r = kvd_commit(pool, commits, n));
    need(r == (ssize_t)n);
}

static void collect(size_t n)
{
    size_t have = 0;

    while (have < n) {
        ssize_t r = 0;

        count(COMPLETIONS, r = kvd_completions(kvd, completions + have, n - have));
        need(r >= 0);
        have += (size_t)r;
    }
}

static void submit(enum section reserve, enum section commit, bool asleep)
{
    struct kvd_reserve q = fresh_keys(BATCH);
    uint64_t tickets[BATCH];
    uint32_t slots[BATCH];
    ssize_t r = 0;

    if (asleep)
        wait_until_asleep();
    count(reserve, r = kvd_submit_reserve(pool, &q, 0));
    need(r == BATCH);
    collect(BATCH);
    for (size_t i = 0; i < BATCH; i++) {
        need(completions[i].status == KVD_NEW);
        tickets[i] = completions[i].ticket;
        slots[i] = completions[i].slot;
    }
    fill(tickets, slots, BATCH);
    if (asleep)
        wait_until_asleep();
    count(commit, r = kvd_submit_commit(pool, commits, BATCH, 0));
    need(r == BATCH);
    collect(BATCH);
    for (size_t i = 0; i < BATCH; i++)
        need(completions[i].status == 0);
}

static uint64_t read_all(void)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < BATCH; i++) {
        const uint64_t *w = kvd_pinset_data(pinset, i, 0);

        for (size_t k = 0; k < info.part_bytes / sizeof(*w); k++)
            sum += w[k];
    }
    return sum;
}

/* What publish() has stored last. */
static void read_back(uint64_t expected_sum)
{
    const void *data = page;
    struct kvd_meta meta;
    uint64_t sum = 0;
    ssize_t r = 0;
    int err = 0;

    count(LOOKUP, r = kvd_lookup(pool, keys, BATCH, NULL));
    need(r == BATCH);
    count(LOOKUP_ALL, r = kvd_lookup(pool, keys, BATCH, states));
    need(r == BATCH && states[BATCH - 1] == KVD_RAM);
    count(PIN, r = kvd_pin(pinset, pool, keys, BATCH, 0));
    need(r == BATCH);
    count(DATA, for (size_t i = 0; i < BATCH && data; i++) data = kvd_pinset_data(pinset, i, 0));
    need(data);
    count(READ, sum = read_all());
    need(sum == expected_sum);
    count(META, err = kvd_pinset_meta(pinset, 0, &meta));
    need(err == 0);
    count(OBSERVE, r = kvd_observe(pool, keys, BATCH));
    need(r == BATCH);
    count(RELEASE, kvd_pinset_release(pinset));
    need(kvd_pinset_count(pinset) == 0);
    count(CURRENT, err = kvd_space_current(space));
    need(err == 0);
    count(NO_COMPLETION, r = kvd_completions(kvd, completions, BATCH));
    need(r == 0);
}

static uint64_t fill_page(void)
{
    uint64_t sum = 0, word;

    object_fill(1, 2, 3, page, sizeof(page));
    for (size_t i = 0; i < sizeof(page); i += sizeof(word)) {
        memcpy(&word, page + i, sizeof(word));
        sum += word;
    }
    return sum * BATCH;
}

static void controls(void)
{
    struct timespec t;
    int r = 0;

    count(CONTROL, for (int i = 0; i < 3; i++) syscall(SYS_getuid));
    count(CLOCK, clock_gettime(CLOCK_MONOTONIC, &t));
    count(PING, r = kvd_ping(kvd));
    need(r == 0);
}

static _Noreturn void work(const char *socket)
{
    uint64_t sum = fill_page();

    attach(socket, 1024);
    controls();
    for (unsigned i = 0; i < ROUNDS; i++) {
        publish(BATCH, RESERVE, COMMIT, false);
        read_back(sum);
        submit(SUBMIT_RESERVE, SUBMIT_COMMIT, false);
        publish(BATCH, RESERVE_ASLEEP, COMMIT_ASLEEP, true);
        wait_until_asleep();
        read_back(sum); /* must not wake it */
        submit(SUBMIT_RESERVE_ASLEEP, SUBMIT_COMMIT_ASLEEP, true);
    }
    kvd_pinset_free(pinset);
    kvd_close(kvd);

    attach(socket, SHM_RING_MIN);
    for (unsigned i = 0; i < ROUNDS; i++)
        publish(LONG, RESERVE_LONG, COMMIT_LONG, i & 1);
    kvd_pinset_free(pinset);
    kvd_close(kvd);
    _exit(0);
}

/* ---- counting */

struct tally {
    unsigned batches, calls, clocks, most; /* most: calls of one batch */
    unsigned long long last;               /* number of the last call but the clock's */
};

static struct tally tally[SECTIONS];

static pid_t start_traced(const char *socket)
{
    pid_t pid;

    fflush(NULL);
    pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(2);
        raise(SIGSTOP);
        work(socket);
    }
    return pid;
}

static void wait_stopped(pid_t pid, int *ret_status)
{
    cr_assert_eq(waitpid(pid, ret_status, 0), pid);
    if (WIFEXITED(*ret_status))
        cr_assert_eq(WEXITSTATUS(*ret_status), 0, "the worker failed");
    cr_assert_not(WIFSIGNALED(*ret_status), "the worker died of signal %d", WTERMSIG(*ret_status));
}

/* An entry into the kernel, in the section that the worker is in. */
static void count_entry(const struct __ptrace_syscall_info *call, enum section *now, unsigned *own)
{
    struct tally *t = &tally[*now];

    if (call->entry.nr == SYS_getppid) {
        cr_assert_lt(call->entry.args[0], SECTIONS);
        t->batches++;
        t->calls += *own;
        t->most = *own > t->most ? *own : t->most;
        *now = (enum section)call->entry.args[0];
        *own = 0;
    } else if (call->entry.nr == SYS_clock_gettime) {
        t->clocks++;
    } else {
        t->last = call->entry.nr;
        ++*own;
    }
}

static void trace(pid_t pid)
{
    struct __ptrace_syscall_info call;
    enum section now = OUTSIDE;
    unsigned own = 0;
    long sig = 0;
    int status;

    wait_stopped(pid, &status);
    cr_assert(WIFSTOPPED(status), "ptrace is not allowed here");
    cr_assert_eq(ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL),
                 0);
    for (;;) {
        cr_assert_eq(ptrace(PTRACE_SYSCALL, pid, NULL, sig), 0, "%s", strerror(errno));
        wait_stopped(pid, &status);
        if (WIFEXITED(status))
            return;
        sig = WSTOPSIG(status) == (SIGTRAP | 0x80) ? 0 : WSTOPSIG(status);
        if (sig)
            continue;
        cr_assert_gt(ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(call), &call), 0);
        if (call.op == PTRACE_SYSCALL_INFO_ENTRY)
            count_entry(&call, &now, &own);
    }
}

static void print_table(void)
{
    fprintf(stderr, "%-36s %8s %8s %8s\n", "section", "batches", "calls", "most");
    for (unsigned i = OUTSIDE + 1; i < SECTIONS; i++)
        fprintf(stderr, "%-36s %8u %8u %8u\n", names[i], tally[i].batches, tally[i].calls,
                tally[i].most);
}

/* Every batch of these sections makes at most so many calls. */
static void at_most(enum section first, enum section last, unsigned most)
{
    for (enum section i = first; i <= last; i++) {
        cr_expect_gt(tally[i].batches, 0, "%s was not run", names[i]);
        cr_expect_leq(tally[i].most, most, "%s: %u system calls in one batch, e.g. number %llu",
                      names[i], tally[i].most, tally[i].last);
        /* Where the vDSO cannot read the clock, it is a call for every program alike. */
        if (!tally[CLOCK].clocks)
            cr_expect_eq(tally[i].clocks, 0, "%s asks the kernel for the time", names[i]);
    }
}

Test(calls, are_counted, .timeout = 240)
{
    static struct daemon d;

    daemon_up(&d, NULL, pools);
    trace(start_traced(d.writer));
    print_table();

    /* What is known to make calls is seen to make them, so no call is no call. */
    cr_expect_eq(tally[CONTROL].calls, 3);
    cr_expect_eq(tally[CONTROL].last, SYS_getuid);
    cr_expect_geq(tally[PING].calls, 2, "it sends and receives");

    at_most(LOOKUP, COMPLETIONS, 0);
    at_most(SLOT, SLOT, 0);
    at_most(RESERVE, RESERVE, 1);
    at_most(COMMIT, SUBMIT_COMMIT_ASLEEP, 1);
    at_most(RESERVE_LONG, COMMIT_LONG, LONG / SHM_RING_MIN);

    /* The one call is the wake-up; a sleeping daemon needs it, save for a tick in that moment. */
    for (enum section i = RESERVE_ASLEEP; i <= SUBMIT_COMMIT_ASLEEP; i++)
        cr_expect_geq(tally[i].calls, ROUNDS / 2, "%s: who has woken the daemon?", names[i]);
    daemon_stop(&d);
}
