/* SPDX-License-Identifier: Apache-2.0 */
/* A file, memory, and every backend over them: what the tests of the spill tier's I/O share. */
#ifndef KVD_TESTS_IO_WORLD_H
#define KVD_TESTS_IO_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include <criterion/criterion.h>

#include "daemon/spill/io.h"
#include "daemon/spill/io_sys.h"

#define WORLD_BLOCKS 256u
#define WORLD_BYTES  ((size_t)WORLD_BLOCKS * IO_BLOCK)

struct io_world {
    char dir[64], path[96];
    int fd;              /* O_DIRECT where the file system has it */
    uint8_t *mem, *copy; /* WORLD_BYTES each; only `mem` is a window */
};

void io_world_open(struct io_world *w);
void io_world_close(struct io_world *w);

/* What block n of the file holds after io_world_fill(). */
void io_world_pattern(uint8_t *block, uint32_t n, uint32_t seed);
void io_world_fill(const struct io_world *w, uint32_t seed);
/* How many blocks of `mem` hold another pattern than their own. */
uint32_t io_world_wrong(const uint8_t *mem, uint32_t seed);

struct io_variant {
    const char *name;
    enum io_backend backend;
    uint32_t threads;
    const struct io_sys *sys;
    bool windows, wrapped;
};

extern const struct io_variant io_variants[];
extern const uint32_t n_io_variants;

struct io *io_world_new(const struct io_world *w, const struct io_variant *v, uint32_t depth);

struct io_op io_world_op(const struct io_world *w, bool write, uint32_t block, uint32_t blocks);

/* Waits on the descriptor, as the loop does. */
uint32_t io_world_await(struct io *io, struct io_done *ret, uint32_t max);
/* Submits one, waits for it, answers its result. */
int64_t io_world_run(struct io *io, const struct io_op *op);
bool io_world_readable(int fd);

uint32_t io_world_descriptors(void);

#endif
