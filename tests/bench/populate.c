/* SPDX-License-Identifier: Apache-2.0 */
/* Making a pool's memory present: helper threads against one. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "daemon/segment_make.h"

struct populating {
    char dir[64];
    bool huge;
    size_t bytes;
};

static int make(struct populating *p, unsigned threads, double *ret)
{
    struct populate_options populate = {.threads = threads};
    struct segment_spec spec = {
        .name = "kvd-bench-populate",
        .kind = SEGMENT_POOL,
        .hugepages = p->huge ? SEGMENT_HUGEPAGES_REQUIRE : SEGMENT_HUGEPAGES_OFF,
        .bytes = p->bytes,
        .runtime_dir = p->dir,
        .replace = true,
        .populate = &populate,
    };
    struct segment segment;
    uint64_t start = now_ns();
    int r = segment_make(&spec, NULL, &segment);

    if (r < 0)
        return r;
    *ret = (double)p->bytes / (double)(now_ns() - start);
    segment_unlink(&segment);
    segment_close(&segment);
    return 0;
}

/* ---- without any of our code */

struct touching {
    pthread_t thread;
    char *at;
    size_t bytes;
};

static void *touch(void *arg)
{
    struct touching *t = arg;

    madvise(t->at, t->bytes, MADV_POPULATE_WRITE);
    return NULL;
}

static int touch_with(struct populating *p, unsigned n, double *ret)
{
    struct touching t[2];
    unsigned started = 0;
    int fd = memfd_create("kvd-bench", MFD_CLOEXEC | (p->huge ? MFD_HUGETLB : 0));
    char *m = MAP_FAILED;
    uint64_t start;

    if (fd >= 0 && ftruncate(fd, (off_t)p->bytes) == 0)
        m = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (m == MAP_FAILED)
        return -errno;
    start = now_ns();
    for (; started < n; started++) {
        t[started].at = m + started * (p->bytes / n);
        t[started].bytes = p->bytes / n;
        if (pthread_create(&t[started].thread, NULL, touch, &t[started]) != 0)
            break;
    }
    for (unsigned i = 0; i < started; i++)
        pthread_join(t[i].thread, NULL);
    *ret = (double)p->bytes / (double)(now_ns() - start);
    munmap(m, p->bytes);
    return started == n ? 0 : -EAGAIN;
}

/* ---- speed-ups */

/* Of small pages the daemon has none touched: fallocate() by one thread is faster. So what it does is
 * compared with one thread that touches them. */
static int speed_up_ours(void *arg, double *ret)
{
    struct populating *p = arg;
    double one, helpers = 0;
    int r = p->huge ? make(p, 1, &one) : touch_with(p, 1, &one);

    if (r == 0)
        r = make(p, cpus(), &helpers);
    if (r == 0)
        *ret = helpers / one;
    return r;
}

static int speed_up_bare(void *arg, double *ret)
{
    double one, two = 0;
    int r = touch_with(arg, 1, &one);

    if (r == 0)
        r = touch_with(arg, 2, &two);
    if (r == 0)
        *ret = two / one;
    return r;
}

static int compare(struct bench *b, struct populating *p)
{
    const struct figure f = {.name = p->huge ? "populate hugepages, against one thread"
                                             : "populate small pages, against one thread",
                             .unit = "x",
                             .goal = GOAL_OURS_AT_LEAST,
                             .limit = 1.5,
                             .more_is_better = true};
    const struct contender bare = {"two bare threads", speed_up_bare};

    return bench_compare(b, &f, p, speed_up_ours, &bare, 1);
}

int case_populate(struct bench *b)
{
    struct populating p = {.dir = "/dev/shm/kvd-bench-XXXXXX",
                           .bytes = b->smoke ? 2 * HUGEPAGE : 64 * HUGEPAGE};
    int r;

    if (!mkdtemp(p.dir))
        return -errno;
    r = compare(b, &p);
    p.huge = !b->smoke && hugepages_free() >= p.bytes / HUGEPAGE;
    if (r == 0 && p.huge)
        r = compare(b, &p);
    rmdir(p.dir);
    return r;
}
