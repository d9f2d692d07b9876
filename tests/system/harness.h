/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real daemons and real worker processes for tests.
 *
 * A daemon lives in a folder of its own under /dev/shm; a worker is a process of its own that does what
 * it is told through pipes (worker.c). Everything here asserts: what cannot be done fails the test.
 * Time is never asserted, only waited for, with a deadline that no machine should need.
 */
#ifndef KVD_TESTS_HARNESS_H
#define KVD_TESTS_HARNESS_H

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

#include "client/control.h"

enum {
    PATIENCE_MS = 60000,
    WORKERS_MAX = 48,
    REPLY_MAX = 16384,
    SPACES_MAX = 8,
};

uint64_t clock_us(void);

static inline uint64_t clock_ms(void)
{
    return clock_us() / 1000;
}

/* Polls until it holds. */
#define eventually(cond)                                                                           \
    for (uint64_t until_ = clock_ms() + PATIENCE_MS; !(cond); usleep(1000))                        \
    cr_assert_lt(clock_ms(), until_, "it never came true: %s", #cond)

/* ---- daemons */

struct daemon {
    pid_t pid;        /* what to wait for; 0: not running */
    char dir[64];     /* everything of this daemon */
    char runtime[96]; /* DIR/run */
    char config[96], log[96];
    char writer[96], reader[96], admin[96]; /* its sockets */
    char notify[96];
    int notify_fd;
    bool keep_notes;         /* the test reads what the daemon says at its end */
    struct control *control; /* ours to the admin socket; NULL until asked for */
    uint32_t epoch;          /* of space one, for tests that reset it */

    /* before daemon_start() */
    bool own_pid_namespace; /* of which we are not a member */
    unsigned max_fds;       /* RLIMIT_NOFILE; 0: as it is */
    uint64_t watchdog_us;   /* WATCHDOG_USEC; 0: none */
    /* In the child that becomes the daemon, at the last moment; may be NULL. Nonzero: it cannot be. */
    int (*enter)(const struct daemon *d);
};

/* Spaces `one` and `two`, pools one/kv (64 slots of 64K), one/parts (16 slots of two parts of 16K each)
 * and two/kv (64 slots of 64K), nothing evicted ahead of need. */
extern const char *const usual_pools;

/* A folder with a configuration: hugepages off unless `daemon_keys` (more keys of [daemon], may be NULL)
 * says otherwise, quarantine 300ms unless it says so, the three sockets, and `rest`. */
void daemon_prepare(struct daemon *d, const char *daemon_keys, const char *rest);

/* Another configuration in the same folder. */
void daemon_configure(struct daemon *d, const char *daemon_keys, const char *rest);

/* Starts it and waits until it says READY=1. */
void daemon_start(struct daemon *d);

/* prepare and start. */
void daemon_up(struct daemon *d, const char *daemon_keys, const char *rest);

/* Starts it; it must end with this status and say `text`. */
void daemon_fails(struct daemon *d, int status, const char *text);

/* Without waiting for anything. */
void daemon_spawn(struct daemon *d);

/* SIGTERM: it must exit with 0 and leave nothing behind but its lock. */
void daemon_stop(struct daemon *d);
void daemon_kill(struct daemon *d);
void daemon_wait_clean(struct daemon *d);

/* Waits for a line of the notify socket. */
void daemon_notified(struct daemon *d, const char *line);

bool daemon_logged(const struct daemon *d, const char *text);
bool daemon_runs(const struct daemon *d);

/* Names in the runtime directory other than the lock and the sockets. */
unsigned daemon_files(const struct daemon *d);

/* ---- what the daemon says of itself, asked on the admin socket */

struct counts {
    uint64_t slots, free, reserved, live, in_flight, quarantined, pinned, evicted, committed;
};

/* Of a pool "space/name"; also checks that the sums agree (I4). */
struct counts daemon_counts(struct daemon *d, const char *pool);
uint32_t daemon_pool(struct daemon *d, const char *pool);
uint32_t daemon_sessions(struct daemon *d);
uint32_t daemon_connections(struct daemon *d);

/* The daemon's state and its problems, joined by blanks. */
void daemon_status(struct daemon *d, char *ret_state, char *ret_problems, size_t n);

struct session_view {
    bool there;
    uint32_t id, pid;
    char state[16], note[128];
    uint64_t pinned, reserved;
};

/* Of a process; `there` false: it has none. Of several, the youngest. */
struct session_view daemon_session(struct daemon *d, pid_t pid);

/* A request on the admin connection: its status. */
int daemon_ask(struct daemon *d, Kvd__Proto__Request *request, struct control_reply *ret_reply);
int daemon_kill_session(struct daemon *d, uint32_t session);

/* How many of objects first .. first + n - 1 were removed (the others are pinned or not there). */
uint64_t daemon_evict(struct daemon *d, const char *pool, uint64_t first, uint64_t n);

/* Removes all that is not pinned; returns how many were. */
uint64_t daemon_flush(struct daemon *d, const char *pool);

uint64_t daemon_stat(struct daemon *d, const char *name, const char *pool);

/* Everything has come back: no session but ours, all slots free after a flush. */
void daemon_is_clean(struct daemon *d, const char *const *pools);

/* ---- workers */

struct worker {
    pid_t pid; /* 0: not running */
    int in, out;
    size_t have;
    char buffer[REPLY_MAX];
    char reply[REPLY_MAX]; /* the last one, without "ok " */
};

void worker_start(struct worker *w);

/* In the PID namespace of a daemon that has its own. */
void worker_start_in(struct worker *w, const struct daemon *d);

/* Connected to a socket, and with a space's pool open. token NULL: none. */
void worker_join(struct worker *w, const char *socket, const char *space, const char *pool,
                 const char *flags);

/* A command and its answer, which must be "ok". Returns the rest of the answer. */
const char *worker_do(struct worker *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same, answer "ok N ...": the number. */
long long worker_n(struct worker *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, but it may fail: 0 or the negative errno. */
int worker_try(struct worker *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Only says it; the answer is taken by worker_answer(). */
void worker_tell(struct worker *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
int worker_answer(struct worker *w);

/* Ends by itself: exit status 0. */
void worker_quit(struct worker *w);

/* SIGKILL, and it is waited for. */
void worker_kill(struct worker *w);

/* Waits for its death by a signal. */
void worker_died(struct worker *w, int signal);

/* A worker that publishes, looks up, pins, checks every byte and releases without a pause, in space two. */
void bystander_start(struct worker *w, struct daemon *d);

/* It is alive, has not seen anything wrong, and has gone on since the last call. */
void bystander_check(struct worker *w);
void bystander_stop(struct worker *w);

/* Puts a process on the n-th processor that we may use, if there are so many. */
void processor(pid_t pid, unsigned n);

/* ---- hugepages; these change the machine, so they are few and put back */

/* Makes sure that n more are free; false: they cannot be had. */
bool hugepages_take(unsigned n);
void hugepages_give_back(void);
uint64_t hugepages_free(void);

/* Mounts a hugetlbfs of so many pages for this test only; false: not allowed. */
bool hugetlbfs_mount(unsigned pages, char ret_dir[64]);

/* Pages of it that are in use. */
unsigned hugetlbfs_used(const char *dir);

/* In a mount namespace of our own, with no hugetlbfs anywhere. */
bool hugetlbfs_hide(void);

/* ---- */

/* .init and .fini of every suite: kills and removes what the test has left. */
void harness_init(void);
void harness_fini(void);

#endif
