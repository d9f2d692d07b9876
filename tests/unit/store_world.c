/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "store_world.h"

#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- calls that fail */

struct faults faults;

ssize_t __real_pread(int fd, void *buf, size_t n, off_t at);
ssize_t __real_pwrite(int fd, const void *buf, size_t n, off_t at);
int __real_fallocate(int fd, int mode, off_t at, off_t n);
ssize_t __real_pread64(int fd, void *buf, size_t n, off_t at);
ssize_t __real_pwrite64(int fd, const void *buf, size_t n, off_t at);
int __real_fallocate64(int fd, int mode, off_t at, off_t n);
ssize_t __wrap_pread(int fd, void *buf, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *buf, size_t n, off_t at);
int __wrap_fallocate(int fd, int mode, off_t at, off_t n);
ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *buf, size_t n, off_t at);
int __wrap_fallocate64(int fd, int mode, off_t at, off_t n);

static void pause_ms(long ms)
{
    struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    nanosleep(&ts, NULL);
}

static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER;

void fault_set(struct fault *f, struct fault to)
{
    pthread_mutex_lock(&faults_lock);
    *f = to;
    pthread_mutex_unlock(&faults_lock);
}

/* 0, or an errno; or it hangs. May make *n smaller. */
static int strike_locked(struct fault *f, uint64_t at, size_t *n, bool *hang)
{
    atomic_fetch_add(&f->calls, 1);
    if (at >= f->to || at + *n <= f->from)
        return 0;
    if (f->hang)
        pthread_sigmask(SIG_SETMASK, NULL, &f->blocked);
    if (atomic_fetch_add(&f->hits, 1) >= f->times && f->times > 0)
        return 0;
    *hang = f->hang;
    if (f->cut > 0 && *n > f->cut)
        *n = f->cut;
    return f->error;
}

static bool is_released(struct fault *f)
{
    bool released;

    pthread_mutex_lock(&faults_lock);
    released = atomic_load(&f->released);
    pthread_mutex_unlock(&faults_lock);
    return released;
}

static int strike(struct fault *f, uint64_t at, size_t *n)
{
    bool hang = false;
    int error;

    pthread_mutex_lock(&faults_lock);
    error = strike_locked(f, at, n, &hang);
    pthread_mutex_unlock(&faults_lock);
    while (hang && !is_released(f))
        pause_ms(1);
    return error;
}

ssize_t __wrap_pread(int fd, void *buf, size_t n, off_t at)
{
    errno = strike(&faults.read, (uint64_t)at, &n);
    return errno ? -1 : __real_pread(fd, buf, n, at);
}

ssize_t __wrap_pwrite(int fd, const void *buf, size_t n, off_t at)
{
    errno = strike(&faults.write, (uint64_t)at, &n);
    return errno ? -1 : __real_pwrite(fd, buf, n, at);
}

int __wrap_fallocate(int fd, int mode, off_t at, off_t n)
{
    size_t bytes = (size_t)n;

    errno = strike(&faults.allocate, (uint64_t)at, &bytes);
    return errno ? -1 : __real_fallocate(fd, mode, at, n);
}

ssize_t __wrap_pread64(int fd, void *buf, size_t n, off_t at)
{
    errno = strike(&faults.read, (uint64_t)at, &n);
    return errno ? -1 : __real_pread64(fd, buf, n, at);
}

ssize_t __wrap_pwrite64(int fd, const void *buf, size_t n, off_t at)
{
    errno = strike(&faults.write, (uint64_t)at, &n);
    return errno ? -1 : __real_pwrite64(fd, buf, n, at);
}

int __wrap_fallocate64(int fd, int mode, off_t at, off_t n)
{
    size_t bytes = (size_t)n;

    errno = strike(&faults.allocate, (uint64_t)at, &bytes);
    return errno ? -1 : __real_fallocate64(fd, mode, at, n);
}

/* ---- files */

static char dir[64];

void store_world_init(void)
{
    fault_set(&faults.read, (struct fault){0});
    fault_set(&faults.write, (struct fault){0});
    fault_set(&faults.allocate, (struct fault){0});
    snprintf(dir, sizeof(dir), "/tmp/kvd-store-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    if (remove(path) < 0 && errno == EBUSY) {
        umount2(path, MNT_DETACH);
        remove(path);
    }
    return 0;
}

void store_world_fini(void)
{
    nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

const char *path_of(const char *name)
{
    static char paths[4][128];
    static unsigned next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof(paths[0]), "%s/%s", dir, name);
    return path;
}

void file_write(const char *path, const void *bytes, size_t n, uint64_t offset)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    cr_assert_geq(fd, 0, "%s: %s", path, strerror(errno));
    cr_assert_eq(__real_pwrite(fd, bytes, n, (off_t)offset), (ssize_t)n);
    close(fd);
}

void file_read(const char *path, void *bytes, size_t n, uint64_t offset)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    cr_assert_geq(fd, 0, "%s: %s", path, strerror(errno));
    cr_assert_eq(__real_pread(fd, bytes, n, (off_t)offset), (ssize_t)n);
    close(fd);
}

void file_flip(const char *path, uint64_t bit)
{
    uint8_t byte;

    file_read(path, &byte, 1, bit / 8);
    byte ^= (uint8_t)(1 << bit % 8);
    file_write(path, &byte, 1, bit / 8);
}

uint64_t file_size(const char *path)
{
    struct stat st;

    return stat(path, &st) < 0 ? UINT64_MAX : (uint64_t)st.st_size;
}

void need_root(void)
{
    if (geteuid() != 0)
        cr_skip_test("needs root");
}

void mount_at(const char *path, const char *type, const char *options)
{
    need_root();
    if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        cr_skip_test("no mounts here: %s", strerror(errno));
    cr_assert_eq(mkdir(path, 0700), 0);
    if (mount("none", path, type, 0, options) < 0)
        cr_skip_test("cannot mount a %s: %s", type, strerror(errno));
}

/* ---- stores */

struct store_spec spec_of(const char *path)
{
    struct store_spec s = {
        .path = path,
        .bytes = 8 * MIB,
        .geometry = {.space = "llama", .pool = "kv", .part_bytes = 32768, .parts = 2},
        .epoch = 3,
    };

    memset(s.geometry.identity, 0x11, sizeof(s.geometry.identity));
    return s;
}

struct format_record record_of(uint64_t i)
{
    struct format_record r = {
        .key.group = (uint32_t)(i % 3),
        .has_parent = i % 5 != 0,
        .digest = i * 0x9e3779b97f4a7c15,
        .position = i,
        .bytes = 1 + i % 4096,
        .epoch = (uint32_t)(i % 7),
        .generation = (uint32_t)i,
        .tenant = 9,
        .user_bytes = (uint32_t)(i % 129),
    };

    memcpy(r.key.hash, &i, sizeof(i));
    if (r.has_parent)
        r.parent.hash[31] = (uint8_t)(i + 1);
    return r;
}

void put_record(const char *path, const struct format_super *s, uint32_t number, uint64_t i)
{
    uint8_t bytes[FORMAT_RECORD_BYTES];
    struct format_record r = record_of(i);

    format_record_encode(&r, s, number, bytes);
    file_write(path, bytes, sizeof(bytes), s->table + number * sizeof(bytes));
}

struct format_super super_of(const char *path, unsigned copy)
{
    uint8_t bytes[FORMAT_SUPER_BYTES];
    struct format_super s;

    file_read(path, bytes, sizeof(bytes), copy * FORMAT_SUPER_COPY);
    cr_assert_eq(format_super_decode(bytes, &s), 0);
    return s;
}

void put_super(const char *path, const struct format_super *s, unsigned copy)
{
    uint8_t bytes[FORMAT_SUPER_BYTES];

    format_super_encode(s, bytes);
    file_write(path, bytes, sizeof(bytes), copy * FORMAT_SUPER_COPY);
}

static int event_fd = -1;

struct store_task *start(const struct store_spec *spec, enum store_job job)
{
    struct store_task *t = NULL;

    if (event_fd < 0)
        event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    cr_assert_geq(event_fd, 0);
    cr_assert_eq(store_task_open(spec, job, event_fd, &t), 0);
    return t;
}

static void take_all(struct store_task *t, struct ran *r)
{
    uint32_t n;

    do {
        r->list = realloc(r->list, (r->n + 1000) * sizeof(*r->list));
        cr_assert_not_null(r->list);
        n = store_task_take(t, r->list + r->n, 1000);
        r->n += n;
    } while (n == 1000);
}

/* Asks only after an event, so a task that forgets one hangs here. */
struct ran wait_for(struct store_task *t)
{
    struct ran r = {.r = -EINPROGRESS, .file.fd = -1};
    struct pollfd p = {.fd = event_fd, .events = POLLIN};
    uint64_t n;

    do {
        cr_assert_eq(poll(&p, 1, 60000), 1, "no news");
        cr_assert_eq(read(event_fd, &n, sizeof(n)), (ssize_t)sizeof(n));
        take_all(t, &r);
        r.r = store_task_result(t, &r.file, r.why, sizeof(r.why));
    } while (r.r == -EINPROGRESS);
    store_task_progress(t, &r.progress);
    cr_assert_eq(r.progress.phase, STORE_DONE);
    store_task_free(t);
    return r;
}

struct ran run_job(const struct store_spec *spec, enum store_job job)
{
    return wait_for(start(spec, job));
}

void ran_close(struct ran *r)
{
    if (r->file.fd >= 0)
        close(r->file.fd);
    free(r->list);
    r->file.fd = -1;
    r->list = NULL;
}

void wait_phase(struct store_task *t, enum store_phase phase)
{
    struct store_progress p;

    do {
        pause_ms(1);
        store_task_progress(t, &p);
        cr_assert(p.phase != STORE_DONE || phase == STORE_DONE);
    } while (p.phase != phase);
}

struct format_super made(const struct store_spec *spec, enum store_job job)
{
    struct ran r = run_job(spec, job);
    struct format_super s = r.file.super;

    cr_assert_eq(r.r, 0, "%s", r.why);
    ran_close(&r);
    return s;
}

void assert_fails(const struct store_spec *spec, enum store_job job, int error, const char *says)
{
    struct ran r = run_job(spec, job);

    cr_assert_eq(r.r, error, "%d: %s", r.r, r.why);
    cr_assert_eq(strncmp(r.why, spec->path, strlen(spec->path)), 0, "%s", r.why);
    cr_assert_not_null(strstr(r.why, says), "%s", r.why);
    cr_assert_eq(r.file.fd, -1);
    ran_close(&r);
}

pid_t holder(const struct store_spec *spec)
{
    int ready[2];
    char c;
    pid_t pid;

    cr_assert_eq(pipe2(ready, O_CLOEXEC), 0);
    pid = fork();
    if (pid == 0) {
        struct store_file file;
        struct store_task *t;
        char why[512];
        int r;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (store_task_open(spec, STORE_OPEN, -1, &t) < 0)
            _exit(1);
        while ((r = store_task_result(t, &file, why, sizeof(why))) == -EINPROGRESS)
            pause_ms(1);
        if (r == 0 && write(ready[1], "", 1) == 1)
            pause();
        _exit(2);
    }
    close(ready[1]);
    cr_assert_eq(read(ready[0], &c, 1), 1, "the other process cannot open the store");
    close(ready[0]);
    return pid;
}

void kill_and_reap(pid_t pid)
{
    cr_assert_eq(kill(pid, SIGKILL), 0);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
}
