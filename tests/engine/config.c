/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <xxhash.h>

#include "internal.h"

void model_config_default(struct model_config *ret_config)
{
    *ret_config = (struct model_config){
        .vocab = MODEL_TOKEN_COUNT,
        .hidden = 128,
        .ff = 384,
        .layers = 8,
        .full_every = 4,
        .q_heads = 4,
        .kv_heads = 2,
        .head_dim = 32,
        .rotary_dim = 16,
        .rope_theta = 10000.0,
        .lin_k_heads = 2,
        .lin_v_heads = 4,
        .lin_k_dim = 32,
        .lin_v_dim = 32,
        .conv_kernel = 4,
        .block_tokens = 16,
        .prefill_chunk = 64,
        .seed = 1,
    };
}

/* The upper bounds keep every size far from overflowing, whatever the product. */
static const char *check_ranges(const struct model_config *c)
{
    const struct {
        uint32_t value, min, max;
        const char *why;
    } ranges[] = {
        {c->vocab, 2, 1 << 18, "vocab must be 2..262144"},
        {c->hidden, 1, 8192, "hidden must be 1..8192"},
        {c->ff, 1, 32768, "ff must be 1..32768"},
        {c->layers, 2, 256, "layers must be 2..256"},
        {c->full_every, 2, c->layers, "full_every must be 2..layers: both kinds of layer"},
        {c->q_heads, 1, 256, "q_heads must be 1..256"},
        {c->kv_heads, 1, 256, "kv_heads must be 1..256"},
        {c->head_dim, 2, 512, "head_dim must be 2..512"},
        {c->rotary_dim, 2, c->head_dim, "rotary_dim must be 2..head_dim"},
        {c->lin_k_heads, 1, 256, "lin_k_heads must be 1..256"},
        {c->lin_v_heads, 1, 256, "lin_v_heads must be 1..256"},
        {c->lin_k_dim, 1, 512, "lin_k_dim must be 1..512"},
        {c->lin_v_dim, 1, 512, "lin_v_dim must be 1..512"},
        {c->conv_kernel, 2, 16, "conv_kernel must be 2..16"},
        {c->block_tokens, 1, 4096, "block_tokens must be 1..4096"},
        {c->prefill_chunk, 1, 4096, "prefill_chunk must be 1..4096"},
    };

    for (size_t i = 0; i < sizeof(ranges) / sizeof(*ranges); i++)
        if (ranges[i].value < ranges[i].min || ranges[i].value > ranges[i].max)
            return ranges[i].why;
    return NULL;
}

static const char *check_relations(const struct model_config *c)
{
    if (c->q_heads % c->kv_heads)
        return "kv_heads must divide q_heads";
    if (c->lin_v_heads % c->lin_k_heads)
        return "lin_k_heads must divide lin_v_heads";
    if (c->rotary_dim % 2)
        return "rotary_dim must be even: dimensions are rotated in pairs";
    if (!(c->rope_theta > 1.0 && c->rope_theta <= 1e12))
        return "rope_theta must be above 1 and at most 1e12";
    return NULL;
}

int model_config_check(const struct model_config *config, const char **ret_why)
{
    const char *why = config ? check_ranges(config) : "no config";

    if (!why)
        why = check_relations(config);
    if (why && ret_why)
        *ret_why = why;
    return why ? -EINVAL : 0;
}

size_t config_full_layers(const struct model_config *config)
{
    return config->layers / config->full_every;
}

size_t config_linear_layers(const struct model_config *config)
{
    return config->layers - config_full_layers(config);
}

size_t config_channels(const struct model_config *config)
{
    return 2 * (size_t)config->lin_k_heads * config->lin_k_dim +
           (size_t)config->lin_v_heads * config->lin_v_dim;
}

size_t config_recurrent_floats(const struct model_config *config)
{
    return (size_t)config->lin_v_heads * config->lin_k_dim * config->lin_v_dim;
}

size_t config_conv_floats(const struct model_config *config)
{
    return (size_t)(config->conv_kernel - 1) * config_channels(config);
}

size_t model_part_bytes(const struct model_config *config)
{
    return config_full_layers(config) * config->block_tokens * config->kv_heads * config->head_dim *
           sizeof(uint16_t);
}

size_t model_block_bytes(const struct model_config *config)
{
    return 2 * model_part_bytes(config);
}

size_t model_snapshot_bytes(const struct model_config *config)
{
    return config_linear_layers(config) *
           (config_recurrent_floats(config) + config_conv_floats(config)) * sizeof(float);
}

/* The number after "engine" is that of the arithmetic: raise it when the same tokens give other
 * bytes, or old blocks would be resumed by new code. */
uint64_t model_layout_digest(const struct model_config *config)
{
    char text[512];
    int length = snprintf(
        text, sizeof(text),
        "engine 1 | %s | block [part: K, V][layer: %zu, every %u of %u][token: %u][head: %u]"
        "[dim: %u] bf16 | K normed, rope neox %u theta %.17g | snapshot [layer: %zu]: "
        "S [v head: %u of %u][k: %u][v: %u] fp32, conv [tap: %u, oldest first]"
        "[channel: %zu, q k v] fp32",
        __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "little-endian" : "big-endian",
        config_full_layers(config), config->full_every, config->layers, config->block_tokens,
        config->kv_heads, config->head_dim, config->rotary_dim, config->rope_theta,
        config_linear_layers(config), config->lin_v_heads, config->lin_k_heads, config->lin_k_dim,
        config->lin_v_dim, config->conv_kernel - 1, config_channels(config));

    return XXH3_64bits(text, (size_t)length);
}
