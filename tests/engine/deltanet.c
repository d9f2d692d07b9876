/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "internal.h"

/*
 * Gated DeltaNet: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with
 * Delta Rule", arXiv 2412.06464. A head keeps an associative memory S (k_dim x v_dim, fp32):
 *
 *     q, k, v  = SiLU(conv(x W)), q and k of unit length, q also over sqrt(k_dim)
 *     beta     = sigmoid(b)                                     how much to write
 *     alpha    = exp(-exp(a_log) * softplus(a + dt_bias))       how much to keep
 *     S        = alpha S + beta k (v - alpha S^T k)^T           replace what k recalled by v
 *     out      = RMSNorm(S^T q) * SiLU(z)
 *
 * conv is causal, depthwise over the channels of q, k and v, conv_kernel taps. The state after a
 * token is thus S of each head and the last conv_kernel - 1 inputs of the convolution. The paper's
 * parallel form over chunks is not used: it adds in another order than the recurrence.
 */

void deltanet_step(float *restrict state, size_t k_dim, size_t v_dim, const float *restrict q,
                   const float *restrict k, const float *restrict v, float alpha, float beta,
                   float *restrict delta, float *restrict ret_out)
{
    for (size_t j = 0; j < v_dim; j++)
        delta[j] = ret_out[j] = 0.0f;
    for (size_t i = 0; i < k_dim; i++)
        for (size_t j = 0; j < v_dim; j++) {
            state[i * v_dim + j] *= alpha;
            delta[j] += k[i] * state[i * v_dim + j];
        }
    for (size_t j = 0; j < v_dim; j++)
        delta[j] = beta * (v[j] - delta[j]);
    for (size_t i = 0; i < k_dim; i++)
        for (size_t j = 0; j < v_dim; j++) {
            state[i * v_dim + j] += k[i] * delta[j];
            ret_out[j] += q[i] * state[i * v_dim + j];
        }
}

/* The inputs of the convolution for the whole chunk, behind those that the state remembers. */
static void taps_load(struct seq *seq, const float *conv_state, const float *rows, size_t width,
                      size_t n)
{
    const struct model_config *c = &seq->model->config;
    size_t channels = config_channels(c), before = config_conv_floats(c);

    memcpy(seq->scratch.taps, conv_state, before * sizeof(float));
    for (size_t t = 0; t < n; t++)
        memcpy(seq->scratch.taps + before + t * channels, rows + t * width,
               channels * sizeof(float));
}

static void convolve(float *restrict out, const float *restrict taps, const float *restrict weights,
                     size_t kernel, size_t channels)
{
    for (size_t j = 0; j < channels; j++)
        out[j] = 0.0f;
    for (size_t i = 0; i < kernel; i++)
        for (size_t j = 0; j < channels; j++)
            out[j] += weights[i * channels + j] * taps[i * channels + j];
    for (size_t j = 0; j < channels; j++)
        out[j] = silu(out[j]);
}

static void normalize(float *x, size_t n, float length)
{
    float sum = 0.0f;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    float scale = length / sqrtf(sum + NORM_EPSILON);

    for (size_t i = 0; i < n; i++)
        x[i] *= scale;
}

static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* All heads of one token: z, b and a lie behind z, q, k and v in scratch.channels. */
static void token_forward(struct seq *seq, const struct layer *layer, float *state, const float *z,
                          float *out)
{
    const struct model_config *c = &seq->model->config;
    size_t v_total = (size_t)c->lin_v_heads * c->lin_v_dim;
    size_t group = c->lin_v_heads / c->lin_k_heads;
    float *q = seq->scratch.channels, *k = q + (size_t)c->lin_k_heads * c->lin_k_dim;
    const float *v = k + (size_t)c->lin_k_heads * c->lin_k_dim;
    const float *b = z + v_total, *a = b + c->lin_v_heads;

    for (size_t i = 0; i < c->lin_k_heads; i++) {
        normalize(q + i * c->lin_k_dim, c->lin_k_dim, 1.0f / sqrtf((float)c->lin_k_dim));
        normalize(k + i * c->lin_k_dim, c->lin_k_dim, 1.0f);
    }
    for (size_t i = 0; i < c->lin_v_heads; i++) {
        size_t from = i / group * c->lin_k_dim, at = i * c->lin_v_dim;
        float keep = expf(-expf(layer->a_log[i]) * softplus(a[i] + layer->dt_bias[i]));

        deltanet_step(state + i * c->lin_k_dim * c->lin_v_dim, c->lin_k_dim, c->lin_v_dim, q + from,
                      k + from, v + at, keep, sigmoid(b[i]), seq->scratch.delta, out + at);
        rms_norm(out + at, out + at, layer->out_norm, c->lin_v_dim);
        for (size_t j = at; j < at + c->lin_v_dim; j++)
            out[j] *= silu(z[j]);
    }
}

void deltanet_forward(struct seq *seq, const struct layer *layer, size_t n)
{
    const struct model_config *c = &seq->model->config;
    struct scratch *s = &seq->scratch;
    size_t width = layer->in.n_out, channels = config_channels(c);
    size_t v_total = (size_t)c->lin_v_heads * c->lin_v_dim;
    size_t recurrent = config_recurrent_floats(c), conv = config_conv_floats(c);
    float *state = seq->state + layer->index * (recurrent + conv);

    matmul(s->wide, width, s->h, c->hidden, n, &layer->in);
    taps_load(seq, state + recurrent, s->wide, width, n);
    for (size_t t = 0; t < n; t++) {
        convolve(s->channels, s->taps + t * channels, layer->conv, c->conv_kernel, channels);
        token_forward(seq, layer, state, s->wide + t * width + channels, s->inner + t * v_total);
    }
    memcpy(state + recurrent, s->taps + n * channels, conv * sizeof(float));
    matmul(s->h, c->hidden, s->inner, v_total, n, &layer->out);
}
