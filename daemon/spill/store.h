/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a store, which may take as long as the device likes: a task on a thread of its own that opens,
 * locks, checks, formats, reads the table, and tells the core thread by an eventfd. Until it is done the
 * core uses nothing of the store.
 *
 * THE LOCK. I/O outlives a killed process: the kernel goes on reading and writing for seconds. So the file
 * is locked (flock, exclusive) on the very open file that all I/O goes through; io_uring's requests keep
 * that open file, and so the lock, alive until the last of them is done. Nobody but the holder of the lock
 * reads or writes anything of a store, its table included: what a predecessor still has in flight can
 * neither be overtaken nor be taken for something else. Waiting for it is a state of the store
 * (STORE_LOCKING), not of the daemon. A block device is opened O_EXCL as well. The descriptor is
 * close-on-exec and never passed on.
 */
#ifndef KVD_SPILL_STORE_H
#define KVD_SPILL_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/spill/format.h"

enum store_job {
    STORE_OPEN,   /* use what is there; an empty or absent regular file is formatted */
    STORE_FORMAT, /* make it anew */
    STORE_TRIM,   /* tell the file system or the device which slots are free */
};

enum store_phase {
    STORE_OPENING,
    STORE_LOCKING,    /* somebody else holds the lock: a predecessor's I/O, or another daemon */
    STORE_FORMATTING, /* `done` of `total` bytes zeroed (table) and allocated */
    STORE_READING,    /* `done` of `total` table bytes */
    STORE_TRIMMING,
    STORE_DONE,
};

struct store_spec {
    const char *name; /* "space/pool/name", for messages; may be NULL */
    const char *path;
    /* Of a regular file to be made; of a device at most so much; 0: all of the device. */
    uint64_t bytes;
    struct format_geometry geometry;
    uint32_t epoch; /* for a new superblock */
    /* STORE_FORMAT: although there is something else (a file system, another program's data). */
    bool force;
    bool no_lock; /* tests only: to show what the lock is for */
};

/* What a task leaves: the core's from then on. */
struct store_file {
    int fd; /* read and write, O_DIRECT if `direct`, O_CLOEXEC, locked */
    bool direct;
    bool device;
    struct format_super super;
};

/* One valid record of the table. Of all epochs: the caller drops what is not current. */
struct store_loaded {
    uint32_t number;
    struct format_record record;
};

struct store_task;

/* Copies what it needs of *spec. `fd`: eventfd to be written when there is news; the caller's. */
int store_task_open(const struct store_spec *spec, enum store_job job, int event_fd,
                    struct store_task **ret_task);

/* Of an open store: discards the slots whose bits are set in `free_slots` (copied). Nothing may be written to
 * them until the task has ended. Its own duplicate of the descriptor keeps the lock until then. */
int store_task_trim(const struct store_file *file, const uint8_t *free_slots, int event_fd,
                    struct store_task **ret_task);

/* Takes up to max loaded records; the task waits when too many are not taken. There is an event for records
 * that came, none for those that were left: take until there are fewer than max. */
uint32_t store_task_take(struct store_task *task, struct store_loaded *ret, uint32_t max);

struct store_progress {
    enum store_phase phase;
    uint64_t done, total;     /* bytes */
    uint64_t records, broken; /* seen so far: valid; neither valid nor empty */
};

void store_task_progress(const struct store_task *task, struct store_progress *ret);

/*
 * -EINPROGRESS, or how it ended: 0 (all records have been taken; *ret is filled), or a negative errno and a
 * sentence with the cure in ret_why (>= 512 bytes):
 *   -EMEDIUMTYPE  a store of another space, pool, geometry or model
 *   -EEXIST       not a store of kvd: nothing was changed; `kvctl spill format` makes it one
 *   -EPROTONOSUPPORT  of another version
 *   -EILSEQ       both superblocks are damaged
 *   -EBUSY        a device in use (mounted, or by another program)
 *   -EINVAL       truncated, or a path to something else than a file or a block device
 *   -ENOSPC, -EFBIG, -EIO, -EACCES, ...
 *   -EALREADY     *ret was filled before: there is one owner of the descriptor
 * Of a task that trims *ret is the store_file it was given, the descriptor the caller's as before.
 */
int store_task_result(struct store_task *task, struct store_file *ret, char *ret_why,
                      size_t why_bytes);

/* Asks it to end. */
void store_task_cancel(struct store_task *task);

/* Asks it to end, and does not wait: what it holds (memory, file, lock) goes when its thread ends, which
 * a thread that hangs in the kernel never does. event_fd is not written any more. NULL is fine. */
void store_task_free(struct store_task *task);

#endif
