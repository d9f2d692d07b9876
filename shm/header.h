/* SPDX-License-Identifier: Apache-2.0 */
/* Filling and checking the header that every segment starts with. */
#ifndef KVD_SHM_HEADER_H
#define KVD_SHM_HEADER_H

#include "layout.h"

/* `count` is what the segment is sized by (lines, slots, ring entries). */
void shm_header_fill(struct shm_header *h, enum shm_kind kind, uint64_t bytes, uint64_t count,
                     const uint8_t instance[16]);

/* -EPROTO: not a kvd segment or of another kind; -EPROTONOSUPPORT: another layout version; -ERANGE:
 * the header promises more than `mapped_bytes`, or than `count` needs. */
int shm_header_check(const struct shm_header *h, enum shm_kind kind, uint64_t mapped_bytes);

#endif
