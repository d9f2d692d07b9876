/* SPDX-License-Identifier: Apache-2.0 */
/* What each tenant holds in a space, and how much it may. */
#ifndef KVD_DAEMON_TENANT_H
#define KVD_DAEMON_TENANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TENANTS_MAX 65536u /* a writer can invent tenants; it cannot fill our memory with them */

struct tenant {
    uint32_t id;
    bool used;
    uint64_t resident_bytes, reserved_bytes;
    uint64_t resident;
    uint64_t reserved;
};

struct tenant_limit {
    bool any; /* for all tenants without a limit of their own */
    uint32_t id;
    uint64_t max_resident_bytes; /* 0: none */
    uint64_t max_reserved;
};

/* An open-addressing table by id; a tenant that holds nothing leaves it. */
struct tenants {
    struct tenant *table;
    size_t size, n;
    const struct tenant_limit *limits;
    size_t n_limits;
};

void tenants_free(struct tenants *t);

/* May the tenant reserve one more slot of `bytes`? 0, -EDQUOT. */
int tenants_check(const struct tenants *t, uint32_t id, uint64_t bytes);

/* Makes room for the tenant's numbers: 0, -ENOMEM, -EDQUOT (too many tenants). Afterwards
 * tenants_add() cannot fail. */
int tenants_want(struct tenants *t, uint32_t id);

/* Changes the sums by slots of `bytes` each. The deltas of a tenant never make them negative. */
void tenants_add(struct tenants *t, uint32_t id, int64_t reserved, int64_t resident,
                 uint64_t bytes);

/* Zeroes if unknown. */
struct tenant tenants_get(const struct tenants *t, uint32_t id);

#endif
