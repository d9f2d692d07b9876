/* SPDX-License-Identifier: Apache-2.0 */
/* The NVMe tier in one process: real files, real I/O. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "spill_world.h"

#define PLAIN                                                                                      \
    "[space s]\n[pool s/kv]\nslot = 64K\nslots = 32\nlow_water = 0\nhigh_water = 0\n"              \
    "[spill s/kv/disk]\npath = %s/disk\nsize = 16M\n"

static struct place p;

#define SPILL_TEST(name) PLACE_TEST(spill, name)

SPILL_TEST(what_was_evicted_comes_back_as_it_was)
{
    place_open(&p, PLAIN);
    place_put_all(&p, 0, 32);
    place_write_all(&p);
    place_drop_ram(&p);
    for (uint64_t i = 0; i < 32; i++) {
        struct shm_key k = world_key(i);
        struct reservation r;

        cr_assert_eq(place_find(&p, i), SHM_FOUND_NVME);
        cr_assert_eq(world_reserve(p.attach, &k, NULL, &r), RESERVE_PRESENT);
        cr_assert_eq(place_fetch(&p, i), 0);
        cr_assert_eq(place_find(&p, i), SHM_FOUND_RAM);
        place_check_object(&p, i);
    }
    cr_assert_eq(spill_stats(p.w.pool)->evicted_clean, 32u);
    cr_assert_eq(spill_stats(p.w.pool)->evicted_unspilled, 0u);
    place_close(&p);
}

SPILL_TEST(what_is_stored_outlives_the_daemon)
{
    place_open(&p, PLAIN);
    place_put_all(&p, 0, 32);
    place_write_all(&p);
    place_close(&p);
    place_open(&p, PLAIN);
    for (uint64_t i = 0; i < 32; i++) {
        cr_assert_eq(place_find(&p, i), SHM_FOUND_NVME);
        cr_assert_eq(place_fetch(&p, i), 0);
        place_check_object(&p, i);
    }
    place_close(&p);
}
