/* SPDX-License-Identifier: Apache-2.0 */
/* I4: whatever the core counts twice is compared, for tests of any framework. */
#ifndef KVD_TESTS_CORE_CHECK_H
#define KVD_TESTS_CORE_CHECK_H

#include <stddef.h>

struct core;

/* The sums agree with the slot table, lists, index, links, sessions and tenants. 0, or -EBADMSG
 * with a sentence in `ret_why`. To be called between two operations: in the middle of one they may
 * differ. */
int core_check(struct core *c, char *ret_why, size_t why_bytes);

#endif
