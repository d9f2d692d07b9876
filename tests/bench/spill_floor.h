/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floors of the NVMe tier: a bare io_uring loop, and fio if it is installed, on a file of their own
 * that was written once before, as a store in use was. O_DIRECT, registered buffers and file, a single
 * issuer whose completions are deferred. No keys, no digests, no table, one place after the other.
 */
#ifndef KVD_TESTS_BENCH_SPILL_FLOOR_H
#define KVD_TESTS_BENCH_SPILL_FLOOR_H

#include "bench.h"

struct drive;

struct drive_spec {
    const char *dir;
    uint64_t bytes; /* of the file */
    uint64_t step;  /* transferred by a sample; at multiples of it, round and round */
    uint32_t depth; /* transfers of 1 MiB in flight */
    enum pages pages;
};

/* Writes the file once. */
int drive_new(const struct drive_spec *spec, struct drive **ret_drive);

/* Removes the file. NULL is fine. */
void drive_free(struct drive *d);

/* One step each. `ret_cpu_us` (may be NULL): of this thread, per MiB. */
int drive_loop(struct drive *d, bool write, double *ret_gbs, double *ret_cpu_us);

/* The loop, from or to as much memory as a step has bytes. The other one uses the same 8 MiB again and again,
 * as fio does, which a disk that is really memory of a host, or a device that reads and writes through the
 * processor's caches, finds there. */
int drive_like_pool(struct drive *d, bool write, double *ret_gbs);

int drive_fio(struct drive *d, bool write, double *ret_gbs);

/* fio is there and works. */
bool drive_has_fio(struct drive *d);

/* ---- files */

/* O_DIRECT where the file system has it. */
int disk_open(const char *path, int flags, int *ret_fd);

/* Reads the range from beginning to end, in pieces of 1 MiB, one at a time. */
int disk_read(const char *path, uint64_t offset, uint64_t bytes, double *ret_seconds);

/* A directory of our own below the one that was asked for; removed with all in it. */
int disk_dir_new(const struct bench *b, char *ret_dir, size_t n);
void disk_dir_free(const char *dir);

#endif
