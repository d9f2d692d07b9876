/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the tier share. Nobody else includes this. */
#ifndef KVD_SPILL_ENGINE_H
#define KVD_SPILL_ENGINE_H

#include "daemon/policy.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "daemon/spill/digest.h"
#include "daemon/spill/format.h"
#include "daemon/spill/io.h"
#include "daemon/spill/spill.h"
#include "daemon/spill/store.h"

#define NO_RECORD UINT32_MAX

/* ---- records.c: what a pool's stores hold */

enum record_state {
    RECORD_FREE = 0,
    RECORD_WRITING, /* data or record is on its way; nobody finds it yet */
    RECORD_STORED,  /* in the nvme index */
};

/* 36 bytes. With the index line (at most two thirds full) and the policy's 12 bytes, what a stored
 * object costs. */
struct record {
    uint32_t line;       /* of the nvme index */
    uint32_t parent;     /* record of the parent, NO_RECORD: unknown, or not stored */
    uint32_t parent_use; /* its `use` when the link was made */
    uint32_t use; /* the generation that was written: who kept a number sees that it is another */
    uint32_t
        children;  /* that name this as parent, stored or on their way: it stays as long as they do
                        * (I2) */
    uint32_t slot; /* SLOT_NONE, or where the object is in ram */
    uint32_t tick; /* last use; while loading: unused */
    uint32_t tenant;
    uint8_t state;   /* enum record_state */
    uint8_t reads;   /* transfers that read it: it must not be given to another object */
    bool queued : 1; /* the policy has it */
    bool has_user : 1;
    bool doomed : 1; /* to be forgotten when nobody reads it any more */
};

/* Of a slot in ram. */
enum spilled {
    SPILLED_NO = 0,  /* not stored, not wanted */
    SPILLED_QUEUED,  /* waits to be written */
    SPILLED_BLOCKED, /* waits for its parent, which a writer has reserved */
    SPILLED_WRITING, /* a transfer has it */
    SPILLED_STORED,  /* record */
    SPILLED_READING, /* a transfer fills it */
};

struct spill_slot {
    uint8_t state; /* enum spilled */
    bool touched;  /* used since its commit */
    bool orphan;   /* counted as one */
    bool awaited;  /* not LIVE yet, and children wait for it */
    uint32_t record;
    struct transfer *transfer; /* writing, reading */
};

struct spill {
    struct nvme *nvme;
    struct pool *pool;
    struct store *stores[8];
    uint32_t n_stores;
    uint32_t next_store; /* round robin */
    struct segment index_segment;
    struct segment_mapping index_map;
    struct record *records;
    uint32_t n_records;
    uint32_t used; /* STORED */
    struct spill_slot *slots;
    struct slot_link *links; /* of the two lists */
    struct slot_list queue, blocked;
    uint32_t writing; /* transfers */
    bool purging;     /* records of older epochs are still being dropped */
    uint32_t purge_cursor;
    uint32_t generation;
    bool again; /* writing can go on at once, though nothing was begun */
    struct spill_stats stats;
};

/* A free record of the store, or the coldest tail's, for a child of `parent` (NO_RECORD: of nobody), which
 * stays as long as the child does. NO_RECORD: everything is in use. */
uint32_t record_take(struct store *st, uint32_t parent);

/* RECORD_WRITING -> STORED: it is found from now on. */
int record_store(struct spill *s, uint32_t r, const struct format_record *m);

/* Any state -> FREE. Of a STORED one that is not being read. */
void record_free(struct spill *s, uint32_t r);

/* The object must not come back: the record goes, on the medium, too; as soon as nobody reads it. */
void record_forget(struct spill *s, uint32_t r);
void record_read_end(struct store *st, uint32_t r); /* after `reads` was counted down */

void record_touch(struct spill *s, uint32_t r);
struct store *record_store_of(const struct spill *s, uint32_t r);
struct shm_key record_key(const struct spill *s, uint32_t r);
uint32_t record_find(const struct spill *s, const struct shm_key *key, uint32_t epoch);

/* Loading: one record of the table; then, when all are in, parents and order of age. */
void record_prefetch(const struct store *st, const struct store_loaded *l);
void record_load(struct store *st, const struct store_loaded *l);

/* Before that: links of other stores' records to this one's former ones must not come to life again. */
void record_unlink_store(const struct store *st);
void record_loaded(struct store *st);

/* A step of dropping records of older epochs. True: there is more. */
bool record_purge(struct spill *s);

/* Drops what a store holds from the index; a step. */
bool record_drop_store(struct store *st);

/* ---- device.c: a store */

enum store_state {
    STORE_OFFLINE,
    STORE_STARTING, /* a task opens or formats it */
    STORE_ONLINE,
    STORE_CLOSING, /* goes offline as soon as nothing is in flight */
};

struct unresolved { /* a loaded record whose parent was not loaded yet */
    uint32_t record, use;
    uint32_t epoch;
    bool linked; /* it must not be without */
    struct shm_key parent;
};

struct piece;
struct sectors;

struct store {
    struct nvme *nvme;
    struct spill *spill;
    struct list in_nvme;
    uint32_t id; /* in cookies */
    char name[64], path[192], full_name[200];
    uint64_t bytes;
    bool second_touch;
    uint64_t bandwidth, wear;
    uint32_t depth;
    uint32_t backend, register_pages;

    enum store_state state;
    bool read_only;
    char problem[512], fix[512], note[256], io_text[96];
    struct store_task *task;
    enum store_job job;
    struct store_file file; /* fd -1: closed */
    struct io *io;
    uint32_t base;       /* first record */
    uint32_t planned;    /* records that the index has room for */
    uint32_t records;    /* of them, those that the store has */
    uint32_t used;       /* STORED */
    uint64_t *free_bits; /* 1: free */
    uint32_t rotor;
    uint32_t passed_over; /* records that eviction has met in use since it last found one */
    bool take_again;
    struct policy *policy;
    struct unresolved *unresolved;
    size_t n_unresolved, max_unresolved;
    bool dropping; /* gone offline: its records leave the index */
    uint32_t drop_cursor;

    struct piece *pieces;
    uint32_t n_pieces, free_piece;
    uint32_t in_io, in_write; /* pieces with the device; of them, writes */
    uint32_t busy_pieces;
    struct sectors *sectors;
    uint32_t erase_tries; /* that have failed in a row */
    uint32_t
        *erase; /* records to be erased whose sector has no room, or while the store is opened */
    size_t n_erase, max_erase;
    struct io_op ops[64]; /* not submitted yet */
    uint32_t n_ops;
    struct io_done refused; /* an operation that the backend will not take: as if it had failed */
    bool has_refused;
    uint32_t hashes;           /* pieces that are to go to the digest pool */
    uint32_t awaited;          /* pieces that nothing is missing of but the digest */
    struct list reads, writes; /* transfers that have pieces to begin, in order */
    uint32_t n_transfers;
    uint64_t retry_ns; /* something is to be tried again then; 0: nothing */

    /* limits on writing */
    int64_t tokens;
    uint64_t tokens_ns;
    uint64_t day_ns, day_written;

    /* health */
    uint32_t failures; /* in a row */

    /* superblocks */
    uint32_t want_epoch; /* to be written */
    uint8_t *super_image;
    int super_copy; /* -1: nothing is being written; 0, 1: that copy is */
    uint32_t super_generation, super_tries;
    bool super_issued;
    uint64_t super_since_ns;

    /* scrub */
    bool scrubbing;
    uint32_t scrub_cursor, scrub_running;
    uint64_t scrub_rate, scrub_due_ns, scrub_broken;
    struct task_status last_task;
    bool syncing, trimming, swept;
    bool was_online; /* in this run: its epoch is ours */
    int then;        /* what follows when it is offline: an enum store_job, -1: nothing */
    bool then_force;
    bool forced;    /* the format that is running */
    bool cancelled; /* while it is being opened */
    bool told_waiting;
    uint64_t waits_ns; /* for the lock, since */
    struct store_stats stats;
};

struct nvme {
    struct core *core;
    struct nvme_options options;
    struct digest_pool *digest;
    int event_fd, epoll_fd;
    struct list stores;
    uint32_t n_stores;
    struct list waiting, held; /* waiters */
    uint64_t next_check_ns, next_held_ns, next_let_go_ns, next_hang_ns;
    bool quiet;           /* the digest pool announces nothing */
    bool stopping, ready; /* ready: nvme_wait() is over, epochs are settled */
};

static inline uint64_t nvme_now(const struct nvme *n)
{
    return core_now_ns(n->core);
}

bool store_usable(const struct store *st);   /* for reading */
bool store_writable(const struct store *st); /* and for writing */

/* A transfer went wrong (or, 0, right). Enough in a row, and the store goes offline. */
void store_count(struct store *st, int error);
void store_failed(struct store *st, int error, const char *fix, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Takes news of the store's task; drives scrub, superblocks, closing. True: there is more to do. */
bool store_run(struct store *st);
void store_super_done(struct store *st, uint32_t generation, int64_t result);
void store_check_hang(struct store *st, uint64_t now);

/* The daemon ends. */
void store_abandon(struct store *st);
int store_start(struct store *st, enum store_job job, bool force);
void store_free(struct store *st);

/* May so many bytes be written now? Takes them from the budget. */
bool store_may_write(struct store *st, uint64_t bytes);
void store_unwrite(struct store *st, uint64_t bytes); /* gives them back: nothing was written */

/* What the pool's stores must be made for. */
void pool_geometry(const struct pool *p, struct format_geometry *ret);

/* ---- piece.c: the parts of a transfer */

enum transfer_kind {
    TRANSFER_WRITE,
    TRANSFER_READ,
    TRANSFER_SCRUB,
};

struct transfer {
    struct list in_store; /* reads, writes, or by itself when all pieces have begun */
    struct store *store;
    enum transfer_kind kind;
    uint32_t record, use;
    uint32_t slot; /* SLOT_NONE: scrub */
    uint32_t n_pieces, next, running;
    int error;
    bool cancelled;            /* nobody wants it; it was not begun */
    struct format_record meta; /* write: what will be stored; read: what the table says */
    uint8_t user[SHM_USER_BYTES];
    bool asked;                               /* for its record */
    bool counted;                             /* its failure has been counted against the device */
    bool have_record, have_user, pieces_done; /* read */
    uint32_t parent, parent_use; /* write: its record must not come before this one's */
    struct list in_sector, in_user_sector;
    struct list waiters;
    uint64_t begun_ns;
    uint64_t one;      /* digest of the only piece */
    uint64_t *digests; /* of all; == &one when there is one */
};

int transfer_new(struct store *st, enum transfer_kind kind, uint32_t record, uint32_t slot,
                 uint64_t bytes, struct transfer **ret_transfer);
void transfer_free(struct transfer *t);

/* All pieces have ended and none will begin: write.c and fetch.c go on. */
void transfer_pieces_done(struct transfer *t);

/* Begins pieces of the store's transfers while the device takes more. */
void pieces_begin(struct store *st);
void piece_io_done(struct store *st, uint32_t index, uint32_t generation, int64_t result);
void piece_hash_done(struct store *st, uint32_t index, uint32_t generation,
                     const struct digest_done *d);

/* Sends what was collected. */
void store_submit(struct store *st);

/* The oldest operation that the device has not answered, ns; 0: there is none. */
uint64_t store_oldest_ns(const struct store *st);
/* Hands pieces to the digest pool, those that had no room there before as well. Last in a turn: a helper
 * that is woken costs the core thread more than a transfer that begins, and the device must not wait. */
void pieces_hash(struct store *st);

/* Tries again what could not be done. */
void pieces_retry(struct store *st);
int pieces_new(struct store *st);
void pieces_free(struct store *st);

/* Cookies: whose completion it is. */
enum cookie_kind {
    COOKIE_PIECE,
    COOKIE_SECTOR,
    COOKIE_SUPER,
};

static inline uint64_t cookie_make(uint32_t generation, enum cookie_kind kind, uint32_t store,
                                   uint32_t index)
{
    return (uint64_t)generation << 32 | (uint64_t)kind << 28 | (uint64_t)store << 16 | index;
}

/* ---- sector.c: the table, in units of 4 KiB */

/* Reads the sector of a record (user: of its user bytes) and calls transfer_sector_read(). */
void sector_read(struct transfer *t, bool user);

/* Queues the record of a written transfer; parents first. transfer_recorded() follows. */
void sector_write(struct transfer *t, bool user);

/* Zeroes a record on the medium, whenever that can be done. */
void sector_erase(struct store *st, uint32_t record);

void sector_io_done(struct store *st, uint32_t index, uint32_t generation, int64_t result);

/* Begins what can be begun: also when a parent has been stored. */
void sectors_run(struct store *st);
uint64_t sectors_oldest_ns(const struct store *st);
bool sectors_idle(const struct store *st);
/* The store goes offline: whoever waits and is not with the device fails. */
void sectors_give_up(struct store *st, int error);
int sectors_new(struct store *st);
void sectors_free(struct store *st);

void transfer_sector_read(struct transfer *t, bool user, const uint8_t *bytes, int error);
void transfer_recorded(struct transfer *t, bool user, int error);

/* ---- write.c, fetch.c */

/* True: there is more to look at. */
bool writes_run(struct spill *s);

/* The record was found to be of an object that is in ram. */
void write_adopt(struct spill *s, uint32_t r, const struct shm_key *key, uint32_t epoch);
void write_pieces_done(struct transfer *t);
void write_recorded(struct transfer *t, bool user, int error);
void spill_unblock(struct spill *s);

/* A store has come: what is in ram and in no store may be written to it. */
void spill_consider_all(struct spill *s);

void fetch_pieces_done(struct transfer *t);
void fetch_sector_read(struct transfer *t, bool user, const uint8_t *bytes, int error);
void fetches_check(struct nvme *n);
void fetch_fail_queued(struct store *st, int error);
void scrub_done(struct transfer *t);

/* Reads the record's transfer needs, and puts it in line. */
void transfer_read(struct transfer *t);

/* Decodes and verifies what was read. 0, -EILSEQ, -EBADMSG. */
int transfer_verify(struct transfer *t);

#endif
