/* SPDX-License-Identifier: Apache-2.0 */
/* A space: one model on one trust domain. Two spaces share no key, no slot, no file, no mapping
 * (I6). */
#ifndef KVD_DAEMON_SPACE_H
#define KVD_DAEMON_SPACE_H

#include "daemon/core.h"
#include "daemon/tenant.h"

struct space {
    struct core *core;
    char name[64];
    uint32_t id;
    uint32_t epoch;
    char scheme[32];
    char identity[1024];
    uint8_t first_parent[32];
    uint32_t first_parent_len;
    uint8_t vector_key[32];
    uint32_t vector_key_len; /* 0: the first session that offers one decides */
    uint32_t block_tokens;
    uint64_t max_pinned_bytes; /* per session; 0: no limit */
    uint64_t max_reserved;     /* slots per session; 0: no limit */
    struct tenants tenants;
    struct pool *pools[CORE_MAX_POOLS];
    uint32_t n_pools;
    const char *offline; /* why; NULL: it is not */
    uint32_t resets;     /* in this run of the daemon */
    bool purging;        /* objects of an older epoch are still being removed */
    uint32_t purge_pool, purge_slot;
};

struct space *core_space(struct core *c, const char *name);

/* The bytes before the first block, from the seed when the configuration gives one. */
int space_first_parent(struct space *s, const char *seed);

/* What a client says of its keys and its model, and whether it fits. 0, or -EPROTOTYPE with a
 * sentence in ret_why. A space that was configured without a first parent or a test vector takes
 * those of the first writer that has them. */
struct space_claim {
    const char *scheme;   /* NULL: opaque keys, nothing to compare */
    const char *identity; /* NULL: not said */
    const uint8_t *first_parent, *vector_key;
    size_t first_parent_len, vector_key_len;
    bool decides; /* may be the first to give them: a writer */
};

int space_check_claim(struct space *s, const struct space_claim *claim, char *ret_why, size_t n);

/* At start, before anybody has attached: the epoch that its stores carry. */
void space_set_epoch(struct space *s, uint32_t epoch);

/* Everything of the space becomes unreachable at once; removal follows in the background. */
void space_reset(struct space *s);

/* Nobody may use it any more. `why` is static text. */
void space_offline(struct space *s, const char *why);

/* A step of removing what older epochs have left. True: there is more. */
bool space_purge(struct space *s);

#endif
