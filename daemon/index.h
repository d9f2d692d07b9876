/* SPDX-License-Identifier: Apache-2.0 */
/* Writing an index: the core thread only. The other half of shm/index.h. */
#ifndef KVD_DAEMON_INDEX_H
#define KVD_DAEMON_INDEX_H

#include <stdbool.h>

#include "shm/index.h"

#define INDEX_NO_LINE UINT32_MAX

/* Lines for a pool: a power of two, at most a third full, so that most probes end at their first
 * line. */
uint64_t index_lines_for(uint64_t slots);

/* The line of a key in an epoch; NULL: not there. */
struct shm_entry *index_find(struct shm_index *ix, const struct shm_key *key, uint32_t epoch);

/* Takes a line for a key that is not there and shows it as PENDING in `slot`. -ENOSPC: no line is
 * free, which cannot happen while lines outnumber slots. */
int index_insert(struct shm_index *ix, const struct shm_key *key, uint32_t epoch, uint32_t slot,
                 uint32_t *ret_line);

/* PENDING -> LIVE, with the committed length of one part. Everything a reader may look at under a
 * pin was stored before. */
void index_publish(struct shm_index *ix, uint32_t line, uint64_t bytes);

/* A1 and its undoing; the caller does A2 between hiding and looking at the counters. */
void index_hide(struct shm_index *ix, uint32_t line);
void index_restore(struct shm_index *ix, uint32_t line);

/* A4: the line is free again, under the next generation. Its state is PENDING or LEAVING. */
void index_remove(struct shm_index *ix, uint32_t line);

#endif
