/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "segment_world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <hugetlbfs.h>

/* ---- the ladder */

TestSuite(ladder, .init = world_setup);

Test(ladder, hugetlbfs)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;
    size_t page;

    need_hugepages();
    spec = pool_spec(3 * hp - 5);
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(why.n, 0);
    cr_assert_eq(s.rung, SEGMENT_HUGETLBFS);
    cr_assert_str_eq(segment_rung_name(s.rung), "hugetlbfs");
    cr_assert_eq(s.bytes, 3 * hp);
    cr_assert_eq(s.page_size, hp);
    cr_assert_eq(bytes_present(s.fd), 3 * hp);
    cr_assert_eq(segment_page_size(s.reader_fd, &page), 0);
    cr_assert_eq(page, hp);
    cr_assert_eq(mode_of(s.fd), 0600);
    cr_assert_eq(access(s.path, F_OK), 0);
    cr_assert_eq(fcntl(s.fd, F_GETFL) & O_ACCMODE, O_RDWR);
    cr_assert_eq(fcntl(s.reader_fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    cr_assert(fcntl(s.fd, F_GETFD) & FD_CLOEXEC);
    cr_assert(fcntl(s.reader_fd, F_GETFD) & FD_CLOEXEC);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, libhugetlbfs_finds_the_mount)
{
    struct segment_spec spec;
    struct segment s;

    need_hugepages();
    spec = pool_spec(hp);
    spec.hugetlbfs_dir = NULL;
    spec.page_size = hp;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_HUGETLBFS);
    cr_assert_eq(strncmp(s.path, huge_dir, strlen(huge_dir)), 0, "%s", s.path);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, no_mount_is_said_with_its_cure)
{
    char out[2048];
    size_t n;
    FILE *f;

    need_hugepages();
    f = popen("env -i HUGETLB_PATH=/nowhere /proc/$PPID/exe --ladder 2>&1", "re");
    n = fread(out, 1, sizeof(out) - 1, f);
    out[n] = '\0';
    cr_assert_eq(pclose(f), 0);
    assert_says(out, "hugetlbfs: no mount for");
    assert_says(out, "fix: mkdir -p /dev/hugepages && mount -t hugetlbfs");
    assert_says(out, "\nmemfd-hugetlb\n");
    world_assert_nothing_left();
}

Test(ladder, memfd_hugetlb)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages();
    spec = pool_spec(2 * hp);
    spec.hugetlbfs_dir = run_dir; /* no hugetlbfs there */
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_MEMFD_HUGETLB);
    cr_assert_eq(why.n, 1);
    cr_assert_eq(why.list[0].rung, SEGMENT_HUGETLBFS);
    cr_assert_eq(why.list[0].error, -ENOENT);
    assert_says(why.list[0].text, "is not on a hugetlbfs mount");
    cr_assert_null(s.path);
    cr_assert_eq(s.page_size, hp);
    cr_assert_eq(bytes_present(s.fd), 2 * hp);
    cr_assert_eq(mode_of(s.fd), 0600);
    cr_assert_eq(segment_check_sealed(NULL, s.reader_fd), 0);
    cr_assert_eq(fcntl(s.fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE, 0);
    cr_assert_eq(ftruncate(s.fd, 0), -1);
    cr_assert_eq(errno, EPERM);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, off_means_small_pages)
{
    struct segment_spec spec = pool_spec(3 * sp - 1);
    struct segment_reasons why;
    struct segment s;

    spec.hugepages = SEGMENT_HUGEPAGES_OFF;
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    cr_assert_eq(why.n, 0);
    cr_assert_eq(s.bytes, 3 * sp);
    cr_assert_eq(s.page_size, sp);
    cr_assert_eq(bytes_present(s.fd), 3 * sp);
    cr_assert_eq(mode_of(s.fd), 0600);
    cr_assert_eq(access(s.path, F_OK), 0);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, small_segments_are_small_even_if_hugepages_are_required)
{
    struct segment_spec spec = small_spec(10);
    struct segment s;

    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, memfd_where_the_runtime_directory_is_no_tmpfs)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_reasons why;
    struct segment s;

    spec.runtime_dir = "/proc";
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_MEMFD);
    cr_assert_eq(why.n, 1);
    cr_assert_str_eq(why.list[0].text, "tmpfs: /proc is not on a tmpfs");
    cr_assert_null(s.path);
    cr_assert_eq(mode_of(s.fd), 0600);
    cr_assert_eq(segment_check_sealed(NULL, s.reader_fd), 0);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, a_full_tmpfs_is_passed_over)
{
    struct statfs fs;
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages(); /* and so the mount is there */
    cr_assert_eq(statfs(full_dir, &fs), 0);
    spec = small_spec((size_t)fs.f_blocks * (size_t)fs.f_bsize + sp);
    spec.runtime_dir = full_dir;
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_MEMFD);
    cr_assert_eq(why.list[0].error, -ENOMEM);
    assert_says(why.list[0].text, "fix: enlarge that tmpfs");
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* Should the check below be missing, it is this test that fails, not the machine. */
static int refusing_fallocate(int fd, int mode, off_t offset, off_t len)
{
    (void)fd, (void)mode, (void)offset, (void)len;
    errno = EIO;
    return -1;
}

Test(ladder, more_than_there_is_of_anything)
{
    struct segment_sys sys = segment_sys_real;
    struct segment_spec spec = pool_spec(hp + ((size_t)1 << 50));
    struct segment_reasons why;
    struct segment s;

    sys.fallocate = refusing_fallocate;
    spec.sys = &sys;
    cr_assert_eq(segment_make(&spec, &why, &s), -ENOMEM);
    cr_assert_eq(why.n, SEGMENT_RUNGS);
    assert_says(why.list[3].text, "MiB of memory available");
    world_assert_nothing_left();
}

Test(ladder, too_few_hugepages)
{
    char wanted[128];
    size_t idle, need;
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages();
    idle = world_hugepages("free_hugepages") - world_hugepages("resv_hugepages");
    need = idle + 3;
    spec = pool_spec(need * hp);
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    cr_assert_eq(why.n, 2);
    snprintf(wanted, sizeof(wanted), "only %zu of %zu hugepages free", idle, need);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(why.list[i].error, -ENOMEM);
        assert_says(why.list[i].text, wanted);
    }
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* The cure is tried as it is printed. */
Test(ladder, require_fails_and_its_cure_works)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s = {.fd = -7};
    uint64_t total = world_read(world_nr_hugepages);
    const char *cure;

    need_hugepages();
    spec = pool_spec((world_hugepages("free_hugepages") + 3) * hp);
    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    cr_assert_eq(segment_make(&spec, &why, &s), -ENOMEM);
    cr_assert_eq(s.fd, -7);
    cr_assert_eq(why.n, 2);
    cr_assert_eq(why.list[1].rung, SEGMENT_MEMFD_HUGETLB);
    cure = strstr(why.list[1].text, "fix: sysctl vm.nr_hugepages=");
    cr_assert(cure, "%s", why.list[1].text);
    world_assert_nothing_left();

    world_write(world_nr_hugepages, strtoull(strchr(cure, '=') + 1, NULL, 10));
    if (segment_make(&spec, &why, &s) == 0)
        segment_destroy(&s);
    else
        s.fd = -7;
    world_write(world_nr_hugepages, total);
    cr_assert_neq(s.fd, -7, "%s", why.list[0].text);
    cr_assert_eq(world_read(world_nr_hugepages), total);
    world_assert_nothing_left();
}

Test(ladder, require_names_the_sizes_there_are)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;
    char kb[32];

    need_hugepages();
    spec = pool_spec(hp);
    spec.page_size = 2 * sp;
    spec.hugetlbfs_dir = NULL;
    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    cr_assert_eq(segment_make(&spec, &why, &s), -ENOENT);
    snprintf(kb, sizeof(kb), " %zu kB", hp / 1024);
    assert_says(why.list[0].text, kb);
    world_assert_nothing_left();
}

Test(ladder, wrong_mount_for_the_page_size)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;
    long sizes[16];
    int n = gethugepagesizes(sizes, 16);

    need_hugepages();
    if (n < 2)
        cr_skip_test("only one size of hugepages");
    spec = pool_spec(hp);
    spec.page_size = (uint64_t)sizes[1]; /* [0] is the default, what is mounted */
    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    cr_assert_lt(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(why.list[0].error, -EINVAL);
    assert_says(why.list[0].text, "has pages of");
    world_assert_nothing_left();
}

/* fallocate() gets WORLD_TIGHT_PAGES and then fails: they are given back, and the ladder goes on.
 */
Test(ladder, short_of_pages_half_way)
{
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;
    struct statfs before, after;
    char wanted[64];

    need_hugepages();
    spec = pool_spec(2 * WORLD_TIGHT_PAGES * hp);
    spec.hugetlbfs_dir = tight_dir;
    cr_assert_eq(statfs(tight_dir, &before), 0);
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert_eq(s.rung, SEGMENT_MEMFD_HUGETLB);
    snprintf(wanted, sizeof(wanted), "only %d of %d hugepages allowed", WORLD_TIGHT_PAGES,
             2 * WORLD_TIGHT_PAGES);
    assert_says(why.list[0].text, wanted);
    cr_assert_eq(statfs(tight_dir, &after), 0);
    cr_assert_eq(before.f_bfree, after.f_bfree);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* Between counting and allocating, somebody else takes all hugepages but two. */
static int stealing_fallocate(int fd, int mode, off_t offset, off_t len)
{
    world_steal(2);
    return fallocate(fd, mode, offset, len);
}

Test(ladder, pages_stolen_meanwhile)
{
    struct segment_sys sys = segment_sys_real;
    struct segment_spec spec;
    struct segment_reasons why;
    struct segment s;

    need_hugepages();
    sys.fallocate = stealing_fallocate;
    spec = pool_spec(8 * hp);
    spec.sys = &sys;
    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    cr_assert_eq(segment_make(&spec, &why, &s), -ENOMEM);
    assert_says(why.list[0].text, "only 2 of 8 hugepages left");
    assert_says(why.list[1].text, "only 2 of 8 hugepages free");
    world_unsteal();
    world_assert_nothing_left();
}

/* Whoever opened the file while it grew does not hold its pages after the rung has failed. */
static int witness = -1;

static int witnessed_fallocate(int fd, int mode, off_t offset, off_t len)
{
    char path[64];

    if (fallocate(fd, mode, offset, len) < 0)
        return -1;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    witness = open(path, O_RDONLY | O_CLOEXEC);
    errno = EIO;
    return -1;
}

Test(ladder, pages_go_back_at_once)
{
    struct segment_sys sys = segment_sys_real;
    struct segment_spec spec = pool_spec(4 * sp);
    struct segment_reasons why;
    struct segment s;

    sys.fallocate = witnessed_fallocate;
    spec.sys = &sys;
    spec.hugepages = SEGMENT_HUGEPAGES_OFF;
    cr_assert_eq(segment_make(&spec, &why, &s), -EIO);
    cr_assert_geq(witness, 0);
    cr_assert_eq(bytes_present(witness), 0);
}

Test(ladder, an_existing_file_is_never_passed_over)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_reasons why;
    struct segment first = segment_must(&spec), second;

    cr_assert_eq(segment_make(&spec, &why, &second), -EEXIST);
    cr_assert_eq(why.n, 1);
    assert_says(why.list[0].text, first.path);
    cr_assert_eq(access(first.path, F_OK), 0);
    spec.replace = true;
    second = segment_must(&spec);
    cr_assert_eq(second.rung, SEGMENT_TMPFS);
    segment_close(&first);
    segment_destroy(&second);
    world_assert_nothing_left();
}

/* A stale pool on the rung that is not taken this time would hold its hugepages for ever. */
Test(ladder, replace_cleans_both_places)
{
    struct segment_spec spec;
    struct segment s;

    need_hugepages();
    spec = pool_spec(hp);
    s = segment_must(&spec);
    segment_close(&s);
    cr_assert_eq(world_files(huge_dir), 1);
    spec.hugepages = SEGMENT_HUGEPAGES_OFF;
    spec.replace = true;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    cr_assert_eq(world_files(huge_dir), 0);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, a_symbolic_link_is_not_followed)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_reasons why;
    struct segment s;
    char link[160], target[160];

    snprintf(link, sizeof(link), "%s/%s", run_dir, spec.name);
    snprintf(target, sizeof(target), "%s/elsewhere", run_dir);
    cr_assert_eq(symlink(target, link), 0);
    cr_assert_eq(segment_make(&spec, &why, &s), -EEXIST);
    spec.replace = true;
    s = segment_must(&spec);
    cr_assert_eq(access(target, F_OK), -1);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(ladder, nonsense_is_refused)
{
    const char *names[] = {NULL, "", ".", "..", ".hidden", "a/b", "../x"};
    struct segment_spec good = small_spec(sp), spec;
    struct segment_reasons why;
    struct segment s;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        spec = good;
        spec.name = names[i];
        cr_assert_eq(segment_make(&spec, &why, &s), -EINVAL, "%s", names[i]);
        cr_assert_eq(why.n, 0);
    }
    spec = good;
    spec.bytes = 0;
    cr_assert_eq(segment_make(&spec, NULL, &s), -EINVAL);
    spec.bytes = UINT64_MAX;
    cr_assert_eq(segment_make(&spec, NULL, &s), -EINVAL);
    spec = good;
    spec.mode = 0666;
    cr_assert_eq(segment_make(&spec, NULL, &s), -EINVAL);
    spec = good;
    spec.page_size = 3 * sp;
    cr_assert_eq(segment_make(&spec, NULL, &s), -EINVAL);
    world_assert_nothing_left();
}

Test(ladder, a_group_may_read)
{
    struct segment_spec spec = small_spec(sp);
    struct stat st;
    struct segment s;

    spec.mode = 0640;
    spec.gid = geteuid() == 0 ? WORLD_NOBODY : getegid();
    s = segment_must(&spec);
    cr_assert_eq(mode_of(s.fd), 0640);
    cr_assert_eq(fstat(s.fd, &st), 0);
    cr_assert_eq(st.st_gid, spec.gid);
    segment_destroy(&s);
    world_assert_nothing_left();
}

static int make_in_foreign_dir(void *arg)
{
    struct segment_spec *spec = arg;
    struct segment_reasons why;
    struct segment s;

    if (setgroups(0, NULL) || setgid(WORLD_NOBODY) || setuid(WORLD_NOBODY))
        return 10;
    if (segment_make(spec, &why, &s) < 0)
        return 11;
    if (why.n != 1 || !strstr(why.list[0].text, "fix: install -d -m 0700 -o 65534"))
        return 12;
    return s.rung == SEGMENT_MEMFD ? 0 : 13;
}

Test(ladder, a_directory_that_is_not_ours)
{
    struct segment_spec spec = small_spec(sp);

    need_hugepages(); /* root, that is */
    cr_assert_eq(chmod(getenv("SEGMENT_TEST_BASE"), 0755), 0);
    cr_assert_eq(chmod(run_dir, 0755), 0);
    cr_assert_eq(run_child(make_in_foreign_dir, &spec), 0);
    world_assert_nothing_left();
}

Test(ladder, destructors_take_null)
{
    struct segment_mapping m = {0};
    struct segment_reservation r = {0};

    segment_close(NULL);
    segment_unmap(NULL);
    segment_unmap(&m);
    segment_unreserve(NULL);
    segment_unreserve(&r);
}

/* ---- every system call fails in turn */

static const struct populate_options two_threads = {.threads = 2, .slice = 1};

static void fail_each_call(struct segment_spec spec)
{
    struct segment_reasons why;
    struct segment s;
    int fired = 0;

    spec.sys = &faulty_sys;
    for (int call = 0; call < CALLS; call++) {
        for (int nth = 0;; nth++) {
            int r;

            fault_set((enum call)call, nth, EIO);
            r = segment_make(&spec, &why, &s);
            if (r == 0)
                segment_destroy(&s);
            else
                cr_assert_eq(why.list[why.n - 1].error, r);
            /* Undoing a failed rung may meet a failure too: then the reason is the first one. */
            if (r < 0 || why.n > 0)
                cr_assert_gt(strlen(why.list[0].text), 0);
            world_assert_nothing_left();
            if (!fault_fired())
                break;
            fired++;
        }
    }
    cr_assert_gt(fired, 3, "the faults did not reach the code");
}

Test(faults, hugetlbfs, .init = world_setup)
{
    need_hugepages();
    fail_each_call(pool_spec(2 * hp));
}

Test(faults, hugetlbfs_required_in_parallel, .init = world_setup)
{
    struct segment_spec spec;

    need_hugepages();
    spec = pool_spec(2 * hp);
    spec.hugepages = SEGMENT_HUGEPAGES_REQUIRE;
    spec.populate = &two_threads;
    fail_each_call(spec);
}

Test(faults, half_way, .init = world_setup)
{
    struct segment_spec spec;

    need_hugepages();
    spec = pool_spec(2 * WORLD_TIGHT_PAGES * hp);
    spec.hugetlbfs_dir = tight_dir;
    fail_each_call(spec);
    spec.populate = &two_threads;
    fail_each_call(spec);
}

Test(faults, memfd_hugetlb, .init = world_setup)
{
    struct segment_spec spec;

    need_hugepages();
    spec = pool_spec(2 * hp);
    spec.hugetlbfs_dir = run_dir;
    fail_each_call(spec);
}

Test(faults, small, .init = world_setup)
{
    struct segment_spec spec = small_spec(2 * sp);

    spec.mode = 0640;
    spec.gid = getegid();
    fail_each_call(spec);
    spec.populate = &two_threads;
    fail_each_call(spec);
    spec.runtime_dir = "/proc";
    fail_each_call(spec);
}

/* An old kernel knows no MFD_NOEXEC_SEAL. */
static int old_memfd_create(const char *name, unsigned flags)
{
    if (flags & 0x0008U) {
        errno = EINVAL;
        return -1;
    }
    return memfd_create(name, flags);
}

Test(faults, old_kernel, .init = world_setup)
{
    struct segment_sys sys = segment_sys_real;
    struct segment_spec spec = small_spec(sp);
    struct segment s;

    sys.memfd_create = old_memfd_create;
    spec.sys = &sys;
    spec.runtime_dir = NULL;
    s = segment_must(&spec);
    cr_assert_eq(s.rung, SEGMENT_MEMFD);
    cr_assert_eq(segment_check_sealed(NULL, s.fd), 0);
    segment_destroy(&s);
    world_assert_nothing_left();
}

static int interrupted_fallocate(int fd, int mode, off_t offset, off_t len)
{
    if (fault_hits(CALL_FALLOCATE))
        return -1;
    return fallocate(fd, mode, offset, len);
}

Test(faults, interrupted, .init = world_setup)
{
    struct segment_sys sys = segment_sys_real;
    struct segment_spec spec = small_spec(sp);
    struct segment_reasons why;
    struct segment s;

    sys.fallocate = interrupted_fallocate;
    spec.sys = &sys;
    fault_set(CALL_FALLOCATE, 0, EINTR);
    cr_assert_eq(segment_make(&spec, &why, &s), 0);
    cr_assert(fault_fired());
    cr_assert_eq(s.rung, SEGMENT_TMPFS);
    cr_assert_eq(why.n, 0);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* ---- mapping */

TestSuite(map, .init = world_setup);

Test(map, two_views_of_one_segment)
{
    struct segment_spec spec = small_spec(2 * sp);
    struct segment_mapping rd, wr;
    struct segment s = segment_must(&spec);

    cr_assert_eq(segment_map(NULL, s.fd, s.bytes, SEGMENT_WRITE, 0, &wr), 0);
    cr_assert_eq(segment_map(NULL, s.reader_fd, s.bytes, SEGMENT_READ, SEGMENT_DONTFORK, &rd), 0);
    cr_assert_eq(rd.bytes, s.bytes);
    segment_destroy(&s); /* mappings live on */
    memset(wr.addr, 0x5a, wr.bytes);
    cr_assert_eq(memcmp(rd.addr, wr.addr, rd.bytes), 0);
    segment_unmap(&rd);
    segment_unmap(&wr);
    cr_assert_null(rd.addr);
    world_assert_nothing_left();
}

Test(map, refusals)
{
    struct segment_spec spec = small_spec(2 * sp);
    struct segment_mapping m = {.bytes = 1};
    struct segment s = segment_must(&spec);
    int exe = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    size_t page = 1;

    cr_assert_eq(segment_map(NULL, s.fd, 0, SEGMENT_READ, 0, &m), -EINVAL);
    cr_assert_eq(segment_map(NULL, s.fd, sp + 1, SEGMENT_READ, 0, &m), -EINVAL);
    cr_assert_eq(segment_map(NULL, s.fd, UINT64_MAX - sp + 1, SEGMENT_READ, 0, &m), -EINVAL);
    cr_assert_eq(segment_map(NULL, s.fd, 3 * sp, SEGMENT_READ, 0, &m), -ENODATA);
    cr_assert_eq(segment_map(NULL, s.reader_fd, sp, SEGMENT_WRITE, 0, &m), -EACCES);
    cr_assert_eq(segment_map(NULL, s.fd, sp, SEGMENT_READ, SEGMENT_SEALED, &m), -EPERM);
    cr_assert_eq(segment_map(NULL, exe, sp, SEGMENT_READ, 0, &m), -EINVAL);
    cr_assert_eq(segment_map(NULL, -1, sp, SEGMENT_READ, 0, &m), -EBADF);
    cr_assert_eq(segment_page_size(exe, &page), -EINVAL);
    cr_assert(m.bytes == 1 && page == 1, "touched on failure");
    cr_assert_eq(ftruncate(s.fd, (off_t)sp), 0);
    cr_assert_eq(segment_map(NULL, s.reader_fd, 2 * sp, SEGMENT_READ, 0, &m), -ENODATA);
    close(exe);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(map, hugepages_in_part_are_refused)
{
    struct segment_spec spec;
    struct segment_mapping m;
    struct segment s;

    need_hugepages();
    spec = pool_spec(2 * hp);
    s = segment_must(&spec);
    cr_assert_eq(segment_map(NULL, s.fd, hp + sp, SEGMENT_READ, 0, &m), -EINVAL);
    cr_assert_eq(segment_map(NULL, s.fd, 3 * hp, SEGMENT_READ, 0, &m), -ENODATA);
    cr_assert_eq(segment_map(NULL, s.fd, hp, SEGMENT_READ, 0, &m), 0);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(map, a_sealed_memfd_passes)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_mapping m;
    struct segment s;

    spec.runtime_dir = NULL;
    s = segment_must(&spec);
    cr_assert_eq(segment_map(NULL, s.reader_fd, sp, SEGMENT_READ, SEGMENT_SEALED, &m), 0);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

static bool has_flag(const void *addr, const char *flag)
{
    char line[512], start[32];
    bool here = false, found = false;
    FILE *f = fopen("/proc/self/smaps", "re");

    snprintf(start, sizeof(start), "%lx-", (unsigned long)addr);
    while (!found && fgets(line, sizeof(line), f)) {
        if (strncmp(line, start, strlen(start)) == 0)
            here = true;
        else if (here && strncmp(line, "VmFlags:", 8) == 0)
            break;
    }
    fclose(f);
    return here && strstr(line, flag);
}

Test(map, flags_do_what_they_say)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_mapping kept, gone;
    struct segment s = segment_must(&spec);

    cr_assert_eq(segment_map(NULL, s.fd, sp, SEGMENT_WRITE, 0, &kept), 0);
    cr_assert_eq(
        segment_map(NULL, s.fd, sp, SEGMENT_READ, SEGMENT_DONTFORK | SEGMENT_DONTDUMP, &gone), 0);
    *(unsigned char *)kept.addr = 42;
    cr_assert_eq(run_child(read_byte, kept.addr), 42);
    cr_assert_eq(run_child(read_byte, gone.addr), -SIGSEGV);
    cr_assert_eq(run_child(write_byte, kept.addr), 0);
    cr_assert(has_flag(gone.addr, " dd"));
    cr_assert(has_flag(gone.addr, " dc"));
    cr_assert_not(has_flag(kept.addr, " dd"));
    segment_unmap(&kept);
    cr_assert_eq(segment_map(NULL, s.reader_fd, sp, SEGMENT_READ, 0, &kept), 0);
    cr_assert_eq(run_child(write_byte, kept.addr), -SIGSEGV);
    segment_unmap(&kept);
    segment_unmap(&gone);
    segment_destroy(&s);
    world_assert_nothing_left();
}

static int mappings_of(const char *path)
{
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "re");

    while (fgets(line, sizeof(line), f))
        n += strstr(line, path) != NULL;
    fclose(f);
    return n;
}

Test(map, failures_leave_no_mapping)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_mapping m = {0};
    struct segment s = segment_must(&spec);
    const unsigned flags = SEGMENT_DONTFORK | SEGMENT_DONTDUMP;
    const enum call calls[] = {CALL_MMAP, CALL_MADVISE};

    for (int i = 0; i < 2; i++) {
        for (int nth = 0;; nth++) {
            fault_set(calls[i], nth, ENOMEM);
            if (segment_map(&faulty_sys, s.fd, sp, SEGMENT_READ, flags, &m) == 0)
                break;
            cr_assert(fault_fired());
            cr_assert_null(m.addr);
            cr_assert_eq(mappings_of(s.path), 0);
        }
        cr_assert_not(fault_fired());
        cr_assert_eq(mappings_of(s.path), 1);
        segment_unmap(&m);
    }
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(map, a_pool_grows_by_chunks)
{
    struct segment_spec spec;
    struct segment_reservation rd, wr;
    struct segment a, b;
    void *ra, *rb, *wa, *wb;

    need_hugepages();
    spec = pool_spec(2 * hp);
    a = segment_must(&spec);
    spec.name = "grown";
    spec.hugepages = SEGMENT_HUGEPAGES_OFF; /* a later chunk may have to take another rung */
    spec.bytes = hp;
    b = segment_must(&spec);
    cr_assert_eq(segment_reserve(NULL, 3 * hp, hp, &rd), 0);
    cr_assert_eq(segment_reserve(NULL, 3 * hp, hp, &wr), 0);
    cr_assert_eq((uintptr_t)rd.base % hp, 0);
    cr_assert_eq(segment_append(NULL, &rd, a.reader_fd, a.bytes, SEGMENT_READ, 0, &ra), 0);
    cr_assert_eq(segment_append(NULL, &rd, b.reader_fd, b.bytes, SEGMENT_READ, 0, &rb), 0);
    cr_assert_eq(segment_append(NULL, &wr, a.fd, a.bytes, SEGMENT_WRITE, 0, &wa), 0);
    cr_assert_eq(segment_append(NULL, &wr, b.fd, b.bytes, SEGMENT_WRITE, 0, &wb), 0);
    cr_assert_eq(ra, rd.base);
    cr_assert_eq(rb, rd.base + 2 * hp);
    for (size_t i = 0; i < 3 * hp; i += sp)
        wr.base[i] = (unsigned char)(i / sp * 7 + 1);
    cr_assert_eq(memcmp(rd.base, wr.base, 3 * hp), 0);
    cr_assert_eq(segment_append(NULL, &rd, b.reader_fd, sp, SEGMENT_READ, 0, &rb), -ENOSPC);
    segment_unreserve(&rd);
    segment_unreserve(&wr);
    cr_assert_null(rd.base);
    segment_destroy(&a);
    segment_destroy(&b);
    world_assert_nothing_left();
}

Test(map, append_refuses)
{
    struct segment_spec spec;
    struct segment_reservation r;
    struct segment a, b;
    void *p = NULL;

    need_hugepages();
    cr_assert_eq(segment_reserve(NULL, sp, 3 * sp, &r), -EINVAL);
    cr_assert_eq(segment_reserve(NULL, sp, 2 * sp, &r), -EINVAL);
    cr_assert_eq(segment_reserve(NULL, 0, sp, &r), -EINVAL);
    cr_assert_eq(segment_reserve(NULL, 4 * hp, hp, &r), 0);
    spec = pool_spec(hp);
    a = segment_must(&spec);
    spec = small_spec(sp);
    b = segment_must(&spec);
    cr_assert_eq(segment_append(NULL, &r, b.reader_fd, sp, SEGMENT_WRITE, 0, &p), -EACCES);
    cr_assert_eq(segment_append(NULL, &r, b.reader_fd, 2 * sp, SEGMENT_READ, 0, &p), -ENODATA);
    cr_assert_eq(segment_append(NULL, &r, b.reader_fd, sp, SEGMENT_READ, SEGMENT_SEALED, &p),
                 -EPERM);
    cr_assert_eq(r.used, 0);
    cr_assert_eq(r.bytes, 4 * hp);
    cr_assert_null(p);
    cr_assert_eq(segment_append(NULL, &r, b.reader_fd, sp, SEGMENT_READ, 0, &p), 0);
    cr_assert_eq(segment_append(NULL, &r, a.reader_fd, hp, SEGMENT_READ, 0, &p), -EINVAL);
    cr_assert_eq(r.used, sp);
    cr_assert_eq(r.bytes, 4 * hp);
    cr_assert_eq(read_byte(r.base), 0);
    segment_unreserve(&r);
    segment_destroy(&a);
    segment_destroy(&b);
    world_assert_nothing_left();
}

/* As much address space as was asked for stays reserved, wherever the kernel had room for more. */
static unsigned char *hint, *granted;

static void *hinted_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
    (void)addr;
    granted = mmap(hint, len, prot, flags, fd, offset);
    return granted;
}

static bool is_mapped(void *addr)
{
    unsigned char v;

    return mincore(addr, sp, &v) == 0 || errno != ENOMEM;
}

Test(map, a_reservation_is_aligned_and_trimmed)
{
    const size_t align = 16 * sp;
    struct segment_sys sys = segment_sys_real;
    struct segment_reservation r;
    unsigned char *room = mmap(NULL, 8 * align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    cr_assert_neq(room, MAP_FAILED);
    munmap(room, 8 * align);
    sys.mmap = hinted_mmap;
    room += (align - (uintptr_t)room % align) % align;
    for (size_t shift = 0; shift < align; shift += 5 * sp) {
        hint = room + align + shift;
        cr_assert_eq(segment_reserve(&sys, 2 * align, align, &r), 0);
        cr_assert_eq(granted, hint, "the kernel did not take the hint");
        cr_assert_eq((uintptr_t)r.base % align, 0);
        cr_assert_not(is_mapped(r.base - sp));
        cr_assert(is_mapped(r.base));
        cr_assert(is_mapped(r.base + 2 * align - sp));
        cr_assert_not(is_mapped(r.base + 2 * align));
        segment_unreserve(&r);
        cr_assert_not(is_mapped(hint + align));
    }
}

/* As some kernels do: mmap(MAP_FIXED) fails and has unmapped what was there. */
static void *tearing_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
    if (!fault_hits(CALL_MMAP))
        return mmap(addr, len, prot, flags, fd, offset);
    munmap(addr, len);
    errno = ENOMEM;
    return MAP_FAILED;
}

Test(map, a_hole_in_the_reservation_is_taken_back)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_sys sys = segment_sys_real;
    struct segment_reservation r;
    struct segment s = segment_must(&spec);
    void *p;

    sys.mmap = tearing_mmap;
    cr_assert_eq(segment_reserve(NULL, 4 * sp, sp, &r), 0);
    cr_assert_eq(segment_append(NULL, &r, s.fd, sp, SEGMENT_READ, 0, &p), 0);
    fault_set(CALL_MMAP, 0, ENOMEM);
    cr_assert_eq(segment_append(&sys, &r, s.fd, sp, SEGMENT_READ, 0, &p), -ENOMEM);
    cr_assert_eq(r.used, sp);
    cr_assert_eq(r.bytes, 4 * sp);
    cr_assert(is_mapped(r.base + sp));
    cr_assert_eq(segment_append(NULL, &r, s.fd, sp, SEGMENT_WRITE, 0, &p), 0);
    cr_assert_eq(p, r.base + sp);
    segment_unreserve(&r);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* Whether that range still is the reservation cannot be known: it must never be unmapped by us. */
Test(map, a_range_of_unknown_owner_is_left_alone)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_reservation r;
    struct segment s = segment_must(&spec);
    unsigned char *base;
    void *p;

    cr_assert_eq(segment_reserve(NULL, 4 * sp, sp, &r), 0);
    base = r.base;
    cr_assert_eq(segment_append(NULL, &r, s.fd, sp, SEGMENT_READ, 0, &p), 0);
    fault_set(CALL_MMAP, 0, ENOMEM);
    cr_assert_eq(segment_append(&faulty_sys, &r, s.fd, sp, SEGMENT_READ, 0, &p), -ENOMEM);
    cr_assert_eq(r.bytes, sp);
    cr_assert_eq(segment_append(NULL, &r, s.fd, sp, SEGMENT_READ, 0, &p), -ENOSPC);
    cr_assert_eq(read_byte(r.base), 0);
    cr_assert_not(is_mapped(base + 2 * sp));
    segment_unreserve(&r);
    cr_assert_not(is_mapped(base));
    cr_assert(is_mapped(base + sp));
    munmap(base + sp, sp);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(map, a_failed_chunk_is_not_accessible)
{
    struct segment_spec spec = small_spec(sp);
    struct segment_reservation r;
    struct segment s = segment_must(&spec);
    void *p;

    cr_assert_eq(segment_reserve(NULL, 2 * sp, sp, &r), 0);
    fault_set(CALL_MADVISE, 0, ENOMEM);
    cr_assert_eq(segment_append(&faulty_sys, &r, s.fd, sp, SEGMENT_READ, SEGMENT_DONTFORK, &p),
                 -ENOMEM);
    cr_assert_eq(run_child(read_byte, r.base), -SIGSEGV);
    cr_assert_eq(segment_append(&faulty_sys, &r, s.fd, sp, SEGMENT_READ, SEGMENT_DONTFORK, &p), 0);
    segment_unreserve(&r);
    segment_destroy(&s);
    world_assert_nothing_left();
}

/* ---- what a reader cannot do */

#define expect(status, condition)                                                                  \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return status;                                                                         \
    } while (0)

/* As another uid, holding nothing but the read-only fd. 0, or the number of what went wrong. */
static int attack(void *arg)
{
    const struct segment *s = arg;
    char path[64];
    void *p;

    close(s->fd);
    expect(1, setgroups(0, NULL) == 0 && setgid(WORLD_NOBODY) == 0 && setuid(WORLD_NOBODY) == 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", s->reader_fd);
    expect(2, open(path, O_RDWR) < 0 && errno == EACCES);
    expect(3, open(path, O_WRONLY) < 0 && errno == EACCES);
    expect(4, truncate(path, 0) < 0 && errno == EACCES);
    expect(5, fchmod(s->reader_fd, 0666) < 0 && errno == EPERM);
    expect(6, ftruncate(s->reader_fd, 0) < 0);
    expect(7, fallocate(s->reader_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1) < 0);
    expect(8, write(s->reader_fd, "x", 1) < 0 && errno == EBADF);
    p = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->reader_fd, 0);
    expect(9, p == MAP_FAILED && errno == EACCES);
    p = mmap(NULL, s->bytes, PROT_READ, MAP_SHARED, s->reader_fd, 0);
    expect(10, p != MAP_FAILED && *(volatile unsigned char *)p == 77);
    expect(11, mprotect(p, s->bytes, PROT_READ | PROT_WRITE) < 0 && errno == EACCES);
    return 0;
}

static void attack_segment(struct segment_spec spec, enum segment_rung rung)
{
    struct segment_mapping m;
    struct segment s = segment_must(&spec);

    cr_assert_eq(s.rung, rung);
    cr_assert_eq(segment_map(NULL, s.fd, s.bytes, SEGMENT_WRITE, SEGMENT_DONTFORK, &m), 0);
    *(unsigned char *)m.addr = 77;
    cr_assert_eq(run_child(attack, &s), 0);
    /* The same attack does get through where the mode is what a memfd is born with. */
    cr_assert_eq(fchmod(s.fd, 0666), 0);
    cr_assert_eq(run_child(attack, &s), 2);
    segment_unmap(&m);
    segment_destroy(&s);
    world_assert_nothing_left();
}

Test(reader, cannot_write, .init = world_setup)
{
    struct segment_spec spec;

    need_hugepages();
    attack_segment(pool_spec(hp), SEGMENT_HUGETLBFS);
    spec = pool_spec(hp);
    spec.hugetlbfs_dir = run_dir;
    attack_segment(spec, SEGMENT_MEMFD_HUGETLB);
    attack_segment(small_spec(sp), SEGMENT_TMPFS);
    spec = small_spec(sp);
    spec.runtime_dir = NULL;
    attack_segment(spec, SEGMENT_MEMFD);
}
