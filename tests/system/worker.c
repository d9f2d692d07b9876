/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker process that does what it is told: a command a line on stdin, an answer a line on stdout,
 * "ok ..." or "err -ERRNO ...". It knows the insides of the library, because it must also do what no
 * decent program does: die at a certain instruction, close sockets behind the library's back.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/internal.h"
#include "hostile.h"
#include "objects.h"

#define ITEMS_MAX 8192u

struct held {
    uint64_t id;
    struct kvd_reservation at;
};

static struct kvd *kvd;
static struct kvd_space *space;
static struct kvd_pool *pool;
static struct kvd_pool_info info;
static struct kvd_pinset *pinset;
static uint64_t salt;
static uint64_t pinned[ITEMS_MAX]; /* objects behind the pinset's references */
static struct held held[ITEMS_MAX];
static size_t n_held;

/* ---- answers */

void say_ok(const char *format, ...)
{
    va_list args;

    fputs("ok ", stdout);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

void say_error(int err, const char *format, ...)
{
    va_list args;

    printf("err %d ", err);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static void say(long long r)
{
    if (r < 0)
        say_error((int)r, "%s", kvd_last_error(kvd));
    else
        say_ok("%lld", r);
}

static bool has(char **arg, const char *what)
{
    for (; *arg; arg++)
        if (strcmp(*arg, what) == 0)
            return true;
    return false;
}

static uint64_t number(const char *text)
{
    return text ? strtoull(text, NULL, 0) : 0;
}

/* The value of an argument "NAME=VALUE"; NULL: not given. */
static const char *value(char **arg, const char *name)
{
    size_t n = strlen(name);

    for (; *arg; arg++)
        if (strncmp(*arg, name, n) == 0 && (*arg)[n] == '=')
            return *arg + n + 1;
    return NULL;
}

/* ---- attaching */

static void do_connect(char **arg)
{
    const char *token = value(arg, "token"), *spin = value(arg, "spin");
    const char *timeout = value(arg, "timeout");
    struct kvd_options o;
    int r;

    kvd_options_init(&o, sizeof(o));
    o.socket = arg[0];
    o.engine_token = token;
    o.engine_token_len = token ? strlen(token) : 0;
    o.spin_us = spin ? (uint32_t)number(spin) : o.spin_us;
    o.timeout_ms = timeout ? (uint32_t)number(timeout) : 60000;
    o.flags = has(arg, "noshm") ? KVD_NO_SHM : 0;
    r = kvd_connect(&o, &kvd);
    if (r < 0)
        say_error(r, "%s", kvd_last_error(NULL));
    else
        say_ok("%u", control_hello(kvd->control)->session);
}

static void do_open(char **arg)
{
    struct kvd_space_options o;
    int r;

    kvd_space_options_init(&o, sizeof(o));
    o.write = strcmp(arg[2], "write") == 0;
    r = kvd_space_open(kvd, arg[0], &o, &space);
    if (r == 0)
        r = kvd_pool_get(space, arg[1], &pool);
    if (r == 0 && !pinset)
        r = kvd_pinset_new(kvd, ITEMS_MAX, &pinset);
    if (r == 0) {
        kvd_pool_info(pool, &info);
        salt = object_salt(arg[0]);
    }
    say(r);
}

static void do_session(char **arg)
{
    (void)arg;
    say_ok("%u", control_hello(kvd->control)->session);
}

static void do_ping(char **arg)
{
    (void)arg;
    say(kvd_ping(kvd));
}

static void do_reset(char **arg)
{
    uint32_t epoch = 0;
    int r = kvd_space_reset(space, &epoch);

    (void)arg;
    say(r < 0 ? r : (long long)epoch);
}

static void do_refresh(char **arg)
{
    int r = kvd_space_refresh(space);

    (void)arg;
    if (r == 0)
        kvd_pool_info(pool, &info);
    say(r);
}

static void do_current(char **arg)
{
    int r = kvd_space_current(space);

    (void)arg;
    if (r < 0)
        say_error(r, "not current");
    else
        say_ok("current");
}

static void do_backing(char **arg)
{
    (void)arg;
    say_ok("%s %llu", info.backing, (unsigned long long)info.page_bytes);
}

static void do_close(char **arg)
{
    (void)arg;
    kvd_close(kvd);
    kvd = NULL;
    say_ok("closed");
}

/* ---- publishing */

static void say_statuses(long long n, const struct held *h, size_t count)
{
    printf("ok %lld", n);
    for (size_t i = 0; i < count; i++)
        printf(" %d", h[i].at.status);
    putchar('\n');
    fflush(stdout);
}

/* Arguments of reserve() and publish(): "chain", "parent=OBJECT". */
static char *alone[] = {NULL}, *chained[] = {(char *)"chain", NULL};

/* Reserves objects; one answer for each in `ret`. */
static ssize_t reserve(uint64_t first, size_t n, char **arg, struct held *ret)
{
    static struct kvd_key keys[ITEMS_MAX];
    static struct kvd_reservation got[ITEMS_MAX];
    struct kvd_reserve q = {.keys = keys, .n = n, .chain = has(arg, "chain")};
    const char *up = value(arg, "parent");
    struct kvd_key parent = object_key(number(up));
    ssize_t granted;

    q.parent = up ? &parent : NULL;
    for (size_t i = 0; i < n; i++)
        keys[i] = object_key(first + i);
    granted = kvd_reserve(pool, &q, got);
    for (size_t i = 0; granted >= 0 && i < n; i++)
        ret[i] = (struct held){.id = first + i, .at = got[i]};
    return granted;
}

static size_t keep_new(const struct held *h, size_t n)
{
    size_t kept = 0;

    for (size_t i = 0; i < n; i++)
        if (h[i].at.status == KVD_NEW) {
            held[n_held++] = h[i];
            kept++;
        }
    return kept;
}

static void do_reserve(char **arg)
{
    static struct held h[ITEMS_MAX];
    size_t n = number(arg[1]);
    ssize_t granted = reserve(number(arg[0]), n, arg + 2, h);

    if (granted < 0) {
        say(granted);
        return;
    }
    keep_new(h, n);
    say_statuses(granted, h, n);
}

static void do_tickets(char **arg)
{
    (void)arg;
    printf("ok");
    for (size_t i = 0; i < n_held; i++)
        printf(" %llu:%llu:%u", (unsigned long long)held[i].id,
               (unsigned long long)held[i].at.ticket, held[i].at.slot);
    putchar('\n');
    fflush(stdout);
}

/* Tickets of another process. */
static void do_take(char **arg)
{
    for (; *arg; arg++) {
        unsigned long long id, ticket;
        struct held *h = &held[n_held];

        if (sscanf(*arg, "%llu:%llu:%u", &id, &ticket, &h->at.slot) != 3)
            continue;
        h->id = id;
        h->at.ticket = ticket;
        h->at.status = KVD_NEW;
        n_held++;
    }
    say_ok("%zu", n_held);
}

static int fill(const struct held *h, uint32_t part)
{
    void *at = kvd_slot_rw(pool, h->at.slot, part);

    if (!at)
        return -EFAULT;
    object_fill(salt, h->id, part, at, info.part_bytes);
    return 0;
}

static void do_fill(char **arg)
{
    uint64_t only = arg[0] ? number(arg[0]) : UINT64_MAX;

    for (size_t i = 0; i < n_held; i++)
        for (uint32_t part = 0; part < info.parts; part++)
            if ((only == UINT64_MAX || part == only) && fill(&held[i], part) < 0) {
                say_error(-EFAULT, "not mapped");
                return;
            }
    say_ok("%zu", n_held);
}

static struct kvd_commit commit_of(const struct held *h, uint32_t part)
{
    return (struct kvd_commit){.ticket = h->at.ticket,
                               .part = part,
                               .bytes = info.part_bytes,
                               .position = h->id,
                               .layout = salt,
                               .user = &h->id,
                               .user_bytes = sizeof(h->id)};
}

/* Commits all that is held, or one part of it; answers how many and the statuses. */
static ssize_t commit(const struct held *h, size_t n, uint64_t only, struct kvd_commit *c)
{
    size_t k = 0;

    for (size_t i = 0; i < n; i++)
        for (uint32_t part = 0; part < info.parts; part++)
            if (only == UINT64_MAX || part == only)
                c[k++] = commit_of(&h[i], part);
    return kvd_commit(pool, c, k);
}

static void do_commit(char **arg)
{
    static struct kvd_commit c[2 * ITEMS_MAX];
    uint64_t only = arg[0] ? number(arg[0]) : UINT64_MAX;
    size_t n = n_held * (only == UINT64_MAX ? info.parts : 1);
    ssize_t r = commit(held, n_held, only, c);

    if (r < 0) {
        say(r);
        return;
    }
    printf("ok %zd", r);
    for (size_t i = 0; i < n; i++)
        printf(" %d", c[i].status);
    putchar('\n');
    fflush(stdout);
}

static void do_forget(char **arg)
{
    (void)arg;
    n_held = 0;
    say_ok("0");
}

static void do_abort(char **arg)
{
    static uint64_t tickets[ITEMS_MAX];
    ssize_t r;

    (void)arg;
    for (size_t i = 0; i < n_held; i++)
        tickets[i] = held[i].at.ticket;
    r = kvd_abort(pool, tickets, n_held);
    n_held = 0;
    say(r);
}

/* Reserve, fill, commit. Returns how many became visible by our doing. */
static ssize_t publish(uint64_t first, size_t n, char **arg, struct held *h)
{
    static struct kvd_commit c[2 * ITEMS_MAX];
    static struct held mine[ITEMS_MAX];
    size_t k = 0;
    ssize_t r = reserve(first, n, arg, h);

    for (size_t i = 0; r >= 0 && i < n; i++)
        if (h[i].at.status == KVD_NEW) {
            for (uint32_t part = 0; part < info.parts; part++)
                fill(&h[i], part);
            mine[k++] = h[i];
        }
    if (r <= 0)
        return r;
    r = commit(mine, k, UINT64_MAX, c);
    return r < 0 ? r : r / (ssize_t)info.parts;
}

static void do_publish(char **arg)
{
    static struct held h[ITEMS_MAX];
    size_t n = number(arg[1]);
    ssize_t r = publish(number(arg[0]), n, arg + 2, h);

    if (r < 0)
        say(r);
    else
        say_statuses(r, h, n);
}

/* ---- reading */

static ssize_t pin(uint64_t first, size_t n, bool all)
{
    static struct kvd_key keys[ITEMS_MAX];
    size_t before = kvd_pinset_count(pinset);
    ssize_t r;

    if (before + n > ITEMS_MAX)
        return -E2BIG;
    for (size_t i = 0; i < n; i++)
        keys[i] = object_key(first + i);
    r = kvd_pin(pinset, pool, keys, n, all ? KVD_PIN_ALL : 0);
    for (size_t i = before; i < kvd_pinset_count(pinset); i++)
        pinned[i] = first + (i - before);
    return r;
}

static void do_pin(char **arg)
{
    say(pin(number(arg[0]), number(arg[1]), has(arg, "all")));
}

/* NULL, or what is wrong with the i-th pinned object. */
static const char *wrong(size_t i)
{
    static char text[160];
    const struct kvd_ref *ref = &kvd_pinset_refs(pinset)[i];
    struct kvd_meta meta;
    uint64_t id;

    if (ref->slot == UINT32_MAX)
        return NULL;
    for (uint32_t part = 0; part < info.parts; part++) {
        const void *at = kvd_pinset_data(pinset, i, part);
        ptrdiff_t word;

        if (!at)
            continue; /* not mapped */
        word = object_wrong(salt, pinned[i], part, at, ref->bytes);
        if (word >= 0) {
            snprintf(text, sizeof(text), "object %llu, slot %u, part %u: word %td is wrong",
                     (unsigned long long)pinned[i], ref->slot, part, word);
            return text;
        }
    }
    if (kvd_pinset_meta(pinset, i, &meta) < 0)
        return "no metadata";
    memcpy(&id, meta.user, sizeof(id));
    if (meta.position == pinned[i] && meta.layout == salt && meta.user_bytes == 8 &&
        id == pinned[i])
        return NULL;
    snprintf(text, sizeof(text), "object %llu has the metadata of %llu",
             (unsigned long long)pinned[i], (unsigned long long)meta.position);
    return text;
}

static const char *check_all(void)
{
    const char *w = NULL;

    for (size_t i = 0; i < kvd_pinset_count(pinset) && !w; i++)
        w = wrong(i);
    return w;
}

static void do_check(char **arg)
{
    const char *w = check_all();

    (void)arg;
    if (w)
        say_error(-EBADMSG, "%s", w);
    else
        say_ok("%zu", kvd_pinset_count(pinset));
}

static void do_release(char **arg)
{
    kvd_pinset_truncate(pinset, number(arg[0]));
    say_ok("%zu", kvd_pinset_count(pinset));
}

static void do_lookup(char **arg)
{
    static struct kvd_key keys[ITEMS_MAX];
    static uint8_t states[ITEMS_MAX];
    size_t n = number(arg[1]);
    ssize_t r;

    for (size_t i = 0; i < n; i++)
        keys[i] = object_key(number(arg[0]) + i);
    r = kvd->flags & KVD_NO_SHM ? kvd_remote_lookup(pool, keys, n, states)
                                : kvd_lookup(pool, keys, n, states);
    if (r < 0) {
        say(r);
        return;
    }
    printf("ok %zd", r);
    for (size_t i = 0; i < n; i++)
        printf(" %u", states[i]);
    putchar('\n');
    fflush(stdout);
}

/* ---- bringing back from a store: arguments FIRST N ["chain"] ["deadline=MS"] */

static struct kvd_fetch fetch_of(char **arg, struct kvd_key *keys)
{
    const char *deadline = value(arg, "deadline");
    size_t n = number(arg[1]);

    for (size_t i = 0; i < n; i++)
        keys[i] = object_key(number(arg[0]) + i);
    return (struct kvd_fetch){.keys = keys,
                              .n = n,
                              .chain = has(arg, "chain"),
                              .deadline_ms = (uint32_t)number(deadline)};
}

static void say_numbers(long long n, const int32_t *status, size_t count)
{
    printf("ok %lld", n);
    for (size_t i = 0; i < count; i++)
        printf(" %d", status[i]);
    putchar('\n');
    fflush(stdout);
}

static void do_fetch(char **arg)
{
    static struct kvd_key keys[ITEMS_MAX];
    static int32_t status[ITEMS_MAX];
    struct kvd_fetch q = fetch_of(arg, keys);
    ssize_t r =
        kvd->flags & KVD_NO_SHM ? kvd_remote_fetch(pool, &q, status) : kvd_fetch(pool, &q, status);

    if (r < 0)
        say(r);
    else
        say_numbers(r, status, q.n);
}

/* Its tags are the objects' numbers. */
static void do_submit_fetch(char **arg)
{
    static struct kvd_key keys[ITEMS_MAX];
    struct kvd_fetch q = fetch_of(arg, keys);

    say(kvd_submit_fetch(pool, &q, number(arg[0])));
}

static void do_cancel(char **arg)
{
    say(kvd_fetch_cancel(pool, number(arg[0]), number(arg[1])));
}

/* Waits for the completions of objects FIRST .. FIRST + N - 1: their statuses, in the order of numbers. */
static void do_completions(char **arg)
{
    static int32_t status[ITEMS_MAX];
    uint64_t first = number(arg[0]);
    size_t n = number(arg[1]), have = 0;
    long long resident = 0;

    for (int tries = 0; have < n && tries < 60000; tries++) {
        struct kvd_completion c[64];
        ssize_t got = kvd_completions(kvd, c, 64);

        for (ssize_t i = 0; i < got; i++)
            if (c[i].user_data - first < n) {
                status[c[i].user_data - first] = c[i].status;
                resident += c[i].status == 0;
                have++;
            }
        if (got <= 0)
            usleep(1000);
    }
    if (have < n)
        say_error(-ETIME, "%zu of %zu completions", have, n);
    else
        say_numbers(resident, status, n);
}

static void do_slot(char **arg)
{
    size_t i = number(arg[0]);

    if (i >= kvd_pinset_count(pinset))
        say_error(-ERANGE, "no such pin");
    else
        say_ok("%u", kvd_pinset_refs(pinset)[i].slot);
}

static void do_remote_get(char **arg)
{
    uint64_t id = number(arg[0]);
    struct kvd_key key = object_key(id);
    char *buf = malloc(info.part_bytes);
    ssize_t r = kvd_remote_get(pool, &key, 0, buf, info.part_bytes, NULL);

    if (r >= 0 && object_wrong(salt, id, 0, buf, (size_t)r) >= 0)
        say_error(-EBADMSG, "wrong bytes");
    else
        say(r);
    free(buf);
}

static void do_remote_put(char **arg)
{
    uint64_t id = number(arg[0]);
    struct kvd_meta meta = {.position = id, .layout = salt, .user_bytes = 8};
    struct kvd_key key = object_key(id);
    char *buf = malloc(info.part_bytes);

    memcpy(meta.user, &id, 8);
    object_fill(salt, id, 0, buf, info.part_bytes);
    say(kvd_remote_put(pool, &key, &meta, buf, info.part_bytes));
    free(buf);
}

/* Reserve through the socket and keep the ticket. */
static void do_remote_reserve(char **arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Reserve q = KVD__PROTO__RESERVE__INIT;
    Kvd__Proto__Key key, *list = &key;
    struct kvd_key bytes = object_key(number(arg[0]));
    struct control_reply reply = {0};
    int r;

    kvd__proto__key__init(&key);
    key.hash = (ProtobufCBinaryData){.data = bytes.hash, .len = 32};
    q.pool = pool->id;
    q.epoch = kvd_space_epoch(space);
    q.n_keys = 1;
    q.keys = &list;
    request.body_case = KVD__PROTO__REQUEST__BODY_RESERVE;
    request.reserve = &q;
    r = control_call(kvd->control, &request, KVD__PROTO__RESPONSE__BODY_RESERVE,
                     control_deadline(60000), &reply);
    if (r < 0) {
        say_error(r, "%s", control_error(kvd->control));
        return;
    }
    held[n_held] =
        (struct held){.id = number(arg[0]),
                      .at = {.status = reply.response->reserve->reservations[0]->status,
                             .slot = (uint32_t)reply.response->reserve->reservations[0]->slot,
                             .ticket = reply.response->reserve->reservations[0]->ticket}};
    say_ok("%d", held[n_held].at.status);
    n_held += held[n_held].at.status == KVD_NEW;
    control_reply_free(&reply);
}

/* ---- what no decent program does */

/* Counts a pin (R2) and goes no further. */
static void do_bump(char **arg)
{
    atomic_fetch_add(&pool->view->pins->pins[number(arg[0])].count, (uint32_t)number(arg[1]));
    say_ok("%u", atomic_load(&pool->view->pins->pins[number(arg[0])].count));
}

static void do_socket(char **arg)
{
    int fd = kvd_event_fd(kvd);

    if (strcmp(arg[0], "close") == 0)
        say(close(fd) < 0 ? -errno : 0);
    else
        say(shutdown(fd, SHUT_RDWR) < 0 ? -errno : 0);
}

/* A child that keeps everything that it inherits, until it is killed. */
static void do_fork(char **arg)
{
    pid_t pid = fork();

    (void)arg;
    if (pid == 0) {
        alarm(120); /* nobody kills it, perhaps */
        for (;;)
            pause();
    }
    say(pid < 0 ? -errno : pid);
}

static void do_stray_write(char **arg)
{
    volatile char *at = (volatile char *)(uintptr_t)kvd_pinset_data(pinset, 0, 0);

    signal(SIGSEGV, SIG_DFL); /* a sanitizer would exit instead */
    at[number(arg[0])] = 1;
    say_ok("it could be written");
}

static void do_stray_write_index(char **arg)
{
    struct shm_index *index = (struct shm_index *)(uintptr_t)pool->view->index;

    (void)arg;
    signal(SIGSEGV, SIG_DFL);
    atomic_store(&index->epoch, 77);
    say_ok("it could be written");
}

/* ---- loops: they end when another line comes */

static bool line_waits(void)
{
    struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};

    return poll(&p, 1, 0) != 0;
}

static const char *stand_by_round(uint64_t first)
{
    static struct held h[8];
    const char *w;
    ssize_t r = publish(first, 8, chained, h);

    if (r != 8)
        return r < 0 ? kvd_last_error(kvd) : "not all could be published";
    r = pin(first, 8, false);
    if (r < 1) /* they are the youngest, so not all eight can be gone */
        return "nothing could be pinned";
    w = check_all();
    kvd_pinset_release(pinset);
    return w;
}

static void do_stand(char **arg)
{
    uint64_t rounds = 0;
    char line[64];

    (void)arg;
    for (;;) {
        const char *w = stand_by_round(1000 + rounds++ * 8);

        if (!w && !line_waits())
            continue;
        if (!fgets(line, sizeof(line), stdin))
            exit(0);
        if (w)
            say_error(-EIO, "round %llu: %s", (unsigned long long)rounds, w);
        else
            say_ok("%llu", (unsigned long long)rounds);
        if (w || strncmp(line, "stop", 4) == 0)
            return;
    }
}

/* Publishes, pins, checks and releases at random; to be killed at any instruction. */
static void do_churn(char **arg)
{
    static struct held h[8];
    uint64_t seed = number(arg[0]), range = number(arg[1]);
    const char *w = NULL;

    say_ok("on it");
    while (!w && !line_waits()) {
        uint64_t x = seed = object_mix(seed + 1), first = x % range;
        size_t n = 1 + (x >> 32) % 8;

        switch (x >> 40 & 3) {
        case 0:
            publish(first, n, x >> 50 & 1 ? chained : alone, h);
            break;
        case 1:
            if (n_held + n < 64)
                reserve(first, n, alone, &held[n_held]);
            break;
        case 2:
            pin(first, n, false);
            break;
        default:
            w = check_all();
            kvd_pinset_truncate(pinset, kvd_pinset_count(pinset) / 2);
        }
    }
    if (w)
        say_error(-EBADMSG, "%s", w);
    else
        say_ok("done");
}

/* Competes for the same objects. Answers how many were ours, and that every status made sense. */
static void do_race(char **arg)
{
    static struct held h[8];
    uint64_t first = number(arg[0]), end = first + number(arg[1]);
    long long ours = 0;

    for (; first < end; first += 8) {
        ssize_t r = publish(first, 8, alone, h);

        for (size_t i = 0; r >= 0 && i < 8; i++)
            if (h[i].at.status < KVD_NEW)
                r = h[i].at.status;
        if (r < 0) {
            say_error((int)r, "at %llu: %s", (unsigned long long)first, kvd_last_error(kvd));
            return;
        }
        ours += r;
    }
    say_ok("%lld", ours);
}

/* Pins, checks and releases the same objects until another line comes. */
static void do_watch(char **arg)
{
    uint64_t rounds = 0, hits = 0;
    const char *w = NULL;

    while (!w && !line_waits()) {
        ssize_t r = pin(number(arg[0]), number(arg[1]), true);

        hits += r > 0 ? (uint64_t)r : 0;
        rounds++;
        w = check_all();
        kvd_pinset_release(pinset);
    }
    if (w)
        say_error(-EBADMSG, "%s", w);
    else
        say_ok("%llu of %llu", (unsigned long long)hits, (unsigned long long)rounds);
}

/* Publishes chains of eight, fetches, pins, checks and releases at random, whatever the daemon answers: it
 * may die meanwhile. Only a wrong byte ends it. */
static void do_spill_churn(char **arg)
{
    static struct held h[8];
    static struct kvd_key keys[8];
    static int32_t status[8];
    uint64_t seed = number(arg[0]), chains = number(arg[1]), pins = 0;
    const char *w = NULL;

    say_ok("on it");
    while (!w && !line_waits()) {
        uint64_t x = seed = object_mix(seed + 1), first = x % chains * 8;
        struct kvd_fetch q = {.keys = keys, .n = 8, .deadline_ms = 500};

        for (size_t i = 0; i < 8; i++)
            keys[i] = object_key(first + i);
        if (kvd_fetch(pool, &q, status) < 8)
            publish(first, 8, chained, h);
        if (pin(first, 8, true) > 0)
            pins++;
        w = check_all();
        kvd_pinset_release(pinset);
    }
    if (w)
        say_error(-EBADMSG, "%s", w);
    else
        say_ok("%llu", (unsigned long long)pins);
}

/* ---- commands */

struct command {
    const char *name;
    void (*run)(char **arg);
};

static const struct command commands[] = {
    {"connect", do_connect},
    {"open", do_open},
    {"session", do_session},
    {"ping", do_ping},
    {"reset", do_reset},
    {"refresh", do_refresh},
    {"current", do_current},
    {"backing", do_backing},
    {"close", do_close},
    {"reserve", do_reserve},
    {"tickets", do_tickets},
    {"take", do_take},
    {"fill", do_fill},
    {"commit", do_commit},
    {"forget", do_forget},
    {"abort", do_abort},
    {"publish", do_publish},
    {"pin", do_pin},
    {"check", do_check},
    {"release", do_release},
    {"lookup", do_lookup},
    {"fetch", do_fetch},
    {"submit-fetch", do_submit_fetch},
    {"cancel", do_cancel},
    {"completions", do_completions},
    {"spill-churn", do_spill_churn},
    {"slot", do_slot},
    {"get", do_remote_get},
    {"put", do_remote_put},
    {"reserve-remote", do_remote_reserve},
    {"bump", do_bump},
    {"socket", do_socket},
    {"fork", do_fork},
    {"stray-write", do_stray_write},
    {"stray-write-index", do_stray_write_index},
    {"stand", do_stand},
    {"churn", do_churn},
    {"race", do_race},
    {"watch", do_watch},
    {"raw", hostile_command},
};

static void obey(char *line)
{
    char *arg[512] = {NULL}, *save = NULL;
    size_t n = 0;

    for (char *t = strtok_r(line, " \n", &save); t && n < 511; t = strtok_r(NULL, " \n", &save))
        arg[n++] = t;
    if (!n)
        return;
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(commands[i].name, arg[0]) == 0) {
            commands[i].run(arg + 1);
            return;
        }
    say_error(-ENOSYS, "no command %s", arg[0]);
}

static void *listen_on(void *unused)
{
    static char line[16384];

    (void)unused;
    while (fgets(line, sizeof(line), stdin)) {
        if (strncmp(line, "quit", 4) == 0)
            exit(0);
        if (strncmp(line, "leave-main", 10) == 0)
            continue; /* we are not main() any more */
        obey(line);
    }
    exit(0);
}

/* The first thread may leave the process while others stay: the process lives on. */
int main(void)
{
    static char line[16384];
    pthread_t t;

    setvbuf(stdin, NULL, _IONBF, 0); /* or line_waits() would not see what lies in the buffer */
    while (fgets(line, sizeof(line), stdin)) {
        if (strncmp(line, "quit", 4) == 0)
            return 0;
        if (strncmp(line, "leave-main", 10) == 0 &&
            pthread_create(&t, NULL, listen_on, NULL) == 0) {
            say_ok("left");
            pthread_exit(NULL);
        }
        obey(line);
    }
    return 0;
}
