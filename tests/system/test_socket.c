/* SPDX-License-Identifier: Apache-2.0 */
/* Whatever a client may say or leave unsaid on its socket. It ends that one connection or gets a clear
 * refusal, while a bystander goes on publishing and reading. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "harness.h"
#include "objects.h"
#include "raw.h"
#include "shm/layout.h"

TestSuite(socket, .init = harness_init, .fini = harness_fini);

#define MAX_FRAME (1 << 20)

static struct daemon d;
static struct worker bystander, a;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

static void begin(const char *keys, const char *more)
{
    static char rest[2048];

    snprintf(rest, sizeof(rest), "%s%s", usual_pools, more);
    daemon_prepare(&d, keys, rest);
    daemon_start(&d);
    bystander_start(&bystander, &d);
}

static void finish(void)
{
    bystander_stop(&bystander);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* ---- bytes that are no request */

struct bytes {
    const char *what;
    const char *data;
    size_t n;
    int32_t status; /* of the last word, which has the id 0; RAW_END: there is none */
};

#define BYTES(what, text, status)                                                                  \
    {                                                                                              \
        what, text, sizeof(text) - 1, status                                                       \
    }

static const struct bytes no_requests[] = {
    BYTES("length 2^31", "\0\0\0\x80", -EMSGSIZE),
    BYTES("length 2^32 - 1", "\xff\xff\xff\xff garbage", -EMSGSIZE),
    BYTES("one byte too long", "\x01\0\x10\0", -EMSGSIZE),
    BYTES("length 0", "\0\0\0\0", -EPROTO),
    BYTES("not protobuf", "\4\0\0\0\xff\xff\xff\xff", -EBADMSG),
    BYTES("a field that is longer than its message", "\6\0\0\0\x08\x01\x62\x7f\0\0", -EBADMSG),
    BYTES("no id", "\2\0\0\0\x62\0", -EBADMSG),
    BYTES("id 0", "\4\0\0\0\x08\0\x62\0", -EPROTO),
    BYTES("Hello without versions", "\4\0\0\0\x08\1\x52\0", -EBADMSG),
    BYTES("Lookup without a pool", "\5\0\0\0\x08\1\xf2\1\0", -EBADMSG),
    BYTES("a varint without end", "\x0c\0\0\0\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
          -EBADMSG),
    BYTES("group tags", "\4\0\0\0\x0b\x0b\x0b\x0b", -EBADMSG),
    BYTES("half a header", "\4\0", RAW_END),
    BYTES("half a message", "\x40\0\0\0\x08\1\x52", RAW_END),
    BYTES("nothing", "", RAW_END),
};

Test(socket, bytes_that_are_no_request)
{
    unsigned connections;

    begin(NULL, "");
    connections = daemon_connections(&d);
    for (int joined = 0; joined < 2; joined++)
        for (size_t i = 0; i < sizeof(no_requests) / sizeof(no_requests[0]); i++) {
            const struct bytes *b = &no_requests[i];
            struct raw r;

            raw_connect(&r, d.writer);
            if (joined)
                cr_assert_eq(raw_hello(&r, NULL, NULL), 0);
            cr_assert(raw_bytes(&r, b->data, b->n));
            shutdown(r.fd, SHUT_WR);
            cr_assert_eq(raw_answer(&r), b->status, "%s", b->what);
            if (b->status != RAW_END) {
                cr_assert_eq(r.response->id, 0, "%s", b->what);
                cr_assert(r.response->message && r.response->message[0], "%s", b->what);
                cr_assert_eq(raw_answer(&r), RAW_END, "%s", b->what);
            }
            raw_close(&r);
            bystander_check(&bystander);
        }
    eventually(daemon_connections(&d) == connections);
    finish();
}

/* Random bytes in frames of a right length, and right messages with a wrong byte. */
Test(socket, garbled_requests, .timeout = 120)
{
    uint64_t seed = clock_us();

    cr_log_info("seed %llu", (unsigned long long)seed);
    begin(NULL, "");
    for (int i = 0; i < 1500; i++) {
        uint8_t frame[96];
        struct raw r;
        size_t n;

        seed = object_mix(seed + 1);
        n = 5 + seed % 80;
        raw_join(&r, d.writer);
        for (size_t k = 4; k < n; k++)
            frame[k] = (uint8_t)(seed = object_mix(seed + k));
        memcpy(frame, (uint8_t[]){(uint8_t)(n - 4), 0, 0, 0}, 4);
        if (i & 1) { /* a body of some kind, after an id */
            unsigned field = 10 + (unsigned)(seed >> 8) % 50;

            memcpy(frame + 4,
                   (uint8_t[]){0x08, 0x01, (uint8_t)(field << 3 | 0x82), (uint8_t)(field >> 4)}, 4);
            if (n > 9)
                frame[8] = (uint8_t)(n - 9);
        }
        raw_bytes(&r, frame, n);
        shutdown(r.fd, SHUT_WR);
        while (raw_answer(&r) != RAW_END)
            ;
        raw_close(&r);
    }
    finish();
}

static void send_with_fds(struct raw *r, unsigned n)
{
    union {
        char bytes[CMSG_SPACE(253 * sizeof(int))];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    char ping[] = "\4\0\0\0\x08\1\x62";
    struct iovec iov = {.iov_base = ping, .iov_len = 8};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = CMSG_SPACE(n * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    int fds[253];

    for (unsigned i = 0; i < n; i++)
        fds[i] = STDERR_FILENO;
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
    cr_assert_eq(sendmsg(r->fd, &m, MSG_NOSIGNAL), 8, "%s", strerror(errno));
}

static unsigned count_fds(pid_t pid)
{
    char command[64];
    unsigned n = 0;
    FILE *f;

    snprintf(command, sizeof(command), "ls /proc/%d/fd | wc -l", (int)pid);
    f = popen(command, "r");
    cr_assert(f && fscanf(f, "%u", &n) == 1);
    pclose(f);
    return n;
}

Test(socket, descriptors_that_nobody_asked_for)
{
    unsigned before;

    begin(NULL, "");
    daemon_connections(&d);
    before = count_fds(d.pid);
    for (unsigned n = 1; n <= 253; n = n == 1 ? 2 : n == 2 ? 253 : 254) {
        struct raw r;

        raw_join(&r, d.writer);
        send_with_fds(&r, n);
        cr_assert_eq(raw_answer(&r), -EPROTO);
        cr_assert_eq(r.response->id, 0);
        cr_assert_eq(raw_answer(&r), RAW_END);
        raw_close(&r);
    }
    eventually(count_fds(d.pid) == before);
    finish();
}

/* ---- slow, silent, many */

Test(socket, slow_and_silent)
{
    static const char ping[] = "\4\0\0\0\x08\7\x62";
    struct raw slow, silent, deaf;
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;

    begin(NULL, "");
    raw_connect(&silent, d.writer);
    raw_join(&slow, d.writer);
    raw_join(&deaf, d.writer);
    for (int i = 0; i < 8; i++) {
        cr_assert(raw_bytes(&slow, ping + i, 1));
        bystander_check(&bystander);
    }
    cr_assert_eq(raw_answer(&slow), 0);
    cr_assert_eq(slow.response->id, 7);
    raw_close(&slow);

    /* Asks and asks, and never reads an answer: it may wait, but nobody else. */
    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    for (int i = 0; i < 100000; i++) {
        uint8_t frame[16] = {0};
        size_t n;

        request.id = (uint64_t)i + 1;
        n = kvd__proto__request__pack(&request, frame + 4);
        frame[0] = (uint8_t)n;
        if (send(deaf.fd, frame, n + 4, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            break;
    }
    cr_assert_eq(errno, EAGAIN, "it could send without end");
    bystander_check(&bystander);
    raw_close(&deaf);

    /* Who never says anything is told so, and goes. */
    cr_assert_eq(raw_answer(&silent), -ETIMEDOUT);
    cr_assert_eq(silent.response->id, 0);
    cr_assert_eq(raw_answer(&silent), RAW_END);
    raw_close(&silent);
    finish();
}

Test(socket, a_thousand_at_once, .timeout = 120)
{
    static struct raw r[1000];

    begin(NULL, "");
    for (int i = 0; i < 1000; i++)
        raw_connect(&r[i], d.writer);
    for (int i = 0; i < 1000; i++)
        cr_assert_eq(raw_hello(&r[i], NULL, NULL), 0, "%d: %s", i, r[i].response->message);
    bystander_check(&bystander);
    cr_assert_geq(daemon_sessions(&d), 1000);
    for (int i = 0; i < 1000; i++)
        raw_close(&r[i]);
    eventually(daemon_sessions(&d) == 2);
    eventually(daemon_connections(&d) == 2);
    finish();
}

static void with_rings(Kvd__Proto__Hello *hello, void *arg)
{
    (void)arg;
    hello->has_shm = hello->shm = hello->has_ring_entries = 1;
    hello->ring_entries = 16;
}

/* A process that attaches until it is refused; then it waits to be killed. */
static pid_t take_all_sessions(int *ret_status)
{
    int report[2];
    pid_t pid;

    cr_assert_eq(pipe(report), 0);
    pid = fork();
    if (pid == 0) {
        int32_t status = 0;

        for (int i = 0; status == 0; i++) {
            struct raw r;

            raw_connect(&r, d.writer);
            status = raw_hello(&r, with_rings, NULL);
            if (i & 1) /* the session stays, the socket need not */
                raw_close(&r);
        }
        if (write(report[1], &status, sizeof(status)) < 0)
            _exit(1);
        for (;;)
            pause();
    }
    cr_assert_eq(read(report[0], ret_status, sizeof(*ret_status)), sizeof(*ret_status));
    close(report[0]);
    close(report[1]);
    return pid;
}

Test(socket, one_process_takes_all_sessions, .timeout = 120)
{
    int status;
    pid_t pid;

    begin("max_sessions = 300\n", "");
    daemon_connections(&d);
    pid = take_all_sessions(&status);
    cr_assert_eq(status, -EUSERS);
    bystander_check(&bystander);
    worker_start(&a);
    cr_assert_eq(worker_try(&a, "connect %s", d.writer), -EUSERS);
    cr_assert_not_null(strstr(a.reply, "max_sessions"), "%s", a.reply);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    eventually(daemon_sessions(&d) == 2);
    worker_do(&a, "connect %s", d.writer);
    worker_quit(&a);
    finish();
}

/* Somebody takes all descriptors that the daemon may have. */
Test(socket, no_descriptors_left, .timeout = 120)
{
    static char rest[2048];
    struct raw r[300];
    int n = 0, refused = 0;
    int32_t status = 0;

    snprintf(rest, sizeof(rest), "%s", usual_pools);
    daemon_prepare(&d, NULL, rest);
    d.max_fds = 160;
    daemon_start(&d);
    bystander_start(&bystander, &d);
    daemon_connections(&d);
    while (status != -EMFILE && n < 100) {
        raw_connect(&r[n], d.writer);
        status = raw_hello(&r[n], with_rings, NULL);
        if (status < 0 && !refused++)
            cr_log_info("connection %d: %s", n, r[n].response ? r[n].response->message : "closed");
        n++;
    }
    cr_assert_eq(status, -EMFILE);
    for (int i = 0; i < 200; i++) /* now even accepting fails */
        raw_connect(&r[n++], d.writer);
    bystander_check(&bystander);
    worker_start(&a);
    cr_assert_lt(worker_try(&a, "connect %s timeout=2000", d.writer), 0);
    bystander_check(&bystander);
    while (n-- > 0)
        raw_close(&r[n]);
    eventually(worker_try(&a, "connect %s", d.writer) == 0);
    worker_do(&a, "open one kv write");
    cr_assert_eq(worker_n(&a, "publish 0 4"), 4);
    worker_quit(&a);
    bystander_stop(&bystander);
    daemon_stop(&d);
}

/* ---- order and roles */

#define REQUEST(r, Type, TYPE, field, message)                                                     \
    Kvd__Proto__Request r = KVD__PROTO__REQUEST__INIT;                                             \
    Kvd__Proto__##Type message = KVD__PROTO__##TYPE##__INIT;                                       \
    r.body_case = KVD__PROTO__REQUEST__BODY_##TYPE;                                                \
    r.field = &message

Test(socket, out_of_order)
{
    struct raw r;

    begin(NULL, "");
    raw_connect(&r, d.writer);
    {
        REQUEST(q, Ping, PING, ping, ping);
        cr_assert_eq(raw_call(&r, &q), -EPROTO);
        cr_assert_not_null(strstr(r.response->message, "hello"));
    }
    {
        REQUEST(q, Status, STATUS, status, status);
        cr_assert_eq(raw_call(&r, &q), -EPROTO);
    }
    {
        REQUEST(q, Reserve, RESERVE, reserve, reserve);
        cr_assert_eq(raw_call(&r, &q), -EPROTO);
    }
    {
        REQUEST(q, Bye, BYE, bye, bye);
        cr_assert_eq(raw_call(&r, &q), -EPROTO);
    }
    cr_assert_eq(raw_hello(&r, NULL, NULL), 0, "and then it may go on");
    cr_assert_eq(raw_hello(&r, NULL, NULL), -EALREADY);
    {
        Kvd__Proto__Request nothing = KVD__PROTO__REQUEST__INIT;
        REQUEST(q, Ping, PING, ping, ping);

        cr_assert_eq(raw_call(&r, &nothing), -ENOSYS, "a request of a later version");
        cr_assert_eq(raw_call(&r, &q), 0);
    }
    {
        REQUEST(q, Bye, BYE, bye, bye);
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(raw_answer(&r), RAW_END);
    }
    raw_close(&r);
    finish();
}

/* With shared memory a session outlives its connection; this one says so. */
static void part(struct raw *r)
{
    REQUEST(q, Bye, BYE, bye, bye);

    cr_assert_eq(raw_call(r, &q), 0);
    raw_close(r);
}

static struct kvd_key some_key;
static Kvd__Proto__Key key, *keys[] = {&key};

static void make_key(void)
{
    some_key = object_key(1);
    raw_key(&key, &some_key);
}

static uint32_t space_number(struct raw *r, const char *name)
{
    REQUEST(q, SpaceOpen, SPACE_OPEN, space_open, open);

    open.name = (char *)name;
    cr_assert_eq(raw_call(r, &q), 0);
    return r->response->space_open->space;
}

/* Everything that changes something needs a writer, whichever way it comes. */
Test(socket, a_reader_changes_nothing)
{
    uint32_t pool;
    struct raw r;

    begin(NULL, "");
    make_key();
    pool = daemon_pool(&d, "one/kv");
    raw_connect(&r, d.reader);
    cr_assert_eq(raw_hello(&r, with_rings, NULL), 0);
    {
        REQUEST(q, SpaceOpen, SPACE_OPEN, space_open, open);
        open.name = (char *)"one";
        open.has_write = open.write = 1;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Reserve, RESERVE, reserve, reserve);
        reserve.pool = pool;
        reserve.epoch = 1;
        reserve.n_keys = 1;
        reserve.keys = keys;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Write, WRITE, write, write_);
        write_.pool = pool;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Commit, COMMIT, commit, commit);
        commit.pool = pool;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Abort, ABORT, abort, abort_);
        abort_.pool = pool;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, SpaceReset, SPACE_RESET, space_reset, reset);
        reset.space = space_number(&r, "one");
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, ChunkMap, CHUNK_MAP, chunk_map, map);
        map.pool = pool;
        map.has_write = map.write = 1;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
        cr_assert_eq(r.response->fds, 0);
    }
    part(&r);
    worker_start(&a);
    worker_do(&a, "raw connect %s", d.reader);
    worker_do(&a, "raw open %u", pool);
    worker_do(&a, "raw request %d %u 1 1", SHM_RESERVE, pool);
    cr_assert_eq(atoi(a.reply), -EACCES, "%s", a.reply);
    worker_do(&a, "raw request %d %u 1 1", SHM_COMMIT, pool);
    cr_assert_eq(atoi(a.reply), -EACCES, "%s", a.reply);
    worker_quit(&a);
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 64);
    finish();
}

/* What administrators may, a writer may not. */
Test(socket, a_writer_is_no_administrator)
{
    struct raw r;

    begin(NULL, "");
    make_key();
    raw_join(&r, d.writer);
    {
        REQUEST(q, Kill, KILL, kill, kill_);
        kill_.session = 1;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Sessions, SESSIONS, sessions, sessions);
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Blocks, BLOCKS, blocks, blocks);
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Evict, EVICT, evict, evict);
        evict.has_count = 1;
        evict.count = 5;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Flush, FLUSH, flush, flush);
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Why, WHY, why, why);
        why.key = &key;
        cr_assert_eq(raw_call(&r, &q), -EACCES);
    }
    {
        REQUEST(q, Status, STATUS, status, status);
        cr_assert_eq(raw_call(&r, &q), 0);
    }
    raw_close(&r);
    finish();
}

/* A socket that shows space two only: space one does not exist there (I6). */
Test(socket, shows_its_spaces_only)
{
    static char narrow[96], more[256];
    uint32_t pool;
    struct raw r;

    snprintf(narrow, sizeof(narrow), "/dev/shm/kvd-system-narrow-%d.sock", (int)getpid());
    snprintf(more, sizeof(more), "[socket narrow]\npath = %s\nrole = writer\nspaces = two\n",
             narrow);
    begin(NULL, more);
    make_key();
    pool = daemon_pool(&d, "one/kv");
    raw_connect(&r, narrow);
    cr_assert_eq(raw_hello(&r, with_rings, NULL), 0);
    {
        REQUEST(q, SpaceOpen, SPACE_OPEN, space_open, open);
        open.name = (char *)"one";
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
    }
    {
        REQUEST(q, SpaceReset, SPACE_RESET, space_reset, reset);
        reset.space = 0; /* the first in the configuration */
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
    }
    {
        REQUEST(q, Lookup, LOOKUP, lookup, lookup);
        lookup.pool = pool;
        lookup.epoch = 1;
        lookup.n_keys = 1;
        lookup.keys = keys;
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
    }
    {
        REQUEST(q, PoolOpen, POOL_OPEN, pool_open, open);
        open.pool = pool;
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
    }
    {
        REQUEST(q, Status, STATUS, status, status);
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(r.response->status_reply->n_spaces, 1);
        cr_assert_eq(r.response->status_reply->n_pools, 1);
    }
    part(&r);

    /* Nor by the ring, whatever was asked on the socket before. */
    worker_start(&a);
    worker_do(&a, "raw connect %s", narrow);
    cr_assert_eq(worker_try(&a, "raw open %u", pool), -ENOENT);
    cr_assert_eq(worker_try(&a, "raw chunk %u", pool), -ENOENT);
    worker_try(&a, "raw release %u", pool);
    worker_do(&a, "raw request %d %u 1 1", SHM_RESERVE, pool);
    cr_assert_eq(atoi(a.reply), -EBADF, "%s", a.reply);
    cr_assert_eq(daemon_counts(&d, "one/kv").free, 64);
    worker_quit(&a);
    finish();
    unlink(narrow);
}

/* ---- absurd numbers */

static void hello_version(Kvd__Proto__Hello *h, void *v)
{
    h->version_min = ((uint32_t *)v)[0];
    h->version_max = ((uint32_t *)v)[1];
}

static void hello_token(Kvd__Proto__Hello *h, void *bytes)
{
    h->has_engine_token = 1;
    h->engine_token = (ProtobufCBinaryData){.data = bytes, .len = 65};
}

static void hello_start(Kvd__Proto__Hello *h, void *unused)
{
    (void)unused;
    h->has_start_time = 1;
    h->start_time = UINT64_MAX;
}

static void hello_large(Kvd__Proto__Hello *h, void *text)
{
    h->client = text;
    h->has_resume = 1;
    h->resume = (ProtobufCBinaryData){.data = text, .len = 100000};
    h->has_shm = h->shm = h->has_ring_entries = 1;
    h->ring_entries = UINT32_MAX;
}

Test(socket, absurd_hellos)
{
    static char large[200001];
    struct raw r;

    begin(NULL, "");
    raw_connect(&r, d.writer);
    for (int i = 0; i < 4; i++) {
        uint32_t v[4][2] = {{0, 0}, {2, 9}, {9, 2}, {UINT32_MAX, UINT32_MAX}};

        cr_assert_eq(raw_hello(&r, hello_version, v[i]), -EPROTONOSUPPORT);
    }
    cr_assert_eq(raw_hello(&r, hello_token, large), -EINVAL);
    cr_assert_eq(raw_hello(&r, hello_start, NULL), -EPERM);
    memset(large, '\xfe', 200000);
    cr_assert_eq(raw_hello(&r, hello_large, large), 0);
    cr_assert_eq(r.response->fds, 2);
    {
        REQUEST(q, SpaceOpen, SPACE_OPEN, space_open, open);
        open.name = large;
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
        open.name = (char *)"one";
        open.scheme = large;
        cr_assert_eq(raw_call(&r, &q), -EPROTOTYPE);
        open.scheme = (char *)"opaque";
        open.identity = large;
        open.has_first_parent = 1;
        open.first_parent = (ProtobufCBinaryData){.data = (uint8_t *)large, .len = 33};
        cr_assert_lt(raw_call(&r, &q), 0);
    }
    part(&r);
    finish();
}

static void absurd_numbers(struct raw *r, uint32_t pool)
{
    {
        REQUEST(q, PoolOpen, POOL_OPEN, pool_open, open);
        open.pool = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -ENOENT);
        open.pool = pool;
        cr_assert_eq(raw_call(r, &q), -EINVAL, "it has no shared memory");
    }
    {
        REQUEST(q, ChunkMap, CHUNK_MAP, chunk_map, map);
        map.pool = pool;
        map.chunk = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
    }
    {
        REQUEST(q, SpaceReset, SPACE_RESET, space_reset, reset);
        reset.space = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -ENOENT);
    }
    {
        REQUEST(q, Read, READ, read, read_);
        read_.pool = pool;
        read_.key = &key;
        read_.epoch = 7;
        cr_assert_eq(raw_call(r, &q), -ESTALE);
        read_.epoch = 1;
        read_.has_part = 1;
        read_.part = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        read_.part = 0;
        read_.has_offset = read_.has_bytes = 1;
        read_.offset = UINT64_MAX;
        read_.bytes = UINT64_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        read_.offset = 65536;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->read->data.len, 0);
        read_.offset = 65535;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->read->data.len, 1);
    }
    {
        uint64_t slots[] = {UINT64_C(1) << 63, UINT64_MAX, 64, UINT64_C(1) << 32, 63, 0, 0};
        REQUEST(p, Pin, PIN, pin, pin);
        REQUEST(q, Release, RELEASE, release, release);

        release.pool = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -ENOENT);
        pin.pool = pool;
        pin.epoch = 1;
        pin.n_keys = 1;
        pin.keys = keys;
        cr_assert_eq(raw_call(r, &p), 0);
        cr_assert_eq(r->response->pin->pinned, 1);
        slots[5] = slots[6] = r->response->pin->slots[0];
        release.pool = pool;
        release.n_slots = 7;
        release.slots = slots;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->count->count, 1, "what was pinned once can be released once");
    }
    {
        uint64_t tickets[] = {0, UINT64_MAX, UINT64_C(1) << 63, SHM_SLOTS_MAX - 1};
        REQUEST(q, Abort, ABORT, abort, abort_);

        abort_.pool = pool;
        abort_.n_tickets = 4;
        abort_.tickets = tickets;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->count->count, 0);
    }
}

/* With a slot of our own, everything about it can be wrong. */
static void absurd_writes(struct raw *r, uint32_t pool)
{
    static uint8_t bytes[65537], user[129];
    struct kvd_key mine = object_key(5000);
    Kvd__Proto__Key k, *list[] = {&k};
    uint64_t ticket;

    raw_key(&k, &mine);
    {
        REQUEST(q, Reserve, RESERVE, reserve, reserve);
        reserve.pool = pool;
        reserve.epoch = UINT32_MAX;
        reserve.n_keys = 1;
        reserve.keys = list;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->reserve->reservations[0]->status, -ESTALE);
        reserve.epoch = 1;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->reserve->reservations[0]->status, 1);
        ticket = r->response->reserve->reservations[0]->ticket;
        reserve.parent = &k;
        k.hash.len = 0;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        k.hash.len = 33;
        k.hash.data = bytes;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        raw_key(&k, &mine);
    }
    {
        REQUEST(q, Write, WRITE, write, write_);
        write_.pool = pool;
        write_.ticket = ticket;
        write_.data = (ProtobufCBinaryData){.data = bytes, .len = 65537};
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        write_.data.len = 2;
        write_.has_offset = 1;
        write_.offset = 65535;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        write_.offset = UINT64_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        write_.offset = 0;
        write_.has_part = 1;
        write_.part = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        write_.part = 0;
        write_.ticket = ticket + 1;
        cr_assert_lt(raw_call(r, &q), 0);
        write_.ticket = ticket | UINT64_C(1) << 63;
        cr_assert_eq(raw_call(r, &q), -ESTALE);
    }
    {
        REQUEST(q, Commit, COMMIT, commit, commit);
        Kvd__Proto__Meta meta = KVD__PROTO__META__INIT;

        commit.pool = pool;
        commit.ticket = ticket;
        cr_assert_eq(raw_call(r, &q), -EINVAL, "no bytes");
        commit.bytes = 65537;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        commit.bytes = UINT64_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        commit.bytes = 65536;
        commit.has_part = 1;
        commit.part = 64;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        commit.part = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        commit.part = 0;
        commit.meta = &meta;
        meta.has_user = 1;
        meta.user = (ProtobufCBinaryData){.data = user, .len = 129};
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        meta.user.len = 128;
        commit.ticket = 0;
        cr_assert_eq(raw_call(r, &q), -ESTALE);
        commit.ticket = ticket;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(raw_call(r, &q), 0, "the same again");
    }
}

static void absurd_keys(struct raw *r, uint32_t pool)
{
    size_t n = 50000;
    Kvd__Proto__Key *many = calloc(n, sizeof(*many)), **list = calloc(n, sizeof(*list));
    uint8_t byte = 0;

    for (size_t i = 0; i < n; i++) {
        kvd__proto__key__init(&many[i]);
        many[i].hash = (ProtobufCBinaryData){.data = &byte, .len = 1};
        list[i] = &many[i];
    }
    {
        REQUEST(q, Lookup, LOOKUP, lookup, lookup);
        lookup.pool = pool;
        lookup.epoch = 1;
        lookup.n_keys = n;
        lookup.keys = list;
        cr_assert_eq(raw_call(r, &q), -E2BIG, "one message may not keep others waiting");
        lookup.n_keys = n = 4096;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->lookup->states.len, n);
        bystander_check(&bystander);
        many[n - 1].hash.len = 0;
        cr_assert_eq(raw_call(r, &q), -EINVAL);
        lookup.n_keys = 0;
        cr_assert_eq(raw_call(r, &q), 0);
        lookup.pool = UINT32_MAX;
        cr_assert_eq(raw_call(r, &q), -ENOENT);
    }
    many[n - 1].hash.len = 1;
    {
        REQUEST(q, Pin, PIN, pin, pin);
        pin.pool = pool;
        pin.epoch = 1;
        pin.n_keys = n;
        pin.keys = list;
        pin.has_all = pin.all = 1;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->pin->pinned, 0);
        bystander_check(&bystander);
    }
    {
        REQUEST(q, Observe, OBSERVE, observe, observe);
        observe.pool = pool;
        observe.epoch = UINT32_MAX;
        observe.n_keys = n;
        observe.keys = list;
        cr_assert_eq(raw_call(r, &q), 0);
    }
    {
        REQUEST(q, Reserve, RESERVE, reserve, reserve);
        reserve.pool = pool;
        reserve.epoch = 1;
        reserve.n_keys = n;
        reserve.keys = list;
        cr_assert_eq(raw_call(r, &q), 0);
        cr_assert_eq(r->response->reserve->n_reservations, n);
        cr_assert_eq(r->response->reserve->reservations[0]->status, 1);
        for (size_t i = 1; i < n; i++)
            cr_assert_eq(r->response->reserve->reservations[i]->status, 2);
    }
    bystander_check(&bystander);
    free(list);
    free(many);
}

/* A message may be short and yet take much memory: that is bounded, too. */
Test(socket, a_hundred_thousand_keys)
{
    size_t n = 100000;
    Kvd__Proto__Key **list = calloc(n, sizeof(*list));
    uint8_t byte = 0;
    struct raw r;

    begin(NULL, "");
    kvd__proto__key__init(&key);
    key.hash = (ProtobufCBinaryData){.data = &byte, .len = 1};
    for (size_t i = 0; i < n; i++)
        list[i] = &key;
    raw_join(&r, d.writer);
    {
        REQUEST(q, Lookup, LOOKUP, lookup, lookup);
        lookup.epoch = 1;
        lookup.n_keys = n;
        lookup.keys = list;
        cr_assert_eq(raw_call(&r, &q), -EMSGSIZE);
        cr_assert_eq(r.response->id, 0);
        cr_assert_eq(raw_answer(&r), RAW_END);
    }
    raw_close(&r);
    free(list);
    finish();
}

Test(socket, absurd_numbers)
{
    uint32_t pool;
    struct raw r;

    begin(NULL, "");
    make_key();
    pool = daemon_pool(&d, "one/kv");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 1 1"), 1);
    raw_join(&r, d.writer);
    absurd_numbers(&r, pool);
    absurd_writes(&r, pool);
    absurd_keys(&r, pool);
    {
        REQUEST(q, Ping, PING, ping, ping);
        cr_assert_eq(raw_call(&r, &q), 0, "it was all answered on one connection");
    }
    raw_close(&r);
    cr_assert_eq(worker_n(&a, "pin 1 1"), 1);
    cr_assert_eq(worker_n(&a, "check"), 1);
    worker_quit(&a);
    finish();
}

/* Administrators make mistakes, too. */
Test(socket, absurd_administration)
{
    uint32_t pool;
    struct raw r;

    begin(NULL, "");
    make_key();
    pool = daemon_pool(&d, "one/kv");
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 1 8"), 8);
    raw_join(&r, d.admin);
    {
        REQUEST(q, Blocks, BLOCKS, blocks, blocks);
        blocks.pool = pool;
        blocks.has_cursor = blocks.has_limit = 1;
        blocks.cursor = UINT64_MAX;
        blocks.limit = UINT32_MAX;
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(r.response->blocks->n_blocks, 0);
        blocks.cursor = 0;
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(r.response->blocks->n_blocks, 8);
        blocks.limit = 0;
        cr_assert_eq(raw_call(&r, &q), 0);
    }
    {
        REQUEST(q, Flush, FLUSH, flush, flush);
        flush.pool = pool;
        flush.has_cursor = 1;
        flush.cursor = UINT64_MAX - 100;
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(r.response->count->count, 0);
        cr_assert_not(r.response->count->has_next, "a client would ask for ever");
    }
    {
        REQUEST(q, Evict, EVICT, evict, evict);
        evict.pool = pool;
        evict.has_count = 1;
        evict.count = UINT64_MAX;
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_eq(r.response->count->count, 8);
        evict.has_tenant = evict.has_cursor = 1;
        evict.tenant = UINT32_MAX;
        evict.cursor = UINT64_MAX;
        cr_assert_eq(raw_call(&r, &q), 0);
        cr_assert_not(r.response->count->has_next);
    }
    {
        REQUEST(q, Kill, KILL, kill, kill_);
        kill_.session = UINT32_MAX;
        cr_assert_eq(raw_call(&r, &q), -ENOENT);
    }
    {
        REQUEST(q, Stats, STATS, stats, stats);
        stats.has_pool = 1;
        stats.pool = UINT32_MAX;
        raw_call(&r, &q);
    }
    bystander_check(&bystander);
    raw_close(&r);
    worker_quit(&a);
    finish();
}

/* ---- a peer whose death nobody could see */

Test(socket, a_foreign_pid_namespace)
{
    if (geteuid() != 0)
        cr_skip_test("needs root, to make a PID namespace");
    daemon_prepare(&d, NULL, usual_pools);
    d.own_pid_namespace = true;
    daemon_start(&d);
    worker_start_in(&bystander, &d);
    worker_do(&bystander, "connect %s", d.writer);
    worker_do(&bystander, "open two kv write");
    worker_tell(&bystander, "stand by");
    for (int i = 0; i < 8; i++) {
        worker_start(&a);
        cr_assert_eq(worker_try(&a, "connect %s %s", d.writer, i & 1 ? "noshm" : ""), -EPERM);
        cr_assert_not_null(strstr(a.reply, "PID namespace"), "%s", a.reply);
        worker_quit(&a);
        bystander_check(&bystander);
    }
    cr_assert(daemon_logged(&d, "PID namespace"));
    bystander_stop(&bystander);
    daemon_stop(&d);
}
