/* SPDX-License-Identifier: Apache-2.0 */
/* Objects go to a store and come back, whoever asks for them, and whatever becomes of who has asked. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "objects.h"
#include "stores.h"

TestSuite(spill, .init = stores_init, .fini = stores_fini);

static struct daemon d;
static struct worker a, b, c;
static char folder[64], text[8192];

/* The usual pools, and a store of `mib` for one/kv and for one/parts. */
static void up(const char *daemon_keys, unsigned mib, const char *store_keys)
{
    char conf[2048];

    stores_folder(folder);
    snprintf(conf, sizeof(conf),
             "%s[spill one/kv/disk]\npath = %s/kv\nsize = %uM\n%s"
             "[spill one/parts/disk]\npath = %s/parts\nsize = 4M\n",
             usual_pools, folder, mib, store_keys, folder);
    daemon_up(&d, daemon_keys, conf);
    eventually(store_is(&d, "one/kv/disk", "online"));
    eventually(store_is(&d, "one/parts/disk", "online"));
}

/* In the store, and not in ram. */
static void spill_all(const char *store, const char *pool)
{
    eventually(store_settled(&d, store));
    daemon_flush(&d, pool);
}

static void fetch_and_check(struct worker *w, unsigned first, unsigned n)
{
    cr_assert_eq(worker_n(w, "fetch %u %u", first, n), n, "%s", w->reply);
    cr_assert_eq(worker_n(w, "pin %u %u", first, n), n);
    cr_assert_eq(worker_n(w, "check"), n);
    worker_do(w, "release 0");
}

Test(spill, what_left_ram_is_found_and_comes_back)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 32 chain"), 32);
    spill_all("one/kv/disk", "one/kv");
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 64);
    cr_assert_eq(daemon_store(&d, "one/kv/disk").used, 32);
    cr_assert_eq(daemon_stat(&d, "kvd_evicted_clean_objects_total", "one/kv"), 32);

    cr_assert_eq(worker_n(&b, "lookup 0 33"), 32);
    cr_assert_eq(count_statuses(&b, KVD_NVME), 32, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "pin 0 32"), 0);
    fetch_and_check(&b, 0, 32);
    cr_assert_eq(worker_n(&b, "lookup 0 33"), 32);
    cr_assert_eq(count_statuses(&b, KVD_RAM), 32, "%s", b.reply);
    cr_assert_eq(daemon_stat(&d, "kvd_promoted_objects_total", "one/kv"), 32);

    /* What comes back has its copy still: leaving again costs nothing. */
    daemon_flush(&d, "one/kv");
    cr_assert_eq(daemon_stat(&d, "kvd_spilled_objects_total", "one/kv"), 32);
    fetch_and_check(&a, 0, 32);
    cr_assert_eq(kvctl(&d, text, "spill status"), 0, "%s", text);
    daemon_stop(&d);
}

Test(spill, objects_of_two_parts_and_programs_without_shared_memory)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "parts", "");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    spill_all("one/parts/disk", "one/parts");
    fetch_and_check(&a, 0, 16);

    worker_join(&b, d.writer, "one", "kv", "noshm");
    worker_do(&b, "put 0");
    worker_do(&b, "put 1");
    spill_all("one/kv/disk", "one/kv");
    cr_assert_eq(worker_n(&b, "lookup 0 2"), 2);
    cr_assert_eq(count_statuses(&b, KVD_NVME), 2, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "fetch 0 1"), 1, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "get 0"), 65536);
    cr_assert_eq(worker_n(&b, "get 1"), 65536, "a get fetches by itself");
    daemon_stop(&d);
}

Test(spill, sigterm_writes_what_is_queued_and_a_start_finds_it)
{
    unsigned first = 0;

    up("stop_flush = 60s\n", 32, "bandwidth = 4M\n");
    worker_join(&a, d.writer, "one", "kv", "");
    /* A machine that stands still for a second has written them all meanwhile. */
    for (int tries = 0; tries < 5; tries++, first += 64) {
        cr_assert_eq(worker_n(&a, "publish %u 64", first), 64);
        if (daemon_store(&d, "one/kv/disk").queued > 8)
            break;
    }
    cr_assert_lt(daemon_store(&d, "one/kv/disk").used, first + 64);
    daemon_stop(&d);
    worker_kill(&a);

    daemon_start(&d);
    eventually(store_is(&d, "one/kv/disk", "online"));
    cr_assert_eq(daemon_counts(&d, "one/kv").live, 0, "a start is cold");
    worker_join(&a, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "lookup %u 64", first), 64, "%s", a.reply);
    fetch_and_check(&a, first, 64);
    daemon_stop(&d);
}

Test(spill, a_reset_holds_after_a_restart)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    spill_all("one/kv/disk", "one/kv");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 16);
    worker_do(&a, "reset");
    worker_do(&a, "refresh");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    cr_assert_eq(worker_n(&a, "publish 8 16"), 16);
    eventually(store_settled(&d, "one/kv/disk"));
    daemon_kill(&d);
    worker_kill(&a);

    daemon_start(&d);
    eventually(store_is(&d, "one/kv/disk", "online"));
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "lookup 0 8"), 0);
    cr_assert_eq(count_statuses(&a, KVD_MISS), 8, "%s", a.reply);
    fetch_and_check(&a, 8, 16);
    daemon_stop(&d);
}

/* ---- several who ask */

Test(spill, two_who_want_the_same_share_the_reads)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_join(&c, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    spill_all("one/kv/disk", "one/kv");
    worker_tell(&b, "fetch 0 64");
    worker_tell(&c, "fetch 0 64");
    cr_assert_eq(worker_answer(&b), 0);
    cr_assert_eq(worker_answer(&c), 0);
    cr_assert_eq(count_statuses(&b, 0), 64, "%s", b.reply);
    cr_assert_eq(count_statuses(&c, 0), 64, "%s", c.reply);
    cr_assert_eq(daemon_stat(&d, "kvd_promoted_objects_total", "one/kv"), 64, "each once");
    cr_assert_eq(daemon_stat(&d, "kvd_fetch_nvme_keys_total", "one/kv") +
                     daemon_stat(&d, "kvd_fetch_ram_keys_total", "one/kv"),
                 128);
    cr_log_info("%llu of 64 reads were shared",
                (unsigned long long)daemon_stat(&d, "kvd_fetch_shared_keys_total", "one/kv"));
    cr_assert_eq(worker_n(&b, "pin 0 64"), 64);
    cr_assert_eq(worker_n(&c, "pin 0 64"), 64);
    cr_assert_eq(worker_n(&b, "check"), 64);
    cr_assert_eq(worker_n(&c, "check"), 64);
    daemon_stop(&d);
}

Test(spill, two_who_fetch_into_a_pool_that_is_pinned_all_over_get_enospc)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_join(&c, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    spill_all("one/kv/disk", "one/kv");
    cr_assert_eq(worker_n(&a, "publish 100 64"), 64);
    cr_assert_eq(worker_n(&a, "pin 100 64"), 64);
    eventually(store_settled(&d, "one/kv/disk"));
    for (int round = 0; round < 3; round++) {
        worker_tell(&b, "fetch 0 64");
        worker_tell(&c, "fetch 0 64");
        cr_assert_eq(worker_answer(&b), 0);
        cr_assert_eq(worker_answer(&c), 0);
        cr_assert_eq(count_statuses(&b, -ENOSPC), 64, "%s", b.reply);
        cr_assert_eq(count_statuses(&c, -ENOSPC), 64, "%s", c.reply);
    }
    cr_assert_eq(worker_n(&a, "check"), 64);

    /* Half of the room: both get what there is, from the head. */
    worker_do(&a, "release 32");
    worker_tell(&b, "fetch 0 64");
    worker_tell(&c, "fetch 0 64");
    cr_assert_eq(worker_answer(&b), 0);
    cr_assert_eq(worker_answer(&c), 0);
    cr_assert_eq(count_statuses(&b, 0) + count_statuses(&b, -ENOSPC), 64, "%s", b.reply);
    cr_assert_eq(count_statuses(&c, 0) + count_statuses(&c, -ENOSPC), 64, "%s", c.reply);
    cr_assert_eq(worker_n(&b, "pin 0 64"), 32);
    cr_assert_eq(worker_n(&b, "check"), 32);
    worker_do(&a, "release 0");
    fetch_and_check(&c, 0, 32);
    daemon_stop(&d);
}

Test(spill, a_worker_killed_in_its_fetch_leaves_nothing)
{
    up(NULL, 16, "");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    for (unsigned i = 0; i < 12; i++) {
        spill_all("one/kv/disk", "one/kv");
        worker_join(&b, d.reader, "one", "kv", "read");
        worker_tell(&b, "fetch 0 64");
        usleep(i * 150);
        worker_kill(&b);
        eventually(daemon_counts(&d, "one/kv").in_flight == 0);
        eventually(daemon_counts(&d, "one/kv").pinned == 0);
    }
    /* Had it left holds behind, there would be no room. */
    cr_assert_eq(worker_n(&a, "publish 100 64"), 64);
    eventually(store_settled(&d, "one/kv/disk"));
    fetch_and_check(&a, 0, 64);
    daemon_stop(&d);
}

/* ---- more than the disk can take */

Test(spill, a_burst_faster_than_the_disk_loses_nothing_silently)
{
    uint64_t committed, spilled, unspilled;

    up(NULL, 64, "bandwidth = 8M\n");
    worker_join(&a, d.writer, "one", "kv", "");
    for (unsigned i = 0; i < 8; i++) /* what is with the device right now has no room to give */
        worker_do(&a, "publish %u 64", 64 * i);
    eventually(store_settled(&d, "one/kv/disk"));
    committed = daemon_stat(&d, "kvd_committed_objects_total", "one/kv");
    spilled = daemon_stat(&d, "kvd_spilled_objects_total", "one/kv");
    unspilled = daemon_stat(&d, "kvd_evicted_unspilled_objects_total", "one/kv");
    cr_assert_geq(committed, 256);
    cr_assert_gt(unspilled, 0, "it was not faster than the disk");
    cr_assert_eq(spilled + unspilled, committed, "%llu + %llu", (unsigned long long)spilled,
                 (unsigned long long)unspilled);
    cr_assert_eq(daemon_store(&d, "one/kv/disk").used, spilled);

    /* The sums are true: so many are found. */
    daemon_flush(&d, "one/kv");
    worker_do(&a, "lookup 0 512");
    cr_assert_eq(count_statuses(&a, KVD_NVME), spilled);
    daemon_stop(&d);
}

Test(spill, what_a_burst_leaves_of_chains_can_be_reached)
{
    const char *at;
    unsigned stored = 0, reachable = 0, n = 0;
    bool whole = true;

    up(NULL, 64, "bandwidth = 8M\n");
    worker_join(&a, d.writer, "one", "kv", "");
    for (unsigned i = 0; i < 512; i += 16)
        worker_do(&a, "publish %u 16 chain", i);
    eventually(store_settled(&d, "one/kv/disk"));
    daemon_flush(&d, "one/kv");
    worker_do(&a, "lookup 0 512");
    for (at = strchr(a.reply, ' '); at; at = strchr(at + 1, ' '), n++) {
        bool here = atoi(at + 1) == KVD_NVME;

        whole = here && (whole || n % 16 == 0);
        stored += here;
        reachable += here && whole;
    }
    cr_assert_eq(n, 512);
    cr_log_info("%u of 512 stored, %u of them reachable", stored, reachable);
    cr_assert_gt(stored, 0);
    cr_assert_geq(100 * reachable, 99 * stored);
    cr_assert_eq(daemon_stat(&d, "kvd_spilled_objects_total", "one/kv") +
                     daemon_stat(&d, "kvd_evicted_unspilled_objects_total", "one/kv") +
                     daemon_stat(&d, "kvd_spill_orphans_total", "one/kv"),
                 daemon_stat(&d, "kvd_committed_objects_total", "one/kv"));
    daemon_stop(&d);
}

Test(spill, second_touch_writes_what_was_used_again)
{
    up(NULL, 16, "admission = second_touch\n");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(store_settled(&d, "one/kv/disk"));
    cr_assert_eq(daemon_store(&d, "one/kv/disk").used, 0);
    cr_assert_eq(worker_n(&a, "pin 0 16"), 16);
    worker_do(&a, "release 0");
    /* Uses are noticed when an object comes up for eviction. */
    cr_assert_eq(worker_n(&a, "publish 100 48"), 48);
    eventually(daemon_store(&d, "one/kv/disk").used == 16);
    spill_all("one/kv/disk", "one/kv");
    cr_assert_eq(worker_n(&a, "lookup 0 32"), 16);
    fetch_and_check(&a, 0, 16);
    daemon_stop(&d);
}
