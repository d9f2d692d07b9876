/* SPDX-License-Identifier: Apache-2.0 */
/* Pinning, verifying, holding. */
#include <errno.h>
#include <string.h>

#include "worker.h"

struct hold *worker_hold(struct worker *w, struct place *p)
{
    for (int i = 0; i < WORKER_HOLDS; i++) {
        struct hold *h = &w->hold[i];

        if (h->set)
            continue;
        if (kvd_pinset_new(w->kvd, rng_below(&w->rng, 4), &h->set) < 0)
            return NULL;
        h->place = p;
        h->n = 0;
        return h;
    }
    return NULL;
}

void worker_let_go(struct hold *h)
{
    kvd_pinset_free(h->set);
    h->set = NULL;
}

void worker_hold_for(struct worker *w, struct hold *h)
{
    h->until_us = worker_now_us() + rng_below(&w->rng, rng_once_in(&w->rng, 60) ? 1000000 : 8000);
}

static void verify_one(struct worker *w, const struct hold *h, size_t i, const char *when)
{
    const struct kvd_ref *ref = &kvd_pinset_refs(h->set)[i];
    struct content c = h->content[i];
    const void *parts[WORKER_PARTS];
    const char *wrong = NULL;
    struct kvd_meta meta;

    if (kvd_pinset_meta(h->set, i, &meta) < 0)
        wrong = "no metadata";
    for (uint32_t k = 0; k < c.parts && !wrong; k++) {
        parts[k] = kvd_pinset_data(h->set, i, k);
        if (!parts[k])
            wrong = "no data";
    }
    if (!wrong)
        wrong = content_check_meta(&c, &meta, c.nonce ? content_bytes(&c) : ref->bytes);
    if (!wrong && h->content[i].nonce && c.nonce != h->content[i].nonce)
        wrong = "another object than before (I3)";
    if (!wrong)
        wrong = content_check(&c, &meta, parts);
    if (wrong)
        worker_wrong(w, "%s/%s: key %u, epoch %u, slot %u, %s: %s", h->place->space, h->place->pool,
                     c.key, c.epoch, ref->slot, when, wrong);
    else
        atomic_fetch_add(&w->lane->reads, 1);
}

void worker_verify(struct worker *w, const struct hold *h, const char *when)
{
    for (size_t i = 0; i < h->n; i++)
        if (kvd_pinset_refs(h->set)[i].slot != UINT32_MAX)
            verify_one(w, h, i, when);
}

/* From now on it must stay this very object. */
static void note_nonces(struct hold *h)
{
    for (size_t i = 0; i < h->n; i++) {
        struct kvd_meta m;

        if (kvd_pinset_meta(h->set, i, &m) == 0)
            content_check_meta(&h->content[i], &m, 0); /* has been verified */
    }
}

/* A state that lookup may give for a key: anything at any moment, but nothing that is not a state. */
static void look_up(struct worker *w, struct place *p, const struct kvd_key *keys, size_t n)
{
    uint8_t states[CONTENT_CHAIN];
    ssize_t leading = kvd_lookup(p->at, keys, n, states);

    if (leading < 0 || (size_t)leading > n)
        worker_wrong(w, "kvd_lookup() = %zd", leading);
    for (size_t i = 0; i < n; i++)
        if (states[i] != KVD_MISS && states[i] != KVD_RAM && states[i] != KVD_PENDING)
            worker_wrong(w, "kvd_lookup(): state %u", states[i]);
}

void worker_read(struct worker *w)
{
    struct place *p = worker_place(w);
    struct hold *h = worker_hold(w, p);
    uint32_t first = worker_chain(w), n = rng_between(&w->rng, 1, CONTENT_CHAIN);
    bool all = rng_once_in(&w->rng, 3);
    struct kvd_key keys[CONTENT_CHAIN];
    ssize_t got;

    if (!h)
        return;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = content_key(first + i);
        h->content[i] = worker_content(w, p, first + i);
        h->content[i].nonce = 0; /* whoever has written it */
    }
    if (rng_once_in(&w->rng, 4))
        look_up(w, p, keys, n);
    got = kvd_pin(h->set, p->at, keys, n, all ? KVD_PIN_ALL : 0);
    h->n = kvd_pinset_count(h->set);
    if (got < 0 || h->n > n || (all && h->n != n))
        worker_wrong(w, "kvd_pin() = %zd of %u, %zu references", got, n, h->n);
    worker_verify(w, h, "when it was pinned");
    note_nonces(h);
    if (rng_once_in(&w->rng, 4)) {
        kvd_pinset_truncate(h->set, h->n / 2);
        h->n /= 2;
    }
    if (rng_once_in(&w->rng, 4))
        kvd_observe(p->at, keys, n);
    worker_hold_for(w, h);
}

void worker_release(struct worker *w, uint64_t now_us)
{
    for (int i = 0; i < WORKER_HOLDS; i++) {
        struct hold *h = &w->hold[i];

        if (!h->set || h->until_us > now_us)
            continue;
        worker_verify(w, h, "before it was released");
        worker_let_go(h);
    }
}

void worker_release_all(struct worker *w)
{
    worker_release(w, UINT64_MAX);
}
