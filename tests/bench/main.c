/* SPDX-License-Identifier: Apache-2.0 */
/* kvd-bench: command line, and which cases there are. */
#include <errno.h>
#include <fnmatch.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

#define ROUNDS_DEFAULT 11u
#define ROUNDS_MAX     1000u
#define ONLY_MAX       32u

static const struct {
    const char *name, *about;
    int (*run)(struct bench *b);
} cases[] = {
    {"lookup", "finding a 2,048-key chain, hot and cold, in a table", case_lookup},
    {"pin", "pinning and releasing one, hot and cold, in a table", case_pin},
    {"api", "the same through libkvd, against a running daemon", case_api},
    {"scaling", "lookups and pins of two processes on the same hot chain", case_scaling},
    {"publish", "storing 1 MiB objects: reserve, copy, commit", case_publish},
    {"round-trip", "reserve and commit without data", case_round_trip},
    {"evict", "eviction while 64 sessions hold 4,096 pins each", case_evict},
    {"rest", "wake-ups and processor time of an idle daemon (takes 10 seconds)", case_rest},
    {"death", "from a worker's SIGKILL until its pins are back", case_death},
    {"populate", "touching a pool's memory with helper threads", case_populate},
    {"hash", "keys of a token sequence", case_hash},
    {"remote", "reading objects through the socket", case_remote},
    {"spill", "writing 1 MiB objects to a store", case_spill},
    {"promote", "bringing them back", case_promote},
    {"snapshot", "bringing one object of 154 MB back", case_snapshot},
    {"spilling", "lookups and pins while objects are written to a store", case_spilling},
    {"spill-start", "starting with a store of 1,000,000 records", case_spill_start},
};
#define CASES (sizeof(cases) / sizeof(cases[0]))

struct arguments {
    struct bench bench;
    const char *only[ONLY_MAX];
    size_t n_only;
    bool json;
};

static void usage(FILE *f)
{
    fputs("Usage: kvd-bench [--only CASE]... [--rounds N] [--json]\n"
          "Measures kvd against the least that this machine could do the same for, in one run, by\n"
          "turns. RATIO is ours / floor, the median of the ratios of all rounds. Figures that are "
          "worth\n"
          "something need a quiet machine; `busy` says that the floor has missed the goal as "
          "well.\n\n"
          "      --only CASE    only this case, or those that match the pattern\n"
          "      --rounds N     samples of each (default 11)\n"
          "      --json         JSON lines instead of a table\n"
          "      --daemon PATH  of kvd (default: that of the same build)\n"
          "      --disk DIR     for stores (default /var/tmp); 10 GB are used for a while\n"
          "      --smoke        everything tiny, once: do all cases run?\n"
          "      --list         names of the cases\n"
          "  -h, --help         this text\n\n"
          "Exit status: 0 all cases ran, 1 some could not, 2 wrong usage. scripts/bench takes "
          "hugepages\n"
          "for it; without them `publish`, `populate`, `spill`, `promote` and `snapshot` measure "
          "small pages.\n"
          "If fio is installed, it is one of the floors of these three.\n",
          f);
}

static void list(void)
{
    for (size_t i = 0; i < CASES; i++)
        printf("%-12s %s\n", cases[i].name, cases[i].about);
}

/* BUILD/tests/bench/kvd-bench -> BUILD/daemon/kvd */
static const char *daemon_beside_us(void)
{
    static char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);

    for (int up = 0; up < 3 && n > 0; up++)
        while (n > 0 && path[--n] != '/')
            ;
    if (n <= 0)
        return "kvd";
    snprintf(path + n, sizeof(path) - (size_t)n, "/daemon/kvd");
    return path;
}

static bool wanted(const struct arguments *a, const char *name)
{
    for (size_t i = 0; i < a->n_only; i++)
        if (fnmatch(a->only[i], name, 0) == 0)
            return true;
    return !a->n_only;
}

static int add_only(struct arguments *a, const char *pattern)
{
    for (size_t i = 0; i < CASES; i++) {
        if (fnmatch(pattern, cases[i].name, 0) != 0)
            continue;
        if (a->n_only == ONLY_MAX)
            return -E2BIG;
        a->only[a->n_only++] = pattern;
        return 0;
    }
    fprintf(stderr, "kvd-bench: no case is called %s (try --list)\n", pattern);
    return -EINVAL;
}

static int set_rounds(struct arguments *a, const char *text)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (end == text || *end || n < 1 || n > ROUNDS_MAX) {
        fprintf(stderr, "kvd-bench: --rounds takes a number from 1 to %u\n", ROUNDS_MAX);
        return -EINVAL;
    }
    a->bench.rounds = (unsigned)n;
    return 0;
}

enum option_value {
    OPT_ONLY = 256,
    OPT_ROUNDS,
    OPT_JSON,
    OPT_DAEMON,
    OPT_DISK,
    OPT_SMOKE,
    OPT_LIST,
};

/* 1: done, nothing to measure. */
static int parse(int argc, char **argv, struct arguments *a)
{
    static const struct option options[] = {
        {"only", required_argument, NULL, OPT_ONLY},
        {"rounds", required_argument, NULL, OPT_ROUNDS},
        {"json", no_argument, NULL, OPT_JSON},
        {"daemon", required_argument, NULL, OPT_DAEMON},
        {"disk", required_argument, NULL, OPT_DISK},
        {"smoke", no_argument, NULL, OPT_SMOKE},
        {"list", no_argument, NULL, OPT_LIST},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option, r = 0;

    while (r == 0 && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == OPT_ONLY)
            r = add_only(a, optarg);
        else if (option == OPT_ROUNDS)
            r = set_rounds(a, optarg);
        else if (option == OPT_JSON)
            a->json = true;
        else if (option == OPT_DAEMON)
            a->bench.daemon = optarg;
        else if (option == OPT_DISK)
            a->bench.disk = optarg;
        else if (option == OPT_SMOKE)
            a->bench.smoke = true;
        else if (option == OPT_LIST || option == 'h')
            return option == 'h' ? usage(stdout), 1 : (list(), 1);
        else
            r = -EINVAL;
    }
    if (r == 0 && optind < argc) {
        fprintf(stderr, "kvd-bench: what is %s?\n", argv[optind]);
        r = -EINVAL;
    }
    return r;
}

/* A case must also have said something: one that reports nothing has measured nothing. */
static bool run_case(struct bench *b, size_t i)
{
    unsigned rows = report_rows(b->report), broken = report_broken(b->report);
    int r;

    if (isatty(STDERR_FILENO))
        fprintf(stderr, "%s ...\n", cases[i].about);
    r = cases[i].run(b);
    if (r < 0)
        fprintf(stderr, "kvd-bench: %s: %s\n", cases[i].name, strerror(-r));
    else if (report_rows(b->report) == rows || report_broken(b->report) > broken)
        fprintf(stderr, "kvd-bench: %s: no figures\n", cases[i].name);
    else
        return true;
    return false;
}

int main(int argc, char **argv)
{
    struct arguments a = {.bench.daemon = daemon_beside_us(),
                          .bench.disk = "/var/tmp",
                          .bench.rounds = ROUNDS_DEFAULT};
    unsigned passed = 0, failed = 0, missed;
    int r = parse(argc, argv, &a);

    if (r)
        return r < 0 ? 2 : 0;
    if (a.bench.smoke)
        a.bench.rounds = 1;
    if (report_new(a.json, !a.bench.smoke, &a.bench.report) < 0)
        return 1;
    for (size_t i = 0; i < CASES; i++) {
        if (!wanted(&a, cases[i].name))
            continue;
        if (run_case(&a.bench, i))
            passed++;
        else
            failed++;
    }
    missed = report_missed(a.bench.report);
    report_end(a.bench.report);
    if (a.bench.smoke)
        printf("%u passed, %u failed\n", passed, failed);
    else if (!a.json)
        printf("%u cases measured, %u could not be; %u goals missed\n", passed, failed, missed);
    return failed ? 1 : 0;
}
