/* SPDX-License-Identifier: Apache-2.0 */
/* The one way out of a run that has found something: what was expected, the seed, the last operations. */
#ifndef KVD_TESTS_RANDOM_FAIL_H
#define KVD_TESTS_RANDOM_FAIL_H

void run_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#define expect(condition, ...) ((condition) ? (void)0 : run_fail(__VA_ARGS__))

#endif
