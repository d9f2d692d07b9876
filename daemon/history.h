/* SPDX-License-Identifier: Apache-2.0 */
/* What became of keys that are no longer here, for `kvctl why`: a table of the last events, one per
 * key, in which newer ones overwrite older ones that fall on the same place. */
#ifndef KVD_DAEMON_HISTORY_H
#define KVD_DAEMON_HISTORY_H

#include <stdint.h>

#include "shm/layout.h"

struct history;

enum history_event {
    HISTORY_NONE = 0,
    HISTORY_EVICTED,  /* for memory; detail: 1 if it still waited for being written to a store */
    HISTORY_REMOVED,  /* by an administrator */
    HISTORY_REFUSED,  /* no slot could be had; detail: errno */
    HISTORY_ABORTED,  /* its writer gave up */
    HISTORY_ORPHANED, /* its writer died; detail: session */
    HISTORY_RESET,    /* weights changed; detail: the epoch it belonged to */
};

struct history_record {
    struct shm_key key;
    uint32_t event; /* enum history_event */
    uint32_t detail;
    uint64_t when_ms;
};

int history_new(uint64_t slots, struct history **ret_history);
void history_free(struct history *h);

void history_add(struct history *h, const struct shm_key *key, enum history_event event,
                 uint32_t detail, uint64_t now_ms);

/* NULL: nothing is known of the key. */
const struct history_record *history_find(const struct history *h, const struct shm_key *key);

const char *history_name(enum history_event event);

#endif
