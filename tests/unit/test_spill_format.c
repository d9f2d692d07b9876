/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "daemon/spill/format.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TIB (1ull << 40)

/* ---- golden bytes: the output of tests/data/spill.py */

static const uint8_t golden_super[] = {
    0x6b, 0x76, 0x64, 0x73, 0x70, 0x69, 0x6c, 0x6c, 0x01, 0x00, 0x00, 0x00, 0x07, 0x00, 0x00, 0x00,
    0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,
    0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x00, 0xf1, 0x53, 0x65, 0x00, 0x00, 0x00, 0x00,
    0xe3, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x80, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0xb0, 0x9f, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x30, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x03, 0x00, 0x00, 0x00, 0x80, 0x00, 0x00, 0x00, 0x6c, 0x6c, 0x61, 0x6d, 0x61, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x6b, 0x76, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17,
    0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,
};

static const uint8_t golden_super_check[] = {
    0xc8, 0xdc, 0x5b, 0xaa, 0x28, 0x5f, 0xc9, 0xc5,
};

static const uint8_t golden_record[] = {
    0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f,
    0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,
    0xff, 0xfe, 0xfd, 0xfc, 0xfb, 0xfa, 0xf9, 0xf8, 0xf7, 0xf6, 0xf5, 0xf4, 0xf3, 0xf2, 0xf1, 0xf0,
    0xef, 0xee, 0xed, 0xec, 0xeb, 0xea, 0xe9, 0xe8, 0xe7, 0xe6, 0xe5, 0xe4, 0xe3, 0xe2, 0xe1, 0xe0,
    0x05, 0x00, 0x00, 0x00, 0x06, 0x00, 0x00, 0x00, 0x21, 0x37, 0x54, 0x2f, 0x14, 0xf1, 0x19, 0x50,
    0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
    0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41, 0x0f, 0x27, 0x00, 0x00, 0x07, 0x00, 0x00, 0x00,
    0x54, 0x53, 0x52, 0x51, 0x64, 0x63, 0x62, 0x61, 0x01, 0x00, 0x03, 0x00, 0x95, 0x5e, 0xb0, 0x6b,
};

/* 227 records: what follows from the golden geometry and 10 MiB + 4,095 bytes. */
enum {
    GOLDEN_NUMBER = 77,
    GOLDEN_PIECES = 130,
};

static struct format_geometry golden_geometry(void)
{
    struct format_geometry g = {.space = "llama", .pool = "kv", .part_bytes = 12288, .parts = 3};

    for (unsigned i = 0; i < 16; i++)
        g.identity[i] = (uint8_t)(0x10 + i);
    return g;
}

static struct format_super golden(void)
{
    struct format_geometry g = golden_geometry();
    struct format_super s;

    cr_assert_eq(format_plan(&g, 10 * MIB + 4095, &s), 0);
    for (unsigned i = 0; i < 16; i++)
        s.uuid[i] = (uint8_t)(0xa0 + i);
    s.sequence = 0x0102030405060708;
    s.created_s = 1700000000;
    s.epoch = 7;
    return s;
}

static struct format_record golden_object(void)
{
    struct format_record r = {
        .key.group = 5,
        .parent.group = 6,
        .has_parent = true,
        .checksum = 0x2122232425262728,
        .layout = 0x3132333435363738,
        .position = 0x4142434445464748,
        .bytes = 10000,
        .epoch = 7,
        .generation = 0x51525354,
        .tenant = 0x61626364,
        .user_bytes = 3,
    };

    for (unsigned i = 0; i < 32; i++) {
        r.key.hash[i] = (uint8_t)i;
        r.parent.hash[i] = (uint8_t)(0xff - i);
    }
    return r;
}

static uint64_t golden_digest(const struct format_record *r, const struct format_super *s)
{
    uint64_t pieces[GOLDEN_PIECES];

    for (uint64_t i = 0; i < GOLDEN_PIECES; i++)
        pieces[i] = (i + 1) * 0x9e3779b97f4a7c15;
    return format_digest(r, s, (const uint8_t *)"abc", pieces, GOLDEN_PIECES);
}

static bool same_super(const struct format_super *a, const struct format_super *b)
{
    return memcmp(&a->geometry.space, &b->geometry.space, 64) == 0 &&
           memcmp(&a->geometry.pool, &b->geometry.pool, 64) == 0 &&
           memcmp(a->geometry.identity, b->geometry.identity, 16) == 0 &&
           a->geometry.part_bytes == b->geometry.part_bytes &&
           a->geometry.parts == b->geometry.parts && memcmp(a->uuid, b->uuid, 16) == 0 &&
           a->sequence == b->sequence && a->created_s == b->created_s && a->records == b->records &&
           a->table == b->table && a->user == b->user && a->data == b->data &&
           a->bytes == b->bytes && a->epoch == b->epoch;
}

static bool same_record(const struct format_record *a, const struct format_record *b)
{
    return memcmp(&a->key, &b->key, sizeof(a->key)) == 0 &&
           memcmp(&a->parent, &b->parent, sizeof(a->parent)) == 0 &&
           a->has_parent == b->has_parent && a->linked == b->linked && a->digest == b->digest &&
           a->checksum == b->checksum && a->layout == b->layout && a->position == b->position &&
           a->bytes == b->bytes && a->epoch == b->epoch && a->generation == b->generation &&
           a->tenant == b->tenant && a->user_bytes == b->user_bytes;
}

Test(golden, superblock)
{
    struct format_super s = golden(), back;
    uint8_t bytes[FORMAT_SUPER_BYTES];

    cr_assert_eq(s.records, 227);
    format_super_encode(&s, bytes);
    for (unsigned i = 0; i < sizeof(golden_super); i++)
        cr_assert_eq(bytes[i], golden_super[i], "byte %u is %#x", i, bytes[i]);
    for (unsigned i = sizeof(golden_super); i < 4088; i++)
        cr_assert_eq(bytes[i], 0, "byte %u", i);
    cr_assert_eq(memcmp(bytes + 4088, golden_super_check, 8), 0);
    cr_assert_eq(format_super_decode(bytes, &back), 0);
    cr_assert(same_super(&s, &back));
}

Test(golden, record_and_digest)
{
    struct format_super s = golden();
    struct format_record r = golden_object(), back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    r.digest = golden_digest(&r, &s);
    format_record_encode(&r, &s, GOLDEN_NUMBER, bytes);
    for (unsigned i = 0; i < sizeof(golden_record); i++)
        cr_assert_eq(bytes[i], golden_record[i], "byte %u is %#x", i, bytes[i]);
    cr_assert_eq(format_record_decode(bytes, &s, GOLDEN_NUMBER, &back), 0);
    cr_assert(same_record(&r, &back));
}

/* ---- superblock */

Test(super, every_flipped_bit_is_noticed)
{
    struct format_super s = golden(), back;
    uint8_t bytes[FORMAT_SUPER_BYTES];

    format_super_encode(&s, bytes);
    memset(&back, 0x5a, sizeof(back));
    for (unsigned bit = 0; bit < 8 * FORMAT_SUPER_BYTES; bit++) {
        int r;

        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        r = format_super_decode(bytes, &back);
        cr_assert_eq(r, bit < 64 ? -EBADMSG : -EILSEQ, "bit %u: %d", bit, r);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (unsigned i = 0; i < sizeof(back); i++)
        cr_assert_eq(((uint8_t *)&back)[i], 0x5a, "a failure wrote to its result");
    cr_assert_eq(format_super_decode(bytes, &back), 0);
}

Test(super, zeros_and_foreign_bytes)
{
    struct format_super s;
    uint8_t bytes[FORMAT_SUPER_BYTES] = {0};

    cr_assert_eq(format_super_decode(bytes, &s), -ENODATA);
    bytes[FORMAT_SUPER_BYTES - 1] = 1;
    cr_assert_eq(format_super_decode(bytes, &s), -EBADMSG);
    memset(bytes, 0xff, sizeof(bytes));
    cr_assert_eq(format_super_decode(bytes, &s), -EBADMSG);
}

/* Damages what a check would hide, and makes the check fit again. */
static int decode_with(size_t at, uint64_t value, size_t n)
{
    struct format_super s = golden(), back;
    uint8_t bytes[FORMAT_SUPER_BYTES];
    uint64_t check;

    format_super_encode(&s, bytes);
    memcpy(bytes + at, &value, n); /* the test runs on little-endian machines */
    check = XXH3_64bits(bytes, 4088);
    memcpy(bytes + 4088, &check, 8);
    return format_super_decode(bytes, &back);
}

Test(super, of_another_version)
{
    cr_assert_eq(decode_with(8, FORMAT_VERSION, 4), 0);
    cr_assert_eq(decode_with(8, FORMAT_VERSION + 1, 4), -EPROTONOSUPPORT);
    cr_assert_eq(decode_with(8, 0, 4), -EPROTONOSUPPORT);
}

Test(super, numbers_that_contradict_each_other)
{
    static const struct {
        size_t at;
        uint64_t value;
        size_t n;
    } bad[] = {
        {48, 0, 8},                      /* records */
        {48, 228, 8},                    /* more than there is room */
        {48, UINT64_MAX, 8},             /* overflow */
        {48, 1ull << 57, 8},             /* times 128: 0 */
        {48, FORMAT_RECORDS_MAX + 1, 8}, /* no slot number for it */
        {56, 0, 8},
        {56, 4096, 8}, /* on a superblock */
        {56, UINT64_MAX - 4095, 8},
        {64, 1 * MIB, 8},        /* user table on the table */
        {72, 1 * MIB + 8192, 8}, /* data on the user table */
        {72, 0, 8},
        {80, 0, 8},
        {80, 10 * MIB - 36864, 8}, /* less than a slot missing */
        {80, 1ull << 63, 8},       /* no off_t */
        {88, 0, 8},
        {88, 12289, 8},
        {88, 1ull << 63, 8},
        {88, 4 * GIB, 8}, /* three of them */
        {96, 0, 4},
        {96, 65, 4},
        {96, UINT32_MAX, 4},
        {100, 256, 4}, /* record size */
        {104, 0, 1},   /* no name */
        {104, '\n', 1},
        {104, 0x9b, 1},
        {110, 'x', 1}, /* behind the end of the name */
        {168, 0, 1},
        {248, 1, 1},
        {4087, 1, 1},
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        cr_assert_eq(decode_with(bad[i].at, bad[i].value, bad[i].n), -EINVAL, "case %zu", i);
    cr_assert_eq(decode_with(80, 100 * GIB, 8), 0, "more bytes than needed are fine");
}

/* ---- planning */

static void check_plan(uint64_t part_bytes, uint32_t parts, uint64_t bytes)
{
    struct format_geometry g = golden_geometry();
    struct format_super s, more;
    uint8_t image[FORMAT_SUPER_BYTES];
    uint64_t slot = part_bytes * parts;

    g.part_bytes = part_bytes;
    g.parts = parts;
    cr_assert_eq(format_plan(&g, bytes, &s), 0);
    cr_assert(s.records >= 1 && s.records <= FORMAT_RECORDS_MAX);
    cr_assert_eq(s.table, FORMAT_TABLE);
    cr_assert_geq(s.user, s.table + 128 * s.records);
    cr_assert_geq(s.data, s.user + 128 * s.records);
    cr_assert(s.user % 4096 == 0 && s.data % MIB == 0);
    cr_assert_eq(s.bytes, s.data + slot * s.records);
    cr_assert_leq(s.bytes, bytes);
    /* One more would not have fitted. */
    if (s.records < FORMAT_RECORDS_MAX && format_plan(&g, bytes + slot + 2 * MIB, &more) == 0)
        cr_assert_gt(more.records, s.records);
    cr_assert_gt(s.bytes + slot + MIB + 2 * 4096, bytes >> (s.records == FORMAT_RECORDS_MAX) * 9);
    cr_assert_eq(format_slot_offset(&s, 0), s.data);
    cr_assert_eq(format_slot_offset(&s, (uint32_t)s.records - 1) + slot, s.bytes);
    cr_assert_leq(format_sector_offset(&s, (uint32_t)s.records - 1) + 4096, s.user);
    cr_assert_leq(format_user_sector_offset(&s, (uint32_t)s.records - 1) + 4096, s.data);
    format_super_encode(&s, image);
    cr_assert_eq(format_super_decode(image, &more), 0);
    cr_assert(same_super(&s, &more));
}

Test(plan, as_many_slots_as_fit)
{
    check_plan(4096, 1, 3 * MIB);
    check_plan(4096, 1, 16 * TIB);
    check_plan(4096, 64, 1 * TIB + 12345);
    check_plan(4 * GIB, 1, 4 * GIB + 2 * MIB);
    check_plan(64 * MIB, 64, 100 * TIB);
    check_plan(153944064, 1, 1 * TIB);
    for (uint64_t bytes = 3 * MIB; bytes < 5 * MIB; bytes += 1023)
        check_plan(4096, 1, bytes);
}

Test(plan, a_store_of_one_slot_and_none)
{
    struct format_geometry g = golden_geometry();
    struct format_super s = {.records = 99};

    cr_assert_eq(format_plan(&g, 2 * MIB + 36864, &s), 0);
    cr_assert_eq(s.records, 1);
    s.records = 99;
    cr_assert_eq(format_plan(&g, 2 * MIB + 36863, &s), -ENOSPC);
    cr_assert_eq(format_plan(&g, 0, &s), -ENOSPC);
    g.parts = 65;
    cr_assert_eq(format_plan(&g, 10 * MIB, &s), -EINVAL);
    g = golden_geometry();
    g.part_bytes = 4095;
    cr_assert_eq(format_plan(&g, 10 * MIB, &s), -EINVAL);
    cr_assert_eq(s.records, 99);
}

Test(plan, slot_numbers_are_not_exceeded)
{
    struct format_geometry g = golden_geometry();
    struct format_super s;

    g.part_bytes = 4096;
    g.parts = 1;
    cr_assert_eq(format_plan(&g, UINT64_MAX, &s), 0);
    cr_assert_eq(s.records, FORMAT_RECORDS_MAX);
}

/* ---- comparing */

static const char *compared(const struct format_geometry *g)
{
    static char why[512];
    struct format_geometry golden = golden_geometry();

    why[0] = '\0';
    cr_assert_eq(format_compare(g, &golden, why, sizeof(why)), -EMEDIUMTYPE);
    return why;
}

Test(compare, what_is_different_is_said)
{
    struct format_geometry g = golden_geometry(), same = golden_geometry();
    char why[512] = "untouched";

    cr_assert_eq(format_compare(&g, &same, why, sizeof(why)), 0);
    cr_assert_str_eq(why, "untouched");
    memcpy(g.space, "qwen\0", 6);
    cr_assert_str_eq(compared(&g), "the store is of space qwen, this pool is of llama");
    g = golden_geometry();
    g.pool[1] = 'x';
    cr_assert_str_eq(compared(&g), "the store is of pool kx, this pool is of kv");
    g = golden_geometry();
    g.parts = 6;
    g.part_bytes = 4096;
    cr_assert_str_eq(compared(&g), "the store has slots of 24 KiB (6 parts), this pool of 36 KiB "
                                   "(3 parts)");
    g = golden_geometry();
    g.identity[15] ^= 1;
    cr_assert_not_null(strstr(compared(&g), "another model or key scheme"));
}

/* ---- records */

Test(record, every_flipped_bit_is_noticed)
{
    struct format_super s = golden();
    struct format_record r = golden_object(), back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    format_record_encode(&r, &s, 3, bytes);
    memset(&back, 0x5a, sizeof(back));
    for (unsigned bit = 0; bit < 8 * FORMAT_RECORD_BYTES; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        cr_assert_eq(format_record_decode(bytes, &s, 3, &back), -EILSEQ, "bit %u", bit);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (unsigned i = 0; i < sizeof(back); i++)
        cr_assert_eq(((uint8_t *)&back)[i], 0x5a, "a failure wrote to its result");
    cr_assert_eq(format_record_decode(bytes, &s, 3, &back), 0);
    cr_assert(same_record(&r, &back));
}

Test(record, at_another_place_or_of_another_store)
{
    struct format_super s = golden(), other = golden();
    struct format_record r = golden_object(), back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    format_record_encode(&r, &s, 3, bytes);
    for (uint32_t i = 0; i < s.records; i++)
        cr_assert_eq(format_record_decode(bytes, &s, i, &back), i == 3 ? 0 : -EILSEQ);
    other.uuid[7] ^= 1;
    cr_assert_eq(format_record_decode(bytes, &other, 3, &back), -EILSEQ);
}

/* A zero is what nobody wrote; so is a record never taken for one. */
Test(record, zeros_are_no_record)
{
    struct format_super s = golden();
    struct format_record r = {.bytes = 1}, back;
    uint8_t bytes[FORMAT_RECORD_BYTES] = {0};

    cr_assert_eq(format_record_decode(bytes, &s, 0, &back), -ENODATA);
    format_record_encode(&r, &s, 0, bytes);
    cr_assert_eq(format_record_decode(bytes, &s, 0, &back), 0);
    cr_assert(same_record(&r, &back));
}

Test(record, torn_in_a_sector_it_is_none)
{
    struct format_super s = golden();
    struct format_record r = golden_object(), back;
    uint8_t old[FORMAT_RECORD_BYTES], new[FORMAT_RECORD_BYTES], torn[FORMAT_RECORD_BYTES];

    format_record_encode(&r, &s, 3, old);
    r.key.hash[0] ^= 1;
    r.generation++;
    r.position++;
    format_record_encode(&r, &s, 3, new);
    for (unsigned cut = 1; cut < FORMAT_RECORD_BYTES - 4; cut++) {
        memcpy(torn, new, cut);
        memcpy(torn + cut, old + cut, sizeof(torn) - cut);
        cr_assert_eq(format_record_decode(torn, &s, 3, &back), -EILSEQ, "cut at %u", cut);
    }
}

static int decode_record(const struct format_record *r, uint32_t number)
{
    struct format_super s = golden();
    struct format_record back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    format_record_encode(r, &s, number, bytes);
    return format_record_decode(bytes, &s, number, &back);
}

Test(record, sizes_that_cannot_be)
{
    struct format_record r = golden_object();

    cr_assert_eq(decode_record(&r, 226), 0);
    cr_assert_eq(decode_record(&r, 227), -EINVAL, "there are 227");
    r.bytes = 12288;
    r.user_bytes = 128;
    cr_assert_eq(decode_record(&r, 0), 0);
    r.bytes = 12289;
    cr_assert_eq(decode_record(&r, 0), -EINVAL);
    r.bytes = 0; /* 4 GiB */
    cr_assert_eq(decode_record(&r, 0), -EINVAL);
    r.bytes = 1;
    r.user_bytes = 129;
    cr_assert_eq(decode_record(&r, 0), -EINVAL);
}

Test(record, without_a_parent_the_parent_is_zero)
{
    struct format_super s = golden();
    struct format_record r = golden_object(), back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    r.has_parent = false;
    r.linked = true; /* to nothing */
    format_record_encode(&r, &s, 3, bytes);
    cr_assert_eq(format_record_decode(bytes, &s, 3, &back), 0);
    cr_assert_not(back.has_parent || back.linked);
    r.linked = false;
    memset(&r.parent, 0, sizeof(r.parent));
    cr_assert(same_record(&r, &back));
}

Test(record, four_gibibytes_fit)
{
    struct format_geometry g = golden_geometry();
    struct format_super s;
    struct format_record r = golden_object(), back;
    uint8_t bytes[FORMAT_RECORD_BYTES];

    g.part_bytes = 4 * GIB;
    g.parts = 1;
    cr_assert_eq(format_plan(&g, 10 * GIB, &s), 0);
    r.bytes = 4 * GIB;
    format_record_encode(&r, &s, 0, bytes);
    cr_assert_eq(format_record_decode(bytes, &s, 0, &back), 0);
    cr_assert_eq(back.bytes, 4 * GIB);
}

/* ---- digest */

/* Each field but the digest itself. */
Test(digest, changes_with_everything_it_covers)
{
    struct format_super s = golden(), other = golden();
    struct format_record r = golden_object();
    uint64_t pieces[70] = {1, 2, 3}, d;
    uint8_t user[128] = "abc";

    d = format_digest(&r, &s, user, pieces, 70);
#define DIFFERS(change, undo)                                                                      \
    do {                                                                                           \
        change;                                                                                    \
        cr_assert_neq(format_digest(&r, &s, user, pieces, 70), d, "%s", #change);                  \
        undo;                                                                                      \
        cr_assert_eq(format_digest(&r, &s, user, pieces, 70), d, "%s", #undo);                     \
    } while (0)
    DIFFERS(r.key.hash[31] ^= 1, r.key.hash[31] ^= 1);
    DIFFERS(r.key.group ^= 1, r.key.group ^= 1);
    DIFFERS(r.parent.hash[0] ^= 1, r.parent.hash[0] ^= 1);
    DIFFERS(r.parent.group ^= 1, r.parent.group ^= 1);
    DIFFERS(r.has_parent = false, r.has_parent = true);
    DIFFERS(r.linked = !r.linked, r.linked = !r.linked);
    DIFFERS(r.checksum++, r.checksum--);
    DIFFERS(r.layout++, r.layout--);
    DIFFERS(r.position++, r.position--);
    DIFFERS(r.bytes++, r.bytes--);
    DIFFERS(r.epoch++, r.epoch--);
    DIFFERS(r.generation++, r.generation--);
    DIFFERS(r.tenant++, r.tenant--);
    DIFFERS(r.user_bytes++, r.user_bytes--);
    DIFFERS(user[2] ^= 1, user[2] ^= 1);
    for (unsigned i = 0; i < 70; i++)
        DIFFERS(pieces[i] ^= 1ull << i % 64, pieces[i] ^= 1ull << i % 64);
#undef DIFFERS
    r.digest = 99;
    user[3] = 'x';
    cr_assert_eq(format_digest(&r, &s, user, pieces, 70), d, "neither is covered");
    cr_assert_neq(format_digest(&r, &s, user, pieces, 69), d);
    other.uuid[0] ^= 1;
    cr_assert_neq(format_digest(&r, &other, user, pieces, 70), d);
}

Test(digest, order_of_pieces_counts)
{
    struct format_super s = golden();
    struct format_record r = golden_object();
    uint64_t pieces[130] = {0}, d;

    r.user_bytes = 0;
    pieces[0] = 1;
    d = format_digest(&r, &s, NULL, pieces, 130);
    pieces[0] = 0;
    for (unsigned i = 1; i < 130; i++) {
        pieces[i] = 1;
        cr_assert_neq(format_digest(&r, &s, NULL, pieces, 130), d, "piece %u", i);
        pieces[i] = 0;
    }
}

/* ---- pieces */

static void check_pieces(uint64_t part_bytes, uint32_t parts, uint64_t used)
{
    struct format_geometry g = {.part_bytes = part_bytes, .parts = parts};
    uint32_t n = format_pieces(&g, used), i = 0;

    for (uint32_t part = 0; part < parts; part++) {
        uint64_t at = 0;

        while (at < used) {
            struct format_piece p = format_piece_at(&g, used, i++);

            cr_assert_eq(p.part, part);
            cr_assert_eq(p.in_part, at);
            cr_assert_eq(p.in_slot, part * part_bytes + at);
            cr_assert(p.bytes >= 1 && p.bytes <= FORMAT_PIECE);
            cr_assert(at % FORMAT_PIECE == 0 && (at + p.bytes == used || p.bytes == FORMAT_PIECE));
            cr_assert_leq((at + p.bytes + 4095) / 4096 * 4096, part_bytes);
            at += p.bytes;
        }
        cr_assert_eq(at, used);
    }
    cr_assert_eq(i, n);
}

Test(pieces, cover_every_part_once_and_in_order)
{
    check_pieces(4096, 1, 1);
    check_pieces(4096, 1, 4096);
    check_pieces(4096, 64, 4095);
    check_pieces(MIB, 3, MIB);
    check_pieces(MIB + 4096, 3, MIB + 1);
    check_pieces(153944064, 1, 153944064);
    check_pieces(64 * MIB, 64, 64 * MIB - 1);
    check_pieces(4 * GIB, 1, 4 * GIB);
}

Test(pieces, offsets_of_sectors)
{
    struct format_super s = golden();

    cr_assert_eq(format_sector_offset(&s, 0), MIB);
    cr_assert_eq(format_sector_offset(&s, 31), MIB);
    cr_assert_eq(format_sector_offset(&s, 32), MIB + 4096);
    cr_assert_eq(format_user_sector_offset(&s, 31), s.user);
    cr_assert_eq(format_user_sector_offset(&s, 64), s.user + 8192);
    cr_assert_eq(format_slot_offset(&s, 2), s.data + 2 * 36864);
}

static void assert_size(uint64_t bytes, const char *exact, const char *rounded)
{
    char buf[FORMAT_SIZE_TEXT];

    cr_assert_str_eq(format_size(bytes, true, buf), exact);
    cr_assert_str_eq(format_size(bytes, false, buf), rounded);
}

Test(format, sizes_are_for_people)
{
    assert_size(0, "0 bytes", "0 bytes");
    assert_size(1023, "1023 bytes", "1023 bytes");
    assert_size(65536, "64 KiB", "64 KiB");
    assert_size(921600ull << 20, "900 GiB", "900 GiB");
    assert_size(153944064, "150336 KiB", "146 MiB");
    assert_size(3ull << 39, "1536 GiB", "1.5 TiB");
    assert_size(5000ull << 40, "5000 TiB", "5000 TiB");
    assert_size(1048577, "1048577 bytes", "1.0 MiB");
}
