/* SPDX-License-Identifier: Apache-2.0 */
#include "hostile.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/control.h"
#include "objects.h"
#include "shm/layout.h"
#include "shm/ring.h"

#define CALL_MS 60000u

struct mapping {
    int fd;
    void *addr;
    size_t bytes;
};

static struct control *control;
static struct mapping core, session, pins, data;
static struct shm_cursor requests, completions;

static pthread_t scribbler;
static atomic_bool scribbling;
static atomic_ulong scribbled;

/* ---- attaching */

static int map(int fd, int prot, struct mapping *ret)
{
    struct stat st;
    void *addr;

    if (fstat(fd, &st) < 0)
        return -errno;
    addr = mmap(NULL, (size_t)st.st_size, prot, MAP_SHARED, fd, 0);
    if (addr == MAP_FAILED)
        return -errno;
    *ret = (struct mapping){.fd = fd, .addr = addr, .bytes = (size_t)st.st_size};
    return 0;
}

static void answer(int r)
{
    if (r < 0)
        say_error(r, "%s", control ? control_error(control) : strerror(-r));
    else
        say_ok("%d", r);
}

static int call(Kvd__Proto__Request *request, struct control_reply *ret_reply)
{
    return control_call(control, request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                        control_deadline(CALL_MS), ret_reply);
}

static void do_connect(char **arg)
{
    struct control_options o = {.socket = arg[0],
                                .client = "hostile",
                                .shm = true,
                                .ring_entries = (uint32_t)(arg[1] ? strtoul(arg[1], NULL, 0) : 64)};
    struct control_reply reply = {0};
    int r = control_new(&o, &control);

    if (r == 0)
        r = control_connect(control, control_deadline(CALL_MS), &reply);
    if (r == 0) {
        r = map(control_take_fd(&reply, 0), PROT_READ, &core);
        if (r == 0)
            r = map(control_take_fd(&reply, 1), PROT_READ | PROT_WRITE, &session);
        control_reply_free(&reply);
    }
    if (r == 0) {
        struct shm_session *s = session.addr;
        uint32_t n = (uint32_t)s->header.count;

        requests = (struct shm_cursor){.ring = &s->requests, .entries = n};
        completions = (struct shm_cursor){.ring = &s->completions, .entries = n};
        r = (int)control_hello(control)->session;
    }
    answer(r);
}

static void do_open(char **arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__PoolOpen open_ = KVD__PROTO__POOL_OPEN__INIT;
    struct control_reply reply = {0};
    int r;

    open_.pool = (uint32_t)strtoul(arg[0], NULL, 0);
    request.body_case = KVD__PROTO__REQUEST__BODY_POOL_OPEN;
    request.pool_open = &open_;
    r = call(&request, &reply);
    if (r == 0) {
        r = map(control_take_fd(&reply, 2), PROT_READ | PROT_WRITE, &pins);
        control_reply_free(&reply);
    }
    answer(r);
}

/* The first chunk of a pool's first part, writable. */
static void do_chunk(char **arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__ChunkMap q = KVD__PROTO__CHUNK_MAP__INIT;
    struct control_reply reply = {0};
    int r;

    q.pool = (uint32_t)strtoul(arg[0], NULL, 0);
    q.has_write = q.has_part_mask = 1;
    q.write = 1;
    q.part_mask = 1;
    request.body_case = KVD__PROTO__REQUEST__BODY_CHUNK_MAP;
    request.chunk_map = &q;
    r = call(&request, &reply);
    if (r == 0) {
        r = map(control_take_fd(&reply, 1), PROT_READ | PROT_WRITE, &data);
        control_reply_free(&reply);
    }
    answer(r);
}

static void do_ping(char **arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping ping = KVD__PROTO__PING__INIT;

    (void)arg;
    request.body_case = KVD__PROTO__REQUEST__BODY_PING;
    request.ping = &ping;
    answer(call(&request, NULL));
}

/* Gives back a slot of any pool, opened or not. */
static void do_release(char **arg)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Release q = KVD__PROTO__RELEASE__INIT;
    uint64_t slot = 0;

    q.pool = (uint32_t)strtoul(arg[0], NULL, 0);
    q.n_slots = 1;
    q.slots = &slot;
    request.body_case = KVD__PROTO__REQUEST__BODY_RELEASE;
    request.release = &q;
    answer(call(&request, NULL));
}

/* ---- the ring, by hand */

static void post(const struct shm_request *q)
{
    struct shm_session *s = session.addr;
    const struct shm_core *c = core.addr;

    s->request[shm_ring_at(&requests, requests.mine)] = *q;
    shm_ring_produce(&requests, 1);
    if (shm_must_wake(&c->sleeping))
        control_wake(control);
}

/* A reserve of POOL for object ID under EPOCH, or a commit of TICKET; the status is the answer. */
static void do_request(char **arg)
{
    struct shm_request q = {.op = (uint8_t)strtoul(arg[0], NULL, 0),
                            .pool = (uint32_t)strtoul(arg[1], NULL, 0),
                            .epoch = (uint32_t)strtoul(arg[3], NULL, 0)};
    struct shm_completion *done = shm_completion_array(session.addr, completions.entries);
    uint64_t until = frame_clock() + (uint64_t)CALL_MS * 1000000;
    struct kvd_key key;

    if (q.op == SHM_COMMIT) {
        q.ticket = strtoull(arg[2], NULL, 0);
        q.commit.bytes = 4096;
    } else {
        key = object_key(strtoull(arg[2], NULL, 0));
        memcpy(&q.reserve.key, &key, sizeof(key));
    }
    post(&q);
    while (shm_ring_waiting(&completions) <= 0) {
        if (frame_clock() > until || !control_is_open(control)) {
            say_error(-ETIMEDOUT, "no completion");
            return;
        }
        control_wait(control, frame_clock() + 1000000);
    }
    done += shm_ring_at(&completions, completions.mine);
    say_ok("%d %u %llu", done->status, done->slot, (unsigned long long)done->ticket);
    shm_ring_consume(&completions, 1);
}

/* Says that there are requests, whether or not there is memory for them. */
static void do_tail(char **arg)
{
    struct shm_session *s = session.addr;

    atomic_store(&s->requests.tail, (uint32_t)strtoul(arg[0], NULL, 0));
    answer(control_wake(control));
}

/* Counts pins of a slot by hand. */
static void do_count(char **arg)
{
    struct shm_pins *p = pins.addr;

    atomic_fetch_add(&p->pins[strtoul(arg[0], NULL, 0)].count, (uint32_t)strtoul(arg[1], NULL, 0));
    say_ok("counted");
}

/* ---- harm */

static struct mapping *which(const char *name)
{
    return strcmp(name, "session") == 0 ? &session : strcmp(name, "pins") == 0 ? &pins : &data;
}

static void do_truncate(char **arg)
{
    answer(ftruncate(which(arg[0])->fd, (off_t)strtoull(arg[1], NULL, 0)) < 0 ? -errno : 0);
}

static void do_punch(char **arg)
{
    struct mapping *m = which(arg[0]);

    answer(fallocate(m->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)m->bytes) < 0
               ? -errno
               : 0);
}

static uint64_t next(uint64_t *seed)
{
    return *seed = object_mix(*seed + UINT64_C(0x9e3779b97f4a7c15));
}

/* Any eight bytes of the two segments but their headers' first page, which nobody reads again. */
static void scribble_all(uint64_t *seed)
{
    for (unsigned i = 0; i < 64; i++) {
        struct mapping *m = next(seed) & 1 && pins.addr ? &pins : &session;
        uint64_t at = next(seed) % (m->bytes / 8);

        ((volatile uint64_t *)m->addr)[at] = next(seed);
    }
}

/* Counters of the pin segment: every value at every slot. */
static void scribble_pins(uint64_t *seed)
{
    struct shm_pins *p = pins.addr;
    uint64_t n = (pins.bytes - SHM_PAGE) / sizeof(struct shm_pin);

    for (unsigned i = 0; i < 64; i++) {
        volatile struct shm_pin *pin = &p->pins[next(seed) % n];

        atomic_store(&pin->count, (uint32_t)next(seed) * (next(seed) & 1));
        atomic_store(&pin->stamp, (uint32_t)next(seed));
    }
}

/* A garbled request at `at`, plausible enough to be carried out now and then. */
static void garble(struct shm_request *q, uint64_t *seed)
{
    for (size_t i = 0; i < sizeof(*q) / 8; i++)
        ((uint64_t *)(void *)q)[i] = next(seed);
    q->op = (uint8_t)(next(seed) % 5);
    q->pool = (uint32_t)(next(seed) % 4);
    q->epoch = (uint32_t)(next(seed) % 3);
    if (next(seed) & 1)
        q->ticket = next(seed) % 64 | (next(seed) % 1024) << SHM_SLOT_BITS;
    if (next(seed) & 1)
        q->commit.bytes = next(seed) % 3 * 32768;
}

/* Requests that are garbage, posted by the rules and changed again while they are read. */
static void scribble_requests(uint64_t *seed)
{
    struct shm_session *s = session.addr;
    int64_t n;

    while ((n = shm_ring_waiting(&completions)) > 0)
        shm_ring_consume(&completions, (uint32_t)n);
    if (shm_ring_room(&requests)) {
        struct shm_request q;

        garble(&q, seed);
        post(&q);
    }
    for (unsigned i = 0; i < 4; i++)
        garble(&s->request[next(seed) % requests.entries], seed);
}

/* Uses that the daemon need not answer, faster than it can look them up: the core never comes to rest. */
static void scribble_flood(uint64_t *seed)
{
    struct shm_request q = {.op = SHM_OBSERVE, .epoch = 1, .observe.n = SHM_OBSERVE_KEYS};

    for (unsigned i = 0; i < SHM_OBSERVE_KEYS; i++)
        memcpy(q.observe.keys[i].hash, seed, sizeof(*seed));
    for (uint32_t room = shm_ring_room(&requests); room; room--)
        post(&q);
}

/* The same through the socket, thousands of requests in one go. What the daemon says is thrown away. */
static void scribble_pings(uint64_t *seed)
{
    static uint8_t block[65536], trash[65536];
    static size_t sent = sizeof(block);
    ssize_t n;

    (void)seed;
    if (sent == sizeof(block)) {
        for (size_t at = 0; at < sizeof(block); at += 8)
            memcpy(block + at, "\4\0\0\0\x08\x02\x62\0", 8); /* Request {id 2, ping {}} */
        sent = 0;
    }
    n = send(control_fd(control), block + sent, sizeof(block) - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0)
        sent += (size_t)n;
    while (recv(control_fd(control), trash, sizeof(trash), MSG_DONTWAIT) > 0)
        ;
}

struct scribbling {
    const char *name;
    void (*fn)(uint64_t *seed);
};

static const struct scribbling ways[] = {
    {"all", scribble_all},     {"pins", scribble_pins},   {"requests", scribble_requests},
    {"flood", scribble_flood}, {"pings", scribble_pings},
};

static void *scribble(void *arg)
{
    const struct scribbling *way = arg;
    uint64_t seed = (uint64_t)getpid();

    while (atomic_load(&scribbling)) {
        way->fn(&seed);
        atomic_fetch_add(&scribbled, 1);
    }
    return NULL;
}

static void do_scribble(char **arg)
{
    int r = -ENOENT;

    atomic_store(&scribbling, true);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        if (strcmp(ways[i].name, arg[0]) == 0)
            r = -pthread_create(&scribbler, NULL, scribble, (void *)(uintptr_t)&ways[i]);
    answer(r);
}

/* A child has the mappings, too, and outlives us. */
static void do_fork(char **arg)
{
    uint64_t seed = (uint64_t)getpid();
    pid_t pid = fork();

    (void)arg;
    if (pid == 0) {
        alarm(120); /* nobody kills it, perhaps */
        for (;;)
            scribble_pins(&seed);
    }
    answer(pid < 0 ? -errno : pid);
}

static void do_how_much(char **arg)
{
    (void)arg;
    say_ok("%lu", atomic_load(&scribbled));
}

static void do_stop(char **arg)
{
    (void)arg;
    atomic_store(&scribbling, false);
    pthread_join(scribbler, NULL);
    say_ok("%lu", atomic_load(&scribbled));
}

/* ---- */

static const struct {
    const char *name;
    void (*run)(char **arg);
} commands[] = {
    {"connect", do_connect},   {"open", do_open},       {"chunk", do_chunk},
    {"ping", do_ping},         {"release", do_release}, {"request", do_request},
    {"truncate", do_truncate}, {"punch", do_punch},     {"scribble", do_scribble},
    {"how-much", do_how_much}, {"stop", do_stop},       {"count", do_count},
    {"tail", do_tail},         {"fork", do_fork},
};

void hostile_command(char **arg)
{
    for (size_t i = 0; arg[0] && i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(commands[i].name, arg[0]) == 0) {
            commands[i].run(arg + 1);
            return;
        }
    say_error(-ENOSYS, "no command raw %s", arg[0] ? arg[0] : "");
}
