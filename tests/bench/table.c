/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and pinning in an index of its own, as the library does it once it has mapped one. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chain.h"
#include "daemon/index.h"
#include "shm/header.h"
#include "shm/lookup.h"

#define EPOCH 1u

struct table {
    struct memory index_memory, pins_memory;
    struct shm_index *writer;
    const struct shm_index *index;
    struct shm_pins *pins;
    uint64_t filled;
    bool flush_pins;
};

static void fill_headers(struct table *t, uint64_t lines)
{
    static const uint8_t instance[16];
    uint64_t seed = now_ns();

    shm_header_fill(&t->writer->header, SHM_INDEX, shm_index_bytes(lines), lines, instance);
    shm_header_fill(&t->pins->header, SHM_PINS, shm_pins_bytes(t->filled), t->filled, instance);
    t->writer->seed[0] = random_next(&seed);
    t->writer->seed[1] = random_next(&seed);
    atomic_store(&t->writer->epoch, EPOCH);
}

static int fill(struct table *t)
{
    int r = 0;

    for (uint64_t i = 0; i < t->filled && r == 0; i++) {
        struct shm_key key = chain_key(i);
        uint32_t line;

        r = index_insert(t->writer, &key, EPOCH, (uint32_t)i, &line);
        if (r == 0)
            index_publish(t->writer, line, 4096);
    }
    return r;
}

static void table_free(struct table *t)
{
    memory_free(&t->index_memory);
    memory_free(&t->pins_memory);
}

static int table_new(uint64_t lines, uint64_t filled, struct table *ret)
{
    struct table t = {.filled = filled};
    int r = memory_new(shm_index_bytes(lines), PAGES_SMALL, &t.index_memory);

    if (r == 0)
        r = memory_new(shm_pins_bytes(filled), PAGES_SMALL, &t.pins_memory);
    if (r == 0) {
        t.writer = t.index_memory.rw;
        t.index = t.index_memory.ro;
        t.pins = t.pins_memory.rw;
        fill_headers(&t, lines);
        r = fill(&t);
    }
    if (r < 0)
        table_free(&t);
    else
        *ret = t;
    return r;
}

/* ---- the subject */

static void table_set(struct subject *s, size_t at, uint64_t key)
{
    s->keys[at] = chain_key(key);
}

/* The floor's lines are the home and the three after it; so are ours. The counters lie where the last
 * chain has left them, unless they are flushed, too. */
static void table_flush(struct subject *s)
{
    struct shm_table t = shm_table_of(s->table->index);

    for (size_t i = 0; i < CHAIN; i++) {
        uint64_t home = shm_home(&t, &s->keys[i]);
        struct shm_hit hit = shm_probe(&t, &t.lines[home], &s->keys[i], EPOCH);

        if (s->table->flush_pins && hit.entry)
            flush_line(&s->table->pins->pins[shm_word_slot(hit.word)]);
    }
    flush_wait();
    for (size_t i = 0; i < CHAIN; i++) {
        uint64_t home = shm_home(&t, &s->keys[i]);

        for (uint64_t line = 0; line < 4; line++)
            flush_line(&t.lines[(home + line) & t.mask]);
    }
    flush_wait();
}

static size_t table_lookup(struct subject *s)
{
    return shm_lookup(s->table->index, NULL, s->keys, CHAIN, EPOCH, NULL);
}

static size_t table_pin(struct subject *s)
{
    shm_pin_keys(s->table->index, s->table->pins, s->keys, CHAIN, EPOCH, false, 0, s->pinned,
                 &s->n_pinned);
    return s->n_pinned;
}

static void table_release(struct subject *s)
{
    shm_unpin(s->table->index, s->table->pins, s->pinned, s->n_pinned);
}

static const struct subject_ops table_subject = {
    .set = table_set,
    .flush = table_flush,
    .lookup = table_lookup,
    .pin = table_pin,
    .release = table_release,
};

/* ---- cases */

/* Two tables with as many lines as the floor has entries, and the floor itself. */
struct arena {
    struct floor floor;
    struct table table;
    struct subject *floor_subject, *subject;
};

static void arena_close(struct arena *a)
{
    free(a->floor_subject);
    free(a->subject);
    table_free(&a->table);
    floor_free(&a->floor);
    *a = (struct arena){0};
}

static int arena_open(struct arena *a, uint64_t lines, uint64_t filled)
{
    int r = floor_new(lines, CHAIN, &a->floor);

    if (r == 0)
        r = table_new(lines, filled, &a->table);
    if (r == 0) {
        a->floor_subject = floor_subject_new(&a->floor);
        a->subject = calloc(1, sizeof(*a->subject));
        r = a->floor_subject && a->subject ? 0 : -ENOMEM;
    }
    if (r == 0)
        *a->subject =
            (struct subject){.ops = &table_subject, .table = &a->table, .filled = a->table.filled};
    else
        arena_close(a);
    return r;
}

static uint64_t lines_of(const struct bench *b, bool big)
{
    return b->smoke ? 1 << 14 : big ? 1 << 22 : 1 << 16;
}

static unsigned trials_of(const struct bench *b, bool cold)
{
    return b->smoke ? 5 : cold ? 40 : 400;
}

typedef int (*duel_fn)(struct bench *b, struct duel *d, const char *name, double limit);

/* kvd fills a table to a third at most, the floor is always half full. */
struct setting {
    const char *name;
    double limit;
    bool cold;     /* 4 Mi lines, flushed; else 64 Ki lines and always the same chain */
    unsigned part; /* full to 1 / part */
    bool scattered, flush_pins;
};

static int measure(struct bench *b, const struct setting *x, duel_fn duel)
{
    struct arena a = {0};
    uint64_t lines = lines_of(b, x->cold);
    int r = arena_open(&a, lines, lines / x->part);
    struct duel d = {.cold = x->cold, .trials = trials_of(b, x->cold)};

    if (r < 0)
        return r;
    pin_cpu(0);
    d.ours = a.subject;
    d.floor = a.floor_subject;
    a.subject->scattered = a.floor_subject->scattered = x->scattered;
    a.table.flush_pins = x->flush_pins;
    r = duel(b, &d, x->name, x->limit);
    arena_close(&a);
    return r;
}

static int measure_all(struct bench *b, const struct setting *x, size_t n, duel_fn duel)
{
    int r = 0;

    for (size_t i = 0; i < n && r == 0; i++)
        r = measure(b, &x[i], duel);
    return r;
}

int case_lookup(struct bench *b)
{
    static const struct setting settings[] = {
        {.name = "lookup, hot", .limit = 1.5, .part = 3},
        {.name = "lookup, hot, table half full", .part = 2},
        {.name = "lookup, cold", .limit = 1.5, .part = 3, .cold = true},
        {.name = "lookup, cold, table half full", .part = 2, .cold = true},
    };

    return measure_all(b, settings, sizeof(settings) / sizeof(settings[0]), duel_lookup);
}

int case_pin(struct bench *b)
{
    static const struct setting settings[] = {
        {.name = "pin + release, hot", .limit = 2.0, .part = 3},
        {.name = "pin + release, hot, scattered", .limit = 2.0, .part = 3, .scattered = true},
        {.name = "pin + release, cold", .limit = 1.5, .part = 3, .cold = true},
        {.name = "pin + release, cold, counters too", .part = 3, .cold = true, .flush_pins = true},
        {.name = "pin + release, cold, scattered, counters too",
         .part = 3,
         .cold = true,
         .scattered = true,
         .flush_pins = true},
    };

    return measure_all(b, settings, sizeof(settings) / sizeof(settings[0]), duel_pin);
}
