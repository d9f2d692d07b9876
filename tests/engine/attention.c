/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "bf16.h"
#include "internal.h"

/*
 * Full attention with grouped queries and an output gate, over K and V in blocks.
 *
 * K and V are always read back from the bf16 block, also those of the current token, so it makes
 * no difference who wrote them. The softmax runs block by block from the oldest (the online form:
 * a running maximum, sums rescaled when it grows). Blocks lie on a grid of absolute positions, so
 * a token goes through the same steps whatever chunk it came in.
 */

/* Dimensions that every function here needs. */
struct heads {
    size_t q_heads, kv_heads, group, dim, block;
};

static struct heads heads_of(const struct model_config *c)
{
    return (struct heads){c->q_heads, c->kv_heads, c->q_heads / c->kv_heads, c->head_dim,
                          c->block_tokens};
}

/* In floats or bf16 values: where a token's head begins within a part. */
static size_t part_offset(const struct heads *h, size_t layer, size_t token, size_t head)
{
    return ((layer * h->block + token) * h->kv_heads + head) * h->dim;
}

/* The query of one head, with 1/sqrt(dim) folded in. */
static void put_query(float *out, const float *q, const struct layer *layer, const struct seq *seq,
                      size_t t)
{
    const struct model_config *c = &seq->model->config;
    size_t half = c->rotary_dim / 2;
    float scale = 1.0f / sqrtf((float)c->head_dim);

    rms_norm(out, q, layer->q_norm, c->head_dim);
    rope_rotate(out, c->rotary_dim, seq->scratch.cos + t * half, seq->scratch.sin + t * half);
    for (size_t i = 0; i < c->head_dim; i++)
        out[i] *= scale;
}

static void put_key(uint16_t *out, float *k, const struct layer *layer, const struct seq *seq,
                    size_t t)
{
    const struct model_config *c = &seq->model->config;
    size_t half = c->rotary_dim / 2;

    rms_norm(k, k, layer->k_norm, c->head_dim);
    rope_rotate(k, c->rotary_dim, seq->scratch.cos + t * half, seq->scratch.sin + t * half);
    for (size_t i = 0; i < c->head_dim; i++)
        out[i] = bf16_round(k[i]);
}

/* row: q, gate, k, v of token t of the chunk. */
static void put_token(struct seq *seq, const struct layer *layer, const struct heads *h, float *row,
                      size_t t)
{
    size_t position = seq->position + t;
    const struct block *b = &seq->blocks[position / h->block];
    float *k = row + 2 * h->q_heads * h->dim, *v = k + h->kv_heads * h->dim;

    for (size_t i = 0; i < h->q_heads; i++) {
        size_t kv = i / h->group, member = i % h->group;
        size_t slot = (kv * seq->model->config.prefill_chunk + t) * h->group + member;

        put_query(seq->scratch.q + slot * h->dim, row + i * h->dim, layer, seq, t);
    }
    for (size_t i = 0; i < h->kv_heads; i++) {
        size_t at = part_offset(h, layer->index, position % h->block, i);

        put_key(b->k_out + at, k + i * h->dim, layer, seq, t);
        for (size_t d = 0; d < h->dim; d++)
            b->v_out[at + d] = bf16_round(v[i * h->dim + d]);
    }
}

/* One head of one block to fp32, as two matrices: K is dim x tokens, V is tokens x dim. What is
 * left of another block behind `tokens` gives scores that nobody looks at. */
static void widen_block(struct seq *seq, const struct layer *layer, const struct heads *h,
                        size_t index, size_t head, size_t tokens)
{
    const struct block *b = &seq->blocks[index];

    for (size_t t = 0; t < tokens; t++) {
        size_t at = part_offset(h, layer->index, t, head);
        float *k = seq->scratch.k_block + t / PANEL * h->dim * PANEL + t % PANEL;
        float *v = seq->scratch.v_block + t * PANEL;

        for (size_t d = 0; d < h->dim; d++)
            k[d * PANEL] = bf16_widen(b->k[at + d]);
        for (size_t d = 0; d < h->dim; d++)
            v[d / PANEL * h->block * PANEL + d % PANEL] = bf16_widen(b->v[at + d]);
    }
}

/* Turns n scores of one query into weights relative to the new maximum, rescales what was summed
 * relative to the old one. */
static void softmax_step(float *scores, size_t n, float *max, float *sum, float *acc, size_t dim)
{
    float top = *max;

    for (size_t j = 0; j < n; j++)
        top = scores[j] > top ? scores[j] : top;
    float shrink = expf(*max - top); /* 0 the first time: the maximum was -inf */
    float total = *sum * shrink;

    for (size_t j = 0; j < n; j++) {
        scores[j] = expf(scores[j] - top);
        total += scores[j];
    }
    for (size_t d = 0; d < dim; d++)
        acc[d] *= shrink;
    *max = top;
    *sum = total;
}

/* Tokens of the chunk whose queries meet a block: from `first` on, and from `full` on they see all
 * of it. Those between are inside it. */
struct meeting {
    size_t start; /* position of the block's first token */
    size_t first, full;
};

static struct meeting meet(const struct seq *seq, const struct heads *h, size_t index, size_t n)
{
    size_t start = index * h->block, last = start + h->block - 1;
    size_t first = start > seq->position ? start - seq->position : 0;
    size_t full = last > seq->position ? last - seq->position : 0;

    return (struct meeting){start, first, full < n ? full : n};
}

/* The softmax of the token's queries over the block's first `seen` tokens. A token inside the block
 * sums V at once, over just these: a zero weight for the rest would not do, as -0 + 0 is not -0. */
static void attend_token(struct seq *seq, const struct heads *h, size_t row, float *weights,
                         size_t seen, const struct matrix *v)
{
    struct scratch *s = &seq->scratch;

    for (size_t g = 0; g < h->group; g++, row++, weights += h->block) {
        float *acc = s->acc + row * h->dim;

        softmax_step(weights, seen, &s->max[row], &s->sum[row], acc, h->dim);
        if (seen < h->block)
            matmul_add(acc, h->dim, weights, h->block, 1, v, seen);
    }
}

static void attend_block(struct seq *seq, const struct layer *layer, const struct heads *h,
                         size_t index, size_t head, size_t n)
{
    struct scratch *s = &seq->scratch;
    const struct meeting m = meet(seq, h, index, n);
    const struct matrix k = {h->dim, h->block, s->k_block}, v = {h->block, h->dim, s->v_block};
    size_t base = head * seq->model->config.prefill_chunk;
    size_t present = seq->position + n - m.start;

    widen_block(seq, layer, h, index, head, present < h->block ? present : h->block);
    matmul(s->scores, h->block, s->q + (base + m.first) * h->group * h->dim, h->dim,
           (n - m.first) * h->group, &k);
    for (size_t t = m.first; t < n; t++) {
        size_t seen = t < m.full ? seq->position + t + 1 - m.start : h->block;

        attend_token(seq, h, (base + t) * h->group, s->scores + (t - m.first) * h->group * h->block,
                     seen, &v);
    }
    matmul_add(s->acc + (base + m.full) * h->group * h->dim, h->dim,
               s->scores + (m.full - m.first) * h->group * h->block, h->block,
               (n - m.full) * h->group, &v, h->block);
}

static void attend_head(struct seq *seq, const struct layer *layer, const struct heads *h,
                        size_t head, size_t n)
{
    struct scratch *s = &seq->scratch;
    size_t row = head * seq->model->config.prefill_chunk * h->group, rows = n * h->group;
    size_t last = (seq->position + n - 1) / h->block;

    memset(s->acc + row * h->dim, 0, rows * h->dim * sizeof(float));
    for (size_t i = row; i < row + rows; i++) {
        s->max[i] = -INFINITY;
        s->sum[i] = 0.0f;
    }
    for (size_t i = 0; i <= last; i++)
        attend_block(seq, layer, h, i, head, n);
}

/* Divides by the softmax's sum and gates: row of token t as in put_token(). */
static void take_token(struct seq *seq, const struct heads *h, float *out, const float *row,
                       size_t t)
{
    const float *gate = row + h->q_heads * h->dim;

    for (size_t i = 0; i < h->q_heads; i++) {
        size_t kv = i / h->group, member = i % h->group;
        size_t slot = (kv * seq->model->config.prefill_chunk + t) * h->group + member;
        const float *acc = seq->scratch.acc + slot * h->dim;

        for (size_t d = 0; d < h->dim; d++)
            out[i * h->dim + d] = acc[d] / seq->scratch.sum[slot] * sigmoid(gate[i * h->dim + d]);
    }
}

void attention_forward(struct seq *seq, const struct layer *layer, size_t n)
{
    const struct model_config *c = &seq->model->config;
    const struct heads h = heads_of(c);
    struct scratch *s = &seq->scratch;
    size_t width = layer->in.n_out, q = h.q_heads * h.dim;

    matmul(s->wide, width, s->h, c->hidden, n, &layer->in);
    for (size_t t = 0; t < n; t++)
        put_token(seq, layer, &h, s->wide + t * width, t);
    for (size_t i = 0; i < h.kv_heads; i++)
        attend_head(seq, layer, &h, i, n);
    for (size_t t = 0; t < n; t++)
        take_token(seq, &h, s->inner + t * q, s->wide + t * width, t);
    matmul(s->h, c->hidden, s->inner, q, n, &layer->out);
}
