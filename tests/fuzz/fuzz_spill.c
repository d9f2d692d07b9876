/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a superblock, and as a table behind a good one: refused, or numbers that can be used without
 * a further look. The first byte says what is mended before, so that the checks hide nothing:
 * 1: magic and version, 2: the check of the superblock, 4: those of the records.
 */
#define _GNU_SOURCE
#include "daemon/spill/format.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum {
    MEND_MAGIC = 1,
    MEND_SUPER = 2,
    MEND_RECORDS = 4,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void mend_super(uint8_t *bytes, uint8_t how)
{
    uint32_t version = htole32(FORMAT_VERSION);
    uint64_t check;

    if (how & MEND_MAGIC) {
        memcpy(bytes, "kvdspill", 8);
        memcpy(bytes + 8, &version, 4);
    }
    if (how & MEND_SUPER) {
        check = htole64(XXH3_64bits(bytes, FORMAT_SUPER_BYTES - 8));
        memcpy(bytes + FORMAT_SUPER_BYTES - 8, &check, 8);
    }
}

static void mend_record(uint8_t *bytes, const struct format_super *s, uint32_t number)
{
    uint8_t place[20];
    uint32_t n = htole32(number), check;

    memcpy(place, s->uuid, 16);
    memcpy(place + 16, &n, 4);
    check = htole32((uint32_t)XXH3_64bits_withSeed(bytes, FORMAT_RECORD_BYTES - 4,
                                                   XXH3_64bits(place, sizeof(place))));
    memcpy(bytes + FORMAT_RECORD_BYTES - 4, &check, 4);
}

static void check_pieces(const struct format_super *s, const struct format_record *r,
                         uint32_t number)
{
    const struct format_geometry *g = &s->geometry;
    uint32_t n = format_pieces(g, r->bytes);
    struct format_piece last = format_piece_at(g, r->bytes, n - 1);
    uint64_t end = (last.in_slot + last.bytes + 4095) / 4096 * 4096;

    require(n >= g->parts && last.part == g->parts - 1);
    require(last.in_part + last.bytes == r->bytes);
    require(end <= g->part_bytes * g->parts);
    require(format_slot_offset(s, number) + end <= s->bytes);
}

static void check_record(const struct format_super *s, uint8_t *bytes, uint32_t number, uint8_t how)
{
    uint8_t again[FORMAT_RECORD_BYTES];
    struct format_record r;
    int e;

    if (how & MEND_RECORDS)
        mend_record(bytes, s, number);
    e = format_record_decode(bytes, s, number, &r);
    require(e == 0 || e == -ENODATA || e == -EILSEQ || e == -EINVAL);
    require(!(how & MEND_RECORDS) || e != -EILSEQ);
    if (e < 0)
        return;
    require(number < s->records && r.bytes >= 1 && r.bytes <= s->geometry.part_bytes);
    require(r.user_bytes <= SHM_USER_BYTES);
    format_record_encode(&r, s, number, again);
    require(memcmp(bytes, again, sizeof(again)) == 0);
    check_pieces(s, &r, number);
}

static void check_super(const struct format_super *s, const uint8_t *bytes)
{
    uint8_t again[FORMAT_SUPER_BYTES];
    uint32_t last = (uint32_t)s->records - 1;
    struct format_super plan;
    char why[512];

    require(s->records >= 1 && s->records <= FORMAT_RECORDS_MAX);
    require(format_sector_offset(s, 0) >= FORMAT_SUPER_COPY + FORMAT_SUPER_BYTES);
    require(format_sector_offset(s, last) + FORMAT_SECTOR <= format_user_sector_offset(s, 0));
    require(format_user_sector_offset(s, last) + FORMAT_SECTOR <= format_slot_offset(s, 0));
    require(format_slot_offset(s, last) < s->bytes && s->bytes <= INT64_MAX);
    require(s->geometry.space[63] == 0 && s->geometry.pool[63] == 0);
    require(format_compare(&s->geometry, &s->geometry, why, sizeof(why)) == 0);
    require(format_plan(&s->geometry, s->bytes, &plan) == 0 && plan.records >= s->records);
    format_super_encode(s, again);
    require(memcmp(bytes, again, sizeof(again)) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t super[FORMAT_SUPER_BYTES] = {0}, record[FORMAT_RECORD_BYTES];
    struct format_super s;
    size_t n;
    int e;

    if (size == 0)
        return 0;
    /* The beginning is enough to reach all fields; what is not given is zero. */
    n = size - 1 < 256 ? size - 1 : 256;
    memcpy(super, data + 1, n);
    mend_super(super, data[0]);
    e = format_super_decode(super, &s);
    require(e == 0 || e == -ENODATA || e == -EBADMSG || e == -EILSEQ || e == -EPROTONOSUPPORT ||
            e == -EINVAL);
    if (e < 0)
        return 0;
    check_super(&s, super);
    for (uint32_t i = 0; size - 1 - n >= sizeof(record); i++, n += sizeof(record)) {
        memcpy(record, data + 1 + n, sizeof(record));
        check_record(&s, record, i, data[0]);
        memcpy(record, data + 1 + n, sizeof(record));
        check_record(&s, record, (uint32_t)s.records - 1 - i % (uint32_t)s.records, data[0]);
    }
    return 0;
}
