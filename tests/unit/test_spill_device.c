/* SPDX-License-Identifier: Apache-2.0 */
/* Stores on block devices: loop devices, which go away by themselves. Needs root. */
#define _GNU_SOURCE
#include "store_world.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEVICE_BYTES (16 * MIB)

static char device[32]; /* /dev/loopN */

static void loop_fini(void)
{
    store_world_fini();
}

/* Nobody else may take it between the two calls: hence the tries. AUTOCLEAR: it goes when the last
 * descriptor is closed, if need be by the death of this process. Returns one that keeps it. */
static int loop_new(uint64_t bytes, uint32_t sector)
{
    int control, backing, fd = -1, n;

    need_root();
    file_write(path_of("disk"), "", 1, bytes - 1);
    backing = open(path_of("disk"), O_RDWR | O_CLOEXEC);
    control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    for (int i = 0; control >= 0 && fd < 0 && i < 50; i++) {
        struct loop_config c = {.fd = (uint32_t)backing, .block_size = sector};

        c.info.lo_flags = LO_FLAGS_AUTOCLEAR;
        n = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(device, sizeof(device), "/dev/loop%d", n);
        fd = n < 0 ? -1 : open(device, O_RDWR | O_CLOEXEC);
        if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &c) < 0) {
            close(fd);
            fd = -1;
            usleep(20000);
        }
    }
    close(control);
    close(backing);
    if (fd < 0)
        cr_skip_test("no loop devices here");
    return fd;
}

static struct store_spec device_spec(void)
{
    struct store_spec spec = spec_of(device);

    spec.bytes = 0;
    return spec;
}

static void must(const char *program, const char *option)
{
    char command[200];

    snprintf(command, sizeof(command),
             "PATH=$PATH:/usr/sbin:/sbin; command -v %s >/dev/null || exit 77; %s %s %s >/dev/null "
             "2>&1",
             program, program, option, device);
    switch (system(command)) {
    case 0:
        return;
    case 77 << 8:
        cr_skip_test("there is no %s", program);
        return;
    default:
        cr_assert_fail("%s", command);
    }
}

TestSuite(device, .init = store_world_init, .fini = loop_fini);

static void check_sector(uint32_t sector)
{
    int loop = loop_new(DEVICE_BYTES, sector);
    struct store_spec spec = device_spec();
    struct format_super s;
    struct ran r;

    assert_fails(&spec, STORE_OPEN, -EEXIST, "kvctl spill format");
    spec.bytes = DEVICE_BYTES;
    assert_fails(&spec, STORE_OPEN, -EEXIST, "kvctl spill format");
    spec.bytes = 0;
    s = made(&spec, STORE_FORMAT);
    cr_assert_gt(s.bytes, DEVICE_BYTES - 65536);
    cr_assert_leq(s.bytes, DEVICE_BYTES);
    put_record(device, &s, 7, 21);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert(r.file.device && r.file.direct);
    cr_assert_eq(r.n, 1);
    cr_assert_eq(r.list[0].number, 7);
    cr_assert_eq(open(device, O_RDONLY | O_EXCL | O_CLOEXEC), -1);
    cr_assert_eq(errno, EBUSY);
    ran_close(&r);
    close(loop);
}

Test(device, is_formatted_only_when_asked_to)
{
    check_sector(512);
}

Test(device, with_sectors_of_4_kib)
{
    check_sector(4096);
}

Test(device, at_most_as_much_as_was_asked_for)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();

    spec.bytes = 8 * MIB;
    cr_assert_leq(made(&spec, STORE_FORMAT).bytes, 8 * MIB);
    spec.bytes = 1024 * MIB;
    cr_assert_leq(made(&spec, STORE_FORMAT).bytes, DEVICE_BYTES);
    close(loop);
}

Test(device, through_a_link_as_udev_makes_them)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();

    spec.path = path_of("by-id");
    cr_assert_eq(symlink(device, spec.path), 0);
    made(&spec, STORE_FORMAT);
    made(&spec, STORE_OPEN);
    close(loop);
}

Test(device, with_a_file_system_needs_force)
{
    int loop = loop_new(DEVICE_BYTES, 4096);
    struct store_spec spec = device_spec();

    must("mkfs.ext4", "-q -F -b 4096");
    assert_fails(&spec, STORE_OPEN, -EEXIST, "something else (ext4); nothing was changed");
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "something else (ext4); nothing was changed");
    must("e2fsck", "-n -f");
    spec.force = true;
    made(&spec, STORE_FORMAT);
    spec.force = false;
    made(&spec, STORE_FORMAT); /* nothing is left of it */
    close(loop);
}

Test(device, has_nothing_of_others_at_its_ends_once_formatted)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();
    uint8_t *noise = malloc(MIB);

    memset(noise, 0x77, MIB);
    file_write(device, noise, MIB, 0);
    file_write(device, noise, MIB, DEVICE_BYTES - MIB);
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "nothing was changed");
    spec.force = true;
    made(&spec, STORE_FORMAT);
    file_read(device, noise, MIB, 0);
    for (size_t i = 4096; i < MIB; i += i + 1 == 65536 ? 4097 : 1)
        cr_assert_eq(noise[i], 0, "byte %zu", i);
    file_read(device, noise, MIB, DEVICE_BYTES - MIB);
    for (size_t i = 0; i < MIB; i++)
        cr_assert_eq(noise[i], 0, "byte %zu of the last MiB", i);
    free(noise);
    close(loop);
}

/* The second superblock may survive that: it must not count. */
Test(device, with_a_file_system_made_over_a_store_is_refused)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();
    struct format_super s = made(&spec, STORE_FORMAT);

    must("mkfs.ext4", "-q -F -E nodiscard");
    put_super(device, &s, 1);
    assert_fails(&spec, STORE_OPEN, -EEXIST, "(ext4) was written over a store");
    close(loop);
}

Test(device, that_is_mounted_is_busy)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();

    must("mkfs.ext4", "-q -F");
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        cr_skip_test("no mounts here");
    cr_assert_eq(mkdir(path_of("mnt"), 0700), 0);
    cr_assert_eq(mount(device, path_of("mnt"), "ext4", 0, NULL), 0, "%s", strerror(errno));
    spec.force = true;
    assert_fails(&spec, STORE_FORMAT, -EBUSY, "mounted or used by another program");
    cr_assert_eq(umount(path_of("mnt")), 0);
    made(&spec, STORE_FORMAT);
    close(loop);
}

/* A claim that a predecessor's I/O still holds is not a mount. */
Test(device, of_a_predecessor_is_waited_for)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();
    struct store_task *t;
    struct ran r;
    pid_t pid;

    made(&spec, STORE_FORMAT);
    pid = holder(&spec);
    t = start(&spec, STORE_OPEN);
    wait_phase(t, STORE_LOCKING);
    usleep(1500000); /* longer than a mere claim is tolerated */
    cr_assert_eq(store_task_result(t, &r.file, r.why, sizeof(r.why)), -EINPROGRESS);
    kill_and_reap(pid);
    r = wait_for(t);
    cr_assert_eq(r.r, 0, "%s", r.why);
    ran_close(&r);
    close(loop);
}

Test(device, that_became_smaller_is_refused)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();

    made(&spec, STORE_FORMAT);
    cr_assert_eq(truncate(path_of("disk"), 12 * MIB), 0);
    cr_assert_eq(ioctl(loop, LOOP_SET_CAPACITY, 0), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "truncated");
    close(loop);
}

Test(device, discards_free_slots)
{
    int loop = loop_new(DEVICE_BYTES, 512);
    struct store_spec spec = device_spec();
    struct ran r;
    struct store_task *t;
    uint8_t slots[64] = {0xf0}, data[65536];
    int status;

    made(&spec, STORE_FORMAT);
    r = run_job(&spec, STORE_OPEN);
    memset(data, 0x77, sizeof(data));
    for (uint32_t i = 0; i < 16; i++)
        file_write(device, data, sizeof(data), format_slot_offset(&r.file.super, i));
    sync();
    cr_assert_eq(store_task_trim(&r.file, slots, -1, &t), 0);
    wait_phase(t, STORE_DONE);
    status = store_task_result(t, &r.file, r.why, sizeof(r.why));
    store_task_free(t);
    if (status == -EOPNOTSUPP)
        cr_skip_test("%s", r.why);
    cr_assert_eq(status, 0, "%s", r.why);
    for (uint32_t i = 0; i < 16; i++) {
        file_read(device, data, sizeof(data), format_slot_offset(&r.file.super, i));
        cr_assert_eq(data[0], i >= 4 && i < 8 ? 0 : 0x77, "slot %u", i);
        cr_assert_eq(memcmp(data, data + 1, sizeof(data) - 1), 0);
    }
    ran_close(&r);
    close(loop);
}
