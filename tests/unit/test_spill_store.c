/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "store_world.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- making */

TestSuite(make, .init = store_world_init, .fini = store_world_fini);

Test(make, an_absent_file_becomes_a_store)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r = run_job(&spec, STORE_OPEN);
    struct format_super first, second;
    struct stat st;

    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(r.n, 0);
    cr_assert(r.file.direct && !r.file.device);
    cr_assert_eq(fcntl(r.file.fd, F_GETFD), FD_CLOEXEC);
    cr_assert(fcntl(r.file.fd, F_GETFL) & O_DIRECT);
    cr_assert_eq(fstat(r.file.fd, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0600);
    cr_assert_eq((uint64_t)st.st_size, r.file.super.bytes);
    cr_assert_geq((uint64_t)st.st_blocks * 512, r.file.super.bytes, "allocated");
    cr_assert_eq(r.file.super.epoch, 3);
    cr_assert_eq(r.file.super.sequence, 1);
    cr_assert_gt(r.file.super.created_s, 1600000000);
    first = super_of(spec.path, 0);
    second = super_of(spec.path, 1);
    cr_assert_eq(memcmp(first.uuid, second.uuid, 16), 0);
    cr_assert_eq(memcmp(first.uuid, r.file.super.uuid, 16), 0);
    ran_close(&r);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(memcmp(first.uuid, r.file.super.uuid, 16), 0, "formatted again");
    cr_assert_eq(r.progress.done, r.file.super.records * 128);
    ran_close(&r);
}

Test(make, an_empty_file_and_one_of_zeros_become_stores)
{
    struct store_spec spec = spec_of(path_of("s"));

    file_write(spec.path, "", 0, 0);
    made(&spec, STORE_OPEN);
    cr_assert_eq(truncate(spec.path, 0), 0);
    cr_assert_eq(truncate(spec.path, 100000), 0);
    made(&spec, STORE_OPEN);
    cr_assert_eq(truncate(spec.path, 0), 0);
    cr_assert_eq(truncate(spec.path, 20 * MIB), 0);
    made(&spec, STORE_OPEN);
    cr_assert_leq(file_size(spec.path), 8 * MIB);
}

Test(make, without_a_size_nothing_is_made)
{
    struct store_spec spec = spec_of(path_of("s"));

    spec.bytes = 0;
    assert_fails(&spec, STORE_OPEN, -ENOENT, "no size");
    assert_fails(&spec, STORE_FORMAT, -ENOENT, "no size");
    cr_assert_eq(access(spec.path, F_OK), -1);
    file_write(spec.path, "", 0, 0);
    assert_fails(&spec, STORE_OPEN, -EEXIST, "no size");
    cr_assert_eq(truncate(spec.path, 8 * MIB), 0);
    made(&spec, STORE_FORMAT);
}

Test(make, too_small_for_a_slot)
{
    struct store_spec spec = spec_of(path_of("s"));

    spec.bytes = 2 * MIB + 65535;
    assert_fails(&spec, STORE_OPEN, -ENOSPC, "too small");
    cr_assert_eq(access(spec.path, F_OK), -1);
    spec.bytes++;
    cr_assert_eq(made(&spec, STORE_OPEN).records, 1);
}

Test(make, a_missing_device_is_not_made_as_a_file)
{
    struct store_spec spec = spec_of("/dev/kvd-no-such-device");

    unlink(spec.path); /* what a run that failed made of it */
    assert_fails(&spec, STORE_OPEN, -ENOENT, "no such device");
    assert_fails(&spec, STORE_FORMAT, -ENOENT, "no such device");
    cr_assert_eq(access(spec.path, F_OK), -1);
}

static void check_full(const struct store_spec *spec)
{
    struct statvfs before, after;
    char says[64], free[FORMAT_SIZE_TEXT];

    cr_assert_eq(statvfs(path_of("fs"), &before), 0);
    snprintf(says, sizeof(says), "does not fit, %s are free",
             format_size(before.f_bavail * before.f_frsize, false, free));
    assert_fails(spec, STORE_OPEN, -ENOSPC, says);
    cr_assert_eq(atomic_load(&faults.allocate.calls), 0, "filled for a moment");
    cr_assert_eq(access(spec->path, F_OK), -1);
    file_write(spec->path, "", 0, 0);
    assert_fails(spec, STORE_OPEN, -ENOSPC, says);
    cr_assert_eq(file_size(spec->path), 0, "it was there, and is as it was");
    cr_assert_eq(statvfs(path_of("fs"), &after), 0);
    cr_assert_eq(before.f_bavail, after.f_bavail);
}

Test(make, a_full_file_system_gets_everything_back)
{
    struct store_spec spec = spec_of(path_of("fs/s"));

    mount_at(path_of("fs"), "tmpfs", "size=5M");
    check_full(&spec);
}

/* The look at the free space was too optimistic: others write, too. */
Test(make, space_that_ends_while_allocating_is_given_back)
{
    struct store_spec spec = spec_of(path_of("s"));

    fault_set(&faults.allocate, (struct fault){.to = UINT64_MAX, .error = ENOSPC});
    assert_fails(&spec, STORE_OPEN, -ENOSPC, "does not fit");
    cr_assert_eq(atomic_load(&faults.allocate.hits), 1);
    cr_assert_eq(access(spec.path, F_OK), -1);
    faults.allocate.error = EFBIG;
    assert_fails(&spec, STORE_OPEN, -EFBIG, "fallocate");
    cr_assert_eq(access(spec.path, F_OK), -1);
}

Test(make, a_write_error_leaves_nothing)
{
    struct store_spec spec = spec_of(path_of("s"));

    fault_set(&faults.write, (struct fault){.from = 3 * MIB / 2, .to = 2 * MIB, .error = EIO});
    assert_fails(&spec, STORE_OPEN, -EIO, "writing the table");
    cr_assert_eq(access(spec.path, F_OK), -1);
    fault_set(&faults.write, (struct fault){.from = 65536, .to = 65537, .error = EIO});
    file_write(spec.path, "", 0, 0);
    assert_fails(&spec, STORE_OPEN, -EIO, "writing");
    cr_assert_eq(file_size(spec.path), 0);
}

/* No O_DIRECT, no fallocate(), no statistics. */
Test(make, on_a_file_system_that_can_nothing)
{
    struct store_spec spec = spec_of(path_of("fs/s"));
    struct format_super s;
    struct ran r;

    mount_at(path_of("fs"), "ramfs", "mode=0700");
    s = made(&spec, STORE_OPEN);
    put_record(spec.path, &s, 5, 50);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_not(r.file.direct);
    cr_assert_eq(r.n, 1);
    ran_close(&r);
}

/* O_DIRECT is taken when it is set, and refused when it is used. */
Test(make, transfers_that_refuse_o_direct)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r;

    made(&spec, STORE_OPEN);
    fault_set(&faults.read, (struct fault){.to = UINT64_MAX, .error = EINVAL, .times = 1});
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_not(r.file.direct);
    cr_assert_eq(fcntl(r.file.fd, F_GETFL) & O_DIRECT, 0);
    ran_close(&r);
}

Test(make, killed_before_the_superblocks_it_is_made_again)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s;
    pid_t pid = fork();

    if (pid == 0) {
        struct store_task *t;

        fault_set(&faults.write, (struct fault){.from = 65536, .to = 65537, .hang = true});
        faults.write.times = 0;
        store_task_open(&spec, STORE_OPEN, -1, &t);
        while (atomic_load(&faults.write.hits) < 1)
            usleep(1000);
        raise(SIGKILL);
    }
    while (waitpid(pid, NULL, 0) != pid)
        ;
    cr_assert_gt(file_size(spec.path), 0);
    s = made(&spec, STORE_OPEN);
    cr_assert_eq(s.sequence, 1);
    cr_assert_eq(super_of(spec.path, 1).sequence, 1);
}

Test(make, cancelled_it_leaves_nothing)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct store_task *t;
    struct ran r;

    fault_set(&faults.write, (struct fault){.from = 0, .to = 1, .hang = true});
    t = start(&spec, STORE_OPEN);
    while (atomic_load(&faults.write.hits) == 0)
        usleep(1000);
    store_task_cancel(t);
    atomic_store(&faults.write.released, true);
    r = wait_for(t);
    cr_assert_eq(r.r, -ECANCELED);
    cr_assert_eq(access(spec.path, F_OK), -1);
    ran_close(&r);
}

/* ---- making anew */

TestSuite(format, .init = store_world_init, .fini = store_world_fini);

Test(format, objects_are_lost_only_by_force)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN), again;

    again = made(&spec, STORE_FORMAT);
    cr_assert_neq(memcmp(s.uuid, again.uuid, 16), 0);
    cr_assert_eq(again.sequence, 2);
    put_record(spec.path, &again, 88, 1);
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "objects of llama/kv");
    cr_assert_eq(memcmp(super_of(spec.path, 0).uuid, again.uuid, 16), 0);
    spec.force = true;
    spec.epoch = 9;
    spec.geometry.parts = 1;
    s = made(&spec, STORE_FORMAT);
    cr_assert_eq(s.epoch, 9);
    cr_assert_eq(s.geometry.parts, 1);
    cr_assert_eq(super_of(spec.path, 0).sequence, 3);
}

Test(format, old_records_do_not_come_back)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);
    uint8_t table[4096];
    struct ran r;

    for (uint32_t i = 0; i < 32; i++)
        put_record(spec.path, &s, i, i);
    file_read(spec.path, table, sizeof(table), s.table);
    spec.force = true;
    made(&spec, STORE_FORMAT);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.progress.records + r.progress.broken, 0);
    ran_close(&r);
    /* Nor when a late write of a predecessor brings them back. */
    file_write(spec.path, table, sizeof(table), s.table);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0);
    cr_assert_eq(r.n, 0);
    cr_assert_eq(r.progress.broken, 32);
    ran_close(&r);
}

Test(format, what_cannot_be_read_any_more_needs_no_force)
{
    struct store_spec spec = spec_of(path_of("s"));

    made(&spec, STORE_OPEN);
    file_flip(spec.path, 1000);
    file_flip(spec.path, 8 * 65536 + 1000);
    assert_fails(&spec, STORE_OPEN, -EILSEQ, "both superblocks");
    made(&spec, STORE_FORMAT);
    cr_assert_eq(truncate(spec.path, 3 * MIB), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "truncated");
    made(&spec, STORE_FORMAT);
}

Test(format, foreign_files_stay_as_they_are)
{
    struct store_spec spec = spec_of(path_of("s"));
    char text[100] = "dear diary", now[100];

    file_write(spec.path, text, sizeof(text), 300000);
    assert_fails(&spec, STORE_OPEN, -EEXIST, "not a store of kvd");
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "--force");
    file_read(spec.path, now, sizeof(now), 300000);
    cr_assert_arr_eq(text, now, sizeof(text));
    cr_assert_eq(file_size(spec.path), 300100);
    spec.force = true;
    assert_fails(&spec, STORE_OPEN, -EEXIST, "not a store of kvd");
    made(&spec, STORE_FORMAT);
}

/* Zeros at the head, and something after all: btrfs' superblock is at 64 KiB, ZFS' and RAID's at the end. */
Test(format, a_signature_behind_zeros_is_found)
{
    struct store_spec spec = spec_of(path_of("s"));
    uint8_t magic[4] = {0xfc, 0x4e, 0x2b, 0xa9}; /* md, version 1.0: 8 KiB before the end */
    uint8_t version[4] = {1, 0, 0, 0};

    file_write(spec.path, "", 1, 8 * MIB - 1);
    file_write(spec.path, magic, 4, 8 * MIB - 8192);
    file_write(spec.path, version, 4, 8 * MIB - 8192 + 4);
    uint64_t super_sector = (8 * MIB - 8192) / 512;
    file_write(spec.path, &super_sector, 8, 8 * MIB - 8192 + 144);
    assert_fails(&spec, STORE_OPEN, -EEXIST, "linux_raid_member");
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "linux_raid_member");
    spec.force = true;
    made(&spec, STORE_FORMAT);
}

/* ---- opening */

TestSuite(open_store, .init = store_world_init, .fini = store_world_fini);

static void check_list(const struct ran *r, uint32_t from, uint32_t step)
{
    uint32_t number = from;

    for (uint32_t i = 0; i < r->n; i++, number += step) {
        struct format_record want = record_of(number * 3ull), *got = &r->list[i].record;

        cr_assert_eq(r->list[i].number, number);
        cr_assert_eq(memcmp(&got->key, &want.key, sizeof(want.key)), 0);
        cr_assert_eq(memcmp(&got->parent, &want.parent, sizeof(want.parent)), 0);
        cr_assert(got->has_parent == want.has_parent && got->digest == want.digest &&
                  got->position == want.position && got->bytes == want.bytes &&
                  got->epoch == want.epoch && got->user_bytes == want.user_bytes);
    }
}

Test(open_store, records_come_back_in_order)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);
    struct ran r;

    for (uint32_t i = 1; i < s.records; i += 2)
        put_record(spec.path, &s, i, i * 3ull);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(r.n, s.records / 2);
    check_list(&r, 1, 2);
    cr_assert_eq(r.progress.records, r.n);
    cr_assert_eq(r.progress.broken, 0);
    cr_assert_eq(r.progress.done, r.progress.total);
    ran_close(&r);
}

Test(open_store, every_flipped_bit_of_a_record_costs_that_record)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);

    for (uint32_t i = 0; i < 3; i++)
        put_record(spec.path, &s, i, i * 3);
    for (uint64_t bit = 0; bit < 1024; bit++) {
        struct ran r;

        file_flip(spec.path, 8 * (MIB + 128) + bit);
        r = run_job(&spec, STORE_OPEN);
        cr_assert_eq(r.n, 2);
        check_list(&r, 0, 2);
        cr_assert_eq(r.progress.broken, 1);
        file_flip(spec.path, 8 * (MIB + 128) + bit);
        ran_close(&r);
    }
}

static void check_repaired(const struct store_spec *spec, const uint8_t want[4096], uint64_t bit,
                           unsigned copy)
{
    uint8_t now[4096];
    struct ran r;

    file_flip(spec->path, copy * 8ull * 65536 + bit);
    r = run_job(spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "bit %llu: %s", (unsigned long long)bit, r.why);
    cr_assert_eq(r.file.super.sequence, 1);
    ran_close(&r);
    file_read(spec->path, now, sizeof(now), copy * 65536);
    cr_assert_arr_eq(now, want, sizeof(now), "bit %llu", (unsigned long long)bit);
}

/* All that mean something, some of the zeros. */
Test(open_store, every_flipped_bit_of_a_superblock_is_mended_from_the_other)
{
    struct store_spec spec = spec_of(path_of("s"));
    uint8_t want[4096];

    made(&spec, STORE_OPEN);
    file_read(spec.path, want, sizeof(want), 0);
    for (uint64_t bit = 0; bit < 8 * 248; bit++)
        check_repaired(&spec, want, bit, bit % 2);
    for (uint64_t bit = 8 * 248; bit < 8 * 4088; bit += 331)
        check_repaired(&spec, want, bit, bit % 2);
    for (uint64_t bit = 8 * 4088; bit < 8 * 4096; bit++)
        check_repaired(&spec, want, bit, bit % 2);
}

Test(open_store, a_lost_superblock_is_mended)
{
    struct store_spec spec = spec_of(path_of("s"));
    uint8_t zeros[4096] = {0}, noise[4096];

    made(&spec, STORE_OPEN);
    memset(noise, 0xe5, sizeof(noise));
    for (unsigned copy = 0; copy < 2; copy++) {
        file_write(spec.path, zeros, sizeof(zeros), copy * 65536);
        made(&spec, STORE_OPEN);
        super_of(spec.path, copy);
        file_write(spec.path, noise, sizeof(noise), copy * 65536);
        made(&spec, STORE_OPEN);
        super_of(spec.path, copy);
    }
}

Test(open_store, an_unreadable_superblock_is_written_anew)
{
    struct store_spec spec = spec_of(path_of("s"));

    made(&spec, STORE_OPEN);
    fault_set(&faults.read, (struct fault){.from = 0, .to = 4096, .error = EIO});
    made(&spec, STORE_OPEN);
    cr_assert_geq(atomic_load(&faults.read.hits), 1);
    fault_set(&faults.read, (struct fault){.from = 0, .to = 65537, .error = EIO});
    assert_fails(&spec, STORE_OPEN, -EIO, "reading the superblocks");
}

/* A new epoch reached the first copy only. */
Test(open_store, the_higher_sequence_counts)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);

    for (unsigned copy = 0; copy < 2; copy++) {
        s.sequence++;
        s.epoch++;
        put_super(spec.path, &s, copy);
        cr_assert_eq(made(&spec, STORE_OPEN).epoch, s.epoch);
        cr_assert_eq(super_of(spec.path, !copy).epoch, s.epoch);
    }
}

Test(open_store, a_superblock_that_cannot_be_mended_is_an_error)
{
    struct store_spec spec = spec_of(path_of("s"));

    made(&spec, STORE_OPEN);
    file_flip(spec.path, 999);
    fault_set(&faults.write, (struct fault){.to = 4096, .error = EIO});
    assert_fails(&spec, STORE_OPEN, -EIO, "writing a superblock");
}

static void put_version(const char *path, unsigned copy, uint8_t version)
{
    uint8_t bytes[4096];
    uint64_t check;

    file_read(path, bytes, sizeof(bytes), copy * 65536);
    bytes[8] = version;
    check = XXH3_64bits(bytes, 4088);
    memcpy(bytes + 4088, &check, 8);
    file_write(path, bytes, sizeof(bytes), copy * 65536);
}

Test(open_store, of_another_version_nothing_is_touched)
{
    struct store_spec spec = spec_of(path_of("s"));
    uint8_t before[70000], after[70000];

    made(&spec, STORE_OPEN);
    put_version(spec.path, 1, 2);
    file_read(spec.path, before, sizeof(before), 0);
    assert_fails(&spec, STORE_OPEN, -EPROTONOSUPPORT, "another version");
    put_version(spec.path, 0, 2);
    assert_fails(&spec, STORE_OPEN, -EPROTONOSUPPORT, "another version");
    assert_fails(&spec, STORE_FORMAT, -EPROTONOSUPPORT, "--force");
    put_version(spec.path, 0, 1);
    file_read(spec.path, after, sizeof(after), 0);
    cr_assert_arr_eq(before, after, sizeof(before));
    spec.force = true;
    made(&spec, STORE_FORMAT);
}

Test(open_store, of_another_pool_or_model_says_which)
{
    struct store_spec spec = spec_of(path_of("s")), other = spec;

    made(&spec, STORE_OPEN);
    memcpy(other.geometry.space, "qwen\0", 6);
    assert_fails(&other, STORE_OPEN, -EMEDIUMTYPE, "of space llama, this pool is of qwen");
    other = spec;
    other.geometry.identity[3] ^= 1;
    assert_fails(&other, STORE_OPEN, -EMEDIUMTYPE, "another model");
    other = spec;
    other.geometry.part_bytes = 4096;
    assert_fails(&other, STORE_OPEN, -EMEDIUMTYPE,
                 "slots of 64 KiB (2 parts), this pool of 8 KiB (2 parts)");
    made(&spec, STORE_OPEN);
}

Test(open_store, swapped_stores_have_no_records_for_each_other)
{
    struct store_spec a = spec_of(path_of("a")), b = spec_of(path_of("b"));
    struct format_super sa = made(&a, STORE_OPEN), sb = made(&b, STORE_OPEN);
    uint8_t table[4096];
    struct ran r;

    for (uint32_t i = 0; i < 32; i++) {
        put_record(a.path, &sa, i, i);
        put_record(b.path, &sb, i, i);
    }
    file_read(a.path, table, sizeof(table), sa.table);
    file_write(b.path, table, sizeof(table), sb.table);
    r = run_job(&b, STORE_OPEN);
    cr_assert_eq(r.r, 0);
    cr_assert_eq(r.n, 0);
    cr_assert_eq(r.progress.broken, 32);
    ran_close(&r);
}

Test(open_store, a_table_of_garbage_is_an_empty_store)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);
    uint8_t garbage[128];
    struct ran r;

    srand(1);
    for (uint32_t i = 0; i < s.records; i++) {
        for (size_t k = 0; k < sizeof(garbage); k++)
            garbage[k] = (uint8_t)rand();
        file_write(spec.path, garbage, sizeof(garbage), s.table + 128 * i);
    }
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0);
    cr_assert_eq(r.n, 0);
    cr_assert_eq(r.progress.broken, s.records);
    ran_close(&r);
}

Test(open_store, truncated_it_is_refused_and_longer_it_is_fine)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);

    cr_assert_eq(truncate(spec.path, (off_t)s.bytes - 1), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "truncated");
    cr_assert_eq(truncate(spec.path, 5000), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "truncated");
    cr_assert_eq(truncate(spec.path, (off_t)s.bytes + 5000), 0);
    made(&spec, STORE_OPEN);
}

Test(open_store, another_size_in_the_configuration_changes_nothing)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);

    spec.bytes = 100 * MIB;
    cr_assert_eq(made(&spec, STORE_OPEN).records, s.records);
    spec.bytes = 1;
    cr_assert_eq(made(&spec, STORE_OPEN).records, s.records);
    cr_assert_eq(file_size(spec.path), s.bytes);
}

Test(open_store, whose_the_file_is)
{
    struct store_spec spec = spec_of(path_of("s")), link = spec_of(path_of("link"));

    made(&spec, STORE_OPEN);
    cr_assert_eq(chmod(spec.path, 0660), 0);
    assert_fails(&spec, STORE_OPEN, -EACCES, "others may write it (mode 0660)");
    cr_assert_eq(chmod(spec.path, 0602), 0);
    assert_fails(&spec, STORE_FORMAT, -EACCES, "others may write it");
    cr_assert_eq(chmod(spec.path, 0600), 0);
    cr_assert_eq(symlink(spec.path, link.path), 0);
    assert_fails(&link, STORE_OPEN, -ELOOP, "symbolic link");
    need_root();
    cr_assert_eq(chown(spec.path, 1234, 0), 0);
    assert_fails(&spec, STORE_OPEN, -EACCES, "belongs to user 1234");
}

Test(open_store, what_is_no_file)
{
    struct store_spec spec = spec_of(path_of("x"));

    cr_assert_eq(mkfifo(spec.path, 0600), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "neither a regular file nor");
    cr_assert_eq(unlink(spec.path), 0);
    cr_assert_eq(mkdir(spec.path, 0700), 0);
    assert_fails(&spec, STORE_FORMAT, -EINVAL, "neither a regular file nor");
    spec.path = path_of("no/such/folder");
    assert_fails(&spec, STORE_OPEN, -ENOENT, "no/such does not exist; fix: install -d -m 0700 ");
    spec.path = "/proc/self/store";
    assert_fails(&spec, STORE_OPEN, -ENOENT, "no file can be made in /proc/self; fix: another");
}

Test(open_store, says_which_user_may_not)
{
    struct store_spec spec = spec_of(path_of("s")), new = spec_of(path_of("t"));
    char says[64];

    need_root();
    made(&spec, STORE_OPEN);
    cr_assert_eq(chmod(path_of("."), 0755), 0);
    cr_assert_eq(seteuid(65534), 0);
    assert_fails(&spec, STORE_OPEN, -EACCES, "user 65534 may not open it (mode 0600, user 0)");
    assert_fails(&spec, STORE_OPEN, -EACCES, "; fix: chown 65534 ");
    assert_fails(&new, STORE_OPEN, -EACCES, "user 65534 may not make files in ");
    new.path = path_of("no/folder");
    snprintf(says, sizeof(says), "fix: install -d -m 0700 -o 65534 -g %u ", getegid());
    assert_fails(&new, STORE_OPEN, -ENOENT, says);
    cr_assert_eq(seteuid(0), 0);
    cr_assert_eq(chmod(path_of("."), 0700), 0);
    cr_assert_eq(seteuid(65534), 0);
    assert_fails(&spec, STORE_OPEN, -EACCES, "user 65534 may not look into its directory");
    cr_assert_eq(seteuid(0), 0);
}

Test(open_store, names_the_command_that_makes_it_anew)
{
    struct store_spec spec = spec_of(path_of("s")), other;
    struct format_super s = made(&spec, STORE_OPEN);

    spec.name = "llama/kv/a";
    other = spec;
    other.geometry.part_bytes = 4096;
    assert_fails(&other, STORE_OPEN, -EMEDIUMTYPE, "or `kvctl spill format llama/kv/a`");
    put_record(spec.path, &s, 5, 1);
    assert_fails(&other, STORE_OPEN, -EMEDIUMTYPE, "or `kvctl spill format llama/kv/a --force`");
    assert_fails(&spec, STORE_FORMAT, -EEXIST, "fix: `kvctl spill format llama/kv/a --force` if");
    cr_assert_eq(truncate(spec.path, 3 * MIB), 0);
    assert_fails(&spec, STORE_OPEN, -EINVAL, "fix: `kvctl spill format llama/kv/a`");
    made(&spec, STORE_FORMAT);
}

/* ---- the lock */

TestSuite(lock, .init = store_world_init, .fini = store_world_fini);

Test(lock, is_waited_for_until_the_other_process_is_dead)
{
    struct store_spec spec = spec_of(path_of("s"));
    pid_t pid = holder(&spec);
    struct store_task *t = start(&spec, STORE_OPEN);
    struct ran r;

    wait_phase(t, STORE_LOCKING);
    usleep(200000); /* four tries */
    cr_assert_eq(store_task_result(t, &r.file, r.why, sizeof(r.why)), -EINPROGRESS);
    kill_and_reap(pid);
    r = wait_for(t);
    cr_assert_eq(r.r, 0, "%s", r.why);
    ran_close(&r);
}

Test(lock, nothing_is_read_or_written_without_it)
{
    struct store_spec spec = spec_of(path_of("s"));
    pid_t pid = holder(&spec);
    struct store_task *t;
    struct ran r;

    faults.read.to = faults.write.to = 0;
    t = start(&spec, STORE_FORMAT);
    wait_phase(t, STORE_LOCKING);
    usleep(200000);
    cr_assert_eq(atomic_load(&faults.read.calls), 0);
    cr_assert_eq(atomic_load(&faults.write.calls), 0);
    store_task_cancel(t);
    r = wait_for(t);
    cr_assert_eq(r.r, -ECANCELED);
    ran_close(&r);
    kill_and_reap(pid);
}

Test(lock, without_it_two_have_the_store)
{
    struct store_spec spec = spec_of(path_of("s"));
    pid_t pid = holder(&spec);

    spec.no_lock = true;
    made(&spec, STORE_OPEN);
    kill_and_reap(pid);
}

Test(lock, a_file_that_took_its_place_meanwhile_is_opened)
{
    struct store_spec spec = spec_of(path_of("s")), other = spec_of(path_of("t"));
    struct format_super s = made(&other, STORE_OPEN);
    pid_t pid = holder(&spec);
    struct store_task *t = start(&spec, STORE_OPEN);
    struct ran r;

    wait_phase(t, STORE_LOCKING);
    cr_assert_eq(rename(other.path, spec.path), 0);
    kill_and_reap(pid);
    r = wait_for(t);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(memcmp(s.uuid, r.file.super.uuid, 16), 0, "that of the removed file");
    ran_close(&r);
}

Test(lock, a_file_removed_meanwhile_is_made_anew)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = made(&spec, STORE_OPEN);
    pid_t pid = holder(&spec);
    struct store_task *t = start(&spec, STORE_OPEN);
    struct ran r;

    wait_phase(t, STORE_LOCKING);
    cr_assert_eq(unlink(spec.path), 0);
    kill_and_reap(pid);
    r = wait_for(t);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_neq(memcmp(s.uuid, r.file.super.uuid, 16), 0);
    cr_assert_eq(memcmp(super_of(spec.path, 0).uuid, r.file.super.uuid, 16), 0);
    ran_close(&r);
}

Test(lock, belongs_to_the_open_file)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r = run_job(&spec, STORE_OPEN);
    int other = open(spec.path, O_RDWR | O_CLOEXEC), copy;

    cr_assert_eq(flock(other, LOCK_EX | LOCK_NB), -1);
    copy = dup(r.file.fd); /* as io_uring keeps it */
    ran_close(&r);
    cr_assert_eq(flock(other, LOCK_EX | LOCK_NB), -1);
    close(copy);
    cr_assert_eq(flock(other, LOCK_EX | LOCK_NB), 0);
    close(other);
}

/* ---- the table */

TestSuite(load, .init = store_world_init, .fini = store_world_fini);

/* A sparse store with all records, made by hand: 4 KiB slots would need much room. */
static struct format_super big_store(struct store_spec *spec, uint64_t records)
{
    uint8_t *table = malloc(records * 128);
    struct format_super s;

    spec->geometry.part_bytes = 4096;
    spec->geometry.parts = 1;
    cr_assert_eq(format_plan(&spec->geometry, records * (4096 + 256) + 3 * MIB, &s), 0);
    cr_assert(table && s.records >= records);
    s.sequence = 1;
    for (uint64_t i = 0; i < records; i++) {
        struct format_record r = record_of(i * 3);

        format_record_encode(&r, &s, (uint32_t)i, table + 128 * i);
    }
    file_write(spec->path, table, records * 128, s.table);
    put_super(spec->path, &s, 0);
    put_super(spec->path, &s, 1);
    cr_assert_eq(truncate(spec->path, (off_t)s.bytes), 0);
    free(table);
    return s;
}

Test(load, a_million_records)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r;

    big_store(&spec, 1000000);
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(r.n, 1000000);
    cr_assert_eq(r.progress.records, 1000000);
    cr_assert_eq(r.progress.broken, 0);
    check_list(&r, 0, 1);
    ran_close(&r);
}

Test(load, waits_for_a_caller_who_does_not_take)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct store_progress before, after = {0};
    struct store_task *t;
    struct ran r;

    big_store(&spec, 50000);
    t = start(&spec, STORE_OPEN);
    do {
        before = after;
        usleep(50000);
        store_task_progress(t, &after);
    } while (after.records == 0 || before.records != after.records);
    cr_assert_leq(after.records, 8192);
    cr_assert_eq(after.phase, STORE_READING);
    cr_assert_eq(store_task_result(t, &r.file, r.why, sizeof(r.why)), -EINPROGRESS);
    r = wait_for(t);
    cr_assert_eq(r.r, 0);
    cr_assert_eq(r.n, 50000);
    check_list(&r, 0, 1);
    ran_close(&r);
}

Test(load, is_not_done_before_all_is_taken)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct store_loaded one;
    struct store_file file;
    struct store_task *t;
    char why[512];

    big_store(&spec, 3);
    t = start(&spec, STORE_OPEN);
    wait_phase(t, STORE_DONE);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(store_task_result(t, &file, why, sizeof(why)), -EINPROGRESS);
        cr_assert_eq(store_task_take(t, &one, 1), 1);
        cr_assert_eq(one.number, i);
    }
    cr_assert_eq(store_task_take(t, &one, 1), 0);
    cr_assert_eq(store_task_result(t, &file, why, sizeof(why)), 0);
    cr_assert_eq(store_task_result(t, &file, why, sizeof(why)), -EALREADY);
    store_task_free(t);
    close(file.fd);
}

Test(load, an_unreadable_place_costs_its_records)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = big_store(&spec, 30000);
    struct ran r;

    /* in the second MiB, across two of the pieces that it is read in */
    fault_set(&faults.read, (struct fault){.from = s.table + MIB + 65536 + 60000,
                                           .to = s.table + MIB + 131072 + 1,
                                           .error = EIO});
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.r, 0, "%s", r.why);
    cr_assert_eq(r.n, 30000 - 1024);
    cr_assert_eq(r.progress.broken, 1024);
    cr_assert_eq(r.list[8192 + 511].number, 8192 + 511);
    cr_assert_eq(r.list[8192 + 512].number, 8192 + 512 + 1024);
    ran_close(&r);
}

Test(load, a_dead_device_is_not_read_to_the_end)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct format_super s = big_store(&spec, 200000);

    fault_set(&faults.read, (struct fault){.from = s.table, .to = UINT64_MAX, .error = EIO});
    assert_fails(&spec, STORE_OPEN, -EIO, "reading the table");
    cr_assert_leq(atomic_load(&faults.read.hits), 80);
}

Test(load, short_reads_and_interruptions_are_repeated)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r;

    big_store(&spec, 30000);
    fault_set(&faults.read, (struct fault){.to = UINT64_MAX, .cut = 40960});
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.n, 30000);
    check_list(&r, 0, 1);
    ran_close(&r);
    fault_set(&faults.read, (struct fault){.to = UINT64_MAX, .error = EAGAIN, .times = 20});
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.n, 30000);
    ran_close(&r);
    fault_set(&faults.read, (struct fault){.to = UINT64_MAX, .error = EINTR, .times = 200});
    r = run_job(&spec, STORE_OPEN);
    cr_assert_eq(r.n, 30000);
    ran_close(&r);
    fault_set(&faults.read, (struct fault){.to = UINT64_MAX, .error = EAGAIN});
    assert_fails(&spec, STORE_OPEN, -EAGAIN, "reading");
}

/* ---- hanging */

TestSuite(hang, .init = store_world_init, .fini = store_world_fini);

static unsigned store_threads(void)
{
    DIR *d = opendir("/proc/self/task");
    struct dirent *e;
    unsigned n = 0;

    while ((e = readdir(d))) {
        char path[300], name[32] = "";
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
        f = fopen(path, "re");
        if (f && fgets(name, sizeof(name), f))
            n += strcmp(name, "kvd-store\n") == 0;
        if (f)
            fclose(f);
    }
    closedir(d);
    return n;
}

static void check_hang(const struct store_spec *spec, struct fault *f)
{
    struct store_task *t = start(spec, STORE_OPEN);
    struct store_progress p;
    struct ran r;

    while (atomic_load(&f->hits) == 0)
        usleep(1000);
    store_task_progress(t, &p);
    cr_assert_neq(p.phase, STORE_DONE);
    cr_assert_eq(store_task_result(t, &r.file, r.why, sizeof(r.why)), -EINPROGRESS);
    store_task_cancel(t);
    store_task_free(t); /* comes back although the thread does not */
    cr_assert_geq(store_threads(), 1);
    cr_assert(sigismember(&f->blocked, SIGTERM) && sigismember(&f->blocked, SIGIO));
    atomic_store(&f->released, true);
    while (store_threads() > 0)
        usleep(1000);
}

Test(hang, in_the_superblock_or_the_table_hinders_nobody)
{
    struct store_spec spec = spec_of(path_of("s"));

    big_store(&spec, 30000);
    fault_set(&faults.read, (struct fault){.to = 1, .hang = true});
    check_hang(&spec, &faults.read);
    fault_set(&faults.read, (struct fault){.from = 2 * MIB, .to = 2 * MIB + 1, .hang = true});
    check_hang(&spec, &faults.read);
    fault_set(&faults.read, (struct fault){0});
    spec.geometry.part_bytes = 4096; /* and everything was given back: the lock, too */
    {
        struct ran r = run_job(&spec, STORE_OPEN);

        cr_assert_eq(r.n, 30000);
        ran_close(&r);
    }
}

Test(hang, no_event_after_the_task_was_freed)
{
    struct store_spec spec = spec_of(path_of("s"));
    int fd = eventfd(0, EFD_NONBLOCK);
    struct store_task *t;
    uint64_t n;

    big_store(&spec, 30000);
    fault_set(&faults.read, (struct fault){.from = 2 * MIB, .to = 2 * MIB + 1, .hang = true});
    cr_assert_eq(store_task_open(&spec, STORE_OPEN, fd, &t), 0);
    while (atomic_load(&faults.read.hits) == 0)
        usleep(1000);
    store_task_free(t);
    cr_assert_eq(read(fd, &n, sizeof(n)), (ssize_t)sizeof(n));
    atomic_store(&faults.read.released, true);
    while (store_threads() > 0)
        usleep(1000);
    cr_assert_eq(read(fd, &n, sizeof(n)), -1);
}

Test(hang, whoever_does_not_want_the_result_leaves_nothing_open)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct store_task *t;

    made(&spec, STORE_OPEN);
    for (unsigned i = 0; i < 100; i++) {
        t = start(&spec, STORE_OPEN);
        if (i % 2)
            wait_phase(t, STORE_DONE);
        store_task_free(t);
    }
    while (store_threads() > 0)
        usleep(1000);
    for (int fd = 3; fd < 256; fd++) {
        char link[64], to[300] = "";

        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        if (readlink(link, to, sizeof(to) - 1) > 0)
            cr_assert_neq(strcmp(to, spec.path), 0);
    }
    store_task_free(NULL);
}

/* ---- trimming */

TestSuite(trim, .init = store_world_init, .fini = store_world_fini);

static struct ran trim(const struct store_file *file, const uint8_t *slots)
{
    struct store_task *t = NULL;
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct ran r = {.r = -EINPROGRESS, .file.fd = -1};

    cr_assert_eq(store_task_trim(file, slots, fd, &t), 0);
    wait_phase(t, STORE_DONE);
    r.r = store_task_result(t, &r.file, r.why, sizeof(r.why));
    store_task_progress(t, &r.progress);
    store_task_free(t);
    close(fd);
    return r;
}

/* Runs of one and of two, gaps of one and of more. */
static unsigned trimmed(uint32_t slot)
{
    return 0x0du >> slot % 7 & 1;
}

Test(trim, gives_back_free_slots_and_no_others)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r = run_job(&spec, STORE_OPEN), tr;
    uint8_t slots[16] = {0}, *data = malloc(65536);
    struct stat before, after;

    cr_assert_eq(r.r, 0);
    memset(data, 0x77, 65536);
    for (uint32_t i = 0; i < r.file.super.records; i++)
        file_write(spec.path, data, 65536, format_slot_offset(&r.file.super, i));
    for (uint32_t i = 0; i < r.file.super.records; i++)
        slots[i / 8] |= (uint8_t)(trimmed(i) << i % 8);
    slots[15] = 0xff; /* slots that do not exist */
    cr_assert_eq(fstat(r.file.fd, &before), 0);
    tr = trim(&r.file, slots);
    cr_assert_eq(tr.r, 0, "%s", tr.why);
    cr_assert_eq(tr.file.fd, r.file.fd);
    cr_assert_eq(fstat(r.file.fd, &after), 0);
    cr_assert_eq(before.st_size, after.st_size);
    /* All of it, but for a few blocks that now tell where the holes are. */
    cr_assert_geq((uint64_t)(before.st_blocks - after.st_blocks) * 512, tr.progress.total - 32768);
    cr_assert_eq(tr.progress.done, tr.progress.total);
    for (uint32_t i = 0; i < r.file.super.records; i++) {
        file_read(spec.path, data, 65536, format_slot_offset(&r.file.super, i));
        for (uint32_t k = 0; k < 65536; k++)
            cr_assert_eq(data[k], trimmed(i) ? 0 : 0x77, "slot %u", i);
    }
    free(data);
    ran_close(&r);
    made(&spec, STORE_OPEN);
}

Test(trim, says_when_it_cannot)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r = run_job(&spec, STORE_OPEN), tr;
    uint8_t slots[16];

    memset(slots, 0xff, sizeof(slots));
    fault_set(&faults.allocate, (struct fault){.to = UINT64_MAX, .error = EOPNOTSUPP});
    tr = trim(&r.file, slots);
    cr_assert_eq(tr.r, -EOPNOTSUPP);
    cr_assert_not_null(strstr(tr.why, "cannot punch holes"), "%s", tr.why);
    faults.allocate.error = EIO;
    tr = trim(&r.file, slots);
    cr_assert_eq(tr.r, -EIO);
    cr_assert_eq(fcntl(r.file.fd, F_GETFD), FD_CLOEXEC, "the caller's is still open");
    ran_close(&r);
}

/* Whoever closes the store while the task still runs. */
Test(trim, keeps_the_lock_until_its_end)
{
    struct store_spec spec = spec_of(path_of("s"));
    struct ran r = run_job(&spec, STORE_OPEN);
    int other = open(spec.path, O_RDWR | O_CLOEXEC);
    struct store_task *t;
    uint8_t slots[16];

    memset(slots, 0xff, sizeof(slots));
    fault_set(&faults.allocate, (struct fault){.to = UINT64_MAX, .hang = true});
    cr_assert_eq(store_task_trim(&r.file, slots, -1, &t), 0);
    while (atomic_load(&faults.allocate.hits) == 0)
        usleep(1000);
    store_task_free(t);
    ran_close(&r);
    cr_assert_eq(flock(other, LOCK_EX | LOCK_NB), -1);
    atomic_store(&faults.allocate.released, true);
    while (store_threads() > 0)
        usleep(1000);
    cr_assert_eq(flock(other, LOCK_EX | LOCK_NB), 0);
    close(other);
}
