/* SPDX-License-Identifier: Apache-2.0 */
/* What the model computes, against slow and obvious versions of the same. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"
#include "internal.h"

static float from_bits(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state;
}

/* In [-1, 1). */
static float next_float(uint32_t *state)
{
    return (float)(next_random(state) >> 8) * 0x1p-23f - 1.0f;
}

static void fill_floats(float *out, size_t n, uint32_t *state)
{
    for (size_t i = 0; i < n; i++)
        out[i] = next_float(state);
}

/* Of two neighbours choose the nearer, of two equally near the even one. Doubles hold all of it. */
static uint16_t round_slowly(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1);
    double a = fabs((double)bf16_widen(low)), b = fabs((double)bf16_widen(high)),
           x = fabs((double)f);

    if (isinf(b))
        b = 0x1p128;
    if (x - a == b - x)
        return low & 1 ? high : low;
    return x - a < b - x ? low : high;
}

Test(bf16, rounds_to_nearest_even)
{
    uint32_t state = 1;

    for (uint32_t half = 0; half < 0x10000; half++) {
        static const uint32_t tails[] = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};

        if ((half & 0x7f80) == 0x7f80)
            continue;
        for (size_t i = 0; i < sizeof(tails) / sizeof(*tails); i++) {
            float f = from_bits(half << 16 | tails[i]);

            cr_assert_eq(bf16_round(f), round_slowly(f), "of %a", (double)f);
        }
        float f = from_bits(half << 16 | next_random(&state) >> 16);

        cr_assert_eq(bf16_round(f), round_slowly(f), "of %a", (double)f);
    }
    cr_assert_eq(bf16_round(from_bits(0x3f808000)), 0x3f80, "halfway, down to even");
    cr_assert_eq(bf16_round(from_bits(0x3f818000)), 0x3f82, "halfway, up to even");
}

Test(bf16, keeps_specials)
{
    cr_assert_eq(bf16_round(INFINITY), 0x7f80);
    cr_assert_eq(bf16_round(-INFINITY), 0xff80);
    cr_assert_eq(bf16_round(-0.0f), 0x8000);
    cr_assert_eq(bf16_round(from_bits(0x7f7fffff)), 0x7f80, "too large for bf16");
    cr_assert_eq(bf16_round(from_bits(0x7f7f7fff)), 0x7f7f, "just not too large");
    for (uint32_t payload = 1; payload < 0x800000; payload = payload * 2 + 1) {
        uint16_t positive = bf16_round(from_bits(0x7f800000 | payload));
        uint16_t negative = bf16_round(from_bits(0xff800000 | payload));

        cr_assert(isnan(bf16_widen(positive)), "payload %x", payload);
        cr_assert(isnan(bf16_widen(negative)) && negative & 0x8000, "payload %x", payload);
    }
}

static void matmul_case(size_t rows, size_t n_in, size_t n_out, bool add, uint32_t *state)
{
    size_t ld_x = n_in + 3, ld_out = n_out + 5;
    float *x = calloc(rows * ld_x, sizeof(float)), *out = calloc(rows * ld_out, sizeof(float));
    float *want = calloc(rows * ld_out, sizeof(float));
    struct matrix w = {n_in, n_out, calloc(panels_floats(n_in, n_out), sizeof(float))};

    fill_floats(x, rows * ld_x, state);
    fill_floats(out, rows * ld_out, state);
    for (size_t i = 0; i < n_in; i++)
        for (size_t j = 0; j < n_out; j++)
            w.panels[(j / PANEL * n_in + i) * PANEL + j % PANEL] = next_float(state);
    memcpy(want, out, rows * ld_out * sizeof(float));
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < n_out; j++) {
            float sum = add ? out[r * ld_out + j] : 0.0f;

            for (size_t i = 0; i < n_in; i++)
                sum += x[r * ld_x + i] * w.panels[(j / PANEL * n_in + i) * PANEL + j % PANEL];
            want[r * ld_out + j] = sum;
        }
    if (add)
        matmul_add(out, ld_out, x, ld_x, rows, &w, n_in);
    else
        matmul(out, ld_out, x, ld_x, rows, &w);
    cr_assert_arr_eq(out, want, rows * ld_out * sizeof(float), "%zu x %zu x %zu", rows, n_in,
                     n_out);
    free(w.panels);
    free(want);
    free(out);
    free(x);
}

Test(matmul, has_the_bits_of_the_plain_loop)
{
    uint32_t state = 2;

    for (size_t rows = 1; rows <= 5; rows++)
        for (size_t n_out = 1; n_out <= 2 * PANEL + 1; n_out++)
            for (size_t n_in = 1; n_in <= 40; n_in += 13) {
                matmul_case(rows, n_in, n_out, false, &state);
                matmul_case(rows, n_in, n_out, true, &state);
            }
}

/* -round(b*d) + b*d is 0 with two roundings. Fused into one, it is what the first one lost. */
Test(matmul, is_not_fused)
{
    float b = 1.0f + 0x1p-12f, d = 1.0f + 0x1p-13f;
    volatile float rounded = b * d;
    float x[3 * 2] = {-1.0f, b, -1.0f, b, -1.0f, b}, out[3 * (PANEL + 1)];
    struct matrix w = {2, PANEL + 1, calloc(panels_floats(2, PANEL + 1), sizeof(float))};

    for (size_t j = 0; j < PANEL + 1; j++) {
        w.panels[j / PANEL * 2 * PANEL + j % PANEL] = rounded;
        w.panels[(j / PANEL * 2 + 1) * PANEL + j % PANEL] = d;
    }
    cr_assert_neq(fma((double)b, (double)d, -(double)rounded), 0.0);
    matmul(out, PANEL + 1, x, 2, 3, &w);
    for (size_t i = 0; i < 3 * (PANEL + 1); i++)
        cr_assert_eq(out[i], 0.0f, "was built without -ffp-contract=off");
    free(w.panels);
}

static void small_config(struct model_config *c)
{
    model_config_default(c);
    c->hidden = 48;
    c->ff = 80;
    c->layers = 5;
    c->full_every = 2;
    c->head_dim = 20;
    c->rotary_dim = 12;
    c->lin_k_dim = 12;
    c->lin_v_dim = 20;
    c->conv_kernel = 3;
    c->block_tokens = 5;
    c->prefill_chunk = 7;
}

Test(rope, turns_pairs_and_leaves_the_rest)
{
    struct model_config c;
    float cosines[6], sines[6], x[20], y[20];
    uint32_t state = 3;

    small_config(&c);
    fill_floats(x, 20, &state);
    for (size_t position = 0; position < 5000; position += 617) {
        memcpy(y, x, sizeof(y));
        rope_angles(&c, position, cosines, sines);
        rope_rotate(y, c.rotary_dim, cosines, sines);
        for (int i = 0; i < 6; i++) {
            double angle = (double)position / pow(c.rope_theta, i / 6.0);

            cr_assert_float_eq(y[i], x[i] * cos(angle) - x[i + 6] * sin(angle), 1e-5);
            cr_assert_float_eq(y[i + 6], x[i] * sin(angle) + x[i + 6] * cos(angle), 1e-5);
        }
        cr_assert_arr_eq(y + 12, x + 12, 8 * sizeof(float));
        if (position == 0)
            cr_assert_arr_eq(y, x, sizeof(y));
    }
}

Test(rope, composes)
{
    struct model_config c;
    float cosines[6], sines[6], twice[20], once[20];
    uint32_t state = 4;

    small_config(&c);
    for (size_t a = 1; a < 3000; a += 271)
        for (size_t b = 1; b < 3000; b += 391) {
            fill_floats(once, 20, &state);
            memcpy(twice, once, sizeof(once));
            rope_angles(&c, a, cosines, sines);
            rope_rotate(twice, c.rotary_dim, cosines, sines);
            rope_angles(&c, b, cosines, sines);
            rope_rotate(twice, c.rotary_dim, cosines, sines);
            rope_angles(&c, a + b, cosines, sines);
            rope_rotate(once, c.rotary_dim, cosines, sines);
            for (int i = 0; i < 20; i++)
                cr_assert_float_eq(once[i], twice[i], 1e-6, "%zu then %zu", a, b);
        }
}

/* The paper's form, v x k: S = S (alpha (I - beta k k^T)) + beta v k^T, then o = S q. */
static void delta_slowly(double *s, size_t n_k, size_t n_v, const double *q, const double *k,
                         const double *v, double alpha, double beta, double *ret_out)
{
    for (size_t j = 0; j < n_v; j++) {
        double *row = s + j * n_k, recalled = 0.0;

        for (size_t i = 0; i < n_k; i++)
            recalled += row[i] * k[i];
        ret_out[j] = 0.0;
        for (size_t i = 0; i < n_k; i++) {
            row[i] = alpha * (row[i] - beta * recalled * k[i]) + beta * v[j] * k[i];
            ret_out[j] += row[i] * q[i];
        }
    }
}

Test(deltanet, is_the_delta_rule)
{
    enum { N_K = 12, N_V = 20, STEPS = 400 };
    float state[N_K * N_V] = {0}, q[N_K], k[N_K], v[N_V], delta[N_V], out[N_V];
    double slow[N_V * N_K] = {0}, dq[N_K], dk[N_K], dv[N_V], want[N_V];
    uint32_t random = 5;

    for (int step = 0; step < STEPS; step++) {
        float length = 0.0f, alpha = 0.98f + 0.02f * next_float(&random);
        float beta = 0.5f + 0.5f * next_float(&random);

        fill_floats(q, N_K, &random);
        fill_floats(k, N_K, &random);
        fill_floats(v, N_V, &random);
        for (int i = 0; i < N_K; i++)
            length += k[i] * k[i];
        for (int i = 0; i < N_K; i++) {
            dk[i] = k[i] /= sqrtf(length);
            dq[i] = q[i];
        }
        for (int j = 0; j < N_V; j++)
            dv[j] = v[j];
        deltanet_step(state, N_K, N_V, q, k, v, alpha, beta, delta, out);
        delta_slowly(slow, N_K, N_V, dq, dk, dv, alpha, beta, want);
        for (int j = 0; j < N_V; j++)
            cr_assert_float_eq(out[j], want[j], 2e-5, "step %d", step);
    }
    for (int i = 0; i < N_K; i++)
        for (int j = 0; j < N_V; j++)
            cr_assert_float_eq(state[i * N_V + j], slow[j * N_K + i], 2e-5);
}

/* With beta 1 and a key of unit length, the value just written is what the key recalls. */
Test(deltanet, recalls_what_was_written)
{
    float state[4 * 2] = {5, -1, 2, 3, 1, 1, 0, 7}, k[4] = {0.5f, -0.5f, 0.5f, 0.5f};
    float v[2] = {3.0f, -2.0f}, delta[2], out[2];

    deltanet_step(state, 4, 2, k, k, v, 0.9f, 1.0f, delta, out);
    cr_assert_float_eq(out[0], 3.0f, 1e-5);
    cr_assert_float_eq(out[1], -2.0f, 1e-5);
}

/*
 * The whole model in doubles, all tokens at once, without blocks, states or chunks. Only K and V
 * are rounded to bf16.
 */
enum { REF_TOKENS = 33 };

struct reference {
    const struct model *model;
    size_t n;
    double *x;     /* [n][hidden] */
    double *h;     /* [n][hidden] */
    double *in;    /* [n][projection] */
    double *mid;   /* [n][input of the output projection] */
    double *k;     /* [full layer][n][kv head][dim] */
    double *v;     /* likewise */
    double *state; /* [linear layer][v head][v dim][k dim] at the end */
    double *conv;  /* [linear layer][conv_kernel - 1][channel] at the end */
};

static void ref_matmul(double *out, const double *x, size_t n, const struct matrix *w)
{
    for (size_t t = 0; t < n; t++)
        for (size_t j = 0; j < w->n_out; j++) {
            double sum = 0.0;

            for (size_t i = 0; i < w->n_in; i++)
                sum +=
                    x[t * w->n_in + i] * w->panels[(j / PANEL * w->n_in + i) * PANEL + j % PANEL];
            out[t * w->n_out + j] = sum;
        }
}

static void ref_norm(double *out, const double *x, const float *weight, size_t n)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] / sqrt(sum / (double)n + 1e-6) * weight[i];
}

static double ref_sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static void ref_rotate(const struct model_config *c, double *x, size_t position)
{
    size_t half = c->rotary_dim / 2;

    for (size_t i = 0; i < half; i++) {
        double angle = (double)position * pow(c->rope_theta, -(double)i / (double)half);
        double a = x[i], b = x[half + i];

        x[i] = a * cos(angle) - b * sin(angle);
        x[half + i] = b * cos(angle) + a * sin(angle);
    }
}

static double ref_bf16(double x)
{
    return (double)bf16_widen(bf16_round((float)x));
}

/* Where K and V of token t and the given head lie in r->k and r->v. */
static size_t ref_at(const struct reference *r, const struct layer *layer, size_t t, size_t head)
{
    const struct model_config *c = &r->model->config;

    return ((layer->index * r->n + t) * c->kv_heads + head) * c->head_dim;
}

static void ref_put_kv(const struct reference *r, const struct layer *layer, size_t t, size_t head)
{
    const struct model_config *c = &r->model->config;
    size_t q = c->q_heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const double *row = r->in + t * 2 * (q + kv) + 2 * q + head * c->head_dim;
    double *k = r->k + ref_at(r, layer, t, head), *v = r->v + ref_at(r, layer, t, head);

    ref_norm(k, row, layer->k_norm, c->head_dim);
    ref_rotate(c, k, t);
    for (size_t d = 0; d < c->head_dim; d++) {
        k[d] = ref_bf16(k[d]);
        v[d] = ref_bf16(row[kv + d]);
    }
}

/* Query head `head` of token t: a softmax over all tokens up to t. */
static void ref_attend(const struct reference *r, const struct layer *layer, size_t t, size_t head)
{
    const struct model_config *c = &r->model->config;
    size_t dim = c->head_dim, q = c->q_heads * dim, width = 2 * (q + c->kv_heads * dim);
    size_t kv_head = head / (c->q_heads / c->kv_heads);
    double query[64], out[64] = {0}, total = 0.0;

    ref_norm(query, r->in + t * width + head * dim, layer->q_norm, dim);
    ref_rotate(c, query, t);
    for (size_t s = 0; s <= t; s++) {
        size_t at = ref_at(r, layer, s, kv_head);
        double score = 0.0;

        for (size_t d = 0; d < dim; d++)
            score += query[d] * r->k[at + d];
        double weight = exp(score / sqrt((double)dim));

        total += weight;
        for (size_t d = 0; d < dim; d++)
            out[d] += weight * r->v[at + d];
    }
    for (size_t d = 0; d < dim; d++)
        r->mid[t * q + head * dim + d] =
            out[d] / total * ref_sigmoid(r->in[t * width + q + head * dim + d]);
}

static void ref_attention(const struct reference *r, const struct layer *layer)
{
    const struct model_config *c = &r->model->config;

    for (size_t t = 0; t < r->n; t++)
        for (size_t head = 0; head < c->kv_heads; head++)
            ref_put_kv(r, layer, t, head);
    for (size_t t = 0; t < r->n; t++)
        for (size_t head = 0; head < c->q_heads; head++)
            ref_attend(r, layer, t, head);
}

/* Channel j after convolution and SiLU. */
static double ref_channel(const struct reference *r, const struct layer *layer, size_t t, size_t j)
{
    const struct model_config *c = &r->model->config;
    double sum = 0.0;

    for (size_t back = 0; back < c->conv_kernel && back <= t; back++)
        sum += layer->conv[(c->conv_kernel - 1 - back) * config_channels(c) + j] *
               r->in[(t - back) * layer->in.n_out + j];
    return sum * ref_sigmoid(sum);
}

static void ref_unit(double *out, const struct reference *r, const struct layer *layer, size_t t,
                     size_t from, double length)
{
    double sum = 1e-6;

    for (size_t i = 0; i < r->model->config.lin_k_dim; i++) {
        out[i] = ref_channel(r, layer, t, from + i);
        sum += out[i] * out[i];
    }
    for (size_t i = 0; i < r->model->config.lin_k_dim; i++)
        out[i] *= length / sqrt(sum);
}

static void ref_delta_head(const struct reference *r, const struct layer *layer, size_t head)
{
    const struct model_config *c = &r->model->config;
    size_t n_k = c->lin_k_dim, n_v = c->lin_v_dim, keys = c->lin_k_heads * n_k;
    size_t from = head / (c->lin_v_heads / c->lin_k_heads) * n_k, values = c->lin_v_heads * n_v;
    double *s = r->state + (layer->index * c->lin_v_heads + head) * n_k * n_v;
    double q[64], k[64], v[64], out[64];

    for (size_t t = 0; t < r->n; t++) {
        const double *z = r->in + t * layer->in.n_out + 2 * keys + values;
        double a = z[values + c->lin_v_heads + head] + layer->dt_bias[head];

        ref_unit(q, r, layer, t, from, 1.0 / sqrt((double)n_k));
        ref_unit(k, r, layer, t, keys + from, 1.0);
        for (size_t j = 0; j < n_v; j++)
            v[j] = ref_channel(r, layer, t, 2 * keys + head * n_v + j);
        delta_slowly(s, n_k, n_v, q, k, v, exp(-exp(layer->a_log[head]) * log(1.0 + exp(a))),
                     ref_sigmoid(z[values + head]), out);
        ref_norm(out, out, layer->out_norm, n_v);
        for (size_t j = 0; j < n_v; j++) {
            double gate = z[head * n_v + j];

            r->mid[t * values + head * n_v + j] = out[j] * gate * ref_sigmoid(gate);
        }
    }
}

static void ref_deltanet(const struct reference *r, const struct layer *layer)
{
    const struct model_config *c = &r->model->config;
    size_t taps = c->conv_kernel - 1, channels = config_channels(c);

    for (size_t head = 0; head < c->lin_v_heads; head++)
        ref_delta_head(r, layer, head);
    for (size_t i = 0; i < taps; i++)
        memcpy(r->conv + (layer->index * taps + i) * channels,
               r->in + (r->n - taps + i) * layer->in.n_out, channels * sizeof(double));
}

static void ref_residual(const struct reference *r, const struct matrix *out)
{
    ref_matmul(r->h, r->mid, r->n, out);
    for (size_t i = 0; i < r->n * r->model->config.hidden; i++)
        r->x[i] += r->h[i];
}

static void ref_norm_rows(const struct reference *r, const float *weight)
{
    size_t hidden = r->model->config.hidden;

    for (size_t t = 0; t < r->n; t++)
        ref_norm(r->h + t * hidden, r->x + t * hidden, weight, hidden);
}

static void ref_layer(const struct reference *r, const struct layer *layer)
{
    const struct model_config *c = &r->model->config;

    ref_norm_rows(r, layer->norm_mix);
    ref_matmul(r->in, r->h, r->n, &layer->in);
    if (layer->full)
        ref_attention(r, layer);
    else
        ref_deltanet(r, layer);
    ref_residual(r, &layer->out);

    ref_norm_rows(r, layer->norm_mlp);
    ref_matmul(r->in, r->h, r->n, &layer->gate_up);
    for (size_t t = 0; t < r->n; t++)
        for (size_t i = 0; i < c->ff; i++) {
            double gate = r->in[t * 2 * c->ff + i];

            r->mid[t * c->ff + i] = gate * ref_sigmoid(gate) * r->in[t * 2 * c->ff + c->ff + i];
        }
    ref_residual(r, &layer->down);
}

static double *doubles(size_t n)
{
    return calloc(n, sizeof(double));
}

static void ref_new(struct reference *r, const struct model *m, size_t n)
{
    const struct model_config *c = &m->config;
    size_t kv = config_full_layers(c) * n * c->kv_heads * c->head_dim;

    *r = (struct reference){
        .model = m,
        .n = n,
        .x = doubles(n * c->hidden),
        .h = doubles(n * c->hidden),
        .in = doubles(n * 1024),
        .mid = doubles(n * 1024),
        .k = doubles(kv),
        .v = doubles(kv),
        .state = doubles(config_linear_layers(c) * config_recurrent_floats(c)),
        .conv = doubles(config_linear_layers(c) * config_conv_floats(c)),
    };
}

static void ref_free(struct reference *r)
{
    free(r->x);
    free(r->h);
    free(r->in);
    free(r->mid);
    free(r->k);
    free(r->v);
    free(r->state);
    free(r->conv);
}

/* Logits after each token: [n][vocab]. */
static void ref_forward(const struct reference *r, const uint32_t *tokens, double *ret_logits)
{
    const struct model *m = r->model;
    size_t hidden = m->config.hidden;

    for (size_t t = 0; t < r->n; t++)
        for (size_t i = 0; i < hidden; i++)
            r->x[t * hidden + i] = m->embed[tokens[t] * hidden + i];
    for (size_t i = 0; i < m->config.layers; i++)
        ref_layer(r, &m->layers[i]);
    ref_norm_rows(r, m->final_norm);
    ref_matmul(ret_logits, r->h, r->n, &m->head);
}

/* Room for a K or V that is rounded the other way because it was computed in fp32, and for what
 * follows from it. A wrong term anywhere is off by a tenth and more. */
#define CLOSE 0.01

static void assert_close(double got, double want, const char *what, size_t i, size_t j)
{
    double one_ulp_of_bf16 = fabs(want) / 128;

    cr_assert_float_eq(got, want, CLOSE + one_ulp_of_bf16, "%s %zu %zu: %g, should be %g", what, i,
                       j, got, want);
}

static void check_logits(const struct model *m, struct seq *s, const uint32_t *tokens,
                         const double *want)
{
    float logits[MODEL_TOKEN_COUNT];

    for (size_t t = 0; t < REF_TOKENS; t++) {
        cr_assert_eq(model_forward(m, s, &tokens[t], 1, logits), 0);
        for (size_t j = 0; j < m->config.vocab; j++)
            assert_close((double)logits[j], want[t * m->config.vocab + j], "logits", t, j);
    }
}

/* The layout that model.h gives for a part: [full layer][token][kv head][dim]. */
static void check_part(const struct reference *r, size_t block, const uint16_t *part,
                       const double *want)
{
    const struct model_config *c = &r->model->config;
    size_t row = c->kv_heads * c->head_dim;

    for (size_t l = 0; l < config_full_layers(c); l++)
        for (size_t t = 0; t < c->block_tokens; t++)
            for (size_t i = 0; i < row; i++)
                assert_close((double)bf16_widen(part[(l * c->block_tokens + t) * row + i]),
                             want[(l * r->n + block * c->block_tokens + t) * row + i], "part", l,
                             t);
}

static void check_blocks(const struct reference *r, const struct seq *s)
{
    for (size_t i = 0; i < r->n / r->model->config.block_tokens; i++) {
        const void *k, *v;

        cr_assert_eq(seq_block(s, i, &k, &v), 0);
        check_part(r, i, k, r->k);
        check_part(r, i, v, r->v);
    }
}

/* And for a snapshot: per linear layer [v head][k dim][v dim], then [tap][channel]. */
static void check_snapshot(const struct reference *r, const struct seq *s)
{
    const struct model_config *c = &r->model->config;
    size_t n_k = c->lin_k_dim, n_v = c->lin_v_dim, conv = config_conv_floats(c);
    float *snapshot = calloc(1, model_snapshot_bytes(c)), *at = snapshot;

    seq_save_snapshot(s, snapshot);
    for (size_t l = 0; l < config_linear_layers(c); l++) {
        for (size_t h = l * c->lin_v_heads; h < (l + 1) * c->lin_v_heads; h++, at += n_k * n_v)
            for (size_t i = 0; i < n_k * n_v; i++)
                assert_close((double)at[i], r->state[(h * n_v + i % n_v) * n_k + i / n_v], "state",
                             h, i);
        for (size_t i = 0; i < conv; i++)
            assert_close((double)at[i], r->conv[l * conv + i], "conv", l, i);
        at += conv;
    }
    free(snapshot);
}

static void check_against_doubles(const struct model_config *c)
{
    uint32_t tokens[REF_TOKENS], state = 6;
    double *want = doubles(REF_TOKENS * c->vocab);
    struct reference r;
    struct model *m;
    struct seq *s;

    cr_assert_eq(model_new(c, &m), 0);
    cr_assert_eq(seq_new(m, REF_TOKENS, &s), 0);
    for (size_t t = 0; t < REF_TOKENS; t++)
        tokens[t] = next_random(&state) >> 24;
    ref_new(&r, m, REF_TOKENS);
    ref_forward(&r, tokens, want);
    check_logits(m, s, tokens, want);
    check_blocks(&r, s);
    check_snapshot(&r, s);
    ref_free(&r);
    seq_free(s);
    model_free(m);
    free(want);
}

Test(model, agrees_with_doubles)
{
    struct model_config c;

    small_config(&c);
    check_against_doubles(&c);
    model_config_default(&c);
    check_against_doubles(&c);
}
