/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a spill store looks like on a file or a block device. docs/spill-format.md tells it byte by byte;
 * here it is asserted. All numbers are little-endian, whatever the host.
 *
 *      0        superblock, first copy       4 KiB
 *      64 KiB   superblock, second copy      4 KiB
 *      1 MiB    table: a record of 128 bytes for each slot
 *      ...      user table: 128 bytes for each slot, the caller's own metadata
 *      ...      data: slots of slot_bytes each, from a multiple of 1 MiB on
 *
 * Record i describes slot i; a record of zeros describes nothing. Nothing is ever synced but a superblock:
 * a record is believed only when its check fits, and data only when the record's digest fits, so what a
 * crash has torn is a miss.
 *
 * Pure functions: no I/O, no allocation. Every byte they read may be hostile.
 */
#ifndef KVD_SPILL_FORMAT_H
#define KVD_SPILL_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/layout.h"

#define FORMAT_VERSION      1u
#define FORMAT_SUPER_BYTES  4096u
#define FORMAT_SUPER_COPY   65536u /* offset of the second copy; the first is at 0 */
#define FORMAT_TABLE        1048576u
#define FORMAT_RECORD_BYTES 128u
#define FORMAT_SECTOR       4096u /* table and user table are written in units of it */
#define FORMAT_IN_SECTOR    (FORMAT_SECTOR / FORMAT_RECORD_BYTES) /* 32 */
#define FORMAT_PIECE        1048576u /* transfers and digests are cut at multiples of it within a part */
/* Epochs count up and never wrap: nobody resets a space four billion times. */
#define FORMAT_EPOCH_MAX   0xf0000000u
#define FORMAT_RECORDS_MAX (SHM_SLOTS_MAX - 1)

/* What must be equal for a store to be used by a pool. */
struct format_geometry {
    char space[64], pool[64];
    uint8_t identity[16]; /* XXH3-128 of key scheme, first parent and the space's identity */
    uint64_t part_bytes;  /* a multiple of 4,096 */
    uint32_t parts;
};

struct format_super {
    struct format_geometry geometry;
    uint8_t uuid[16];           /* of the store; random, made by formatting */
    uint64_t sequence;          /* of the superblock: the higher valid copy counts */
    uint64_t created_s;         /* UNIX time of formatting */
    uint64_t records;           /* slots of the store */
    uint64_t table, user, data; /* offsets */
    uint64_t bytes;             /* of the whole store */
    uint32_t epoch;             /* of the space: records of other epochs are nothing */
};

/* The superblock of a store of at most `bytes` bytes: offsets, and as many records as fit. -ENOSPC: not
 * even one; -EINVAL: geometry. uuid, times, epoch are the caller's. */
int format_plan(const struct format_geometry *geometry, uint64_t bytes, struct format_super *ret);

void format_super_encode(const struct format_super *super, uint8_t ret[FORMAT_SUPER_BYTES]);

/* One copy. -ENODATA: all zero; -EBADMSG: not a superblock of kvd; -EPROTONOSUPPORT: of another version;
 * -EILSEQ: its check does not fit; -EINVAL: the numbers in it contradict each other. */
int format_super_decode(const uint8_t bytes[FORMAT_SUPER_BYTES], struct format_super *ret);

/* Are they equal? 0, or -EMEDIUMTYPE with a sentence that says which is different, and how. */
int format_compare(const struct format_geometry *store, const struct format_geometry *pool,
                   char *ret_why, size_t why_bytes);

#define FORMAT_SIZE_TEXT 32

/* "64 KiB", for people; `exact`: in the largest unit in which it is a whole number, else with one digit
 * behind the point. Returns buf. */
const char *format_size(uint64_t bytes, bool exact, char buf[static FORMAT_SIZE_TEXT]);

struct format_record {
    struct shm_key key, parent;
    bool has_parent;
    bool
        linked; /* its parent's record was there when it was written: without it, nobody gets here */
    uint64_t digest;   /* format_digest() */
    uint64_t checksum; /* the writer's own */
    uint64_t layout, position;
    uint64_t bytes; /* of one part, 1 .. part_bytes */
    uint32_t epoch;
    uint32_t generation; /* counts the records written; order of writing */
    uint32_t tenant;
    uint32_t user_bytes; /* in the user table */
};

/* `number` and the store's uuid go into the check: a record at another place, or of another store, is
 * none. */
void format_record_encode(const struct format_record *record, const struct format_super *super,
                          uint32_t number, uint8_t ret[FORMAT_RECORD_BYTES]);

/* 0; -ENODATA: zeros; -EILSEQ: the check does not fit; -EINVAL: sizes that cannot be. */
int format_record_decode(const uint8_t bytes[FORMAT_RECORD_BYTES], const struct format_super *super,
                         uint32_t number, struct format_record *ret);

/*
 * The digest of an object: XXH3-64 over everything in its record but the digest itself (key, parent,
 * sizes, epoch, metadata, generation), its user bytes, and the XXH3-64 of each of its pieces in order:
 * part by part, each cut at multiples of FORMAT_PIECE, the last one shorter. So pieces can be hashed by
 * several threads in any order.
 */
uint64_t format_digest(const struct format_record *record, const struct format_super *super,
                       const uint8_t *user, const uint64_t *pieces, uint32_t n_pieces);

/* How many pieces an object has, and where the i-th lies. `bytes` is what is hashed; transfers go up to
 * the next multiple of 4,096, which is still inside the part. */
struct format_piece {
    uint32_t part;
    uint32_t bytes;
    uint64_t in_part; /* offset from the beginning of the part */
    uint64_t in_slot; /* offset from the beginning of the store's slot */
};

uint32_t format_pieces(const struct format_geometry *geometry, uint64_t part_bytes_used);
struct format_piece format_piece_at(const struct format_geometry *geometry,
                                    uint64_t part_bytes_used, uint32_t i);

/* Offsets in the file. */
uint64_t format_slot_offset(const struct format_super *super, uint32_t number);
uint64_t format_sector_offset(const struct format_super *super,
                              uint32_t number); /* of its record */
uint64_t format_user_sector_offset(const struct format_super *super,
                                   uint32_t number); /* of its user bytes */

#endif
