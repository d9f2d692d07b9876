/* SPDX-License-Identifier: Apache-2.0 */
/* The promise: how a sequence was read and where its blocks came from changes no bit. */
#include <criterion/criterion.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "model.h"

enum { PROMPT = 300, DECODE = 24, TOTAL = PROMPT + DECODE };

/*
 * Stand in for calloc() and free() in the model and in these files (linked with --wrap): when
 * armed, call number `allocations_left` (from 0) fails, once. The model allocates with nothing
 * else.
 */
void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void __real_free(void *memory);
void __wrap_free(void *memory);

static size_t allocations_left = SIZE_MAX;
static size_t allocations_live;

void *__wrap_calloc(size_t n, size_t size)
{
    void *memory = NULL;

    if (allocations_left == SIZE_MAX || allocations_left-- > 0)
        memory = __real_calloc(n, size);
    allocations_live += memory != NULL;
    return memory;
}

void __wrap_free(void *memory)
{
    allocations_live -= memory != NULL;
    __real_free(memory);
}

/* Ends a test. (A failed assertion in a suite's .fini would not count.) */
static void assert_nothing_leaked(void)
{
    cr_assert_eq(allocations_live, 0, "%zu allocations leaked", allocations_live);
}

/* Something like text: letters with structure, and the special tokens now and then. */
static void make_prompt(uint32_t *ret_tokens, size_t n, uint32_t seed)
{
    uint32_t state = seed;

    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        ret_tokens[i] = i % 6 == 5 ? ' ' : 'a' + (state >> 24) % 26;
        if (i % 97 == 0)
            ret_tokens[i] = MODEL_TOKEN_BEGIN + i / 97 % (MODEL_TOKEN_COUNT - MODEL_TOKEN_BEGIN);
    }
}

static struct model *make_model(const struct model_config *config)
{
    struct model *m = NULL;

    cr_assert_eq(model_new(config, &m), 0);
    return m;
}

static struct model *default_model(void)
{
    struct model_config c;

    model_config_default(&c);
    return make_model(&c);
}

static struct seq *make_seq(const struct model *m, size_t max_tokens)
{
    struct seq *s = NULL;

    cr_assert_eq(seq_new(m, max_tokens, &s), 0);
    return s;
}

/* A prompt, what the model said to it, and all logits on the way. */
struct output {
    uint32_t prompt[PROMPT];
    uint32_t said[DECODE];
    float logits[DECODE + 1][MODEL_TOKEN_COUNT];
};

/* Greedy decoding from logits[0] on. */
static void decode(const struct model *m, struct seq *s, struct output *o)
{
    for (size_t i = 0; i < DECODE; i++) {
        o->said[i] = model_argmax(m, o->logits[i]);
        cr_assert_eq(model_forward(m, s, &o->said[i], 1, o->logits[i + 1]), 0);
    }
}

static void assert_same(const struct output *a, const struct output *b, const char *what, size_t n)
{
    cr_assert_arr_eq(a->said, b->said, sizeof(a->said), "tokens: %s %zu", what, n);
    cr_assert_arr_eq(a->logits, b->logits, sizeof(a->logits), "logits: %s %zu", what, n);
}

/* Without any cache, the whole prompt in one call. */
static struct output *uncached(const struct model *m, uint32_t seed)
{
    struct output *o = calloc(1, sizeof(*o));
    struct seq *s = make_seq(m, TOTAL);

    make_prompt(o->prompt, PROMPT, seed);
    cr_assert_eq(model_forward(m, s, o->prompt, PROMPT, o->logits[0]), 0);
    decode(m, s, o);
    seq_free(s);
    return o;
}

static void forward_in_steps(const struct model *m, struct seq *s, const uint32_t *tokens, size_t n,
                             size_t step, float *ret_logits)
{
    for (size_t i = 0; i < n; i += step)
        cr_assert_eq(model_forward(m, s, tokens + i, n - i < step ? n - i : step, ret_logits), 0);
}

Test(model, chunks_change_no_bit)
{
    static const uint32_t chunks[] = {1, 7, 16, 64, 256};
    static const size_t calls[] = {1, 13, 16, 64, PROMPT};
    struct model *m = default_model();
    struct output *want = uncached(m, 1), *got = calloc(1, sizeof(*got));

    for (size_t i = 0; i < 5; i++) {
        struct model_config c = *model_config_of(m);

        c.prefill_chunk = chunks[i];
        struct model *other = make_model(&c);
        struct seq *s = make_seq(other, TOTAL);

        forward_in_steps(other, s, want->prompt, PROMPT, calls[4 - i], got->logits[0]);
        decode(other, s, got);
        assert_same(want, got, "chunk", chunks[i]);
        seq_free(s);
        model_free(other);
    }
    free(got);
    free(want);
    model_free(m);
    assert_nothing_leaked();
}

/* Blocks and snapshots of one prompt, in memory that cannot be written. */
struct cache {
    size_t block_tokens, block_bytes, snapshot_bytes, n_blocks;
    char *memory; /* n_blocks blocks, then the snapshot that follows each */
    size_t bytes;
};

static char *cache_block(const struct cache *c, size_t i)
{
    return c->memory + i * c->block_bytes;
}

static char *cache_snapshot(const struct cache *c, size_t blocks)
{
    return c->memory + c->n_blocks * c->block_bytes + (blocks - 1) * c->snapshot_bytes;
}

static void cache_protect(const struct cache *c, int how)
{
    cr_assert_eq(mprotect(c->memory, c->bytes, how), 0);
}

static struct cache cache_map(const struct model_config *g, size_t tokens)
{
    struct cache c = {g->block_tokens,
                      model_block_bytes(g),
                      model_snapshot_bytes(g),
                      tokens / g->block_tokens,
                      NULL,
                      0};

    c.bytes = c.n_blocks * (c.block_bytes + c.snapshot_bytes);
    c.memory = mmap(NULL, c.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(c.memory, MAP_FAILED);
    return c;
}

/* A sequence that computes straight into the cache, block by block. */
static struct cache cache_fill(const struct model *m, const uint32_t *tokens, size_t n)
{
    const struct model_config *g = model_config_of(m);
    struct cache c = cache_map(g, n);
    struct seq *s = make_seq(m, n);

    for (size_t i = 0; i < c.n_blocks; i++) {
        char *k = cache_block(&c, i), *v = k + model_part_bytes(g);

        cr_assert_eq(seq_provide_block(s, i, k, v), 0);
        cr_assert_eq(model_forward(m, s, tokens + i * c.block_tokens, c.block_tokens, NULL), 0);
        seq_save_snapshot(s, cache_snapshot(&c, i + 1));
    }
    seq_free(s);
    cache_protect(&c, PROT_READ);
    return c;
}

static void cache_unmap(struct cache *c)
{
    munmap(c->memory, c->bytes);
}

static struct seq *resume(const struct model *m, const struct cache *c, size_t blocks)
{
    struct seq *s = make_seq(m, TOTAL);

    for (size_t i = 0; i < blocks; i++) {
        const char *k = cache_block(c, i);

        cr_assert_eq(seq_attach_block(s, i, k, k + c->block_bytes / 2), 0);
    }
    cr_assert_eq(seq_load_snapshot(s, blocks * c->block_tokens, cache_snapshot(c, blocks)), 0);
    cr_assert_eq(seq_position(s), blocks * c->block_tokens);
    return s;
}

static void finish(const struct model *m, struct seq *s, struct output *o)
{
    size_t at = seq_position(s);

    cr_assert_eq(model_forward(m, s, o->prompt + at, PROMPT - at, o->logits[0]), 0);
    decode(m, s, o);
    seq_free(s);
}

static void check_resumes(const struct model *m, uint32_t seed)
{
    struct output *want = uncached(m, seed), *got = calloc(1, sizeof(*got));
    struct cache c = cache_fill(m, want->prompt, PROMPT);
    size_t last = (PROMPT - 1) / c.block_tokens;
    const size_t resumes[] = {1, 2, last / 2, last - 1, last};

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    for (size_t i = 0; i < 5; i++) {
        finish(m, resume(m, &c, resumes[i]), got);
        assert_same(want, got, "resumed after block", resumes[i]);
        memset(got->logits, 0, sizeof(got->logits));
    }
    cache_unmap(&c);
    free(got);
    free(want);
}

Test(model, resuming_changes_no_bit)
{
    struct model *m = default_model();

    check_resumes(m, 1);
    model_free(m);
    assert_nothing_leaked();
}

Test(model, resuming_changes_no_bit_in_odd_geometries)
{
    struct model_config c;

    model_config_default(&c);
    c.hidden = 52;
    c.ff = 70;
    c.layers = 7;
    c.full_every = 3;
    c.q_heads = 6;
    c.kv_heads = 3;
    c.head_dim = 18;
    c.rotary_dim = 10;
    c.lin_k_heads = 1;
    c.lin_v_heads = 3;
    c.lin_k_dim = 9;
    c.lin_v_dim = 21;
    c.conv_kernel = 2;
    c.block_tokens = 23;
    c.prefill_chunk = 31;
    struct model *m = make_model(&c);

    check_resumes(m, 3);
    model_free(m);
    assert_nothing_leaked();
}

/* Two sequences share a prefix and part: the second continues from the first one's blocks and
 * leaves bytes that a third can use. */
Test(model, resumed_sequences_make_the_same_blocks)
{
    struct model *m = default_model();
    struct output *o = uncached(m, 4);
    struct cache c = cache_fill(m, o->prompt, PROMPT);
    struct seq *s = resume(m, &c, 5);
    char *snapshot = calloc(1, c.snapshot_bytes);
    const void *k, *v;

    for (size_t i = 5; i < c.n_blocks; i++) {
        cr_assert_eq(seq_block(s, i, &k, &v), -ENODATA);
        cr_assert_eq(model_forward(m, s, o->prompt + i * 16, 16, NULL), 0);
        cr_assert_eq(seq_block(s, i, &k, &v), 0);
        cr_assert_arr_eq(k, cache_block(&c, i), c.block_bytes / 2);
        cr_assert_arr_eq(v, cache_block(&c, i) + c.block_bytes / 2, c.block_bytes / 2);
        seq_save_snapshot(s, snapshot);
        cr_assert_arr_eq(snapshot, cache_snapshot(&c, i + 1), c.snapshot_bytes);
    }
    free(snapshot);
    seq_free(s);
    cache_unmap(&c);
    free(o);
    model_free(m);
    assert_nothing_leaked();
}

static void swap_blocks(const struct cache *c, size_t a, size_t b)
{
    for (size_t i = 0; i < c->block_bytes; i++) {
        char *x = cache_block(c, a) + i, *y = cache_block(c, b) + i, t = *x;

        *x = *y;
        *y = t;
    }
}

/* Puts one wrong thing into the cache (and takes it out again on the second call). */
static void damage(const struct cache *c, int kind)
{
    if (kind == 0)
        cache_block(c, 2)[101] ^= 0x40; /* K, an exponent bit */
    if (kind == 1)
        cache_block(c, 9)[c->block_bytes / 2 + 100] ^= 0x40; /* V, a mantissa bit */
    if (kind == 2)
        cache_block(c, 0)[c->block_bytes - 1] ^= 0x80; /* V's last sign */
    if (kind == 3)
        swap_blocks(c, 3, 4);
    if (kind == 4)
        cache_snapshot(c, 12)[3] ^= 0x80; /* the state's first sign */
    if (kind == 5)
        cache_snapshot(c, 13)[-1] ^= 0x80; /* the last sign of the last conv state */
}

/* Otherwise the tests above could not fail. */
Test(model, wrong_bytes_change_the_logits)
{
    enum { BLOCKS = 12, KINDS = 6 };
    struct model *m = default_model();
    struct output *want = uncached(m, 5), *got = calloc(1, sizeof(*got));
    struct cache c = cache_fill(m, want->prompt, PROMPT);

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    cache_protect(&c, PROT_READ | PROT_WRITE);
    for (int kind = 0; kind < KINDS; kind++) {
        damage(&c, kind);
        finish(m, resume(m, &c, BLOCKS), got);
        damage(&c, kind);
        cr_assert_neq(memcmp(want->logits, got->logits, sizeof(got->logits)), 0, "kind %d", kind);
        cr_assert_neq(memcmp(want->logits[0], got->logits[0], sizeof(got->logits[0])), 0,
                      "kind %d: no trace in the first logits", kind);
    }
    finish(m, resume(m, &c, BLOCKS), got);
    assert_same(want, got, "the damage is gone", 0);
    cache_unmap(&c);
    free(got);
    free(want);
    model_free(m);
    assert_nothing_leaked();
}

Test(model, a_snapshot_of_another_position_changes_the_logits)
{
    struct model *m = default_model();
    struct output *want = uncached(m, 6), *got = calloc(1, sizeof(*got));
    struct cache c = cache_fill(m, want->prompt, PROMPT);

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    for (size_t other = 1; other <= 16; other += 3) {
        struct seq *s = resume(m, &c, 12);

        cr_assert_eq(seq_load_snapshot(s, 12 * 16, cache_snapshot(&c, other)), 0);
        finish(m, s, got);
        cr_assert_neq(memcmp(want->logits[0], got->logits[0], sizeof(got->logits[0])), 0,
                      "snapshot of block %zu", other);
    }
    cache_unmap(&c);
    free(got);
    free(want);
    model_free(m);
    assert_nothing_leaked();
}

/* A model whose output ignores the prompt would pass every test of equality. */
Test(model, output_depends_on_the_first_token_and_varies)
{
    enum { LONG = 200 };
    struct model *m = default_model();
    struct output *a = uncached(m, 7);
    uint32_t said[LONG], distinct = 0, repeats = 0;
    float logits[MODEL_TOKEN_COUNT], edited[MODEL_TOKEN_COUNT];
    struct seq *s = make_seq(m, PROMPT + LONG);

    cr_assert_eq(model_forward(m, s, a->prompt, PROMPT, logits), 0);
    for (size_t i = 0; i < LONG; i++) {
        said[i] = model_argmax(m, logits);
        size_t j = 0;

        while (said[j] != said[i])
            j++;
        distinct += j == i;
        repeats += i > 0 && said[i] == said[i - 1];
        cr_assert_eq(model_forward(m, s, &said[i], 1, logits), 0);
    }
    cr_assert_geq(distinct, 50);
    cr_assert_leq(repeats, 20);
    seq_free(s);

    s = make_seq(m, PROMPT);
    a->prompt[0] = 'x';
    cr_assert_eq(model_forward(m, s, a->prompt, PROMPT, edited), 0);
    cr_assert_neq(memcmp(a->logits[0], edited, sizeof(edited)), 0);
    seq_free(s);
    free(a);
    model_free(m);
    assert_nothing_leaked();
}

/* A block that was published is read from where it was published to, and the sequence's own copy
 * goes away; the sequence does not notice. */
Test(seq, computed_blocks_can_move)
{
    struct model *m = default_model();
    struct output *want = uncached(m, 8), *got = calloc(1, sizeof(*got));
    struct cache c = cache_map(model_config_of(m), PROMPT);
    struct seq *s = make_seq(m, TOTAL);
    const void *k, *v;

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    cr_assert_eq(model_forward(m, s, got->prompt, 100, NULL), 0);
    for (size_t i = 0; i < 6; i++) {
        char *to = cache_block(&c, i);

        cr_assert_eq(seq_block(s, i, &k, &v), 0);
        memcpy(to, k, c.block_bytes / 2);
        memcpy(to + c.block_bytes / 2, v, c.block_bytes / 2);
        cr_assert_eq(seq_attach_block(s, i, to, to + c.block_bytes / 2), 0);
        cr_assert_eq(seq_block(s, i, &k, &v), 0);
        cr_assert_eq(k, to);
    }
    cr_assert_eq(seq_attach_block(s, 6, k, v), -EINVAL, "begun, not complete");
    cache_protect(&c, PROT_READ);
    finish(m, s, got);
    assert_same(want, got, "after moving blocks", 6);
    cache_unmap(&c);
    free(got);
    free(want);
    model_free(m);
    assert_nothing_leaked();
}

Test(seq, can_go_back)
{
    struct model *m = default_model();
    struct output *want = uncached(m, 9), *got = calloc(1, sizeof(*got));
    struct seq *s = make_seq(m, TOTAL);
    char *snapshot = calloc(1, model_snapshot_bytes(model_config_of(m)));
    uint32_t other[50];

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    make_prompt(other, 50, 77);
    cr_assert_eq(model_forward(m, s, got->prompt, 160, NULL), 0);
    seq_save_snapshot(s, snapshot);
    cr_assert_eq(model_forward(m, s, other, 50, NULL), 0);
    cr_assert_eq(seq_load_snapshot(s, 160, snapshot), 0);
    finish(m, s, got);
    assert_same(want, got, "after going back to", 160);
    free(snapshot);
    free(got);
    free(want);
    model_free(m);
    assert_nothing_leaked();
}

/* Nothing is read from a refused call: the output afterwards is that of a sequence never asked. */
Test(seq, refuses_what_it_cannot_do)
{
    struct model *m = default_model(), *other = default_model();
    struct output *want = uncached(m, 10), *got = calloc(1, sizeof(*got));
    struct cache c = cache_fill(m, want->prompt, PROMPT);
    char *k = cache_block(&c, 0), *v = k + c.block_bytes / 2;
    struct seq *s = NULL;
    uint32_t bad[2] = {'a', MODEL_TOKEN_COUNT}, *many = calloc(TOTAL + 1, sizeof(*many));
    const void *p = NULL, *q = NULL;

    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    cr_assert_eq(seq_new(m, 0, &s), -EINVAL);
    cr_assert_eq(seq_new(m, MODEL_MAX_TOKENS + 1ul, &s), -EINVAL);
    cr_assert_null(s);
    s = resume(m, &c, 4);
    cr_assert_eq(model_forward(other, s, got->prompt, 1, NULL), -EINVAL, "another model's");
    cr_assert_eq(model_forward(m, s, got->prompt, 0, NULL), -EINVAL);
    cr_assert_eq(model_forward(m, s, NULL, 1, NULL), -EINVAL);
    cr_assert_eq(model_forward(m, s, bad, 2, NULL), -EINVAL, "no such token");
    cr_assert_eq(model_forward(m, s, many, TOTAL - 64 + 1, NULL), -ERANGE);
    cr_assert_eq(model_forward(m, s, many, SIZE_MAX, NULL), -ERANGE);

    cr_assert_eq(seq_attach_block(s, 21, k, v), -EINVAL, "no such block");
    cr_assert_eq(seq_attach_block(s, 5, NULL, v), -EINVAL);
    cr_assert_eq(seq_attach_block(s, 5, k, v + 1), -EINVAL, "odd address");
    cr_assert_eq(seq_provide_block(s, 21, k, v), -EINVAL);
    cr_assert_eq(seq_provide_block(s, 3, k, v), -EINVAL, "already read");
    cr_assert_eq(seq_provide_block(s, 4, k, NULL), -EINVAL);
    cr_assert_eq(seq_block(s, 4, &p, &q), -ENODATA);
    cr_assert_eq(seq_block(s, 21, &p, &q), -EINVAL);
    cr_assert(!p && !q);

    cr_assert_eq(seq_load_snapshot(s, 63, cache_snapshot(&c, 4)), -EINVAL, "not a boundary");
    cr_assert_eq(seq_load_snapshot(s, 80, cache_snapshot(&c, 5)), -EINVAL, "block 4 is missing");
    cr_assert_eq(seq_load_snapshot(s, 48, cache_snapshot(&c, 3)), -EINVAL, "3 is attached");
    cr_assert_eq(seq_load_snapshot(s, 336, cache_snapshot(&c, 4)), -EINVAL, "beyond the end");
    cr_assert_eq(seq_load_snapshot(s, 64, NULL), -EINVAL);

    /* Block 5 is read-only: nothing may run into it, not even up to its edge. */
    cr_assert_eq(seq_attach_block(s, 5, k, v), 0);
    cr_assert_eq(model_forward(m, s, got->prompt + 64, 17, NULL), -EINVAL);
    cr_assert_eq(seq_position(s), 64);
    char *mine = calloc(1, c.block_bytes);

    cr_assert_eq(seq_provide_block(s, 5, mine, mine + c.block_bytes / 2), 0);
    finish(m, s, got);
    assert_same(want, got, "after refused calls", 0);
    cr_assert_arr_eq(mine, cache_block(&c, 5), c.block_bytes);
    free(mine);
    free(many);
    cache_unmap(&c);
    free(got);
    free(want);
    model_free(other);
    model_free(m);
    assert_nothing_leaked();
}

Test(seq, ends_exactly_at_max_tokens)
{
    struct model *m = default_model();
    struct seq *s = make_seq(m, 20);
    uint32_t tokens[21];

    make_prompt(tokens, 21, 11);
    cr_assert_eq(model_forward(m, s, tokens, 21, NULL), -ERANGE);
    cr_assert_eq(seq_position(s), 0);
    cr_assert_eq(model_forward(m, s, tokens, 20, NULL), 0);
    cr_assert_eq(seq_position(s), 20);
    cr_assert_eq(model_forward(m, s, tokens, 1, NULL), -ERANGE);
    seq_free(s);
    model_free(m);
    assert_nothing_leaked();
}

/* Every allocation fails once; each time all is given back and the next try goes further. */
Test(model, survives_failing_allocations)
{
    struct model *m = NULL;
    struct seq *s = NULL;
    struct model_config c;
    struct output *want, *got;
    int r = -ENOMEM;

    model_config_default(&c);
    for (size_t n = 0; r == -ENOMEM; n++) {
        cr_assert(!m, "untouched on failure");
        allocations_left = n;
        r = model_new(&c, &m);
    }
    cr_assert_eq(r, 0);
    r = -ENOMEM;
    for (size_t n = 0; r == -ENOMEM; n++) {
        cr_assert(!s, "untouched on failure");
        allocations_left = n;
        r = seq_new(m, TOTAL, &s);
    }
    cr_assert_eq(r, 0);
    allocations_left = SIZE_MAX;
    want = uncached(m, 12);
    got = calloc(1, sizeof(*got));
    memcpy(got->prompt, want->prompt, sizeof(got->prompt));
    r = -ENOMEM;
    for (size_t tries = 0; r == -ENOMEM; tries++) {
        cr_assert_eq(seq_position(s), 0);
        cr_assert_lt(tries, 30);
        allocations_left = 1;
        r = model_forward(m, s, got->prompt, PROMPT, got->logits[0]);
    }
    allocations_left = SIZE_MAX;
    cr_assert_eq(r, 0);
    decode(m, s, got);
    assert_same(want, got, "after failing allocations", 0);
    free(got);
    free(want);
    seq_free(s);
    model_free(m);
    seq_free(NULL);
    model_free(NULL);
    assert_nothing_leaked();
}

Test(config, sizes_are_those_of_the_layout)
{
    struct model_config c;

    model_config_default(&c);
    cr_assert_eq(model_config_check(&c, NULL), 0);
    cr_assert_eq(model_part_bytes(&c), 2 * 16 * 2 * 32 * 2);
    cr_assert_eq(model_block_bytes(&c), 2 * model_part_bytes(&c));
    cr_assert_eq(model_snapshot_bytes(&c), 6 * (4 * 32 * 32 + 3 * (2 * 2 * 32 + 4 * 32)) * 4);
}

struct change {
    size_t field; /* offset of a uint32_t in struct model_config */
    uint32_t value;
};

#define CHANGE(name, value)                                                                        \
    {                                                                                              \
        offsetof(struct model_config, name), value                                                 \
    }

static void apply(struct model_config *ret_config, const struct change *change)
{
    model_config_default(ret_config);
    memcpy((char *)ret_config + change->field, &change->value, sizeof(change->value));
}

Test(config, refuses_impossible_geometries)
{
    static const struct change changes[] = {
        CHANGE(vocab, 1),
        CHANGE(vocab, UINT32_MAX),
        CHANGE(hidden, 0),
        CHANGE(hidden, 100000),
        CHANGE(ff, 0),
        CHANGE(layers, 0),
        CHANGE(layers, 3),
        CHANGE(layers, 257),
        CHANGE(full_every, 0),
        CHANGE(full_every, 1),
        CHANGE(full_every, 9),
        CHANGE(q_heads, 0),
        CHANGE(q_heads, 5),
        CHANGE(kv_heads, 0),
        CHANGE(kv_heads, 3),
        CHANGE(head_dim, 0),
        CHANGE(head_dim, 15),
        CHANGE(rotary_dim, 0),
        CHANGE(rotary_dim, 15),
        CHANGE(rotary_dim, 34),
        CHANGE(lin_k_heads, 0),
        CHANGE(lin_k_heads, 3),
        CHANGE(lin_v_heads, 0),
        CHANGE(lin_v_heads, 3),
        CHANGE(lin_k_dim, 0),
        CHANGE(lin_v_dim, 0),
        CHANGE(conv_kernel, 1),
        CHANGE(conv_kernel, 17),
        CHANGE(block_tokens, 0),
        CHANGE(block_tokens, 4097),
        CHANGE(prefill_chunk, 0),
        CHANGE(prefill_chunk, UINT32_MAX),
    };
    struct model_config c;
    struct model *m = NULL;

    for (size_t i = 0; i < sizeof(changes) / sizeof(*changes); i++) {
        const char *why = NULL;

        apply(&c, &changes[i]);
        cr_assert_eq(model_config_check(&c, &why), -EINVAL, "change %zu", i);
        cr_assert(why && *why, "change %zu", i);
        cr_assert_eq(model_new(&c, &m), -EINVAL, "change %zu", i);
    }
    model_config_default(&c);
    c.rope_theta = (double)NAN;
    cr_assert_eq(model_config_check(&c, NULL), -EINVAL);
    cr_assert_eq(model_config_check(NULL, NULL), -EINVAL);
    cr_assert_null(m);
}

Test(config, digest_names_the_layout_and_only_that)
{
    static const struct change layout[] = {
        CHANGE(layers, 12),     CHANGE(full_every, 2),    CHANGE(kv_heads, 4),
        CHANGE(head_dim, 64),   CHANGE(rotary_dim, 8),    CHANGE(lin_k_heads, 4),
        CHANGE(lin_v_heads, 8), CHANGE(lin_k_dim, 16),    CHANGE(lin_v_dim, 64),
        CHANGE(conv_kernel, 3), CHANGE(block_tokens, 32),
    };
    enum { CHANGES = sizeof(layout) / sizeof(*layout) };
    static const struct change same[] = {CHANGE(prefill_chunk, 1), CHANGE(ff, 100),
                                         CHANGE(seed, 9)};
    struct model_config c;
    uint64_t digests[CHANGES + 2];

    model_config_default(&c);
    digests[CHANGES] = model_layout_digest(&c);
    c.rope_theta *= 2;
    digests[CHANGES + 1] = model_layout_digest(&c);
    for (size_t i = 0; i < CHANGES; i++) {
        apply(&c, &layout[i]);
        cr_assert_eq(model_config_check(&c, NULL), 0);
        digests[i] = model_layout_digest(&c);
    }
    for (size_t i = 0; i < CHANGES + 2; i++)
        for (size_t j = 0; j < i; j++)
            cr_assert_neq(digests[i], digests[j], "changes %zu and %zu", i, j);
    for (size_t i = 0; i < sizeof(same) / sizeof(*same); i++) {
        apply(&c, &same[i]);
        cr_assert_eq(model_layout_digest(&c), digests[CHANGES]);
    }
}
