/* SPDX-License-Identifier: Apache-2.0 */
/* The ways of copying that kvd_copy_in() chooses from; internal, so that tests can run each of
 * them. */
#ifndef KVD_CLIENT_COPY_H
#define KVD_CLIENT_COPY_H

#include <stdbool.h>
#include <stddef.h>

struct copy_variant {
    const char *name;
    bool (*usable)(void); /* does this processor have it? */
    void (*copy)(void *dst, const void *src, size_t bytes);
};

/* All variants of this architecture, best first; the last one is always usable. */
const struct copy_variant *copy_variants(size_t *ret_n);

#endif
