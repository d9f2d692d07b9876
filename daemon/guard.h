/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_GUARD_H
#define KVD_DAEMON_GUARD_H

/*
 * Access to memory that somebody else can take away. A writer may truncate the file behind a pool
 * or a session segment (a hugetlbfs file cannot be sealed), or punch holes into it: the next access
 * raises SIGBUS. Under a guard that is -EFAULT, the space goes offline and the daemon lives (I5).
 *
 * A guard covers named memory only. A fault at any other address is a bug of the daemon and kills
 * it as if there were no guard. Guards nest and belong to one thread; entering one is no system
 * call.
 *
 * The signal handler is process-wide by nature, hence the one piece of global state in this file.
 */

#include <stddef.h>

/*
 * Installs the SIGBUS and SIGSEGV handlers; once per process, further calls do nothing. What no
 * guard covers goes to the action that was there before, usually death with a core dump.
 */
int guard_install(void);

/*
 * Runs fn(arg), which may touch [addr, addr + bytes). Answers what fn answers, or -EFAULT when that
 * memory could not be accessed; fn was then left at some instruction in its middle, so it must not
 * hold a lock or own anything, and what it wrote is undefined. -EINVAL: guard_install() did not
 * run.
 */
int guard_call(int (*fn)(void *arg), void *arg, const volatile void *addr, size_t bytes);

/* memcpy() where either side may vanish. 0, -EFAULT (dst then holds anything) or -EINVAL. */
int guard_copy(void *dst, const void *src, size_t n);

#endif
