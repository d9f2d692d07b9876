/* SPDX-License-Identifier: Apache-2.0 */
/* SIGKILL of a daemon with reads and writes in flight: what is found afterwards is right, and what the dead
 * one had in flight changes nothing that its successor has given out. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>

#include "objects.h"
#include "stores.h"

TestSuite(spill_crash, .init = stores_init, .fini = stores_fini);

static struct daemon d;
static struct worker a, b, c;

/* ---- at any instant */

#define ROUNDS 20u
#define CHAINS 40u /* of eight objects: more than the store has records for */

struct reach {
    unsigned stored, reachable, torn;
};

static void prepare(const char *io)
{
    char folder[64], conf[1024];

    stores_folder(folder);
    snprintf(conf, sizeof(conf),
             "[space one]\n[pool one/kv]\nslot = 64K\nslots = 192\nlow_water = 0\n"
             "[spill one/kv/disk]\npath = %s/kv\nsize = 18M\nio = %s\n",
             folder, io);
    daemon_prepare(&d, NULL, conf);
}

static void count_reach(struct worker *w, struct reach *r)
{
    const char *at = strchr(w->reply, ' ');
    bool whole = true;

    for (unsigned i = 0; at; i++, at = strchr(at + 1, ' ')) {
        bool here = atoi(at + 1) != KVD_MISS;

        whole = here && (i % 8 == 0 || whole);
        r->stored += here;
        r->reachable += here && whole;
    }
}

static void check_from(struct reach *r, unsigned first, unsigned n)
{
    struct worker w;

    worker_join(&w, d.reader, "one", "kv", "read");
    for (unsigned i = first; i < first + n; i += 32) {
        unsigned ok, torn;

        worker_do(&w, "fetch %u 32", i);
        ok = count_statuses(&w, 0);
        torn = count_statuses(&w, -EIO);
        cr_assert_eq(ok + torn + count_statuses(&w, -ENOENT), 32, "%s", w.reply);
        r->torn += torn;
        cr_assert_eq(worker_n(&w, "pin %u 32 all", i), ok);
        cr_assert_geq(worker_n(&w, "check"), ok);
        worker_do(&w, "release 0");
    }
    worker_do(&w, "lookup %u %u", first, n); /* what was torn is gone by now */
    count_reach(&w, r);
    worker_quit(&w); /* and what is held for it is let go */
}

/* Everything that is found has the right bytes. */
static void check_found(struct reach *r)
{
    check_from(r, 0, 4 * CHAINS);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    check_from(r, 4 * CHAINS, 4 * CHAINS);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
}

static void stop_churn(struct worker *w)
{
    int r;

    worker_tell(w, "stop");
    r = worker_answer(w);
    cr_assert_eq(r, 0, "wrong bytes before the crash: %s", w->reply);
    worker_quit(w);
}

static void kill_again_and_again(const char *io)
{
    struct reach all = {0};
    uint64_t seed = 1;

    prepare(io);
    for (unsigned round = 0; round < ROUNDS; round++) {
        daemon_start(&d);
        eventually(store_is(&d, "one/kv/disk", "online"));
        check_found(&all);
        worker_join(&a, d.writer, "one", "kv", "timeout=300");
        worker_join(&b, d.writer, "one", "kv", "timeout=300");
        worker_do(&a, "spill-churn %u %u", 2 * round, CHAINS);
        worker_do(&b, "spill-churn %u %u", 2 * round + 1, CHAINS);
        seed = object_mix(seed + round);
        usleep(5000 + seed % 80000);
        daemon_kill(&d);
        stop_churn(&a);
        stop_churn(&b);
    }
    daemon_start(&d);
    eventually(store_is(&d, "one/kv/disk", "online"));
    check_found(&all);
    cr_log_info("%u found after %u crashes, %u of them reachable, %u misses by digest", all.stored,
                ROUNDS, all.reachable, all.torn);
    cr_assert_gt(all.stored, ROUNDS * 8, "too little was stored to show anything");
    cr_assert_geq(100 * all.reachable, 99 * all.stored);
    daemon_stop(&d);
}

Test(spill_crash, at_any_instant_with_io_uring, .timeout = 120)
{
    kill_again_and_again("auto");
}

Test(spill_crash, at_any_instant_with_threads, .timeout = 120)
{
    kill_again_and_again("threads");
}

/* ---- I/O outlives a killed process */

static struct device v;
static char store_path[128];

static int held_daemon(const struct daemon *unused)
{
    (void)unused;
    return device_join(&v);
}

static int without_the_lock(const struct daemon *unused)
{
    (void)unused;
    return deny(DENY_FLOCK);
}

/* A daemon whose I/O can be held, with a store of so many MiB. */
static void held_up(unsigned mib)
{
    char conf[1024];

    device_make(&v, 32 << 20, 512, "mkfs.ext4 -q -F -O ^has_journal");
    device_group(&v);
    device_mount(&v);
    snprintf(store_path, sizeof(store_path), "%s/kv", v.mount);
    snprintf(conf, sizeof(conf),
             "%s[spill one/kv/disk]\npath = %s\nsize = %uM\nqueue_depth = 128\nio = io_uring\n",
             usual_pools, store_path, mib);
    daemon_prepare(&d, "spill_start = 100ms\nfetch_deadline = 60s\n", conf);
    d.enter = held_daemon;
    daemon_start(&d);
    eventually(store_is(&d, "one/kv/disk", "online"));
}

static bool lock_is_free(void)
{
    int fd = open(store_path, O_RDWR | O_CLOEXEC);
    bool is_free = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;

    cr_assert_geq(fd, 0);
    close(fd);
    return is_free;
}

/* Dies with writes of objects 0 .. 63 in flight, in the first 64 slots of the store. */
static void die_writing(void)
{
    held_up(7);
    device_hold(&v);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    eventually(daemon_store(&d, "one/kv/disk").writing == 64);
    usleep(50000); /* on their way is not yet where it hurts; held they all are, in the end */
    daemon_kill(&d);
    worker_kill(&a);
    cr_assert(!lock_is_free(), "nothing outlived it");
}

/* Objects 100 .. 163 are in the store. How many of them can be read back? */
static unsigned store_and_read_back(void (*between)(void))
{
    cr_assert_eq(worker_n(&b, "publish 100 64"), 64);
    eventually(daemon_store(&d, "one/kv/disk").used == 64);
    daemon_flush(&d, "one/kv");
    cr_assert_eq(worker_n(&b, "fetch 100 64"), 64, "%s", b.reply);
    daemon_flush(&d, "one/kv"); /* they are held */
    cr_assert_eq(worker_n(&b, "pin 100 64"), 64);
    cr_assert_eq(worker_n(&b, "check"), 64);
    worker_do(&b, "release 0");
    worker_quit(&b);
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    daemon_flush(&d, "one/kv");
    cr_assert_eq(daemon_counts(&d, "one/kv").live, 0);
    between();
    worker_join(&b, d.writer, "one", "kv", "");
    worker_do(&b, "fetch 100 64");
    return count_statuses(&b, 0);
}

static void nothing(void)
{
}

static void let_the_dead_finish(void)
{
    device_release(&v);
    eventually(lock_is_free()); /* nobody but the dead has locked it */
}

/* What the lock is for: without it this is what happens. */
Test(spill_crash, without_the_lock_the_dead_overwrite_what_the_successor_has_stored)
{
    unsigned whole;

    die_writing();
    d.enter = without_the_lock;
    daemon_start(&d);
    eventually(store_is(&d, "one/kv/disk", "online"));
    worker_join(&b, d.writer, "one", "kv", "");
    whole = store_and_read_back(let_the_dead_finish);
    cr_log_info("%u of 64 stored objects were overwritten by a dead process", 64 - whole);
    cr_assert_lt(whole, 64, "the lock is not needed here, so this does not show what it is for");
    /* And even so nobody is given a wrong byte. */
    cr_assert_eq(count_statuses(&b, -EIO), 64 - whole, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "pin 100 64 all"), whole);
    worker_do(&b, "check");
    daemon_stop(&d);
}

Test(spill_crash, with_the_lock_the_successor_is_ready_and_its_store_waits_for_the_dead)
{
    die_writing();
    d.enter = NULL;
    daemon_start(&d); /* READY */
    cr_assert(!lock_is_free());
    cr_assert_str_eq(daemon_store(&d, "one/kv/disk").state, "waiting");

    /* ram serves meanwhile. */
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&b, "publish 200 8"), 8);
    cr_assert_eq(worker_n(&b, "pin 200 8"), 8);
    cr_assert_eq(worker_n(&b, "check"), 8);
    worker_do(&b, "release 0");
    daemon_evict(&d, "one/kv", 200, 8);
    cr_assert(!lock_is_free());
    cr_assert_str_eq(daemon_store(&d, "one/kv/disk").state, "waiting");

    device_release(&v);
    eventually(store_is(&d, "one/kv/disk", "online"));
    cr_assert_eq(store_and_read_back(nothing), 64, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "pin 100 64"), 64);
    cr_assert_eq(worker_n(&b, "check"), 64);
    daemon_stop(&d);
}

/* The kernel goes on filling the memory of a dead daemon's pool: its successor's is another one. */
Test(spill_crash, reads_of_the_dead_land_in_nobodys_memory)
{
    held_up(12);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    eventually(daemon_store(&d, "one/kv/disk").used == 64);
    daemon_flush(&d, "one/kv");
    device_hold(&v);
    worker_tell(&a, "fetch 0 64");
    eventually(daemon_counts(&d, "one/kv").in_flight == 64);
    usleep(50000);
    daemon_kill(&d);
    worker_kill(&a);
    cr_assert(!lock_is_free(), "nothing outlived it");

    d.enter = NULL;
    daemon_start(&d);
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&b, "publish 100 64"), 64);
    cr_assert_eq(worker_n(&b, "pin 100 64"), 64);
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 0, "every slot is given out again");
    cr_assert(!lock_is_free());
    device_release(&v);
    eventually(store_is(&d, "one/kv/disk", "online"));
    cr_assert_eq(worker_n(&b, "check"), 64);
    worker_do(&b, "release 0");
    eventually(store_settled(&d, "one/kv/disk"));

    /* What the dead had stored is there. */
    cr_assert_eq(worker_n(&b, "lookup 0 64"), 64, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "fetch 0 32"), 32, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "pin 0 32"), 32);
    cr_assert_eq(worker_n(&b, "check"), 32);
    daemon_stop(&d);
}

Test(spill_crash, a_second_daemon_on_the_same_store_waits_and_says_so)
{
    static struct daemon other;
    char folder[64], conf[1024];

    stores_folder(folder);
    snprintf(conf, sizeof(conf), "%s[spill one/kv/disk]\npath = %s/kv\nsize = 8M\n", usual_pools,
             folder);
    daemon_up(&d, NULL, conf);
    eventually(store_is(&d, "one/kv/disk", "online"));
    daemon_up(&other, "spill_start = 0s\n", conf);
    eventually(store_is(&other, "one/kv/disk", "waiting"));
    worker_join(&c, other.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&c, "publish 0 8"), 8);
    daemon_stop(&d);
    eventually(store_is(&other, "one/kv/disk", "online"));
    eventually(daemon_store(&other, "one/kv/disk").used == 8);
    daemon_stop(&other);
}
