/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine of two processes: the scheduler reserves, writes the first part and hands the ticket over; the
 * rank writes the second. Either may die at any moment.
 *
 * The rules that any engine must keep, for kvd trusts a writer with the slots it was given: a rank does not
 * touch a slot whose ticket is old (its reservation may be over), and a scheduler does not give back what
 * a rank may still be writing to. The ages here are far apart, and quarantine is longer than any stop that
 * the coordinator imposes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "worker.h"

enum {
    HANDED_MAX = 8,
    FRESH_US = 500000,    /* a rank does not begin with an older ticket */
    GIVE_UP_US = 8000000, /* a scheduler thinks that nobody is writing any more */
};

struct handed {
    struct content content;
    uint64_t ticket, checksum, since_us;
    uint32_t slot;
};

struct handing {
    size_t n;
    struct handed list[HANDED_MAX];
};

static struct handing *handing_of(struct worker *w)
{
    if (!w->kind_data)
        w->kind_data = calloc(1, sizeof(struct handing));
    return w->kind_data;
}

static int commit_part(struct worker *w, struct place *p, const struct handed *h, uint32_t part)
{
    uint8_t user[128];
    struct kvd_commit c = {.ticket = h->ticket, .part = part};
    void *to = kvd_slot_rw(p->at, h->slot, part);
    ssize_t r;

    if (!to)
        return -EFAULT;
    content_fill(&h->content, part, w->room);
    kvd_copy_in(to, w->room, content_bytes(&h->content));
    content_commit(&h->content, h->checksum, user, &c);
    r = kvd_commit(p->at, &c, 1);
    return r < 0 ? (int)r : c.status;
}

static bool is_pending(struct place *p, const struct handed *h)
{
    struct kvd_key key = content_key(h->content.key);
    uint8_t state = KVD_MISS;

    kvd_lookup(p->at, &key, 1, &state);
    return state == KVD_PENDING;
}

/* Those that the rank has finished are forgotten. Those that nobody finishes, for their rank has died, or
 * the message was lost with it, are given back. */
static void tidy_up(struct worker *w, struct place *p)
{
    struct handing *x = handing_of(w);
    uint64_t now = worker_now_us();

    for (size_t i = 0; x && i < x->n;) {
        bool old = now - x->list[i].since_us > GIVE_UP_US;

        if (!old && is_pending(p, &x->list[i])) {
            i++;
            continue;
        }
        if (old)
            worker_judge(w, p, "kvd_abort()", kvd_abort(p->at, &x->list[i].ticket, 1));
        x->list[i] = x->list[--x->n];
    }
}

static void hand_over(struct worker *w, struct place *p, const struct kvd_reservation *got,
                      uint32_t key)
{
    struct handing *x = handing_of(w);
    struct handed h = {.content = worker_content(w, p, key),
                       .ticket = got->ticket,
                       .slot = got->slot,
                       .since_us = worker_now_us()};
    int r;

    h.checksum = content_checksum(&h.content, w->room);
    r = commit_part(w, p, &h, 0);
    if (r == 0 && x->n < HANDED_MAX) {
        x->list[x->n++] = h;
        if (send(w->engine, &h, sizeof(h), MSG_DONTWAIT) == sizeof(h))
            return;
        x->n--; /* nobody knows of it */
    } else if (r < 0) {
        worker_judge(w, p, "commit of part 0", r);
    }
    worker_judge(w, p, "kvd_abort()", kvd_abort(p->at, &h.ticket, 1));
}

void scheduler_step(struct worker *w)
{
    struct place *p = &w->place[0]; /* the one of two parts */
    uint32_t key = worker_chain(w) + rng_below(&w->rng, CONTENT_CHAIN);
    struct kvd_key k = content_key(key), parent = content_key(key ? key - 1 : 0);
    struct kvd_reserve q = {.keys = &k,
                            .n = 1,
                            .parent = key % CONTENT_CHAIN ? &parent : NULL,
                            .tenant = content_tenant(key)};
    struct kvd_reservation got;
    struct handing *x = handing_of(w);
    ssize_t r;

    tidy_up(w, p);
    if (rng_once_in(&w->rng, 2))
        worker_read(w);
    if (!x || x->n == HANDED_MAX)
        return;
    r = kvd_reserve(p->at, &q, &got);
    if (r < 0)
        worker_judge(w, p, "kvd_reserve()", r);
    else if (r == 1)
        hand_over(w, p, &got, key);
    else if (got.status < 0)
        worker_judge(w, p, "reserve", got.status);
}

void rank_step(struct worker *w)
{
    struct place *p = &w->place[0];
    struct handed h;
    int r;

    if (rng_once_in(&w->rng, 2))
        worker_read(w);
    if (recv(w->engine, &h, sizeof(h), MSG_DONTWAIT) != sizeof(h))
        return;
    if (worker_now_us() - h.since_us > FRESH_US || h.content.epoch != kvd_space_epoch(p->in))
        return;
    r = commit_part(w, p, &h, 1);
    if (r == 0)
        atomic_fetch_add(&w->lane->published, 1);
    else
        worker_judge(w, p, "commit of part 1", r);
}
