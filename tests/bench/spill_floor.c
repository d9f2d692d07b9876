/* SPDX-License-Identifier: Apache-2.0 */
#include "spill_floor.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <json-c/json.h>
#include <liburing.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define ALIGN    4096u
#define FIO_TEXT ((size_t)1 << 18)

struct drive {
    struct drive_spec spec;
    char path[160];
    int fd;
    uint64_t at[2]; /* where the next step begins: of the loop, of fio */
    struct memory memory;
    struct io_uring ring;
    bool has_ring, fixed;
    uint32_t buffers; /* of 1 MiB */
    uint32_t used;    /* of them, by the loop that runs */
    uint32_t next;    /* round and round */
    uint32_t running; /* transfers */
    enum { FIO_UNKNOWN, FIO_HUGE, FIO_SMALL, FIO_NONE } fio;
};

/* ---- files */

int disk_open(const char *path, int flags, int *ret_fd)
{
    int fd = open(path, flags | O_DIRECT | O_CLOEXEC, 0600);

    if (fd < 0 && errno == EINVAL)
        fd = open(path, flags | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}

int disk_read(const char *path, uint64_t offset, uint64_t bytes, double *ret_seconds)
{
    void *buf = aligned_alloc(ALIGN, MIB);
    uint64_t done = 0, start;
    int fd = -1, r = buf ? disk_open(path, O_RDONLY, &fd) : -ENOMEM;

    start = now_ns();
    while (r == 0 && done < bytes) {
        size_t now = bytes - done < MIB ? (bytes - done + ALIGN - 1) / ALIGN * ALIGN : MIB;
        ssize_t n = pread(fd, buf, now, (off_t)(offset + done));

        r = n < 0 ? -errno : n == 0 ? -ENODATA : 0;
        done += n > 0 ? (uint64_t)n : 0;
    }
    *ret_seconds = (double)(now_ns() - start) / 1e9;
    if (fd >= 0)
        close(fd);
    free(buf);
    return r;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    return remove(path);
}

int disk_dir_new(const struct bench *b, char *ret_dir, size_t n)
{
    snprintf(ret_dir, n, "%s/kvd-bench-XXXXXX", b->disk);
    if (mkdtemp(ret_dir))
        return 0;
    fprintf(stderr, "kvd-bench: %s: %s (--disk takes another directory)\n", b->disk,
            strerror(errno));
    ret_dir[0] = 0;
    return -errno;
}

void disk_dir_free(const char *dir)
{
    if (dir[0])
        nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- the loop */

static char *buffer(const struct drive *d, uint32_t i)
{
    return (char *)d->memory.rw + i * MIB;
}

static void begin(struct drive *d, bool write, uint64_t offset, unsigned bytes)
{
    struct io_uring_sqe *e = io_uring_get_sqe(&d->ring);
    uint32_t i = d->next++ % d->used;
    int fd = d->fixed ? 0 : d->fd;

    d->running++;

    if (write && d->fixed)
        io_uring_prep_write_fixed(e, fd, buffer(d, i), bytes, offset, (int)i);
    else if (write)
        io_uring_prep_write(e, fd, buffer(d, i), bytes, offset);
    else if (d->fixed)
        io_uring_prep_read_fixed(e, fd, buffer(d, i), bytes, offset, (int)i);
    else
        io_uring_prep_read(e, fd, buffer(d, i), bytes, offset);
    if (d->fixed)
        e->flags |= IOSQE_FIXED_FILE;
    e->user_data = bytes;
}

/* Takes what has completed. */
static int finish(struct drive *d)
{
    struct io_uring_cqe *c;
    unsigned head, n = 0;
    int r = 0;

    io_uring_for_each_cqe(&d->ring, head, c)
    {
        if (c->res != (int)c->user_data)
            r = c->res < 0 ? c->res : -EIO;
        n++;
    }
    io_uring_cq_advance(&d->ring, n);
    d->running -= n;
    return r;
}

static int transfer(struct drive *d, bool write, uint64_t offset, uint64_t bytes)
{
    uint64_t end = offset + bytes;
    int r = 0;

    while ((r == 0 && offset < end) || d->running) {
        int e;

        while (r == 0 && offset < end && d->running < d->spec.depth) {
            unsigned now = end - offset < MIB ? (unsigned)(end - offset) : (unsigned)MIB;

            begin(d, write, offset, now);
            offset += now;
        }
        e = io_uring_submit_and_wait(&d->ring, 1);
        if (e >= 0 || e == -EINTR)
            e = finish(d);
        else
            return e; /* the kernel is out of its mind: nothing more to be measured */
        r = r < 0 ? r : e;
    }
    return r;
}

int drive_loop(struct drive *d, bool write, double *ret_gbs, double *ret_cpu_us)
{
    uint64_t start = now_ns(), cpu = cpu_ns();
    int r = transfer(d, write, d->at[0], d->spec.step);

    *ret_gbs = (double)d->spec.step / (double)(now_ns() - start);
    if (ret_cpu_us)
        *ret_cpu_us = (double)(cpu_ns() - cpu) / 1e3 / ((double)d->spec.step / (double)MIB);
    d->at[0] += d->spec.step;
    if (d->at[0] + d->spec.step > d->spec.bytes)
        d->at[0] = 0;
    return r;
}

int drive_like_pool(struct drive *d, bool write, double *ret_gbs)
{
    int r;

    d->used = d->buffers;
    r = drive_loop(d, write, ret_gbs, NULL);
    d->used = d->spec.depth;
    return r;
}

static int ring_new(struct drive *d)
{
    struct io_uring_params p = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    struct iovec *iov = calloc(d->buffers, sizeof(*iov));
    int r = iov ? io_uring_queue_init_params(d->spec.depth, &d->ring, &p) : -ENOMEM;

    if (r == -EINVAL) { /* before Linux 6.1 */
        p = (struct io_uring_params){0};
        r = io_uring_queue_init_params(d->spec.depth, &d->ring, &p);
    }
    d->has_ring = r == 0;
    for (uint32_t i = 0; i < d->buffers && r == 0; i++)
        iov[i] = (struct iovec){buffer(d, i), MIB};
    if (r == 0) /* RLIMIT_MEMLOCK may forbid it */
        d->fixed = io_uring_register_buffers(&d->ring, iov, d->buffers) == 0 &&
                   io_uring_register_files(&d->ring, &d->fd, 1) == 0;
    free(iov);
    return r;
}

/* ---- fio */

/* Partner: fio_output(), which takes the process back. */
static pid_t fio_start(char *const argv[], int *ret_fd)
{
    int fds[2];
    pid_t pid;

    if (pipe(fds) < 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);

        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(null, STDIN_FILENO);
        dup2(fds[1], STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
        close(fds[0]);
        close(fds[1]);
        execvp(argv[0], argv);
        _exit(127);
    }
    close(fds[1]);
    *ret_fd = fds[0];
    if (pid < 0)
        close(fds[0]);
    return pid;
}

/* What it has printed, from the brace on; free() it. NULL: it did not work. */
static char *fio_output(char *const argv[])
{
    char *text = calloc(1, FIO_TEXT), *json = NULL;
    size_t n = 0;
    ssize_t got = 1;
    int fd = -1, status = -1;
    pid_t pid = text ? fio_start(argv, &fd) : -ENOMEM;

    while (pid > 0 && got > 0 && n < FIO_TEXT - 1) {
        got = read(fd, text + n, FIO_TEXT - 1 - n);
        n += got > 0 ? (size_t)got : 0;
    }
    if (pid > 0) {
        close(fd);
        waitpid(pid, &status, 0);
    }
    if (status == 0 && strchr(text, '{'))
        json = strdup(strchr(text, '{'));
    free(text);
    return json;
}

/* Bytes per second of the first job. */
static double fio_bandwidth(const char *json, const char *way)
{
    struct json_object *o = json_tokener_parse(json), *jobs, *x;
    double v = 0;

    if (o && json_object_object_get_ex(o, "jobs", &jobs) &&
        json_object_is_type(jobs, json_type_array) &&
        json_object_object_get_ex(json_object_array_get_idx(jobs, 0), way, &x) &&
        json_object_object_get_ex(x, "bw_bytes", &x))
        v = json_object_get_double(x);
    json_object_put(o);
    return v;
}

static int fio_run(struct drive *d, bool write, bool huge, double *ret_gbs)
{
    const char *way = write ? "write" : "read";
    char file[192], rw[16], depth[32], size[48], offset[48], *json;
    char *argv[] = {(char *)"fio",
                    (char *)"--name=floor",
                    file,
                    rw,
                    depth,
                    size,
                    offset,
                    (char *)"--bs=1M",
                    (char *)"--ioengine=io_uring",
                    (char *)"--direct=1",
                    (char *)"--fixedbufs",
                    (char *)"--registerfiles",
                    (char *)"--overwrite=1",
                    (char *)"--fallocate=none",
                    (char *)"--output-format=json",
                    huge ? (char *)"--mem=shmhuge" : NULL,
                    NULL};
    double v;

    snprintf(file, sizeof(file), "--filename=%s", d->path);
    snprintf(rw, sizeof(rw), "--rw=%s", way);
    snprintf(depth, sizeof(depth), "--iodepth=%u", d->spec.depth);
    snprintf(size, sizeof(size), "--size=%llu", (unsigned long long)d->spec.step);
    snprintf(offset, sizeof(offset), "--offset=%llu", (unsigned long long)d->at[1]);
    d->at[1] += d->spec.step;
    if (d->at[1] + d->spec.step > d->spec.bytes)
        d->at[1] = 0;
    json = fio_output(argv);
    v = json ? fio_bandwidth(json, way) : 0;
    free(json);
    if (!(v > 0))
        return -ENOENT;
    *ret_gbs = v / 1e9;
    return 0;
}

int drive_fio(struct drive *d, bool write, double *ret_gbs)
{
    return fio_run(d, write, d->fio == FIO_HUGE, ret_gbs);
}

bool drive_has_fio(struct drive *d)
{
    double ignored;

    if (d->fio != FIO_UNKNOWN)
        return d->fio != FIO_NONE;
    if (d->spec.pages == PAGES_HUGE && fio_run(d, false, true, &ignored) == 0)
        d->fio = FIO_HUGE;
    else
        d->fio = fio_run(d, false, false, &ignored) == 0 ? FIO_SMALL : FIO_NONE;
    return d->fio != FIO_NONE;
}

/* ---- from beginning to end */

void drive_free(struct drive *d)
{
    if (!d)
        return;
    if (d->fixed) { /* leaving it to the ring's end would be some time later */
        io_uring_unregister_buffers(&d->ring);
        io_uring_unregister_files(&d->ring);
    }
    if (d->has_ring)
        io_uring_queue_exit(&d->ring);
    if (d->fd >= 0) {
        close(d->fd);
        unlink(d->path);
    }
    memory_free(&d->memory);
    free(d);
}

/* Transfers end out of order, so a loop over few buffers may use one twice at a time. That does not matter:
 * nobody looks at what is in it. */
static int drive_init(struct drive *d)
{
    int r;

    d->used = d->spec.depth;
    d->buffers = (uint32_t)((d->spec.step + MIB - 1) / MIB);
    d->buffers = d->buffers > d->used ? d->buffers : d->used;
    r = memory_new(d->buffers * MIB, d->spec.pages, &d->memory);
    if (r < 0)
        return r;
    memset(d->memory.rw, 0x5a, d->memory.bytes);
    r = disk_open(d->path, O_RDWR | O_CREAT | O_EXCL, &d->fd);
    if (r == 0)
        r = ring_new(d);
    if (r == 0) /* as the daemon gets its file: all of it at once */
        r = -posix_fallocate(d->fd, 0, (off_t)d->spec.bytes);
    return r == 0 ? transfer(d, true, 0, d->spec.bytes) : r;
}

int drive_new(const struct drive_spec *spec, struct drive **ret_drive)
{
    struct drive *d = calloc(1, sizeof(*d));
    int r;

    if (!d)
        return -ENOMEM;
    d->spec = *spec;
    d->fd = -1;
    snprintf(d->path, sizeof(d->path), "%s/floor", spec->dir);
    r = drive_init(d);
    if (r < 0)
        drive_free(d);
    else
        *ret_drive = d;
    return r;
}
