/* SPDX-License-Identifier: Apache-2.0 */
/* A core with spill stores on real files in a folder that outlives it, and a clock that the test moves. */
#ifndef KVD_TESTS_SPILL_WORLD_H
#define KVD_TESTS_SPILL_WORLD_H

#include "core_world.h"
#include "daemon/spill/format.h"
#include "daemon/spill/io.h"
#include "daemon/spill/spill.h"

#define PLACE_ROOT UINT64_MAX /* no parent */
#define PLACE_SEEN 8192u

struct place {
    char dir[64]; /* of the stores */
    struct world w;
    struct session *session;
    struct attach *attach;
    uint64_t (*parent)(uint64_t i); /* NULL: i - 1, none for multiples of 100 */
    const char *faults;             /* as of the next opening of a store; io_fault_parse() */
    const char *faulty;             /* only around the stores whose name has this; NULL: all */
    struct io *io[8];               /* wrapped ones, by store */
    char io_name[8][200];
    bool seen[PLACE_SEEN]; /* was stored when place_count_orphans() looked */
};

/* The folder; place_free() removes it with all that is in it. */
void place_new(struct place *p);
void place_free(struct place *p);

/* `text`: a configuration in which each %s stands for the folder. */
void place_open(struct place *p, const char *text);

/* The same, with `faults` (io_fault_parse()) around every store. */
void place_open_faulty(struct place *p, const char *text, const char *faults);

/* Objects 0 .. n - 1 are in the stores and not in ram; faults from now on. */
void place_open_filled(struct place *p, const char *text, uint64_t n, const char *faults);

/* The daemon goes; what it has not written is lost. Checks all invariants. */
void place_close(struct place *p);

/* All invariants of tier and core. */
void place_check(struct place *p);

/* Whatever hangs in the stores' backends goes on. */
void place_release(struct place *p);

/* One turn of the loop, a millisecond of the clock. */
void place_turn(struct place *p);
void place_turns(struct place *p, int n);

/* A second of the clock in each turn. */
void place_sleep(struct place *p, int seconds);

/* Turns until nothing waits to be written. */
void place_write_all(struct place *p);

/* Turns until nothing is with the devices any more: all slots are free, live or reserved. */
void place_settle(struct place *p);

/* Everything that can leave ram does. */
void place_drop_ram(struct place *p);
void place_drop_pool(struct place *p, struct pool *pool);

/* Object i with its own bytes and metadata. */
int place_put(struct place *p, uint64_t i);
void place_put_all(struct place *p, uint64_t from, uint64_t to);
int place_reserve(struct place *p, uint64_t i, struct reservation *ret);
void place_commit(struct place *p, uint64_t i, const struct reservation *r);

/* Pins object i and compares bytes and metadata. */
void place_check_object(struct place *p, uint64_t i);
bool place_pin(struct place *p, uint64_t i, struct shm_pinned *ret);

enum shm_found place_find(struct place *p, uint64_t i);

/* Object i is in a store, as the daemon sees it. */
bool place_stored(struct place *p, uint64_t i);
uint32_t place_count_stored(struct place *p, uint64_t n);

/* Of 0 .. n - 1: stored ones that have an ancestor which is not, although it was once, or is in ram. (Of a
 * parent that was never here nobody can tell whose it is.) */
uint32_t place_count_orphans(struct place *p, uint64_t n);

/* Fetches through the ring and waits for the status. */
int place_fetch(struct place *p, uint64_t i);

/* Begins to: 1, or the status. */
int place_ask(struct place *p, uint64_t i, uint64_t tag);
int place_ask_of(struct place *p, struct attach *a, uint64_t i, uint64_t tag, uint32_t deadline_ms);

/* The next completion; its tag. */
int place_completion(struct place *p, uint64_t *ret_tag);
int place_completion_of(struct place *p, struct session *s, uint64_t *ret_tag);
bool place_has_completion(const struct session *s);

struct store *place_store(struct place *p, const char *name);
struct store_status place_status(struct place *p, const char *name);
void place_await_state(struct place *p, const char *name, const char *state);

/* Turns until the stores carry the space's epoch. */
void place_await_reset(struct place *p);

/* store_act() that must succeed. */
void place_act(struct place *p, const char *name, enum spill_action action, bool force);

/* ---- the files, behind the daemon's back */

void place_super(struct place *p, const char *file, struct format_super *ret);
void place_read(struct place *p, const char *file, void *buf, size_t n, uint64_t offset);
void place_write(struct place *p, const char *file, const void *buf, size_t n, uint64_t offset);
void place_flip(struct place *p, const char *file, uint64_t offset);

/* A copy as of now, with what is in flight half done. */
void place_copy(struct place *p, const char *from, const char *to);
void place_rename(struct place *p, const char *from, const char *to);

/* A test of `suite` with a place of its own: declares `p`. */
#define PLACE_TEST(suite, name)                                                                    \
    static void name(void);                                                                        \
    Test(suite, name)                                                                              \
    {                                                                                              \
        place_new(&p);                                                                             \
        name();                                                                                    \
        place_free(&p);                                                                            \
    }                                                                                              \
    static void name(void)

/* For p->parent: no object has one. */
uint64_t place_no_parent(uint64_t i);

/* Opens, and stores objects 0 .. n - 1 without parents; then goes, too. */
void place_fill(struct place *p, const char *text, uint64_t n);
void place_make_store(struct place *p, const char *text, uint64_t n);

/* Fetches them all; those that come are right. How many. */
uint32_t place_fetch_all(struct place *p, uint64_t n);

#endif
