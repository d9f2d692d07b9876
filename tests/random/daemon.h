/* SPDX-License-Identifier: Apache-2.0 */
/* A real daemon in a directory of its own, and questions to it as an administrator. Whatever it does not
 * answer ends the run: fail.h. */
#ifndef KVD_TESTS_RANDOM_DAEMON_H
#define KVD_TESTS_RANDOM_DAEMON_H

#include <stdint.h>
#include <sys/types.h>

#include "client/control.h"

enum {
    DAEMON_POOLS = 3,
};

struct daemon {
    const char *program;
    char dir[64], config[96], log[96];
    char writer[96], reader[96], admin[96];
    pid_t pid;
    struct control *control;
    unsigned int fds; /* that it had open when only the administrator was there */
};

struct pool_sums {
    char name[140];
    uint32_t id;
    uint64_t slots, free, reserved, live, in_flight, quarantined, pinned;
    uint64_t committed, evicted;
};

/* Makes the directory, starts, connects. */
void daemon_start(struct daemon *d, const char *program);

/* SIGTERM; the exit status. */
int daemon_stop(struct daemon *d);

/* Removes the directory. */
void daemon_clean(const struct daemon *d);

/* The end of its log, on stdout. */
void daemon_show_log(const struct daemon *d);

uint32_t daemon_status(struct daemon *d, struct pool_sums sums[DAEMON_POOLS]); /* sessions */

unsigned int daemon_count_fds(const struct daemon *d);

/* Files of segments in its directory: of sessions, or (all) of anything. */
unsigned int daemon_count_files(const struct daemon *d, int all);

/* One step of removing all that is not pinned; returns how many were. Calls until there is no more. */
uint64_t daemon_flush(struct daemon *d, uint32_t pool);
void daemon_evict(struct daemon *d, uint32_t pool, uint64_t count);
void daemon_evict_key(struct daemon *d, uint32_t pool, const uint8_t hash[32], uint32_t group);
void daemon_evict_tenant(struct daemon *d, uint32_t pool, uint32_t tenant);
void daemon_reset(struct daemon *d, uint32_t space);
void daemon_look(struct daemon *d, uint32_t pool); /* sessions, blocks, statistics */

#endif
