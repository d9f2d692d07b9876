/* SPDX-License-Identifier: Apache-2.0 */
/* The part of a worker that speaks the protocol without the library and does harm to what it maps. */
#ifndef KVD_TESTS_HOSTILE_H
#define KVD_TESTS_HOSTILE_H

/* "raw WHAT ...". */
void hostile_command(char **arg);

void say_ok(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_error(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
