/* SPDX-License-Identifier: Apache-2.0 */
/* Spill stores in a directory of their own, and calls that fail on demand (the program is linked with
 * --wrap). */
#ifndef KVD_TESTS_STORE_WORLD_H
#define KVD_TESTS_STORE_WORLD_H

#include "daemon/spill/store.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#define MIB (1ull << 20)

/* What happens to reads, writes or allocations of [from, to). Set before a task starts. */
struct fault {
    uint64_t from, to;
    int error;      /* positive errno; 0: none */
    unsigned times; /* 0: always */
    uint32_t cut;   /* transfer at most so many bytes; 0: all */
    bool hang;      /* until `released` */

    atomic_uint hits; /* calls that touched the range */
    atomic_uint calls;
    atomic_bool released;
    sigset_t blocked; /* of the thread that hung */
};

struct faults {
    struct fault read, write, allocate;
};
extern struct faults faults;

/* Also while a thread of an earlier task may still be ending. */
void fault_set(struct fault *f, struct fault to);

/* ---- files: below a directory that is removed after the test */

void store_world_init(void);
void store_world_fini(void);
const char *path_of(const char *name); /* of the last four */
void file_write(const char *path, const void *bytes, size_t n, uint64_t offset);
void file_read(const char *path, void *bytes, size_t n, uint64_t offset);
void file_flip(const char *path, uint64_t bit);
uint64_t file_size(const char *path);
void need_root(void);
/* A file system of a kind at the path, seen by this process only. */
void mount_at(const char *path, const char *type, const char *options);

/* ---- stores */

struct store_spec spec_of(const char *path); /* 8 MiB: 89 slots of two parts of 32 KiB, about */
struct format_record record_of(uint64_t i);
void put_record(const char *path, const struct format_super *s, uint32_t number, uint64_t i);
struct format_super super_of(const char *path, unsigned copy);
void put_super(const char *path, const struct format_super *s, unsigned copy);

/* A task run to its end. */
struct ran {
    int r;
    struct store_file file; /* fd -1: none */
    char why[512];
    struct store_loaded *list;
    uint32_t n;
    struct store_progress progress;
};

struct store_task *start(const struct store_spec *spec, enum store_job job);
struct ran wait_for(struct store_task *t); /* frees it */
struct ran run_job(const struct store_spec *spec, enum store_job job);
void ran_close(struct ran *r);
void wait_phase(struct store_task *t, enum store_phase phase);

/* Opens or makes the store and closes it again: that must succeed. */
struct format_super made(const struct store_spec *spec, enum store_job job);
void assert_fails(const struct store_spec *spec, enum store_job job, int error, const char *says);

/* A process that has the store open until it is killed. */
pid_t holder(const struct store_spec *spec);
void kill_and_reap(pid_t pid);

#endif
