/* SPDX-License-Identifier: Apache-2.0 */
/* A worker that maps nothing: bytes through the socket, in pieces when they are many. */
#include <errno.h>
#include <string.h>

#include "worker.h"

/* One part, so that it can be put. */
static struct place *place_of_one_part(struct worker *w)
{
    return &w->place[rng_between(&w->rng, 1, 2)];
}

static void get(struct worker *w)
{
    struct place *p = place_of_one_part(w);
    struct content c = worker_content(w, p, worker_chain(w) + rng_below(&w->rng, CONTENT_CHAIN));
    struct kvd_key key = content_key(c.key);
    const void *parts[1] = {w->room};
    const char *wrong;
    struct kvd_meta meta;
    ssize_t n = kvd_remote_get(p->at, &key, 0, w->room, sizeof(w->room), &meta);

    if (n < 0) {
        if (n != -ENOENT)
            worker_judge(w, p, "kvd_remote_get()", n);
        return;
    }
    c.nonce = 0;
    wrong = content_check_meta(&c, &meta, (uint64_t)n);
    if (!wrong)
        wrong = content_check(&c, &meta, parts);
    if (wrong)
        worker_wrong(w, "%s/%s: key %u, epoch %u, through the socket: %s", p->space, p->pool, c.key,
                     c.epoch, wrong);
    else
        atomic_fetch_add(&w->lane->reads, 1);
}

static void put(struct worker *w)
{
    struct place *p = place_of_one_part(w);
    struct content c = worker_content(w, p, worker_chain(w) + rng_below(&w->rng, CONTENT_CHAIN));
    struct kvd_key key = content_key(c.key);
    struct kvd_commit commit = {.ticket = 0};
    struct kvd_meta meta = {.has_parent = c.key % CONTENT_CHAIN != 0};
    int r;

    content_commit(&c, content_checksum(&c, w->room), meta.user, &commit);
    meta.position = commit.position;
    meta.layout = commit.layout;
    meta.checksum = commit.checksum;
    meta.user_bytes = commit.user_bytes;
    meta.tenant = content_tenant(c.key);
    if (meta.has_parent)
        meta.parent = content_key(c.key - 1);
    r = kvd_remote_put(p->at, &key, &meta, w->room, content_bytes(&c));
    if (r == 0)
        atomic_fetch_add(&w->lane->published, 1);
    else if (r != -EEXIST)
        worker_judge(w, p, "kvd_remote_put()", r);
}

static void look_up(struct worker *w)
{
    struct place *p = worker_place(w);
    struct kvd_key keys[CONTENT_CHAIN];
    uint8_t states[CONTENT_CHAIN];
    uint32_t first = worker_chain(w);
    ssize_t r;

    for (uint32_t i = 0; i < CONTENT_CHAIN; i++)
        keys[i] = content_key(first + i);
    r = kvd_remote_lookup(p->at, keys, CONTENT_CHAIN, states);
    if (r < 0)
        worker_judge(w, p, "kvd_remote_lookup()", r);
}

void remote_step(struct worker *w)
{
    switch (rng_below(&w->rng, 5)) {
    case 0:
        look_up(w);
        break;
    case 1:
    case 2:
        put(w);
        break;
    default:
        get(w);
    }
}
