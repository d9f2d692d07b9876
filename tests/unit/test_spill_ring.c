/* SPDX-License-Identifier: Apache-2.0 */
/* Fetches through a session's rings. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "shm/ring.h"
#include "spill_world.h"

#define POOL                                                                                       \
    "[space s]\n[pool s/kv]\nslot = 64K\nslots = 32\nlow_water = 0\nhigh_water = 0\n"              \
    "[spill s/kv/disk]\npath = %s/disk\nsize = 32M\n"
#define DATA ":from=2M:to=1G"

static struct place p;

#define RING_TEST(name) PLACE_TEST(spill_ring, name)

static void post(struct session *s, const struct shm_request *q)
{
    struct shm_cursor c = {.ring = &s->shm->requests,
                           .entries = s->ring_entries,
                           .mine = shm_load32(&s->shm->requests.tail)};

    cr_assert_gt(shm_ring_room(&c), 0u);
    s->shm->request[shm_ring_at(&c, c.mine)] = *q;
    shm_ring_produce(&c, 1);
}

static void post_fetch(struct session *s, uint64_t i, uint64_t tag, uint8_t flags)
{
    struct shm_request q = {.op = SHM_FETCH,
                            .flags = flags,
                            .pool = p.w.pool->id,
                            .user_data = tag,
                            .epoch = p.w.space->epoch,
                            .fetch = {.key = world_key(i)}};

    post(s, &q);
}

static int serve_all(struct session *s)
{
    int n, all = 0;

    while ((n = session_serve(s, 64)) > 0)
        all += n;
    cr_assert_eq(n, 0);
    return all;
}

RING_TEST(once_a_key_of_a_batch_cannot_be_had_the_rest_is_not_tried)
{
    uint64_t tag;
    int status[8] = {0};

    place_open_filled(&p, POOL, 8, "");
    post_fetch(p.session, 0, 0, 0);
    post_fetch(p.session, 1, 1, SHM_GOES_ON);
    post_fetch(p.session, 999, 2, SHM_GOES_ON);
    post_fetch(p.session, 3, 3, SHM_GOES_ON);
    post_fetch(p.session, 4, 4, SHM_GOES_ON);
    post_fetch(p.session, 5, 5, 0); /* another batch */
    post_fetch(p.session, 6, 6, SHM_GOES_ON);
    cr_assert_eq(serve_all(p.session), 7);
    for (int i = 0; i < 7; i++) {
        int r = place_completion(&p, &tag);

        status[tag] = r;
    }
    for (int i = 0; i < 7; i++)
        cr_assert_eq(status[i], i >= 2 && i <= 4 ? -ENOENT : 0, "%d: %d", i, status[i]);
    cr_assert_eq(place_find(&p, 3), SHM_FOUND_NVME);
    cr_assert_eq(place_find(&p, 6), SHM_FOUND_RAM);
    place_close(&p);
}

RING_TEST(a_ring_request_cancels_a_range_of_tags)
{
    struct shm_request q = {.op = SHM_CANCEL, .pool = p.w.pool ? p.w.pool->id : 0};
    uint64_t tag;

    place_open_filled(&p, POOL, 8, "read:hang" DATA);
    for (uint64_t i = 0; i < 8; i++)
        post_fetch(p.session, i, 100 + i, 0);
    q.pool = p.w.pool->id;
    q.cancel.user_data = 102;
    q.cancel.n = 3;
    post(p.session, &q);
    cr_assert_eq(serve_all(p.session), 9);
    for (uint64_t i = 0; i < 3; i++) {
        cr_assert_eq(place_completion(&p, &tag), -ECANCELED);
        cr_assert_eq(tag, 102 + i);
    }
    cr_assert_not(place_has_completion(p.session));
    place_release(&p);
    for (int i = 0; i < 5; i++) {
        cr_assert_eq(place_completion(&p, &tag), 0);
        cr_assert(tag < 102 || tag >= 105);
    }
    place_close(&p);
}

/* 16 entries: what is promised has its room, whoever else wants to answer. */
RING_TEST(completions_that_were_promised_always_have_room)
{
    struct session *s;
    uint64_t tag, seen = 0;

    place_open_filled(&p, POOL, 12, "read:hang" DATA);
    s = world_session(&p.w, "", 16);
    world_attach(s, p.w.pool);
    cr_assert_eq(s->ring_entries, 16u);
    for (uint64_t i = 0; i < 10; i++)
        post_fetch(s, i, i, 0);
    cr_assert_eq(serve_all(s), 10);
    cr_assert_eq(s->promised, 10u);
    for (uint64_t i = 10; i < 26; i++)
        post_fetch(s, 900 + i, i, 0); /* misses, answered at once */
    cr_assert_eq(serve_all(s), 6);
    place_turns(&p, 3);
    cr_assert_eq(serve_all(s), 0);
    place_release(&p);
    place_settle(&p);
    cr_assert_not(s->broken);
    cr_assert_eq(s->promised, 0u);
    for (int i = 0; i < 26; i++) {
        int r = place_completion_of(&p, s, &tag);

        cr_assert_eq(r, tag < 10 ? 0 : -ENOENT);
        cr_assert_not(seen >> tag & 1);
        seen |= (uint64_t)1 << tag;
        serve_all(s);
    }
    cr_assert_eq(seen, ((uint64_t)1 << 26) - 1);
    place_close(&p);
}

RING_TEST(a_session_that_was_broken_is_not_written_to)
{
    place_open_filled(&p, POOL, 4, "read:hang" DATA);
    for (uint64_t i = 0; i < 4; i++)
        cr_assert_eq(place_ask(&p, i, i), 1);
    session_break(p.session, "test");
    place_release(&p);
    place_settle(&p);
    cr_assert_not(place_has_completion(p.session));
    cr_assert_eq(p.session->promised, 0u);
    place_close(&p);
}
