/* SPDX-License-Identifier: Apache-2.0 */
/* Looking keys up in a pool's index and in that of its spill stores, against the obvious way to do it. */
#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "daemon/index.h"
#include "shm/header.h"
#include "shm/lookup.h"

#define EPOCH 5u
#define KEYS  96u
#define LINES 64u /* of each: few, so that probes are long */

/* What is known of a key, the slow way. */
struct known {
    enum shm_state ram, nvme;
    uint32_t line, record; /* where, if not EMPTY */
};

static struct shm_index *ram, *nvme;
static struct known known[KEYS];
static struct shm_key all[KEYS];

static struct shm_index *index_new(enum shm_kind kind, uint64_t seed)
{
    struct shm_index *ix = aligned_alloc(SHM_PAGE, shm_index_bytes(LINES));

    cr_assert_neq(ix, NULL);
    memset(ix, 0, shm_index_bytes(LINES));
    shm_header_fill(&ix->header, kind, shm_index_bytes(LINES), LINES, (const uint8_t[16]){1});
    ix->seed[0] = seed;
    ix->seed[1] = ~seed;
    return ix;
}

static void setup(void)
{
    ram = index_new(SHM_INDEX, 0x0123456789abcdef);
    nvme = index_new(SHM_NVME, 0xfedcba9876543210);
    atomic_store(&ram->epoch, EPOCH);
    memset(known, 0, sizeof(known));
    for (unsigned i = 0; i < KEYS; i++) {
        all[i] = (struct shm_key){.hash = {3}, .group = i & 1};
        memcpy(all[i].hash + 28, &i, sizeof(i));
    }
}

static void teardown(void)
{
    free(ram);
    free(nvme);
}

/* Changes what is stored under a key, in one of the two; states as in the index. */
static void put(struct shm_index *ix, unsigned key, enum shm_state *state, uint32_t *line,
                enum shm_state now)
{
    if (*state == SHM_LEAVING)
        index_restore(ix, *line);
    if (*state != SHM_EMPTY) {
        index_hide(ix, *line);
        index_remove(ix, *line);
    }
    *state = now;
    if (now == SHM_EMPTY)
        return;
    cr_assert_eq(index_insert(ix, &all[key], EPOCH, key, line), 0);
    if (now != SHM_PENDING)
        index_publish(ix, *line, 4096);
    if (now == SHM_LEAVING)
        index_hide(ix, *line);
}

static void put_ram(unsigned key, enum shm_state now)
{
    put(ram, key, &known[key].ram, &known[key].line, now);
}

static void put_nvme(unsigned key, enum shm_state now)
{
    put(nvme, key, &known[key].nvme, &known[key].record, now);
}

static uint8_t state_of(const struct known *k)
{
    if (k->ram == SHM_LIVE || k->ram == SHM_LEAVING)
        return SHM_FOUND_RAM;
    if (k->nvme == SHM_LIVE || k->nvme == SHM_LEAVING)
        return SHM_FOUND_NVME;
    return k->ram == SHM_PENDING ? SHM_FOUND_PENDING : SHM_FOUND_MISS;
}

/* Compares both ways of asking for keys[from .. n) with the model. */
static void check(unsigned from, unsigned n)
{
    uint8_t states[KEYS + 1];
    size_t leading = 0;

    while (leading < n && (state_of(&known[from + leading]) == SHM_FOUND_RAM ||
                           state_of(&known[from + leading]) == SHM_FOUND_NVME))
        leading++;
    cr_assert_eq(shm_lookup(ram, nvme, all + from, n, EPOCH, NULL), leading, "%u + %u", from, n);
    memset(states, 0xee, sizeof(states));
    cr_assert_eq(shm_lookup(ram, nvme, all + from, n, EPOCH, states), leading, "%u + %u", from, n);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(states[i], state_of(&known[from + i]), "key %u is %u", from + i, states[i]);
    cr_assert_eq(states[n], 0xee, "not beyond");
}

TestSuite(lookup, .init = setup, .fini = teardown);

Test(lookup, every_combination_of_states_in_both)
{
    static const enum shm_state ours[] = {SHM_EMPTY, SHM_PENDING, SHM_LIVE, SHM_LEAVING};

    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 3; k++) {
            put_ram(0, ours[i]);
            put_nvme(0, ours[k]);
            check(0, 1);
        }
    put_ram(0, SHM_PENDING);
    put_nvme(0, SHM_LIVE);
    cr_assert_eq(shm_lookup(ram, nvme, all, 1, EPOCH, NULL), 1, "it is on its way back");
    cr_assert_eq(shm_lookup(ram, NULL, all, 1, EPOCH, NULL), 0);
}

/* Lengths around those at which the hot loop changes its step, each cut at every place. */
Test(lookup, chains_that_change_from_one_to_the_other_anywhere)
{
    for (unsigned n = 1; n <= 60; n++) {
        put_ram(n - 1, SHM_LIVE);
        for (unsigned cut = 0; cut < n; cut++) {
            put_ram(cut, SHM_EMPTY);
            put_nvme(cut, SHM_LIVE);
            check(0, n);
            if (n > 3 * cut) { /* some run in the stores before ram goes on, or not at all */
                put_nvme(2 * cut, SHM_LIVE);
                put_ram(2 * cut, SHM_EMPTY);
                check(0, n);
                put_ram(2 * cut, SHM_LIVE);
                put_nvme(2 * cut, SHM_EMPTY);
            }
            put_nvme(cut, SHM_EMPTY);
            check(0, n);
            put_ram(cut, SHM_LIVE);
        }
        check(0, n);
        put_ram(n - 1, n < 40 ? SHM_LIVE : SHM_EMPTY); /* lines are few */
        if (n >= 40)
            put_nvme(n - 1, SHM_LIVE);
    }
}

Test(lookup, keys_that_alternate)
{
    for (unsigned i = 0; i < 80; i++) {
        if (i % 2)
            put_ram(i, SHM_LIVE);
        else
            put_nvme(i, SHM_LIVE);
    }
    check(0, 90);
    check(1, 90);
    cr_assert_eq(shm_lookup(ram, nvme, all, KEYS, EPOCH, NULL), 80);
    cr_assert_eq(shm_lookup(ram, NULL, all + 1, KEYS - 1, EPOCH, NULL), 1);
}

Test(lookup, random_changes_against_a_model)
{
    unsigned seed = 1, used[2] = {0, 0};

    for (unsigned step = 0; step < 60000; step++) {
        unsigned r = (unsigned)rand_r(&seed), key = r % KEYS, which = r / KEYS % 2;
        enum shm_state now = (enum shm_state)(r / (2 * KEYS) % 4);
        enum shm_state was = which ? known[key].nvme : known[key].ram;
        unsigned from = (unsigned)rand_r(&seed) % KEYS;

        now = r / 2048 % 4 ? (now == SHM_EMPTY ? SHM_EMPTY : SHM_LIVE) : now;
        if (which && (now == SHM_PENDING || now == SHM_LEAVING))
            now = SHM_LIVE; /* the stores' index has no others */
        if (now != SHM_EMPTY && was == SHM_EMPTY && used[which] == LINES - 4)
            continue;
        used[which] += (now != SHM_EMPTY) - (was != SHM_EMPTY);
        if (which)
            put_nvme(key, now);
        else
            put_ram(key, now);
        check(from, 1 + (unsigned)rand_r(&seed) % (KEYS - from));
    }
}

Test(lookup, epoch_and_retirement_are_those_of_the_pool)
{
    uint8_t states[3];

    put_ram(0, SHM_LIVE);
    put_nvme(1, SHM_LIVE);
    put_nvme(2, SHM_LIVE);
    check(0, 3);
    atomic_store(&nvme->epoch, 77); /* nobody looks at it */
    atomic_store(&nvme->retired, 1);
    check(0, 3);
    for (unsigned other = 0; other < 2; other++) {
        memset(states, 0xee, sizeof(states));
        cr_assert_eq(shm_lookup(ram, nvme, all, 3, EPOCH + 1, NULL), 0);
        cr_assert_eq(shm_lookup(ram, nvme, all, 3, EPOCH + 1, states), 0);
        for (unsigned i = 0; i < 3; i++)
            cr_assert_eq(states[i], SHM_FOUND_MISS, "of another epoch");
        atomic_store(&ram->epoch, EPOCH + 1); /* records of the old one are there, still */
    }
    atomic_store(&ram->epoch, EPOCH);
    check(0, 3);
    atomic_store(&ram->retired, 1);
    cr_assert_eq(shm_lookup(ram, nvme, all, 3, EPOCH, NULL), 0);
    cr_assert_eq(shm_lookup(ram, nvme, all, 3, EPOCH, states), 0);
    cr_assert_eq(states[1], SHM_FOUND_MISS);
}

Test(lookup, no_keys_at_all)
{
    uint8_t state = 0xee;

    cr_assert_eq(shm_lookup(ram, nvme, all, 0, EPOCH, NULL), 0);
    cr_assert_eq(shm_lookup(ram, nvme, all, 0, EPOCH, &state), 0);
    cr_assert_eq(state, 0xee);
}
