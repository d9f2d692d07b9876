/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* NULL with *base NULL only counts; see scratch_new(). */
static float *take(float *base, size_t *used, size_t n)
{
    float *piece = base ? base + *used : NULL;

    *used += n;
    return piece;
}

static void scratch_shared(struct scratch *s, const struct model_config *c, float *base,
                           size_t *used)
{
    size_t t = c->prefill_chunk, q = (size_t)c->q_heads * c->head_dim;
    size_t v = (size_t)c->lin_v_heads * c->lin_v_dim;
    size_t in_full = 2 * q + 2 * (size_t)c->kv_heads * c->head_dim;
    size_t in_linear = config_channels(c) + v + 2 * c->lin_v_heads;

    s->x = take(base, used, t * c->hidden);
    s->h = take(base, used, t * c->hidden);
    s->wide = take(base, used, t * larger(2 * (size_t)c->ff, larger(in_full, in_linear)));
    s->inner = take(base, used, t * larger(c->ff, larger(q, v)));
    s->cos = take(base, used, t * c->rotary_dim / 2);
    s->sin = take(base, used, t * c->rotary_dim / 2);
}

static void scratch_layers(struct scratch *s, const struct model_config *c, float *base,
                           size_t *used)
{
    size_t t = c->prefill_chunk, q = (size_t)c->q_heads * c->head_dim;

    s->q = take(base, used, t * q);
    s->acc = take(base, used, t * q);
    s->max = take(base, used, t * c->q_heads);
    s->sum = take(base, used, t * c->q_heads);
    s->scores = take(base, used, t * (c->q_heads / c->kv_heads) * c->block_tokens);
    s->k_block = take(base, used, panels_floats(c->head_dim, c->block_tokens));
    s->v_block = take(base, used, panels_floats(c->block_tokens, c->head_dim));

    s->taps = take(base, used, (c->conv_kernel - 1 + t) * config_channels(c));
    s->channels = take(base, used, config_channels(c));
    s->delta = take(base, used, c->lin_v_dim);
}

/* Once to count, once to hand out. */
static int scratch_new(struct scratch *s, const struct model_config *c)
{
    size_t counted = 0, used = 0;
    float *memory;

    scratch_shared(s, c, NULL, &counted);
    scratch_layers(s, c, NULL, &counted);
    memory = calloc(counted, sizeof(float));
    if (!memory)
        return -ENOMEM;
    scratch_shared(s, c, memory, &used);
    scratch_layers(s, c, memory, &used);
    s->memory = memory;
    return 0;
}

int seq_new(const struct model *model, size_t max_tokens, struct seq **ret_seq)
{
    const struct model_config *c = &model->config;
    struct seq *s;

    if (max_tokens < 1 || max_tokens > MODEL_MAX_TOKENS)
        return -EINVAL;
    s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->model = model;
    s->max_tokens = max_tokens;
    s->n_blocks = (max_tokens + c->block_tokens - 1) / c->block_tokens;
    s->blocks = calloc(s->n_blocks, sizeof(*s->blocks));
    s->state = calloc(1, model_snapshot_bytes(c));
    if (!s->blocks || !s->state || scratch_new(&s->scratch, c) < 0) {
        seq_free(s);
        return -ENOMEM;
    }
    *ret_seq = s;
    return 0;
}

void seq_free(struct seq *seq)
{
    if (!seq)
        return;
    for (size_t i = 0; seq->blocks && i < seq->n_blocks; i++)
        free(seq->blocks[i].owned);
    free(seq->blocks);
    free(seq->state);
    free(seq->scratch.memory);
    free(seq);
}

size_t seq_position(const struct seq *seq)
{
    return seq->position;
}

static bool block_begun(const struct seq *seq, size_t index)
{
    return index * seq->model->config.block_tokens < seq->position;
}

/* All of it is behind the position: every byte is final. */
static bool block_computed(const struct seq *seq, size_t index)
{
    return (index + 1) * seq->model->config.block_tokens <= seq->position;
}

static bool block_attached(const struct block *b)
{
    return b->k && !b->k_out;
}

static bool part_valid(const void *part)
{
    return part && (uintptr_t)part % sizeof(uint16_t) == 0;
}

static void block_set(struct block *b, struct block to)
{
    free(b->owned);
    *b = to;
}

int seq_attach_block(struct seq *seq, size_t index, const void *k, const void *v)
{
    if (index >= seq->n_blocks || !part_valid(k) || !part_valid(v))
        return -EINVAL;
    if (block_begun(seq, index) && !block_computed(seq, index))
        return -EINVAL;
    block_set(&seq->blocks[index], (struct block){.k = k, .v = v});
    return 0;
}

int seq_provide_block(struct seq *seq, size_t index, void *k, void *v)
{
    if (index >= seq->n_blocks || !part_valid(k) || !part_valid(v) || block_begun(seq, index))
        return -EINVAL;
    block_set(&seq->blocks[index], (struct block){.k = k, .v = v, .k_out = k, .v_out = v});
    return 0;
}

int seq_block(const struct seq *seq, size_t index, const void **ret_k, const void **ret_v)
{
    if (index >= seq->n_blocks)
        return -EINVAL;
    if (!block_computed(seq, index) && !block_attached(&seq->blocks[index]))
        return -ENODATA;
    *ret_k = seq->blocks[index].k;
    *ret_v = seq->blocks[index].v;
    return 0;
}

int seq_load_snapshot(struct seq *seq, size_t position, const void *bytes)
{
    size_t block = seq->model->config.block_tokens, first = position / block;

    if (!bytes || position % block || position > seq->max_tokens)
        return -EINVAL;
    for (size_t i = 0; i < first; i++)
        if (!block_computed(seq, i) && !block_attached(&seq->blocks[i]))
            return -EINVAL;
    for (size_t i = first; i < seq->n_blocks; i++)
        if (block_attached(&seq->blocks[i]))
            return -EINVAL;
    memcpy(seq->state, bytes, model_snapshot_bytes(&seq->model->config));
    seq->position = position;
    return 0;
}

void seq_save_snapshot(const struct seq *seq, void *ret_bytes)
{
    memcpy(ret_bytes, seq->state, model_snapshot_bytes(&seq->model->config));
}

static int block_own(struct block *b, size_t part)
{
    char *memory = calloc(2, part);

    if (!memory)
        return -ENOMEM;
    *b = (struct block){.owned = memory};
    b->k = b->k_out = (uint16_t *)memory;
    b->v = b->v_out = (uint16_t *)(memory + part);
    return 0;
}

/* May leave some blocks with memory and fail: they are merely ready early. */
int seq_prepare(struct seq *seq, size_t n)
{
    size_t block = seq->model->config.block_tokens;
    size_t first = seq->position / block, last = (seq->position + n - 1) / block;
    int r = 0;

    for (size_t i = first; i <= last; i++)
        if (block_attached(&seq->blocks[i]))
            return -EINVAL;
    for (size_t i = first; i <= last && r == 0; i++)
        if (!seq->blocks[i].k)
            r = block_own(&seq->blocks[i], model_part_bytes(&seq->model->config));
    return r;
}
