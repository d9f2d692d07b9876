/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_UNIT_SEGMENT_WORLD_H
#define KVD_TESTS_UNIT_SEGMENT_WORLD_H

/*
 * What the tests of segments share: real hugepages, mounts, and system calls that fail when told
 * to.
 *
 * The program runs itself twice: the outer process raises the number of hugepages, mounts what the
 * tests need and puts everything back whatever became of the inner one, which is Criterion. Without
 * root the tests that need hugepages are skipped, with the reason. Hugepages are one pool for the
 * machine: run it serially (-j1), and nothing beside it that uses them.
 */

#include "daemon/segment_make.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WORLD_PAGES       40 /* hugepages that the tests may use */
#define WORLD_TIGHT_PAGES 4  /* what the mount with a limit gives */
#define WORLD_NOBODY      65534

#define need_hugepages()                                                                           \
    do {                                                                                           \
        if (*getenv("SEGMENT_TEST_LACK"))                                                          \
            cr_skip_test("%s", getenv("SEGMENT_TEST_LACK"));                                       \
    } while (0)

#define assert_says(text, part) cr_assert_not_null(strstr(text, part), "%s", text)

/* Directories: on a tmpfs, on a tiny tmpfs, on hugetlbfs, on a hugetlbfs with a limit. */
extern char run_dir[128], full_dir[128], huge_dir[128], tight_dir[128];
extern size_t hp, sp; /* sizes of hugepages and small pages */

extern const char world_nr_hugepages[];

void world_setup(void);
void world_assert_nothing_left(void);

uint64_t world_read(const char *path);
void world_write(const char *path, uint64_t v);
uint64_t world_hugepages(const char *what); /* a file of /sys/kernel/mm/hugepages */
int world_files(const char *dir);

/* Takes all free hugepages of the machine but `left`, for a moment. */
void world_steal(size_t left);
void world_unsteal(void);

size_t bytes_present(int fd);
mode_t mode_of(int fd);

/* How a child that runs fn() ends: its exit status, or minus the signal that killed it. */
int run_child(int (*fn)(void *arg), void *arg);
int read_byte(void *arg);
int write_byte(void *arg);

struct segment_spec pool_spec(size_t bytes);
struct segment_spec small_spec(size_t bytes);
struct segment segment_must(const struct segment_spec *spec);
void segment_destroy(struct segment *s);

/* ---- system calls that fail when told to */

enum call {
    CALL_MEMFD_CREATE,
    CALL_OPEN,
    CALL_FALLOCATE,
    CALL_FTRUNCATE,
    CALL_FCHOWN,
    CALL_FCHMOD,
    CALL_FCNTL,
    CALL_MMAP,
    CALL_MADVISE,
    CALLS,
};

/* Fails the nth such call from now, counted from 0, once. */
void fault_set(enum call call, int nth, int error);
bool fault_hits(enum call call);
bool fault_fired(void);

extern const struct segment_sys faulty_sys;

#endif
