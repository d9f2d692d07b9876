/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "internal.h"

static void norm_rows(struct seq *seq, const float *weight, size_t n)
{
    size_t hidden = seq->model->config.hidden;

    for (size_t t = 0; t < n; t++)
        rms_norm(seq->scratch.h + t * hidden, seq->scratch.x + t * hidden, weight, hidden);
}

static void add_rows(struct seq *seq, size_t n)
{
    for (size_t i = 0; i < n * seq->model->config.hidden; i++)
        seq->scratch.x[i] += seq->scratch.h[i];
}

/* SwiGLU: down(SiLU(gate) * up). */
static void mlp_forward(struct seq *seq, const struct layer *layer, size_t n)
{
    const struct model_config *c = &seq->model->config;
    struct scratch *s = &seq->scratch;
    size_t ff = c->ff;

    matmul(s->wide, 2 * ff, s->h, c->hidden, n, &layer->gate_up);
    for (size_t t = 0; t < n; t++) {
        const float *gate = s->wide + t * 2 * ff, *up = gate + ff;

        for (size_t i = 0; i < ff; i++)
            s->inner[t * ff + i] = silu(gate[i]) * up[i];
    }
    matmul(s->h, c->hidden, s->inner, ff, n, &layer->down);
}

static void chunk_begin(struct seq *seq, const uint32_t *tokens, size_t n)
{
    const struct model_config *c = &seq->model->config;
    struct scratch *s = &seq->scratch;
    size_t half = c->rotary_dim / 2;

    for (size_t t = 0; t < n; t++) {
        memcpy(s->x + t * c->hidden, seq->model->embed + (size_t)tokens[t] * c->hidden,
               c->hidden * sizeof(float));
        rope_angles(c, seq->position + t, s->cos + t * half, s->sin + t * half);
    }
}

static void chunk_forward(struct seq *seq, const uint32_t *tokens, size_t n)
{
    const struct model *m = seq->model;

    chunk_begin(seq, tokens, n);
    for (size_t i = 0; i < m->config.layers; i++) {
        const struct layer *layer = &m->layers[i];

        norm_rows(seq, layer->norm_mix, n);
        if (layer->full)
            attention_forward(seq, layer, n);
        else
            deltanet_forward(seq, layer, n);
        add_rows(seq, n);
        norm_rows(seq, layer->norm_mlp, n);
        mlp_forward(seq, layer, n);
        add_rows(seq, n);
    }
    seq->position += n;
}

/* Of row t of the chunk just read. */
static void take_logits(struct seq *seq, size_t t, float *ret_logits)
{
    const struct model *m = seq->model;
    struct scratch *s = &seq->scratch;

    rms_norm(s->h, s->x + t * m->config.hidden, m->final_norm, m->config.hidden);
    matmul(ret_logits, m->config.vocab, s->h, m->config.hidden, 1, &m->head);
}

static int check_tokens(const struct model *model, const struct seq *seq, const uint32_t *tokens,
                        size_t n)
{
    if (seq->model != model || !tokens || n == 0)
        return -EINVAL;
    if (n > seq->max_tokens - seq->position)
        return -ERANGE;
    for (size_t i = 0; i < n; i++)
        if (tokens[i] >= model->config.vocab)
            return -EINVAL;
    return 0;
}

int model_forward(const struct model *model, struct seq *seq, const uint32_t *tokens, size_t n,
                  float *ret_logits_last)
{
    size_t chunk = model->config.prefill_chunk, done = 0, now = 0;
    int r = check_tokens(model, seq, tokens, n);

    if (r == 0)
        r = seq_prepare(seq, n);
    if (r < 0)
        return r;
    for (; done < n; done += now) {
        now = n - done < chunk ? n - done : chunk;
        chunk_forward(seq, tokens + done, now);
    }
    if (ret_logits_last)
        take_logits(seq, now - 1, ret_logits_last);
    return 0;
}

uint32_t model_argmax(const struct model *model, const float *logits)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < model->config.vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}
