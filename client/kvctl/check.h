/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside `kvctl check`: check.c gathers what is known of the daemon and of the memory it needs, and
 * prints; check_daemon.c and check_system.c judge, each check a function that adds an item or
 * several.
 */
#ifndef KVD_KVCTL_CHECK_H
#define KVD_KVCTL_CHECK_H

#include "daemon/config.h"
#include "out.h"
#include "system.h"

enum check_level {
    CHECK_OK,
    CHECK_SKIP, /* could not be looked at */
    CHECK_WARN,
    CHECK_FAIL,
};

/* A pool's memory, there or still to be made. */
struct check_pool {
    char name[POOL_NAME_SIZE];
    uint64_t slots, part_bytes;
    uint32_t parts;
    uint64_t
        huge_page; /* it stands on hugepages of this size; 0: it does not, or is not made yet */
};

/* A store of a configuration. */
struct check_store {
    char name[POOL_NAME_SIZE + CONFIG_NAME_SIZE]; /* "space/pool/name" */
    char path[CONFIG_TEXT_SIZE];
    uint64_t size; /* 0: a whole device */
    uint32_t io;   /* enum config_io */
};

/* The pools of a configuration, or of the daemon that runs. */
struct check_plan {
    bool known;
    bool made;          /* the daemon has them */
    const char *source; /* "the configuration", ...; for sentences */
    uint32_t hugepages; /* enum config_hugepages */
    uint64_t page_size; /* 0: that of the mount, or the default */
    char hugetlbfs[CONFIG_TEXT_SIZE];
    char runtime_dir[CONFIG_PATH_SIZE];
    size_t n;
    struct check_pool *pools;
    size_t n_stores; /* 0 of a running daemon, which speaks for them itself */
    struct check_store *stores;
};

struct check {
    struct ctl *c;
    struct system system;
    struct json_object *items, *last;
    unsigned counts[CHECK_FAIL + 1];

    bool reachable;
    struct ctl_failure failure;    /* unless reachable */
    struct control_reply status;   /* if reachable, and it answered: else frame is NULL */
    struct control_reply sessions; /* if it may be asked, else frame is NULL */
    struct control_reply stores;   /* if has_stores */
    bool has_stores;
    pid_t daemon_pid; /* as seen from here; 0: unknown */
    uid_t daemon_uid;

    struct check_plan plan;    /* what is to be had: of the configuration if there is one */
    struct check_plan running; /* what the daemon has */
};

/* Adds an item; its fixes follow. */
void check_add(struct check *k, enum check_level level, const char *item, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* A command, or failing that an advice, that mends the last item. */
void check_fix(struct check *k, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* "WHAT; fix: COMMAND; WHAT ELSE; fix: COMMAND" as an item with its fixes. */
void check_add_advice(struct check *k, enum check_level level, const char *item,
                      const char *advice);

/* That the daemon be started, or restarted. */
void check_fix_service(struct check *k, const char *verb);

/* ---- check_daemon.c */

void check_socket(struct check *k);
void check_state(struct check *k);
void check_pins(struct check *k);
void check_sessions(struct check *k);

/* ---- check_stores.c */

void check_stores(struct check *k);
void check_places(struct check *k);
void check_io_uring(struct check *k);

/* ---- check_system.c */

void check_kernel(struct check *k);
void check_pidfd(struct check *k);
void check_hugepages(struct check *k);
void check_hugetlbfs(struct check *k);
void check_memory(struct check *k);
void check_runtime_dir(struct check *k);
void check_memlock(struct check *k);

#endif
