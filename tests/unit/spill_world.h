/* SPDX-License-Identifier: Apache-2.0 */
/* A core with spill stores on real files in a folder that outlives it, and a clock that the test moves. */
#ifndef KVD_TESTS_SPILL_WORLD_H
#define KVD_TESTS_SPILL_WORLD_H

#include "core_world.h"
#include "daemon/spill/io.h"
#include "daemon/spill/spill.h"

struct place {
    char dir[64]; /* of the stores */
    struct world w;
    struct session *session;
    struct attach *attach;
};

/* The folder; place_free() removes it with all that is in it. */
void place_new(struct place *p);
void place_free(struct place *p);

/* `text`: a configuration in which each %s stands for the folder (at most three). */
void place_open(struct place *p, const char *text);

/* The same, with `faults` (io_fault_parse(), set before each opening) around every store. */
void place_open_faulty(struct place *p, const char *text, const char *faults);

/* The daemon goes; what it has not written is lost. Checks all invariants. */
void place_close(struct place *p);

/* One turn of the loop, a millisecond of the clock. */
void place_turn(struct place *p);

/* Turns until nothing waits to be written. */
void place_write_all(struct place *p);

/* Everything that can leave ram does. */
void place_drop_ram(struct place *p);

/* Object i with its own bytes and metadata, a child of i - 1 unless i is a multiple of 100. */
int place_put(struct place *p, uint64_t i);
void place_put_all(struct place *p, uint64_t from, uint64_t to);

/* Pins object i and compares bytes and metadata. */
void place_check_object(struct place *p, uint64_t i);

enum shm_found place_find(struct place *p, uint64_t i);

/* Fetches through the ring and waits for the status. */
int place_fetch(struct place *p, uint64_t i);

/* Begins to: 1, or the status. */
int place_ask(struct place *p, uint64_t i, uint64_t tag);

/* The next completion; its tag. */
int place_completion(struct place *p, uint64_t *ret_tag);

struct store *place_store(struct place *p, const char *name);
struct store_status place_status(struct place *p, const char *name);

#endif
