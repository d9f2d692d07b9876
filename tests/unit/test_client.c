/* SPDX-License-Identifier: Apache-2.0 */
/* The library against a compact daemon: sessions, spaces, the data path, and everything that can
 * come back wrong. */
#define _GNU_SOURCE
#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/control.h"
#include "client/kvd.h"
#include "fake_daemon.h"

#define PAGE 4096u

static struct fake *f;
static struct kvd *kvd;
static struct kvd_space *space;
static struct kvd_pool *pool, *snapshots;

static void setup(void)
{
    alarm(60); /* a hang is a failure, too */
    f = fake_start();
}

static void teardown(void)
{
    kvd_close(kvd);
    fake_stop(f);
}

static struct kvd_options options(void)
{
    struct kvd_options o;

    kvd_options_init(&o, sizeof(o));
    o.socket = f->path;
    o.ring_entries = 16;
    return o;
}

static void attach(void)
{
    struct kvd_options o = options();

    cr_assert_eq(kvd_connect(&o, &kvd), 0, "%s", kvd_last_error(NULL));
}

static int open_with(uint64_t mask, uint32_t write)
{
    struct kvd_space_options o;

    kvd_space_options_init(&o, sizeof(o));
    o.part_mask = mask;
    o.write = write;
    return kvd_space_open(kvd, "model", &o, &space);
}

static void open_all(void)
{
    attach();
    cr_assert_eq(open_with(UINT64_MAX, 1), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, NULL, &pool), 0);
    cr_assert_eq(kvd_pool_get(space, "snapshots", &snapshots), 0);
}

static struct kvd_key key_of(unsigned n)
{
    struct kvd_key key = {.group = n & 1};

    memset(key.hash, 7, sizeof(key.hash));
    memcpy(key.hash + 16, &n, sizeof(n)); /* equal in their first 16 bytes */
    return key;
}

static void chain(struct kvd_key *keys, unsigned first, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        keys[i] = key_of(first + i);
}

static void store(unsigned which, unsigned first, unsigned n, uint64_t bytes)
{
    for (unsigned i = 0; i < n; i++) {
        struct kvd_key key = key_of(first + i), parent = key_of(first + i - 1);

        fake_store(f, which, (struct shm_key *)&key, i ? (struct shm_key *)&parent : NULL, bytes);
    }
}

static unsigned seen(const unsigned *counter)
{
    unsigned n;

    pthread_mutex_lock(&f->lock);
    n = *counter;
    pthread_mutex_unlock(&f->lock);
    return n;
}

/* Waits for what the other thread will do for certain; the alarm ends a wait for what it will not.
 */
static void until(const unsigned *counter, unsigned n)
{
    while (seen(counter) < n)
        sched_yield();
}

static void set_mute(uint64_t mute)
{
    pthread_mutex_lock(&f->lock);
    f->mute = mute;
    pthread_mutex_unlock(&f->lock);
}

static void set_by_hand(bool by_hand)
{
    pthread_mutex_lock(&f->lock);
    f->by_hand = by_hand;
    pthread_mutex_unlock(&f->lock);
    fake_nudge(f);
}

static void set_resume(bool may)
{
    pthread_mutex_lock(&f->lock);
    f->may_resume = may;
    pthread_mutex_unlock(&f->lock);
}

static void set_raw(const void *bytes, size_t n)
{
    pthread_mutex_lock(&f->lock);
    f->raw = bytes;
    f->raw_bytes = n;
    pthread_mutex_unlock(&f->lock);
}

typedef void tweak_fn(struct fake *, Kvd__Proto__Response *, int *, unsigned *);

static void set_tweak(tweak_fn *tweak, unsigned pick)
{
    pthread_mutex_lock(&f->lock);
    f->tweak = tweak;
    f->tweak_pick = pick;
    pthread_mutex_unlock(&f->lock);
}

/* While the daemon stands still: descriptors on their way are duplicated for a moment. */
static unsigned open_fds(void)
{
    unsigned n = 0;

    pthread_mutex_lock(&f->lock);
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    pthread_mutex_unlock(&f->lock);
    return n;
}

/* ---- connecting */

TestSuite(client_connect, .init = setup, .fini = teardown);

Test(client_connect, hello_and_bye)
{
    struct kvd_options o = options();

    o.client = "tester 1";
    o.engine_token = "token";
    o.engine_token_len = 5;
    cr_assert_eq(kvd_connect(&o, &kvd), 0, "%s", kvd_last_error(NULL));
    cr_assert_eq(seen(&f->hellos), 1);
    cr_assert_str_eq(f->client, "tester 1");
    cr_assert_eq(f->token_len, 5);
    cr_assert_eq(f->cookie_len, 0);
    cr_assert_neq(f->start_time, 0);
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert(fcntl(kvd_event_fd(kvd), F_GETFD) & FD_CLOEXEC);
    cr_assert_str_eq(kvd_last_error(kvd), "no error");
    kvd_close(kvd);
    kvd = NULL;
    cr_assert_eq(seen(&f->byes), 1);
}

Test(client_connect, start_time_is_that_of_the_kernel)
{
    char text[512], *p;
    FILE *file = fopen("/proc/self/stat", "r");

    cr_assert_neq(fgets(text, sizeof(text), file), NULL);
    fclose(file);
    p = strrchr(text, ')') + 2; /* field 3 */
    for (int field = 3; field < 22; field++)
        p = strchr(p, ' ') + 1;
    attach();
    cr_assert_eq(f->start_time, strtoull(p, NULL, 10));
}

Test(client_connect, options_are_checked)
{
    struct kvd_options o = options();

    o.ring_entries = 24;
    cr_assert_eq(kvd_connect(&o, &kvd), -EINVAL);
    o = options();
    o.engine_token = f->path;
    o.engine_token_len = 65;
    cr_assert_eq(kvd_connect(&o, &kvd), -EINVAL);
    o = options();
    o.flags = 2;
    cr_assert_eq(kvd_connect(&o, &kvd), -EINVAL);
    o = options();
    o.size = 0;
    cr_assert_eq(kvd_connect(&o, &kvd), -EINVAL);
    cr_assert_neq(strstr(kvd_last_error(NULL), "kvd_options_init"), NULL);
    cr_assert_eq(kvd_connect(&o, NULL), -EINVAL);
    cr_assert_eq(kvd, NULL);
    cr_assert_eq(seen(&f->hellos), 0);
}

Test(client_connect, callers_of_other_versions)
{
    struct {
        struct kvd_options o;
        uint64_t unknown;
    } newer = {.o = options()};
    struct kvd_options older = options();

    newer.o.size = sizeof(newer);
    cr_assert_eq(kvd_connect(&newer.o, &kvd), 0);
    kvd_close(kvd);
    kvd = NULL;
    newer.unknown = 1;
    cr_assert_eq(kvd_connect(&newer.o, &kvd), -EINVAL);
    older.size = offsetof(struct kvd_options, flags);
    older.flags = 0xffff; /* not the caller's any more */
    cr_assert_eq(kvd_connect(&older, &kvd), 0);
}

Test(client_connect, nobody_there)
{
    struct kvd_options o = options();

    fake_leave(f);
    cr_assert_eq(kvd_connect(&o, &kvd), -ENOENT);
    cr_assert_neq(strstr(kvd_last_error(NULL), f->path), NULL);
    fake_return(f);
    shutdown(f->listener, SHUT_RDWR);
    cr_assert_eq(kvd_connect(&o, &kvd), -ECONNREFUSED);
    cr_assert_neq(strstr(kvd_last_error(NULL), "Start kvd"), NULL);
    o.socket =
        "/tmp/a-path-that-is-much-longer-than-the-hundred-and-seven-bytes-that-the-address-of-a-"
        "unix-socket-can-hold-whatever-one-does";
    cr_assert_eq(kvd_connect(&o, &kvd), -EINVAL);
}

Test(client_connect, the_environment_names_the_socket)
{
    struct kvd_options o = options();

    o.socket = NULL;
    setenv("KVD_SOCKET", f->path, 1);
    cr_assert_eq(kvd_connect(&o, &kvd), 0);
}

static void tweak_hello(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    static uint8_t many[100];

    (void)fds;
    if (r->body_case != KVD__PROTO__RESPONSE__BODY_HELLO)
        return;
    if (d->tweak_pick == 0)
        r->hello->version = 2;
    if (d->tweak_pick == 1)
        r->hello->instance.len = 15;
    if (d->tweak_pick == 2)
        r->fds = *n_fds = 1;
    if (d->tweak_pick == 3)
        r->fds = 3; /* says three, sends two */
    if (d->tweak_pick == 4)
        r->has_fds = 0;
    if (d->tweak_pick == 5)
        r->hello->role = 4;
    if (d->tweak_pick == 6)
        r->hello->resumed = 1;
    if (d->tweak_pick == 7)
        r->hello->cookie = (ProtobufCBinaryData){.data = many, .len = sizeof(many)};
    if (d->tweak_pick == 8) {
        int swap = fds[0];

        fds[0] = fds[1];
        fds[1] = swap;
    }
    if (d->tweak_pick == 9)
        ((struct shm_header *)d->session.memory.addr)->count = 24;
    if (d->tweak_pick == 10)
        ((struct shm_header *)d->session.memory.addr)->count = 1 << 14;
    if (d->tweak_pick == 11)
        ((struct shm_header *)d->session.memory.addr)->instance[3] = 1;
    if (d->tweak_pick == 12)
        ((struct shm_header *)d->core.addr)->magic++;
    if (d->tweak_pick == 13)
        fds[1] = d->core.reader;
    if (d->tweak_pick == 14)
        fds[0] = d->nudge; /* no memory at all */
    if (d->tweak_pick == 15) {
        r->body_case = KVD__PROTO__RESPONSE__BODY__NOT_SET;
        r->status = 0;
    }
    if (d->tweak_pick == 16)
        r->status = 5;
}

Test(client_connect, a_wrong_greeting)
{
    struct kvd_options o = options();
    unsigned before;

    attach();
    kvd_close(kvd);
    kvd = NULL;
    fake_hang_up(f);
    before = open_fds();
    for (unsigned pick = 0; pick <= 16; pick++) {
        set_tweak(tweak_hello, pick);
        cr_assert_eq(kvd_connect(&o, &kvd), -EPROTO, "tweak %u: %s", pick, kvd_last_error(NULL));
        cr_assert_eq(kvd, NULL);
        ((struct shm_header *)f->core.addr)->magic = SHM_MAGIC;
    }
    set_tweak(NULL, 0);
    attach();
    kvd_close(kvd);
    kvd = NULL;
    fake_hang_up(f);
    cr_assert_eq(open_fds(), before, "no descriptor has leaked");
}

static void tweak_refuse(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    (void)fds;
    r->fds = *n_fds = 0;
    r->body_case = KVD__PROTO__RESPONSE__BODY__NOT_SET;
    if (d->tweak_pick == 0) { /* an ordinary refusal */
        r->status = -EPERM;
        r->message = (char *)"a foreign pid namespace";
    } else if (d->tweak_pick == 1) {
        r->id = 0; /* of the connection as a whole */
        r->status = -EUSERS;
        r->message = (char *)"too many connections";
    } else {
        r->status = -EPROTONOSUPPORT;
    }
}

Test(client_connect, refused)
{
    struct kvd_options o = options();

    set_tweak(tweak_refuse, 0);
    cr_assert_eq(kvd_connect(&o, &kvd), -EPERM);
    cr_assert_str_eq(kvd_last_error(NULL), "a foreign pid namespace");
    set_tweak(tweak_refuse, 1);
    cr_assert_eq(kvd_connect(&o, &kvd), -EUSERS);
    cr_assert_str_eq(kvd_last_error(NULL), "too many connections");
    set_tweak(tweak_refuse, 2);
    cr_assert_eq(kvd_connect(&o, &kvd), -EPROTO);
}

Test(client_connect, not_kvd)
{
    struct kvd_options o = options();

    set_raw("HTTP/1.1 400 Bad Request\r\n\r\n", 28);
    cr_assert_eq(kvd_connect(&o, &kvd), -EPROTO);
    cr_assert_neq(strstr(kvd_last_error(NULL), "kvd protocol"), NULL);
    set_raw("\3\0\0\0abc", 7); /* a frame, but no message */
    cr_assert_eq(kvd_connect(&o, &kvd), -EPROTO);
    set_raw("\0\0\0\0", 4);
    cr_assert_eq(kvd_connect(&o, &kvd), -EPROTO);
}

Test(client_connect, silence)
{
    struct kvd_options o = options();

    o.timeout_ms = 1;
    set_mute(1 << KVD__PROTO__REQUEST__BODY_HELLO);
    cr_assert_eq(kvd_connect(&o, &kvd), -ETIMEDOUT);
    cr_assert_neq(strstr(kvd_last_error(NULL), "stopped"), NULL);
}

static void *leave_soon(void *arg)
{
    (void)arg;
    until(&f->hellos, 1);
    fake_hang_up(f);
    return NULL;
}

Test(client_connect, closed_without_an_answer)
{
    struct kvd_options o = options();
    pthread_t t;

    set_mute(1 << KVD__PROTO__REQUEST__BODY_HELLO);
    pthread_create(&t, NULL, leave_soon, NULL);
    cr_assert_eq(kvd_connect(&o, &kvd), -ENOTCONN);
    pthread_join(t, NULL);
}

/* ---- spaces and pools */

TestSuite(client_space, .init = setup, .fini = teardown);

Test(client_space, opened)
{
    struct kvd_pool_info info;
    struct kvd_pool *none = NULL;

    open_all();
    cr_assert_eq(kvd_space_epoch(space), 1);
    cr_assert_eq(kvd_space_current(space), 0);
    kvd_pool_info(pool, &info);
    cr_assert_eq(info.slots, 56);
    cr_assert_eq(info.slot_bytes, 2 * PAGE);
    cr_assert_eq(info.part_bytes, PAGE);
    cr_assert_eq(info.chunk_slots, 16);
    cr_assert_eq(info.chunks, 4);
    cr_assert_eq(info.page_bytes, PAGE);
    cr_assert_eq(info.parts, 2);
    cr_assert_str_eq(info.name, "kv");
    cr_assert_str_eq(info.backing, "memfd");
    cr_assert_eq(kvd_pool_get(space, "other", &none), -ENOENT);
    cr_assert_eq(none, NULL);
    cr_assert_neq(kvd_pool_base(pool, 0), kvd_pool_base_rw(pool, 0));
    cr_assert_eq(kvd_pool_base(pool, 2), NULL);
    cr_assert_eq(kvd_slot_rw(pool, 56, 0), NULL);
    cr_assert_eq((char *)kvd_slot_rw(pool, 55, 1) - (char *)kvd_pool_base_rw(pool, 1), 55 * PAGE);
}

/* The two mappings are of the same memory, over all chunks, and only one can be written. */
Test(client_space, memory)
{
    const char *in;
    char *out;

    open_all();
    for (unsigned part = 0; part < 2; part++)
        for (unsigned slot = 0; slot < 56; slot++) {
            out = kvd_slot_rw(pool, slot, part);
            memset(out, (int)(slot * 2 + part + 1), PAGE);
        }
    for (unsigned part = 0; part < 2; part++)
        for (unsigned slot = 0; slot < 56; slot++) {
            in = (const char *)kvd_pool_base(pool, part) + slot * PAGE;
            cr_assert_eq((uint8_t)in[0], slot * 2 + part + 1);
            cr_assert_eq((uint8_t)in[PAGE - 1], slot * 2 + part + 1);
        }
}

Test(client_space, a_stray_write_faults, .signal = SIGSEGV)
{
    open_all();
    *(volatile char *)(uintptr_t)kvd_pool_base(pool, 0) = 1;
}

Test(client_space, only_some_parts)
{
    attach();
    cr_assert_eq(open_with(2, 0), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, NULL, &pool), 0);
    cr_assert_eq(kvd_pool_base(pool, 0), NULL);
    cr_assert_neq(kvd_pool_base(pool, 1), NULL);
    cr_assert_eq(kvd_pool_base_rw(pool, 1), NULL);
    cr_assert_eq(kvd_slot_rw(pool, 0, 1), NULL);
}

Test(client_space, no_part_at_all)
{
    struct kvd_key key = key_of(1);

    attach();
    cr_assert_eq(open_with(0, 0), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, NULL, &pool), 0);
    cr_assert_eq(kvd_pool_base(pool, 0), NULL);
    store(0, 1, 1, PAGE);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
}

Test(client_space, refusals_reach_the_caller)
{
    struct kvd_space_options o;

    attach();
    cr_assert_eq(kvd_space_open(kvd, "other", NULL, &space), -ENOENT);
    cr_assert_str_eq(kvd_last_error(kvd), "no space of that name");
    kvd_space_options_init(&o, sizeof(o));
    o.identity = "wrong";
    cr_assert_eq(kvd_space_open(kvd, "model", &o, &space), -EPROTOTYPE);
    o.identity = "right";
    o.vector_key_len = 33;
    o.vector_key = f->path;
    cr_assert_eq(kvd_space_open(kvd, "model", &o, &space), -EINVAL);
    cr_assert_eq(space, NULL);
    o.vector_key_len = 32;
    cr_assert_eq(kvd_space_open(kvd, "model", &o, &space), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(seen(&f->hellos), 1, "a refusal does not cost the connection");
}

static void tweak_space(struct fake *d, Kvd__Proto__Response *r)
{
    static char long_name[80];
    Kvd__Proto__PoolInfo *i;

    i = r->space_open->pools[0];
    memset(long_name, 'x', sizeof(long_name) - 1);
    switch (d->tweak_pick) {
    case 0:
        r->space_open->n_pools = 0;
        break;
    case 1:
        i->slots = 0;
        break;
    case 2:
        i->slots = (uint64_t)1 << 40;
        break;
    case 3:
        i->parts = 65;
        break;
    case 4:
        i->part_bytes = UINT64_MAX;
        break;
    case 5:
        i->chunks = 5;
        break;
    case 6:
        i->chunk_slots = 0;
        break;
    case 7:
        i->page_bytes = 4097;
        break;
    case 8:
        i->name = long_name;
        break;
    case 9:
        i->backing = long_name;
        break;
    case 10:
        r->space_open->pools[1] = r->space_open->pools[0];
        break;
    case 11:
        i->name = (char *)"";
        break;
    case 12:
        i->parts = 1; /* the index says two */
        break;
    case 13:
        i->slots = 55;
        break;
    case 14:
        i->page_bytes = 0;
        break;
    }
}

static void tweak_pool(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    switch (d->tweak_pick) {
    case 20:
        r->fds = *n_fds = 2;
        break;
    case 21:
        fds[(*n_fds)++] = d->nudge;
        r->fds = *n_fds;
        break;
    case 22:
        fds[0] = fds[1];
        break;
    case 23:
        fds[2] = d->pools[0].pins.reader;
        break;
    case 24:
        fds[0] = d->pools[1].index.reader; /* of another pool */
        fds[1] = d->pools[1].metas.reader;
        fds[2] = d->pools[1].pins.fd;
        break;
    case 25:
        r->pool_open->info->pool++;
        break;
    case 26:
        d->pools[0].ix->header.count = 1 << 20;
        break;
    case 27:
        d->pools[0].ix->header.count--;
        break;
    case 28:
        d->pools[0].ix->header.count = 1;
        break;
    case 29:
        d->pools[0].ix->header.version++;
        break;
    case 30:
        ((struct shm_header *)d->pools[0].pins.addr)->instance[0]++;
        break;
    case 31:
        d->pools[0].ix->part_bytes *= 2;
        break;
    case 32:
        ((struct shm_header *)d->pools[0].metas.addr)->count--;
        break;
    case 33:
        d->pools[0].ix->header.pool++;
        break;
    }
}

static void tweak_chunk(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    switch (d->tweak_pick) {
    case 40:
        r->chunk_map->bytes = 0;
        break;
    case 41:
        r->chunk_map->bytes *= 2;
        break;
    case 42:
        r->chunk_map->bytes -= PAGE;
        break;
    case 43:
        r->fds = *n_fds = *n_fds - 1;
        break;
    case 44:
        fds[0] = d->nudge;
        break;
    case 45:
        fds[0] = d->pools[0].data[7].reader; /* shorter */
        break;
    case 46:
        fds[3] = fds[1]; /* read-only where a writable one belongs */
        break;
    }
}

static void tweak_pools(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_SPACE_OPEN)
        tweak_space(d, r);
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_POOL_OPEN)
        tweak_pool(d, r, fds, n_fds);
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_CHUNK_MAP)
        tweak_chunk(d, r, fds, n_fds);
}

Test(client_space, nonsense_is_refused)
{
    static const unsigned last[] = {14, 33, 46};
    unsigned before, pick = 0, i = 0;
    uint64_t lines = f->pools[0].ix->header.count;

    attach();
    before = open_fds();
    while (i < 3) {
        int r;

        set_tweak(tweak_pools, pick);
        r = open_with(UINT64_MAX, 1);
        cr_assert_lt(r, 0, "tweak %u", pick);
        if (pick < 43 && pick != 29)
            cr_assert_eq(r, -EPROTO, "tweak %u: %d %s", pick, r, kvd_last_error(kvd));
        cr_assert_eq(space, NULL);
        cr_assert_neq(strstr(kvd_last_error(kvd), " "), NULL, "a sentence");
        f->pools[0].ix->header.count = lines;
        f->pools[0].ix->header.version = SHM_VERSION;
        f->pools[0].ix->header.pool = f->pools[0].id;
        f->pools[0].ix->part_bytes = PAGE;
        ((struct shm_header *)f->pools[0].pins.addr)->instance[0] = f->instance[0];
        ((struct shm_header *)f->pools[0].metas.addr)->count = 56;
        pick = pick == last[i] ? (++i == 1 ? 20 : 40) : pick + 1;
    }
    set_tweak(NULL, 0);
    cr_assert_eq(open_fds(), before, "no descriptor has leaked");
    cr_assert_eq(open_with(UINT64_MAX, 1), 0, "%s", kvd_last_error(kvd));
}

static unsigned mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned n = 0;

    while (fgets(line, sizeof(line), file))
        n += strstr(line, "memfd:fake") != NULL;
    fclose(file);
    return n;
}

Test(client_space, close_unmaps_unless_pinned)
{
    struct kvd_key key = key_of(1);
    struct kvd_pinset *set;
    unsigned before;
    const char *data;

    attach();
    store(0, 1, 1, PAGE);
    before = mappings();
    cr_assert_eq(open_with(UINT64_MAX, 1), 0);
    cr_assert_gt(mappings(), before);
    kvd_space_close(space);
    cr_assert_eq(mappings(), before);

    cr_assert_eq(open_with(1, 0), 0);
    cr_assert_eq(kvd_pool_get(space, NULL, &pool), 0);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, &key, 1, 0), 1);
    kvd_space_close(space);
    data = kvd_pinset_data(set, 0, 0);
    cr_assert_neq(data, NULL);
    cr_assert_eq(data[5], 0);
    cr_assert_eq(fake_pins(f, 0), 1);
    kvd_pinset_release(set);
    cr_assert_eq(fake_pins(f, 0), 0);
    cr_assert_eq(open_with(1, 0), 0); /* looks for what can go */
    kvd_space_close(space);
    cr_assert_eq(mappings(), before);
    kvd_pinset_free(set);
}

Test(client_space, epochs)
{
    struct kvd_space *other;
    struct kvd_pool *theirs;
    struct kvd_key key = key_of(1);
    uint32_t epoch = 0;
    const void *base;

    open_all();
    store(0, 1, 1, PAGE);
    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &other), 0);
    cr_assert_eq(kvd_pool_get(other, NULL, &theirs), 0);
    base = kvd_pool_base(theirs, 0);
    cr_assert_eq(kvd_lookup(theirs, &key, 1, NULL), 1);
    cr_assert_eq(kvd_space_reset(space, &epoch), 0);
    cr_assert_eq(epoch, 2);
    cr_assert_eq(kvd_space_epoch(space), 2);
    cr_assert_eq(kvd_space_current(space), 0);
    cr_assert_eq(kvd_space_current(other), -ESTALE);
    cr_assert_eq(kvd_lookup(theirs, &key, 1, NULL), 0);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 0);
    store(0, 1, 1, PAGE);
    cr_assert_eq(kvd_lookup(theirs, &key, 1, NULL), 0);
    cr_assert_eq(kvd_space_refresh(other), 0);
    cr_assert_eq(kvd_space_current(other), 0);
    cr_assert_eq(kvd_lookup(theirs, &key, 1, NULL), 1);
    cr_assert_eq(kvd_pool_base(theirs, 0), base, "the memory is the same");
}

/* ---- finding and pinning */

TestSuite(client_data, .init = setup, .fini = teardown);

Test(client_data, lookup)
{
    struct kvd_key keys[50];
    uint8_t states[50];

    open_all();
    store(0, 100, 20, PAGE);
    store(0, 130, 5, PAGE);
    chain(keys, 100, 50);
    cr_assert_eq(kvd_lookup(pool, keys, 50, NULL), 20);
    cr_assert_eq(kvd_lookup(pool, keys, 50, states), 20);
    for (unsigned i = 0; i < 50; i++)
        cr_assert_eq(states[i], i < 20 || (i >= 30 && i < 35) ? KVD_RAM : KVD_MISS, "%u", i);
    cr_assert_eq(kvd_lookup(snapshots, keys, 50, NULL), 0);
    cr_assert_eq(kvd_lookup(pool, keys, 0, NULL), 0);
    keys[0].group ^= 1;
    cr_assert_eq(kvd_lookup(pool, keys, 50, NULL), 0);
}

Test(client_data, pins_are_counted_and_given_back)
{
    struct kvd_key keys[20];
    struct kvd_pinset *set, *twice;
    const struct kvd_ref *refs;

    open_all();
    store(0, 0, 10, 1000);
    chain(keys, 0, 20);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pinset_new(kvd, 4, &twice), 0);
    cr_assert_eq(kvd_pin(set, pool, keys, 20, 0), 10);
    cr_assert_eq(kvd_pinset_count(set), 10);
    cr_assert_eq(kvd_pin(twice, pool, keys, 5, 0), 5);
    cr_assert_eq(fake_pins(f, 0), 15);
    refs = kvd_pinset_refs(set);
    for (unsigned i = 0; i < 10; i++) {
        cr_assert_eq(refs[i].slot, i);
        cr_assert_eq(refs[i].bytes, 1000);
        for (unsigned part = 0; part < 2; part++) {
            const uint8_t *data = kvd_pinset_data(set, i, part);

            cr_assert_eq(data, (const uint8_t *)kvd_pool_base(pool, part) + i * PAGE);
            cr_assert_eq(data[999], i + part);
        }
        cr_assert_eq(kvd_pinset_data(set, i, 2), NULL);
    }
    cr_assert_eq(kvd_pinset_data(set, 10, 0), NULL);
    kvd_pinset_truncate(set, 4);
    cr_assert_eq(kvd_pinset_count(set), 4);
    cr_assert_eq(fake_pins(f, 0), 9);
    kvd_pinset_truncate(set, 8); /* nothing to do */
    cr_assert_eq(kvd_pinset_count(set), 4);
    kvd_pinset_release(set);
    cr_assert_eq(fake_pins(f, 0), 5);
    kvd_pinset_free(set);
    kvd_pinset_free(twice);
    cr_assert_eq(fake_pins(f, 0), 0);
}

Test(client_data, pin_all)
{
    struct kvd_key keys[6];
    struct kvd_pinset *set;
    const struct kvd_ref *refs;
    struct kvd_meta meta;

    open_all();
    store(0, 0, 2, PAGE);
    store(0, 3, 1, PAGE);
    chain(keys, 0, 6);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, keys, 6, KVD_PIN_ALL), 3);
    cr_assert_eq(kvd_pinset_count(set), 6);
    refs = kvd_pinset_refs(set);
    for (unsigned i = 0; i < 6; i++)
        cr_assert_eq(refs[i].slot == UINT32_MAX, i == 2 || i > 3);
    cr_assert_eq(kvd_pinset_data(set, 2, 0), NULL);
    cr_assert_eq(kvd_pinset_meta(set, 2, &meta), -ENOENT);
    cr_assert_eq(fake_pins(f, 0), 3);
    kvd_pinset_free(set);
    cr_assert_eq(fake_pins(f, 0), 0);
}

/* Blocks and snapshots, in turns: released in runs of one view. */
Test(client_data, several_pools_in_one_pinset)
{
    struct kvd_key keys[4];
    struct kvd_pinset *set;

    open_all();
    store(0, 0, 4, PAGE);
    store(1, 0, 4, 2 * PAGE);
    chain(keys, 0, 4);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    for (unsigned i = 0; i < 4; i++) {
        cr_assert_eq(kvd_pin(set, pool, &keys[i], 1, 0), 1);
        cr_assert_eq(kvd_pin(set, i & 1 ? snapshots : pool, &keys[i], 1, 0), 1);
    }
    cr_assert_eq(fake_pins(f, 0), 6);
    cr_assert_eq(fake_pins(f, 1), 2);
    cr_assert_eq(kvd_pinset_data(set, 3, 0), (const char *)kvd_pool_base(snapshots, 0) + 2 * PAGE);
    kvd_pinset_truncate(set, 3);
    cr_assert_eq(fake_pins(f, 0), 3);
    cr_assert_eq(fake_pins(f, 1), 0);
    kvd_pinset_free(set);
    cr_assert_eq(fake_pins(f, 0), 0);
}

Test(client_data, meta)
{
    struct kvd_key keys[2];
    struct kvd_pinset *set;
    struct kvd_meta meta;

    open_all();
    store(0, 0, 2, PAGE);
    chain(keys, 0, 2);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, keys, 2, 0), 2);
    cr_assert_eq(kvd_pinset_meta(set, 1, &meta), 0);
    cr_assert_eq(meta.position, 16);
    cr_assert_eq(meta.layout, 77);
    cr_assert_eq(meta.checksum, 99);
    cr_assert_eq(meta.tenant, 5);
    cr_assert_eq(meta.has_parent, 1);
    cr_assert_arr_eq(meta.parent.hash, keys[0].hash, 32);
    cr_assert_eq(meta.parent.group, keys[0].group);
    cr_assert_eq(meta.user_bytes, 3);
    cr_assert_arr_eq(meta.user, "abc", 3);
    cr_assert_eq(kvd_pinset_meta(set, 0, &meta), 0);
    cr_assert_eq(meta.has_parent, 0);
    ((struct shm_metas *)f->pools[0].metas.addr)->metas[0].user_bytes = 5000;
    cr_assert_eq(kvd_pinset_meta(set, 0, &meta), 0);
    cr_assert_eq(meta.user_bytes, 128);
    cr_assert_eq(kvd_pinset_meta(set, 2, &meta), -ENOENT);
    kvd_pinset_free(set);
}

Test(client_data, reads_go_on_without_the_daemon)
{
    struct kvd_key key = key_of(1);
    struct kvd_pinset *set;

    open_all();
    store(0, 1, 1, PAGE);
    fake_leave(f);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, &key, 1, 0), 1);
    cr_assert_eq(kvd_ping(kvd), -ENOTCONN);
    cr_assert_eq(kvd_space_current(space), 0);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
    kvd_pinset_free(set);
    fake_return(f);
    cr_assert_eq(kvd_ping(kvd), 0);
}

Test(client_data, close_takes_all_pins_back)
{
    struct kvd_key keys[3];
    struct kvd_pinset *set;

    open_all();
    store(0, 0, 3, PAGE);
    chain(keys, 0, 3);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, keys, 3, 0), 3);
    kvd_close(kvd);
    kvd = NULL;
    cr_assert_eq(fake_pins(f, 0), 0);
    cr_assert_eq(kvd_pinset_count(set), 0);
    cr_assert_eq(kvd_pinset_data(set, 0, 0), NULL);
    kvd_pinset_release(set);
    kvd_pinset_free(set); /* after the handle: fine */
    cr_assert_eq(mappings() > 0, 1, "the fake's own");
}

Test(client_data, observations)
{
    struct kvd_key keys[60];
    struct shm_request q;

    open_all();
    set_by_hand(true);
    chain(keys, 0, 60);
    cr_assert_eq(kvd_observe(pool, keys, 8), 8);
    cr_assert(fake_take(f, &q));
    cr_assert_eq(q.op, SHM_OBSERVE);
    cr_assert_eq(q.pool, f->pools[0].id);
    cr_assert_eq(q.epoch, 1);
    cr_assert_eq(q.observe.n, 6);
    cr_assert_arr_eq(&q.observe.keys[5], &keys[5], sizeof(keys[5]));
    cr_assert(fake_take(f, &q));
    cr_assert_eq(q.observe.n, 2);
    cr_assert_arr_eq(&q.observe.keys[0], &keys[6], sizeof(keys[6]));
    cr_assert(!fake_take(f, &q));
    cr_assert_eq(kvd_observe(pool, keys, 60), 48, "half of the ring");
    cr_assert_eq(kvd_observe(pool, keys, 60), 0);
    cr_assert_eq(seen(&f->wakes), 0);
}

/* ---- forks */

TestSuite(client_fork, .init = setup, .fini = teardown);

static void in_child(struct kvd_pinset *set)
{
    struct kvd_key key = key_of(0);
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_reservation got;
    struct kvd_completion done;
    struct kvd_pinset *more = NULL;
    struct kvd_meta meta;
    uint64_t ticket = 1;
    bool ok = kvd_lookup(pool, &key, 1, NULL) == -ECHILD &&
              kvd_pin(set, pool, &key, 1, 0) == -ECHILD && kvd_ping(kvd) == -ECHILD &&
              kvd_drain(kvd) == -ECHILD && kvd_space_refresh(space) == -ECHILD &&
              kvd_space_reset(space, NULL) == -ECHILD && kvd_space_current(space) == -ECHILD &&
              kvd_reserve(pool, &want, &got) == -ECHILD &&
              kvd_submit_reserve(pool, &want, 0) == -ECHILD &&
              kvd_completions(kvd, &done, 1) == -ECHILD && kvd_abort(pool, &ticket, 1) == -ECHILD &&
              kvd_observe(pool, &key, 1) == -ECHILD && kvd_pinset_new(kvd, 0, &more) == -ECHILD &&
              kvd_remote_get(pool, &key, 0, &got, 1, NULL) == -ECHILD &&
              kvd_pinset_meta(set, 0, &meta) == -ECHILD && kvd_pinset_data(set, 0, 0) == NULL &&
              kvd_pool_base(pool, 0) == NULL && kvd_slot_rw(pool, 0, 0) == NULL &&
              strstr(kvd_last_error(kvd), "fork") != NULL;

    kvd_pinset_release(set);
    kvd_space_close(space);
    kvd_close(kvd);
    kvd_pinset_free(set);
    _exit(ok ? 0 : 1);
}

Test(client_fork, the_child_is_told)
{
    struct kvd_key key = key_of(0);
    struct kvd_pinset *set;
    int status;
    pid_t pid;

    open_all();
    store(0, 0, 1, PAGE);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, &key, 1, 0), 1);
    pid = fork();
    if (pid == 0)
        in_child(set);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
    cr_assert_eq(fake_pins(f, 0), 1, "the child's close took nothing from the parent");
    cr_assert_eq(seen(&f->byes), 0);
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
    kvd_pinset_free(set);
    cr_assert_eq(fake_pins(f, 0), 0);
}

/* ---- coming back */

TestSuite(client_reconnect, .init = setup, .fini = teardown);

Test(client_reconnect, the_same_session)
{
    struct kvd_key key = key_of(0);
    struct kvd_pinset *set;
    const void *base;
    int fd;

    open_all();
    store(0, 0, 1, PAGE);
    base = kvd_pool_base(pool, 0);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, &key, 1, 0), 1);
    fd = kvd_event_fd(kvd);
    fake_hang_up(f);
    cr_assert_eq(kvd_drain(kvd), -ENOTCONN);
    cr_assert_eq(kvd_event_fd(kvd), fd, "still open, so that nobody polls a stranger's file");
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(seen(&f->hellos), 2);
    cr_assert_eq(seen(&f->resumes), 1);
    cr_assert_eq(kvd_space_current(space), 0);
    cr_assert_eq(kvd_pool_base(pool, 0), base);
    cr_assert_eq(kvd_pinset_data(set, 0, 0), base);
    cr_assert_eq(fake_pins(f, 0), 1);
    cr_assert_eq(kvd_drain(kvd), 0);
    kvd_pinset_free(set);
}

Test(client_reconnect, another_daemon)
{
    struct kvd_key keys[2], other = key_of(50);
    struct kvd_reserve want = {.keys = &other, .n = 1};
    struct kvd_reservation got;
    struct kvd_pinset *set, *all;
    uint8_t states[2] = {9, 9};
    const uint8_t *data;
    unsigned before;

    open_all();
    before = mappings();
    store(0, 0, 2, PAGE);
    chain(keys, 0, 2);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &all), 0);
    cr_assert_eq(kvd_pin(set, pool, keys, 2, 0), 2);
    data = kvd_pinset_data(set, 1, 0);
    set_resume(false);
    fake_replace(f);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 2, "not noticed yet");
    cr_assert_eq(kvd_ping(kvd), 0);
    cr_assert_eq(kvd_space_current(space), -ESTALE);
    cr_assert_eq(kvd_lookup(pool, keys, 2, states), 0);
    cr_assert_eq(states[0], KVD_MISS);
    cr_assert_eq(states[1], KVD_MISS);
    cr_assert_eq(kvd_pin(all, pool, keys, 2, 0), 0);
    cr_assert_eq(kvd_pin(all, pool, keys, 2, KVD_PIN_ALL), 0);
    cr_assert_eq(kvd_pinset_count(all), 2);
    cr_assert_eq(kvd_pinset_refs(all)[0].slot, UINT32_MAX);
    cr_assert_eq(kvd_reserve(pool, &want, &got), -ESTALE);
    cr_assert_eq(kvd_observe(pool, keys, 2), 0);
    cr_assert_eq(kvd_space_reset(space, NULL), -ESTALE);
    cr_assert_eq(kvd_pinset_data(set, 1, 0), data);
    cr_assert_eq(data[0], 1, "old pins, old memory");

    cr_assert_eq(kvd_space_refresh(space), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_space_current(space), 0);
    cr_assert_eq(kvd_lookup(pool, keys, 2, NULL), 0);
    cr_assert_eq(kvd_pinset_data(set, 1, 0), data);
    cr_assert_eq(data[0], 1);
    store(0, 0, 1, PAGE);
    cr_assert_eq(kvd_pin(set, pool, keys, 1, 0), 1);
    cr_assert_neq(kvd_pinset_refs(set)[0].view, kvd_pinset_refs(set)[2].view);
    cr_assert_eq(kvd_reserve(pool, &want, &got), 1, "%s", kvd_last_error(kvd));
    kvd_pinset_release(set);
    cr_assert_eq(fake_pins(f, 0), 0);
    cr_assert_eq(kvd_space_refresh(space), 0);
    cr_assert_eq(mappings(), before, "nothing of the old daemon is left");
    kvd_pinset_free(set);
    kvd_pinset_free(all);
}

/* The daemon lives but has buried the session. */
Test(client_reconnect, a_lost_session)
{
    struct kvd_key key = key_of(0);

    open_all();
    store(0, 0, 1, PAGE);
    set_resume(false);
    fake_hang_up(f);
    cr_assert_eq(kvd_space_reset(space, NULL), -ESTALE);
    cr_assert_eq(kvd_space_current(space), -ESTALE);
    cr_assert_eq(kvd_space_refresh(space), 0);
    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), 1);
}

static void tweak_geometry(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    (void)d;
    (void)fds;
    (void)n_fds;
    if (r->body_case != KVD__PROTO__RESPONSE__BODY_SPACE_OPEN)
        return;
    if (d->tweak_pick == 0)
        r->space_open->pools[0]->part_bytes *= 2;
    else
        r->space_open->n_pools = 1;
}

Test(client_reconnect, pools_that_have_changed)
{
    open_all();
    set_resume(false);
    fake_replace(f);
    set_tweak(tweak_geometry, 0);
    cr_assert_eq(kvd_space_refresh(space), -EPROTOTYPE);
    cr_assert_eq(kvd_space_current(space), -ESTALE);
    set_tweak(tweak_geometry, 1);
    cr_assert_eq(kvd_space_refresh(space), -ENOENT);
    cr_assert_eq(kvd_space_current(space), -ESTALE);
    set_tweak(NULL, 0);
    cr_assert_eq(kvd_space_refresh(space), 0);
}

Test(client_reconnect, close_ends_the_session_even_then)
{
    open_all();
    fake_hang_up(f);
    kvd_close(kvd);
    kvd = NULL;
    cr_assert_eq(seen(&f->resumes), 1);
    cr_assert_eq(seen(&f->byes), 1);
}

Test(client_reconnect, a_lost_answer)
{
    pthread_t t;

    attach();
    set_mute(1 << KVD__PROTO__REQUEST__BODY_SPACE_OPEN);
    pthread_mutex_lock(&f->lock);
    f->hellos = 0;
    pthread_mutex_unlock(&f->lock);
    pthread_create(&t, NULL, leave_soon, NULL); /* waits for the hello of the next connection */
    fake_hang_up(f);
    /* Found dead, made again, dies again before the answer: not for ever. */
    cr_assert_eq(open_with(1, 0), -ENOTCONN);
    pthread_join(t, NULL);
    set_mute(0);
    cr_assert_eq(open_with(1, 0), 0);
}

/* ---- without shared memory */

static void no_shm_setup(void)
{
    struct kvd_options o;

    setup();
    o = options();
    o.flags = KVD_NO_SHM;
    f->max_inline = 1000;
    cr_assert_eq(kvd_connect(&o, &kvd), 0, "%s", kvd_last_error(NULL));
    cr_assert_eq(kvd_space_open(kvd, "model", NULL, &space), 0, "%s", kvd_last_error(kvd));
    cr_assert_eq(kvd_pool_get(space, "kv", &pool), 0);
    cr_assert_eq(kvd_pool_get(space, "snapshots", &snapshots), 0);
}

TestSuite(client_remote, .init = no_shm_setup, .fini = teardown);

Test(client_remote, what_does_not_work)
{
    struct kvd_key key = key_of(0);
    struct kvd_pinset *set;
    struct kvd_reserve want = {.keys = &key, .n = 1};
    struct kvd_reservation got;

    cr_assert_eq(kvd_lookup(pool, &key, 1, NULL), -EOPNOTSUPP);
    cr_assert_eq(kvd_pinset_new(kvd, 0, &set), 0);
    cr_assert_eq(kvd_pin(set, pool, &key, 1, 0), -EOPNOTSUPP);
    cr_assert_eq(kvd_reserve(pool, &want, &got), -EOPNOTSUPP);
    cr_assert_eq(kvd_observe(pool, &key, 1), -EOPNOTSUPP);
    cr_assert_eq(kvd_drain(kvd), -EOPNOTSUPP);
    cr_assert_eq(kvd_pool_base(pool, 0), NULL);
    cr_assert_eq(kvd_space_current(space), 0);
    cr_assert_eq(kvd_space_reset(space, NULL), 0);
    cr_assert_neq(strstr(kvd_last_error(kvd), "KVD_NO_SHM"), NULL);
    kvd_pinset_free(set);
}

Test(client_remote, lookup)
{
    static struct kvd_key keys[2500];
    static uint8_t states[2500];

    store(0, 0, 3, PAGE);
    store(0, 2000, 1, PAGE);
    chain(keys, 0, 2500);
    cr_assert_eq(kvd_remote_lookup(pool, keys, 2500, NULL), 3);
    cr_assert_eq(kvd_remote_lookup(pool, keys, 2500, states), 3);
    for (unsigned i = 0; i < 2500; i++)
        cr_assert_eq(states[i], i < 3 || i == 2000 ? KVD_RAM : KVD_MISS);
}

Test(client_remote, put_and_get)
{
    struct kvd_key key = key_of(1), parent = key_of(0);
    struct kvd_meta meta = {.position = 31, .tenant = 4, .user_bytes = 2, .user = "hi"}, back;
    uint8_t in[7000], out[8000];

    for (unsigned i = 0; i < sizeof(in); i++)
        in[i] = (uint8_t)(i * 7 + i / 256);
    meta.has_parent = 1;
    meta.parent = parent;
    cr_assert_eq(kvd_remote_put(snapshots, &key, &meta, in, sizeof(in)), 0, "%s",
                 kvd_last_error(kvd));
    cr_assert_eq(kvd_remote_put(snapshots, &key, &meta, in, sizeof(in)), -EEXIST);
    memset(out, 0xee, sizeof(out));
    cr_assert_eq(kvd_remote_get(snapshots, &key, 0, out, sizeof(out), &back), 7000, "%s",
                 kvd_last_error(kvd));
    cr_assert_arr_eq(out, in, sizeof(in));
    cr_assert_eq(out[7000], 0xee);
    cr_assert_eq(back.position, 31);
    cr_assert_eq(back.tenant, 4);
    cr_assert_eq(back.user_bytes, 2);
    cr_assert_arr_eq(back.user, "hi", 2);
    cr_assert_eq(back.has_parent, 1);
    cr_assert_arr_eq(back.parent.hash, parent.hash, 32);
    cr_assert_eq(kvd_ping(kvd), 0); /* the release has been posted before */
    cr_assert_eq(seen(&f->released), 1, "the pin of the pieces");
    memset(out, 0xee, sizeof(out));
    cr_assert_eq(kvd_remote_get(snapshots, &key, 0, out, 10, NULL), 7000);
    cr_assert_arr_eq(out, in, 10);
    cr_assert_eq(out[10], 0xee);
    cr_assert_eq(kvd_remote_get(snapshots, &parent, 0, out, 10, NULL), -ENOENT);
    cr_assert_eq(kvd_remote_get(snapshots, &parent, 0, out, 8000, NULL), -ENOENT);
    cr_assert_eq(kvd_remote_put(pool, &key, NULL, in, 10), -EINVAL, "two parts");
    cr_assert_eq(kvd_remote_put(snapshots, &parent, NULL, in, 0), -EINVAL);
}

static void tweak_write(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    (void)d;
    (void)fds;
    (void)n_fds;
    if (r->body_case == KVD__PROTO__RESPONSE__BODY__NOT_SET)
        r->status = -EIO;
}

Test(client_remote, a_failed_put_gives_its_slot_back)
{
    struct kvd_key key = key_of(1);

    set_tweak(tweak_write, 0);
    cr_assert_eq(kvd_remote_put(snapshots, &key, NULL, "abc", 3), -EIO);
    until(&f->aborted, 1);
    set_tweak(NULL, 0);
    cr_assert_eq(kvd_remote_put(snapshots, &key, NULL, "abc", 3), 0, "%s", kvd_last_error(kvd));
}

/* The answer to a reservation that has timed out is recognised when it comes. */
Test(client_remote, a_late_grant_is_given_back)
{
    struct kvd_key key = key_of(1), other = key_of(2);
    struct kvd_options o = options();

    kvd_close(kvd);
    o.flags = KVD_NO_SHM;
    o.timeout_ms = 20;
    while (kvd_connect(&o, &kvd) == -ETIMEDOUT)
        ;
    while (kvd_space_open(kvd, "model", NULL, &space) == -ETIMEDOUT)
        ;
    cr_assert_eq(kvd_pool_get(space, "snapshots", &snapshots), 0);
    pthread_mutex_lock(&f->lock); /* the daemon stands still */
    cr_assert_eq(kvd_remote_put(snapshots, &key, NULL, "abc", 3), -ETIMEDOUT);
    pthread_mutex_unlock(&f->lock);
    while (seen(&f->aborted) < 1)
        kvd_ping(kvd);
    while (kvd_remote_put(snapshots, &other, NULL, "abc", 3) == -ETIMEDOUT)
        ;
}

static void tweak_data(struct fake *d, Kvd__Proto__Response *r, int *fds, unsigned *n_fds)
{
    static uint8_t nine[9000];

    (void)fds;
    (void)n_fds;
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_LOOKUP) {
        if (d->tweak_pick == 0)
            r->lookup->states.len--;
        if (d->tweak_pick == 1)
            r->lookup->states.data[0] = 4;
    }
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_READ) {
        if (d->tweak_pick == 2) {
            r->read->data.data = nine;
            r->read->data.len = sizeof(nine);
        }
        if (d->tweak_pick == 3)
            r->read->part_bytes = (uint64_t)1 << 40;
        if (d->tweak_pick == 4)
            r->read->data.len = 0;
        if (d->tweak_pick == 5) {
            r->read->meta->user.data = nine;
            r->read->meta->user.len = 129;
        }
    }
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_PIN && d->tweak_pick == 6)
        r->pin->n_slots = 0;
    if (r->body_case == KVD__PROTO__RESPONSE__BODY_RESERVE) {
        if (d->tweak_pick == 7)
            r->reserve->n_reservations = 0;
        if (d->tweak_pick == 8)
            r->reserve->reservations[0]->has_ticket = 0;
        if (d->tweak_pick == 9)
            r->reserve->reservations[0]->status = 77;
    }
}

Test(client_remote, nonsense_is_refused)
{
    struct kvd_key key = key_of(1), other = key_of(2);
    uint8_t buf[5000];
    struct kvd_meta meta;

    store(1, 1, 1, 5000);
    for (unsigned i = 0; i < 10; i++) {
        int r;

        set_tweak(tweak_data, i);
        if (i < 2)
            r = (int)kvd_remote_lookup(snapshots, &key, 1, NULL);
        else if (i < 7)
            r = (int)kvd_remote_get(snapshots, &key, 0, buf, i == 6 ? sizeof(buf) : 100, &meta);
        else
            r = kvd_remote_put(snapshots, &other, NULL, buf, 10);
        cr_assert_eq(r, -EPROTO, "tweak %u: %d", i, r);
        other.hash[31]++;
    }
}

/* Nothing is mapped, so nothing is lost when the same daemon is connected to again. */
Test(client_remote, the_same_daemon_again)
{
    struct kvd_key key = key_of(1);

    store(1, 1, 1, 100);
    set_resume(false);
    fake_hang_up(f);
    cr_assert_eq(kvd_remote_lookup(snapshots, &key, 1, NULL), 1);
    fake_replace(f);
    cr_assert_eq(kvd_remote_lookup(snapshots, &key, 1, NULL), -ESTALE);
    cr_assert_eq(kvd_space_refresh(space), 0);
    cr_assert_eq(kvd_remote_lookup(snapshots, &key, 1, NULL), 0);
}
