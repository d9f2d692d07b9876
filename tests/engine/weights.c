/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "internal.h"

/*
 * The layout runs twice: with base NULL it only counts, then it hands out pieces of one allocation.
 * Filling follows in the same order, each tensor in logical order, so the weights of a seed do not
 * depend on how a matrix is packed.
 */
struct arena {
    float *base;
    size_t used;
};

static float *arena_take(struct arena *a, size_t n)
{
    float *piece = a->base ? a->base + a->used : NULL;

    a->used += n;
    return piece;
}

static struct matrix arena_matrix(struct arena *a, size_t n_in, size_t n_out)
{
    return (struct matrix){n_in, n_out, arena_take(a, panels_floats(n_in, n_out))};
}

static void lay_out_full(const struct model_config *c, struct layer *l, struct arena *a)
{
    size_t q = (size_t)c->q_heads * c->head_dim, kv = (size_t)c->kv_heads * c->head_dim;

    l->in = arena_matrix(a, c->hidden, 2 * q + 2 * kv);
    l->out = arena_matrix(a, q, c->hidden);
    l->q_norm = arena_take(a, c->head_dim);
    l->k_norm = arena_take(a, c->head_dim);
}

static void lay_out_linear(const struct model_config *c, struct layer *l, struct arena *a)
{
    size_t v = (size_t)c->lin_v_heads * c->lin_v_dim;

    l->in = arena_matrix(a, c->hidden, config_channels(c) + v + 2 * c->lin_v_heads);
    l->out = arena_matrix(a, v, c->hidden);
    l->conv = arena_take(a, c->conv_kernel * config_channels(c));
    l->a_log = arena_take(a, c->lin_v_heads);
    l->dt_bias = arena_take(a, c->lin_v_heads);
    l->out_norm = arena_take(a, c->lin_v_dim);
}

static void lay_out(struct model *m, struct arena *a)
{
    const struct model_config *c = &m->config;

    m->embed = arena_take(a, (size_t)c->vocab * c->hidden);
    for (size_t i = 0; i < c->layers; i++) {
        struct layer *l = &m->layers[i];
        size_t full_before = i / c->full_every;

        l->full = (i + 1) % c->full_every == 0;
        l->index = l->full ? full_before : i - full_before;
        l->norm_mix = arena_take(a, c->hidden);
        if (l->full)
            lay_out_full(c, l, a);
        else
            lay_out_linear(c, l, a);
        l->norm_mlp = arena_take(a, c->hidden);
        l->gate_up = arena_matrix(a, c->hidden, 2 * (size_t)c->ff);
        l->down = arena_matrix(a, c->ff, c->hidden);
    }
    m->final_norm = arena_take(a, c->hidden);
    m->head = arena_matrix(a, c->hidden, c->vocab);
}

/* splitmix64 (Steele, Lea, Flood 2014): a counter through a mixer, the same on every machine. */
static uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* In [low, high). 24 bits, so that the conversion is exact. */
static float random_between(uint64_t *state, float low, float high)
{
    return low + (high - low) * ((float)(random_next(state) >> 40) * 0x1p-24f);
}

static void fill(float *out, size_t n, uint64_t *state, float low, float high)
{
    for (size_t i = 0; i < n; i++)
        out[i] = random_between(state, low, high);
}

/* Inputs of variance 1 give outputs of variance gain * gain. */
static void fill_matrix(struct matrix *m, uint64_t *state, float gain)
{
    float limit = gain * sqrtf(3.0f / (float)m->n_in);

    for (size_t i = 0; i < m->n_in; i++)
        for (size_t j = 0; j < m->n_out; j++)
            m->panels[(j / PANEL * m->n_in + i) * PANEL + j % PANEL] =
                random_between(state, -limit, limit);
}

/* Norms of q and k that make attention sharp: near 1, all tokens would see the same average. */
#define QK_GAIN 1.6f

static void fill_full(const struct model_config *c, struct layer *l, uint64_t *state)
{
    fill_matrix(&l->in, state, 1.0f);
    fill_matrix(&l->out, state, 2.0f);
    fill(l->q_norm, c->head_dim, state, QK_GAIN - 0.2f, QK_GAIN + 0.2f);
    fill(l->k_norm, c->head_dim, state, QK_GAIN - 0.2f, QK_GAIN + 0.2f);
}

/* The decay per token is exp(-exp(a_log) * softplus(a + dt_bias)): with these ranges heads forget
 * over anything from one token to a few thousand. */
static void fill_linear(const struct model_config *c, struct layer *l, uint64_t *state)
{
    fill_matrix(&l->in, state, 1.0f);
    fill_matrix(&l->out, state, 1.0f);
    fill(l->conv, c->conv_kernel * config_channels(c), state, -0.87f, 0.87f);
    fill(l->a_log, c->lin_v_heads, state, -1.0f, 2.0f);
    fill(l->dt_bias, c->lin_v_heads, state, -7.0f, -2.0f);
    fill(l->out_norm, c->lin_v_dim, state, 0.8f, 1.2f);
}

static void fill_model(struct model *m)
{
    const struct model_config *c = &m->config;
    uint64_t state = c->seed;

    fill(m->embed, (size_t)c->vocab * c->hidden, &state, -1.73f, 1.73f);
    for (size_t i = 0; i < c->layers; i++) {
        struct layer *l = &m->layers[i];

        fill(l->norm_mix, c->hidden, &state, 0.8f, 1.2f);
        if (l->full)
            fill_full(c, l, &state);
        else
            fill_linear(c, l, &state);
        fill(l->norm_mlp, c->hidden, &state, 0.8f, 1.2f);
        fill_matrix(&l->gate_up, &state, 1.0f);
        fill_matrix(&l->down, &state, 1.0f);
    }
    fill(m->final_norm, c->hidden, &state, 0.8f, 1.2f);
    fill_matrix(&m->head, &state, 1.0f);
}

int model_new(const struct model_config *config, struct model **ret_model)
{
    struct arena counted = {0}, arena = {0};
    struct model *m;
    int r = model_config_check(config, NULL);

    if (r < 0)
        return r;
    m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    m->config = *config;
    m->layers = calloc(config->layers, sizeof(*m->layers));
    if (!m->layers)
        goto fail;
    lay_out(m, &counted);
    m->weights = arena.base = calloc(counted.used, sizeof(float));
    if (!m->weights)
        goto fail;
    lay_out(m, &arena);
    fill_model(m);
    *ret_model = m;
    return 0;
fail:
    model_free(m);
    return -ENOMEM;
}

void model_free(struct model *model)
{
    if (!model)
        return;
    free(model->weights);
    free(model->layers);
    free(model);
}

const struct model_config *model_config_of(const struct model *model)
{
    return &model->config;
}
