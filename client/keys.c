/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Key schemes: the keys that an engine would compute for a token sequence.
 *
 * All tokens are kept, so that truncating inside a block can go on from there; the keys of whole
 * blocks before the cut stay. A block is encoded into one buffer that is sized when the hasher is
 * made, and hashed in one go: nothing is allocated per block.
 */
#include "kvd.h"
#include "options.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>
#include <xxhash.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tokens are hashed from memory as little-endian words"
#endif

enum {
    HASH_MAX = 32,
    BLOCK_TOKENS_MAX = 65536,
    CBOR_HEAD_MAX = 9,
    CBOR_TOKEN_MAX = 5,
};

enum cbor_major {
    CBOR_UINT = 0,
    CBOR_NINT = 1,
    CBOR_BYTES = 2,
    CBOR_TEXT = 3,
    CBOR_ARRAY = 4,
};

static const uint8_t cbor_null = 0xf6;
static const char vllm_seed[] =
    "vllm-none-hash"; /* the engine's own for SHA when it is given none */
static const char sglang_namespace[] = "sglang-cache-namespace-v1";

struct text {
    char *chars; /* NULL: absent */
    size_t len;
};

struct mm_item {
    const char *identifier; /* into mm_text */
    size_t len;
    uint64_t offset;
    uint64_t end;
};

/* What a block follows and which tokens it has. `plain` leaves out everything that belongs to a
 * request. */
struct block {
    const uint8_t *parent;
    size_t parent_len;
    const uint32_t *tokens;
    uint64_t start; /* position of its first token */
    bool plain;
};

struct scheme {
    const char *name;
    size_t hash_len;
    size_t (*encode)(struct kvd_hasher *hasher, const struct block *block);
    bool vllm;
    bool xxhash;
};

struct kvd_hasher {
    const struct scheme *scheme;
    uint32_t block_tokens;
    uint32_t group;

    uint8_t first_parent[HASH_MAX]; /* of all requests of a space: kvd_space_open() exchanges it */
    size_t first_parent_len;
    uint8_t root[HASH_MAX]; /* parent of this request's first block */
    size_t root_len;

    EVP_MD *md; /* fetched once, context reused: a third of the cost of a one-shot hash */
    EVP_MD_CTX *md_ctx;
    uint8_t *scratch; /* encode_bound() bytes */

    struct text lora;
    struct text salt;
    struct mm_item *mm;
    char *mm_text;
    size_t mm_count;
    size_t mm_done; /* leading items that end at or before the next block */

    uint32_t *tokens;
    size_t token_count;
    size_t token_room;
    struct kvd_key *keys;
    size_t key_count;
    size_t key_room;
};

/* ---- canonical CBOR (RFC 8949, 4.2.1): shortest heads, definite lengths */

static uint8_t *put_be(uint8_t *p, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        p[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    return p + bytes;
}

static uint8_t *cbor_put_head(uint8_t *p, enum cbor_major major, uint64_t value)
{
    uint8_t type = (uint8_t)(major << 5);

    if (value < 24) {
        *p = type | (uint8_t)value;
        return p + 1;
    }
    /* 24..27 announce 1, 2, 4, 8 bytes */
    unsigned log2 = (value > UINT8_MAX) + (value > UINT16_MAX) + (value > UINT32_MAX);
    *p = type | (uint8_t)(24 + log2);
    return put_be(p + 1, value, 1u << log2);
}

/* Stores all of the parent's buffer, of which parent_len bytes count: a fixed size is cheap. */
static uint8_t *put_parent(uint8_t *p, const struct block *block)
{
    memcpy(p, block->parent, HASH_MAX);
    return p + block->parent_len;
}

static uint8_t *put_raw(uint8_t *p, const void *bytes, size_t n)
{
    if (n)
        memcpy(p, bytes, n);
    return p + n;
}

static uint8_t *cbor_put_string(uint8_t *p, enum cbor_major major, const void *bytes, size_t n)
{
    return put_raw(cbor_put_head(p, major, n), bytes, n);
}

/* A cbor_put_head(CBOR_UINT) without branches: token ids straddle 65,536 in no pattern that could
 * be predicted, and a block has 16 of them. Stores 5 bytes, of which those returned count. */
static inline uint8_t *cbor_put_token(uint8_t *p, uint32_t token)
{
    static const uint8_t unused_bits[] = {24, 24, 16, 0};
    static const uint8_t length[] = {1, 2, 3, 5};
    unsigned size = (token >= 24) + (token > UINT8_MAX) + (token > UINT16_MAX);
    uint32_t word = __builtin_bswap32(token << unused_bits[size]);

    memcpy(p + 1, &word, sizeof(word));
    *p = (uint8_t)(size ? 23 + size : token);
    return p + length[size];
}

/* offset - start, which is negative for an item that began in an earlier block */
static uint8_t *cbor_put_difference(uint8_t *p, uint64_t offset, uint64_t start)
{
    if (offset >= start)
        return cbor_put_head(p, CBOR_UINT, offset - start);
    return cbor_put_head(p, CBOR_NINT, start - offset - 1);
}

/* ---- vLLM: [parent, [tokens...], extra] */

static bool mm_touches(const struct mm_item *item, uint64_t start, uint64_t end)
{
    return item->offset < end && item->end > start;
}

static uint8_t *put_mm(const struct kvd_hasher *hasher, uint8_t *p, uint64_t start, uint64_t end)
{
    for (size_t i = hasher->mm_done; i < hasher->mm_count && hasher->mm[i].offset < end; i++) {
        const struct mm_item *item = &hasher->mm[i];

        if (!mm_touches(item, start, end))
            continue;
        p = cbor_put_head(p, CBOR_ARRAY, 2);
        p = cbor_put_string(p, CBOR_TEXT, item->identifier, item->len);
        p = cbor_put_difference(p, item->offset, start);
    }
    return p;
}

static size_t count_mm(struct kvd_hasher *hasher, uint64_t start, uint64_t end)
{
    size_t count = 0;

    while (hasher->mm_done < hasher->mm_count && hasher->mm[hasher->mm_done].end <= start)
        hasher->mm_done++;
    for (size_t i = hasher->mm_done; i < hasher->mm_count && hasher->mm[i].offset < end; i++)
        count += mm_touches(&hasher->mm[i], start, end);
    return count;
}

/* LoRA name (every block), items that the block touches, salt (first block): in this order */
static uint8_t *put_extra(struct kvd_hasher *hasher, uint8_t *p, const struct block *block)
{
    uint64_t end = block->start + hasher->block_tokens;
    bool salted = hasher->salt.chars && block->start == 0;
    size_t count = 0;

    if (!block->plain)
        count = (hasher->lora.chars != NULL) + count_mm(hasher, block->start, end) + salted;
    if (count == 0) {
        *p = cbor_null;
        return p + 1;
    }
    p = cbor_put_head(p, CBOR_ARRAY, count);
    if (hasher->lora.chars)
        p = cbor_put_string(p, CBOR_TEXT, hasher->lora.chars, hasher->lora.len);
    p = put_mm(hasher, p, block->start, end);
    if (salted)
        p = cbor_put_string(p, CBOR_TEXT, hasher->salt.chars, hasher->salt.len);
    return p;
}

static size_t vllm_encode(struct kvd_hasher *hasher, const struct block *block)
{
    uint8_t *p = hasher->scratch;

    p = cbor_put_head(p, CBOR_ARRAY, 3);
    p = put_parent(cbor_put_head(p, CBOR_BYTES, block->parent_len), block);
    p = cbor_put_head(p, CBOR_ARRAY, hasher->block_tokens);
    for (uint32_t i = 0; i < hasher->block_tokens; i++)
        p = cbor_put_token(p, block->tokens[i]);
    p = put_extra(hasher, p, block);
    return (size_t)(p - hasher->scratch);
}

/* ---- SGLang: parent || tokens */

static size_t sglang_encode(struct kvd_hasher *hasher, const struct block *block)
{
    uint8_t *p = put_parent(hasher->scratch, block);

    p = put_raw(p, block->tokens, hasher->block_tokens * sizeof(uint32_t));
    return (size_t)(p - hasher->scratch);
}

/* Absent, empty and joined parts stay different: presence and length are hashed too. */
static uint8_t *sglang_put_part(uint8_t *p, const char *part)
{
    if (!part) {
        *p = 0;
        return p + 1;
    }
    uint64_t len = strlen(part);
    *p = 1;
    p = put_raw(p + 1, &len, sizeof(len));
    return put_raw(p, part, len);
}

/* ---- hashing */

static int hash_sha256(struct kvd_hasher *hasher, size_t n, uint8_t *ret)
{
    if (EVP_DigestInit_ex(hasher->md_ctx, hasher->md, NULL) != 1 ||
        EVP_DigestUpdate(hasher->md_ctx, hasher->scratch, n) != 1 ||
        EVP_DigestFinal_ex(hasher->md_ctx, ret, NULL) != 1)
        return -EIO;
    return 0;
}

/* Hashes the first n bytes of scratch into scheme->hash_len bytes. */
static int hash_scratch(struct kvd_hasher *hasher, size_t n, uint8_t *ret)
{
    XXH128_canonical_t canonical;

    if (hasher->md)
        return hash_sha256(hasher, n, ret);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(hasher->scratch, n));
    memcpy(ret, canonical.digest, sizeof(canonical.digest));
    return 0;
}

static int hash_block(struct kvd_hasher *hasher, const struct block *block, struct kvd_key *ret_key)
{
    *ret_key = (struct kvd_key){.group = hasher->group}; /* a shorter hash is padded with zeros */
    return hash_scratch(hasher, hasher->scheme->encode(hasher, block), ret_key->hash);
}

static int hash_full_blocks(struct kvd_hasher *hasher)
{
    size_t full = hasher->token_count / hasher->block_tokens;

    for (size_t i = hasher->key_count; i < full; i++) {
        struct block block = {
            .parent = i ? hasher->keys[i - 1].hash : hasher->root,
            .parent_len = i ? hasher->scheme->hash_len : hasher->root_len,
            .tokens = hasher->tokens + i * hasher->block_tokens,
            .start = (uint64_t)i * hasher->block_tokens,
        };
        int r = hash_block(hasher, &block, &hasher->keys[i]);

        if (r < 0)
            return r;
        hasher->key_count = i + 1;
    }
    return 0;
}

/* ---- making a hasher */

static const struct scheme schemes[] = {
    {"vllm-sha256-cbor", 32, vllm_encode, true, false},
    {"vllm-xxhash-cbor", 16, vllm_encode, true, true},
    {"sglang", 32, sglang_encode, false, false},
};

static const struct scheme *find_scheme(const char *name)
{
    for (size_t i = 0; i < sizeof(schemes) / sizeof(schemes[0]); i++) {
        if (strcmp(schemes[i].name, name) == 0)
            return &schemes[i];
    }
    return NULL;
}

void kvd_hasher_options_init(struct kvd_hasher_options *options, size_t size)
{
    const struct kvd_hasher_options own = {.block_tokens = 16};

    options_init(options, size, &own, sizeof(own));
}

/* An option that a scheme has no place for would give keys that look right and never hit. */
static bool options_fit_scheme(const struct kvd_hasher_options *options,
                               const struct scheme *scheme)
{
    if (!scheme->vllm)
        return !options->seed && !options->first_parent && !options->first_parent_len &&
               !options->lora && !options->mm_count;
    if (options->extra_key || (options->mm_count && !options->mm))
        return false;
    if (!options->first_parent)
        return !options->first_parent_len && (options->seed || !scheme->xxhash);
    /* 32 beside a 16-byte hash too: older engines drew 32 random bytes, whatever the hash */
    return !options->seed && (options->first_parent_len == 16 || options->first_parent_len == 32);
}

static bool mm_in_order(const struct kvd_hasher_options *options)
{
    uint64_t last = 0;

    for (size_t i = 0; i < options->mm_count; i++) {
        const struct kvd_mm_item *item = &options->mm[i];

        if (!item->identifier || !item->length || item->offset < last ||
            item->offset > UINT64_MAX - item->length)
            return false;
        last = item->offset;
    }
    return true;
}

static int check_options(const struct kvd_hasher_options *options, const struct scheme **ret_scheme)
{
    const struct scheme *scheme;

    if (!options->scheme)
        return -EINVAL;
    scheme = find_scheme(options->scheme);
    if (!scheme)
        return -ENOTSUP;
    if (options->block_tokens < 1 || options->block_tokens > BLOCK_TOKENS_MAX ||
        !options_fit_scheme(options, scheme) || !mm_in_order(options))
        return -EINVAL;
    *ret_scheme = scheme;
    return 0;
}

static bool add_text(size_t *sum, const char *text, size_t overhead)
{
    return !__builtin_add_overflow(*sum, overhead, sum) &&
           !__builtin_add_overflow(*sum, text ? strlen(text) : 0, sum);
}

/* The most that any encoding of this hasher needs. */
static bool encode_bound(const struct kvd_hasher_options *options, size_t *ret_bytes)
{
    size_t bytes = 3 * CBOR_HEAD_MAX + HASH_MAX + CBOR_HEAD_MAX +
                   (size_t)options->block_tokens * CBOR_TOKEN_MAX;
    bool fits = add_text(&bytes, options->seed ? options->seed : vllm_seed, CBOR_HEAD_MAX) &&
                add_text(&bytes, options->lora, CBOR_HEAD_MAX) &&
                add_text(&bytes, options->cache_salt, CBOR_HEAD_MAX) &&
                add_text(&bytes, options->extra_key, CBOR_HEAD_MAX) &&
                add_text(&bytes, sglang_namespace, 0);

    for (size_t i = 0; fits && i < options->mm_count; i++)
        fits = add_text(&bytes, options->mm[i].identifier, 3 * CBOR_HEAD_MAX);
    *ret_bytes = bytes;
    return fits;
}

static int copy_text(struct text *text, const char *chars)
{
    if (!chars)
        return 0;
    text->chars = strdup(chars);
    if (!text->chars)
        return -ENOMEM;
    text->len = strlen(chars);
    return 0;
}

static int copy_mm(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    size_t bytes = 0;
    char *at;

    if (!options->mm_count)
        return 0;
    for (size_t i = 0; i < options->mm_count; i++) {
        if (!add_text(&bytes, options->mm[i].identifier, 0))
            return -ENOMEM;
    }
    hasher->mm = calloc(options->mm_count, sizeof(*hasher->mm));
    hasher->mm_text = malloc(bytes ? bytes : 1);
    if (!hasher->mm || !hasher->mm_text)
        return -ENOMEM;
    at = hasher->mm_text;
    for (size_t i = 0; i < options->mm_count; i++) {
        const struct kvd_mm_item *from = &options->mm[i];
        size_t len = strlen(from->identifier);

        hasher->mm[i] = (struct mm_item){at, len, from->offset, from->offset + from->length};
        at = memcpy(at, from->identifier, len);
        at += len;
    }
    hasher->mm_count = options->mm_count;
    return 0;
}

static int copy_request(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    const char *salt = options->cache_salt;
    int r;

    if (!hasher->scheme->vllm)
        return 0; /* all of it is in the root */
    if (salt && !*salt)
        salt = NULL; /* vLLM asks whether the salt is true, and an empty string is not */
    r = copy_text(&hasher->lora, options->lora);
    if (r < 0)
        return r;
    r = copy_text(&hasher->salt, salt);
    if (r < 0)
        return r;
    return copy_mm(hasher, options);
}

static int open_hash(struct kvd_hasher *hasher)
{
    if (hasher->scheme->xxhash)
        return 0;
    hasher->md_ctx = EVP_MD_CTX_new();
    if (!hasher->md_ctx)
        return -ENOMEM;
    hasher->md = EVP_MD_fetch(NULL, "SHA256", NULL);
    return hasher->md ? 0 : -EIO;
}

static int vllm_root(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    const char *seed = options->seed ? options->seed : vllm_seed;
    uint8_t *end;

    if (options->first_parent) {
        memcpy(hasher->root, options->first_parent, options->first_parent_len);
        hasher->root_len = options->first_parent_len;
        return 0;
    }
    end = cbor_put_string(hasher->scratch, CBOR_TEXT, seed, strlen(seed));
    hasher->root_len = hasher->scheme->hash_len;
    return hash_scratch(hasher, (size_t)(end - hasher->scratch), hasher->root);
}

static int sglang_root(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    uint8_t *p = hasher->scratch;

    if (!options->extra_key && !options->cache_salt)
        return 0; /* page 0 has no parent */
    p = put_raw(p, sglang_namespace, strlen(sglang_namespace));
    p = sglang_put_part(p, options->extra_key);
    p = sglang_put_part(p, options->cache_salt);
    hasher->root_len = hasher->scheme->hash_len;
    return hash_scratch(hasher, (size_t)(p - hasher->scratch), hasher->root);
}

static int make_root(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    int r;

    if (!hasher->scheme->vllm)
        return sglang_root(hasher, options);
    r = vllm_root(hasher, options);
    if (r < 0)
        return r;
    memcpy(hasher->first_parent, hasher->root, hasher->root_len);
    hasher->first_parent_len = hasher->root_len;
    return 0;
}

static int hasher_setup(struct kvd_hasher *hasher, const struct kvd_hasher_options *options)
{
    size_t bytes;
    int r;

    hasher->block_tokens = options->block_tokens;
    hasher->group = options->group;
    if (!encode_bound(options, &bytes))
        return -ENOMEM;
    hasher->scratch = malloc(bytes);
    if (!hasher->scratch)
        return -ENOMEM;
    r = open_hash(hasher);
    if (r < 0)
        return r;
    r = copy_request(hasher, options);
    if (r < 0)
        return r;
    return make_root(hasher, options);
}

int kvd_hasher_new(const struct kvd_hasher_options *given, struct kvd_hasher **ret_hasher)
{
    struct kvd_hasher_options own = {.block_tokens = 16}, *options = &own;
    const struct scheme *scheme;
    struct kvd_hasher *hasher;
    int r = given && ret_hasher ? options_copy(&own, sizeof(own), given) : -EINVAL;

    if (r == 0)
        r = check_options(options, &scheme);
    if (r < 0)
        return r;
    hasher = calloc(1, sizeof(*hasher));
    if (!hasher)
        return -ENOMEM;
    hasher->scheme = scheme;
    r = hasher_setup(hasher, options);
    if (r < 0) {
        kvd_hasher_free(hasher);
        return r;
    }
    *ret_hasher = hasher;
    return 0;
}

void kvd_hasher_free(struct kvd_hasher *hasher)
{
    if (!hasher)
        return;
    EVP_MD_CTX_free(hasher->md_ctx);
    EVP_MD_free(hasher->md);
    free(hasher->scratch);
    free(hasher->lora.chars);
    free(hasher->salt.chars);
    free(hasher->mm);
    free(hasher->mm_text);
    free(hasher->tokens);
    free(hasher->keys);
    free(hasher);
}

/* ---- the sequence */

/* Makes room for `need` elements in the array whose pointer is at `array`: at least half as much
 * again as before, so that appending one by one stays linear. */
static int grow(void *array, size_t *room, size_t need, size_t size)
{
    void *old, *grown;
    size_t want;

    if (need <= *room)
        return 0;
    want = *room + *room / 2;
    if (want < need)
        want = need;
    memcpy(&old, array, sizeof(old));
    grown = reallocarray(old, want, size);
    if (!grown)
        return -ENOMEM;
    memcpy(array, &grown, sizeof(grown));
    *room = want;
    /* cppcheck-suppress memleak ; `array` has it */
    return 0;
}

static int reserve(struct kvd_hasher *hasher, size_t n)
{
    size_t tokens;
    int r;

    /* also keeps every size and every count that is returned within a ssize_t */
    if (__builtin_add_overflow(hasher->token_count, n, &tokens) ||
        tokens > SSIZE_MAX / sizeof(*hasher->keys))
        return -ENOMEM;
    r = grow(&hasher->tokens, &hasher->token_room, tokens, sizeof(*hasher->tokens));
    if (r < 0)
        return r;
    return grow(&hasher->keys, &hasher->key_room, tokens / hasher->block_tokens,
                sizeof(*hasher->keys));
}

static void cut(struct kvd_hasher *hasher, size_t tokens)
{
    hasher->token_count = tokens;
    hasher->key_count = tokens / hasher->block_tokens;
    hasher->mm_done = 0;
}

ssize_t kvd_hasher_append(struct kvd_hasher *hasher, const uint32_t *tokens, size_t n)
{
    size_t before = hasher->token_count;
    int r;

    if (n && !tokens)
        return -EINVAL;
    r = reserve(hasher, n);
    if (r < 0)
        return r;
    if (n)
        memcpy(hasher->tokens + before, tokens, n * sizeof(*tokens));
    hasher->token_count += n;
    r = hash_full_blocks(hasher);
    if (r < 0) {
        cut(hasher, before);
        return r;
    }
    return (ssize_t)hasher->key_count;
}

int kvd_hasher_truncate(struct kvd_hasher *hasher, size_t tokens)
{
    if (tokens > hasher->token_count)
        return -EINVAL;
    cut(hasher, tokens);
    return 0;
}

const struct kvd_key *kvd_hasher_keys(const struct kvd_hasher *hasher, size_t *ret_n)
{
    if (ret_n)
        *ret_n = hasher->key_count;
    return hasher->keys;
}

size_t kvd_hasher_tokens(const struct kvd_hasher *hasher)
{
    return hasher->token_count;
}

size_t kvd_hasher_first_parent(const struct kvd_hasher *hasher, void *buf, size_t bytes)
{
    size_t n = bytes < hasher->first_parent_len ? bytes : hasher->first_parent_len;

    if (n)
        memcpy(buf, hasher->first_parent, n);
    return hasher->first_parent_len;
}

int kvd_hasher_vector(const struct kvd_hasher *hasher, struct kvd_key *ret_key)
{
    /* Only the scratch buffer and the digest context behind the pointers change. */
    struct kvd_hasher shared = *hasher;
    uint32_t *tokens = calloc(hasher->block_tokens, sizeof(*tokens));
    struct kvd_key key;
    int r;

    if (!tokens)
        return -ENOMEM;
    for (uint32_t i = 0; i < hasher->block_tokens; i++)
        tokens[i] = i + 1;
    r = hash_block(&shared,
                   &(struct block){.parent = hasher->first_parent,
                                   .parent_len = hasher->first_parent_len,
                                   .tokens = tokens,
                                   .plain = true},
                   &key);
    free(tokens);
    if (r < 0)
        return r;
    *ret_key = key;
    return 0;
}
