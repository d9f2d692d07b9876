/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes and metadata of objects: a function of what they are, so that readers know every byte. Two writers of
 * the same key never write the same bytes: each object has a nonce, and its parts must agree on it. */
#ifndef KVD_TESTS_RANDOM_CONTENT_H
#define KVD_TESTS_RANDOM_CONTENT_H

#include "client/kvd.h"

enum {
    CONTENT_CHAIN = 12, /* keys of a chain, each the parent of the next */
    CONTENT_CHAINS = 24,
    CONTENT_KEYS = CONTENT_CHAIN * CONTENT_CHAINS,
};

struct content {
    uint64_t nonce;
    uint32_t place; /* space and pool: the same keys mean different objects there */
    uint32_t key;
    uint32_t epoch;
    uint32_t parts;
    uint64_t part_bytes;
};

/* The number's key. Some differ in the group only. */
struct kvd_key content_key(uint32_t key);

/* Length of each part: anything up to the whole, decided by the nonce. */
uint64_t content_bytes(const struct content *c);

/* The bytes of a part, content_bytes() of them. */
void content_fill(const struct content *c, uint32_t part, void *to);

/* Of all parts, in order. `room`: content_bytes() to work in. */
uint64_t content_checksum(const struct content *c, void *room);

/* As it is given to a commit; `user`: 128 bytes to point to. */
void content_commit(const struct content *c, uint64_t checksum, void *user, struct kvd_commit *ret);

uint32_t content_tenant(uint32_t key);

/* The metadata are those of an object of this place, key and epoch; its nonce is filled in. NULL, or what is
 * wrong. */
const char *content_check_meta(struct content *c, const struct kvd_meta *m, uint64_t bytes);

/* All bytes of all parts and their checksum. */
const char *content_check(const struct content *c, const struct kvd_meta *m,
                          const void *const parts[]);

#endif
