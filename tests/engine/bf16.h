/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ENGINE_BF16_H
#define ENGINE_BF16_H

/* bf16 is the upper half of an fp32; both directions are exact bit operations. */

#include <stdint.h>
#include <string.h>

static inline float bf16_widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Round to nearest, ties to even. A NaN stays a NaN (made quiet: rounding could turn its payload
 * into an infinity); what is too large becomes an infinity, as IEEE 754 asks. */
static inline uint16_t bf16_round(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
