/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ENGINE_INTERNAL_H
#define ENGINE_INTERNAL_H

/*
 * Why chunks cannot change bits. Floating-point addition is not associative, so each sum here runs
 * in one order that depends on the token alone: over inputs from first to last, over keys from the
 * oldest block to the newest. Loops are arranged so that the vector lanes are *different* sums
 * (columns of a matrix, tokens of a block), which leaves nothing to reassociate. What is left to
 * the compiler is fusing a*b+c into one rounding in some loops and not in others, so this folder is
 * built with -ffp-contract=off and never with -ffast-math.
 */
#ifdef __FAST_MATH__
#error "-ffast-math reorders sums: resumed sequences would differ from uncached ones"
#endif

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model.h"

/* 16: even _Float16 is not widened (x86 with fp16 arithmetic). */
_Static_assert(FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 16,
               "excess precision would depend on register allocation");

/* Columns of a matrix that are summed side by side, and lie side by side. */
#define PANEL 16

/* Added to mean squares before a root is taken. */
#define NORM_EPSILON 1e-6f

/* n_in x n_out, in panels of PANEL columns: [panel][row][PANEL]. The last is padded with zeros. */
struct matrix {
    size_t n_in;
    size_t n_out;
    float *panels;
};

struct layer {
    bool full;
    size_t index; /* among the layers of its kind */
    float *norm_mix;
    float *norm_mlp;
    struct matrix in;  /* full: q, gate, k, v; linear: q, k, v, z, b, a */
    struct matrix out; /* back to the residual stream */
    struct matrix gate_up;
    struct matrix down;

    float *q_norm; /* full: [head_dim] */
    float *k_norm;

    float *conv;     /* linear: [tap, oldest first][channel] */
    float *a_log;    /* [v head] */
    float *dt_bias;  /* [v head] */
    float *out_norm; /* [v dim] */
};

struct model {
    struct model_config config;
    struct layer *layers;
    float *embed; /* [vocab][hidden] */
    float *final_norm;
    struct matrix head;
    float *weights; /* the memory all of the above points into */
};

/* k == NULL: nobody named it yet; k_out == NULL: read-only. */
struct block {
    const uint16_t *k;
    const uint16_t *v;
    uint16_t *k_out;
    uint16_t *v_out;
    void *owned; /* the sequence's own memory behind the above, or NULL */
};

/* Buffers for one chunk of tokens, cut from one allocation. T is prefill_chunk. */
struct scratch {
    float *x;     /* [T][hidden], the residual stream */
    float *h;     /* [T][hidden], its norm, then what a sublayer adds to it */
    float *wide;  /* [T][the widest projection] */
    float *inner; /* [T][the widest input of an output projection] */
    float *cos;   /* [T][rotary_dim / 2] */
    float *sin;

    float *q;       /* [kv head][T][q heads per kv head][head_dim] */
    float *acc;     /* likewise: softmax-weighted sums of V */
    float *max;     /* [kv head][T][q heads per kv head] */
    float *sum;     /* likewise */
    float *scores;  /* [T][q heads per kv head][block_tokens] */
    float *k_block; /* one head of one block in fp32, panels of tokens */
    float *v_block; /* panels of dims */

    float *taps;     /* [conv_kernel - 1 + T][channels] */
    float *channels; /* one token after the convolution */
    float *delta;    /* [lin_v_dim] */

    float *memory;
};

struct seq {
    const struct model *model;
    size_t max_tokens;
    size_t position;
    size_t n_blocks;
    struct block *blocks;
    float *state; /* exactly a snapshot */
    struct scratch scratch;
};

/* config.c */
size_t config_full_layers(const struct model_config *config);
size_t config_linear_layers(const struct model_config *config);
size_t config_channels(const struct model_config *config);
size_t config_recurrent_floats(const struct model_config *config);
size_t config_conv_floats(const struct model_config *config);

/* ops.c */

/* out[r][j] = sum over i of x[r][i] * w[i][j], i ascending, from 0. Rows are ld_* floats apart. */
void matmul(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
            const struct matrix *w);

/* The same, starting from what is in out, over the first n_in rows of w. */
void matmul_add(float *out, size_t ld_out, const float *x, size_t ld_x, size_t rows,
                const struct matrix *w, size_t n_in);

size_t panels_floats(size_t n_in, size_t n_out);
void rms_norm(float *out, const float *x, const float *weight, size_t n);
float sigmoid(float x);
float silu(float x);

/* NeoX pairing (i, i + rotary_dim/2); dims from rotary_dim on are left alone. */
void rope_angles(const struct model_config *config, size_t position, float *ret_cos,
                 float *ret_sin);
void rope_rotate(float *x, size_t rotary_dim, const float *cosines, const float *sines);

/* The layers: read n rows of scratch.h and put what they add to the residual stream there. */
void attention_forward(struct seq *seq, const struct layer *layer, size_t n);
void deltanet_forward(struct seq *seq, const struct layer *layer, size_t n);

/* One token of one head: state is [k_dim][v_dim], delta has v_dim floats of scratch. */
void deltanet_step(float *state, size_t k_dim, size_t v_dim, const float *q, const float *k,
                   const float *v, float alpha, float beta, float *delta, float *ret_out);

/* seq.c: makes every block of tokens [position, position + n) writable. */
int seq_prepare(struct seq *seq, size_t n);

#endif
