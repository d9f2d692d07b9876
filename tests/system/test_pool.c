/* SPDX-License-Identifier: Apache-2.0 */
/* What several workers do to one pool at the same time: full, raced for, written in parts, reset. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "harness.h"
#include "objects.h"
#include "raw.h"

TestSuite(pool, .init = harness_init, .fini = harness_fini);

static struct daemon d;
static struct worker a, b, c, e;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

static void finish(void)
{
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* How many of the statuses in an answer "N S S S ..." are this one. */
static unsigned statuses(const char *answer, int status)
{
    char text[REPLY_MAX], *save = NULL;
    unsigned n = 0;

    snprintf(text, sizeof(text), "%s", answer);
    strtok_r(text, " ", &save); /* the count */
    for (char *t = strtok_r(NULL, " ", &save); t; t = strtok_r(NULL, " ", &save))
        n += atoi(t) == status;
    return n;
}

/* ---- full */

Test(pool, full_of_pins)
{
    uint64_t t;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    bystander_start(&e, &d);
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    cr_assert_eq(worker_n(&b, "pin 0 64"), 64);
    for (int i = 0; i < 20; i++) {
        t = clock_us();
        worker_do(&a, "publish %d 32", 1000 + i * 32);
        cr_assert_eq(statuses(a.reply, -ENOSPC), 32, "%s", a.reply);
        if (i == 19)
            cr_log_info("32 times ENOSPC in %llu us", (unsigned long long)(clock_us() - t));
    }
    cr_assert_eq(worker_n(&b, "check"), 64);
    worker_do(&b, "release 63");
    eventually(worker_n(&a, "publish 5000 1") == 1);
    cr_assert_eq(worker_n(&a, "pin 5000 1"), 1);
    cr_assert_eq(worker_n(&a, "check"), 1);
    worker_do(&a, "publish 6000 4");
    cr_assert_eq(statuses(a.reply, -ENOSPC), 4);
    worker_do(&a, "release 0");
    eventually(worker_n(&a, "publish 6000 1") == 1);
    cr_assert_eq(worker_n(&b, "check"), 63);
    worker_do(&b, "release 0");
    cr_assert_eq(worker_n(&a, "publish 7000 64"), 64);
    bystander_stop(&e);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* Pinned by those that have no shared memory, and reserved by those that never commit. */
Test(pool, full_of_reservations)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    worker_join(&c, d.writer, "one", "kv", "noshm");
    cr_assert_eq(worker_n(&a, "reserve 0 64"), 64);
    worker_do(&b, "publish 100 8");
    cr_assert_eq(statuses(b.reply, -ENOSPC), 8);
    cr_assert_eq(worker_try(&c, "put 200"), -ENOSPC);
    cr_assert_eq(worker_n(&a, "abort"), 64);
    cr_assert_eq(worker_n(&b, "publish 100 8"), 8);
    cr_assert_eq(worker_n(&c, "put 200"), 0);
    cr_assert_eq(worker_n(&c, "get 200"), 65536);
    cr_assert_eq(worker_n(&c, "get 100"), 65536);
    cr_assert_eq(worker_n(&c, "lookup 100 8"), 8);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* Heads stay as long as their tails; when those are pinned and nothing else is left, a head goes rather
 * than that a commit is refused. */
Test(pool, full_of_pinned_tails)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 64 chain"), 64);
    cr_assert_eq(worker_n(&b, "pin 32 32"), 32);
    cr_assert_eq(worker_n(&a, "publish 1000 32"), 32);
    worker_do(&a, "publish 2000 32");
    cr_assert_eq(worker_n(&b, "check"), 32);
    cr_assert_eq(worker_n(&a, "lookup 32 32"), 32);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* A tail goes while its head is held, in one go, and in the order in which their slots lie. */
Test(pool, a_pinned_head_outlives_its_tail)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_do(&a, "publish 0 1");
    worker_do(&a, "publish 1 1");
    cr_assert_eq(daemon_evict(&d, "one/kv", 0, 1), 1);
    cr_assert_eq(worker_n(&a, "publish 2 1 parent=1"), 1);
    cr_assert_eq(worker_n(&a, "pin 2 1"), 1);
    cr_assert_eq(worker_n(&a, "slot 0"), 0, "the tail lies before its head");
    worker_do(&a, "release 0");
    cr_assert_eq(worker_n(&b, "pin 1 1"), 1);
    cr_assert_eq(daemon_flush(&d, "one/kv"), 1);
    cr_assert_eq(worker_n(&b, "check"), 1);
    worker_do(&a, "publish 100 64");
    cr_assert_eq(worker_n(&b, "check"), 1);
    cr_assert_eq(worker_n(&a, "reset"), 2);
    cr_assert_eq(worker_n(&b, "check"), 1);
    worker_quit(&b);
    cr_assert_eq(worker_n(&a, "publish 100 64"), 64);
    worker_quit(&a);
    finish();
}

/* ---- raced for */

#define RACE_POOLS                                                                                 \
    "[space one]\n[space two]\n"                                                                   \
    "[pool one/kv]\nslot = 4K\nslots = 4096\nlow_water = 0\n"                                      \
    "[pool one/parts]\nslot = 8K\nparts = 2\nslots = 16\nlow_water = 0\n"                          \
    "[pool two/kv]\nslot = 4K\nslots = 64\nlow_water = 0\n"

Test(pool, two_want_the_same)
{
    long long ours, theirs;

    daemon_up(&d, NULL, RACE_POOLS);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    worker_join(&c, d.reader, "one", "kv", "read");
    worker_tell(&c, "watch 0 64");
    worker_tell(&a, "race 0 4096");
    worker_tell(&b, "race 0 4096");
    cr_assert_eq(worker_answer(&a), 0, "%s", a.reply);
    cr_assert_eq(worker_answer(&b), 0, "%s", b.reply);
    ours = atoll(a.reply);
    theirs = atoll(b.reply);
    cr_log_info("%lld and %lld", ours, theirs);
    cr_assert_eq(ours + theirs, 4096, "each key has exactly one writer");
    cr_assert_eq(daemon_stat(&d, "kvd_reserve_new_total", "one/kv"), 4096);
    cr_assert_eq(daemon_stat(&d, "kvd_reserve_pending_total", "one/kv") +
                     daemon_stat(&d, "kvd_reserve_present_total", "one/kv"),
                 4096);
    worker_tell(&c, "ping");
    cr_assert_eq(worker_answer(&c), 0, "%s", c.reply);
    cr_assert_eq(worker_answer(&c), 0);
    cr_assert_eq(worker_n(&c, "pin 0 4096"), 4096);
    cr_assert_eq(worker_n(&c, "check"), 4096);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* The same keys come and go all the time, under readers: nobody may ever read another object's bytes. */
Test(pool, many_want_more_than_there_is)
{
    uint64_t evicted;
    int r;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    worker_join(&c, d.reader, "one", "kv", "read");
    worker_join(&e, d.reader, "one", "kv", "read");
    worker_tell(&c, "watch 0 20");
    worker_tell(&e, "watch 10 20");
    for (int i = 0; i < 20; i++) {
        worker_tell(&a, "race 0 144");
        worker_tell(&b, "race 0 144");
        r = worker_answer(&a); /* the readers hold half of the pool, the other writer some of it */
        cr_assert(r == 0 || r == -ENOSPC, "%s", a.reply);
        r = worker_answer(&b);
        cr_assert(r == 0 || r == -ENOSPC, "%s", b.reply);
    }
    evicted = daemon_counts(&d, "one/kv").evicted;
    cr_assert_gt(evicted, 0);
    worker_tell(&c, "ping");
    worker_tell(&e, "ping");
    cr_assert_eq(worker_answer(&c), 0, "%s", c.reply);
    cr_log_info("%s, %llu evicted", c.reply, (unsigned long long)evicted);
    cr_assert_eq(worker_answer(&e), 0, "%s", e.reply);
    cr_assert_eq(worker_answer(&c), 0);
    cr_assert_eq(worker_answer(&e), 0);
    worker_quit(&e);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* ---- written in parts */

#define PARTS_POOLS                                                                                \
    "[space one]\n[space two]\n[pool two/kv]\nslot = 4K\nslots = 16\n"                             \
    "[pool one/kv]\nslot = 4K\nslots = 16\n"                                                       \
    "[pool one/parts]\nslot = 64K\nparts = 4\nslots = 32\nlow_water = 0\n"

/* `slot` of the ranks' commits: the tickets of a scheduler, or half of them. */
static void take(struct worker *w, const char *tickets, size_t n)
{
    char text[4096], some[4096] = "", *save = NULL;

    snprintf(text, sizeof(text), "%s", tickets);
    for (char *t = strtok_r(text, " ", &save); t && n--; t = strtok_r(NULL, " ", &save)) {
        strcat(some, t);
        strcat(some, " ");
    }
    worker_do(w, "forget");
    worker_do(w, "take %s", some);
}

Test(pool, parts_by_several_processes)
{
    char tickets[4096];

    daemon_up(&d, NULL, PARTS_POOLS);
    worker_join(&a, d.writer, "one", "parts", "token=engine");
    worker_join(&b, d.writer, "one", "parts", "token=engine");
    worker_join(&c, d.writer, "one", "parts", "token=engine");
    worker_join(&e, d.reader, "one", "parts", "read");
    cr_assert_eq(worker_n(&a, "reserve 0 8"), 8);
    snprintf(tickets, sizeof(tickets), "%s", worker_do(&a, "tickets"));

    /* Last part first, and some twice. */
    take(&b, tickets, 8);
    take(&c, tickets, 8);
    worker_do(&b, "fill 3");
    cr_assert_eq(worker_n(&b, "commit 3"), 8);
    cr_assert_eq(worker_n(&b, "commit 3"), 8);
    worker_do(&c, "fill 0");
    cr_assert_eq(worker_n(&c, "commit 0"), 8);
    worker_do(&a, "fill 2");
    cr_assert_eq(worker_n(&a, "commit 2"), 8);
    cr_assert_eq(worker_n(&e, "lookup 0 8"), 0);

    /* One dies half-way: four objects get their last part, four do not get it from him. */
    take(&c, tickets, 4);
    worker_do(&c, "fill 1");
    cr_assert_eq(worker_n(&c, "commit 1"), 4);
    worker_kill(&c);
    worker_do(&e, "lookup 0 8");
    cr_assert_str_eq(e.reply, "4 1 1 1 1 3 3 3 3");
    cr_assert_eq(worker_n(&e, "pin 0 8"), 4);
    cr_assert_eq(worker_n(&e, "check"), 4);
    worker_do(&b, "fill 1");
    worker_do(&b, "commit 1");
    cr_assert_eq(statuses(b.reply, 0), 8, "those that are in are in: %s", b.reply);
    cr_assert_eq(worker_n(&e, "lookup 0 8"), 8);
    cr_assert_eq(worker_n(&e, "pin 4 4"), 4);
    cr_assert_eq(worker_n(&e, "check"), 8);
    worker_quit(&b);
    worker_quit(&a);
    worker_quit(&e);
    finish();
}

/* ---- reset */

Test(pool, commits_of_an_older_epoch)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "one", "kv", "");
    worker_join(&c, d.reader, "one", "kv", "read");
    bystander_start(&e, &d);
    cr_assert_eq(worker_n(&a, "publish 0 16 chain"), 16);
    cr_assert_eq(worker_n(&c, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&b, "reserve 100 4"), 4);
    worker_do(&b, "fill");
    cr_assert_eq(worker_n(&a, "reset"), 2);
    cr_assert_eq(daemon_counts(&d, "one/kv").reserved, 0);

    /* Nothing of before is hit or can be committed; what is pinned stays readable. */
    worker_do(&b, "commit");
    cr_assert_eq(statuses(b.reply, -ESTALE), 4, "%s", b.reply);
    cr_assert_eq(worker_try(&b, "current"), -ESTALE);
    cr_assert_eq(worker_try(&c, "current"), -ESTALE);
    cr_assert_eq(worker_n(&c, "lookup 0 16"), 0);
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    worker_do(&b, "reserve 200 2");
    cr_assert_eq(statuses(b.reply, -ESTALE), 2, "%s", b.reply);
    cr_assert_eq(worker_n(&c, "check"), 8);
    worker_do(&a, "current");

    /* The new weights' objects have the same keys. */
    worker_do(&b, "forget");
    worker_do(&b, "refresh");
    worker_do(&b, "current");
    eventually(daemon_counts(&d, "one/kv").live == 8);
    cr_assert_eq(worker_n(&b, "publish 0 16 chain"), 16);
    worker_do(&c, "refresh");
    cr_assert_eq(worker_n(&c, "pin 0 16"), 16);
    cr_assert_eq(worker_n(&c, "check"), 24);
    for (int i = 1; i < 5; i++)
        worker_do(&a, "publish %d 64", i * 1000);
    cr_assert_eq(worker_n(&c, "check"), 24);
    worker_do(&c, "release 0");
    bystander_stop(&e);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* Again and again, while others pin, publish and hold what they have reserved. */
Test(pool, resets_while_others_work)
{
    static struct worker churn[2];

    daemon_up(&d, "quarantine = 1ms\n", usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    bystander_start(&e, &d);
    for (int i = 0; i < 2; i++) {
        worker_join(&churn[i], d.writer, "one", "kv", "");
        worker_do(&churn[i], "churn %d 96", i);
    }
    for (int i = 0; i < 40; i++) {
        cr_assert_eq(worker_n(&a, "reset"), i + 2);
        for (int k = 0; k < 2; k++) {
            worker_tell(&churn[k], "refresh");
            cr_assert_eq(worker_answer(&churn[k]), 0, "%s", churn[k].reply);
            cr_assert_eq(worker_answer(&churn[k]), 0, "%s", churn[k].reply);
            worker_do(&churn[k], "check");
            worker_do(&churn[k], "churn %d 96", i);
        }
        daemon_counts(&d, "one/kv");
    }
    for (int k = 0; k < 2; k++)
        worker_kill(&churn[k]);
    bystander_stop(&e);
    worker_quit(&a);
    finish();
}

/* ---- keys */

Test(pool, keys_that_are_almost_equal)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish %llu 24", (unsigned long long)OBJECT_TWIN), 24);
    cr_assert_eq(worker_n(&a, "publish %llu 24", (unsigned long long)OBJECT_LAST), 24);
    cr_assert_eq(worker_n(&b, "pin %llu 24", (unsigned long long)OBJECT_TWIN), 24);
    cr_assert_eq(worker_n(&b, "pin %llu 24", (unsigned long long)OBJECT_LAST), 24);
    cr_assert_eq(worker_n(&b, "check"), 48);
    cr_assert_eq(worker_n(&b, "lookup %llu 1", (unsigned long long)OBJECT_TWIN + 24), 0);
    cr_assert_eq(worker_n(&b, "lookup %llu 1", (unsigned long long)OBJECT_LAST + 24), 0);
    worker_do(&b, "release 24");
    cr_assert_eq(daemon_evict(&d, "one/kv", OBJECT_LAST, 24), 24);
    cr_assert_eq(worker_n(&b, "lookup %llu 24", (unsigned long long)OBJECT_TWIN), 24);
    cr_assert_eq(worker_n(&b, "check"), 24);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* I6. The bytes depend on the space, so a hit of the other one would be found out. */
Test(pool, two_spaces_know_nothing_of_each_other)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "two", "kv", "");
    worker_join(&c, d.reader, "two", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    cr_assert_eq(worker_n(&c, "lookup 0 32"), 0);
    cr_assert_eq(worker_n(&b, "lookup 0 32"), 0);
    cr_assert_eq(worker_n(&b, "publish 0 32"), 32);
    cr_assert_eq(worker_n(&a, "pin 0 32"), 32);
    cr_assert_eq(worker_n(&b, "pin 0 32"), 32);
    cr_assert_eq(worker_n(&c, "pin 0 32"), 32);
    cr_assert_eq(worker_n(&a, "check"), 32);
    cr_assert_eq(worker_n(&b, "check"), 32);
    cr_assert_eq(worker_n(&c, "check"), 32);
    cr_assert_eq(worker_n(&a, "reset"), 2);
    cr_assert_eq(worker_n(&b, "lookup 0 32"), 32, "a reset is of one space");
    worker_do(&b, "release 0");
    worker_do(&c, "release 0");
    cr_assert_eq(daemon_evict(&d, "two/kv", 0, 32), 32);
    cr_assert_eq(worker_n(&a, "check"), 32);
    worker_quit(&c);
    worker_quit(&b);
    worker_quit(&a);
    finish();
}

/* ---- stray pointers */

Test(pool, nobody_writes_where_he_reads)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&c, d.reader, "one", "kv", "read");
    for (int i = 0; i < 4; i++) {
        const char *socket = i & 1 ? d.reader : d.writer;

        worker_join(&a, socket, "one", "kv", i & 1 ? "read" : "");
        worker_join(&b, d.writer, "one", "kv", "");
        worker_do(&b, "publish 0 8");
        cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
        worker_tell(&a, i & 2 ? "stray-write 100" : "stray-write-index");
        worker_died(&a, SIGSEGV);
        cr_assert_eq(worker_n(&c, "pin 0 8"), 8);
        cr_assert_eq(worker_n(&c, "check"), 8);
        worker_do(&c, "release 0");
        worker_quit(&b);
    }
    worker_quit(&c);
    finish();
}

/* Nor by mapping what he was given in another way. */
static void only_readable(int fd)
{
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    cr_assert_eq(at, MAP_FAILED);
    cr_assert_eq(errno, EACCES);
    cr_assert_lt(ftruncate(fd, 0), 0);
    at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    cr_assert_neq(at, MAP_FAILED);
    cr_assert_lt(mprotect(at, 4096, PROT_READ | PROT_WRITE), 0);
    munmap(at, 4096);
}

static void with_rings(Kvd__Proto__Hello *hello, void *unused)
{
    (void)unused;
    hello->has_shm = hello->shm = 1;
}

Test(pool, descriptors_of_a_reader_are_read_only)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__PoolOpen open = KVD__PROTO__POOL_OPEN__INIT;
    Kvd__Proto__ChunkMap map = KVD__PROTO__CHUNK_MAP__INIT;
    Kvd__Proto__Bye bye = KVD__PROTO__BYE__INIT;
    struct raw r;

    daemon_up(&d, NULL, usual_pools);
    raw_connect(&r, d.reader);
    cr_assert_eq(raw_hello(&r, with_rings, NULL), 0);
    cr_assert_eq(r.n_fds, 2);
    only_readable(r.fds[0]);
    request.body_case = KVD__PROTO__REQUEST__BODY_POOL_OPEN;
    request.pool_open = &open;
    cr_assert_eq(raw_call(&r, &request), 0);
    cr_assert_eq(r.n_fds, 3);
    only_readable(r.fds[0]);
    only_readable(r.fds[1]);
    request.body_case = KVD__PROTO__REQUEST__BODY_CHUNK_MAP;
    request.chunk_map = &map;
    cr_assert_eq(raw_call(&r, &request), 0);
    cr_assert_eq(r.n_fds, 1);
    only_readable(r.fds[0]);
    request.body_case = KVD__PROTO__REQUEST__BODY_BYE;
    request.bye = &bye;
    cr_assert_eq(raw_call(&r, &request), 0);
    raw_close(&r);
    finish();
}
