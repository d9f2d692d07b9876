/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers between a slot and a store, cut into pieces of at most 1 MiB.
 *
 *      write:  hash and write at once, both only read the slot; the piece ends with the later one
 *      read:   read, then hash
 *
 * What the backends hand on is dealt with here: a short transfer goes on where it stopped, -EAGAIN and
 * -EINTR are tried again some times. A piece owns its memory until its completion has come: neither its slot
 * nor its record is free before (I4), whatever has been cancelled or has timed out.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/spill/engine.h"

#define TRIES    32u
#define RETRY_NS 1000000u
#define OPS      (sizeof(((struct store *)0)->ops) / sizeof(struct io_op))

#define NO_PIECE UINT32_MAX
#define HASHES   64u /* handed to the helpers at a time */

/* Beside those with the device: pieces that are being hashed. */
#define PIECES(depth) (4 * (depth) + 16)

struct piece {
    struct transfer *t;
    uint32_t i; /* in the transfer */
    uint32_t generation, next_free;
    uint8_t *buf;
    void *bounce; /* scrub: its own memory */
    uint64_t offset;
    uint32_t bytes, done; /* for the device: whole blocks */
    uint32_t hash_bytes;
    uint8_t tries;
    bool io;        /* with the device, or to be tried again */
    bool issued;    /* with the device */
    bool hash;      /* with the helpers, or waiting for room there */
    bool want_hash; /* the latter */
    uint64_t since_ns;
};

int pieces_new(struct store *st)
{
    st->n_pieces = PIECES(st->depth);
    st->pieces = calloc(st->n_pieces, sizeof(*st->pieces));
    if (!st->pieces)
        return -ENOMEM;
    st->free_piece = NO_PIECE;
    for (uint32_t i = st->n_pieces; i-- > 0;) {
        st->pieces[i].next_free = st->free_piece;
        st->free_piece = i;
    }
    return 0;
}

void pieces_free(struct store *st)
{
    for (uint32_t i = 0; st->pieces && i < st->n_pieces; i++)
        free(st->pieces[i].bounce);
    free(st->pieces);
    st->pieces = NULL;
    st->n_pieces = st->busy_pieces = st->in_io = st->in_write = st->hashes = st->awaited = 0;
}

/* ---- transfers */

int transfer_new(struct store *st, enum transfer_kind kind, uint32_t record, uint32_t slot,
                 uint64_t bytes, struct transfer **ret_transfer)
{
    struct transfer *t = calloc(1, sizeof(*t));

    if (!t)
        return -ENOMEM;
    *t = (struct transfer){.store = st,
                           .kind = kind,
                           .record = record,
                           .use = st->spill->records[record].use,
                           .slot = slot,
                           .parent = NO_RECORD,
                           .n_pieces = format_pieces(&st->file.super.geometry, bytes),
                           .begun_ns = nvme_now(st->nvme)};
    t->meta.bytes = bytes;
    t->digests = t->n_pieces > 1 ? calloc(t->n_pieces, sizeof(*t->digests)) : &t->one;
    if (!t->digests) {
        free(t);
        return -ENOMEM;
    }
    list_init(&t->in_store);
    list_init(&t->in_sector);
    list_init(&t->in_user_sector);
    list_init(&t->waiters);
    st->n_transfers++;
    *ret_transfer = t;
    return 0;
}

void transfer_free(struct transfer *t)
{
    if (!t)
        return;
    assert(!t->running && list_empty(&t->waiters));
    list_remove(&t->in_store);
    list_remove(&t->in_sector);
    list_remove(&t->in_user_sector);
    t->store->n_transfers--;
    if (t->digests != &t->one)
        free(t->digests);
    free(t);
}

void transfer_pieces_done(struct transfer *t)
{
    list_remove(&t->in_store);
    if (t->kind == TRANSFER_WRITE)
        write_pieces_done(t);
    else
        fetch_pieces_done(t);
}

void transfer_sector_read(struct transfer *t, bool user, const uint8_t *bytes, int error)
{
    fetch_sector_read(t, user, bytes, error);
}

void transfer_recorded(struct transfer *t, bool user, int error)
{
    write_recorded(t, user, error);
}

int transfer_verify(struct transfer *t)
{
    const struct format_super *super = &t->store->file.super;

    if (format_digest(&t->meta, super, t->user, t->digests, t->n_pieces) != t->meta.digest)
        return -EBADMSG;
    return 0;
}

/* ---- a piece */

static uint8_t *slot_address(const struct pool *p, uint32_t slot, const struct format_piece *x)
{
    return p->base[x->part].base + (uint64_t)slot * p->part_bytes + x->in_part;
}

static void drop_ops(struct store *st, uint32_t n)
{
    st->n_ops -= n;
    memmove(st->ops, st->ops + n, st->n_ops * sizeof(st->ops[0]));
}

/* What the backend will never take fails one by one, each in a turn of its own: who collects operations
 * does not expect one to end meanwhile. */
static void refused(struct store *st, int error)
{
    bool again = error == -EAGAIN || error == -EINTR || error == -EBUSY;

    st->stats.retries++;
    if (st->has_refused || (again && st->state == STORE_ONLINE))
        return;
    st->refused = (struct io_done){.cookie = st->ops[0].cookie, .result = again ? -EIO : error};
    st->has_refused = true;
    drop_ops(st, 1);
}

void store_submit(struct store *st)
{
    int n;

    if (!st->n_ops || !st->io)
        return;
    n = io_submit(st->io, st->ops, st->n_ops);
    if (n < (int)st->n_ops) /* the rest another time */
        st->retry_ns = nvme_now(st->nvme) + RETRY_NS;
    if (n < 0)
        refused(st, n);
    else
        drop_ops(st, (uint32_t)n);
}

static bool issue(struct store *st, struct piece *p)
{
    struct format_piece at = format_piece_at(&st->file.super.geometry, p->t->meta.bytes, p->i);

    if (st->n_ops == OPS)
        store_submit(st);
    if (st->n_ops == OPS)
        return false;
    p->issued = true;
    p->since_ns = nvme_now(st->nvme);
    st->ops[st->n_ops++] = (struct io_op){
        .cookie = cookie_make(p->generation, COOKIE_PIECE, st->id, (uint32_t)(p - st->pieces)),
        .buf = p->buf + p->done,
        .offset =
            format_slot_offset(&st->file.super, p->t->record - st->base) + at.in_slot + p->done,
        .bytes = p->bytes - p->done,
        .write = p->t->kind == TRANSFER_WRITE,
    };
    if (p->t->kind == TRANSFER_WRITE)
        st->stats.physical_written += p->bytes - p->done;
    else
        st->stats.physical_read += p->bytes - p->done;
    return true;
}

/* It goes to the helpers after what the device gets: see pieces_hash(). */
static void hash(struct store *st, struct piece *p)
{
    p->hash = p->want_hash = true;
    st->hashes++;
}

static uint32_t wanted_hashes(struct store *st, uint32_t *at, struct digest_job *jobs,
                              struct piece **pieces)
{
    uint32_t n = 0;

    for (; *at < st->n_pieces && n < HASHES; ++*at) {
        struct piece *p = &st->pieces[*at];

        if (!p->t || !p->want_hash)
            continue;
        pieces[n] = p;
        jobs[n++] = (struct digest_job){
            .cookie = cookie_make(p->generation, COOKIE_PIECE, st->id, *at),
            .addr = p->buf,
            .bytes = p->hash_bytes,
        };
    }
    return n;
}

void pieces_hash(struct store *st)
{
    struct digest_job jobs[HASHES];
    struct piece *pieces[HASHES];
    uint32_t at = 0, n, taken = HASHES;

    while (st->hashes && taken == HASHES) {
        n = wanted_hashes(st, &at, jobs, pieces);
        taken = digest_submit(st->nvme->digest, jobs, n);
        for (uint32_t i = 0; i < taken; i++)
            pieces[i]->want_hash = false;
        st->hashes -= taken;
    }
}

/* Both halves have ended. */
static void end(struct store *st, struct piece *p)
{
    struct transfer *t = p->t;

    if (p->io || p->hash)
        return;
    free(p->bounce);
    p->bounce = NULL;
    p->t = NULL;
    p->next_free = st->free_piece;
    st->free_piece = (uint32_t)(p - st->pieces);
    st->busy_pieces--;
    t->running--;
    if (!t->running && (t->next == t->n_pieces || t->error))
        transfer_pieces_done(t);
}

static void io_end(struct store *st, struct piece *p, int error)
{
    st->in_io--;
    st->in_write -= p->t->kind == TRANSFER_WRITE;
    p->io = p->issued = false;
    if (error && !p->t->error)
        p->t->error = error;
    if (!error && p->t->kind != TRANSFER_WRITE)
        hash(st, p);
    st->awaited += p->hash;
    end(st, p);
}

/* What is left after a short transfer; -EIO when nothing moves any more. */
static int go_on(struct store *st, struct piece *p, int64_t result)
{
    bool write = p->t->kind == TRANSFER_WRITE;

    if (result < 0 && result != -EAGAIN && result != -EINTR && result != -EBUSY)
        return (int)result;
    if (result > 0)
        p->done += (uint32_t)result / IO_BLOCK * IO_BLOCK;
    if (p->done >= p->bytes)
        return 0;
    if (result == 0 && !write)
        return -ENODATA; /* the file ends here */
    if (p->tries++ >= TRIES)
        return result < 0 ? (int)result : -EIO;
    st->stats.retries++;
    if (result > 0 && issue(st, p))
        return 1;
    st->retry_ns = nvme_now(st->nvme) + RETRY_NS;
    return 1;
}

void piece_io_done(struct store *st, uint32_t index, uint32_t generation, int64_t result)
{
    struct piece *p = index < st->n_pieces ? &st->pieces[index] : NULL;
    int r;

    if (!p || p->generation != generation || !p->t || !p->issued)
        return;
    p->issued = false;
    r = go_on(st, p, result);
    if (r <= 0)
        io_end(st, p, r);
}

void piece_hash_done(struct store *st, uint32_t index, uint32_t generation,
                     const struct digest_done *d)
{
    struct piece *p = index < st->n_pieces ? &st->pieces[index] : NULL;

    if (!p || p->generation != generation || !p->t || !p->hash)
        return;
    p->hash = false;
    st->awaited -= !p->io;
    p->t->digests[p->i] = d->digest;
    if (d->status < 0 && !p->t->error)
        p->t->error = d->status;
    end(st, p);
}

/* True: begun. */
static bool begin(struct store *st, struct transfer *t)
{
    struct format_piece at = format_piece_at(&st->file.super.geometry, t->meta.bytes, t->next);
    struct piece *p = &st->pieces[st->free_piece];
    uint32_t bytes = (at.bytes + IO_BLOCK - 1) / IO_BLOCK * IO_BLOCK;
    void *bounce = NULL;

    if (t->kind == TRANSFER_SCRUB && !(bounce = aligned_alloc(IO_BLOCK, bytes)))
        return false;
    st->free_piece = p->next_free;
    *p = (struct piece){
        .t = t,
        .i = t->next++,
        .generation = p->generation + 1,
        .bounce = bounce,
        .buf = bounce ? bounce : slot_address(st->spill->pool, t->slot, &at),
        .bytes = bytes,
        .hash_bytes = at.bytes,
        .io = true,
    };
    st->busy_pieces++;
    st->in_io++;
    st->in_write += t->kind == TRANSFER_WRITE;
    t->running++;
    if (!issue(st, p))
        st->retry_ns = nvme_now(st->nvme) + RETRY_NS;
    if (t->kind == TRANSFER_WRITE)
        hash(st, p);
    if (t->next == t->n_pieces)
        list_remove(&t->in_store);
    return true;
}

/* The record comes along with the data. False: it is at hand and makes no sense, and that was the end of
 * the transfer. */
static bool read_record(struct transfer *t)
{
    t->asked = true;
    t->running++; /* it must not end meanwhile */
    sector_read(t, false);
    if (!t->error && t->store->spill->records[t->record].has_user)
        sector_read(t, true);
    t->running--;
    if (!t->error)
        return true;
    transfer_pieces_done(t);
    return false;
}

static void begin_from(struct store *st, struct list *queue, bool writes, uint32_t limit)
{
    while (!list_empty(queue) && st->in_io < st->depth && st->free_piece != NO_PIECE) {
        struct transfer *t = list_entry(queue->next, struct transfer, in_store);

        if (writes && st->in_write >= limit)
            return;
        if (t->error) { /* ends when its last running piece does */
            list_remove(&t->in_store);
            continue;
        }
        if (!t->asked && t->kind != TRANSFER_WRITE && !read_record(t))
            continue;
        if (!begin(st, t))
            return;
    }
}

/* Somebody waits for a read; a write has time. */
void pieces_begin(struct store *st)
{
    uint32_t some = st->depth / 4 ? st->depth / 4 : 1;

    if (!st->io || !st->pieces)
        return;
    begin_from(st, &st->reads, false, 0);
    begin_from(st, &st->writes, true, list_empty(&st->reads) ? st->depth : some);
}

/* Pieces that wait for another try. */
void pieces_retry(struct store *st)
{
    for (uint32_t i = 0; st->pieces && i < st->n_pieces; i++) {
        struct piece *p = &st->pieces[i];

        if (!p->t)
            continue;
        if (p->io && !p->issued && !issue(st, p))
            st->retry_ns = nvme_now(st->nvme) + RETRY_NS;
    }
}

uint64_t store_oldest_ns(const struct store *st)
{
    uint64_t oldest = sectors_oldest_ns(st);

    for (uint32_t i = 0; st->pieces && i < st->n_pieces; i++) {
        const struct piece *p = &st->pieces[i];

        if (p->t && p->issued && (!oldest || p->since_ns < oldest))
            oldest = p->since_ns;
    }
    return oldest;
}
