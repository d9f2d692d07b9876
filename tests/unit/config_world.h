/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations as text, and what loading says of them. */
#ifndef KVD_TESTS_CONFIG_WORLD_H
#define KVD_TESTS_CONFIG_WORLD_H

#include "daemon/config.h"

#define SECOND 1000000000ull
#define KIB    (1ull << 10)
#define MIB    (1ull << 20)
#define GIB    (1ull << 30)
#define TIB    (1ull << 40)

/* The least that is a configuration: lines 1 to 4. */
#define MINIMAL "[space s]\n[pool s/p]\nslot = 4K\nslots = 200\n"

/* Three lines of a store in it, in a folder that does not exist. */
#define NOWHERE "/nonexistent/kvd"
#define STORE   "[spill s/p/n]\npath = " NOWHERE "/n\nsize = 64M\n"

struct problem {
    bool warning;
    char file[256];
    unsigned line;
    char text[1024];
};

struct problems {
    unsigned n, errors;
    struct problem list[32]; /* of n, the first */
};

/* A config_error_fn; `arg` is a struct problems. */
void collect(void *arg, const struct config_problem *p);

/* Valid until the next call. */
const char *all_of(const struct problems *p);

int load_bytes(const char *text, size_t bytes, struct config **ret, struct problems *p);
int load(const char *text, struct config **ret, struct problems *p);

/* A configuration without problems. */
struct config *must_load(const char *text);

/* The only problem is in that line and says that. */
void assert_problem(const char *text, bool warning, unsigned line, const char *says);
void assert_error(const char *text, unsigned line, const char *says);

/* A configuration whose last line sets one key. Valid until the next call. */
const char *with(const char *section, const char *key, const char *value);

/* ... is an error that says that. */
void assert_refused(const char *section, const char *key, const char *value, const char *says);

/* The caller frees. */
char *format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* A folder with conf.d in it; config_dir is its path. */
extern char config_dir[];
void make_dir(void);
void remove_dir(void);
void put(const char *name, const char *text);
int load_dir(struct config **ret, struct problems *p);

#endif
