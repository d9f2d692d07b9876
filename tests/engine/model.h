/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

/*
 * A small hybrid language model, used to prove that a cache of K/V blocks and snapshots changes
 * nothing but the time taken.
 *
 * Every `full_every`-th layer is full attention (grouped queries, partial NeoX RoPE, K and V kept
 * as bf16), all others are Gated DeltaNet (arXiv 2412.06464). The weights come from a seeded
 * generator, so what the model says means nothing, but every byte of it depends on all tokens read.
 *
 * The promise: the arithmetic of a token depends on the tokens before it and on nothing else, not
 * on how a prompt was cut into calls and chunks, not on who computed a block. A sequence resumed
 * from blocks and a snapshot yields bit for bit the logits of one that computed everything itself.
 *
 * Functions return 0 or a negative errno. `ret_` arguments are untouched on failure. A model is
 * read-only once made and may be shared by threads; a sequence belongs to one thread at a time.
 */

#include <stddef.h>
#include <stdint.h>

/* Token ids 0..255 are bytes. */
enum model_token {
    MODEL_TOKEN_BEGIN = 256, /* opens a prompt */
    MODEL_TOKEN_SYSTEM,      /* who speaks from here on */
    MODEL_TOKEN_USER,
    MODEL_TOKEN_ASSISTANT,
    MODEL_TOKEN_TOOL,
    MODEL_TOKEN_END, /* ends a turn */
    MODEL_TOKEN_COUNT,
};

/* seq_new() takes no more tokens than this. */
#define MODEL_MAX_TOKENS (1u << 24)

struct model_config {
    uint32_t vocab; /* token ids are 0..vocab-1 */
    uint32_t hidden;
    uint32_t ff;
    uint32_t layers;
    uint32_t full_every; /* layers full_every-1, 2*full_every-1, ... are full attention */

    uint32_t q_heads;
    uint32_t kv_heads; /* divides q_heads */
    uint32_t head_dim;
    uint32_t rotary_dim; /* even, at most head_dim */
    double rope_theta;

    uint32_t lin_k_heads;
    uint32_t lin_v_heads; /* a multiple of lin_k_heads */
    uint32_t lin_k_dim;
    uint32_t lin_v_dim;
    uint32_t conv_kernel;

    uint32_t block_tokens;
    uint32_t prefill_chunk; /* tokens pushed through a layer together: speed only, never bits */
    uint64_t seed;          /* of the weights */
};

struct model;
struct seq;

/* 8 layers of width 128, blocks of 16 tokens. */
void model_config_default(struct model_config *ret_config);

/*
 * 0, or -EINVAL and, if ret_why is not NULL, a static string that says what is wrong. All functions
 * below that take a config expect one that passes.
 */
int model_config_check(const struct model_config *config, const char **ret_why);

/*
 * A block is two parts of equal size, K first: all K of its tokens, then all V. Within a part
 *     [full-attention layer][token][kv head][dim]   bf16, native byte order, no padding.
 * K is stored after its norm and rotation.
 */
size_t model_part_bytes(const struct model_config *config);
size_t model_block_bytes(const struct model_config *config);

/*
 * A snapshot is, for each linear-attention layer in turn,
 *     recurrent state  [v head][k dim][v dim]              fp32
 *     conv state       [tap, oldest first][channel: q k v] fp32, conv_kernel-1 taps.
 */
size_t model_snapshot_bytes(const struct model_config *config);

/* Names both layouts: their order, sizes and dtypes. Equal digests: interchangeable bytes, provided
 * that the weights are the same. */
uint64_t model_layout_digest(const struct model_config *config);

int model_new(const struct model_config *config, struct model **ret_model);
void model_free(struct model *model);
const struct model_config *model_config_of(const struct model *model);

/* The model must outlive the sequence. max_tokens: prompt and output together. */
int seq_new(const struct model *model, size_t max_tokens, struct seq **ret_seq);
void seq_free(struct seq *seq);

/* The number of tokens read so far. */
size_t seq_position(const struct seq *seq);

/*
 * Blocks may live in the caller's memory, from the call until seq_free() or until another call
 * names the same block; both pointers are to a part and aligned to 2 bytes. A block that nobody
 * named gets memory of the sequence's own.
 *
 * seq_attach_block(): the block is already filled. It is read where it lies and never written. A
 * block that the sequence has already computed may be attached too: it is then read from there
 * (the bytes must be the same), which is how a block moves into or out of a cache.
 *
 * seq_provide_block(): the block is to be written there. It is complete as soon as
 * seq_position() >= (index + 1) * block_tokens.
 *
 * -EINVAL: no such block, bad pointers, or the block is begun and not complete (attach), or begun
 * (provide).
 */
int seq_attach_block(struct seq *seq, size_t index, const void *k, const void *v);
int seq_provide_block(struct seq *seq, size_t index, void *k, void *v);

/* Where block `index` lies now. -ENODATA: it is not complete. */
int seq_block(const struct seq *seq, size_t index, const void **ret_k, const void **ret_v);

/*
 * Continues from `position`, a multiple of block_tokens, with the state saved there. All blocks
 * before it must be complete or attached. None at or after it may be attached: their tokens are to
 * be computed again, because the linear layers need them. -EINVAL otherwise. May also go back in a
 * sequence; provided blocks at and after `position` are then written a second time.
 */
int seq_load_snapshot(struct seq *seq, size_t position, const void *bytes);

/* Writes model_snapshot_bytes(): the state after seq_position() tokens. */
void seq_save_snapshot(const struct seq *seq, void *ret_bytes);

/*
 * Reads n more tokens. ret_logits_last, if not NULL, gets `vocab` floats: what follows the last
 * one. -EINVAL: no tokens, a token out of range, another model's sequence, or a block to be written
 * is attached; -ERANGE: more than max_tokens; -ENOMEM. On failure nothing was read.
 */
int model_forward(const struct model *model, struct seq *seq, const uint32_t *tokens, size_t n,
                  float *ret_logits_last);

/* The token with the greatest logit, the lowest id among equals: greedy decoding. */
uint32_t model_argmax(const struct model *model, const float *logits);

#endif
