/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying into slots. A put writes memory that this core will not read soon: ordinary stores would
 * first fetch each line from memory and then push everybody's hot lines out of the cache. Streaming
 * stores do neither.
 */
#include "copy.h"

#include "kvd.h"

#include <stdint.h>
#include <string.h>

static bool always(void)
{
    return true;
}

static void copy_plain(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

enum { LINE = 64 };

/* Copies whole lines to a destination that begins on a line. */
typedef void (*stream_lines)(char *dst, const char *src, size_t lines);

/* Streaming stores only ever fill whole lines: a part of one would be a slow partial write, and the
 * bytes around it belong to somebody else. */
static void stream(void *dst, const void *src, size_t bytes, stream_lines copy_lines)
{
    size_t head = -(uintptr_t)dst % LINE;
    size_t body;
    char *to = dst;
    const char *from = src;

    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    body = (bytes - head) / LINE * LINE;
    copy_lines(to + head, from + head, body / LINE);
    memcpy(to + head + body, from + head + body, bytes - head - body);
    /* Streaming stores are not ordered by a later release store: without this fence a reader that
     * sees the commit could read old bytes (I1). Pairs with the acquire load that finds the object.
     */
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void lines_avx512(char *dst, const char *src,
                                                            size_t lines)
{
    for (; lines >= 4; lines -= 4, dst += 4 * LINE, src += 4 * LINE) {
        __m512i a = _mm512_loadu_si512(src);
        __m512i b = _mm512_loadu_si512(src + LINE);
        __m512i c = _mm512_loadu_si512(src + 2 * LINE);
        __m512i d = _mm512_loadu_si512(src + 3 * LINE);

        _mm512_stream_si512((__m512i *)(void *)dst, a);
        _mm512_stream_si512((__m512i *)(void *)(dst + LINE), b);
        _mm512_stream_si512((__m512i *)(void *)(dst + 2 * LINE), c);
        _mm512_stream_si512((__m512i *)(void *)(dst + 3 * LINE), d);
    }
    for (; lines; lines--, dst += LINE, src += LINE)
        _mm512_stream_si512((__m512i *)(void *)dst, _mm512_loadu_si512(src));
}

__attribute__((target("avx2"))) static void lines_avx2(char *dst, const char *src, size_t lines)
{
    for (; lines; lines--, dst += LINE, src += LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)src);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(src + 32));

        _mm256_stream_si256((__m256i *)(void *)dst, a);
        _mm256_stream_si256((__m256i *)(void *)(dst + 32), b);
    }
}

static void lines_sse2(char *dst, const char *src, size_t lines)
{
    for (; lines; lines--, dst += LINE, src += LINE) {
        for (size_t i = 0; i < LINE; i += 16) {
            __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(src + i));

            _mm_stream_si128((__m128i *)(void *)(dst + i), a);
        }
    }
}

static void copy_avx512(void *dst, const void *src, size_t bytes)
{
    stream(dst, src, bytes, lines_avx512);
}

static void copy_avx2(void *dst, const void *src, size_t bytes)
{
    stream(dst, src, bytes, lines_avx2);
}

static void copy_sse2(void *dst, const void *src, size_t bytes)
{
    stream(dst, src, bytes, lines_sse2);
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

static const struct copy_variant variants[] = {
    {"avx512", has_avx512, copy_avx512},
    {"avx2", has_avx2, copy_avx2},
    {"sse2", always, copy_sse2},
    {"plain", always, copy_plain},
};
#else
/* arm64 orders the "non-temporal" stnp like any other store and cores differ in what they make of
 * it: no measurement has shown a gain over the C library's memcpy() yet. */
static const struct copy_variant variants[] = {
    {"plain", always, copy_plain},
};
#endif

/* Below this many bytes a streaming copy into cold memory is slower: its fence waits for the whole
 * way to memory, and the saved line fetches do not make up for it (measured crossover: 1-2 KiB). */
enum { STREAM_MIN = 2048 };

const struct copy_variant *copy_variants(size_t *ret_n)
{
    *ret_n = sizeof(variants) / sizeof(variants[0]);
    return variants;
}

/* Asks the processor anew each time: a load and a bit test, against a cached pointer that every
 * thread would have to agree on. */
static const struct copy_variant *best(void)
{
    const struct copy_variant *variant = variants;

    while (!variant->usable())
        variant++;
    return variant;
}

void kvd_copy_in(void *dst, const void *src, size_t bytes)
{
    if (bytes < STREAM_MIN)
        copy_plain(dst, src, bytes);
    else
        best()->copy(dst, src, bytes);
}
