/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks, medians, memory. */
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

static uint64_t read_clock(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

uint64_t cpu_ns(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double percentile(double *v, size_t n, double p)
{
    if (!n)
        return NAN;
    qsort(v, n, sizeof(*v), by_value);
    return v[(size_t)(p * (double)(n - 1) + 0.5)];
}

double median(double *v, size_t n)
{
    if (!n)
        return NAN;
    qsort(v, n, sizeof(*v), by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull); /* splitmix64 */

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Those that the program was started with: a thread that is kept on one of them inherits only that. */
static const cpu_set_t *allowed(void)
{
    static cpu_set_t set;

    if (!CPU_COUNT(&set))
        sched_getaffinity(getpid(), sizeof(set), &set);
    return &set;
}

unsigned cpus(void)
{
    return (unsigned)CPU_COUNT(allowed());
}

int pin_cpu(unsigned n)
{
    const cpu_set_t *all = allowed();
    cpu_set_t one;

    n %= cpus();
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, all) || n--)
            continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        return sched_setaffinity(0, sizeof(one), &one) < 0 ? -errno : 0;
    }
    return -EINVAL;
}

/* Children inherit where their parent is kept. */
void unpin_cpu(void)
{
    sched_setaffinity(0, sizeof(cpu_set_t), allowed());
}

int memory_new(size_t bytes, enum pages pages, struct memory *ret)
{
    unsigned flags = MFD_CLOEXEC | (pages == PAGES_HUGE ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
    struct memory m = {.bytes = (bytes + HUGEPAGE - 1) & ~(HUGEPAGE - 1)};
    int fd = memfd_create("kvd-bench", flags), r = 0;

    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)m.bytes) < 0) {
        r = -errno;
        close(fd);
        return r;
    }
    /* mmap() of hugepages that are not there fails, a touch would be a SIGBUS */
    m.rw = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    m.ro = mmap(NULL, m.bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (m.rw == MAP_FAILED || m.ro == MAP_FAILED) {
        r = -errno;
    } else {
        memset(m.rw, 0, m.bytes);
        for (size_t i = 0; i < m.bytes; i += 4096)
            (void)*((const volatile char *)m.ro + i);
    }
    close(fd);
    if (r < 0)
        memory_free(&m);
    else
        *ret = m;
    return r;
}

void memory_free(struct memory *m)
{
    if (m->rw && m->rw != MAP_FAILED)
        munmap(m->rw, m->bytes);
    if (m->ro && m->ro != MAP_FAILED)
        munmap((void *)m->ro, m->bytes);
    *m = (struct memory){0};
}

size_t hugepages_free(void)
{
    size_t n = 0;
    char line[128];
    FILE *f = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "re");

    if (f && fgets(line, sizeof(line), f))
        n = strtoul(line, NULL, 10);
    if (f)
        fclose(f);
    return n;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("clflushopt"))) static void flush_unordered(const void *p)
{
    _mm_clflushopt((void *)p);
}

void flush_line(const void *p)
{
    unsigned a, b = 0, c, d;
    static int fast = -1;

    if (fast < 0)
        fast = __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_CLFLUSHOPT;
    if (fast)
        flush_unordered(p);
    else
        _mm_clflush(p);
}

void flush_wait(void)
{
    _mm_mfence();
}
#elif defined(__aarch64__)
void flush_line(const void *p)
{
    __asm__ volatile("dc civac, %0" ::"r"(p) : "memory");
}

void flush_wait(void)
{
    __asm__ volatile("dsb sy" ::: "memory");
}
#else
#error "how does this processor flush a cache line?"
#endif
