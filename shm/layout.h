/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies in shared memory, who writes it, and why that is safe without a lock.
 *
 * SEGMENTS. All are made by the daemon (daemon/segment_make.c), all begin with a struct shm_header.
 *
 *   core      1 per daemon           daemon writes          every session reads
 *   index     1 per pool             daemon writes          sessions of the space read
 *   meta      1 per pool             daemon writes          sessions of the space read
 *   nvme      1 per pool with stores daemon writes          sessions of the space read
 *   slots     1 per pool             daemon writes          nobody else: for its successor
 *   data      1 per chunk and part   writers of the space   sessions of the space read
 *   session   1 per session          its process writes     the daemon reads; writes some lines
 *   pins      1 per session, pool    its process writes     the daemon reads
 *
 * A session maps core, index, nvme, meta and data read-only (data a second time writable, if it may
 * write), so the worst a stray pointer of a reader can do is to fault.
 *
 * ONE WRITER. Every word below has exactly one writing process. Only the daemon's core thread
 * writes an index, so inserts and removals need no lock among themselves; readers meet them through
 * the entry's `word`, which is stored last and re-read by whoever needs certainty.
 *
 * AN INDEX ENTRY is one cache line. Its key, group and epoch change only while the word is EMPTY;
 * its length only while the word is not LIVE. States of the word:
 *
 *      EMPTY ──reserve──> PENDING ──commit──> LIVE <──────> LEAVING ──> EMPTY
 *                            └──abort, death, reset──> EMPTY    (somebody pinned it: back to LIVE)
 *
 *   A reader that finds LIVE has found committed bytes: they were written before the commit was
 *   posted (release, by the writer), read by the core (acquire) and published by the store of the
 *   word (release, here) that the reader loaded (acquire).
 *
 * THE NVME INDEX of a pool is a table of the same kind with one LIVE entry for each object in the pool's
 *   spill stores, whether the object is in ram as well or not. It is a table of its own, so that a full
 *   store, which has many times the pool's objects, costs a lookup of resident keys nothing. Its "slot"
 *   numbers are those of the daemon's records; nobody pins there. What is found in it and not in the
 *   pool's index must be fetched first.
 *
 * PROBING is linear from the key's home line. `overflow` of a line counts the keys that live
 * further along and passed this line when they were inserted; a probe stops at the first line that
 * has none. No tombstones, so the table does not rot: a key's removal takes back what its insertion
 * added. A key that stays in the table is never missed while others come and go, because the
 * counters on its path stay >= 1.
 *
 * PINNING is a hazard pointer across processes: a counter per slot and session.
 *
 *      reader                                      core
 *      R1 load word: LIVE and a slot; key fits     A0 look at all counters, skip if any is not 0
 *      R2 pins[slot]++                             A1 word = LEAVING
 *      R3 full fence                               A2 full fence
 *      R4 re-load word: the same? Then compare     A3 any counter != 0 -> word = LIVE again
 *         the key again. No: pins[slot]--, retry   A4 else word = EMPTY, generation + 1; reuse
 *
 *   Either the core sees the counter (A3) or the reader sees LEAVING (R4): the two fences order
 *   store before load on both sides. The key is compared under the pin, after R4, so the protocol
 *   does not lean on the generation not wrapping: what is pinned and LIVE cannot change its key.
 *   tests/model/pin.pml is this protocol; it fails without either fence, without the re-load,
 *   without the check.
 *
 *   Release (R5) is one decrement (release order; A0/A3 load with acquire): no load of the slot's
 *   bytes moves after it. Beside the counter lies the stamp of the last use, in ticks of the pool's
 *   clock: that is how uses reach the eviction policy without a message. A session can lie in both;
 *   it can keep its own slots alive (quotas are for that), never free somebody else's.
 *
 *   A dead process's pin segments are taken out of the scan, nothing more. Nobody has to repair
 *   anything.
 *
 * RINGS. One producer, one consumer each. The consumer's index and the producer's index are on
 * lines of their own. The daemon keeps its own copies of its indices and never reads them back; it
 * takes the peer's index, checks that the distance is at most the ring's size, copies the entry out
 * and uses only the copy: the bytes may change under its hands. A distance that cannot be ends the
 * session.
 *
 * SLEEPING. Core: S1 core->sleeping = 1, S2 full fence, S3 rescan all request rings, S4 epoll_wait.
 * Session: W1 store the ring's tail, W2 full fence, W3 load core->sleeping, W4 if set send Wake on
 * the socket. Either S3 sees the tail or W3 sees the flag. The same the other way round with
 * session->waiting (tests/model/wake.pml).
 *
 * Only 8-byte and smaller atomics: a 16-byte load may be a locked read-modify-write, which faults
 * on a read-only page.
 *
 * Layouts carry SHM_VERSION; whoever maps a segment checks magic, version and kind before anything
 * else.
 */
#ifndef KVD_SHM_LAYOUT_H
#define KVD_SHM_LAYOUT_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SHM_MAGIC      0x006d68732d64766bull /* "kvd-shm\0" */
#define SHM_VERSION    1u
#define SHM_PAGE       4096u
#define SHM_LINE       64u

#define SHM_NO_SLOT    UINT32_MAX
#define SHM_SLOT_BITS  28u /* 268,435,456 slots of a pool: 1 TiB of 4 KiB slots */
#define SHM_SLOTS_MAX  (1u << SHM_SLOT_BITS)
#define SHM_PARTS_MAX  64u
#define SHM_USER_BYTES 128u

/* The golden rule of a file that two programs map: its offsets are asserted, not hoped for. */
#define SHM_ASSERT_AT(type, field, offset)                                                         \
    _Static_assert(offsetof(type, field) == (offset), #type "." #field " moved")

enum shm_kind {
    SHM_CORE = 1,
    SHM_INDEX = 2,
    SHM_META = 3,
    SHM_SLOTS = 4,
    SHM_SESSION = 5,
    SHM_PINS = 6,
    SHM_NVME = 7, /* a struct shm_index */
};

struct shm_header {
    uint64_t magic;
    uint32_t version;
    uint32_t kind;        /* enum shm_kind */
    uint64_t bytes;       /* of the whole segment */
    uint8_t instance[16]; /* the run of the daemon that made it */
    uint32_t space;
    uint32_t pool;
    uint64_t count; /* lines, slots or ring entries */
    uint64_t zero;
};
_Static_assert(sizeof(struct shm_header) == SHM_LINE, "one line");

struct shm_key {
    uint8_t hash[32];
    uint32_t group;
};
_Static_assert(sizeof(struct shm_key) == 36, "no padding");

/* ---- core */

struct shm_core {
    struct shm_header header;
    alignas(SHM_LINE) _Atomic uint32_t sleeping; /* S1; read at W3 */
};
_Static_assert(sizeof(struct shm_core) <= SHM_PAGE, "one page");

/* ---- index */

enum shm_state {
    SHM_EMPTY = 0,
    SHM_PENDING = 1,
    SHM_LIVE = 2,
    SHM_LEAVING = 3,
};

/* word = generation:32 | state:4 | slot:28 */
static inline uint64_t shm_word(uint32_t generation, enum shm_state state, uint32_t slot)
{
    return (uint64_t)generation << 32 | (uint64_t)state << SHM_SLOT_BITS | slot;
}

static inline enum shm_state shm_word_state(uint64_t word)
{
    return (enum shm_state)((uint32_t)word >> SHM_SLOT_BITS);
}

static inline uint32_t shm_word_slot(uint64_t word)
{
    return (uint32_t)word & (SHM_SLOTS_MAX - 1);
}

static inline uint32_t shm_word_generation(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

struct shm_entry {
    _Atomic uint64_t key[4];
    _Atomic uint64_t scope; /* group and epoch: the rest of what must be equal */
    _Atomic uint64_t word;
    uint64_t zero;
    _Atomic uint32_t overflow;  /* belongs to the line, not to the key in it */
    _Atomic uint32_t last_byte; /* committed length of one part, minus 1: 4 GiB fits */
};
_Static_assert(sizeof(struct shm_entry) == SHM_LINE, "one cache miss per key");
SHM_ASSERT_AT(struct shm_entry, scope, 32);
SHM_ASSERT_AT(struct shm_entry, word, 40);
SHM_ASSERT_AT(struct shm_entry, overflow, 56);
SHM_ASSERT_AT(struct shm_entry, last_byte, 60);

static inline uint64_t shm_scope(uint32_t group, uint32_t epoch)
{
    return (uint64_t)epoch << 32 | group;
}

struct shm_index {
    struct shm_header header; /* count: lines, a power of two */
    uint64_t seed[2];
    uint64_t slots;
    uint64_t part_bytes;
    uint64_t chunk_slots;
    uint32_t parts;
    uint32_t chunks;
    /* what changes while readers look, on a line of its own */
    alignas(SHM_LINE) _Atomic uint32_t epoch;
    _Atomic uint32_t tick; /* the pool's clock: so many per turnover, and one every two seconds */
    _Atomic uint32_t
        retired; /* a successor has made other segments: nothing here may be hit any more */
    alignas(SHM_PAGE) struct shm_entry lines[];
};
SHM_ASSERT_AT(struct shm_index, seed, 64);
SHM_ASSERT_AT(struct shm_index, epoch, 128);
SHM_ASSERT_AT(struct shm_index, tick, 132);
SHM_ASSERT_AT(struct shm_index, retired, 136);
SHM_ASSERT_AT(struct shm_index, lines, SHM_PAGE);

/* ---- metadata: by slot, written before the entry turns LIVE, read under a pin */

struct shm_meta {
    struct shm_key key;
    struct shm_key parent;
    uint32_t has_parent;
    uint32_t tenant;
    uint64_t position;
    uint64_t layout;
    uint64_t checksum;
    uint32_t epoch;
    uint32_t user_bytes;
    uint64_t bytes; /* of one part */
    uint64_t zero;
    uint8_t user[SHM_USER_BYTES];
};
_Static_assert(sizeof(struct shm_meta) == 256, "four lines");
SHM_ASSERT_AT(struct shm_meta, has_parent, 72);
SHM_ASSERT_AT(struct shm_meta, position, 80);
SHM_ASSERT_AT(struct shm_meta, user, 128);

struct shm_metas {
    struct shm_header header; /* count: slots */
    alignas(SHM_PAGE) struct shm_meta metas[];
};

/* ---- slot table: what a successor must know, written before a slot is granted */

enum shm_slot_state {
    SHM_SLOT_FREE = 0,
    SHM_SLOT_RESERVED = 1,
    SHM_SLOT_LIVE = 2,
    SHM_SLOT_IN_FLIGHT = 3, /* an I/O of the daemon runs on it */
    SHM_SLOT_QUARANTINED = 4,
};

struct shm_slot {
    uint32_t state; /* enum shm_slot_state; stored after the other fields when a slot is granted */
    uint32_t session; /* the writer while reserved */
    uint64_t ticket;  /* operation << SHM_SLOT_BITS | slot; 0 when nothing was ever granted */
    uint64_t parts_done;
    uint64_t bytes; /* of one part, from the first commit */
    uint32_t epoch;
    uint32_t line; /* of the index */
    uint64_t zero[3];
};
_Static_assert(sizeof(struct shm_slot) == SHM_LINE, "one line");

struct shm_slots {
    struct shm_header header; /* count: slots */
    alignas(SHM_PAGE) struct shm_slot slots[];
};

/* ---- pins */

struct shm_pin {
    _Atomic uint32_t count; /* R2; read at A0 and A3 */
    _Atomic uint32_t stamp; /* tick of the last pin or release */
};
_Static_assert(sizeof(struct shm_pin) == 8, "eight to a line");

struct shm_pins {
    struct shm_header header; /* count: slots */
    alignas(SHM_PAGE) struct shm_pin pins[];
};

/* ---- session: rings */

enum shm_op {
    SHM_RESERVE = 1,
    SHM_COMMIT = 2,
    SHM_OBSERVE = 3, /* no completion */
    SHM_FETCH = 4,
    SHM_CANCEL = 5, /* no completion */
};

#define SHM_OBSERVE_KEYS 6u

enum {
    SHM_HAS_PARENT = 1 << 0,
    /* Fetch: goes with the entry before it. Once one of such a batch is refused at once, the rest is not tried:
     * its status is theirs. */
    SHM_GOES_ON = 1 << 1,
};

struct shm_request {
    uint8_t op;    /* enum shm_op */
    uint8_t flags; /* SHM_HAS_PARENT */
    uint16_t part;
    uint32_t pool;
    uint64_t user_data;
    uint64_t ticket;
    uint32_t epoch;
    uint32_t tenant;
    union {
        struct {
            struct shm_key key;
            struct shm_key parent;
        } reserve;
        struct {
            uint64_t bytes;
            uint64_t position;
            uint64_t layout;
            uint64_t checksum;
            uint32_t user_bytes;
            uint8_t user[SHM_USER_BYTES];
        } commit;
        struct {
            uint32_t n;
            struct shm_key keys[SHM_OBSERVE_KEYS];
        } observe;
        struct {
            struct shm_key key;
            uint32_t deadline_ms; /* 0: the daemon's */
        } fetch;
        struct {
            uint64_t user_data; /* of fetches whose user_data is in [user_data, user_data + n) */
            uint64_t n;
        } cancel;
        uint8_t bytes[224];
    };
};
_Static_assert(sizeof(struct shm_request) == 256, "four lines");

struct shm_completion {
    uint64_t user_data;
    uint64_t ticket;
    int32_t status;
    uint32_t slot;
    uint64_t zero;
};
_Static_assert(sizeof(struct shm_completion) == 32, "two to a line");

/* Indices count up for ever; entry = index & (entries - 1). */
struct shm_ring {
    alignas(SHM_LINE) _Atomic uint32_t head; /* of the consumer */
    alignas(SHM_LINE) _Atomic uint32_t tail; /* of the producer */
};

struct shm_session {
    struct shm_header header;                   /* count: entries of each ring, a power of two */
    alignas(SHM_LINE) _Atomic uint32_t waiting; /* the process polls for completions */
    struct shm_ring requests;                   /* daemon writes head, process writes tail */
    struct shm_ring completions;                /* process writes head, daemon writes tail */
    alignas(SHM_PAGE) struct shm_request request[];
    /* then `count` completions, at shm_completions_offset() */
};
SHM_ASSERT_AT(struct shm_session, waiting, 64);
SHM_ASSERT_AT(struct shm_session, requests, 128);
SHM_ASSERT_AT(struct shm_session, completions, 256);
SHM_ASSERT_AT(struct shm_session, request, SHM_PAGE);

#define SHM_RING_MIN 16u
#define SHM_RING_MAX 16384u

static inline size_t shm_completions_offset(uint32_t entries)
{
    return SHM_PAGE + (size_t)entries * sizeof(struct shm_request);
}

static inline size_t shm_session_bytes(uint32_t entries)
{
    return shm_completions_offset(entries) + (size_t)entries * sizeof(struct shm_completion);
}

static inline size_t shm_index_bytes(uint64_t lines)
{
    return SHM_PAGE + lines * sizeof(struct shm_entry);
}

static inline size_t shm_metas_bytes(uint64_t slots)
{
    return SHM_PAGE + slots * sizeof(struct shm_meta);
}

static inline size_t shm_slots_bytes(uint64_t slots)
{
    return SHM_PAGE + slots * sizeof(struct shm_slot);
}

static inline size_t shm_pins_bytes(uint64_t slots)
{
    return SHM_PAGE + slots * sizeof(struct shm_pin);
}

/* ---- fences */

/* Orders earlier stores before later loads. Never mfence, which also waits for later loads to be
 * issued and costs a loop of cold lookups a factor of four; clang emits it for
 * atomic_thread_fence(seq_cst). */
static inline void shm_full_fence(void)
{
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    __asm__ volatile("lock orl $0, -4(%%rsp)" ::: "memory", "cc");
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

#endif
