/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_LOG_H
#define KVD_DAEMON_LOG_H

/*
 * Log lines, to one of two places:
 *
 *   stderr   one write() per line. On a terminal with time and level in words, elsewhere with the
 *            priority prefix that sd-daemon(3) describes: "<6>llama/kv session 7: text"
 *   journal  one entry per line, with the fields PRIORITY, KVD_SPACE, KVD_POOL and KVD_SESSION
 *
 * Levels are the priorities of <syslog.h>: LOG_ERR, LOG_WARNING, LOG_NOTICE, LOG_INFO, LOG_DEBUG.
 *
 * Text may quote what a peer sent: control characters, which could forge a line or drive a
 * terminal, become '?'. A line that cannot be written is counted (log_lost()) and never an error of
 * the caller.
 *
 * Any number of threads may write to one log; a struct log_limit belongs to one thread. errno is
 * preserved, so %m works and nothing needs saving.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <syslog.h>
#include <time.h>

enum log_target {
    LOG_TARGET_AUTO, /* the journal when stderr leads there anyway ($JOURNAL_STREAM), else stderr */
    LOG_TARGET_STDERR,
    LOG_TARGET_JOURNAL, /* stderr when there is no journal */
};

/* As in libc and libsystemd. */
struct log_sys {
    int (*clock_gettime)(clockid_t clock, struct timespec *ret);
    int (*isatty)(int fd);
    int (*access)(const char *path, int mode);
    ssize_t (*write)(int fd, const void *buf, size_t bytes);
    int (*journal_sendv)(const struct iovec *iov, int n);
};

struct log_options {
    int level; /* less important ones are dropped */
    enum log_target target;
    int fd;                     /* of stderr */
    const char *journal_stream; /* getenv("JOURNAL_STREAM"), may be NULL */
    const struct log_sys *sys;  /* NULL: the real ones */
};

/* Private; no resources are behind it, so nothing needs closing. */
struct log {
    const struct log_sys *sys;
    int level;
    int fd;
    bool journal;
    bool tty;
    atomic_uint_fast64_t lost;
};

/* What a line is about. All optional: NULL, NULL, 0. */
struct log_fields {
    const char *space;
    const char *pool; /* name inside the space */
    uint32_t session;
};

void log_init(struct log *log, const struct log_options *options);

/* Where the lines go: "stderr" or "journal". */
const char *log_target_name(const struct log *log);

/* Would a line of this level be written? For lines that are dear to make. */
bool log_enabled(const struct log *log, int level);

/* Lines that neither the journal nor stderr took. */
uint64_t log_lost(const struct log *log);

/* No newline at the end of the text. NULL log: nowhere. NULL fields: none. Texts of more than 2,000
 * bytes are cut, visibly. */
void log_write(struct log *log, int level, const struct log_fields *fields, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- repeated lines */

/* At most `burst` lines per interval pass; set those two, zero the rest. One limit per kind of
 * line. */
struct log_limit {
    uint64_t interval_ns;
    uint32_t burst;

    uint32_t passed; /* private, from here */
    bool running;
    uint64_t begin_ns;
    uint64_t suppressed;
};

/* log_write() within the limit. The first line after a pause says "(N similar suppressed)". */
void log_write_limited(struct log *log, struct log_limit *limit, int level,
                       const struct log_fields *fields, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* Says "WHAT: N similar suppressed" when there are some that no later line has told of and their
 * interval is over: for a timer, and at the end. */
void log_limit_flush(struct log *log, struct log_limit *limit, int level,
                     const struct log_fields *fields, const char *what);

#endif
