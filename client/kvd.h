/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd: the KV cache of a language model, shared by all worker processes of a host.
 *
 * This header is the whole public interface. It needs C11 or C++11, no macro and no inline
 * function, so every call can be made through a foreign-function interface as well.
 *
 * A worker connects to the daemon (kvd_connect), opens a *space* (one model on one trust domain)
 * and finds the space's *pools* (shared memory cut into equal slots; one pool per object size).
 * Then
 *
 *     reading:    kvd_pin() the keys of a prompt's prefix, read the slots in place,
 *                 kvd_pinset_release(); kvd_fetch() first what kvd_lookup() calls KVD_NVME
 *     publishing: kvd_reserve() slots for new keys, write them, kvd_commit()
 *
 * The words are those of docs/design.md: *key*, *chain*, *block*, *snapshot*, *object*, *slot*,
 * *part*, *pin*, *epoch*. One fact rules the interface: keys and values of a token depend on every
 * token before it, so a key names a block *and everything before it*, and only an unchanged prefix
 * can be reused.
 *
 * ERRORS. Functions return 0 or a count on success and a negative errno on failure; out-parameters
 * (ret_*) are untouched on failure. kvd_last_error() has the sentence for people. Everywhere:
 *     -ECHILD   the handle was made before a fork() and this is the child: connect anew
 *     -EINVAL   an argument is out of range
 *     -ENOTCONN the daemon is away (reads of pinned and resident objects go on without it)
 *     -ETIMEDOUT the daemon, or another thread that talks to it, took longer than
 *     kvd_options.timeout_ms (kvd_fetch() has a deadline of its own on top)
 *     -EPROTO   what the daemon says makes no sense
 *     -ESTALE   the space's epoch has moved on (weights changed), or another daemon has taken over:
 *               call kvd_space_refresh() when your weights are the new ones
 *
 * THREADS. A handle (struct kvd) may be used by several threads at once: kvd_lookup(), kvd_pin()
 * and kvd_pinset_release() never lock (they are shared-memory loads and one atomic per key); calls
 * that talk to the daemon take a mutex inside the handle. A pinset, a hasher and a copier's
 * submitting side belong to one thread at a time. kvd_space_refresh() and kvd_space_close() must
 * not run beside any other call on the same space or its pools, kvd_close() not beside any other
 * call on the handle or anything made from it. The library starts no thread, installs no signal
 * handler and prints nothing.
 *
 * SYSTEM CALLS. kvd_lookup, kvd_pin, kvd_pinset_release, kvd_pinset_data, kvd_observe and
 * kvd_completions make none. kvd_submit_*, kvd_reserve, kvd_commit and kvd_fetch make at most one per batch
 * (the wake-up of a sleeping daemon; of a batch longer than the ring, per ringful) as long as the
 * answer comes within kvd_options.spin_us; after that they poll. Making good for lost connections
 * and timeouts costs more.
 *
 * MEMORY. Addresses of a slot are base + slot * stride, per part, and stay fixed until
 * kvd_space_refresh() or kvd_space_close(). Reads go through read-only mappings: a stray write
 * through a pointer from kvd_pinset_data() faults instead of corrupting someone's cache. All
 * mappings are MADV_DONTFORK: a forked child does not have them, and functions that return
 * addresses return NULL there.
 */
#ifndef KVD_H
#define KVD_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions */

/* "MAJOR.MINOR.PATCH" of the library linked at run time. */
const char *kvd_version(void);

/* ---- keys */

/* Names an object and everything before it. Shorter hashes are zero-padded at the end. `group` is
 * the engine's layer group, 0 when it has only one. 36 bytes, no padding. */
struct kvd_key {
    uint8_t hash[32];
    uint32_t group;
};

/* ---- connecting */

struct kvd;       /* one session: an attached process */
struct kvd_space; /* one opened space of a session */
struct kvd_pool;  /* one pool of an opened space; owned by the space */

struct kvd_options {
    size_t size;        /* sizeof(struct kvd_options), as told to kvd_options_init() */
    const char *socket; /* path; NULL: $KVD_SOCKET, else /run/kvd/kvd.sock */
    const char *client; /* shown by `kvctl sessions`; NULL: the program's name */
    /* Sessions that give the same bytes (at most 64) are one engine: they may use each other's
     * tickets, and a dead member's pins linger. */
    const void *engine_token;
    size_t engine_token_len;
    uint32_t timeout_ms; /* of one round trip to the daemon; default 10,000 */
    uint32_t spin_us;    /* kvd_reserve/kvd_commit wait so long without a system call; 100 */
    /* Requests in flight per session, a power of two, 16 to 16,384; default 1,024. The daemon may
     * give less. */
    uint32_t ring_entries;
    uint32_t flags; /* KVD_NO_SHM */
};

enum {
    /* Map nothing. The kvd_remote_* calls, kvd_abort() and those on handles and spaces work; what
     * needs memory or rings answers -EOPNOTSUPP: kvd_lookup, kvd_pin, kvd_observe, kvd_fetch,
     * kvd_fetch_cancel, kvd_reserve, kvd_commit, kvd_submit_*, kvd_drain. */
    KVD_NO_SHM = 1 << 0,
};

/* Fills in the defaults. Call it before setting fields, with sizeof(*options): a later library,
 * whose struct has more fields at its end, then knows how far yours goes. */
void kvd_options_init(struct kvd_options *options, size_t size);

/* Attaches this process. `options` may be NULL (defaults). The handle must be closed with
 * kvd_close().
 * -ENOENT/-ECONNREFUSED: no daemon at that socket; -EACCES: the socket's mode forbids it; -EPROTO:
 * that is not kvd or no common version; -EPERM: refused (foreign pid namespace, uid not allowed);
 * -EUSERS: the socket's connection limit. On failure the reason is in kvd_last_error(NULL) of this
 * thread. */
int kvd_connect(const struct kvd_options *options, struct kvd **ret_kvd);

/* Releases every pin, aborts every reservation of this session, unmaps, detaches, frees its spaces.
 * NULL is fine. Waits for the daemon for at most a second. Pointers into slots are invalid
 * afterwards; pinsets are empty and must still be freed. In a forked child it frees memory only
 * (kvd_space_close() does nothing there). */
void kvd_close(struct kvd *kvd);

/* The last failure on this handle as a sentence with advice; never NULL. NULL handle: of the
 * calling thread's last failed kvd_connect(). Valid until the calling thread's next
 * kvd_last_error(), or kvd_connect() respectively. */
const char *kvd_last_error(const struct kvd *kvd);

/* One round trip to the daemon (reconnects if need be): 0, or why not. */
int kvd_ping(struct kvd *kvd);

/* Readable when the daemon has sent something: poll it, then call kvd_drain(). Owned by the handle.
 * While the daemon is away it stays at the end of its stream; it changes when the library
 * reconnects, which only happens inside calls that talk to the daemon. */
int kvd_event_fd(const struct kvd *kvd);

/* Returns the number of completions that kvd_completions() would deliver. Only if there is none,
 * reads pending wake-ups, without blocking, and asks to be woken for the next completion: after 0
 * poll kvd_event_fd(), which will become readable even if another thread's call reads the wake-up
 * (then when that call is done). One thread at a time. -ENOTCONN: the connection is lost; call
 * kvd_ping(), and take the new kvd_event_fd(). */
ssize_t kvd_drain(struct kvd *kvd);

/* ---- spaces */

struct kvd_space_options {
    size_t size; /* sizeof(struct kvd_space_options), as told to kvd_space_options_init() */
    /* The key scheme this worker uses, e.g. "vllm-sha256-cbor"; NULL: opaque keys. With a scheme,
     * the bytes before the first block (at most 32, may be empty) and the key of one block of
     * tokens 1..block_tokens (at most 32 bytes) are compared with the space's. A mismatch refuses:
     * silently different keys are a 0 % hit rate. */
    const char *scheme;
    const void *first_parent;
    size_t first_parent_len;
    const void *vector_key;
    size_t vector_key_len;
    /* Model, revision, dtype, geometry; must equal the configured one. NULL: not compared. */
    const char *identity;
    uint64_t part_mask; /* parts to map; default all. 0: none, for those who only look and pin */
    uint32_t write;     /* 1: also map writable, reserve, commit; needs the role writer. 0 */
};

void kvd_space_options_init(struct kvd_space_options *options, size_t size);

/* Opens a space by name and maps its pools. `options` may be NULL. -ENOENT: no such space on this
 * socket; -EACCES: role; -EPROTOTYPE: scheme, test vector or identity differ (the message says
 * how). */
int kvd_space_open(struct kvd *kvd, const char *name, const struct kvd_space_options *options,
                   struct kvd_space **ret_space);

/* Lets go of the space. NULL is fine. Pinsets keep what they have pinned, and can read it: memory
 * with pins in it stays mapped at least until they are released. */
void kvd_space_close(struct kvd_space *space);

/* The epoch this handle works under. Objects of another epoch are never hit. */
uint32_t kvd_space_epoch(const struct kvd_space *space);

/* The weights have changed: everything stored so far becomes unreachable, for everybody. Role
 * writer. The caller's handle moves to the new epoch; other handles get -ESTALE until
 * kvd_space_refresh(). */
int kvd_space_reset(struct kvd_space *space, uint32_t *ret_epoch);

/* Moves this handle to the space's current epoch, and, after a daemon restart, to the new daemon's
 * memory. Base addresses may change; pools keep their struct kvd_pool. Slots that are still pinned
 * stay mapped at least until they are released. On failure the space stays as it was: -ENOENT: a
 * pool is gone;
 * -EPROTOTYPE: the size or number of a pool's parts has changed (or as for kvd_space_open()). */
int kvd_space_refresh(struct kvd_space *space);

/* Is the handle current? 0, -ESTALE (see kvd_space_refresh). No system call; so with KVD_NO_SHM it
 * only repeats what the daemon has said last. */
int kvd_space_current(const struct kvd_space *space);

/* ---- pools */

struct kvd_pool_info {
    uint64_t slots;
    uint64_t slot_bytes;  /* parts * part_bytes */
    uint64_t part_bytes;  /* stride of a part: address = base(part) + slot * part_bytes */
    uint64_t chunk_slots; /* a chunk is one mapping: register these ranges with a device */
    uint64_t page_bytes;  /* of the memory behind it; the largest, if chunks differ */
    uint32_t parts;
    uint32_t chunks;
    char name[64];
    char backing[32]; /* "hugetlbfs", "memfd-hugetlb", "tmpfs", "memfd" */
    uint64_t records; /* objects that its spill stores can hold; 0: it has none */
};

/* NULL name: the first pool. The pool belongs to the space. -ENOENT. */
int kvd_pool_get(struct kvd_space *space, const char *name, struct kvd_pool **ret_pool);

void kvd_pool_info(const struct kvd_pool *pool, struct kvd_pool_info *ret_info);

/* First byte of slot 0 of a part, read-only; NULL when the part is not mapped. The addresses of all
 * slots are contiguous, although the memory is made of chunks. */
const void *kvd_pool_base(const struct kvd_pool *pool, uint32_t part);

/* The same, writable (space opened with `write`), at another address. Only slots that are reserved
 * by this engine may be written. */
void *kvd_pool_base_rw(const struct kvd_pool *pool, uint32_t part);

/* ---- finding and pinning */

enum kvd_state {
    KVD_MISS = 0,
    KVD_RAM = 1,     /* resident: can be pinned */
    KVD_NVME = 2,    /* spilled: must be fetched first */
    KVD_PENDING = 3, /* reserved by a writer, not committed yet */
};

/* A state per key and the number of leading keys that are cached (ram or nvme). Pins nothing, never
 * waits. With `ret_states` (n bytes, enum kvd_state) all keys are looked at; with NULL it stops at
 * the first that is not cached. */
ssize_t kvd_lookup(const struct kvd_pool *pool, const struct kvd_key *keys, size_t n,
                   uint8_t *ret_states);

struct kvd_pinset; /* the pins of one request */

/* One pinned object. */
struct kvd_ref {
    uint32_t slot;  /* UINT32_MAX: not pinned (only with KVD_PIN_ALL) */
    uint32_t view;  /* which mapping the slot is in; used by kvd_pinset_data() */
    uint64_t bytes; /* committed length of one part */
};

/* A pinset grows as needed; `capacity` (a hint, may be 0) avoids allocation later. */
int kvd_pinset_new(struct kvd *kvd, size_t capacity, struct kvd_pinset **ret_pinset);

/* Releases and frees. NULL is fine. */
void kvd_pinset_free(struct kvd_pinset *pinset);

enum {
    KVD_PIN_ALL = 1 << 0, /* do not stop at the first miss: missing ones get slot UINT32_MAX */
};

/* Pins keys in order and appends them to the pinset, stopping at the first key that is not
 * resident. Returns how many were pinned (with KVD_PIN_ALL: how many of the n; n references are
 * appended). A pinned slot keeps its bytes until it is released, whatever the daemon does. Objects
 * of several pools (blocks and the snapshot to resume from) of one handle may share a pinset.
 * -ENOMEM pins nothing. */
ssize_t kvd_pin(struct kvd_pinset *pinset, struct kvd_pool *pool, const struct kvd_key *keys,
                size_t n, uint32_t flags);

size_t kvd_pinset_count(const struct kvd_pinset *pinset);

/* All references, in the order of pinning; valid until the next kvd_pin() or release. */
const struct kvd_ref *kvd_pinset_refs(const struct kvd_pinset *pinset);

/* Address of a part of the i-th pinned object; NULL when i is out of range, not pinned, or the part
 * is not mapped. */
const void *kvd_pinset_data(const struct kvd_pinset *pinset, size_t i, uint32_t part);

/* Releases the references from index `keep` on. */
void kvd_pinset_truncate(struct kvd_pinset *pinset, size_t keep);

/* Releases all; the pinset can be used again. */
void kvd_pinset_release(struct kvd_pinset *pinset);

/* What the writer said about an object. */
struct kvd_meta {
    uint64_t position;     /* of the first token of a block; of the last token of a snapshot */
    uint64_t layout;       /* digest of the byte layout; readers compare it with their own */
    uint64_t checksum;     /* XXH3-64 of the bytes if the writer gave one, else 0 */
    struct kvd_key parent; /* valid if has_parent */
    uint32_t has_parent;
    uint32_t tenant;
    uint32_t user_bytes; /* <= 128 */
    uint8_t user[128];
};

/* Metadata of the i-th pinned object. -ENOENT when it is not pinned. */
int kvd_pinset_meta(const struct kvd_pinset *pinset, size_t i, struct kvd_meta *ret_meta);

/* Tells the cache of uses it could not see (the engine hit in its own memory), from any position of
 * a chain. Never wakes the daemon, may be dropped under load. Returns how many keys were taken. */
ssize_t kvd_observe(struct kvd_pool *pool, const struct kvd_key *keys, size_t n);

/* ---- bringing back from the spill store */

struct kvd_fetch {
    const struct kvd_key *keys; /* head first */
    size_t n;
    uint32_t chain; /* 1: once a key cannot be had, the rest is not tried and has its status */
    uint32_t deadline_ms; /* past it an object is a miss; 0: the daemon's default */
};

/* Makes keys that are in a spill store resident, and waits until each is, or cannot be. Destinations
 * for all of them are taken at once, head first; when no more slots can be had, the rest is -ENOSPC.
 * (More than kvd_options.ring_entries / 2 keys go to the daemon in several goes.) What is resident
 * afterwards (also what was before) is held for this session until it is pinned, for some seconds at
 * most: pin it now. Two who ask for the same object share one read.
 * `ret_status` (n entries): 0 resident; -ENOENT in no tier; -ENOSPC; -ETIMEDOUT; -EIO it could not be
 * read back as it was written and is not stored any more; -EINPROGRESS a writer has reserved it;
 * -EDQUOT; -ESTALE; -ECANCELED. Returns how many are resident. It takes up to deadline_ms, or if that
 * is 0 up to 60 seconds per go, plus kvd_options.timeout_ms; other threads may use the handle
 * meanwhile. After an error of the call as a whole (-ENOTCONN, -ETIMEDOUT, -ESTALE) keys that were not
 * answered have it as their status. Needs no `write`. */
ssize_t kvd_fetch(struct kvd_pool *pool, const struct kvd_fetch *request, int32_t *ret_status);

/* The same without waiting: each key that was accepted produces one completion with user_data + its
 * index, whose status is as above. Returns how many were accepted, in order (see
 * kvd_submit_reserve); fetches take at most half of the ring. A chain ends with what was accepted: the
 * rest, submitted later, is another one. */
ssize_t kvd_submit_fetch(struct kvd_pool *pool, const struct kvd_fetch *request,
                         uint64_t user_data);

/* Gives up fetches that were submitted with user_data in [user_data, user_data + n): those that are
 * under way complete with -ECANCELED, and what is held for completed ones is let go (of at least the
 * last 2 * kvd_options.ring_entries; older ones the daemon lets go by itself). Returns 0; it does not
 * matter whether they were still under way. -ETIMEDOUT, -ENOTCONN: not all could be told to the
 * daemon. */
int kvd_fetch_cancel(struct kvd_pool *pool, uint64_t user_data, size_t n);

/* ---- publishing */

enum kvd_reserved {
    KVD_NEW = 1,         /* yours to write and commit: slot and ticket are set */
    KVD_IN_PROGRESS = 2, /* another writer has it: do not compute it for the cache */
    KVD_PRESENT = 3,     /* already stored, in ram or on nvme */
};

struct kvd_reservation {
    /* enum kvd_reserved, or a negative errno: -ENOSPC nothing evictable, -EDQUOT quota, -ESTALE
     * epoch. */
    int32_t status;
    uint32_t slot;   /* with KVD_NEW */
    uint64_t ticket; /* with KVD_NEW; any session of the same engine may use it */
};

struct kvd_reserve {
    const struct kvd_key *keys;
    size_t n;
    const struct kvd_key *parent; /* of keys[0]; NULL: unknown or none */
    uint32_t chain;               /* 1: keys[i-1] is the parent of keys[i] */
    uint32_t tenant;
};

/* Reserves slots for n keys, in order; one reservation per key in `ret` (n entries). Returns how
 * many are KVD_NEW. Waits for the daemon's answer. -EACCES: the space was opened without `write`.
 * An error of the call as a whole (-ENOTCONN, -ETIMEDOUT, -ESTALE) is also the status of every
 * entry, and leaves nothing reserved for long: what had been granted, or is granted too late, is
 * given back with one of the next calls that talk to the daemon, or ends with the session. */
ssize_t kvd_reserve(struct kvd_pool *pool, const struct kvd_reserve *request,
                    struct kvd_reservation *ret);

/* Where to write a part of a reserved slot. NULL when not mapped writable. */
void *kvd_slot_rw(const struct kvd_pool *pool, uint32_t slot, uint32_t part);

/* Holds a reserved slot (KVD_NEW) before it is committed, and appends it to the pinset: for a
 * writer that computes in place and goes on reading after the commit. Without this, the object
 * could be evicted between its commit and a kvd_pin(). The reference's `bytes` is the part's
 * stride. If the commit fails, the slot is not yours any more: release the reference and do not
 * read it. -EINVAL: not KVD_NEW, or no such slot. */
int kvd_pin_reserved(struct kvd_pinset *pinset, struct kvd_pool *pool,
                     const struct kvd_reservation *reservation);

struct kvd_commit {
    uint64_t ticket;
    uint32_t part;
    uint32_t user_bytes; /* <= 128 */
    uint64_t bytes;      /* written to this part, 1..part_bytes; the same for all parts */
    uint64_t position;
    uint64_t layout;
    uint64_t checksum; /* 0: none */
    const void *user;  /* copied; the part that is committed last decides the metadata */
    int32_t status;    /* out: 0, -ESTALE (epoch, or the ticket is gone), -EINVAL, ... */
    uint32_t reserved; /* 0 */
};

/* Commits n parts and waits for the answer. An object is visible to everybody when its last part is
 * in, before that to nobody. Returns how many succeeded; each entry's status tells. After an error
 * of the call as a whole (-ENOTCONN, -ETIMEDOUT) entries that were not answered have it as their
 * status: such a part may or may not be in, and may be committed again. -EINVAL as a whole: nothing
 * was committed. */
ssize_t kvd_commit(struct kvd_pool *pool, struct kvd_commit *commits, size_t n);

/* Gives reserved slots back, for somebody else to write at once: no session of the engine, and no device
 * that it has started, may still be writing into them. Unknown tickets are ignored. Returns how many
 * were given back. */
ssize_t kvd_abort(struct kvd_pool *pool, const uint64_t *tickets, size_t n);

/* The same without waiting: answers arrive as completions. Each key or commit that was accepted
 * produces exactly one completion with user_data + its index; with status -ENOTCONN if the daemon
 * is found to be away before it has answered (a slot it grants later is given back). Returns how
 * many were accepted, in order: at most kvd_options.ring_entries can be in flight or uncollected,
 * so it may be 0: collect completions first. */
ssize_t kvd_submit_reserve(struct kvd_pool *pool, const struct kvd_reserve *request,
                           uint64_t user_data);
ssize_t kvd_submit_commit(struct kvd_pool *pool, const struct kvd_commit *commits, size_t n,
                          uint64_t user_data);

struct kvd_completion {
    uint64_t user_data;
    int32_t status; /* as in kvd_reservation or kvd_commit */
    uint32_t slot;
    uint64_t ticket;
};

/* Takes up to n completions from the ring, without a system call and without waiting. */
ssize_t kvd_completions(struct kvd *kvd, struct kvd_completion *ret, size_t n);

/* ---- copying */

/* memcpy with streaming stores where the processor has them: for filling slots that this core will
 * not read soon. Any alignment. The bytes are visible to a kvd_commit() made afterwards by this
 * thread. */
void kvd_copy_in(void *dst, const void *src, size_t bytes);

struct kvd_copier; /* a queue of copies, worked off by threads that the caller starts */

enum kvd_copy_op {
    KVD_PUT = 1, /* gather iov -> slot memory, streaming stores */
    KVD_GET = 2, /* slot memory -> scatter iov */
};

struct kvd_copy {
    uint32_t op; /* enum kvd_copy_op */
    int32_t iovcnt;
    const struct iovec *iov; /* stays valid until the copy is done, as does the memory behind it */
    void *slot;              /* from kvd_slot_rw() for a put; kvd_pinset_data() (cast) for a get */
    uint64_t bytes;          /* = sum of the iovecs */
    uint64_t user_data;
};

struct kvd_copied {
    uint64_t user_data;
    int64_t status; /* bytes copied or a negative errno */
};

/* A queue for up to `depth` copies (submitted, running or not yet drained). */
int kvd_copier_new(uint32_t depth, struct kvd_copier **ret_copier);

/* All threads must have left kvd_copier_run(). NULL is fine. */
void kvd_copier_free(struct kvd_copier *copier);

/* Body of a copying thread: works until kvd_copier_stop(). Any number of threads. */
int kvd_copier_run(struct kvd_copier *copier);

/* Lets running copies end and every kvd_copier_run() return; queued copies complete with
 * -ECANCELED. */
void kvd_copier_stop(struct kvd_copier *copier);

/* Queues copies; returns how many were taken (less than n: full, drain first). -EINVAL: one of them
 * makes no sense (no bytes, iovecs that do not add up), and none was taken; -ECANCELED: stopped. */
ssize_t kvd_copier_submit(struct kvd_copier *copier, const struct kvd_copy *copies, size_t n);

/* Takes up to n results; never waits. */
ssize_t kvd_copier_drain(struct kvd_copier *copier, struct kvd_copied *ret, size_t n);

/* An eventfd that is readable while results wait to be drained: poll it, never read it. Owned by
 * the copier. */
int kvd_copier_event_fd(const struct kvd_copier *copier);

/* ---- without shared memory */

/* The same answers through the socket, for programs that map nothing (KVD_NO_SHM) or tools. Bytes
 * are copied; an object larger than the daemon's inline limit is moved in pieces. */
ssize_t kvd_remote_lookup(struct kvd_pool *pool, const struct kvd_key *keys, size_t n,
                          uint8_t *ret_states);
/* As kvd_fetch(). Other threads' calls to the daemon wait meanwhile: for up to 1,024 keys at a time. */
ssize_t kvd_remote_fetch(struct kvd_pool *pool, const struct kvd_fetch *request,
                         int32_t *ret_status);
/* Copies one part of an object into buf; returns its committed length (which may exceed `bytes`:
 * then only that much was copied). What is in a spill store is fetched first. -ENOENT: a miss; other
 * statuses as of kvd_fetch(). `ret_meta` may be NULL. */
ssize_t kvd_remote_get(struct kvd_pool *pool, const struct kvd_key *key, uint32_t part, void *buf,
                       size_t bytes, struct kvd_meta *ret_meta);
/* Stores an object of one part: reserve, write, commit. 0; -EEXIST: present or in progress. `meta`
 * may be NULL. */
int kvd_remote_put(struct kvd_pool *pool, const struct kvd_key *key, const struct kvd_meta *meta,
                   const void *buf, size_t bytes);

/* ---- key schemes */

/*
 * Computes the keys of a token sequence block by block. Hash once, extend incrementally: hashing a
 * chain costs more than finding it. Schemes:
 *   "vllm-sha256-cbor"  h = SHA-256(canonical CBOR of [parent, [tokens...], extra])
 *   "vllm-xxhash-cbor"  the same with XXH3-128 (16 big-endian bytes)
 *   "sglang"            p = SHA-256(parent || each token as little-endian u32)
 * Source: vLLM v1 kv_cache_utils (hash_block_tokens), SGLang HiCache (hash of a page).
 * kvd never guesses an engine's keys: the first parent is negotiated, not assumed.
 */
struct kvd_hasher;

struct kvd_mm_item { /* a multimodal item of a vLLM request */
    const char *identifier;
    uint64_t offset; /* first token position it covers */
    uint64_t length; /* tokens */
};

struct kvd_hasher_options {
    size_t size; /* sizeof(struct kvd_hasher_options), as told to kvd_hasher_options_init() */
    const char *scheme;
    uint32_t block_tokens; /* default 16 */
    uint32_t group;        /* copied into every key */
    /* vllm: either the text whose hash is the first parent (NULL with sha256: "vllm-none-hash"), or
     * the negotiated bytes themselves, 16 or 32. */
    const char *seed;
    const void *first_parent;
    size_t first_parent_len;
    const char *cache_salt;       /* NULL: none */
    const char *extra_key;        /* sglang; NULL: none */
    const char *lora;             /* vllm: LoRA name; NULL: none */
    const struct kvd_mm_item *mm; /* vllm, sorted by offset; copied */
    size_t mm_count;
};

void kvd_hasher_options_init(struct kvd_hasher_options *options, size_t size);

/* -ENOTSUP: unknown scheme; -EINVAL: xxhash without seed or first_parent, bad sizes. */
int kvd_hasher_new(const struct kvd_hasher_options *options, struct kvd_hasher **ret_hasher);
void kvd_hasher_free(struct kvd_hasher *hasher);

/* Appends tokens; keys are made for full blocks only. Returns the number of keys so far. */
ssize_t kvd_hasher_append(struct kvd_hasher *hasher, const uint32_t *tokens, size_t n);

/* Cuts the sequence back to its first `tokens` tokens (an edit); keys of whole blocks before
 * stay. */
int kvd_hasher_truncate(struct kvd_hasher *hasher, size_t tokens);

/* The chain so far; valid until the next append or truncate, and NULL perhaps when it is empty. */
const struct kvd_key *kvd_hasher_keys(const struct kvd_hasher *hasher, size_t *ret_n);

/* Tokens appended so far, whole blocks or not. */
size_t kvd_hasher_tokens(const struct kvd_hasher *hasher);

/* The bytes before the first block, for kvd_space_options.first_parent: copies up to `bytes`,
 * returns their number (0: this scheme has no first parent). */
size_t kvd_hasher_first_parent(const struct kvd_hasher *hasher, void *buf, size_t bytes);

/* The key of a fresh chain's block of tokens 1..block_tokens without salt, LoRA or items: the
 * vector that kvd_space_open() exchanges. */
int kvd_hasher_vector(const struct kvd_hasher *hasher, struct kvd_key *ret_key);

#ifdef __cplusplus
}
#endif
#endif
