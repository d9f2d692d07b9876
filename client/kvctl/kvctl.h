/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside kvctl.
 *
 * A command is an entry of the table in kvctl.c, from which usage, help and dispatch are made, and
 * a function here called run_...(). Whatever can fail says why on standard error itself and returns
 * an exit status; EXIT_FINE is 0.
 */
#ifndef KVD_KVCTL_H
#define KVD_KVCTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/control.h"
#include "client/kvd.h"

/* In --help and kvctl(1). */
enum exit_status {
    EXIT_FINE = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_UNREACHABLE = 3,
    EXIT_UNHEALTHY = 4,
    EXIT_NOT_FOUND = 5,
    EXIT_REFUSED = 6,
};

enum {
    OPTIONS_MAX = 16,     /* of one command */
    POOL_NAME_SIZE = 132, /* "SPACE/NAME" */
    KEY_TEXT_SIZE = 80,   /* 64 digits, ':', a group */
    SMALL_TEXT_SIZE = 32, /* sizes and durations */
    TIMEOUT_MAX_S = 86400,
    ANY_NUMBER = -1, /* of arguments */
};

struct option_spec {
    const char *name; /* NULL: the end */
    char letter;      /* 0: none */
    const char *arg;  /* NULL: a flag */
    const char *help;
};

struct ctl;

struct command {
    const char *heading;    /* over this command and those after it; NULL: as before */
    const char *name;       /* one word or two */
    const char *args;       /* for people; NULL: none */
    int min_args, max_args; /* or ANY_NUMBER */
    const char *summary;
    const char *help; /* NULL: the summary says it all */
    const char *example;
    const struct option_spec *options; /* NULL: none */
    int (*run)(struct ctl *c, char **args, int n);
};

/* One run of the program. */
struct ctl {
    const char *socket; /* -s; NULL: look for one */
    bool json;
    bool headers;
    bool color;
    bool help;
    bool version;
    uint32_t timeout_ms; /* of one call */
    bool timeout_given;

    const struct command *command;
    const char *values[OPTIONS_MAX]; /* of command->options; a flag that was given is "" */

    struct control *control;
    bool gave_up; /* the daemon has not answered: do not wait for its good-bye either */
};

/* ---- kvctl.c */

/* The value of an option of the running command; NULL: not given. */
const char *ctl_option(const struct ctl *c, const char *name);

/* Prints "kvctl: sentence" and returns the status. Control characters come out as '?'. */
int ctl_fail(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The same for what is no failure. */
void ctl_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* In place: control characters become '?'. What others have written may contain escape sequences.
 */
void ctl_make_printable(char *text);

_Noreturn void ctl_out_of_memory(void);

/* The one of the names that the word may have been meant to be; NULL: it resembles none. `at(arg,
 * i)` gives the names, NULL at the end. */
const char *ctl_suggest(const char *word, const char *(*at)(const void *arg, size_t i),
                        const void *arg);

/* ---- link.c: talking to the daemon */

struct ctl_failure {
    int error; /* negative errno */
    char socket[108];
    char text[768];
    char missing[256]; /* with -ENOENT: "there is neither A nor B" */
};

/* Where kvctl looks for the daemon: the i-th socket, NULL: no more. */
const char *ctl_socket_at(const struct ctl *c, size_t i);

/* Connects to the first socket that works, silently: 0 or a negative errno, and what was in the
 * way. */
int ctl_try_connect(struct ctl *c, uint32_t timeout_ms, struct ctl_failure *ret_failure);

int ctl_connect(struct ctl *c);
void ctl_disconnect(struct ctl *c);

/* One round trip. On success *ret_reply is to be freed. */
int ctl_call(struct ctl *c, Kvd__Proto__Request *request, Kvd__Proto__Response__BodyCase expect,
             struct control_reply *ret_reply);

/* The exit status that goes with an error of a call or a connection. */
int ctl_status_of(int error);

/* Connects if need be, and asks. */
int ctl_get_status(struct ctl *c, struct control_reply *ret_reply);
int ctl_get_sessions(struct ctl *c, struct control_reply *ret_reply);

struct pool_ref {
    uint32_t id;
    char name[POOL_NAME_SIZE];
    uint64_t slots;
    uint32_t parts;
};

/* "SPACE/NAME" or a number. Connects if need be. */
int ctl_find_pool(struct ctl *c, const char *text, struct pool_ref *ret_pool);

/* Is there such a space in a status? Says so if not. */
int ctl_find_space(const Kvd__Proto__StatusReply *status, const char *name);

void ctl_pool_ref(const Kvd__Proto__PoolInfo *info, struct pool_ref *ret_pool);

/* ---- text.c */

/* "64 KiB", "1.2 GiB" */
void text_size(uint64_t bytes, char buf[static SMALL_TEXT_SIZE]);

/* "5 s", "3 min 5 s", "3 h 12 min", "5 d 2 h" */
void text_duration(uint64_t seconds, char buf[static SMALL_TEXT_SIZE]);

/* 64, 32 or 16 digits: padding beyond those is left out, and parsing puts it back. */
void text_hash(const uint8_t *hash, size_t len, char buf[static KEY_TEXT_SIZE]);

/* "HEX" or "HEX:GROUP", 2 to 64 digits. */
int parse_key(const char *text, struct kvd_key *ret_key);

/* Bytes in hexadecimal; `what` names them in a complaint. */
int parse_hex(const char *what, const char *text, uint8_t *ret, size_t max, size_t *ret_len);

/* A whole number from min to max. */
int parse_number(const char *what, const char *text, uint64_t min, uint64_t max, uint64_t *ret);

/* Bytes: a whole number, and then perhaps K, M, G or T. */
int parse_size(const char *what, const char *text, uint64_t *ret);

/* Seconds, with a fraction if need be; more than 0. */
int parse_seconds(const char *what, const char *text, uint32_t *ret_ms);

/* ---- commands */

int run_status(struct ctl *c, char **args, int n);
int run_ping(struct ctl *c, char **args, int n);
int run_wait(struct ctl *c, char **args, int n);
int run_check(struct ctl *c, char **args, int n);
int run_spaces(struct ctl *c, char **args, int n);
int run_pools(struct ctl *c, char **args, int n);
int run_sessions(struct ctl *c, char **args, int n);
int run_blocks(struct ctl *c, char **args, int n);
int run_why(struct ctl *c, char **args, int n);
int run_stats(struct ctl *c, char **args, int n);
int run_keys(struct ctl *c, char **args, int n);
int run_config_check(struct ctl *c, char **args, int n);
int run_evict(struct ctl *c, char **args, int n);
int run_flush(struct ctl *c, char **args, int n);
int run_kill(struct ctl *c, char **args, int n);
int run_spill(struct ctl *c, char **args, int n);
int run_spill_status(struct ctl *c, char **args, int n);
int run_spill_format(struct ctl *c, char **args, int n);
int run_spill_scrub(struct ctl *c, char **args, int n);
int run_spill_trim(struct ctl *c, char **args, int n);
int run_spill_online(struct ctl *c, char **args, int n);
int run_spill_offline(struct ctl *c, char **args, int n);
int run_spill_sync(struct ctl *c, char **args, int n);
int run_spill_stop(struct ctl *c, char **args, int n);
int run_completion(struct ctl *c, char **args, int n);
int run_version(struct ctl *c, char **args, int n);

#endif
