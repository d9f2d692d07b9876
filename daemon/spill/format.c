/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/spill/format.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* The bytes on the medium: arrays of bytes only, so there is no padding, no alignment and no order but the
 * one below, on any host. */
struct wire_super {
    uint8_t magic[8];
    uint8_t version[4];
    uint8_t epoch[4];
    uint8_t uuid[16];
    uint8_t sequence[8];
    uint8_t created_s[8];
    uint8_t records[8];
    uint8_t table[8];
    uint8_t user[8];
    uint8_t data[8];
    uint8_t bytes[8];
    uint8_t part_bytes[8];
    uint8_t parts[4];
    uint8_t record_bytes[4];
    uint8_t space[64];
    uint8_t pool[64];
    uint8_t identity[16];
    uint8_t zero[3840];
    uint8_t check[8];
};
_Static_assert(sizeof(struct wire_super) == FORMAT_SUPER_BYTES, "a superblock");
SHM_ASSERT_AT(struct wire_super, version, 8);
SHM_ASSERT_AT(struct wire_super, epoch, 12);
SHM_ASSERT_AT(struct wire_super, uuid, 16);
SHM_ASSERT_AT(struct wire_super, sequence, 32);
SHM_ASSERT_AT(struct wire_super, created_s, 40);
SHM_ASSERT_AT(struct wire_super, records, 48);
SHM_ASSERT_AT(struct wire_super, table, 56);
SHM_ASSERT_AT(struct wire_super, user, 64);
SHM_ASSERT_AT(struct wire_super, data, 72);
SHM_ASSERT_AT(struct wire_super, bytes, 80);
SHM_ASSERT_AT(struct wire_super, part_bytes, 88);
SHM_ASSERT_AT(struct wire_super, parts, 96);
SHM_ASSERT_AT(struct wire_super, record_bytes, 100);
SHM_ASSERT_AT(struct wire_super, space, 104);
SHM_ASSERT_AT(struct wire_super, pool, 168);
SHM_ASSERT_AT(struct wire_super, identity, 232);
SHM_ASSERT_AT(struct wire_super, zero, 248);
SHM_ASSERT_AT(struct wire_super, check, 4088);

struct wire_record {
    uint8_t hash[32];
    uint8_t parent[32];
    uint8_t group[4];
    uint8_t parent_group[4];
    uint8_t digest[8];
    uint8_t checksum[8];
    uint8_t layout[8];
    uint8_t position[8];
    uint8_t last_byte[4]; /* bytes - 1: 4 GiB fits */
    uint8_t epoch[4];
    uint8_t generation[4];
    uint8_t tenant[4];
    uint8_t flags[2];
    uint8_t user_bytes[2];
    uint8_t check[4];
};
_Static_assert(sizeof(struct wire_record) == FORMAT_RECORD_BYTES, "a record");
SHM_ASSERT_AT(struct wire_record, parent, 32);
SHM_ASSERT_AT(struct wire_record, group, 64);
SHM_ASSERT_AT(struct wire_record, parent_group, 68);
SHM_ASSERT_AT(struct wire_record, digest, 72);
SHM_ASSERT_AT(struct wire_record, checksum, 80);
SHM_ASSERT_AT(struct wire_record, layout, 88);
SHM_ASSERT_AT(struct wire_record, position, 96);
SHM_ASSERT_AT(struct wire_record, last_byte, 104);
SHM_ASSERT_AT(struct wire_record, epoch, 108);
SHM_ASSERT_AT(struct wire_record, generation, 112);
SHM_ASSERT_AT(struct wire_record, tenant, 116);
SHM_ASSERT_AT(struct wire_record, flags, 120);
SHM_ASSERT_AT(struct wire_record, user_bytes, 122);
SHM_ASSERT_AT(struct wire_record, check, 124);

_Static_assert(sizeof(((struct shm_key *)0)->hash) == 32, "a key's hash");
_Static_assert(SHM_USER_BYTES == FORMAT_RECORD_BYTES, "user table and table have the same shape");
_Static_assert(FORMAT_SUPER_COPY >= FORMAT_SUPER_BYTES &&
                   FORMAT_SUPER_COPY + FORMAT_SUPER_BYTES <= FORMAT_TABLE,
               "superblocks and table do not overlap");

static const uint8_t magic[8] = {'k', 'v', 'd', 's', 'p', 'i', 'l', 'l'};

#define SLOT_BYTES_MAX  (4ull << 30)
#define FLAG_HAS_PARENT 1u
#define FLAG_LINKED     2u

static void put16(uint8_t *at, uint16_t v)
{
    v = htole16(v);
    memcpy(at, &v, sizeof(v));
}

static void put32(uint8_t *at, uint32_t v)
{
    v = htole32(v);
    memcpy(at, &v, sizeof(v));
}

static void put64(uint8_t *at, uint64_t v)
{
    v = htole64(v);
    memcpy(at, &v, sizeof(v));
}

static uint16_t get16(const uint8_t *at)
{
    uint16_t v;

    memcpy(&v, at, sizeof(v));
    return le16toh(v);
}

static uint32_t get32(const uint8_t *at)
{
    uint32_t v;

    memcpy(&v, at, sizeof(v));
    return le32toh(v);
}

static uint64_t get64(const uint8_t *at)
{
    uint64_t v;

    memcpy(&v, at, sizeof(v));
    return le64toh(v);
}

static bool all_zero(const uint8_t *at, size_t n)
{
    return n == 0 || (at[0] == 0 && memcmp(at, at + 1, n - 1) == 0);
}

static uint64_t round_up(uint64_t v, uint64_t unit)
{
    return (v + unit - 1) / unit * unit;
}

/* ---- geometry and layout */

/* As in a configuration: sentences quote it, so nothing may be in it that drives a terminal. */
static bool name_holds(const char name[64])
{
    size_t n = strnlen(name, 64);

    if (n == 0 || n == 64 || !all_zero((const uint8_t *)name + n, 64 - n))
        return false;
    for (size_t i = 0; i < n; i++)
        if (name[i] <= ' ' || name[i] > '~')
            return false;
    return true;
}

static bool geometry_holds(const struct format_geometry *g)
{
    return name_holds(g->space) && name_holds(g->pool) && g->parts >= 1 &&
           g->parts <= SHM_PARTS_MAX && g->part_bytes > 0 && g->part_bytes % FORMAT_SECTOR == 0 &&
           g->part_bytes <= SLOT_BYTES_MAX / g->parts;
}

static uint64_t slot_bytes(const struct format_geometry *g)
{
    return g->part_bytes * g->parts;
}

/* Where things lie follows from the number of records alone. At most 2^28 records of at most 4 GiB:
 * nothing overflows. */
static void lay_out(uint64_t records, struct format_super *s)
{
    uint64_t table_bytes = round_up(records * FORMAT_RECORD_BYTES, FORMAT_SECTOR);

    s->records = records;
    s->table = FORMAT_TABLE;
    s->user = s->table + table_bytes;
    s->data = round_up(s->user + table_bytes, FORMAT_PIECE);
    s->bytes = s->data + records * slot_bytes(&s->geometry);
}

static bool fits(uint64_t records, uint64_t bytes, struct format_super *s)
{
    lay_out(records, s);
    return s->bytes <= bytes;
}

int format_plan(const struct format_geometry *geometry, uint64_t bytes, struct format_super *ret)
{
    struct format_super s = {.geometry = *geometry};
    uint64_t least = 0, most;

    if (!geometry_holds(geometry))
        return -EINVAL;
    most = bytes / (slot_bytes(geometry) + 2ull * FORMAT_RECORD_BYTES);
    most = most < FORMAT_RECORDS_MAX ? most : FORMAT_RECORDS_MAX;
    while (least < most) {
        uint64_t middle = least + (most - least + 1) / 2;

        if (fits(middle, bytes, &s))
            least = middle;
        else
            most = middle - 1;
    }
    if (least == 0)
        return -ENOSPC;
    lay_out(least, &s);
    *ret = s;
    return 0;
}

static bool super_holds(const struct format_super *s)
{
    struct format_super same = {.geometry = s->geometry};

    if (!geometry_holds(&s->geometry) || s->records == 0 || s->records > FORMAT_RECORDS_MAX)
        return false;
    lay_out(s->records, &same);
    return s->table == same.table && s->user == same.user && s->data == same.data &&
           s->bytes >= same.bytes && s->bytes <= INT64_MAX;
}

/* ---- superblock */

static uint64_t super_check(const uint8_t bytes[FORMAT_SUPER_BYTES])
{
    return XXH3_64bits(bytes, offsetof(struct wire_super, check));
}

void format_super_encode(const struct format_super *super, uint8_t ret[FORMAT_SUPER_BYTES])
{
    const struct format_geometry *g = &super->geometry;
    struct wire_super *w = (struct wire_super *)ret;

    memset(w, 0, sizeof(*w));
    memcpy(w->magic, magic, sizeof(magic));
    put32(w->version, FORMAT_VERSION);
    put32(w->epoch, super->epoch);
    memcpy(w->uuid, super->uuid, sizeof(w->uuid));
    put64(w->sequence, super->sequence);
    put64(w->created_s, super->created_s);
    put64(w->records, super->records);
    put64(w->table, super->table);
    put64(w->user, super->user);
    put64(w->data, super->data);
    put64(w->bytes, super->bytes);
    put64(w->part_bytes, g->part_bytes);
    put32(w->parts, g->parts);
    put32(w->record_bytes, FORMAT_RECORD_BYTES);
    memcpy(w->space, g->space, sizeof(w->space));
    memcpy(w->pool, g->pool, sizeof(w->pool));
    memcpy(w->identity, g->identity, sizeof(w->identity));
    put64(w->check, super_check(ret));
}

static void super_read(const struct wire_super *w, struct format_super *s)
{
    struct format_geometry *g = &s->geometry;

    memset(s, 0, sizeof(*s));
    s->epoch = get32(w->epoch);
    memcpy(s->uuid, w->uuid, sizeof(s->uuid));
    s->sequence = get64(w->sequence);
    s->created_s = get64(w->created_s);
    s->records = get64(w->records);
    s->table = get64(w->table);
    s->user = get64(w->user);
    s->data = get64(w->data);
    s->bytes = get64(w->bytes);
    g->part_bytes = get64(w->part_bytes);
    g->parts = get32(w->parts);
    memcpy(g->space, w->space, sizeof(g->space));
    memcpy(g->pool, w->pool, sizeof(g->pool));
    memcpy(g->identity, w->identity, sizeof(g->identity));
}

/* The check before the version: a flipped bit in the version is damage, not a newer kvd. Magic, version
 * and check stay where they are in all versions. */
int format_super_decode(const uint8_t bytes[FORMAT_SUPER_BYTES], struct format_super *ret)
{
    const struct wire_super *w = (const struct wire_super *)bytes;
    struct format_super s;

    if (all_zero(bytes, FORMAT_SUPER_BYTES))
        return -ENODATA;
    if (memcmp(w->magic, magic, sizeof(magic)) != 0)
        return -EBADMSG;
    if (get64(w->check) != super_check(bytes))
        return -EILSEQ;
    if (get32(w->version) != FORMAT_VERSION)
        return -EPROTONOSUPPORT;
    super_read(w, &s);
    if (!super_holds(&s) || s.epoch > FORMAT_EPOCH_MAX ||
        get32(w->record_bytes) != FORMAT_RECORD_BYTES || !all_zero(w->zero, sizeof(w->zero)))
        return -EINVAL;
    *ret = s;
    return 0;
}

static int differs(char *why, size_t n, const char *what, const char *store, const char *pool)
{
    snprintf(why, n, "the store is of %s %s, this pool is of %s", what, store, pool);
    return -EMEDIUMTYPE;
}

const char *format_size(uint64_t bytes, bool exact, char buf[static FORMAT_SIZE_TEXT])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    unsigned unit = 0, shift;

    while (unit < 4 && bytes >> 10 * (unit + 1) && !(exact && bytes >> 10 * unit & 1023))
        unit++;
    shift = 10 * unit;
    if (bytes & ((1ull << shift) - 1) && bytes >> shift < 100)
        snprintf(buf, FORMAT_SIZE_TEXT, "%.1f %s", (double)bytes / (double)(1ull << shift),
                 units[unit]);
    else
        snprintf(buf, FORMAT_SIZE_TEXT, "%llu %s", (unsigned long long)(bytes >> shift),
                 units[unit]);
    return buf;
}

static int slots_differ(const struct format_geometry *store, const struct format_geometry *pool,
                        char *ret_why, size_t why_bytes)
{
    char was[FORMAT_SIZE_TEXT], is[FORMAT_SIZE_TEXT];

    snprintf(ret_why, why_bytes,
             "the store has slots of %s (%u part%s), this pool of %s (%u part%s)",
             format_size(store->part_bytes * store->parts, true, was), store->parts,
             store->parts == 1 ? "" : "s", format_size(pool->part_bytes * pool->parts, true, is),
             pool->parts, pool->parts == 1 ? "" : "s");
    return -EMEDIUMTYPE;
}

int format_compare(const struct format_geometry *store, const struct format_geometry *pool,
                   char *ret_why, size_t why_bytes)
{
    if (memcmp(store->space, pool->space, sizeof(store->space)) != 0)
        return differs(ret_why, why_bytes, "space", store->space, pool->space);
    if (memcmp(store->pool, pool->pool, sizeof(store->pool)) != 0)
        return differs(ret_why, why_bytes, "pool", store->pool, pool->pool);
    if (store->part_bytes != pool->part_bytes || store->parts != pool->parts)
        return slots_differ(store, pool, ret_why, why_bytes);
    if (memcmp(store->identity, pool->identity, sizeof(store->identity)) != 0) {
        snprintf(ret_why, why_bytes,
                 "the store was filled by another model or key scheme of the same name (weights "
                 "revision, dtype, geometry, scheme or first parent differ)");
        return -EMEDIUMTYPE;
    }
    return 0;
}

/* ---- records */

static uint32_t record_check(const uint8_t bytes[FORMAT_RECORD_BYTES],
                             const struct format_super *super, uint32_t number)
{
    uint8_t place[20];

    memcpy(place, super->uuid, sizeof(super->uuid));
    put32(place + sizeof(super->uuid), number);
    return (uint32_t)XXH3_64bits_withSeed(bytes, offsetof(struct wire_record, check),
                                          XXH3_64bits(place, sizeof(place)));
}

static void record_write(const struct format_record *r, struct wire_record *w)
{
    memset(w, 0, sizeof(*w));
    memcpy(w->hash, r->key.hash, sizeof(w->hash));
    put32(w->group, r->key.group);
    if (r->has_parent) {
        memcpy(w->parent, r->parent.hash, sizeof(w->parent));
        put32(w->parent_group, r->parent.group);
    }
    put64(w->digest, r->digest);
    put64(w->checksum, r->checksum);
    put64(w->layout, r->layout);
    put64(w->position, r->position);
    put32(w->last_byte, (uint32_t)(r->bytes - 1));
    put32(w->epoch, r->epoch);
    put32(w->generation, r->generation);
    put32(w->tenant, r->tenant);
    put16(w->flags, (uint16_t)((r->has_parent ? FLAG_HAS_PARENT : 0) |
                               (r->has_parent && r->linked ? FLAG_LINKED : 0)));
    put16(w->user_bytes, (uint16_t)r->user_bytes);
}

void format_record_encode(const struct format_record *record, const struct format_super *super,
                          uint32_t number, uint8_t ret[FORMAT_RECORD_BYTES])
{
    struct wire_record *w = (struct wire_record *)ret;

    record_write(record, w);
    put32(w->check, record_check(ret, super, number));
}

static void record_read(const struct wire_record *w, struct format_record *r)
{
    memcpy(r->key.hash, w->hash, sizeof(w->hash));
    r->key.group = get32(w->group);
    memcpy(r->parent.hash, w->parent, sizeof(w->parent));
    r->parent.group = get32(w->parent_group);
    r->has_parent = get16(w->flags) & FLAG_HAS_PARENT;
    r->linked = get16(w->flags) & FLAG_LINKED;
    r->digest = get64(w->digest);
    r->checksum = get64(w->checksum);
    r->layout = get64(w->layout);
    r->position = get64(w->position);
    r->bytes = (uint64_t)get32(w->last_byte) + 1;
    r->epoch = get32(w->epoch);
    r->generation = get32(w->generation);
    r->tenant = get32(w->tenant);
    r->user_bytes = get16(w->user_bytes);
}

static bool record_holds(const struct wire_record *w, const struct format_record *r,
                         const struct format_super *super, uint32_t number)
{
    if (number >= super->records || r->bytes > super->geometry.part_bytes ||
        r->user_bytes > SHM_USER_BYTES || (get16(w->flags) & ~(FLAG_HAS_PARENT | FLAG_LINKED)) ||
        (r->linked && !r->has_parent))
        return false;
    return r->has_parent ||
           (r->parent.group == 0 && all_zero(r->parent.hash, sizeof(r->parent.hash)));
}

int format_record_decode(const uint8_t bytes[FORMAT_RECORD_BYTES], const struct format_super *super,
                         uint32_t number, struct format_record *ret)
{
    const struct wire_record *w = (const struct wire_record *)bytes;
    struct format_record r;

    if (all_zero(bytes, FORMAT_RECORD_BYTES))
        return -ENODATA;
    if (get32(w->check) != record_check(bytes, super, number))
        return -EILSEQ;
    record_read(w, &r);
    if (!record_holds(w, &r, super, number))
        return -EINVAL;
    *ret = r;
    return 0;
}

/* ---- digest */

#define DIGEST_RUN 64u /* pieces hashed at once */

/* Pieces in runs, each run seeded with what came before: no state to allocate, whatever the length. */
static uint64_t digest_pieces(uint64_t so_far, const uint64_t *pieces, uint32_t n)
{
    uint8_t run[DIGEST_RUN * 8];

    for (uint32_t i = 0; i < n; i += DIGEST_RUN) {
        uint32_t now = n - i < DIGEST_RUN ? n - i : DIGEST_RUN;

        for (uint32_t k = 0; k < now; k++)
            put64(run + 8 * k, pieces[i + k]);
        so_far = XXH3_64bits_withSeed(run, 8 * (size_t)now, so_far);
    }
    return so_far;
}

uint64_t format_digest(const struct format_record *record, const struct format_super *super,
                       const uint8_t *user, const uint64_t *pieces, uint32_t n_pieces)
{
    struct {
        struct wire_record record;
        uint8_t uuid[16];
        uint8_t user[SHM_USER_BYTES];
    } head;
    uint32_t n = record->user_bytes < SHM_USER_BYTES ? record->user_bytes : SHM_USER_BYTES;

    record_write(record, &head.record);
    put64(head.record.digest, 0);
    memcpy(head.uuid, super->uuid, sizeof(head.uuid));
    if (n > 0)
        memcpy(head.user, user, n);
    return digest_pieces(XXH3_64bits(&head, sizeof(head) - SHM_USER_BYTES + n), pieces, n_pieces);
}

/* ---- pieces and places */

static uint32_t pieces_of_part(uint64_t used)
{
    return (uint32_t)((used + FORMAT_PIECE - 1) / FORMAT_PIECE);
}

uint32_t format_pieces(const struct format_geometry *geometry, uint64_t part_bytes_used)
{
    return geometry->parts * pieces_of_part(part_bytes_used);
}

struct format_piece format_piece_at(const struct format_geometry *geometry,
                                    uint64_t part_bytes_used, uint32_t i)
{
    uint32_t each = pieces_of_part(part_bytes_used);
    struct format_piece p = {.part = i / each, .in_part = (uint64_t)(i % each) * FORMAT_PIECE};
    uint64_t left = part_bytes_used - p.in_part;

    p.bytes = (uint32_t)(left < FORMAT_PIECE ? left : FORMAT_PIECE);
    p.in_slot = p.part * geometry->part_bytes + p.in_part;
    return p;
}

uint64_t format_slot_offset(const struct format_super *super, uint32_t number)
{
    return super->data + number * slot_bytes(&super->geometry);
}

uint64_t format_sector_offset(const struct format_super *super, uint32_t number)
{
    return super->table + (uint64_t)(number / FORMAT_IN_SECTOR) * FORMAT_SECTOR;
}

uint64_t format_user_sector_offset(const struct format_super *super, uint32_t number)
{
    return super->user + (uint64_t)(number / FORMAT_IN_SECTOR) * FORMAT_SECTOR;
}
