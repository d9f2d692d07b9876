/* SPDX-License-Identifier: Apache-2.0 */
/* Publishing without waiting: many keys and parts in flight, answers in whatever order. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "worker.h"

enum {
    FLIGHTS = 64,
};

/* One object on its way: reserved, then both parts. Its place in the array is in user_data. */
struct flight {
    bool used;
    struct place *place;
    struct content content;
    uint64_t checksum, ticket;
    uint32_t answers; /* of commits still to come; 0: the reservation's */
    bool failed;
    uint8_t user[128];
};

struct flights {
    struct flight flight[FLIGHTS];
};

static struct flights *flights_of(struct worker *w)
{
    if (!w->kind_data)
        w->kind_data = calloc(1, sizeof(struct flights));
    return w->kind_data;
}

static uint64_t tag_of(struct flights *x, const struct flight *f)
{
    return (uint64_t)(f - x->flight) << 8;
}

static void start(struct worker *w, struct flights *x)
{
    struct place *p = worker_place(w);
    uint32_t key = worker_chain(w) + rng_below(&w->rng, CONTENT_CHAIN);
    struct kvd_key k = content_key(key), parent = content_key(key ? key - 1 : 0);
    struct kvd_reserve q = {.keys = &k,
                            .n = 1,
                            .parent = key % CONTENT_CHAIN ? &parent : NULL,
                            .tenant = content_tenant(key)};
    struct flight *f = x->flight;
    ssize_t r;

    while (f < x->flight + FLIGHTS && f->used)
        f++;
    if (f == x->flight + FLIGHTS)
        return;
    *f = (struct flight){.used = true, .place = p, .content = worker_content(w, p, key)};
    r = kvd_submit_reserve(p->at, &q, tag_of(x, f));
    f->used = r == 1; /* 0: the ring is full */
    if (r < 0)
        worker_judge(w, p, "kvd_submit_reserve()", r);
}

static void give_back(struct worker *w, struct flight *f)
{
    worker_judge(w, f->place, "kvd_abort()", kvd_abort(f->place->at, &f->ticket, 1));
    f->used = false;
}

static void on_reserved(struct worker *w, struct flights *x, struct flight *f,
                        const struct kvd_completion *c)
{
    struct kvd_commit commits[WORKER_PARTS];
    ssize_t r;

    if (c->status != KVD_NEW) {
        f->used = false;
        worker_judge(w, f->place, "reserve", c->status);
        return;
    }
    f->ticket = c->ticket;
    f->checksum = content_checksum(&f->content, w->room);
    for (uint32_t i = 0; i < f->content.parts; i++) {
        void *to = kvd_slot_rw(f->place->at, c->slot, i);

        if (!to) {
            worker_wrong(w, "kvd_slot_rw(slot %u, part %u): not mapped", c->slot, i);
            return;
        }
        content_fill(&f->content, i, w->room);
        kvd_copy_in(to, w->room, content_bytes(&f->content));
        commits[i] = (struct kvd_commit){.ticket = c->ticket, .part = i};
        content_commit(&f->content, f->checksum, f->user, &commits[i]);
    }
    r = kvd_submit_commit(f->place->at, commits, f->content.parts, tag_of(x, f) + 1);
    f->answers = r > 0 ? (uint32_t)r : 0;
    f->failed = r < (ssize_t)f->content.parts;
    if (r < 0)
        worker_judge(w, f->place, "kvd_submit_commit()", r);
    if (r <= 0)
        give_back(w, f);
}

static void on_committed(struct worker *w, struct flight *f, const struct kvd_completion *c)
{
    if (c->status < 0)
        worker_judge(w, f->place, "commit", c->status);
    f->failed |= c->status < 0;
    if (--f->answers)
        return;
    if (f->failed) {
        give_back(w, f);
        return;
    }
    f->used = false;
    atomic_fetch_add(&w->lane->published, 1);
}

static void collect(struct worker *w, struct flights *x)
{
    struct kvd_completion c[8];
    ssize_t n = kvd_completions(w->kvd, c, 1 + rng_below(&w->rng, 8));

    if (n < 0)
        worker_judge(w, &w->place[0], "kvd_completions()", n);
    for (ssize_t i = 0; i < n; i++) {
        uint64_t place = c[i].user_data >> 8, part = c[i].user_data & 255;
        struct flight *f = place < FLIGHTS ? &x->flight[place] : NULL;

        if (!f || !f->used || (part != 0) != (f->answers != 0)) {
            worker_wrong(w, "a completion for nothing in flight: %llx",
                         (unsigned long long)c[i].user_data);
            continue;
        }
        if (part)
            on_committed(w, f, &c[i]);
        else
            on_reserved(w, x, f, &c[i]);
    }
}

/* Sleeps until the daemon has answered; a wake-up that is lost shows as nothing happening. */
static void sleep_on_event(struct worker *w, struct flights *x)
{
    struct pollfd p = {.fd = kvd_event_fd(w->kvd), .events = POLLIN};
    ssize_t n = kvd_drain(w->kvd);
    bool busy = false;

    if (n < 0)
        worker_judge(w, &w->place[0], "kvd_drain()", n);
    for (int i = 0; i < FLIGHTS; i++)
        busy |= x->flight[i].used;
    if (n != 0 || !busy)
        return;
    if (poll(&p, 1, 60000) == 0)
        worker_wrong(w, "requests are in flight, and for a minute there is no wake-up");
}

void async_step(struct worker *w)
{
    struct flights *x = flights_of(w);

    if (!x)
        return;
    for (uint32_t i = rng_below(&w->rng, 12); i; i--)
        start(w, x);
    if (rng_once_in(&w->rng, 4))
        worker_read(w);
    if (rng_once_in(&w->rng, 3))
        sleep_on_event(w, x);
    collect(w, x);
}
