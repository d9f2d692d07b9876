/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the table: one thread reads, the task's decodes, so that the device never waits for us. */
#include "daemon/spill/store_task.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BUFFERS    4u
#define PIECE      65536u /* after an error it is read in these, to lose less */
#define PIECES     (STORE_CHUNK / PIECE)
#define PER_PIECE  (PIECE / FORMAT_RECORD_BYTES)
#define ERRORS_MAX 64u /* lost pieces, before the device counts as dead */
#define BATCH      2048u
#define RECORDS(b) ((uint32_t)((b) / FORMAT_RECORD_BYTES))

struct chunk {
    uint8_t *bytes;
    uint32_t n;    /* bytes of the table in it */
    uint32_t lost; /* a bit for each piece that could not be read */
};
_Static_assert(PIECES <= 32, "a bit for each");

/* Chunk i is in chunks[i % BUFFERS]; consumed <= i < filled can be decoded. */
struct loader {
    struct store_task *task;
    uint64_t table, bytes;
    uint32_t n_chunks;
    struct chunk chunks[BUFFERS];
    uint32_t errors; /* the reader's */

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t wake;
    uint32_t filled, consumed;
    bool stop;
    int error; /* the reader has given up */
};

/* ---- the reading thread */

/* Whole sectors are read; the table's last one may be larger than its records. */
static ssize_t read_at(const struct loader *l, uint8_t *buf, uint32_t bytes, uint64_t offset)
{
    size_t sectors = (bytes + FORMAT_SECTOR - 1) / FORMAT_SECTOR * FORMAT_SECTOR;
    ssize_t n = store_read(l->task->file.fd, buf, sectors, l->table + offset);

    return n >= 0 && n < (ssize_t)bytes ? -EIO : n;
}

static int read_in_pieces(struct loader *l, struct chunk *c, uint64_t offset)
{
    for (uint32_t at = 0; at < c->n; at += PIECE) {
        uint32_t now = c->n - at < PIECE ? c->n - at : PIECE;
        ssize_t n = read_at(l, c->bytes + at, now, offset + at);

        if (n >= 0)
            continue;
        c->lost |= 1u << at / PIECE;
        if (++l->errors > ERRORS_MAX)
            return (int)n;
    }
    return 0;
}

static int read_chunk(struct loader *l, uint32_t i)
{
    struct chunk *c = &l->chunks[i % BUFFERS];
    uint64_t offset = (uint64_t)i * STORE_CHUNK;
    ssize_t n;

    c->n = (uint32_t)(l->bytes - offset < STORE_CHUNK ? l->bytes - offset : STORE_CHUNK);
    c->lost = 0;
    n = read_at(l, c->bytes, c->n, offset);
    return n < 0 ? read_in_pieces(l, c, offset) : 0;
}

/* False: no more is wanted. */
static bool wait_for_room(struct loader *l, uint32_t i)
{
    bool stop;

    pthread_mutex_lock(&l->lock);
    while (!l->stop && i - l->consumed >= BUFFERS)
        pthread_cond_wait(&l->wake, &l->lock);
    stop = l->stop;
    pthread_mutex_unlock(&l->lock);
    return !stop;
}

static void *reader_main(void *arg)
{
    struct loader *l = arg;
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < l->n_chunks && wait_for_room(l, i); i++) {
        r = read_chunk(l, i);
        pthread_mutex_lock(&l->lock);
        l->filled += r == 0;
        l->error = r;
        pthread_cond_broadcast(&l->wake);
        pthread_mutex_unlock(&l->lock);
    }
    return NULL;
}

/* ---- decoding */

struct batch {
    struct store_loaded *list; /* of BATCH */
    uint32_t n;
};

static int batch_flush(struct store_task *t, struct batch *b)
{
    int r = store_push(t, b->list, b->n);

    atomic_fetch_add(&t->records, b->n);
    b->n = 0;
    return r;
}

static bool is_lost(const struct chunk *c, uint32_t record)
{
    return c->lost >> record / PER_PIECE & 1;
}

static int decode_chunk(struct store_task *t, const struct chunk *c, uint32_t first,
                        struct batch *b)
{
    const struct format_super *s = &t->file.super;
    uint64_t broken = 0;
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < RECORDS(c->n); i++) {
        const uint8_t *bytes = c->bytes + (size_t)i * FORMAT_RECORD_BYTES;
        struct store_loaded *to = &b->list[b->n];
        int d = is_lost(c, i) ? -EIO : format_record_decode(bytes, s, first + i, &to->record);

        broken += d < 0 && d != -ENODATA;
        if (d < 0)
            continue;
        to->number = first + i;
        if (++b->n == BATCH)
            r = batch_flush(t, b);
    }
    atomic_fetch_add(&t->broken, broken);
    return r == 0 ? batch_flush(t, b) : r;
}

static int wait_for_chunk(struct loader *l, uint32_t i)
{
    int r;

    pthread_mutex_lock(&l->lock);
    while (l->filled == i && l->error == 0)
        pthread_cond_wait(&l->wake, &l->lock);
    r = l->filled == i ? l->error : 0;
    pthread_mutex_unlock(&l->lock);
    return r;
}

static int decode_all(struct loader *l, struct batch *b)
{
    struct store_task *t = l->task;
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < l->n_chunks; i++) {
        r = wait_for_chunk(l, i);
        if (r < 0)
            return store_fail(t, r,
                              "reading the table: %s, in %u places and more; fix: look after "
                              "the device",
                              strerrordesc_np(-r), ERRORS_MAX);
        r = decode_chunk(t, &l->chunks[i % BUFFERS], RECORDS(STORE_CHUNK) * i, b);
        pthread_mutex_lock(&l->lock);
        l->consumed++;
        pthread_cond_broadcast(&l->wake);
        pthread_mutex_unlock(&l->lock);
        store_advance(t, l->chunks[i % BUFFERS].n);
    }
    return r;
}

/* ---- both */

static void loader_stop(struct loader *l)
{
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->wake);
    pthread_mutex_unlock(&l->lock);
}

static int loader_run(struct loader *l, struct batch *b)
{
    pthread_t reader;
    int r = pthread_create(&reader, NULL, reader_main, l);

    if (r)
        return store_fail_call(l->task, "pthread_create", -r);
    r = decode_all(l, b);
    loader_stop(l);
    pthread_join(reader, NULL); /* a reader that hangs in the kernel keeps this thread, too */
    return r;
}

int store_load(struct store_task *t)
{
    struct loader l = {
        .task = t,
        .table = t->file.super.table,
        .bytes = t->file.super.records * FORMAT_RECORD_BYTES,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .wake = PTHREAD_COND_INITIALIZER,
    };
    struct batch b = {.list = malloc(BATCH * sizeof(*b.list))};
    uint8_t *buffers = aligned_alloc(FORMAT_SECTOR, (size_t)BUFFERS * STORE_CHUNK);
    int r;

    l.n_chunks = (uint32_t)((l.bytes + STORE_CHUNK - 1) / STORE_CHUNK);
    for (uint32_t i = 0; buffers && i < BUFFERS; i++)
        l.chunks[i].bytes = buffers + (size_t)i * STORE_CHUNK;
    store_phase_begin(t, STORE_READING, l.bytes);
    if (b.list && buffers)
        r = loader_run(&l, &b);
    else
        r = store_fail(t, -ENOMEM, "out of memory");
    free(buffers);
    free(b.list);
    return r;
}

/* What cannot be read may well be a record. */
static int chunk_has_records(struct store_task *t, const struct format_super *s, uint8_t *buf,
                             uint64_t first)
{
    uint64_t left = (s->records - first) * FORMAT_RECORD_BYTES;
    size_t n = left < STORE_CHUNK ? (size_t)left : STORE_CHUNK;
    struct format_record record;
    ssize_t got;

    got = store_read(t->file.fd, buf, (n + FORMAT_SECTOR - 1) / FORMAT_SECTOR * FORMAT_SECTOR,
                     s->table + first * FORMAT_RECORD_BYTES);
    if (got < (ssize_t)n)
        return 1;
    for (uint32_t i = 0; i < RECORDS(n); i++)
        if (format_record_decode(buf + (size_t)i * FORMAT_RECORD_BYTES, s, (uint32_t)first + i,
                                 &record) == 0)
            return 1;
    return 0;
}

int store_has_records(struct store_task *t, const struct format_super *super)
{
    uint8_t *buf = aligned_alloc(FORMAT_SECTOR, STORE_CHUNK);
    int r = 0;

    if (!buf)
        return store_fail(t, -ENOMEM, "out of memory");
    for (uint64_t i = 0; r == 0 && i < super->records; i += RECORDS(STORE_CHUNK))
        r = store_cancelled(t) ? -ECANCELED : chunk_has_records(t, super, buf, i);
    free(buf);
    return r;
}
