/* SPDX-License-Identifier: Apache-2.0 */
/* Every way of copying that this processor has, against memcpy(), with guarded surroundings. */
#include "client/copy.h"
#include "client/kvd.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <criterion/criterion.h>

enum {
    LINE = 64,
    GUARD = 2 * LINE,
    SMALL_MAX = 300,
};

static void fill(uint8_t *bytes, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(seed >> 24);
    }
}

/* Copies n bytes between the given places of line-aligned buffers of `room` bytes, and compares the
 * whole destination with what memcpy() makes of it. */
struct bench {
    uint8_t *src, *dst, *expected;
    size_t room;
};

static struct bench bench_new(size_t bytes)
{
    struct bench bench = {.room = (bytes + 2 * GUARD + LINE) / LINE * LINE};

    bench.src = aligned_alloc(LINE, bench.room);
    bench.dst = aligned_alloc(LINE, bench.room);
    bench.expected = aligned_alloc(LINE, bench.room);
    cr_assert(bench.src && bench.dst && bench.expected);
    fill(bench.src, bench.room, 1);
    return bench;
}

static void bench_free(struct bench *bench)
{
    free(bench->src);
    free(bench->dst);
    free(bench->expected);
}

static void check(struct bench *bench, const char *name,
                  void (*copy)(void *dst, const void *src, size_t bytes), size_t to, size_t from,
                  size_t n)
{
    cr_assert_leq(GUARD + to + n + GUARD, bench->room);
    fill(bench->dst, bench->room, 2);
    memcpy(bench->expected, bench->dst, bench->room);
    memcpy(bench->expected + GUARD + to, bench->src + from, n);
    copy(bench->dst + GUARD + to, bench->src + from, n);
    if (memcmp(bench->dst, bench->expected, bench->room) != 0)
        cr_assert_fail("%s: %zu bytes from offset %zu to %zu", name, n, from, to);
}

static void check_small(const char *name, void (*copy)(void *dst, const void *src, size_t bytes))
{
    struct bench bench = bench_new(SMALL_MAX + LINE);

    for (size_t to = 0; to < LINE; to++) {
        for (size_t n = 0; n <= SMALL_MAX; n++)
            check(&bench, name, copy, to, (to * 7 + n) % LINE, n);
    }
    bench_free(&bench);
}

static void check_alignments(const char *name,
                             void (*copy)(void *dst, const void *src, size_t bytes))
{
    enum { N = 5 * LINE + 3 };
    struct bench bench = bench_new(N + LINE);

    for (size_t to = 0; to < LINE; to++) {
        for (size_t from = 0; from < LINE; from++)
            check(&bench, name, copy, to, from, N);
    }
    bench_free(&bench);
}

static void check_large(const char *name, void (*copy)(void *dst, const void *src, size_t bytes))
{
    static const size_t sizes[] = {2047,      2048,          2049,    4096,
                                   65536 + 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 77};
    struct bench bench = bench_new((3 << 20) + 77 + LINE);

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        check(&bench, name, copy, 0, 0, sizes[i]);
        check(&bench, name, copy, 1, 0, sizes[i]);
        check(&bench, name, copy, 63, 17, sizes[i]);
        check(&bench, name, copy, 0, 5, sizes[i]);
    }
    bench_free(&bench);
}

Test(copy, every_variant_copies_exactly)
{
    size_t n, usable = 0;
    const struct copy_variant *variants = copy_variants(&n);

    for (size_t i = 0; i < n; i++) {
        if (!variants[i].usable()) {
            cr_log_info("%s: not on this processor", variants[i].name);
            continue;
        }
        usable++;
        check_small(variants[i].name, variants[i].copy);
        check_alignments(variants[i].name, variants[i].copy);
        check_large(variants[i].name, variants[i].copy);
    }
    cr_assert_gt(usable, 0);
}

Test(copy, copy_in_copies_exactly)
{
    check_small("kvd_copy_in", kvd_copy_in);
    check_alignments("kvd_copy_in", kvd_copy_in);
    check_large("kvd_copy_in", kvd_copy_in);
}

/* The search for the best variant must not run off the list. */
Test(copy, the_last_variant_is_always_usable)
{
    size_t n;
    const struct copy_variant *variants = copy_variants(&n);

    cr_assert_gt(n, 0);
    cr_assert(variants[n - 1].usable());
}

/* Two pages of which the second faults: nothing is read or written past the end. */
static uint8_t *page_before_a_hole(size_t page)
{
    uint8_t *map = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    cr_assert_neq(map, MAP_FAILED);
    cr_assert_eq(mprotect(map + page, page, PROT_NONE), 0);
    return map;
}

Test(copy, nothing_is_touched_past_the_end)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), count;
    const struct copy_variant *variants = copy_variants(&count);
    uint8_t *src = page_before_a_hole(page), *dst = page_before_a_hole(page);

    fill(src, page, 3);
    for (size_t i = 0; i < count; i++) {
        for (size_t n = 0; variants[i].usable() && n <= page; n += n < SMALL_MAX ? 1 : 61) {
            variants[i].copy(dst + page - n, src + page - n, n);
            cr_assert_arr_eq(dst + page - n, src + page - n, n);
        }
    }
    munmap(src, 2 * page);
    munmap(dst, 2 * page);
}
