/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct guard_range {
    uintptr_t lo, hi;
};

struct guard_frame {
    sigjmp_buf jump;
    struct guard_range range[2];
    struct guard_frame *outer;
};

/*
 * The thread's innermost guard. Written by the thread, read by the handler on the same thread: the
 * signal fences in guard_run() keep the compiler from moving guarded accesses across the writes, no
 * hardware fence is needed. The executable's own thread-local storage: a handler must not allocate.
 */
static _Thread_local struct guard_frame *volatile guard_innermost;

static struct sigaction guard_old_bus, guard_old_segv;
static pthread_once_t guard_once = PTHREAD_ONCE_INIT;
static atomic_int guard_state = -EINVAL;

static struct guard_range range_of(const volatile void *addr, size_t bytes)
{
    return (struct guard_range){.lo = (uintptr_t)addr, .hi = (uintptr_t)addr + bytes};
}

/* Nested guards each cover their own memory: a fault belongs to the innermost that names it. */
static struct guard_frame *frame_find(const siginfo_t *info)
{
    uintptr_t at = (uintptr_t)info->si_addr;
    struct guard_frame *f = guard_innermost;

    if (info->si_code <= 0) /* sent by kill(), not by an instruction of this thread */
        return NULL;
    for (; f; f = f->outer)
        for (int i = 0; i < 2; i++)
            if (at >= f->range[i].lo && at < f->range[i].hi)
                return f;
    return NULL;
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    struct guard_frame *f = frame_find(info);

    (void)context;
    if (f)
        siglongjmp(f->jump, 1);
    /* Back to what was there before; returning repeats the instruction, and it faults into that. */
    sigaction(sig, sig == SIGBUS ? &guard_old_bus : &guard_old_segv, NULL);
    if (info->si_code <= 0)
        raise(sig);
}

static void install(void)
{
    /*
     * SA_NODEFER: the handler is left by siglongjmp() with the signal unblocked, so guard_run()
     * need not save the mask and entering a guard stays free of system calls.
     */
    struct sigaction sa = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};

    sigemptyset(&sa.sa_mask);
    if (sigaction(SIGBUS, &sa, &guard_old_bus) < 0 || sigaction(SIGSEGV, &sa, &guard_old_segv) < 0)
        atomic_store(&guard_state, -errno);
    else
        atomic_store(&guard_state, 0);
}

int guard_install(void)
{
    int r = pthread_once(&guard_once, install);

    return r ? -r : atomic_load(&guard_state);
}

/* noinline: nothing of the caller may live in registers that siglongjmp() would roll back. */
static __attribute__((noinline)) int guard_run(int (*fn)(void *arg), void *arg,
                                               struct guard_frame *f)
{
    int r;

    f->outer = guard_innermost;
    if (sigsetjmp(f->jump, 0)) {
        guard_innermost = f->outer;
        return -EFAULT;
    }
    guard_innermost = f;
    atomic_signal_fence(memory_order_seq_cst);
    r = fn(arg);
    atomic_signal_fence(memory_order_seq_cst);
    guard_innermost = f->outer;
    return r;
}

int guard_call(int (*fn)(void *arg), void *arg, const volatile void *addr, size_t bytes)
{
    struct guard_frame f = {.range = {range_of(addr, bytes)}};

    if (atomic_load_explicit(&guard_state, memory_order_relaxed) < 0)
        return -EINVAL;
    return guard_run(fn, arg, &f);
}

struct copy {
    void *dst;
    const void *src;
    size_t n;
};

static int copy_run(void *arg)
{
    const struct copy *c = arg;

    memcpy(c->dst, c->src, c->n);
    return 0;
}

int guard_copy(void *dst, const void *src, size_t n)
{
    struct guard_frame f = {.range = {range_of(dst, n), range_of(src, n)}};
    struct copy c = {.dst = dst, .src = src, .n = n};

    if (atomic_load_explicit(&guard_state, memory_order_relaxed) < 0)
        return -EINVAL;
    return guard_run(copy_run, &c, &f);
}
