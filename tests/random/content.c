/* SPDX-License-Identifier: Apache-2.0 */
#include "content.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "rng.h"

enum {
    WORD = sizeof(uint64_t),
    HEAD = 5, /* words that say what it is */
};

struct user {
    uint64_t nonce;
    uint32_t place, key, epoch, zero;
    uint8_t rest[104];
};
_Static_assert(sizeof(struct user) == 128, "all that a commit takes");

struct kvd_key content_key(uint32_t key)
{
    bool twin = key % 7 == 3; /* of the key before, in another group */
    bool half = key % 7 == 5; /* ... with another last byte */
    uint64_t x = twin || half ? key - 1 : key;
    struct kvd_key k = {.group = twin};

    for (size_t i = 0; i < sizeof(k.hash); i += WORD) {
        uint64_t w = rng_mix(x * 0x9e3779b97f4a7c15ull + i + 1);

        memcpy(k.hash + i, &w, WORD);
    }
    k.hash[sizeof(k.hash) - 1] ^= half;
    return k;
}

uint32_t content_tenant(uint32_t key)
{
    return key / CONTENT_CHAIN % 4;
}

uint64_t content_bytes(const struct content *c)
{
    if (c->nonce % 4)
        return c->part_bytes;
    return HEAD * WORD + c->nonce / 4 % (c->part_bytes - HEAD * WORD);
}

static uint64_t word_at(const struct content *c, uint32_t part, uint64_t i)
{
    switch (i) {
    case 0:
        return c->nonce;
    case 1:
        return (uint64_t)c->place << 32 | part;
    case 2:
        return (uint64_t)c->key << 32 | c->epoch;
    case 3:
        return content_bytes(c);
    case 4:
        return ~c->nonce;
    default:
        return rng_mix(c->nonce + ((uint64_t)part << 56) + i * 0x9e3779b97f4a7c15ull);
    }
}

void content_fill(const struct content *c, uint32_t part, void *to)
{
    uint64_t bytes = content_bytes(c), w;
    char *p = to;

    for (uint64_t i = 0; i < bytes; i += WORD) {
        w = word_at(c, part, i / WORD);
        memcpy(p + i, &w, bytes - i < WORD ? bytes - i : WORD);
    }
}

uint64_t content_checksum(const struct content *c, void *room)
{
    XXH3_state_t *s = XXH3_createState();
    uint64_t sum;

    if (!s)
        return 0;
    XXH3_64bits_reset(s);
    for (uint32_t i = 0; i < c->parts; i++) {
        content_fill(c, i, room);
        XXH3_64bits_update(s, room, content_bytes(c));
    }
    sum = XXH3_64bits_digest(s);
    XXH3_freeState(s);
    return sum;
}

static void fill_user(const struct content *c, struct user *u)
{
    *u = (struct user){.nonce = c->nonce, .place = c->place, .key = c->key, .epoch = c->epoch};
    for (size_t i = 0; i < sizeof(u->rest); i++)
        u->rest[i] = (uint8_t)rng_mix(c->nonce + i);
}

void content_commit(const struct content *c, uint64_t checksum, void *user, struct kvd_commit *ret)
{
    struct user u;

    fill_user(c, &u);
    memcpy(user, &u, sizeof(u)); /* which may lie anywhere */
    ret->bytes = content_bytes(c);
    ret->position = c->key % CONTENT_CHAIN;
    ret->layout = rng_mix(c->place);
    ret->checksum = checksum;
    ret->user = user;
    ret->user_bytes = sizeof(struct user);
}

static const char *check_parent(const struct content *c, const struct kvd_meta *m)
{
    struct kvd_key parent;

    if (!m->has_parent) /* the writer may not have known it */
        return NULL;
    if (c->key % CONTENT_CHAIN == 0)
        return "a parent where none is";
    parent = content_key(c->key - 1);
    return memcmp(&parent, &m->parent, sizeof(parent)) == 0 ? NULL : "another parent";
}

const char *content_check_meta(struct content *c, const struct kvd_meta *m, uint64_t bytes)
{
    struct user u, want;

    if (m->user_bytes != sizeof(u))
        return "user metadata of another length";
    memcpy(&u, m->user, sizeof(u));
    if (u.place != c->place)
        return "an object of another pool (I6)";
    if (u.key != c->key)
        return "the object of another key";
    if (u.epoch != c->epoch)
        return "an object of another epoch";
    c->nonce = u.nonce;
    fill_user(c, &want);
    if (memcmp(&u, &want, sizeof(u)) != 0)
        return "torn user metadata";
    if (bytes != content_bytes(c))
        return "another length";
    if (m->position != c->key % CONTENT_CHAIN || m->layout != rng_mix(c->place) ||
        m->tenant != content_tenant(c->key))
        return "position, layout or tenant of another object";
    return check_parent(c, m);
}

static bool same_bytes(const struct content *c, uint32_t part, const void *bytes)
{
    uint64_t n = content_bytes(c), w;
    const char *p = bytes;

    for (uint64_t i = 0; i < n; i += WORD) {
        w = word_at(c, part, i / WORD);
        if (memcmp(p + i, &w, n - i < WORD ? n - i : WORD) != 0)
            return false;
    }
    return true;
}

const char *content_check(const struct content *c, const struct kvd_meta *m,
                          const void *const parts[])
{
    XXH3_state_t *s = XXH3_createState();
    bool same;

    if (!s)
        return "out of memory";
    XXH3_64bits_reset(s);
    for (uint32_t i = 0; i < c->parts; i++)
        XXH3_64bits_update(s, parts[i], content_bytes(c));
    same = XXH3_64bits_digest(s) == m->checksum;
    XXH3_freeState(s);
    if (!same)
        return "the checksum of other bytes (I1)";
    for (uint32_t i = 0; i < c->parts; i++)
        if (!same_bytes(c, i, parts[i]))
            return "wrong bytes (I1)";
    return NULL;
}
