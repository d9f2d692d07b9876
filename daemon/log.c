/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Without this the macros of the header would report places in this file as the origin of lines. */
#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>

#define JOURNAL_SOCKET "/run/systemd/journal/socket"

/* A line must stay below PIPE_BUF (4,096): longer ones could be mixed with another thread's. */
#define TEXT_MAX       2000
#define LINE_MAX_BYTES (TEXT_MAX + 512)
#define FIELD_MAX      96
#define WRITE_TRIES    8

static const struct log_sys real_sys = {
    .clock_gettime = clock_gettime,
    .isatty = isatty,
    .access = access,
    .write = write,
    .journal_sendv = sd_journal_sendv,
};

/* Does $JOURNAL_STREAM (systemd.exec(5)) name the file behind fd? */
static bool stream_matches(const char *journal_stream, int fd)
{
    uint64_t device, inode;
    struct stat st;
    int end = -1;

    if (!journal_stream ||
        sscanf(journal_stream, "%" SCNu64 ":%" SCNu64 "%n", &device, &inode, &end) != 2 ||
        journal_stream[end] != '\0' || fstat(fd, &st) < 0)
        return false;
    return st.st_dev == device && st.st_ino == inode;
}

void log_init(struct log *log, const struct log_options *options)
{
    const struct log_sys *sys = options->sys ? options->sys : &real_sys;
    bool journal = options->target == LOG_TARGET_JOURNAL ||
                   (options->target == LOG_TARGET_AUTO &&
                    stream_matches(options->journal_stream, options->fd));

    *log = (struct log){
        .sys = sys,
        .level = options->level,
        .fd = options->fd,
        /* Asked here because sd_journal_sendv() answers 0 when there is no journal. */
        .journal = journal && sys->access(JOURNAL_SOCKET, W_OK) == 0,
        .tty = sys->isatty(options->fd) == 1,
    };
}

const char *log_target_name(const struct log *log)
{
    return log->journal ? "journal" : "stderr";
}

bool log_enabled(const struct log *log, int level)
{
    return log && level <= log->level;
}

uint64_t log_lost(const struct log *log)
{
    return atomic_load_explicit(&log->lost, memory_order_relaxed);
}

/* ---- text */

/* C1 controls are two bytes in UTF-8; some terminals obey them. */
static bool is_c1(unsigned char a, unsigned char b)
{
    return a == 0xc2 && b >= 0x80 && b <= 0x9f;
}

static void clean(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++)
        if (*p < 0x20 || *p == 0x7f || is_c1(*p, p[1]))
            *p = '?';
}

static void format_text(char text[TEXT_MAX], uint64_t suppressed, const char *fmt, va_list ap)
    __attribute__((format(printf, 3, 0)));

static void format_text(char text[TEXT_MAX], uint64_t suppressed, const char *fmt, va_list ap)
{
    static const char cut[] = " [cut]";
    char tail[64] = "";
    size_t room;
    int n;

    if (suppressed)
        snprintf(tail, sizeof(tail), " (%" PRIu64 " similar suppressed)", suppressed);
    room = TEXT_MAX - strlen(tail);
    n = vsnprintf(text, room, fmt, ap);
    if (n < 0) /* a broken multibyte string in the arguments: the format still says what it was */
        snprintf(text, room, "%s", fmt);
    else if ((size_t)n >= room)
        memcpy(text + room - sizeof(cut), cut, sizeof(cut));
    strcat(text, tail);
    clean(text);
}

/* "space/pool session 7: ", as much of it as there is. */
static void format_subject(char *buf, size_t size, const struct log_fields *f)
{
    char session[24] = "";
    bool subject = f && (f->space || f->pool);

    if (f && f->session)
        snprintf(session, sizeof(session), "%ssession %" PRIu32, subject ? " " : "", f->session);
    if (subject)
        snprintf(buf, size, "%.63s%s%.63s%s: ", f->space ? f->space : "",
                 f->space && f->pool ? "/" : "", f->pool ? f->pool : "", session);
    else
        snprintf(buf, size, "%s%s", session, session[0] ? ": " : "");
    clean(buf);
}

static const char *level_name(int level)
{
    static const char *const names[] = {"emergency", "alert",  "critical", "error",
                                        "warning",   "notice", "info",     "debug"};

    return level >= 0 && level <= LOG_DEBUG ? names[level] : "?";
}

static void format_prefix(const struct log *log, int level, char *buf, size_t size)
{
    char stamp[32] = "";
    struct timespec now;
    struct tm tm;

    if (!log->tty) {
        snprintf(buf, size, "<%d>", level);
        return;
    }
    if (log->sys->clock_gettime(CLOCK_REALTIME, &now) == 0 && localtime_r(&now.tv_sec, &tm)) {
        strftime(stamp, sizeof(stamp), "%F %T", &tm);
        snprintf(buf, size, "%s.%03ld %-7s ", stamp, now.tv_nsec / 1000000, level_name(level));
    } else {
        snprintf(buf, size, "%-7s ", level_name(level));
    }
}

/* ---- targets */

/* Bounded: a stderr that nobody reads, set non-blocking, must not hold the core thread. */
static int write_all(const struct log *log, const char *buf, size_t bytes)
{
    for (int tries = 0; bytes > 0 && tries < WRITE_TRIES; tries++) {
        ssize_t n = log->sys->write(log->fd, buf, bytes);

        if (n < 0 && errno != EINTR)
            return -errno;
        if (n > 0) {
            buf += n;
            bytes -= (size_t)n;
        }
    }
    return bytes ? -EIO : 0;
}

static int write_stderr(const struct log *log, int level, const struct log_fields *f,
                        const char *text)
{
    char prefix[64], subject[192], line[LINE_MAX_BYTES];
    int n;

    format_prefix(log, level, prefix, sizeof(prefix));
    format_subject(subject, sizeof(subject), f);
    n = snprintf(line, sizeof(line), "%s%s%s\n", prefix, subject, text);
    return write_all(log, line, (size_t)n);
}

/* One field of a journal entry; buf is FIELD_MAX or larger. */
static __attribute__((format(printf, 3, 4))) struct iovec field(char *buf, size_t size,
                                                                const char *fmt, ...)
{
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(buf, size, fmt, ap);
    va_end(ap);
    if (n < 0)
        n = 0;
    return (struct iovec){buf, (size_t)n < size ? (size_t)n : size - 1};
}

static int write_journal(const struct log *log, int level, const struct log_fields *f,
                         const char *text)
{
    char message[TEXT_MAX + 16], priority[FIELD_MAX], space[FIELD_MAX], pool[FIELD_MAX];
    char session[FIELD_MAX];
    struct iovec iov[6];
    int n = 0;

    iov[n++] = field(message, sizeof(message), "MESSAGE=%s", text);
    iov[n++] = field(priority, sizeof(priority), "PRIORITY=%d", level);
    iov[n++] = (struct iovec){(char[]){"SYSLOG_IDENTIFIER=kvd"}, strlen("SYSLOG_IDENTIFIER=kvd")};
    if (f && f->space)
        iov[n++] = field(space, sizeof(space), "KVD_SPACE=%s", f->space);
    if (f && f->pool)
        iov[n++] = field(pool, sizeof(pool), "KVD_POOL=%s", f->pool);
    if (f && f->session)
        iov[n++] = field(session, sizeof(session), "KVD_SESSION=%" PRIu32, f->session);
    return log->sys->journal_sendv(iov, n);
}

static void log_text(struct log *log, int level, const struct log_fields *f, const char *text)
{
    int r = -ENOTCONN;

    if (log->journal)
        r = write_journal(log, level, f, text);
    if (r < 0)
        r = write_stderr(log, level, f, text);
    if (r < 0)
        atomic_fetch_add_explicit(&log->lost, 1, memory_order_relaxed);
}

static void log_writev(struct log *log, int level, const struct log_fields *f, uint64_t suppressed,
                       const char *fmt, va_list ap) __attribute__((format(printf, 5, 0)));

static void log_writev(struct log *log, int level, const struct log_fields *f, uint64_t suppressed,
                       const char *fmt, va_list ap)
{
    int saved = errno;
    char text[TEXT_MAX];

    format_text(text, suppressed, fmt, ap);
    log_text(log, level, f, text);
    errno = saved;
}

void log_write(struct log *log, int level, const struct log_fields *fields, const char *fmt, ...)
{
    va_list ap;

    if (!log_enabled(log, level))
        return;
    va_start(ap, fmt);
    log_writev(log, level, fields, 0, fmt, ap);
    va_end(ap);
}

/* ---- repeated lines */

/* Is the limit's interval over (or none begun)? A clock that fails must not silence anything. */
static bool interval_over(const struct log *log, const struct log_limit *limit, uint64_t *ret_now)
{
    struct timespec ts;

    if (log->sys->clock_gettime(CLOCK_MONOTONIC, &ts) < 0) {
        *ret_now = limit->begin_ns;
        return true;
    }
    *ret_now = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
    return !limit->running || *ret_now - limit->begin_ns >= limit->interval_ns;
}

static bool limit_pass(const struct log *log, struct log_limit *limit, uint64_t *ret_suppressed)
{
    uint64_t now;

    if (interval_over(log, limit, &now)) {
        limit->running = true;
        limit->begin_ns = now;
        limit->passed = 0;
    }
    if (limit->passed >= limit->burst) {
        limit->suppressed++;
        return false;
    }
    limit->passed++;
    *ret_suppressed = limit->suppressed;
    limit->suppressed = 0;
    return true;
}

void log_write_limited(struct log *log, struct log_limit *limit, int level,
                       const struct log_fields *fields, const char *fmt, ...)
{
    int saved = errno;
    uint64_t suppressed;
    va_list ap;

    if (!log_enabled(log, level) || !limit_pass(log, limit, &suppressed)) {
        errno = saved;
        return;
    }
    errno = saved; /* for a %m in the format */
    va_start(ap, fmt);
    log_writev(log, level, fields, suppressed, fmt, ap);
    va_end(ap);
}

void log_limit_flush(struct log *log, struct log_limit *limit, int level,
                     const struct log_fields *fields, const char *what)
{
    int saved = errno;
    uint64_t now;

    if (log_enabled(log, level) && limit->suppressed > 0 && interval_over(log, limit, &now)) {
        log_write(log, level, fields, "%s: %" PRIu64 " similar suppressed", what,
                  limit->suppressed);
        limit->suppressed = 0;
    }
    errno = saved;
}
