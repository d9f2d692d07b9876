/* SPDX-License-Identifier: Apache-2.0 */
/* What the coordinator and its workers share: counts that survive a SIGKILL. Each lane has one writer at a
 * time, the worker of that number. */
#ifndef KVD_TESTS_RANDOM_BOARD_H
#define KVD_TESTS_RANDOM_BOARD_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    BOARD_LANES = 64,
};

struct lane {
    _Atomic uint64_t reads;     /* objects of which every byte was right */
    _Atomic uint64_t wrong;     /* ... was not, or the interface said something it must not */
    _Atomic uint64_t published; /* objects committed */
    _Atomic uint64_t refused;   /* no slot, no quota */
    _Atomic uint64_t stale;     /* the epoch had moved */
    _Atomic uint64_t resets;
    _Atomic uint32_t said; /* `what` is complete */
    char what[248];        /* the first thing that was wrong */
};

struct board {
    _Atomic uint32_t stop;
    struct lane lane[BOARD_LANES];
};

#endif
