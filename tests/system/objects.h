/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and bytes of numbered objects: whoever knows the number knows every byte that belongs there, so
 * a wrong one is found wherever it comes from. */
#ifndef KVD_TESTS_OBJECTS_H
#define KVD_TESTS_OBJECTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "client/kvd.h"

/* Families of numbers with keys that are hard to tell apart. */
#define OBJECT_TWIN (UINT64_C(1) << 40) /* the same first 16 bytes */
#define OBJECT_LAST (UINT64_C(1) << 41) /* the same bytes but for the last one */

static inline uint64_t object_mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline struct kvd_key object_key(uint64_t id)
{
    struct kvd_key key = {.group = 0};

    for (unsigned i = 0; i < 4; i++) {
        uint64_t same = id & OBJECT_LAST || (id & OBJECT_TWIN && i < 2) ? 0 : id;
        uint64_t w = object_mix(same * 4 + i + 1);

        memcpy(key.hash + 8 * i, &w, 8);
    }
    if (id & OBJECT_LAST)
        key.hash[31] = (uint8_t)id;
    return key;
}

/* Two spaces never have the same bytes under a key. */
static inline uint64_t object_salt(const char *space)
{
    uint64_t h = 1;

    while (*space)
        h = object_mix(h + (uint8_t)*space++);
    return h;
}

static inline uint64_t object_word(uint64_t salt, uint64_t id, uint32_t part, size_t i)
{
    return object_mix(object_mix(salt ^ id) + ((uint64_t)part << 48) + i);
}

static inline void object_fill(uint64_t salt, uint64_t id, uint32_t part, void *at, size_t bytes)
{
    uint64_t *w = at;

    for (size_t i = 0; i < bytes / 8; i++)
        w[i] = object_word(salt, id, part, i);
}

/* Index of the first wrong word, or -1. */
static inline ptrdiff_t object_wrong(uint64_t salt, uint64_t id, uint32_t part, const void *at,
                                     size_t bytes)
{
    const uint64_t *w = at;

    for (size_t i = 0; i < bytes / 8; i++)
        if (w[i] != object_word(salt, id, part, i))
            return (ptrdiff_t)i;
    return -1;
}

#endif
