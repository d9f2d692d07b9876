/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "daemon/log.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a world without journal, terminal and clock */

static char out[16384]; /* what was written to stderr */
static size_t out_bytes;
static unsigned writes;
static size_t write_max = SIZE_MAX; /* bytes that one write takes */
static int write_errors;            /* so many writes fail with write_errno */
static int write_errno;
static char entry[8][4096]; /* fields of the last journal entry */
static int entry_fields;
static unsigned entries;
static int journal_result;
static int access_result;
static int tty;
static struct timespec now;
static int clock_result;

static ssize_t fake_write(int fd, const void *buf, size_t bytes)
{
    cr_assert_eq(fd, 42);
    writes++;
    if (write_errors > 0) {
        write_errors--;
        errno = write_errno;
        return -1;
    }
    if (bytes > write_max)
        bytes = write_max;
    cr_assert_lt(out_bytes + bytes, sizeof(out));
    memcpy(out + out_bytes, buf, bytes);
    out_bytes += bytes;
    return (ssize_t)bytes;
}

static int fake_sendv(const struct iovec *iov, int n)
{
    entries++;
    cr_assert_leq(n, 8);
    for (int i = 0; i < n; i++) {
        cr_assert_lt(iov[i].iov_len, sizeof(entry[i]));
        memcpy(entry[i], iov[i].iov_base, iov[i].iov_len);
        entry[i][iov[i].iov_len] = '\0';
    }
    entry_fields = n;
    return journal_result;
}

static int fake_isatty(int fd)
{
    (void)fd;
    return tty;
}

static int fake_access(const char *path, int mode)
{
    cr_assert_str_eq(path, "/run/systemd/journal/socket");
    cr_assert_eq(mode, W_OK);
    errno = ENOENT;
    return access_result;
}

static int fake_clock(clockid_t clock, struct timespec *ret)
{
    (void)clock;
    errno = EINVAL;
    *ret = now;
    return clock_result;
}

static const struct log_sys fake_sys = {
    .clock_gettime = fake_clock,
    .isatty = fake_isatty,
    .access = fake_access,
    .write = fake_write,
    .journal_sendv = fake_sendv,
};

static struct log make(enum log_target target)
{
    const struct log_options options = {
        .level = LOG_INFO, .target = target, .fd = 42, .sys = &fake_sys};
    struct log log;

    log_init(&log, &options);
    return log;
}

static void assert_out(const char *expected)
{
    out[out_bytes] = '\0';
    cr_assert_str_eq(out, expected);
    out_bytes = 0;
}

static bool has_field(const char *field)
{
    for (int i = 0; i < entry_fields; i++)
        if (strcmp(entry[i], field) == 0)
            return true;
    return false;
}

/* ---- stderr */

Test(log, prefixes_lines_with_their_priority)
{
    struct log log = make(LOG_TARGET_STDERR);

    log_write(&log, LOG_ERR, NULL, "no %s", "pages");
    assert_out("<3>no pages\n");
    log_write(&log, LOG_WARNING, NULL, "w");
    log_write(&log, LOG_NOTICE, NULL, "n");
    log_write(&log, LOG_INFO, NULL, "i");
    assert_out("<4>w\n<5>n\n<6>i\n");
    cr_assert_eq(writes, 4, "one write per line");
    cr_assert_str_eq(log_target_name(&log), "stderr");
    cr_assert_eq(entries, 0);
}

Test(log, drops_what_is_less_important_than_the_level)
{
    struct log log = make(LOG_TARGET_STDERR);

    log_write(&log, LOG_DEBUG, NULL, "d");
    assert_out("");
    cr_assert(log_enabled(&log, LOG_INFO));
    cr_assert(!log_enabled(&log, LOG_DEBUG));
    cr_assert(!log_enabled(NULL, LOG_ERR));
    log_write(NULL, LOG_ERR, NULL, "nowhere");
    assert_out("");
}

Test(log, says_what_a_line_is_about)
{
    struct log log = make(LOG_TARGET_STDERR);

    log_write(&log, LOG_INFO, &(struct log_fields){"llama", "kv", 7}, "x");
    assert_out("<6>llama/kv session 7: x\n");
    log_write(&log, LOG_INFO, &(struct log_fields){"llama", NULL, 0}, "x");
    assert_out("<6>llama: x\n");
    log_write(&log, LOG_INFO, &(struct log_fields){NULL, "kv", 0}, "x");
    assert_out("<6>kv: x\n");
    log_write(&log, LOG_INFO, &(struct log_fields){NULL, NULL, 7}, "x");
    assert_out("<6>session 7: x\n");
    log_write(&log, LOG_INFO, &(struct log_fields){NULL, NULL, 0}, "x");
    assert_out("<6>x\n");
}

Test(log, is_readable_on_a_terminal)
{
    struct log log;

    setenv("TZ", "UTC", 1);
    tty = 1;
    now = (struct timespec){1000000000, 78900000};
    log = make(LOG_TARGET_AUTO);
    log_write(&log, LOG_ERR, NULL, "x");
    assert_out("2001-09-09 01:46:40.078 error   x\n");
    log_write(&log, LOG_WARNING, &(struct log_fields){"s", NULL, 0}, "x");
    assert_out("2001-09-09 01:46:40.078 warning s: x\n");
    clock_result = -1;
    log_write(&log, LOG_INFO, NULL, "x");
    assert_out("info    x\n");
}

Test(log, disarms_control_characters)
{
    struct log log = make(LOG_TARGET_STDERR);

    log_write(&log, LOG_INFO, NULL, "%s", "a\n<0>b\033[2J\r\t\x7f");
    assert_out("<6>a?<0>b?[2J???\n");
    log_write(&log, LOG_INFO, NULL, "%s", "caf\xc3\xa9 \xc2\x9b[2J \xc2\xa7 \xc2");
    assert_out("<6>caf\xc3\xa9 ?\x9b[2J \xc2\xa7 \xc2\n");
    log_write(&log, LOG_INFO, &(struct log_fields){"a\nb", NULL, 0}, "x");
    assert_out("<6>a?b: x\n");
}

Test(log, cuts_long_lines_visibly)
{
    struct log log = make(LOG_TARGET_STDERR);
    char text[5000];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_write(&log, LOG_INFO, NULL, "%s", text);
    cr_assert_lt(out_bytes, 4096, "must stay below PIPE_BUF");
    cr_assert_gt(out_bytes, 1500);
    cr_assert_eq(memcmp(out + out_bytes - 8, "x [cut]\n", 8), 0);

    out_bytes = 0;
    text[1990] = '\0';
    log_write(&log, LOG_INFO, NULL, "%s", text);
    cr_assert_eq(out_bytes, 3 + 1990 + 1);
    cr_assert_eq(memcmp(out + out_bytes - 3, "xx\n", 3), 0, "this one fits");
}

Test(log, goes_on_after_short_and_interrupted_writes)
{
    struct log log = make(LOG_TARGET_STDERR);

    write_max = 5;
    write_errors = 1;
    write_errno = EINTR;
    log_write(&log, LOG_INFO, NULL, "hello world");
    assert_out("<6>hello world\n");
    cr_assert_eq(log_lost(&log), 0);
}

Test(log, counts_lines_that_cannot_be_written)
{
    struct log log = make(LOG_TARGET_STDERR);

    write_errors = 1;
    write_errno = EAGAIN;
    log_write(&log, LOG_INFO, NULL, "lost");
    cr_assert_eq(log_lost(&log), 1);
    write_max = 0; /* takes nothing, for ever */
    log_write(&log, LOG_INFO, NULL, "lost");
    cr_assert_eq(log_lost(&log), 2);
    cr_assert_lt(writes, 100);
    write_max = SIZE_MAX;
    log_write(&log, LOG_INFO, NULL, "kept");
    cr_assert_eq(log_lost(&log), 2);
    assert_out("<6>kept\n");
}

Test(log, preserves_errno)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 1};
    struct log log = make(LOG_TARGET_STDERR);

    write_errors = 1;
    write_errno = EIO;
    errno = ENOSPC;
    log_write(&log, LOG_INFO, NULL, "x");
    cr_assert_eq(errno, ENOSPC);
    clock_result = -1; /* sets errno as well */
    log_write_limited(&log, &limit, LOG_INFO, NULL, "%m");
    cr_assert_eq(errno, ENOSPC);
    assert_out("<6>No space left on device\n");
    limit.suppressed = 1;
    log_limit_flush(&log, &limit, LOG_INFO, NULL, "x");
    cr_assert_eq(errno, ENOSPC);
}

/* ---- journal */

Test(log, writes_journal_entries_with_fields)
{
    struct log log = make(LOG_TARGET_JOURNAL);

    cr_assert_str_eq(log_target_name(&log), "journal");
    log_write(&log, LOG_WARNING, &(struct log_fields){"llama", "kv", 7}, "a\nb");
    cr_assert_eq(entries, 1);
    cr_assert(has_field("MESSAGE=a?b"));
    cr_assert(has_field("PRIORITY=4"));
    cr_assert(has_field("SYSLOG_IDENTIFIER=kvd"));
    cr_assert(has_field("KVD_SPACE=llama"));
    cr_assert(has_field("KVD_POOL=kv"));
    cr_assert(has_field("KVD_SESSION=7"));
    log_write(&log, LOG_INFO, NULL, "x");
    cr_assert_eq(entry_fields, 3, "only the fields that apply");
    assert_out("");
}

Test(log, falls_back_to_stderr)
{
    struct log log = make(LOG_TARGET_JOURNAL);

    journal_result = -ECONNREFUSED;
    log_write(&log, LOG_ERR, NULL, "x");
    assert_out("<3>x\n");
    cr_assert_eq(log_lost(&log), 0);

    access_result = -1; /* sd_journal_sendv() would answer 0 */
    journal_result = 0;
    entries = 0;
    log = make(LOG_TARGET_JOURNAL);
    cr_assert_str_eq(log_target_name(&log), "stderr");
    log_write(&log, LOG_ERR, NULL, "x");
    assert_out("<3>x\n");
    cr_assert_eq(entries, 0);
}

static const char *target_for(const char *stream, int fd)
{
    struct log_options options = {
        .level = LOG_INFO, .fd = fd, .journal_stream = stream, .sys = &fake_sys};
    struct log log;

    log_init(&log, &options);
    return log_target_name(&log);
}

Test(log, knows_when_stderr_leads_to_the_journal)
{
    char stream[64];
    struct stat st;
    int fds[2];

    cr_assert_eq(pipe(fds), 0);
    cr_assert_eq(fstat(fds[1], &st), 0);
    snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    cr_assert_str_eq(target_for(stream, fds[1]), "journal");
    cr_assert_str_eq(target_for(stream, 0), "stderr", "another file");
    cr_assert_str_eq(target_for(stream, -1), "stderr");
    cr_assert_str_eq(target_for(NULL, fds[1]), "stderr");
    strcat(stream, "0");
    cr_assert_str_eq(target_for(stream, fds[1]), "stderr");
    snprintf(stream, sizeof(stream), "%ju:%jux", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    cr_assert_str_eq(target_for(stream, fds[1]), "stderr");
    snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev + 1, (uintmax_t)st.st_ino);
    cr_assert_str_eq(target_for(stream, fds[1]), "stderr");
    cr_assert_str_eq(target_for("", fds[1]), "stderr");
    cr_assert_str_eq(target_for("1", fds[1]), "stderr");
    close(fds[0]);
    close(fds[1]);
}

/* ---- limits */

Test(log, suppresses_repeated_lines_and_says_how_many)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 2};
    struct log log = make(LOG_TARGET_STDERR);

    for (int i = 0; i < 5; i++)
        log_write_limited(&log, &limit, LOG_INFO, NULL, "x%d", i);
    assert_out("<6>x0\n<6>x1\n");
    now.tv_nsec = 999;
    log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    assert_out("");
    now.tv_nsec = 1000;
    log_write_limited(&log, &limit, LOG_INFO, NULL, "y");
    log_write_limited(&log, &limit, LOG_INFO, NULL, "y");
    log_write_limited(&log, &limit, LOG_INFO, NULL, "y");
    assert_out("<6>y (4 similar suppressed)\n<6>y\n");
    now.tv_nsec = 2000;
    log_write_limited(&log, &limit, LOG_INFO, NULL, "z");
    assert_out("<6>z (1 similar suppressed)\n");
}

Test(log, keeps_the_count_of_a_line_that_is_cut)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 1, .suppressed = 123};
    struct log log = make(LOG_TARGET_STDERR);
    const char *end = " [cut] (123 similar suppressed)\n";
    char text[3000];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_write_limited(&log, &limit, LOG_INFO, NULL, "%s", text);
    cr_assert_eq(memcmp(out + out_bytes - strlen(end), end, strlen(end)), 0);
}

Test(log, does_not_count_lines_below_the_level)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 1};
    struct log log = make(LOG_TARGET_STDERR);

    for (int i = 0; i < 5; i++)
        log_write_limited(&log, &limit, LOG_DEBUG, NULL, "x");
    cr_assert_eq(limit.suppressed, 0);
    log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    assert_out("<6>x\n");
}

Test(log, tells_of_the_rest_when_a_burst_has_ended)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 1};
    struct log log = make(LOG_TARGET_STDERR);

    for (int i = 0; i < 3; i++)
        log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    assert_out("<6>x\n");
    log_limit_flush(&log, &limit, LOG_INFO, NULL, "refused");
    assert_out("");
    now.tv_sec = 1;
    log_limit_flush(&log, &limit, LOG_INFO, NULL, "refused");
    assert_out("<6>refused: 2 similar suppressed\n");
    log_limit_flush(&log, &limit, LOG_INFO, NULL, "refused");
    assert_out("");
    log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    assert_out("<6>x\n");
}

Test(log, a_broken_clock_silences_nothing)
{
    struct log_limit limit = {.interval_ns = 1000, .burst = 1};
    struct log log = make(LOG_TARGET_STDERR);

    clock_result = -1;
    log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    log_write_limited(&log, &limit, LOG_INFO, NULL, "x");
    assert_out("<6>x\n<6>x\n");
}

/* ---- the real thing */

#define THREADS 4
#define LINES   200

static void *writer(void *arg)
{
    struct log *log = arg;

    for (int i = 0; i < LINES; i++)
        log_write(log, LOG_INFO, NULL, "%0*d", 300, 7);
    return NULL;
}

Test(log, threads_do_not_mix_their_lines)
{
    struct log_options options = {.level = LOG_INFO};
    pthread_t threads[THREADS];
    char line[1024];
    struct log log;
    int fds[2], lines = 0;
    FILE *f;

    cr_assert_eq(pipe(fds), 0);
    options.fd = fds[1];
    log_init(&log, &options);
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, writer, &log), 0);
    f = fdopen(fds[0], "r");
    while (lines < THREADS * LINES) {
        cr_assert_not_null(fgets(line, sizeof(line), f));
        cr_assert_eq(strlen(line), 3 + 300 + 1);
        cr_assert_eq(strncmp(line, "<6>", 3), 0);
        cr_assert_eq(strspn(line + 3, "0"), 299);
        lines++;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    cr_assert_eq(log_lost(&log), 0);
    fclose(f);
    close(fds[1]);
}
