/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The smallest worker. A text is the prompt, and each of its bytes a token; the keys and values of
 * a block are made up, but what is reused from the cache and what is published is real.
 *
 *     cc example.c -o example $(pkg-config --cflags --libs kvd)
 *     ./example /dev/shm/kvd-example/kvd.sock "$(cat README.md)"
 *
 * Run it twice, then with more text, then with an edit in the middle. It wants a space "demo" as in
 * README.md: scheme vllm-sha256-cbor, seed vllm-none-hash, blocks of 16 tokens, a pool of one part.
 */
#include <kvd.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define TOKENS      16 /* of a block */
#define BLOCKS_MAX  512
#define BLOCK_BYTES 4096

/* Stands for the work of a model. */
static void compute(const uint32_t *tokens, void *block)
{
    memset(block, (int)tokens[0], BLOCK_BYTES);
}

/* Stands for attention. */
static void attend(const void *block)
{
    (void)block;
}

/* Holds the longest cached prefix; what of it is in a spill store is brought back first. Returns its
 * length. */
static size_t hold(struct kvd_pool *pool, struct kvd_pinset *pins, const struct kvd_key *keys,
                   size_t n)
{
    int32_t status[BLOCKS_MAX];
    ssize_t there = kvd_lookup(pool, keys, n, NULL), more;
    ssize_t held = there > 0 ? kvd_pin(pins, pool, keys, (size_t)there, 0) : 0;
    struct kvd_fetch rest = {.chain = 1};

    if (held >= 0 && held < there) { /* the next one is not in ram, or not any more */
        rest.keys = keys + held;
        rest.n = (size_t)(there - held);
        more = kvd_fetch(pool, &rest, status) > 0 ? kvd_pin(pins, pool, rest.keys, rest.n, 0) : 0;
        held += more > 0 ? more : 0;
    }
    return held > 0 ? (size_t)held : 0; /* perhaps fewer than were there */
}

/* Prefills n blocks. Returns how many came from the cache; *ret_stored: how many went into it. */
static size_t prefill(struct kvd_pool *pool, struct kvd_pinset *pins, const uint32_t *tokens,
                      const struct kvd_key *keys, size_t n, ssize_t *ret_stored)
{
    struct kvd_reservation slot[BLOCKS_MAX] = {0};
    struct kvd_commit commit[BLOCKS_MAX];
    char own[BLOCK_BYTES];
    size_t hit = hold(pool, pins, keys, n), made = 0; /* lookup, pin, fetch what is stored */
    struct kvd_reserve rest = {
        .keys = keys + hit, .n = n - hit, .parent = hit ? &keys[hit - 1] : NULL, .chain = 1};

    for (size_t i = 0; i < hit; i++)
        attend(kvd_pinset_data(pins, i, 0)); /* in place; it cannot change or vanish while pinned */
    kvd_reserve(pool, &rest, slot); /* should this fail, nothing is KVD_NEW and nothing is stored */
    for (size_t i = 0; i < rest.n; i++) {
        bool ours = slot[i].status == KVD_NEW; /* else another worker has it, or there is no room */

        compute(tokens + (hit + i) * TOKENS, ours ? kvd_slot_rw(pool, slot[i].slot, 0) : own);
        if (ours)
            commit[made++] = (struct kvd_commit){.ticket = slot[i].ticket, .bytes = BLOCK_BYTES};
    }
    *ret_stored = kvd_commit(pool, commit, made); /* from here on, everybody finds them */
    return hit;
}

static int fail(const struct kvd *kvd)
{
    fprintf(stderr, "example: %s\n", kvd_last_error(kvd));
    return 1;
}

static int run(struct kvd *kvd, struct kvd_hasher *hasher, const uint32_t *tokens)
{
    struct kvd_space_options options;
    struct kvd_space *space;
    struct kvd_pool *pool;
    struct kvd_pinset *pins;
    size_t n, hit;
    const struct kvd_key *keys = kvd_hasher_keys(hasher, &n);
    ssize_t stored;

    kvd_space_options_init(&options, sizeof(options));
    options.scheme = "vllm-sha256-cbor";
    options.write = 1;
    if (kvd_space_open(kvd, "demo", &options, &space) < 0 || kvd_pool_get(space, NULL, &pool) < 0 ||
        kvd_pinset_new(kvd, n, &pins) < 0)
        return fail(kvd);
    hit = prefill(pool, pins, tokens, keys, n, &stored);
    printf("%zu blocks: %zu from the cache, %zd published\n", n, hit, stored);
    kvd_pinset_free(pins); /* releases them */
    kvd_space_close(space);
    return stored < 0 ? fail(kvd) : 0;
}

int main(int argc, char **argv)
{
    struct kvd_options options;
    struct kvd_hasher_options how;
    struct kvd_hasher *hasher;
    struct kvd *kvd;
    uint32_t tokens[BLOCKS_MAX * TOKENS];
    size_t n;
    int status;

    if (argc != 3) {
        fprintf(stderr, "usage: example SOCKET TEXT\n");
        return 2;
    }
    for (n = 0; n < BLOCKS_MAX * TOKENS && argv[2][n]; n++)
        tokens[n] = (unsigned char)argv[2][n];
    kvd_hasher_options_init(&how, sizeof(how));
    how.scheme = "vllm-sha256-cbor";
    kvd_options_init(&options, sizeof(options));
    options.socket = argv[1];
    if (kvd_hasher_new(&how, &hasher) < 0 || kvd_hasher_append(hasher, tokens, n) < 0)
        return 1;
    if (kvd_connect(&options, &kvd) < 0)
        return fail(NULL);
    status = run(kvd, hasher, tokens);
    kvd_close(kvd);
    kvd_hasher_free(hasher);
    return status;
}
