/* SPDX-License-Identifier: Apache-2.0 */
/* A core without a process around it: small pools of 4 KiB pages, a clock that the test moves. */
#ifndef KVD_TESTS_CORE_WORLD_H
#define KVD_TESTS_CORE_WORLD_H

#include <stdint.h>

#include "daemon/core.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "shm/lookup.h"

struct io;

struct world {
    char dir[64];
    uint64_t now_ns;
    struct core *core;
    struct space *space;
    struct pool *pool; /* the first one */
    int (*wrap_io)(void *arg, const char *store, struct io *io, struct io **ret_io);
    void *wrap_arg;
};

/* `text`: sections of a configuration after [daemon], which is filled in. The caller may have set
 * w->wrap_io. */
void world_open(struct world *w, const char *text);
void world_close(struct world *w);
void world_sleep(struct world *w, uint64_t ms);

/* A session with shared memory, or (0) without, of the engine `token` ("": of its own). */
struct session *world_session(struct world *w, const char *token, uint32_t ring_entries);
struct attach *world_attach(struct session *s, struct pool *p);

struct shm_key world_key(uint64_t i);

/* Reserves, writes a pattern, commits all parts. The reservation's status. */
int world_put(struct attach *a, const struct shm_key *key, const struct shm_key *parent);
int world_reserve(struct attach *a, const struct shm_key *key, const struct shm_key *parent,
                  struct reservation *ret);
int world_commit(struct attach *a, uint64_t ticket, uint32_t part);
bool world_has(struct pool *p, const struct shm_key *key);

/* Pins through the attach's own segment, as a process would. */
bool world_pin(struct attach *a, const struct shm_key *key, struct shm_pinned *ret);
void world_unpin(struct attach *a, const struct shm_pinned *pinned);

/* I4: the sums agree with the slot table, lists, index and tenants. */
void world_check(struct world *w);

#endif
