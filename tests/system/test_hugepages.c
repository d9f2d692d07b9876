/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ladder, with exactly so many hugepages to be had: the rungs, what is said of each and whether
 * the advice is right, pools that stand on two, and whose pages are whose after a crash. Every byte
 * of each pool is written, and read by another process: a missing page would be a SIGBUS.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "harness.h"

TestSuite(hugepages, .init = harness_init, .fini = harness_fini);

#define POOL_OF(name) "[space one]\n[pool one/" name "]\nslot = 256K\nslots = 64\nlow_water = 0\n"
#define POOL          POOL_OF("kv")
#define POOL_PAGES    8u
#define PAGE_BYTES    ((size_t)2 << 20)

static struct daemon d;
static struct worker a, b;
static char mounted[64], keys[160];
static uint64_t idle; /* free pages at the beginning, with ours */

/* .fini does not come after a skip. */
static void skip(const char *why)
{
    fprintf(stderr, "skipped: %s\n", why);
    harness_fini();
    cr_skip_test("%s", why);
}

static uint64_t counter(const char *name)
{
    unsigned long long n = 0;
    char path[128];
    FILE *f;

    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-2048kB/%s", name);
    f = fopen(path, "r");
    if (!f)
        skip("this machine has no hugepages of 2 MiB");
    cr_assert_eq(fscanf(f, "%llu", &n), 1);
    fclose(f);
    return n;
}

/* Takes n pages, and a promise for all others that are free: n can be had on any machine. */
static void take_exactly(unsigned n)
{
    uint64_t others;

    if (geteuid() != 0)
        skip("needs root, to have hugepages and mount a hugetlbfs");
    if (counter("nr_overcommit_hugepages"))
        skip("vm.nr_overcommit_hugepages makes pages out of nothing");
    if (!hugepages_take(n))
        skip("not that many hugepages can be had");
    idle = hugepages_free();
    others = idle - counter("resv_hugepages") - n;
    if (others && mmap(NULL, others * PAGE_BYTES, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0) == MAP_FAILED)
        skip("somebody else is taking hugepages, too");
}

static void mount_pages(unsigned n)
{
    if (!hugetlbfs_mount(n, mounted))
        skip("a hugetlbfs cannot be mounted here");
}

static void hide_mounts(void)
{
    if (!hugetlbfs_hide())
        skip("no mount namespace can be had");
}

static const char *with_mount(const char *mode)
{
    snprintf(keys, sizeof(keys), "hugepages = %s\nhugetlbfs = %s\n", mode, mounted);
    return keys;
}

static void stands_on(struct worker *w, const char *backing)
{
    const char *reply = worker_do(w, "backing");

    cr_assert_str_eq(reply, backing);
}

static void touch_all(const char *pool, unsigned slots, const char *backing)
{
    worker_join(&a, d.writer, "one", pool, "");
    worker_join(&b, d.reader, "one", pool, "read");
    stands_on(&a, backing);
    cr_assert_eq(worker_n(&a, "publish 0 %u", slots), slots);
    cr_assert_eq(worker_n(&b, "pin 0 %u", slots), slots);
    cr_assert_eq(worker_n(&b, "check"), slots);
    worker_quit(&b);
    worker_quit(&a);
}

static unsigned lines_logged(const char *text)
{
    FILE *f = fopen(d.log, "r");
    char line[4096];
    unsigned n = 0;

    cr_assert_not_null(f);
    while (fgets(line, sizeof(line), f))
        n += strstr(line, text) != NULL;
    fclose(f);
    return n;
}

static unsigned files_mounted(void)
{
    DIR *dir = opendir(mounted);
    struct dirent *e;
    unsigned n = 0;

    cr_assert_not_null(dir);
    while ((e = readdir(dir)))
        n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

static void is_in_state(const char *expected, const char *problem)
{
    char state[2048], problems[2048];

    daemon_status(&d, state, problems, sizeof(state));
    cr_assert_str_eq(state, expected, "%s: %s", state, problems);
    if (problem)
        cr_assert(strstr(problems, problem), "\"%s\" is not in: %s", problem, problems);
}

static void all_pages_are_back(void)
{
    eventually(hugepages_free() == idle);
}

static void stop_and_count(void)
{
    daemon_stop(&d);
    if (mounted[0])
        cr_assert_eq(files_mounted(), 0);
    all_pages_are_back();
}

/* ---- the two rungs */

static void use_hugetlbfs(const char *daemon_keys)
{
    daemon_up(&d, daemon_keys, POOL);
    cr_assert_eq(hugetlbfs_used(mounted), POOL_PAGES);
    cr_assert_eq(files_mounted(), 1);
    cr_assert_eq(hugepages_free(), idle - POOL_PAGES);
    cr_assert_eq(lines_logged("hugetlbfs, 2048 KiB pages"), 1);
    is_in_state("ready", NULL);
    touch_all("kv", 64, "hugetlbfs 2097152");
    stop_and_count();
}

Test(hugepages, hugetlbfs_as_configured)
{
    take_exactly(POOL_PAGES);
    mount_pages(POOL_PAGES);
    use_hugetlbfs(with_mount("require"));
}

Test(hugepages, hugetlbfs_as_found)
{
    take_exactly(POOL_PAGES);
    hide_mounts();
    mount_pages(POOL_PAGES);
    use_hugetlbfs("hugepages = try\n");
}

static void use_memfd(const char *daemon_keys, const char *why)
{
    daemon_up(&d, daemon_keys, POOL);
    cr_assert_eq(hugepages_free(), idle - POOL_PAGES);
    cr_assert_eq(lines_logged("memfd-hugetlb, 2048 KiB pages; not hugetlbfs: "), 1);
    cr_assert_eq(lines_logged(why), 1);
    is_in_state("ready", NULL);
    touch_all("kv", 64, "memfd-hugetlb 2097152");
}

Test(hugepages, memfd_without_a_mount)
{
    take_exactly(POOL_PAGES);
    hide_mounts();
    use_memfd("hugepages = require\n", "no mount for 2048 kB pages; fix: mkdir -p ");

    /* Unlike a file on a mount, it is sealed: not even a writer can make it shorter. */
    worker_start(&a);
    worker_do(&a, "raw connect %s", d.writer);
    worker_do(&a, "raw chunk %u", daemon_pool(&d, "one/kv"));
    cr_assert_eq(worker_try(&a, "raw truncate data 0"), -EPERM);
    worker_quit(&a);
    stop_and_count();
}

/* There are pages enough, but this mount must not have them. */
Test(hugepages, memfd_when_the_mount_is_too_small)
{
    take_exactly(POOL_PAGES);
    mount_pages(POOL_PAGES / 2);
    use_memfd(with_mount("require"), "hugepages allowed by size= of the mount");
    cr_assert_eq(hugetlbfs_used(mounted), 0, "the failed attempt keeps pages");
    stop_and_count();
}

Test(hugepages, memfd_when_it_is_no_mount)
{
    take_exactly(POOL_PAGES);
    use_memfd("hugepages = try\nhugetlbfs = /dev/shm\n", "/dev/shm is not on a hugetlbfs mount");
    stop_and_count();
}

/* ---- too few */

/* With the number that makes so many more. */
static void advice(unsigned more, char *ret, size_t n)
{
    snprintf(ret, n, "fix: sysctl vm.nr_hugepages=%llu",
             (unsigned long long)counter("nr_hugepages") + more);
}

Test(hugepages, too_few_then_enough)
{
    char fix[64];

    take_exactly(POOL_PAGES - 4);
    mount_pages(POOL_PAGES);
    advice(4, fix, sizeof(fix));
    daemon_up(&d, with_mount("try"), POOL);
    cr_assert_eq(lines_logged(fix), 1, "one line with \"%s\"", fix);
    cr_assert_eq(lines_logged("tmpfs, 4 KiB pages; not hugetlbfs: only 4 of 8 hugepages free"), 1);
    is_in_state("degraded", fix);
    cr_assert_eq(hugepages_free(), idle);
    touch_all("kv", 64, "tmpfs 4096");
    stop_and_count();

    /* As advised. */
    cr_assert(hugepages_take(4));
    idle += 4;
    daemon_start(&d);
    is_in_state("ready", NULL);
    touch_all("kv", 64, "hugetlbfs 2097152");
    stop_and_count();
}

static void is_refused(const char *pools, const char *fix)
{
    daemon_prepare(&d, with_mount("require"), pools);
    daemon_fails(&d, 1, fix);
    cr_assert_eq(lines_logged(fix), 1);
    cr_assert_eq(daemon_files(&d), 0);
    cr_assert_eq(files_mounted(), 0);
    cr_assert(access(d.writer, F_OK) < 0);
    all_pages_are_back();
}

Test(hugepages, too_few_where_they_are_required)
{
    char fix[64];

    take_exactly(POOL_PAGES - 4);
    mount_pages(POOL_PAGES);
    advice(4, fix, sizeof(fix));
    is_refused(POOL, fix);
}

/* With the second pool, which fails, goes the first one, which stood. */
Test(hugepages, too_few_for_all_where_they_are_required)
{
    char fix[64];

    take_exactly(POOL_PAGES + 1);
    mount_pages(2 * POOL_PAGES);
    advice(POOL_PAGES - 1, fix, sizeof(fix));
    is_refused(POOL "[pool one/other]\nslot = 256K\nslots = 64\nlow_water = 0\n", fix);
}

/* They run out in the middle of a pool, whose last slots fill a page in part only. */
static void run_out(const char *shape)
{
    char pools[160];

    take_exactly(POOL_PAGES / 2 + 1);
    mount_pages(POOL_PAGES);
    snprintf(pools, sizeof(pools), "[space one]\n[pool one/kv]\n%sslots = 63\nlow_water = 0\n",
             shape);
    daemon_up(&d, with_mount("try"), pools);
    cr_assert_eq(hugepages_free(), idle - POOL_PAGES / 2);
    cr_assert_eq(lines_logged("hugetlbfs, 2048 KiB pages; then tmpfs, 4 KiB pages; "
                              "not hugetlbfs: only 1 of 4 hugepages free"),
                 1);
    is_in_state("degraded", "fix: sysctl vm.nr_hugepages=");
    touch_all("kv", 63, "tmpfs 2097152");
    stop_and_count();
}

Test(hugepages, too_few_for_the_second_part)
{
    run_out("slot = 256K\nparts = 2\n");
}

Test(hugepages, too_few_for_the_second_chunk)
{
    run_out("slot = 256K\nchunk = 8M\n");
}

/* ---- what is left of a dead one */

/* There are pages for one at a time: the old one's must go before the new one's are made. */
static void killed_and_started(const char *pool, const char *pools)
{
    char text[160], other[160];
    int fd;

    take_exactly(POOL_PAGES);
    mount_pages(POOL_PAGES);
    daemon_up(&d, with_mount("require"), POOL);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    worker_quit(&a);
    daemon_kill(&d);
    cr_assert_eq(hugetlbfs_used(mounted), POOL_PAGES, "a file outlives its maker");
    cr_assert_eq(hugepages_free(), idle - POOL_PAGES);

    /* Of another daemon, which shares the mount. */
    snprintf(other, sizeof(other), "%s/kvd-01234567-one-kv-0.0", mounted);
    fd = open(other, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    close(fd);
    daemon_configure(&d, keys, pools);
    daemon_start(&d);
    snprintf(text, sizeof(text), "removed 1 stale segments of an earlier run from %s", mounted);
    cr_assert_eq(lines_logged(text), 1);
    cr_assert_eq(hugetlbfs_used(mounted), POOL_PAGES);
    touch_all(pool, 64, "hugetlbfs 2097152");
    daemon_stop(&d);
    cr_assert_eq(unlink(other), 0, "another daemon's file is gone");
    cr_assert_eq(files_mounted(), 0);
    all_pages_are_back();
}

Test(hugepages, stale_files_of_a_killed_daemon)
{
    killed_and_started("kv", POOL);
}

Test(hugepages, stale_files_of_a_pool_that_is_no_more)
{
    killed_and_started("other", POOL_OF("other"));
}

/* A reader keeps the old memory, so there is none for the new daemon: it steps down. */
Test(hugepages, still_in_use_by_a_reader)
{
    take_exactly(POOL_PAGES);
    mount_pages(POOL_PAGES);
    daemon_up(&d, with_mount("try"), POOL);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    cr_assert_eq(worker_n(&a, "pin 0 64"), 64);
    daemon_kill(&d);
    daemon_start(&d);
    is_in_state("degraded", "hugepages");
    cr_assert_eq(worker_n(&a, "check"), 64);
    worker_do(&a, "refresh");
    stands_on(&a, "tmpfs 4096");
    cr_assert_eq(worker_n(&a, "publish 100 64"), 64);
    cr_assert_eq(worker_n(&a, "pin 100 64"), 64);
    cr_assert_eq(worker_n(&a, "check"), 128);

    /* With the last pin the old pages go; the next start has them. */
    worker_do(&a, "release 0");
    worker_do(&a, "refresh");
    all_pages_are_back();
    daemon_stop(&d);
    daemon_start(&d);
    worker_do(&a, "refresh");
    stands_on(&a, "hugetlbfs 2097152");
    worker_quit(&a);
    stop_and_count();
}

/* A clean stop takes nothing from those who are reading. */
Test(hugepages, a_reader_outlives_a_clean_stop)
{
    take_exactly(POOL_PAGES);
    mount_pages(POOL_PAGES);
    daemon_up(&d, with_mount("require"), POOL);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 64"), 64);
    cr_assert_eq(worker_n(&a, "pin 0 64"), 64);
    daemon_stop(&d);
    cr_assert_eq(files_mounted(), 0);
    cr_assert_eq(hugepages_free(), idle - POOL_PAGES);
    cr_assert_eq(worker_n(&a, "check"), 64);
    worker_quit(&a);
    all_pages_are_back();
}
