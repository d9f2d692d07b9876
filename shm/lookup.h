/* SPDX-License-Identifier: Apache-2.0 */
/* The data path: finding and pinning many keys, without a system call. Used by the library, and by
 * the daemon for programs that ask through the socket. */
#ifndef KVD_SHM_LOOKUP_H
#define KVD_SHM_LOOKUP_H

#include <stdbool.h>

#include "layout.h"

enum shm_found {
    SHM_FOUND_MISS = 0,
    SHM_FOUND_RAM = 1,
    SHM_FOUND_NVME = 2,
    SHM_FOUND_PENDING = 3,
};

/* A state per key (enum shm_found; `ret_states` may be NULL) and the number of leading keys in ram
 * or nvme. With NULL it stops at the first that is neither. `nvme`: of what the pool's spill stores
 * hold; NULL: it has none. What is in both is in ram, unless it is only PENDING there: then it is on
 * its way back. Epoch and retirement are those of `index`. */
size_t shm_lookup(const struct shm_index *index, const struct shm_index *nvme,
                  const struct shm_key *keys, size_t n, uint32_t epoch, uint8_t *ret_states);

struct shm_pinned {
    uint32_t slot; /* SHM_NO_SLOT: not pinned */
    uint32_t view; /* the caller's number, copied */
    uint64_t bytes;
};

/* Pins keys in order into `ret` (n entries), with `pins` the caller's own counters. Stops at the
 * first miss, or with `all` marks misses and goes on. Returns the number of entries of `ret` that
 * are filled;
 * *ret_pinned counts those that hold a pin. */
size_t shm_pin_keys(const struct shm_index *index, struct shm_pins *pins,
                    const struct shm_key *keys, size_t n, uint32_t epoch, bool all, uint32_t view,
                    struct shm_pinned *ret, size_t *ret_pinned);

/* Gives n pins back, last first: the head of a chain is stamped last. */
void shm_unpin(const struct shm_index *index, struct shm_pins *pins,
               const struct shm_pinned *pinned, size_t n);

#endif
