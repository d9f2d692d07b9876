/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "segment_world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hugetlbfs.h>

/* ---- the outer process */

uint64_t world_read(const char *path)
{
    unsigned long long v = 0;
    FILE *f = fopen(path, "re");

    if (!f || fscanf(f, "%llu", &v) != 1)
        v = 0;
    if (f)
        fclose(f);
    return v;
}

void world_write(const char *path, uint64_t v)
{
    FILE *f = fopen(path, "we");

    if (f) {
        fprintf(f, "%llu\n", (unsigned long long)v);
        fclose(f);
    }
}

const char world_nr_hugepages[] = "/proc/sys/vm/nr_hugepages";

struct world {
    char base[64];
    uint64_t added; /* hugepages */
    const char *lack;
};

static const char *const world_dirs[] = {"run", "full", "huge", "tight"};

static void world_path(const struct world *w, const char *dir, char *buf, size_t size)
{
    snprintf(buf, size, "%s/%s", w->base, dir);
}

static const char *world_mount(const struct world *w)
{
    char path[128], options[64];
    long size = gethugepagesize();

    world_path(w, "full", path, sizeof(path));
    if (mount("none", path, "tmpfs", 0, "size=1M,mode=0700") < 0)
        return "cannot mount a tmpfs";
    snprintf(options, sizeof(options), "pagesize=%ldK", size / 1024);
    world_path(w, "huge", path, sizeof(path));
    if (mount("none", path, "hugetlbfs", 0, options) < 0)
        return "cannot mount a hugetlbfs";
    snprintf(options, sizeof(options), "pagesize=%ldK,size=%ld", size / 1024,
             WORLD_TIGHT_PAGES * size);
    world_path(w, "tight", path, sizeof(path));
    if (mount("none", path, "hugetlbfs", 0, options) < 0)
        return "cannot mount a hugetlbfs with a limit";
    return NULL;
}

static const char *world_reserve(struct world *w)
{
    uint64_t before = world_read(world_nr_hugepages), after;

    world_write(world_nr_hugepages, before + WORLD_PAGES);
    after = world_read(world_nr_hugepages);
    w->added = after > before ? after - before : 0;
    return w->added == WORLD_PAGES ? NULL
                                   : "cannot get the hugepages: memory is short or fragmented";
}

static void world_make(struct world *w)
{
    char path[128];

    snprintf(w->base, sizeof(w->base), "/dev/shm/kvd-segment-XXXXXX");
    if (!mkdtemp(w->base)) {
        perror(w->base);
        exit(2);
    }
    for (size_t i = 0; i < sizeof(world_dirs) / sizeof(world_dirs[0]); i++) {
        world_path(w, world_dirs[i], path, sizeof(path));
        mkdir(path, 0700);
    }
    if (geteuid() != 0)
        w->lack = "not root: cannot reserve hugepages";
    else if (gethugepagesize() <= 0 || gethugepagesize() > 2 << 20)
        w->lack = "no hugepages of at most 2 MiB";
    else if (!(w->lack = world_mount(w)))
        w->lack = world_reserve(w);
}

/* What a failed test left behind must neither fail the next one nor stay in memory. */
static void world_clean(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d)))
        if (e->d_name[0] != '.')
            unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
}

static void world_destroy(struct world *w)
{
    char path[128];

    for (size_t i = 0; i < sizeof(world_dirs) / sizeof(world_dirs[0]); i++) {
        world_path(w, world_dirs[i], path, sizeof(path));
        world_clean(path);
        umount2(path, MNT_DETACH);
        rmdir(path);
    }
    if (rmdir(w->base) < 0)
        perror(w->base);
    if (w->added)
        world_write(world_nr_hugepages, world_read(world_nr_hugepages) - w->added);
}

static int outer_main(char **argv)
{
    struct world w = {0};
    char huge[128];
    int status = -1;
    pid_t pid;

    /* Ctrl-C and the like are for the inner process; this one has to clean up. */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    world_make(&w);
    world_path(&w, "huge", huge, sizeof(huge));
    if (w.lack)
        fprintf(stderr, "tests that need hugepages are skipped: %s\n", w.lack);
    pid = fork();
    if (pid == 0) {
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        setenv("SEGMENT_TEST_BASE", w.base, 1);
        setenv("SEGMENT_TEST_LACK", w.lack ? w.lack : "", 1);
        if (!w.lack)
            setenv("HUGETLB_PATH", huge, 1); /* what libhugetlbfs is to find */
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    waitpid(pid, &status, 0);
    world_destroy(&w);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* Run with an environment of its own: what a pool becomes where libhugetlbfs finds no mount. */
static int ladder_main(void)
{
    struct segment_spec spec = {.name = "unmounted", .bytes = 1, .runtime_dir = "/dev/shm"};
    struct segment_reasons why;
    struct segment seg;
    int r = segment_make(&spec, &why, &seg);

    for (unsigned i = 0; i < why.n; i++)
        puts(why.list[i].text);
    if (r < 0)
        return 1;
    puts(segment_rung_name(seg.rung));
    segment_unlink(&seg);
    segment_close(&seg);
    return 0;
}

int main(int argc, char **argv)
{
    struct criterion_test_set *set;
    int r = 0;

    if (argc == 2 && strcmp(argv[1], "--ladder") == 0)
        return ladder_main();
    if (!getenv("SEGMENT_TEST_BASE"))
        return outer_main(argv);
    set = criterion_initialize();
    if (criterion_handle_args(argc, argv, true))
        r = !criterion_run_all_tests(set);
    criterion_finalize(set);
    return r;
}

/* ---- what the tests share */

char run_dir[128], full_dir[128], huge_dir[128], tight_dir[128];
size_t hp, sp; /* sizes of hugepages and small pages */
static void *stolen;
static size_t stolen_bytes;
static int fds_before;
static uint64_t idle_before, reserved_before;

static int fds_count(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

int world_files(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    int n = 0;

    while ((e = readdir(d)))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

uint64_t world_hugepages(const char *what)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/hugepages-%zukB/%s", hp / 1024, what);
    return world_read(path);
}

void world_setup(void)
{
    struct world w = {0};

    snprintf(w.base, sizeof(w.base), "%s", getenv("SEGMENT_TEST_BASE"));
    world_path(&w, "run", run_dir, sizeof(run_dir));
    world_path(&w, "full", full_dir, sizeof(full_dir));
    world_path(&w, "huge", huge_dir, sizeof(huge_dir));
    world_path(&w, "tight", tight_dir, sizeof(tight_dir));
    world_clean(run_dir);
    world_clean(full_dir);
    world_clean(huge_dir);
    world_clean(tight_dir);
    hp = gethugepagesize() > 0 ? (size_t)gethugepagesize() : 0;
    sp = (size_t)sysconf(_SC_PAGESIZE);
    fds_before = fds_count();
    idle_before = world_hugepages("free_hugepages");
    reserved_before = world_hugepages("resv_hugepages");
}

/* Pages of a file that is gone come back when the kernel gets round to it. */
static bool hugepages_back(void)
{
    for (int i = 0; i < 500; i++) {
        if (world_hugepages("free_hugepages") == idle_before &&
            world_hugepages("resv_hugepages") == reserved_before)
            return true;
        usleep(10000);
    }
    return false;
}

void world_assert_nothing_left(void)
{
    cr_assert_eq(fds_count(), fds_before, "%d fds, there were %d", fds_count(), fds_before);
    cr_assert(hugepages_back(), "hugepages leaked");
    cr_assert_eq(world_files(run_dir), 0);
    cr_assert_eq(world_files(huge_dir), 0);
    cr_assert_eq(world_files(tight_dir), 0);
    cr_assert_eq(world_files(full_dir), 0);
}

void segment_destroy(struct segment *s)
{
    cr_assert_eq(segment_unlink(s), 0);
    segment_close(s);
}

struct segment_spec pool_spec(size_t bytes)
{
    return (struct segment_spec){
        .name = "pool", .bytes = bytes, .hugetlbfs_dir = huge_dir, .runtime_dir = run_dir};
}

struct segment_spec small_spec(size_t bytes)
{
    struct segment_spec spec = pool_spec(bytes);

    spec.name = "small";
    spec.kind = SEGMENT_SMALL;
    return spec;
}

struct segment segment_must(const struct segment_spec *spec)
{
    struct segment_reasons why;
    struct segment s;
    int r = segment_make(spec, &why, &s);

    cr_assert_eq(r, 0, "%s: %s", strerror(-r), why.n ? why.list[why.n - 1].text : "");
    return s;
}

size_t bytes_present(int fd)
{
    struct stat st;

    cr_assert_eq(fstat(fd, &st), 0);
    return (size_t)st.st_blocks * 512;
}

mode_t mode_of(int fd)
{
    struct stat st;

    cr_assert_eq(fstat(fd, &st), 0);
    return st.st_mode & 07777;
}

int run_child(int (*fn)(void *arg), void *arg)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        prctl(PR_SET_DUMPABLE, 0); /* no core files from the deaths that are meant */
        signal(SIGBUS, SIG_DFL);   /* sanitizers have handlers of their own */
        signal(SIGSEGV, SIG_DFL);
        _exit(fn(arg));
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int read_byte(void *arg)
{
    return *(volatile unsigned char *)arg;
}

int write_byte(void *arg)
{
    *(volatile unsigned char *)arg = 1;
    return 0;
}

void world_steal(size_t left)
{
    stolen_bytes = (world_hugepages("free_hugepages") - left) * hp;
    stolen = mmap(NULL, stolen_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
    cr_assert_neq(stolen, MAP_FAILED);
}

void world_unsteal(void)
{
    munmap(stolen, stolen_bytes);
}

/* ---- system calls that fail when told to */

static struct {
    enum call call;
    int nth, error; /* fail the nth call from now, counted from 0 */
    bool fired;
} fault = {.call = CALLS};

void fault_set(enum call call, int nth, int error)
{
    fault.call = call;
    fault.nth = nth;
    fault.error = error;
    fault.fired = false;
}

bool fault_hits(enum call call)
{
    if (fault.call != call || fault.fired || fault.nth-- > 0)
        return false;
    fault.fired = true;
    errno = fault.error;
    return true;
}

bool fault_fired(void)
{
    return fault.fired;
}

static int faulty_memfd_create(const char *name, unsigned flags)
{
    return fault_hits(CALL_MEMFD_CREATE) ? -1 : memfd_create(name, flags);
}

static int faulty_open(const char *path, int flags, mode_t mode)
{
    return fault_hits(CALL_OPEN) ? -1 : open(path, flags, mode);
}

static int faulty_fallocate(int fd, int mode, off_t offset, off_t len)
{
    return fault_hits(CALL_FALLOCATE) ? -1 : fallocate(fd, mode, offset, len);
}

static int faulty_ftruncate(int fd, off_t len)
{
    return fault_hits(CALL_FTRUNCATE) ? -1 : ftruncate(fd, len);
}

static int faulty_fchown(int fd, uid_t uid, gid_t gid)
{
    return fault_hits(CALL_FCHOWN) ? -1 : fchown(fd, uid, gid);
}

static int faulty_fchmod(int fd, mode_t mode)
{
    return fault_hits(CALL_FCHMOD) ? -1 : fchmod(fd, mode);
}

static int faulty_fcntl(int fd, int cmd, int arg)
{
    return fault_hits(CALL_FCNTL) ? -1 : fcntl(fd, cmd, arg);
}

static void *faulty_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
    return fault_hits(CALL_MMAP) ? MAP_FAILED : mmap(addr, len, prot, flags, fd, offset);
}

static int faulty_madvise(void *addr, size_t len, int advice)
{
    return fault_hits(CALL_MADVISE) ? -1 : madvise(addr, len, advice);
}

const struct segment_sys faulty_sys = {
    .memfd_create = faulty_memfd_create,
    .open = faulty_open,
    .fallocate = faulty_fallocate,
    .ftruncate = faulty_ftruncate,
    .fchown = faulty_fchown,
    .fchmod = faulty_fchmod,
    .fcntl = faulty_fcntl,
    .mmap = faulty_mmap,
    .madvise = faulty_madvise,
};
