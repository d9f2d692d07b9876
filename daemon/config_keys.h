/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CONFIG_KEYS_H
#define KVD_DAEMON_CONFIG_KEYS_H

/*
 * Inside the configuration only: the table of keys and what their values look like. config.c knows
 * files, sections and what must fit together.
 */

#include "config.h"

#define CONFIG_WHY_SIZE           512
#define CONFIG_NAMES_MAX          CONFIG_SPACES_MAX
#define CONFIG_KEYS_OF_A_KIND_MAX 24

/* Half of the 128 TiB of user addresses: a writer maps every pool twice. */
#define CONFIG_TOTAL_MAX (64ull << 40)

enum config_kind {
    CONFIG_KIND_DAEMON,
    CONFIG_KIND_SPACE,
    CONFIG_KIND_POOL,
    CONFIG_KIND_SOCKET,
    CONFIG_KIND_TENANT,
    CONFIG_KIND_SPILL,
    CONFIG_KINDS,
};

struct config_choice {
    const char *name; /* NULL: the end */
    uint32_t value;
};

struct config_key {
    const char *name;
    /* Text to field; leaves the field alone when it fails. */
    int (*parse)(const struct config_key *key, const char *text, void *field, char *why);
    size_t offset, size;  /* of the field in the section's struct */
    uint64_t min, max;    /* of numbers, sizes and durations */
    const char *dflt;     /* NULL: all zero, or made by the cross checks */
    const char *excludes; /* the other key of an either-or */
    const struct config_choice *choices;
};

/* `why` is a buffer of CONFIG_WHY_SIZE bytes everywhere. */

/* Always -EINVAL. */
int config_complain(char *why, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Appends which of the names the word may have been meant to be, or, when it resembles none, all.
 */
void config_advise(char *why, const char *word, const char *const *names, size_t n);

/* The number of a kind by its name, or -EINVAL. */
int config_kind_find(const char *name, char *why);

/* "[pool SPACE/NAME]" */
const char *config_kind_header(enum config_kind kind);

/* NULL: there is no such key. */
const struct config_key *config_key_find(enum config_kind kind, const char *name);

/* The i-th key of a kind; NULL: there are only i. */
const struct config_key *config_key_nth(enum config_kind kind, size_t i);

/* The reverse. */
size_t config_key_ordinal(enum config_kind kind, const struct config_key *key);

/* Why there is no such key. */
void config_key_explain(enum config_kind kind, const char *name, char *why);

/* Gives the field of a key in a section's struct its default. */
void config_key_default(const struct config_key *key, void *object);

/* A name of a space, pool or socket? Not NUL-terminated. */
bool config_is_name(const char *text, size_t len);

/* Digits at *p; moves it behind them. */
int config_parse_digits(const char **p, uint64_t *ret, char *why);

/* Water marks are kept as written until the size of the pool is known; this gives slots. */
uint64_t config_resolve_mark(uint64_t mark, uint64_t slots);

const char *config_role_name(uint32_t role);

#endif
