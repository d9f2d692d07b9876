/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

uint64_t worker_now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

bool worker_stops(const struct worker *w)
{
    return atomic_load(&w->board->stop) != 0;
}

void worker_wrong(struct worker *w, const char *format, ...)
{
    va_list args;

    atomic_fetch_add(&w->lane->wrong, 1);
    if (atomic_load(&w->lane->said))
        return;
    va_start(args, format);
    vsnprintf(w->lane->what, sizeof(w->lane->what), format, args);
    va_end(args);
    atomic_store(&w->lane->said, 1);
}

static void refresh(struct worker *w, struct kvd_space *space)
{
    int r = kvd_space_refresh(space);

    if (r < 0)
        worker_wrong(w, "kvd_space_refresh(): %s: %s", strerror(-r), kvd_last_error(w->kvd));
}

void worker_judge(struct worker *w, struct place *p, const char *call, ssize_t result)
{
    if (result >= 0)
        return;
    if (result == -ENOSPC || result == -EDQUOT) {
        atomic_fetch_add(&w->lane->refused, 1);
    } else if (result == -ESTALE) {
        atomic_fetch_add(&w->lane->stale, 1);
        refresh(w, p->in);
    } else {
        worker_wrong(w, "%s: %s: %s", call, strerror((int)-result), kvd_last_error(w->kvd));
    }
}

struct content worker_content(struct worker *w, const struct place *p, uint32_t key)
{
    return (struct content){
        .nonce = rng_next(&w->rng) | 1ull << 63, /* never 0 */
        .place = (uint32_t)(p - w->place),
        .key = key,
        .epoch = kvd_space_epoch(p->in),
        .parts = p->info.parts,
        .part_bytes = p->info.part_bytes,
    };
}

struct place *worker_place(struct worker *w)
{
    static const uint8_t odds[] = {0, 0, 0, 1, 2, 2};

    return &w->place[odds[rng_below(&w->rng, sizeof(odds))]];
}

uint32_t worker_chain(struct worker *w)
{
    uint32_t a = rng_below(&w->rng, CONTENT_CHAINS), b = rng_below(&w->rng, CONTENT_CHAINS);

    return (a < b ? a : b) * CONTENT_CHAIN;
}

/* ---- publishing */

/* What one publication knows of a key. */
struct writing {
    struct content content;
    uint64_t checksum;
    struct kvd_reservation *reservation;
    uint8_t user[128];
};

static void write_parts(struct worker *w, struct place *p, struct writing *x)
{
    x->checksum = content_checksum(&x->content, w->room);
    for (uint32_t i = 0; i < x->content.parts; i++) {
        void *to = kvd_slot_rw(p->at, x->reservation->slot, i);

        if (!to) {
            worker_wrong(w, "kvd_slot_rw(slot %u, part %u): not mapped", x->reservation->slot, i);
            return;
        }
        content_fill(&x->content, i, w->room);
        kvd_copy_in(to, w->room, content_bytes(&x->content));
    }
}

static void shuffle(struct worker *w, struct kvd_commit *c, size_t n)
{
    for (; n > 1; n--) {
        size_t k = rng_below(&w->rng, (uint32_t)n);
        struct kvd_commit x = c[k];

        c[k] = c[n - 1];
        c[n - 1] = x;
    }
}

static void commit(struct worker *w, struct place *p, struct writing *x, size_t n)
{
    struct kvd_commit c[CONTENT_CHAIN * WORKER_PARTS];
    size_t parts = 0, done = 0;
    ssize_t r;

    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < x[i].content.parts; k++, parts++) {
            c[parts] = (struct kvd_commit){.ticket = x[i].reservation->ticket, .part = k};
            content_commit(&x[i].content, x[i].checksum, x[i].user, &c[parts]);
        }
    shuffle(w, c, parts);
    r = kvd_commit(p->at, c, parts);
    worker_judge(w, p, "kvd_commit()", r);
    for (size_t i = 0; i < parts; i++) {
        done += c[i].status == 0;
        if (r >= 0 && c[i].status < 0)
            worker_judge(w, p, "commit", c[i].status);
    }
    if (r >= 0 && done != (size_t)r)
        worker_wrong(w, "kvd_commit() = %zd, %zu statuses are 0", r, done);
    for (size_t i = 0; i < n; i++) { /* seen in kvd_commit()'s order, judged in ours */
        bool all = true;

        for (size_t k = 0; k < parts; k++)
            all &= c[k].ticket != x[i].reservation->ticket || c[k].status == 0;
        atomic_fetch_add(&w->lane->published, all);
        x[i].reservation->status = all ? KVD_PRESENT : -ESTALE;
    }
}

/* Some give up half-way. */
static void finish(struct worker *w, struct place *p, struct writing *x, size_t n)
{
    uint64_t tickets[CONTENT_CHAIN];
    size_t keep = rng_once_in(&w->rng, 8) ? rng_below(&w->rng, (uint32_t)n + 1) : n;
    ssize_t r;

    if (rng_once_in(&w->rng, 8))
        usleep(rng_below(&w->rng, 20000)); /* time to be killed or overtaken in */
    if (keep)
        commit(w, p, x, keep);
    for (size_t i = keep; i < n; i++) {
        tickets[i - keep] = x[i].reservation->ticket;
        x[i].reservation->status = -ECANCELED;
    }
    if (keep == n)
        return;
    r = kvd_abort(p->at, tickets, n - keep);
    worker_judge(w, p, "kvd_abort()", r);
    if (r > (ssize_t)(n - keep))
        worker_wrong(w, "kvd_abort() = %zd of %zu", r, n - keep);
}

/* Holds what it writes, and looks at it afterwards. */
static struct hold *hold_reserved(struct worker *w, struct place *p, struct writing *x, size_t n)
{
    struct hold *h = worker_hold(w, p);

    for (size_t i = 0; h && i < n; i++) {
        int r = kvd_pin_reserved(h->set, p->at, x[i].reservation);

        if (r < 0)
            worker_judge(w, p, "kvd_pin_reserved()", r);
        else
            h->content[h->n++] = x[i].content;
    }
    if (h && h->n != n) {
        worker_let_go(h);
        h = NULL;
    }
    return h;
}

static void look_back(struct worker *w, struct hold *h, const struct writing *x, size_t n)
{
    bool all = true;

    for (size_t i = 0; i < n; i++)
        all &= x[i].reservation->status == KVD_PRESENT;
    if (!all) {
        worker_let_go(h);
        return;
    }
    worker_verify(w, h, "after its commit");
    worker_hold_for(w, h);
}

static void publish(struct worker *w)
{
    struct place *p = worker_place(w);
    struct kvd_key keys[CONTENT_CHAIN];
    struct kvd_reservation got[CONTENT_CHAIN];
    struct writing x[CONTENT_CHAIN];
    uint32_t from = rng_below(&w->rng, CONTENT_CHAIN), first = worker_chain(w) + from, n = 0;
    struct kvd_key parent = content_key(first ? first - 1 : 0);
    struct kvd_reserve q = {.keys = keys,
                            .n = rng_between(&w->rng, 1, CONTENT_CHAIN - from),
                            .parent = from ? &parent : NULL,
                            .chain = 1,
                            .tenant = content_tenant(first)};
    struct hold *h = NULL;
    ssize_t r;

    for (size_t i = 0; i < q.n; i++)
        keys[i] = content_key(first + (uint32_t)i);
    r = kvd_reserve(p->at, &q, got);
    if (r < 0) {
        worker_judge(w, p, "kvd_reserve()", r);
        return;
    }
    for (uint32_t i = 0; i < q.n; i++)
        if (got[i].status == KVD_NEW)
            x[n++] = (struct writing){.content = worker_content(w, p, first + i),
                                      .reservation = &got[i]};
        else if (got[i].status != KVD_IN_PROGRESS && got[i].status != KVD_PRESENT)
            worker_judge(w, p, "reserve", got[i].status < 0 ? got[i].status : -EPROTO);
    if (n != r)
        worker_wrong(w, "kvd_reserve() = %zd, %u are new", r, n);
    if (!n)
        return;
    if (rng_once_in(&w->rng, 3))
        h = hold_reserved(w, p, x, n);
    for (uint32_t i = 0; i < n; i++)
        write_parts(w, p, &x[i]);
    finish(w, p, x, n);
    if (h)
        look_back(w, h, x, n);
}

/* ---- trouble of its own making */

/* What is pinned is read on although the socket is gone. */
static void hang_up(struct worker *w)
{
    shutdown(kvd_event_fd(w->kvd), SHUT_RDWR);
    for (int i = 0; i < 4; i++) {
        usleep(rng_below(&w->rng, 5000));
        for (int k = 0; k < WORKER_HOLDS; k++)
            if (w->hold[k].set)
                worker_verify(w, &w->hold[k], "after hanging up");
    }
    if (rng_once_in(&w->rng, 2))
        worker_judge(w, &w->place[0], "kvd_ping()", kvd_ping(w->kvd));
}

/* A child that keeps the socket for a while. */
static void fork_child(struct worker *w)
{
    uint32_t us = rng_below(&w->rng, 300000);
    struct kvd_key key = content_key(0);
    pid_t pid = fork();

    if (pid)
        return;
    if (kvd_lookup(w->place[0].at, &key, 1, NULL) != -ECHILD || kvd_ping(w->kvd) != -ECHILD)
        worker_wrong(w, "a handle works in a forked child");
    usleep(us);
    _exit(0);
}

static void reset(struct worker *w)
{
    struct kvd_space *s = w->space[rng_below(&w->rng, 2)];
    uint32_t before = kvd_space_epoch(s), epoch;
    int r = kvd_space_reset(s, &epoch);

    if (r < 0 || epoch <= before || kvd_space_epoch(s) != epoch)
        worker_wrong(w, "kvd_space_reset() = %d, epoch %u after %u", r, r ? 0 : epoch, before);
    atomic_fetch_add(&w->lane->resets, 1);
}

/* ---- connecting */

static void open_space(struct worker *w, int i, const char *name)
{
    struct kvd_space_options o;
    int r;

    kvd_space_options_init(&o, sizeof(o));
    o.write = w->kind != KIND_READER;
    r = kvd_space_open(w->kvd, name, &o, &w->space[i]);
    if (r == 0)
        return;
    fprintf(stderr, "worker %u: space %s: %s\n", w->number, name, kvd_last_error(w->kvd));
    exit(3);
}

static void open_places(struct worker *w)
{
    static const struct place places[WORKER_POOLS] = {{.space = "a", .pool = "kv"},
                                                      {.space = "a", .pool = "state"},
                                                      {.space = "b", .pool = "kv"}};

    open_space(w, 0, "a");
    open_space(w, 1, "b");
    for (int i = 0; i < WORKER_POOLS; i++) {
        struct place *p = &w->place[i];

        *p = places[i];
        p->in = w->space[p->space[0] == 'b'];
        if (kvd_pool_get(p->in, p->pool, &p->at) < 0)
            exit(3);
        kvd_pool_info(p->at, &p->info);
        if (p->info.parts > WORKER_PARTS || p->info.part_bytes > WORKER_PART)
            exit(3);
    }
}

static void connect_worker(struct worker *w)
{
    char token[32], client[32];
    struct kvd_options o;
    int r;

    snprintf(client, sizeof(client), "random-%u-%d", w->number, w->kind);
    snprintf(token, sizeof(token), "engine-%u", w->number / KINDS);
    kvd_options_init(&o, sizeof(o));
    o.client = client;
    o.timeout_ms = 60000; /* a busy machine is no failure */
    o.socket = w->kind == KIND_READER ? w->reader_socket : w->writer_socket;
    o.ring_entries = 16u << rng_below(&w->rng, 4);
    o.spin_us = rng_below(&w->rng, 100);
    o.flags = w->kind == KIND_REMOTE ? KVD_NO_SHM : 0;
    if (w->kind == KIND_SCHEDULER || w->kind == KIND_RANK) {
        o.engine_token = token;
        o.engine_token_len = strlen(token);
    }
    r = kvd_connect(&o, &w->kvd);
    if (r < 0) {
        fprintf(stderr, "worker %u: %s\n", w->number, kvd_last_error(NULL));
        exit(3);
    }
    open_places(w);
}

static void disconnect(struct worker *w)
{
    worker_release_all(w);
    kvd_space_close(w->space[0]);
    if (rng_once_in(&w->rng, 2))
        kvd_space_close(w->space[1]);
    kvd_close(w->kvd);
}

void worker_step(struct worker *w)
{
    if (w->kind == KIND_READER || !rng_once_in(&w->rng, 4))
        worker_read(w);
    else
        publish(w);
    if (rng_once_in(&w->rng, 400))
        hang_up(w);
    if (rng_once_in(&w->rng, 800))
        fork_child(w);
    if (w->kind == KIND_WORKER && rng_once_in(&w->rng, 3000))
        reset(w);
    if (rng_once_in(&w->rng, 500)) {
        disconnect(w);
        connect_worker(w);
    }
}

static void live(struct worker *w)
{
    while (!worker_stops(w)) {
        for (int i = 0; i < WORKER_POOLS; i++) /* others reset, too */
            if (kvd_space_current(w->place[i].in) == -ESTALE)
                worker_judge(w, &w->place[i], "kvd_space_current()", -ESTALE);
        switch (w->kind) {
        case KIND_SCHEDULER:
            scheduler_step(w);
            break;
        case KIND_RANK:
            rank_step(w);
            break;
        case KIND_ASYNC:
            async_step(w);
            break;
        case KIND_REMOTE:
            remote_step(w);
            break;
        default:
            worker_step(w);
        }
        worker_release(w, worker_now_us());
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        if (rng_once_in(&w->rng, 3))
            usleep(rng_below(&w->rng, 1000));
    }
}

/* worker KIND NUMBER SEED BOARD_FD ENGINE_FD WRITER_SOCKET READER_SOCKET */
int worker_main(int argc, char **argv)
{
    static struct worker w;

    if (argc != 8)
        return 2;
    w.kind = (enum kind)atoi(argv[1]);
    w.number = (uint32_t)atoi(argv[2]);
    w.rng.state = strtoull(argv[3], NULL, 10);
    w.engine = atoi(argv[5]);
    w.writer_socket = argv[6];
    w.reader_socket = argv[7];
    w.board = mmap(NULL, sizeof(*w.board), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[4]), 0);
    if (w.board == MAP_FAILED || w.number >= BOARD_LANES || w.kind >= KINDS)
        return 2;
    w.lane = &w.board->lane[w.number];
    connect_worker(&w);
    live(&w);
    if (w.kind == KIND_SCHEDULER) /* its rank may still be writing: only a death keeps the slots */
        _exit(0);
    disconnect(&w);
    free(w.kind_data);
    return 0;
}
