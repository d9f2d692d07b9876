/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvd costs, as ratios: a case measures ours and a floor (the least that the machine could do it
 * for) by turns, A B B A ..., in one run, and the medians of several rounds are compared. Absolute
 * values do not travel from one machine to another; ratios mostly do.
 */
#ifndef KVD_TESTS_BENCH_H
#define KVD_TESTS_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MIB      ((size_t)1 << 20)
#define HUGEPAGE ((size_t)2 << 20)

struct report;

struct bench {
    unsigned rounds;
    bool smoke;         /* everything tiny: does it run at all? */
    const char *daemon; /* path of kvd */
    const char *disk;   /* directory for stores */
    struct report *report;
};

enum goal {
    GOAL_NONE,
    GOAL_RATIO_AT_MOST, /* ours / floor */
    GOAL_RATIO_AT_LEAST,
    GOAL_OURS_AT_MOST, /* ours itself; the floor, if any, is to compare with */
    GOAL_OURS_AT_LEAST,
};

struct figure {
    const char *name;
    const char *unit;
    enum goal goal;
    double limit;
    bool more_is_better; /* which of several floors is the best */
};

/* One sample in the figure's unit: 0, or a negative errno. */
typedef int (*sample_fn)(void *arg, double *ret);

struct contender {
    const char *name;
    sample_fn sample;
};

#define CONTENDERS_MAX 4

/* Measures ours and the floors (n may be 0) by turns and reports the figure. */
int bench_compare(struct bench *b, const struct figure *f, void *arg, sample_fn ours,
                  const struct contender *floors, size_t n);

/* ---- report.c: results that are there already */

/* One value per round; `floor` may be NULL, else it has as many. */
struct result {
    const double *ours, *floor;
    size_t n;
    const char *floor_name;
};

/* `judge`: say whether goals were met. */
int report_new(bool json, bool judge, struct report **ret);
void report_add(struct report *r, const struct figure *figure, const struct result *result);

/* Rows so far, and those of them that missed their goal or are no numbers. */
unsigned report_rows(const struct report *r);
unsigned report_missed(const struct report *r);
unsigned report_broken(const struct report *r);

/* Prints the table (JSON lines were printed as they came) and gives everything back. */
void report_end(struct report *r);

/* ---- measure.c */

uint64_t now_ns(void);

/* Processor time of the calling thread. */
uint64_t cpu_ns(void);

/* NAN of nothing. Sorts `v`. */
double median(double *v, size_t n);
double percentile(double *v, size_t n, double p);

uint64_t random_next(uint64_t *state);

/* Keeps the calling thread on the n-th of the processors that it may use. 0, or a negative errno. */
int pin_cpu(unsigned n);
void unpin_cpu(void);
unsigned cpus(void);

enum pages {
    PAGES_SMALL,
    PAGES_HUGE, /* of 2 MiB */
};

struct memory {
    void *rw;
    const void *ro; /* the same memory, read-only */
    size_t bytes;   /* as mapped */
};

/* Shared memory, zeroed and touched. -ENOMEM also when hugepages are short. */
int memory_new(size_t bytes, enum pages pages, struct memory *ret);
void memory_free(struct memory *m);

/* Hugepages that nobody has taken. */
size_t hugepages_free(void);

/* Takes a line out of all caches; flush_wait() waits until all are out. */
void flush_line(const void *p);
void flush_wait(void);

/* ---- the cases */

int case_lookup(struct bench *b);
int case_pin(struct bench *b);
int case_api(struct bench *b);
int case_scaling(struct bench *b);
int case_publish(struct bench *b);
int case_round_trip(struct bench *b);
int case_evict(struct bench *b);
int case_rest(struct bench *b);
int case_death(struct bench *b);
int case_populate(struct bench *b);
int case_hash(struct bench *b);
int case_remote(struct bench *b);
int case_spill(struct bench *b);
int case_promote(struct bench *b);
int case_snapshot(struct bench *b);
int case_spilling(struct bench *b);
int case_spill_start(struct bench *b);

#endif
