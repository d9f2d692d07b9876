/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CONFIG_H
#define KVD_DAEMON_CONFIG_H

/*
 * The configuration: FILE, then every *.conf of the folder conf.d beside FILE, in the order of
 * their bytes. A later file may open a section of an earlier one again and override single keys;
 * inside one file that is a mistake. kvd.conf(5) is the reference for people; the table in config.c
 * is the only place that knows keys, limits and defaults, and config_key_at() shows it.
 *
 * A configuration that was loaded is complete and consistent: defaults are filled in, cross checks
 * were made, and nothing in it needs checking again. It owns no resources but its own memory.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#ifndef CONFIG_FILE /* set by a build with another prefix */
#define CONFIG_FILE "/etc/kvd/kvd.conf"
#endif

#define CONFIG_SPACES_MAX    64
#define CONFIG_POOLS_MAX     256
#define CONFIG_SOCKETS_MAX   64
#define CONFIG_TENANTS_MAX   1024
#define CONFIG_STORES_MAX    256
#define CONFIG_PATTERNS_MAX  16
#define CONFIG_UIDS_MAX      64

#define CONFIG_NAME_SIZE     64  /* [A-Za-z0-9_-][A-Za-z0-9._-]{0,62} and a NUL */
#define CONFIG_PATH_SIZE     108 /* sun_path */
#define CONFIG_TEXT_SIZE     192
#define CONFIG_HASH_SIZE     32
#define CONFIG_IDENTITY_SIZE 256

enum config_hugepages {
    CONFIG_HUGEPAGES_OFF,
    CONFIG_HUGEPAGES_TRY,
    CONFIG_HUGEPAGES_REQUIRE,
};

enum config_scheme {
    CONFIG_SCHEME_OPAQUE,
    CONFIG_SCHEME_VLLM_SHA256_CBOR,
    CONFIG_SCHEME_VLLM_XXHASH_CBOR,
    CONFIG_SCHEME_SGLANG,
};

/* The numbers of the control protocol. */
enum config_role {
    CONFIG_ROLE_READER = 1,
    CONFIG_ROLE_WRITER = 2,
    CONFIG_ROLE_ADMIN = 3,
};

enum config_policy {
    CONFIG_POLICY_LRU,
};

enum config_admission {
    CONFIG_ADMIT_ALL,          /* every object, when it is committed */
    CONFIG_ADMIT_SECOND_TOUCH, /* what has been used after its commit */
};

/* The numbers of enum io_backend. */
enum config_io {
    CONFIG_IO_AUTO,
    CONFIG_IO_URING,
    CONFIG_IO_THREADS,
};

enum config_register {
    CONFIG_REGISTER_AUTO, /* when the kernel is quick at it: from 6.12 on, on hugepages */
    CONFIG_REGISTER_YES,
    CONFIG_REGISTER_NO,
};

/* The numbers of enum log_target. */
enum config_log_target {
    CONFIG_LOG_AUTO,
    CONFIG_LOG_STDERR,
    CONFIG_LOG_JOURNAL,
};

struct config_daemon {
    char runtime_dir[CONFIG_PATH_SIZE];
    char hugetlbfs[CONFIG_TEXT_SIZE]; /* "": the mount that is found */
    uint32_t hugepages;               /* enum config_hugepages */
    uint32_t populate_threads;        /* 0: see config_populate_threads() */
    uint64_t page_size;               /* of hugepages; 0: the default of the mount or the system */
    uint64_t engine_linger_ns;
    uint64_t quarantine_ns;
    uint64_t core_spin_ns;
    uint64_t max_frame;  /* bytes of one message */
    uint64_t max_inline; /* bytes of data in one message; at least 4,096 less than max_frame */
    uint32_t max_connections;
    uint32_t max_sessions;
    uint32_t ring_entries_max;  /* a power of two */
    uint32_t log_level;         /* LOG_ERR .. LOG_DEBUG of <syslog.h> */
    uint32_t log_target;        /* enum config_log_target */
    uint64_t fetch_deadline_ns; /* of a read from a spill store, unless the client gives another */
    uint64_t fetch_hold_ns;     /* what was fetched is kept so long for who asked */
    uint64_t spill_start_ns;    /* READY waits so long for a store that makes no progress */
    uint64_t stop_flush_ns;     /* SIGTERM: so long for writing what is queued */
    uint32_t digest_threads;    /* 0: two, or one on a machine with one processor */
};

struct config_hash {
    uint32_t len; /* 0: not given */
    uint8_t bytes[CONFIG_HASH_SIZE];
};

struct config_space {
    char name[CONFIG_NAME_SIZE];
    uint32_t scheme; /* enum config_scheme */
    uint32_t block_tokens;
    struct config_hash first_parent;
    struct config_hash vector_key;
    char seed[CONFIG_TEXT_SIZE]; /* "": not given. Never together with first_parent */
    char model[CONFIG_TEXT_SIZE];
    char revision[CONFIG_TEXT_SIZE];
    char dtype[CONFIG_TEXT_SIZE];
    char geometry[CONFIG_TEXT_SIZE];
    uint64_t max_pinned;   /* bytes of a session; 0: no limit */
    uint64_t max_reserved; /* slots of a session; 0: no limit */
};

struct config_pool {
    char name[CONFIG_NAME_SIZE];
    uint32_t space;      /* index in config->spaces */
    uint32_t parts;      /* 1 .. 64 */
    uint64_t slot_bytes; /* parts * part_bytes */
    uint64_t part_bytes; /* a multiple of 4,096 */
    uint64_t slots;
    uint64_t size;       /* slots * slot_bytes */
    uint64_t chunk;      /* wish, bytes: not rounded yet, and it may be less than a slot */
    uint64_t low_water;  /* free slots: below this eviction begins ... */
    uint64_t high_water; /* ... and goes on up to this. low < high, or both 0 in a tiny pool */
    uint32_t policy;     /* enum config_policy */
};

struct config_store {
    char name[CONFIG_NAME_SIZE];
    uint32_t pool; /* index in config->pools */
    char path[CONFIG_TEXT_SIZE];
    uint64_t size;             /* bytes; 0: the whole block device */
    uint32_t admission;        /* enum config_admission */
    uint64_t bandwidth;        /* written bytes per second; 0: no limit */
    uint64_t wear;             /* written bytes per day; 0: no limit */
    uint32_t queue_depth;      /* transfers in flight */
    uint32_t io;               /* enum config_io */
    uint32_t register_buffers; /* enum config_register */
};

struct config_patterns { /* of space names, as for fnmatch() */
    uint32_t count;      /* at least 1 */
    char list[CONFIG_PATTERNS_MAX][CONFIG_NAME_SIZE];
};

struct config_uids {
    uint32_t count; /* 0: any user that the file mode lets in */
    uint32_t list[CONFIG_UIDS_MAX];
};

struct config_socket {
    char name[CONFIG_NAME_SIZE];
    char path[CONFIG_PATH_SIZE];
    uint32_t role;                /* enum config_role */
    uint32_t mode;                /* of the socket file */
    char group[CONFIG_NAME_SIZE]; /* name or number; "": the daemon's own */
    uint32_t max_connections;     /* 1 .. that of [daemon] */
    struct config_patterns spaces;
    struct config_uids uids;
};

struct config_tenant {
    uint32_t tenant;
    uint64_t max_resident; /* bytes; 0: no limit */
    uint64_t max_reserved; /* slots; 0: no limit */
};

struct config {
    struct config_daemon daemon;
    uint32_t space_count; /* at least 1 */
    uint32_t pool_count;
    uint32_t socket_count; /* at least 1 */
    uint32_t tenant_count;
    uint32_t store_count;
    struct config_space spaces[CONFIG_SPACES_MAX];
    struct config_pool pools[CONFIG_POOLS_MAX];
    struct config_socket sockets[CONFIG_SOCKETS_MAX];
    struct config_tenant tenants[CONFIG_TENANTS_MAX]; /* by number; ask config_tenant() */
    struct config_store stores[CONFIG_STORES_MAX];
    struct config_tenant any_tenant; /* of those without a section */
};

struct config_problem {
    bool warning;     /* else an error: the configuration is not taken */
    const char *file; /* valid during the call, as is the text */
    unsigned line;    /* 0: the file as a whole */
    const char *text; /* one line, printable, with advice */
};

typedef void (*config_error_fn)(void *arg, const struct config_problem *problem);

/*
 * Reads everything and reports every problem, in no particular order of files and lines where it
 * takes the whole to see one. `report` may be NULL. Afterwards *ret must be given to config_free().
 *  -EINVAL  at least one error was reported
 *  -ENOENT, -EACCES, ...  `path` could not be read (also reported)
 *  -ENOMEM
 */
int config_load(const char *path, struct config **ret, config_error_fn report, void *arg);

/* The same for one open file, without conf.d; `name` is what problems call it. Does not close it.
 */
int config_load_stream(FILE *f, const char *name, struct config **ret, config_error_fn report,
                       void *arg);

/* NULL is fine. */
void config_free(struct config *config);

/* A config_error_fn: "FILE:LINE: error: TEXT" to the FILE * given as `arg`. */
void config_problem_print(void *arg, const struct config_problem *problem);

/*
 * What an engine must say about itself to open the space: "model=M;revision=R;dtype=D;geometry=G",
 * without the fields that are not configured; "" when none is. Two spaces have the same string only
 * if all four fields are the same. Returns its length. A loaded space fits CONFIG_IDENTITY_SIZE
 * bytes; fewer may be -ENOBUFS.
 */
ssize_t config_space_identity(const struct config_space *space, char *buf, size_t size);

/* "vllm-sha256-cbor" ... */
const char *config_scheme_name(uint32_t scheme);

/* May sessions of this socket open the space? */
bool config_socket_serves(const struct config_socket *socket, const char *space);

/* May this user attach here, as far as `uids` says? */
bool config_socket_admits(const struct config_socket *socket, uint32_t uid);

/* The limits of a tenant, with or without a section of its own. Never NULL. */
const struct config_tenant *config_tenant(const struct config *config, uint32_t tenant);

/* Threads to populate pools with on a machine of so many processors. */
uint32_t config_populate_threads(const struct config_daemon *daemon, uint32_t processors);

/* Threads that hash, on a machine of so many processors. */
uint32_t config_digest_threads(const struct config_daemon *daemon, uint32_t processors);

/* The keys there are: for documentation and its tests. */
struct config_key_info {
    const char *section; /* "daemon" ... */
    const char *key;
    const char *dflt; /* as one would write it; NULL: none */
};

/* false: there are only i keys. */
bool config_key_at(size_t i, struct config_key_info *ret);

#endif
