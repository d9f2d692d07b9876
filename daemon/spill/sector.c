/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of a store, in units of 4 KiB. A few sectors are kept in memory: those that are being read or
 * written, and the last ones that were.
 *
 *      FREE ──read──> READING ──> VALID ──records wait──> WRITING ──> VALID
 *
 * A sector that is being written is not changed, and not written a second time: what comes meanwhile waits
 * and goes out together, so a sector has at most one write in flight and carries as many records as came in
 * the time of one.
 *
 * I2: a record is put into an image only when its parent's record is on the medium, or goes out in the same
 * image: a sector of 4 KiB is written whole or not at all by all devices that we use, and if one should not,
 * the check of each record tells.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/spill/engine.h"

#define SECTORS 64u

/* Operations on sectors that may be in flight: the ring has room for them beside the pieces. */
#define SECTOR_DEPTH 12u

/* While data is still being written, a sector waits for more records, so many or so long. */
#define GATHER    16u
#define GATHER_NS 3000000u

#define TRIES     16u

/* Failures in a row before records that should be erased are left. */
#define ERASE_TRIES 16u

#define USER_BIT    0x80000000u
#define NO_SECTOR   UINT32_MAX

enum sector_state {
    SECTOR_FREE,
    SECTOR_READING,
    SECTOR_VALID,
    SECTOR_WRITING,
};

struct sector {
    uint32_t number; /* of the first record in it / 32, with USER_BIT; NO_SECTOR */
    enum sector_state state;
    uint32_t generation;
    bool issued; /* the operation of READING or WRITING is with the device */
    uint8_t tries;
    uint32_t erase;     /* records to be zeroed */
    uint32_t erasing;   /* that are zeroes in the image being written */
    uint32_t n_waiting; /* about: since the last image */
    uint64_t used, since_ns;
    uint64_t waits_ns; /* since when the first of them waits */
    uint8_t *buf;
    struct list readers; /* transfers */
    struct list waiting; /* transfers whose record is to be written */
    struct list writing; /* that are in the image being written */
};

struct sectors {
    struct sector s[SECTORS];
    uint64_t clock;
    uint32_t in_io;
    struct list want[2]; /* transfers for which there was no room; [1]: of the user table */
    uint8_t *memory;
};

static struct transfer *of(struct list *i, bool user)
{
    return user ? list_entry(i, struct transfer, in_user_sector)
                : list_entry(i, struct transfer, in_sector);
}

static struct list *link_of(struct transfer *t, bool user)
{
    return user ? &t->in_user_sector : &t->in_sector;
}

static bool is_user(const struct sector *x)
{
    return x->number & USER_BIT;
}

static uint32_t local_of(const struct store *st, const struct transfer *t)
{
    return t->record - st->base;
}

int sectors_new(struct store *st)
{
    struct sectors *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    c->memory = aligned_alloc(FORMAT_SECTOR, (size_t)SECTORS * FORMAT_SECTOR);
    if (!c->memory) {
        free(c);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < SECTORS; i++) {
        c->s[i].number = NO_SECTOR;
        c->s[i].buf = c->memory + (size_t)i * FORMAT_SECTOR;
        list_init(&c->s[i].readers);
        list_init(&c->s[i].waiting);
        list_init(&c->s[i].writing);
    }
    list_init(&c->want[0]);
    list_init(&c->want[1]);
    st->sectors = c;
    return 0;
}

void sectors_free(struct store *st)
{
    if (!st->sectors)
        return;
    free(st->sectors->memory);
    free(st->sectors);
    st->sectors = NULL;
}

static bool is_idle(const struct sector *x)
{
    return (x->state == SECTOR_VALID || x->state == SECTOR_FREE) && list_empty(&x->waiting) &&
           list_empty(&x->readers) && !x->erase;
}

/* The sector, or room for it; NULL: all are busy. */
static struct sector *get(struct store *st, uint32_t number)
{
    struct sectors *c = st->sectors;
    struct sector *oldest = NULL;

    for (uint32_t i = 0; i < SECTORS; i++) {
        struct sector *x = &c->s[i];

        if (x->number == number) {
            x->used = ++c->clock;
            return x;
        }
        if (is_idle(x) && (!oldest || x->used < oldest->used))
            oldest = x;
    }
    if (!oldest)
        return NULL;
    oldest->number = number;
    oldest->state = SECTOR_READING;
    oldest->issued = false;
    oldest->tries = 0;
    oldest->n_waiting = 0;
    oldest->used = ++c->clock;
    return oldest;
}

/* ---- operations */

static void issue(struct store *st, struct sector *x)
{
    struct sectors *c = st->sectors;
    uint32_t first = (x->number & ~USER_BIT) * FORMAT_IN_SECTOR;

    if (c->in_io >= SECTOR_DEPTH || !st->io)
        return;
    if (st->n_ops == sizeof(st->ops) / sizeof(st->ops[0])) {
        store_submit(st);
        if (st->n_ops == sizeof(st->ops) / sizeof(st->ops[0]))
            return;
    }
    x->issued = true;
    x->generation++;
    x->since_ns = nvme_now(st->nvme);
    c->in_io++;
    st->ops[st->n_ops++] = (struct io_op){
        .cookie = cookie_make(x->generation, COOKIE_SECTOR, st->id, (uint32_t)(x - c->s)),
        .buf = x->buf,
        .offset = is_user(x) ? format_user_sector_offset(&st->file.super, first)
                             : format_sector_offset(&st->file.super, first),
        .bytes = FORMAT_SECTOR,
        .write = x->state == SECTOR_WRITING,
    };
    if (x->state == SECTOR_WRITING)
        st->stats.physical_written += FORMAT_SECTOR;
    else
        st->stats.physical_read += FORMAT_SECTOR;
}

enum parent_state {
    PARENT_READY,
    PARENT_WAITS,
    PARENT_GONE,
};

static enum parent_state parent_of(const struct store *st, struct sector *x,
                                   const struct transfer *t)
{
    const struct record *up;

    if (t->parent == NO_RECORD)
        return PARENT_READY;
    up = &st->spill->records[t->parent];
    if (up->use != t->parent_use || up->state == RECORD_FREE)
        return PARENT_GONE;
    if (up->state == RECORD_STORED)
        return PARENT_READY;
    for (struct list *i = x->writing.next; i != &x->writing; i = i->next)
        if (of(i, false)->record == t->parent)
            return PARENT_READY;
    return PARENT_WAITS;
}

static void put_record(struct store *st, struct sector *x, struct transfer *t)
{
    uint32_t local = local_of(st, t);
    uint8_t *at = x->buf + (size_t)(local % FORMAT_IN_SECTOR) * FORMAT_RECORD_BYTES;

    if (is_user(x))
        memcpy(at, t->user, SHM_USER_BYTES);
    else
        format_record_encode(&t->meta, &st->file.super, local, at);
    list_remove(link_of(t, is_user(x)));
    list_append(&x->writing, link_of(t, is_user(x)));
}

/* Puts what may go into the image. True: something changed. */
static bool compose(struct store *st, struct sector *x)
{
    struct list *i, *tmp;
    bool user = is_user(x), changed = false;

    for (uint32_t k = 0; x->erase; k++, x->erase >>= 1) {
        uint32_t first = (x->number & ~USER_BIT) * FORMAT_IN_SECTOR;
        uint32_t r = st->base + first + k;

        /* It may have been given to another object meanwhile, whose record then replaces it. */
        if (!(x->erase & 1) || st->spill->records[r].state == RECORD_STORED)
            continue;
        memset(x->buf + (size_t)k * FORMAT_RECORD_BYTES, 0, FORMAT_RECORD_BYTES);
        x->erasing |= (uint32_t)1 << k;
        changed = true;
    }
    kvd_list_for_each (i, tmp, &x->waiting) {
        struct transfer *t = of(i, user);
        enum parent_state p = user ? PARENT_READY : parent_of(st, x, t);

        if (p == PARENT_WAITS)
            continue;
        if (p == PARENT_GONE) {
            list_remove(i);
            transfer_recorded(t, user, -ENODATA);
            continue;
        }
        put_record(st, x, t);
        changed = true;
    }
    return changed;
}

/* A record is not in a hurry: each write of its sector costs the core as much as a piece of 1 MiB. */
static bool gathers(struct store *st, const struct sector *x)
{
    if (is_user(x) || x->erase || !st->in_write || x->n_waiting >= GATHER ||
        nvme_now(st->nvme) - x->waits_ns >= GATHER_NS)
        return false;
    if (!st->retry_ns || x->waits_ns + GATHER_NS < st->retry_ns)
        st->retry_ns = x->waits_ns + GATHER_NS;
    return true;
}

static void run_one(struct store *st, struct sector *x)
{
    if (x->state == SECTOR_VALID && (!list_empty(&x->waiting) || x->erase) && !gathers(st, x) &&
        compose(st, x)) {
        x->n_waiting = 0;
        x->state = SECTOR_WRITING;
        x->issued = false;
        x->tries = 0;
    }
    if ((x->state == SECTOR_READING || x->state == SECTOR_WRITING) && !x->issued)
        issue(st, x);
}

/* ---- what transfers ask for */

static bool try_read(struct store *st, struct transfer *t, bool user)
{
    uint32_t number = local_of(st, t) / FORMAT_IN_SECTOR | (user ? USER_BIT : 0);
    struct sector *x = get(st, number);

    if (!x)
        return false;
    if (x->state == SECTOR_VALID || x->state == SECTOR_WRITING) {
        transfer_sector_read(
            t, user, x->buf + (size_t)(local_of(st, t) % FORMAT_IN_SECTOR) * FORMAT_RECORD_BYTES,
            0);
        return true;
    }
    list_append(&x->readers, link_of(t, user));
    run_one(st, x);
    return true;
}

static bool try_write(struct store *st, struct transfer *t, bool user)
{
    uint32_t number = local_of(st, t) / FORMAT_IN_SECTOR | (user ? USER_BIT : 0);
    struct sector *x = get(st, number);

    if (!x)
        return false;
    if (!x->n_waiting++)
        x->waits_ns = nvme_now(st->nvme);
    list_append(&x->waiting, link_of(t, user));
    return true; /* sectors_run() goes on: what completes together is written together */
}

void sector_read(struct transfer *t, bool user)
{
    if (!try_read(t->store, t, user))
        list_append(&t->store->sectors->want[user], link_of(t, user));
}

void sector_write(struct transfer *t, bool user)
{
    if (!try_write(t->store, t, user))
        list_append(&t->store->sectors->want[user], link_of(t, user));
}

static bool try_erase(struct store *st, uint32_t record)
{
    uint32_t local = record - st->base;
    struct sector *x = get(st, local / FORMAT_IN_SECTOR);

    if (!x)
        return false;
    x->erase |= (uint32_t)1 << local % FORMAT_IN_SECTOR;
    return true;
}

static void remember_erase(struct store *st, uint32_t record)
{
    if (st->n_erase == st->max_erase) {
        size_t max = st->max_erase ? st->max_erase * 2 : 64;
        uint32_t *more = reallocarray(st->erase, max, sizeof(*more));

        if (!more)
            return; /* at the worst the object comes back after a restart */
        st->erase = more;
        st->max_erase = max;
    }
    st->erase[st->n_erase++] = record;
}

void sector_erase(struct store *st, uint32_t record)
{
    /* While it is being opened, serve_wanted() goes on with it. */
    if (st->state != STORE_OFFLINE && !(st->sectors && try_erase(st, record)))
        remember_erase(st, record);
}

static void serve_wanted(struct store *st)
{
    struct sectors *c = st->sectors;
    struct list *i, *tmp;

    while (st->n_erase && try_erase(st, st->erase[st->n_erase - 1]))
        st->n_erase--;
    for (int user = 0; user < 2; user++)
        kvd_list_for_each (i, tmp, &c->want[user]) {
            struct transfer *t = of(i, user);

            list_remove(i);
            if (t->kind == TRANSFER_WRITE ? try_write(st, t, user) : try_read(st, t, user))
                continue;
            i->prev = &c->want[user]; /* back in front */
            i->next = c->want[user].next;
            c->want[user].next->prev = i;
            c->want[user].next = i;
            break;
        }
}

void sectors_run(struct store *st)
{
    if (!st->sectors || !st->io)
        return;
    serve_wanted(st);
    for (uint32_t i = 0; i < SECTORS; i++)
        run_one(st, &st->sectors->s[i]);
}

/* ---- completions */

static void tell(struct sector *x, struct list *head, bool user, int error)
{
    while (!list_empty(head)) {
        struct transfer *t = of(head->next, user);
        uint32_t local = t->record - t->store->base;

        list_remove(head->next);
        t->counted |= error != 0; /* once for the sector, not for each record in it */
        if (t->kind == TRANSFER_WRITE)
            transfer_recorded(t, user, error);
        else
            transfer_sector_read(
                t, user, x->buf + (size_t)(local % FORMAT_IN_SECTOR) * FORMAT_RECORD_BYTES, error);
    }
}

static void move_all(struct list *to, struct list *from)
{
    while (!list_empty(from)) {
        struct list *i = from->next;

        list_remove(i);
        list_append(to, i);
    }
}

/* What was removed must not come back because one write failed. In the end it may. */
static void erase_again(struct store *st, uint32_t first, uint32_t erase)
{
    if (erase && ++st->erase_tries > ERASE_TRIES) {
        log_write(
            st->nvme->core->log, LOG_ERR, NULL,
            "store %s: %d removed objects could not be erased, and may come back after a restart; "
            "fix: `kvctl spill format %s --force`",
            st->full_name, __builtin_popcount(erase), st->full_name);
        return;
    }
    for (uint32_t k = 0; erase; k++, erase >>= 1)
        if (erase & 1)
            remember_erase(st, first + k);
}

/* Nothing is known of the sector any more: who waits for it waits in vain. It is free before anybody is
 * told, who may ask for it again. */
static void fail(struct store *st, struct sector *x, int error)
{
    uint32_t erase = x->erase | x->erasing,
             first = st->base + (x->number & ~USER_BIT) * FORMAT_IN_SECTOR;
    bool user = is_user(x);
    struct list all;

    list_init(&all);
    move_all(&all, &x->readers);
    move_all(&all, &x->writing);
    move_all(&all, &x->waiting);
    x->state = SECTOR_FREE;
    x->number = NO_SECTOR;
    x->erase = x->erasing = 0;
    erase_again(st, first, erase);
    tell(x, &all, user, error);
}

static bool again(int64_t result)
{
    return result == -EAGAIN || result == -EINTR || result == -EBUSY ||
           (result >= 0 && result < (int64_t)FORMAT_SECTOR);
}

void sector_io_done(struct store *st, uint32_t index, uint32_t generation, int64_t result)
{
    struct sector *x = &st->sectors->s[index % SECTORS];

    if (x->generation != generation || !x->issued)
        return;
    st->sectors->in_io--;
    x->issued = false;
    if (again(result) && x->tries++ < TRIES) {
        st->stats.retries++;
        st->retry_ns = nvme_now(st->nvme) + 1000000;
        return; /* sectors_run() issues it again */
    }
    if (result != (int64_t)FORMAT_SECTOR) {
        int error = result < 0 ? (int)result : -EIO;

        store_count(st, error);
        fail(st, x, error);
        return;
    }
    if (x->erasing)
        st->erase_tries = 0;
    x->erasing = 0;
    x->state = SECTOR_VALID;
    tell(x, &x->readers, is_user(x), 0);
    tell(x, &x->writing, is_user(x), 0);
}

bool sectors_idle(const struct store *st)
{
    const struct sectors *c = st->sectors;

    if (!c)
        return true;
    if (c->in_io || st->n_erase || !list_empty(&c->want[0]) || !list_empty(&c->want[1]))
        return false;
    for (uint32_t i = 0; i < SECTORS; i++)
        if (!is_idle(&c->s[i]))
            return false;
    return true;
}

uint64_t sectors_oldest_ns(const struct store *st)
{
    uint64_t oldest = 0;

    for (uint32_t i = 0; st->sectors && i < SECTORS; i++) {
        const struct sector *x = &st->sectors->s[i];

        if (x->issued && (!oldest || x->since_ns < oldest))
            oldest = x->since_ns;
    }
    return oldest;
}

/* Erasing goes on: the store closes when that is done. */
static void give_up(struct store *st, struct sector *x, int error)
{
    struct list all;

    if (!x->erase) {
        fail(st, x, error);
        return;
    }
    list_init(&all);
    move_all(&all, &x->readers);
    move_all(&all, &x->waiting);
    tell(x, &all, is_user(x), error);
}

void sectors_give_up(struct store *st, int error)
{
    struct sectors *c = st->sectors;

    for (uint32_t i = 0; c && i < SECTORS; i++)
        if (!c->s[i].issued && c->s[i].number != NO_SECTOR)
            give_up(st, &c->s[i], error);
    for (int user = 0; c && user < 2; user++)
        while (!list_empty(&c->want[user])) {
            struct transfer *t = of(c->want[user].next, user);

            list_remove(c->want[user].next);
            if (t->kind == TRANSFER_WRITE)
                transfer_recorded(t, user, error);
            else
                transfer_sector_read(t, user, NULL, error);
        }
}
