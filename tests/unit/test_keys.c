/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Key schemes: what golden values cannot show. The keys themselves are compared by tests/vectors.c.
 * Linked with --wrap for everything that may fail.
 */
#include "client/kvd.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>
#include <openssl/evp.h>
#include <openssl/sha.h>

/* ---- failures on demand */

/* The wrapped call with this number, counting down, fails; negative: none does. */
static int calls_until_failure = -1;

static bool fails_now(void)
{
    if (calls_until_failure < 0)
        return false;
    return calls_until_failure-- == 0;
}

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__real_reallocarray(void *old, size_t n, size_t size);
void *__wrap_reallocarray(void *old, size_t n, size_t size);
char *__real_strdup(const char *s);
char *__wrap_strdup(const char *s);
EVP_MD_CTX *__real_EVP_MD_CTX_new(void);
EVP_MD_CTX *__wrap_EVP_MD_CTX_new(void);
EVP_MD *__real_EVP_MD_fetch(OSSL_LIB_CTX *ctx, const char *algorithm, const char *properties);
EVP_MD *__wrap_EVP_MD_fetch(OSSL_LIB_CTX *ctx, const char *algorithm, const char *properties);
int __real_EVP_DigestUpdate(EVP_MD_CTX *ctx, const void *bytes, size_t n);
int __wrap_EVP_DigestUpdate(EVP_MD_CTX *ctx, const void *bytes, size_t n);

void *__wrap_malloc(size_t n)
{
    return fails_now() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails_now() ? NULL : __real_calloc(n, size);
}

void *__wrap_reallocarray(void *old, size_t n, size_t size)
{
    return fails_now() ? NULL : __real_reallocarray(old, n, size);
}

char *__wrap_strdup(const char *s)
{
    return fails_now() ? NULL : __real_strdup(s);
}

EVP_MD_CTX *__wrap_EVP_MD_CTX_new(void)
{
    return fails_now() ? NULL : __real_EVP_MD_CTX_new();
}

EVP_MD *__wrap_EVP_MD_fetch(OSSL_LIB_CTX *ctx, const char *algorithm, const char *properties)
{
    return fails_now() ? NULL : __real_EVP_MD_fetch(ctx, algorithm, properties);
}

int __wrap_EVP_DigestUpdate(EVP_MD_CTX *ctx, const void *bytes, size_t n)
{
    return fails_now() ? 0 : __real_EVP_DigestUpdate(ctx, bytes, n);
}

/* ---- helpers */

static const char *const schemes[] = {"vllm-sha256-cbor", "vllm-xxhash-cbor", "sglang"};
enum { SCHEMES = sizeof(schemes) / sizeof(schemes[0]) };

/* xorshift64*: the same sequence everywhere */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dull;
}

static void random_tokens(uint32_t *tokens, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t r = next_random(&seed);

        tokens[i] = (uint32_t)(r >> 32) >> (r % 32);
    }
}

static struct kvd_hasher_options options_of(const char *scheme)
{
    struct kvd_hasher_options options;

    kvd_hasher_options_init(&options, sizeof(options));
    options.scheme = scheme;
    if (strcmp(scheme, "vllm-xxhash-cbor") == 0)
        options.seed = "0";
    return options;
}

/* A request with everything that the scheme knows. */
static struct kvd_hasher_options full_options(const char *scheme)
{
    static const struct kvd_mm_item mm[] = {
        {"image one", 3, 5},
        {"image two", 8, 40},
        {"a clip", 70, 1},
        {"beyond all tokens", UINT64_MAX - 7, 7},
    };
    struct kvd_hasher_options options = options_of(scheme);

    options.block_tokens = 7;
    options.group = 3;
    options.cache_salt = "tenant";
    if (strcmp(scheme, "sglang") == 0) {
        options.extra_key = "extra";
        return options;
    }
    options.lora = "adapter";
    options.mm = mm;
    options.mm_count = sizeof(mm) / sizeof(mm[0]);
    return options;
}

static struct kvd_hasher *new_hasher(const struct kvd_hasher_options *options)
{
    struct kvd_hasher *hasher = NULL;

    cr_assert_eq(kvd_hasher_new(options, &hasher), 0);
    cr_assert_not_null(hasher);
    return hasher;
}

static void append(struct kvd_hasher *hasher, const uint32_t *tokens, size_t n)
{
    ssize_t keys = kvd_hasher_append(hasher, tokens, n);
    size_t count;

    kvd_hasher_keys(hasher, &count);
    cr_assert_eq(keys, (ssize_t)count);
}

static void assert_same_chain(const struct kvd_hasher *a, const struct kvd_hasher *b)
{
    size_t na, nb;
    const struct kvd_key *ka = kvd_hasher_keys(a, &na);
    const struct kvd_key *kb = kvd_hasher_keys(b, &nb);

    cr_assert_eq(na, nb);
    cr_assert_eq(kvd_hasher_tokens(a), kvd_hasher_tokens(b));
    if (na)
        cr_assert_arr_eq(ka, kb, na * sizeof(*ka));
}

/* The hasher's chain is that of a new one which is given the tokens at once. */
static void assert_from_scratch(const struct kvd_hasher *hasher,
                                const struct kvd_hasher_options *options, const uint32_t *tokens,
                                size_t n)
{
    struct kvd_hasher *fresh = new_hasher(options);

    append(fresh, tokens, n);
    assert_same_chain(hasher, fresh);
    kvd_hasher_free(fresh);
}

/* ---- sequences */

Test(keys, appending_in_any_pieces_gives_the_same_chain)
{
    enum { N = 200 };
    uint32_t tokens[N];

    random_tokens(tokens, N, 1);
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = full_options(schemes[s]);

        for (size_t piece = 1; piece <= 17; piece++) {
            struct kvd_hasher *hasher = new_hasher(&options);

            for (size_t i = 0; i < N; i += piece)
                append(hasher, tokens + i, piece < N - i ? piece : N - i);
            assert_from_scratch(hasher, &options, tokens, N);
            kvd_hasher_free(hasher);
        }
    }
}

Test(keys, truncating_anywhere_and_going_on_is_like_from_scratch)
{
    enum { N = 100 };
    uint32_t tokens[N], edited[N];

    random_tokens(tokens, N, 2);
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = full_options(schemes[s]);

        for (size_t cut = 0; cut <= N; cut++) {
            struct kvd_hasher *hasher = new_hasher(&options);

            append(hasher, tokens, N);
            cr_assert_eq(kvd_hasher_truncate(hasher, cut), 0);
            assert_from_scratch(hasher, &options, tokens, cut);
            memcpy(edited, tokens, sizeof(edited));
            random_tokens(edited + cut, N - cut, 3);
            append(hasher, edited + cut, N - cut);
            assert_from_scratch(hasher, &options, edited, N);
            kvd_hasher_free(hasher);
        }
    }
}

Test(keys, random_edits_match_a_fresh_hasher)
{
    enum { N = 400 };
    uint32_t tokens[N];
    uint64_t seed = 4;

    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = full_options(schemes[s]);
        struct kvd_hasher *hasher = new_hasher(&options);
        size_t n = 0;

        for (int step = 0; step < 300; step++) {
            size_t cut = next_random(&seed) % (n + 1);
            size_t more = next_random(&seed) % (N - cut);

            cr_assert_eq(kvd_hasher_truncate(hasher, cut), 0);
            random_tokens(tokens + cut, more, next_random(&seed) | 1);
            append(hasher, tokens + cut, more);
            n = cut + more;
            assert_from_scratch(hasher, &options, tokens, n);
        }
        kvd_hasher_free(hasher);
    }
}

Test(keys, keys_before_a_cut_stay_and_those_after_it_change)
{
    enum { N = 64, CUT = 37 };
    uint32_t tokens[N];
    struct kvd_key before[4];
    size_t n;

    random_tokens(tokens, N, 5);
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = options_of(schemes[s]);
        struct kvd_hasher *hasher = new_hasher(&options);
        const struct kvd_key *keys;

        append(hasher, tokens, N);
        memcpy(before, kvd_hasher_keys(hasher, &n), sizeof(before));
        cr_assert_eq(n, 4);
        cr_assert_eq(kvd_hasher_truncate(hasher, CUT), 0);
        append(hasher, &(uint32_t){tokens[CUT] + 1}, 1);
        append(hasher, tokens + CUT + 1, N - CUT - 1);
        keys = kvd_hasher_keys(hasher, &n);
        cr_assert_eq(n, 4);
        cr_assert_arr_eq(keys, before, 2 * sizeof(*keys));
        for (size_t i = 2; i < 4; i++)
            cr_assert_neq(memcmp(&keys[i], &before[i], sizeof(*keys)), 0);
        kvd_hasher_free(hasher);
    }
}

Test(keys, bad_arguments_change_nothing)
{
    uint32_t tokens[20] = {1, 2, 3};
    struct kvd_hasher_options options = options_of("sglang");
    struct kvd_hasher *hasher = new_hasher(&options);

    append(hasher, tokens, 20);
    cr_assert_eq(kvd_hasher_truncate(hasher, 21), -EINVAL);
    cr_assert_eq(kvd_hasher_append(hasher, NULL, 1), -EINVAL);
    cr_assert_eq(kvd_hasher_append(hasher, tokens, SIZE_MAX), -ENOMEM);
    cr_assert_eq(kvd_hasher_append(hasher, tokens, SIZE_MAX / 4), -ENOMEM);
    cr_assert_eq(kvd_hasher_append(hasher, NULL, 0), 1);
    assert_from_scratch(hasher, &options, tokens, 20);
    kvd_hasher_free(hasher);
    kvd_hasher_free(NULL);
}

/* ---- blocks of any size, by a second encoder */

static size_t plain_head(uint8_t *p, uint8_t major, uint32_t value)
{
    size_t n = value < 24 ? 0 : value < 256 ? 1 : value < 65536 ? 2 : 4;

    p[0] = (uint8_t)(major << 5 | (n == 0 ? value : n == 1 ? 24 : n == 2 ? 25 : 26));
    for (size_t i = 0; i < n; i++)
        p[1 + i] = (uint8_t)(value >> 8 * (n - 1 - i));
    return 1 + n;
}

static void plain_key(const uint8_t parent[32], const uint32_t *tokens, uint32_t n, uint8_t ret[32])
{
    uint8_t *buf = malloc(64 + (size_t)n * 5);
    size_t at = 0;

    buf[at++] = 0x83;
    at += plain_head(buf + at, 2, 32);
    memcpy(buf + at, parent, 32);
    at += 32;
    at += plain_head(buf + at, 4, n);
    for (uint32_t i = 0; i < n; i++)
        at += plain_head(buf + at, 0, tokens[i]);
    buf[at++] = 0xf6;
    SHA256(buf, at, ret);
    free(buf);
}

Test(keys, blocks_of_all_head_sizes)
{
    static const uint32_t sizes[] = {1, 2, 23, 24, 25, 255, 256, 257, 784, 65535, 65536};
    uint32_t *tokens = malloc(2 * 65536 * sizeof(*tokens));
    uint8_t hash[32];

    random_tokens(tokens, 2 * 65536, 6);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvd_hasher_options options = options_of("vllm-sha256-cbor");
        struct kvd_hasher *hasher;
        const struct kvd_key *keys;

        options.block_tokens = sizes[i];
        hasher = new_hasher(&options);
        append(hasher, tokens, 2 * (size_t)sizes[i]);
        keys = kvd_hasher_keys(hasher, NULL);
        cr_assert_eq(kvd_hasher_first_parent(hasher, hash, 32), 32);
        for (size_t k = 0; k < 2; k++) {
            plain_key(hash, tokens + k * sizes[i], sizes[i], hash);
            cr_assert_arr_eq(keys[k].hash, hash, 32, "%u tokens, block %zu", sizes[i], k);
        }
        kvd_hasher_free(hasher);
    }
    free(tokens);
}

Test(keys, every_token_boundary)
{
    static const uint32_t edges[] = {0,     23,    24,         255,        256,
                                     65535, 65536, 0x7fffffff, 0x80000000, UINT32_MAX};
    struct kvd_hasher_options options = options_of("vllm-sha256-cbor");
    uint8_t hash[32];

    options.block_tokens = 1;
    for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++) {
        struct kvd_hasher *hasher = new_hasher(&options);

        append(hasher, &edges[i], 1);
        kvd_hasher_first_parent(hasher, hash, 32);
        plain_key(hash, &edges[i], 1, hash);
        cr_assert_arr_eq(kvd_hasher_keys(hasher, NULL)->hash, hash, 32, "token %u", edges[i]);
        kvd_hasher_free(hasher);
    }
}

/* ---- what belongs to a request */

static void keys_with(const struct kvd_hasher_options *options, struct kvd_key ret[3])
{
    static const uint32_t tokens[48] = {7, 8, 9};
    struct kvd_hasher *hasher = new_hasher(options);

    append(hasher, tokens, 48);
    memcpy(ret, kvd_hasher_keys(hasher, NULL), 3 * sizeof(*ret));
    kvd_hasher_free(hasher);
}

static bool same_key(const struct kvd_key *a, const struct kvd_key *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

/* Is block 1 of the chain what it would be without extras, given block 0? */
static bool second_block_is_plain(const struct kvd_hasher_options *options)
{
    static const uint32_t tokens[48] = {7, 8, 9};
    struct kvd_hasher_options plain = options_of("vllm-sha256-cbor");
    struct kvd_key keys[3];
    struct kvd_hasher *hasher;
    bool same;

    keys_with(options, keys);
    plain.first_parent = keys[0].hash;
    plain.first_parent_len = 32;
    hasher = new_hasher(&plain);
    append(hasher, tokens + 16, 16);
    same = same_key(kvd_hasher_keys(hasher, NULL), &keys[1]);
    kvd_hasher_free(hasher);
    return same;
}

Test(keys, salt_marks_the_first_block_and_lora_every_block)
{
    struct kvd_hasher_options options = options_of("vllm-sha256-cbor");

    cr_assert(second_block_is_plain(&options));
    options.cache_salt = "salt";
    cr_assert(second_block_is_plain(&options));
    options.cache_salt = NULL;
    options.lora = "lora";
    cr_assert_not(second_block_is_plain(&options));
}

Test(keys, an_item_marks_the_blocks_that_it_touches)
{
    struct kvd_hasher_options options = options_of("vllm-sha256-cbor");
    struct kvd_mm_item item = {"item", 0, 16};

    options.mm = &item;
    options.mm_count = 1;
    cr_assert(second_block_is_plain(&options), "ends with block 0");
    item.length = 17;
    cr_assert_not(second_block_is_plain(&options), "reaches into block 1 by one token");
    item.offset = 31;
    item.length = 1;
    cr_assert_not(second_block_is_plain(&options), "last token of block 1");
    item.offset = 32;
    cr_assert(second_block_is_plain(&options), "begins with block 2");
    item.offset = 0;
    item.length = UINT64_MAX;
    cr_assert_not(second_block_is_plain(&options), "covers all");
}

Test(keys, an_empty_salt_is_none_for_vllm_and_one_for_sglang)
{
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = options_of(schemes[s]);
        bool sglang = strcmp(schemes[s], "sglang") == 0;
        struct kvd_key none[3], empty[3], salted[3];

        keys_with(&options, none);
        options.cache_salt = "";
        keys_with(&options, empty);
        options.cache_salt = "x";
        keys_with(&options, salted);
        cr_assert_eq(same_key(none, empty), !sglang);
        cr_assert_not(same_key(none, salted));
        cr_assert_not(same_key(empty, salted));
    }
}

Test(keys, options_are_copied)
{
    char lora[] = "adapter", salt[] = "salt", identifier[] = "image", seed[] = "seed";
    struct kvd_mm_item item = {identifier, 4, 20};
    struct kvd_hasher_options options = options_of("vllm-xxhash-cbor");
    uint32_t tokens[64] = {0};
    struct kvd_hasher *hasher, *expected;

    options.lora = lora;
    options.cache_salt = salt;
    options.seed = seed;
    options.mm = &item;
    options.mm_count = 1;
    hasher = new_hasher(&options);
    expected = new_hasher(&options);
    append(expected, tokens, 64);
    memset(lora, 'x', sizeof(lora) - 1);
    memset(salt, 'x', sizeof(salt) - 1);
    memset(seed, 'x', sizeof(seed) - 1);
    memset(identifier, 'x', sizeof(identifier) - 1);
    memset(&item, 0xff, sizeof(item));
    append(hasher, tokens, 64);
    assert_same_chain(hasher, expected);
    kvd_hasher_free(hasher);
    kvd_hasher_free(expected);
}

Test(keys, group_and_padding)
{
    uint32_t tokens[16] = {1};
    struct kvd_hasher_options options = options_of("vllm-xxhash-cbor");
    static const uint8_t zeros[16];
    struct kvd_hasher *hasher;
    const struct kvd_key *key;

    options.group = 0xdeadbeef;
    hasher = new_hasher(&options);
    append(hasher, tokens, 16);
    key = kvd_hasher_keys(hasher, NULL);
    cr_assert_eq(key->group, 0xdeadbeef);
    cr_assert_arr_eq(key->hash + 16, zeros, 16);
    cr_assert_arr_neq(key->hash, zeros, 16);
    kvd_hasher_free(hasher);
}

/* ---- what is negotiated */

Test(keys, the_vector_is_the_first_key_without_a_request)
{
    uint32_t tokens[7] = {1, 2, 3, 4, 5, 6, 7};

    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = options_of(schemes[s]);
        struct kvd_hasher_options full = full_options(schemes[s]);
        struct kvd_hasher *plain, *request, *expected;
        struct kvd_key key;

        options.block_tokens = full.block_tokens;
        options.group = full.group;
        plain = new_hasher(&options);
        append(plain, tokens, 7);
        request = new_hasher(&full);
        append(request, tokens, 5);
        cr_assert_eq(kvd_hasher_vector(request, &key), 0);
        cr_assert(same_key(&key, kvd_hasher_keys(plain, NULL)));
        append(request, tokens + 5, 2); /* and the request's own chain goes on undisturbed */
        expected = new_hasher(&full);
        append(expected, tokens, 7);
        assert_same_chain(request, expected);
        cr_assert_not(same_key(&key, kvd_hasher_keys(request, NULL)));
        kvd_hasher_free(plain);
        kvd_hasher_free(request);
        kvd_hasher_free(expected);
    }
}

Test(keys, first_parent_is_told_or_derived)
{
    uint8_t drawn[32], got[40];

    for (size_t i = 0; i < 32; i++)
        drawn[i] = (uint8_t)(200 + i);
    for (size_t s = 0; s < 2; s++) {
        for (size_t len = 16; len <= 32; len += 16) {
            struct kvd_hasher_options options = options_of(schemes[s]);
            struct kvd_hasher *hasher;

            options.seed = NULL;
            options.first_parent = drawn;
            options.first_parent_len = len;
            hasher = new_hasher(&options);
            cr_assert_eq(kvd_hasher_first_parent(hasher, got, sizeof(got)), len);
            cr_assert_arr_eq(got, drawn, len);
            memset(got, 0, sizeof(got));
            cr_assert_eq(kvd_hasher_first_parent(hasher, got, 5), len);
            cr_assert_arr_eq(got, drawn, 5);
            cr_assert_eq(got[5], 0);
            cr_assert_eq(kvd_hasher_first_parent(hasher, NULL, 0), len);
            kvd_hasher_free(hasher);
        }
    }
}

Test(keys, sglang_has_no_first_parent_even_with_a_salt)
{
    struct kvd_hasher_options options = full_options("sglang");
    struct kvd_hasher *hasher = new_hasher(&options);
    uint8_t got[32];

    cr_assert_eq(kvd_hasher_first_parent(hasher, got, sizeof(got)), 0);
    kvd_hasher_free(hasher);
}

/* ---- refusals */

#define REFUSED(expected, scheme_name, ...)                                                        \
    do {                                                                                           \
        struct kvd_hasher_options options = options_of(scheme_name);                               \
        struct kvd_hasher *hasher = (void *)&options;                                              \
        __VA_ARGS__;                                                                               \
        cr_assert_eq(kvd_hasher_new(&options, &hasher), (expected), "%s", #__VA_ARGS__);           \
        cr_assert_eq(hasher, (void *)&options, "%s: ret_hasher was touched", #__VA_ARGS__);        \
    } while (0)

Test(keys, options_that_do_not_fit_are_refused)
{
    static const struct kvd_mm_item item = {"a", 0, 1};
    static const struct kvd_mm_item disorder[] = {{"a", 5, 1}, {"b", 4, 1}};
    static const struct kvd_mm_item nameless = {NULL, 0, 1}, empty = {"a", 0, 0};
    static const struct kvd_mm_item endless = {"a", 2, UINT64_MAX - 1};
    static const uint8_t parent[33];
    struct kvd_hasher *untouched = NULL;

    cr_assert_eq(kvd_hasher_new(NULL, &untouched), -EINVAL);
    REFUSED(-ENOTSUP, "vllm-sha512", (void)0);
    REFUSED(-ENOTSUP, "", (void)0);
    REFUSED(-EINVAL, "sglang", options.scheme = NULL);
    REFUSED(-EINVAL, "sglang", options.size = 0);
    REFUSED(-EINVAL, "sglang", options.block_tokens = 0);
    REFUSED(-EINVAL, "sglang", options.block_tokens = 65537);
    REFUSED(-EINVAL, "sglang", options.seed = "0");
    REFUSED(-EINVAL, "sglang", options.lora = "a");
    REFUSED(-EINVAL, "sglang", options.first_parent = parent);
    REFUSED(-EINVAL, "sglang", options.mm = &item; options.mm_count = 1);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.extra_key = "a");
    REFUSED(-EINVAL, "vllm-xxhash-cbor", options.seed = NULL);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.mm_count = 1);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.mm = disorder; options.mm_count = 2);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.mm = &nameless; options.mm_count = 1);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.mm = &empty; options.mm_count = 1);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.mm = &endless; options.mm_count = 1);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.first_parent_len = 32);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.first_parent = parent);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.first_parent = parent;
            options.first_parent_len = 33);
    REFUSED(-EINVAL, "vllm-sha256-cbor", options.first_parent = parent;
            options.first_parent_len = 32; options.seed = "0");
}

/* ---- failures */

Test(keys, a_failure_while_making_one_leaves_nothing)
{
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = full_options(schemes[s]);
        int failures = 0;

        for (;;) {
            struct kvd_hasher *hasher = (void *)&options;
            int r;

            calls_until_failure = failures;
            r = kvd_hasher_new(&options, &hasher);
            if (r == 0) {
                calls_until_failure = -1;
                kvd_hasher_free(hasher);
                break;
            }
            cr_assert(r == -ENOMEM || r == -EIO);
            cr_assert_eq(hasher, (void *)&options);
            cr_assert_lt(calls_until_failure, 0, "failed without being made to");
            failures++;
        }
        cr_assert_gt(failures, 1);
    }
}

Test(keys, a_failing_append_changes_nothing)
{
    enum { BEFORE = 11, N = 200 };
    uint32_t tokens[N];

    random_tokens(tokens, N, 8);
    for (size_t s = 0; s < SCHEMES; s++) {
        struct kvd_hasher_options options = full_options(schemes[s]);
        int failures = 0;

        for (;;) {
            struct kvd_hasher *hasher = new_hasher(&options);
            ssize_t r;

            append(hasher, tokens, BEFORE);
            calls_until_failure = failures;
            r = kvd_hasher_append(hasher, tokens + BEFORE, N - BEFORE);
            calls_until_failure = -1;
            if (r < 0)
                assert_from_scratch(hasher, &options, tokens, BEFORE);
            if (r < 0)
                append(hasher, tokens + BEFORE, N - BEFORE);
            assert_from_scratch(hasher, &options, tokens, N);
            kvd_hasher_free(hasher);
            if (r >= 0)
                break;
            cr_assert(r == -ENOMEM || r == -EIO);
            failures++;
        }
        cr_assert_geq(failures, 2);
    }
}

Test(keys, a_failing_vector_leaves_the_result_alone)
{
    struct kvd_hasher_options options = options_of("vllm-sha256-cbor");
    struct kvd_hasher *hasher = new_hasher(&options);
    struct kvd_key key, before;

    memset(&key, 0x55, sizeof(key));
    before = key;
    for (int i = 0; i < 2; i++) {
        calls_until_failure = i;
        cr_assert_eq(kvd_hasher_vector(hasher, &key), i ? -EIO : -ENOMEM);
        cr_assert(same_key(&key, &before));
    }
    calls_until_failure = -1;
    cr_assert_eq(kvd_hasher_vector(hasher, &key), 0);
    cr_assert_not(same_key(&key, &before));
    kvd_hasher_free(hasher);
}
