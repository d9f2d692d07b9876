/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "internal.h"

/* Lanes are columns: adding vectors adds each column's own terms, in order. 16 bytes is what every
 * x86-64 and arm64 has; sums of two rows of a panel fit its registers. */
typedef float lanes __attribute__((vector_size(16), aligned(4), may_alias));

#define LANES   4
#define VECTORS (PANEL / LANES)
#define ROWS    2

/* out[r][0..PANEL) for a few rows, out and x at the first of them. Inlined with `rows` constant, so
 * that the sums stay in registers. */
static inline __attribute__((always_inline)) void panel_rows(float *out, size_t ld_out,
                                                             const float *x, size_t ld_x,
                                                             size_t rows, const float *panel,
                                                             size_t n_in, bool add)
{
    lanes sums[ROWS * VECTORS] = {0};

    for (size_t s = 0; add && s < rows * VECTORS; s++)
        sums[s] = *(const lanes *)(out + s / VECTORS * ld_out + s % VECTORS * LANES);
    for (size_t i = 0; i < n_in; i++, panel += PANEL)
        for (size_t s = 0; s < rows * VECTORS; s++)
            sums[s] += x[s / VECTORS * ld_x + i] * *(const lanes *)(panel + s % VECTORS * LANES);
    for (size_t s = 0; s < rows * VECTORS; s++)
        *(lanes *)(out + s / VECTORS * ld_out + s % VECTORS * LANES) = sums[s];
}

/* The last panel, when it has fewer than PANEL columns. */
static void panel_narrow(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
                         const float *panel, size_t n_in, size_t width, bool add)
{
    float whole[PANEL] = {0};

    for (size_t r = 0; r < rows; r++) {
        if (add)
            memcpy(whole, out + r * ld_out, width * sizeof(float));
        panel_rows(whole, PANEL, x + r * ld_x, ld_x, 1, panel, n_in, add);
        memcpy(out + r * ld_out, whole, width * sizeof(float));
    }
}

static void panel_wide(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
                       const float *panel, size_t n_in, bool add)
{
    size_t r = 0;

    for (; r + ROWS <= rows; r += ROWS)
        panel_rows(out + r * ld_out, ld_out, x + r * ld_x, ld_x, ROWS, panel, n_in, add);
    for (; r < rows; r++)
        panel_rows(out + r * ld_out, ld_out, x + r * ld_x, ld_x, 1, panel, n_in, add);
}

static void multiply(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
                     const struct matrix *w, size_t n_in, bool add)
{
    const float *panel = w->panels;
    size_t column = 0;

    for (; column + PANEL <= w->n_out; column += PANEL, panel += w->n_in * PANEL)
        panel_wide(out + column, ld_out, x, ld_x, rows, panel, n_in, add);
    if (column < w->n_out)
        panel_narrow(out + column, ld_out, x, ld_x, rows, panel, n_in, w->n_out - column, add);
}

void matmul(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
            const struct matrix *w)
{
    multiply(out, ld_out, x, ld_x, rows, w, w->n_in, false);
}

void matmul_add(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
                const struct matrix *w, size_t n_in)
{
    multiply(out, ld_out, x, ld_x, rows, w, n_in, true);
}

size_t panels_floats(size_t n_in, size_t n_out)
{
    return n_in * ((n_out + PANEL - 1) / PANEL * PANEL);
}

void rms_norm(float *out, const float *x, const float *weight, size_t n)
{
    float sum = 0.0f;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)n + NORM_EPSILON);

    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

float silu(float x)
{
    return x * sigmoid(x);
}

/* In double: an fp32 angle of a late position would have lost its fraction. */
void rope_angles(const struct model_config *config, size_t position, float *ret_cos, float *ret_sin)
{
    for (uint32_t i = 0; i < config->rotary_dim / 2; i++) {
        double inverse = pow(config->rope_theta, -2.0 * i / config->rotary_dim);

        ret_cos[i] = (float)cos((double)position * inverse);
        ret_sin[i] = (float)sin((double)position * inverse);
    }
}

void rope_rotate(float *x, size_t rotary_dim, const float *cosines, const float *sines)
{
    float *high = x + rotary_dim / 2;

    for (size_t i = 0; i < rotary_dim / 2; i++) {
        float a = x[i], b = high[i];

        x[i] = a * cosines[i] - b * sines[i];
        high[i] = b * cosines[i] + a * sines[i];
    }
}
