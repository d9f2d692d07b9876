/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the store module share: the task and the steps that its thread goes through. */
#ifndef KVD_SPILL_STORE_TASK_H
#define KVD_SPILL_STORE_TASK_H

#include <pthread.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "daemon/spill/store.h"

#define STORE_CHUNK   1048576u /* read, written, zeroed at a time */
#define STORE_WHY     512u
#define STORE_COMMAND 256u

/*
 * Shared by the caller and one thread, which is detached: whoever lets go last destroys it, so a thread
 * that hangs in the kernel hinders nobody. The lock is never held across anything that can take long.
 */
struct store_task {
    /* Set before the thread starts. */
    struct store_spec spec; /* path and name: copies of ours */
    enum store_job job;
    uint8_t *free_slots; /* STORE_TRIM: a bitmap */
    int callers_fd;      /* STORE_TRIM: what result() hands back; file.fd is a duplicate */

    /* The thread's alone until `finished`. */
    struct store_file file; /* fd -1: none, or the caller's by now */
    uint64_t size;          /* of file or device */
    uint64_t sequence;      /* highest of a valid superblock, 0: none */
    bool made;              /* the file did not exist */
    char why[STORE_WHY];

    atomic_int phase; /* enum store_phase */
    atomic_uint_fast64_t done, total, records, broken;
    atomic_bool cancel;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t wake;  /* room in the queue, cancelled, taken, freed */
    int event_fd;         /* -1: the caller has gone */
    bool finished;        /* result and file are final */
    bool taken;           /* the caller has the result */
    bool freed, ended;    /* by the caller; the thread */
    int result;
    struct store_loaded *queue;
    uint32_t head, count;
};

/* ---- store.c */

/* Keeps the sentence, after the path, and returns the error for the caller to pass on. */
__attribute__((format(printf, 3, 4))) int store_fail(struct store_task *t, int error,
                                                     const char *fmt, ...);
/* What an administrator may type to make the store anew, in quotation marks. Returns buf. */
const char *store_format_command(const struct store_task *t, bool force,
                                 char buf[static STORE_COMMAND]);
int store_fail_call(struct store_task *t, const char *call, int error);
void store_phase_begin(struct store_task *t, enum store_phase phase, uint64_t total);
void store_advance(struct store_task *t, uint64_t bytes);
bool store_cancelled(const struct store_task *t);
int store_pause(struct store_task *t, unsigned ms); /* or -ECANCELED */
int store_push(struct store_task *t, const struct store_loaded *list, uint32_t n); /* same */

/* All of it, or a negative errno; reading: fewer bytes at the end of the file. */
ssize_t store_read(int fd, void *buf, size_t bytes, uint64_t offset);
int store_write(int fd, const void *buf, size_t bytes, uint64_t offset);

/* ---- store_open.c: finds or makes the file, checks whose it is, locks it: task->file, size, made. */
int store_attach(struct store_task *t);

/* ---- store_check.c: what is in it? */

/* 0: a store, in task->file.super, both copies equal. 1: nothing, may be formatted. Or as for
 * store_task_result(). */
int store_examine(struct store_task *t);

/* STORE_FORMAT: may what is there be replaced? */
int store_may_replace(struct store_task *t);

/* Both copies, the first durable before the second is begun. */
int store_write_supers(struct store_task *t, const struct format_super *super);

/* ---- store_format.c: makes a store of it. On failure a file that was made is gone. */
int store_format(struct store_task *t);

/* ---- store_load.c */

int store_load(struct store_task *t);
/* 1: there is a record, 0: none. */
int store_has_records(struct store_task *t, const struct format_super *super);

/* ---- store_trim.c */
int store_trim(struct store_task *t);

#endif
