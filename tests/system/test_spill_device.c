/* SPDX-License-Identifier: Apache-2.0 */
/* Stores on devices that hang, are full, are somebody else's or are not what they should be, and without
 * what the kernel may deny: ram goes on, and it is said what to do. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "client/kvctl/kvctl.h"
#include "objects.h"
#include "stores.h"

TestSuite(spill_device, .init = stores_init, .fini = stores_fini);

static struct daemon d;
static struct worker a, b;
static struct device v;
static char text[8192], folder[64], conf[2048];

#define DISK "one/kv/disk"
#define EXT4 "mkfs.ext4 -q -F -O ^has_journal"

static void configure(const char *daemon_keys, const char *path, const char *keys)
{
    snprintf(conf, sizeof(conf), "%s[spill " DISK "]\npath = %s\n%s", usual_pools, path, keys);
    daemon_prepare(&d, daemon_keys, conf);
}

static void fetch_and_check(struct worker *w, unsigned first, unsigned n)
{
    cr_assert_eq(worker_n(w, "fetch %u %u", first, n), n, "%s", w->reply);
    cr_assert_eq(worker_n(w, "pin %u %u", first, n), n);
    cr_assert_eq(worker_n(w, "check"), n);
    worker_do(w, "release 0");
}

static void ram_serves(struct worker *w, unsigned first, unsigned n)
{
    cr_assert_eq(worker_n(w, "publish %u %u", first, n), n, "%s", w->reply);
    cr_assert_eq(worker_n(w, "pin %u %u", first, n), n);
    cr_assert_eq(worker_n(w, "check"), n);
    worker_do(w, "release 0");
}

/* The store is offline (or `state`) and it is said why, and what to do, by the log and by kvctl. */
static void is_refused(const char *state, const char *why)
{
    eventually(store_is(&d, DISK, state));
    cr_assert_not_null(strstr(daemon_store(&d, DISK).problem, why), "%s",
                       daemon_store(&d, DISK).problem);
    cr_assert(daemon_logged(&d, why), "the log does not say \"%s\"", why);
    cr_assert_eq(kvctl(&d, text, "spill status " DISK), EXIT_UNHEALTHY, "%s", text);
    cr_assert_not_null(strstr(text, why), "%s", text);
    cr_assert(strstr(text, "fix"), "no cure: %s", text);
    kvctl(&d, text, "status");
    cr_assert_not_null(strstr(text, why), "%s", text);
}

static void is_online(void)
{
    eventually(store_is(&d, DISK, "online"));
}

/* ---- a device that hangs */

static int held_daemon(const struct daemon *unused)
{
    (void)unused;
    return device_join(&v);
}

static void held_prepare(const char *daemon_keys)
{
    char path[128];

    device_make(&v, 32 << 20, 512, EXT4);
    device_group(&v);
    device_mount(&v);
    snprintf(path, sizeof(path), "%s/kv", v.mount);
    configure(daemon_keys, path, "size = 24M\nio = io_uring\n");
    d.enter = held_daemon;
}

Test(spill_device, that_hangs_costs_a_fetch_its_deadline_and_the_store_goes_offline)
{
    held_prepare("fetch_deadline = 200ms\n");
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).used == 32);
    daemon_flush(&d, "one/kv");
    device_hold(&v);
    cr_assert_eq(worker_n(&a, "fetch 0 16 deadline=50"), 0);
    cr_assert_eq(count_statuses(&a, -ETIMEDOUT), 16, "%s", a.reply);
    /* The slots belong to the device until it has answered, the others are there. */
    cr_assert_gt(daemon_counts(&d, "one/kv").in_flight, 0);
    cr_assert_eq(daemon_stat(&d, "kvd_fetch_timeout_keys_total", "one/kv"), 16);
    ram_serves(&a, 100, 32);
    is_refused("offline", "has not answered");
    cr_assert_not_null(strstr(daemon_store(&d, DISK).fix, "spill online"));
    cr_assert_eq(daemon_stat(&d, "kvd_store_timeouts_total", "one/kv"), 1);
    cr_assert_eq(worker_n(&a, "lookup 16 16"), 0, "what is offline is a miss");
    ram_serves(&a, 200, 16);

    device_release(&v);
    eventually(daemon_counts(&d, "one/kv").in_flight == 0);
    cr_assert_eq(kvctl(&d, text, "spill online " DISK), 0, "%s", text);
    is_online();
    cr_assert_eq(worker_n(&a, "lookup 0 32"), 32);
    eventually(store_settled(&d, DISK));
    fetch_and_check(&a, 0, 32);
    cr_assert_eq(kvctl(&d, text, "spill status " DISK), 0, "%s", text);
    daemon_stop(&d);
}

Test(spill_device, that_hangs_does_not_delay_ready)
{
    held_prepare("spill_start = 100ms\n");
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).used == 32);
    daemon_stop(&d);
    worker_kill(&a);

    device_hold(&v);
    daemon_start(&d); /* READY */
    cr_assert(!store_is(&d, DISK, "online"));
    worker_join(&a, d.writer, "one", "kv", "");
    ram_serves(&a, 100, 32);
    cr_assert(!store_is(&d, DISK, "online"));
    device_release(&v);
    is_online();
    cr_assert_eq(worker_n(&a, "lookup 0 32"), 32, "%s", a.reply);
    eventually(store_settled(&d, DISK));
    fetch_and_check(&a, 0, 32);
    daemon_stop(&d);
}

/* What the device may still write to is not freed, on purpose. */
static int held_and_leaking(const struct daemon *unused)
{
    setenv("LSAN_OPTIONS", "detect_leaks=0", 1);
    return held_daemon(unused);
}

Test(spill_device, that_hangs_does_not_keep_a_daemon_from_ending)
{
    held_prepare("stop_flush = 100ms\n");
    d.enter = held_and_leaking;
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    device_hold(&v);
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).writing > 0);
    daemon_stop(&d);
    device_release(&v);
}

Test(spill_device, cancelled_fetches_and_dead_workers_leave_nothing_behind)
{
    held_prepare("fetch_deadline = 60s\n");
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 48"), 48);
    eventually(daemon_store(&d, DISK).used == 48);
    daemon_flush(&d, "one/kv");
    device_hold(&v);

    /* 0 .. 15 are wanted by two, 16 .. 31 by one who gives up, 32 .. 47 by one who dies. */
    cr_assert_eq(worker_n(&a, "submit-fetch 0 32"), 32);
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_tell(&b, "fetch 32 16");
    eventually(daemon_counts(&d, "one/kv").in_flight == 48);
    worker_kill(&b);
    worker_join(&b, d.reader, "one", "kv", "read");
    worker_tell(&b, "fetch 0 16");
    eventually(daemon_stat(&d, "kvd_fetch_shared_keys_total", "one/kv") == 16);
    worker_do(&a, "cancel 0 32");
    cr_assert_eq(worker_n(&a, "completions 0 32"), 0);
    cr_assert_eq(count_statuses(&a, -ECANCELED), 32, "%s", a.reply);
    device_release(&v);
    cr_assert_eq(worker_answer(&b), 0);
    cr_assert_eq(count_statuses(&b, 0), 16, "%s", b.reply);
    cr_assert_eq(worker_n(&b, "pin 0 16"), 16);
    cr_assert_eq(worker_n(&b, "check"), 16);
    eventually(daemon_counts(&d, "one/kv").in_flight == 0);
    worker_do(&b, "release 0");
    eventually(daemon_counts(&d, "one/kv").pinned == 0);
    worker_quit(&b);
    ram_serves(&a, 100, 64);
    daemon_stop(&d);
}

/* ---- a full one */

static void fill_up(const char *dir, bool full)
{
    static char block[1 << 16];
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/others", dir);
    if (!full) {
        cr_assert_eq(unlink(path), 0);
        return;
    }
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    memset(block, 'x', sizeof(block));
    for (size_t n = sizeof(block); n >= 4096; n /= 2)
        while (write(fd, block, n) == (ssize_t)n)
            ;
    cr_assert_eq(errno, ENOSPC, "%s", strerror(errno));
    close(fd);
}

Test(spill_device, that_is_full_at_the_start_is_taken_up_when_there_is_room)
{
    char dir[64], path[80];

    stores_mount("tmpfs", "size=16M", dir);
    snprintf(path, sizeof(path), "%s/kv", dir);
    configure(NULL, path, "size = 12M\n");
    fill_up(dir, true);
    daemon_start(&d);
    is_refused("offline", "does not fit");
    worker_join(&a, d.writer, "one", "kv", "");
    ram_serves(&a, 0, 32);
    fill_up(dir, false);
    cr_assert_eq(kvctl(&d, text, "spill online " DISK), 0, "%s", text);
    is_online();
    cr_assert_eq(worker_n(&a, "publish 100 16"), 16);
    eventually(store_settled(&d, DISK));
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 100, 16);
    daemon_stop(&d);
}

/* A store whose file has lost its reservation, as copying it with holes does. */
Test(spill_device, that_is_full_at_a_write_makes_the_store_read_only)
{
    char path[128];
    int fd;

    device_make(&v, 24 << 20, 512, EXT4);
    device_mount(&v);
    snprintf(path, sizeof(path), "%s/kv", v.mount);
    configure(NULL, path, "size = 12M\n");
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    eventually(store_settled(&d, DISK));
    daemon_stop(&d);
    worker_kill(&a);
    fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 6 << 20, 6 << 20), 0,
                 "%s", strerror(errno));
    close(fd);
    fill_up(v.mount, true);

    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    for (unsigned i = 0; i < 4 && store_is(&d, DISK, "online"); i++) {
        cr_assert_gt(worker_n(&a, "publish %u 48", 100 + 48 * i), 0);
        eventually(store_settled(&d, DISK) || !store_is(&d, DISK, "online"));
    }
    is_refused("read-only", "no space");
    cr_assert_not_null(strstr(daemon_store(&d, DISK).fix, "make room"));
    eventually(store_settled(&d, DISK));
    ram_serves(&a, 1000, 16);
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 0, 16); /* reading goes on */

    fill_up(v.mount, false);
    cr_assert_eq(kvctl(&d, text, "spill online " DISK), 0, "%s", text);
    is_online();
    cr_assert_eq(worker_n(&a, "publish 2000 16"), 16);
    eventually(store_settled(&d, DISK));
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 2000, 16);
    daemon_stop(&d);
}

Test(spill_device, on_a_file_system_without_o_direct)
{
    char dir[64], path[80];
    int fd;

    stores_mount("ramfs", NULL, dir);
    snprintf(path, sizeof(path), "%s/x", dir);
    fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (fd >= 0)
        cr_skip_test("this kernel's ramfs has O_DIRECT");
    snprintf(path, sizeof(path), "%s/kv", dir);
    configure(NULL, path, "size = 8M\n");
    daemon_start(&d);
    is_online();
    cr_assert_not_null(strstr(daemon_store(&d, DISK).io, "buffered"), "%s",
                       daemon_store(&d, DISK).io);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).used == 32);
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 0, 32);
    daemon_stop(&d);
    worker_kill(&a);
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    fetch_and_check(&a, 0, 32);
    daemon_stop(&d);
}

/* ---- block devices */

Test(spill_device, with_blocks_of_4_kib_as_a_whole)
{
    device_make(&v, 32 << 20, 4096, NULL);
    configure(NULL, v.path, "");
    daemon_start(&d);
    is_refused("offline", "`kvctl spill format " DISK "`");
    worker_join(&a, d.writer, "one", "kv", "");
    ram_serves(&a, 0, 16);
    cr_assert_eq(kvctl(&d, text, "spill format " DISK " --force --yes"), 0, "%s", text);
    is_online();
    cr_assert_eq(worker_n(&a, "publish 100 48"), 48);
    eventually(store_settled(&d, DISK));
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 100, 48);
    daemon_kill(&d);
    worker_kill(&a);
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    fetch_and_check(&a, 100, 48);
    daemon_stop(&d);
}

Test(spill_device, that_has_a_file_system_is_refused_and_a_mounted_one_always)
{
    device_make(&v, 32 << 20, 512, EXT4);
    configure(NULL, v.path, "");
    daemon_start(&d);
    is_refused("offline", "ext4");
    worker_join(&a, d.writer, "one", "kv", "");
    ram_serves(&a, 0, 16);
    cr_assert_neq(kvctl(&d, text, "spill format " DISK), 0, "it was formatted: %s", text);
    device_mount(&v); /* the file system is whole */
    cr_assert_neq(kvctl(&d, text, "spill format " DISK " --force --yes"), 0, "a mounted one: %s",
                  text);
    eventually(store_is(&d, DISK, "offline"));
    cr_assert_not_null(strstr(daemon_store(&d, DISK).problem, "mounted"), "%s",
                       daemon_store(&d, DISK).problem);
    device_unmount(&v);
    cr_assert_eq(kvctl(&d, text, "spill format " DISK " --force --yes"), 0, "%s", text);
    is_online();
    cr_assert_eq(worker_n(&a, "publish 100 16"), 16);
    eventually(store_settled(&d, DISK));
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 100, 16);
    daemon_stop(&d);
}

/* ---- what the kernel may deny */

static int without_io_uring(const struct daemon *unused)
{
    (void)unused;
    return deny(DENY_IO_URING);
}

Test(spill_device, without_io_uring_threads_take_over_and_say_so)
{
    char path[80];

    stores_folder(folder);
    snprintf(path, sizeof(path), "%s/kv", folder);
    configure(NULL, path, "size = 8M\n");
    d.enter = without_io_uring;
    daemon_start(&d);
    is_online();
    cr_assert_not_null(strstr(daemon_store(&d, DISK).io, "threads"), "%s",
                       daemon_store(&d, DISK).io);
    cr_assert_not_null(strstr(daemon_store(&d, DISK).note, "io_uring"), "%s",
                       daemon_store(&d, DISK).note);
    cr_assert(daemon_logged(&d, "seccomp"), "the log names no cause");
    kvctl(&d, text, "spill status " DISK);
    cr_assert_not_null(strstr(text, "seccomp"), "%s", text);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).used == 32);
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 0, 32);
    daemon_stop(&d);
}

#define NOBODY 65534

static int as_nobody_without_locked_memory(const struct daemon *unused)
{
    struct rlimit none = {0};

    (void)unused;
    if (setrlimit(RLIMIT_MEMLOCK, &none) < 0)
        return -1;
    if (geteuid() != 0)
        return 0;
    return setgroups(0, NULL) || setgid(NOBODY) || setuid(NOBODY);
}

static void give_to_nobody(const char *path)
{
    if (geteuid() == 0)
        cr_assert_eq(chown(path, NOBODY, NOBODY), 0);
}

Test(spill_device, without_locked_memory_as_an_ordinary_user)
{
    char path[80];

    stores_folder(folder);
    snprintf(path, sizeof(path), "%s/kv", folder);
    configure(NULL, path, "size = 8M\nregister_buffers = yes\n");
    give_to_nobody(folder);
    give_to_nobody(d.dir);
    give_to_nobody(d.config);
    give_to_nobody(d.notify);
    d.enter = as_nobody_without_locked_memory;
    daemon_start(&d);
    is_online();
    cr_assert_null(strstr(daemon_store(&d, DISK).io, "registered"), "%s",
                   daemon_store(&d, DISK).io);
    cr_assert_not_null(strstr(daemon_store(&d, DISK).note, "MEMLOCK"), "%s; %s",
                       daemon_store(&d, DISK).io, daemon_store(&d, DISK).note);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 32"), 32);
    eventually(daemon_store(&d, DISK).used == 32);
    daemon_flush(&d, "one/kv");
    fetch_and_check(&a, 0, 32);
    daemon_stop(&d);
}

/* ---- files that are not what they should be */

static void two_stores(const char *one, const char *two, const char *rest)
{
    snprintf(conf, sizeof(conf),
             "%s[spill " DISK "]\npath = %s/%s\nsize = 8M\n[spill two/kv/disk]\npath = %s/%s\n"
             "size = 8M\n%s",
             usual_pools, folder, one, folder, two, rest);
}

Test(spill_device, files_of_two_pools_swapped_are_refused_and_found_again)
{
    stores_folder(folder);
    two_stores("a", "b", "");
    daemon_up(&d, NULL, conf);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "two", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    cr_assert_eq(worker_n(&b, "publish 0 16"), 16);
    eventually(store_settled(&d, DISK) && store_settled(&d, "two/kv/disk"));
    daemon_stop(&d);
    worker_kill(&a);
    worker_kill(&b);

    two_stores("b", "a", "");
    daemon_configure(&d, NULL, conf);
    daemon_start(&d);
    is_refused("offline", "space");
    eventually(store_is(&d, "two/kv/disk", "offline"));
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.writer, "two", "kv", "");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    cr_assert_eq(worker_n(&b, "lookup 0 16"), 0);
    ram_serves(&a, 100, 16);
    ram_serves(&b, 100, 16);
    daemon_stop(&d);
    worker_kill(&a);
    worker_kill(&b);

    two_stores("a", "b", "");
    daemon_configure(&d, NULL, conf);
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    fetch_and_check(&a, 0, 16);
    worker_join(&b, d.writer, "two", "kv", "");
    fetch_and_check(&b, 0, 16);
    daemon_stop(&d);
}

static void stored_sixteen(void)
{
    char path[80];

    stores_folder(folder);
    snprintf(path, sizeof(path), "%s/kv", folder);
    configure(NULL, path, "size = 8M\n");
    daemon_start(&d);
    is_online();
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    eventually(store_settled(&d, DISK));
    daemon_stop(&d);
    worker_kill(&a);
}

Test(spill_device, a_truncated_file_is_refused)
{
    char path[80];

    stored_sixteen();
    snprintf(path, sizeof(path), "%s/kv", folder);
    cr_assert_eq(truncate(path, 4 << 20), 0);
    daemon_start(&d);
    is_refused("offline", "truncated");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    ram_serves(&a, 0, 16);
    cr_assert_eq(kvctl(&d, text, "spill format " DISK " --force --yes"), 0, "%s", text);
    is_online();
    eventually(daemon_store(&d, DISK).used == 16);
    daemon_stop(&d);
}

Test(spill_device, a_file_of_another_geometry_is_refused)
{
    stored_sixteen();
    snprintf(conf, sizeof(conf),
             "[space one]\n[pool one/kv]\nslot = 128K\nslots = 32\nlow_water = 0\n"
             "[spill " DISK "]\npath = %s/kv\nsize = 8M\n",
             folder);
    daemon_configure(&d, NULL, conf);
    daemon_start(&d);
    is_refused("offline", "slots of 64 KiB (1 part), this pool of 128 KiB (1 part)");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    ram_serves(&a, 0, 16);
    daemon_stop(&d);
}
