/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random lives of a pool with stores, judged by a simple model:
 *   - what is found has the right bytes, whatever has happened before (I1);
 *   - what was in a store is there until it was evicted, removed, reset or found broken, all of which are
 *     counted; it comes back when it is fetched, unless the device fails;
 *   - each fetch is answered once.
 * SPILL_SEED=n begins with that seed, SPILL_RUNS=n goes on for so many.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spill_world.h"

#define OBJECTS 300u
#define STEPS   1200u
#define PINS    12u
#define RUNS    3u

struct life {
    unsigned int seed;
    const char *text;
    bool faulty;
    bool stored[OBJECTS];
    bool erased[OBJECTS]; /* removed, and not stored since */
    uint64_t gone;        /* that the counters have told of */
    struct shm_pinned pins[PINS];
    uint64_t pinned[PINS]; /* object + 1; 0: free */
    struct reservation held;
    uint64_t reserved; /* object + 1 */
    uint64_t asked, answered;
    uint64_t tags;
    uint64_t removed; /* and are still stored, as far as we know */
};

static struct place p;

static const char *const configs[] = {
    "[space s]\n[pool s/kv]\nslot = 16K\nslots = 48\nlow_water = 4\nhigh_water = 8\n"
    "[spill s/kv/disk]\npath = %s/disk\nsize = 4M\n",

    "[space s]\n[pool s/kv]\nslot = 24K\nparts = 3\nslots = 40\nlow_water = 0\nhigh_water = 0\n"
    "[spill s/kv/disk]\npath = %s/disk\nsize = 4M\nio = threads\nqueue_depth = 3\n",

    "[space s]\n[pool s/kv]\nslot = 4K\nslots = 64\nlow_water = 2\nhigh_water = 8\n"
    "[spill s/kv/disk]\npath = %s/disk\nsize = 3M\nadmission = second_touch\n"
    "[spill s/kv/other]\npath = %s/other\nsize = 3M\n",
};

static const char *const fault_sets[] = {
    "read:error=EIO:from=2M:to=1G:after=20:times=2,write:delay=1",
    "read:flip:from=2M:to=1G:after=10:times=5",
    "write:torn=4096:from=2M:to=1G:after=10:times=5,read:delay=3",
    "any:error=EAGAIN:after=20:times=40,any:refused=EAGAIN:after=10:times=20",
    "any:short=4096:after=5:times=60",
    "write:error=EIO:from=1M:to=1G:after=30:times=3",
    "write:flip:from=1M:to=2M:after=3:times=2,any:delay=2",
    "read:error=EIO:from=1M:to=2M:after=2:times=2",
    "any:error=EIO:from=2M:to=1G:after=40:times=12",
};

static unsigned int pick(struct life *l, unsigned int n)
{
    return (unsigned int)rand_r(&l->seed) % n;
}

/* ---- the model */

static uint64_t count_gone(void)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < nvme_stores(p.w.core->nvme); i++) {
        const struct store_stats *s = store_stats(nvme_store(p.w.core->nvme, i));

        n += s->evicted + s->broken + s->errors;
    }
    return n;
}

/* All that is in no store any more has left for a reason. */
static void compare(struct life *l)
{
    uint64_t lost = 0, gone = count_gone(), told;

    for (uint64_t i = 0; i < OBJECTS; i++) {
        bool now = place_stored(&p, i);

        lost += l->stored[i] && !now;
        l->stored[i] = now;
        l->erased[i] &= !now || l->removed;
    }
    told = gone - l->gone + l->removed;
    cr_assert_leq(lost, told, "%llu left, %llu are accounted for", (unsigned long long)lost,
                  (unsigned long long)told);
    l->removed -=
        lost < l->removed ? lost : l->removed; /* some leave when their reads have ended */
    l->gone = gone;
}

/* Whatever has happened: it begins anew. */
static void forget(struct life *l)
{
    l->gone = count_gone();
    l->removed = 0;
    for (uint64_t i = 0; i < OBJECTS; i++)
        l->stored[i] = place_stored(&p, i);
}

static bool is_allowed(const struct life *l, int status)
{
    switch (status) {
    case 0:
    case -ECANCELED:
    case -ESTALE:
    case -ENOENT:
    case -ETIMEDOUT:
        return true;
    case -EIO:
    case -EAGAIN:
        return l->faulty;
    default:
        return false;
    }
}

static void take_answers(struct life *l)
{
    while (place_has_completion(p.session)) {
        uint64_t tag, i;
        int r = place_completion(&p, &tag);

        i = tag % OBJECTS;
        l->answered++;
        cr_assert(is_allowed(l, r), "object %llu: %d", (unsigned long long)i, r);
        if (r == 0 && place_find(&p, i) == SHM_FOUND_RAM)
            place_check_object(&p, i);
    }
    cr_assert_eq(p.session->promised, l->asked - l->answered);
}

/* ---- what happens */

static void do_put(struct life *l)
{
    int r = place_put(&p, pick(l, OBJECTS));

    cr_assert(r > 0 || r == -ENOSPC, "%d", r);
}

static void do_reserve(struct life *l)
{
    uint64_t i = pick(l, OBJECTS);

    if (l->reserved && pick(l, 2))
        place_commit(&p, l->reserved - 1, &l->held);
    else if (l->reserved)
        cr_assert_eq(pool_abort(p.w.pool, p.attach, l->held.ticket), 0);
    l->reserved = place_reserve(&p, i, &l->held) == RESERVE_NEW ? i + 1 : 0;
}

static void do_ask(struct life *l)
{
    uint64_t i = pick(l, OBJECTS), tag = l->tags++ * OBJECTS + i;
    bool stored = place_stored(&p, i), resident = place_find(&p, i) == SHM_FOUND_RAM;
    int r;

    if (p.session->promised > 500)
        return;
    r = place_ask_of(&p, p.attach, i, tag, pick(l, 10) ? 0 : 1 + pick(l, 20));
    l->asked += r == 1;
    cr_assert(!resident || r == 0);
    cr_assert(r != 1 || stored || place_find(&p, i) != SHM_FOUND_MISS);
    cr_assert(r == 1 || r == 0 || r == -ENOSPC || r == -EINPROGRESS || r == -ENOENT, "%d", r);
    cr_assert(r != -ENOENT || !stored || l->faulty, "object %llu is stored", (unsigned long long)i);
}

static void do_cancel(struct life *l)
{
    uint64_t n = 1 + pick(l, 40) * OBJECTS;

    spill_cancel(p.attach, l->tags * OBJECTS - (n < l->tags * OBJECTS ? n : 0), n);
}

static void do_pin(struct life *l)
{
    unsigned int k = pick(l, PINS);
    uint64_t i = pick(l, OBJECTS);

    if (l->pinned[k])
        world_unpin(p.attach, &l->pins[k]);
    l->pinned[k] = 0;
    if (!place_pin(&p, i, &l->pins[k]))
        return;
    l->pinned[k] = i + 1;
    place_check_object(&p, i);
}

static void unpin_all(struct life *l)
{
    for (unsigned int k = 0; k < PINS; k++) {
        if (l->pinned[k])
            world_unpin(p.attach, &l->pins[k]);
        l->pinned[k] = 0;
    }
}

static void do_touch(struct life *l)
{
    for (int n = 0; n < 10; n++) {
        struct shm_key k = world_key(pick(l, OBJECTS));

        pool_observe(p.w.pool, &k, p.w.space->epoch);
    }
}

static void do_remove(struct life *l)
{
    uint64_t i = pick(l, OBJECTS);
    struct shm_key k = world_key(i);
    struct shm_entry *e = index_find(p.w.pool->index, &k, p.w.space->epoch);
    uint32_t slot = e ? shm_word_slot(shm_load64(&e->word)) : 0;

    l->removed += place_stored(&p, i);
    if (e && !pool_remove(p.w.pool, &slot, 1, HISTORY_REMOVED, REMOVE_FORGET))
        return;
    spill_remove(p.w.pool, &k, p.w.space->epoch);
    l->erased[i] = true;
}

static void drop_reservation(struct life *l)
{
    if (l->reserved)
        pool_abort(p.w.pool, p.attach, l->held.ticket);
    l->reserved = 0;
}

static void do_reset(struct life *l)
{
    if (pick(l, 6))
        return;
    l->reserved = 0; /* to quarantine */
    space_reset(p.w.space);
    forget(l);
    p.w.now_ns += 31000000000u;
}

static void do_second_session(struct life *l)
{
    struct session *s = world_session(&p.w, "", 64);
    struct attach *a = world_attach(s, p.w.pool);
    struct reservation r;
    struct shm_key k = world_key(100000 + pick(l, 50));

    for (unsigned int n = pick(l, 12); n--;)
        place_ask_of(&p, a, pick(l, OBJECTS), n, 0);
    world_reserve(a, &k, NULL, &r);
    place_turns(&p, (int)pick(l, 4));
    session_end(s, pick(l, 2));
    p.w.now_ns += r.status == RESERVE_NEW ? 31000000000u : 0;
}

static void do_task(struct life *l)
{
    static const enum spill_action actions[] = {SPILL_SCRUB, SPILL_TRIM, SPILL_SYNC, SPILL_STOP};
    char why[384];

    store_act(place_store(&p, "s/kv/disk"), actions[pick(l, 4)], false, 0, why, sizeof(why));
}

static void do_offline(struct life *l)
{
    char why[384];

    if (pick(l, 5))
        return;
    place_act(&p, "s/kv/disk", SPILL_OFFLINE, false);
    place_turns(&p, (int)pick(l, 6));
    do_put(l);
    do_ask(l);
    store_act(place_store(&p, "s/kv/disk"), SPILL_ONLINE, false, 0, why, sizeof(why));
    place_await_state(&p, "s/kv/disk", "online");
    take_answers(l);
    forget(l);
}

/* ---- ends and beginnings */

static void all_done(struct life *l)
{
    unpin_all(l);
    drop_reservation(l);
    place_settle(&p);
    place_turns(&p, 30);
    take_answers(l);
    cr_assert_eq(l->asked, l->answered);
}

static void begin(struct life *l, const char *faults)
{
    l->faulty = faults[0] != 0;
    l->asked = l->answered = 0;
    place_open_faulty(&p, l->text, faults);
    forget(l);
}

/* The last of a life, or a crash: then nothing is waited for. */
static void do_reopen(struct life *l)
{
    bool before[OBJECTS], crash = pick(l, 2), was_faulty = l->faulty;

    if (crash) {
        unpin_all(l);
        drop_reservation(l);
    } else {
        all_done(l);
    }
    forget(l);
    memcpy(before, l->stored, sizeof(before));
    place_close(&p);
    begin(l, pick(l, 3) ? fault_sets[pick(l, sizeof(fault_sets) / sizeof(fault_sets[0]))] : "");
    for (uint64_t i = 0; i < OBJECTS && !crash && !was_faulty; i++) {
        cr_assert(l->stored[i] || !before[i], "object %llu is lost", (unsigned long long)i);
        /* One that had left may be back if nothing was written over it; but not one that was removed. */
        cr_assert(before[i] || !l->stored[i] || !l->erased[i], "object %llu has come back",
                  (unsigned long long)i);
    }
}

struct deed {
    unsigned int weight;
    void (*run)(struct life *l);
};

static void do_turn(struct life *l)
{
    place_turns(&p, (int)pick(l, 4));
}

static void do_sleep(struct life *l)
{
    (void)l;
    place_sleep(&p, 6);
}

static void do_evict(struct life *l)
{
    pool_evict(p.w.pool, pick(l, 20), HISTORY_EVICTED);
}

static const struct deed deeds[] = {
    {300, do_put},  {60, do_reserve}, {250, do_ask},          {20, do_cancel}, {60, do_pin},
    {60, do_touch}, {15, do_remove},  {6, do_reset},          {8, do_task},    {6, do_offline},
    {200, do_turn}, {10, do_sleep},   {8, do_second_session}, {60, do_evict},  {4, do_reopen},
};

static void step(struct life *l)
{
    unsigned int all = 0, x;

    for (unsigned int i = 0; i < sizeof(deeds) / sizeof(deeds[0]); i++)
        all += deeds[i].weight;
    x = pick(l, all);
    for (unsigned int i = 0; i < sizeof(deeds) / sizeof(deeds[0]); i++) {
        if (x < deeds[i].weight) {
            deeds[i].run(l);
            break;
        }
        x -= deeds[i].weight;
    }
    take_answers(l);
    for (uint32_t i = 0; i < nvme_stores(p.w.core->nvme); i++) {
        struct store_status s;

        store_status(nvme_store(p.w.core->nvme, i), &s);
        if (strcmp(s.state, "online") != 0) /* the faults were too many */
            forget(l);
    }
    compare(l);
}

/* At the end, on a device that works: all that the stores say they have is there. */
static void check_all(struct life *l)
{
    uint32_t broken = 0, right = 0;

    all_done(l);
    place_close(&p);
    begin(l, "");
    for (uint64_t i = 0; i < OBJECTS; i++) {
        int r;

        if (!place_stored(&p, i))
            continue;
        if ((right + broken) % 16 == 0)
            place_sleep(&p, 6);
        r = place_fetch(&p, i);
        cr_assert(r == 0 || r == -EIO, "%d", r); /* torn and flipped on its way to the medium */
        if (r == 0)
            place_check_object(&p, i);
        right += r == 0;
        broken += r != 0;
    }
    cr_assert_leq(broken, 80u);
    place_turns(&p, 5);
    place_close(&p);
}

static void live(unsigned int seed)
{
    struct life l = {
        .seed = seed, .text = configs[seed % (sizeof(configs) / sizeof(configs[0]))], .tags = 1};

    place_new(&p);
    begin(&l, "");
    for (unsigned int i = 0; i < STEPS; i++) {
        step(&l);
        if (i % 50 == 0)
            place_check(&p);
    }
    check_all(&l);
    place_free(&p);
}

static unsigned int number(const char *name, unsigned int otherwise)
{
    const char *text = getenv(name);

    return text ? (unsigned int)strtoul(text, NULL, 10) : otherwise;
}

Test(spill_random, random_lives_are_as_the_model_says, .timeout = 0)
{
    unsigned int first = number("SPILL_SEED", 1), n = number("SPILL_RUNS", RUNS);

    for (unsigned int i = 0; i < n; i++) {
        fprintf(stderr, "seed %u\n", first + i);
        live(first + i);
    }
}
