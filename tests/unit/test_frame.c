/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "proto/frame.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/kvd.pb-c.h"

enum {
    MAX_FRAME = 1 << 20,
    BUFFER = 4096, /* what an idle reader may keep */
};

static int count_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    cr_assert(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* A connected pair, and the number of descriptors there were before it. */
struct pair {
    int before, a, b;
    struct frame_reader in; /* reads b */
    struct frame_queue out; /* goes to a */
};

static void setup(struct pair *p, unsigned max_fds)
{
    int fds[2];

    p->before = count_fds();
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    p->a = fds[0];
    p->b = fds[1];
    frame_reader_init(&p->in, MAX_FRAME, max_fds);
    frame_queue_init(&p->out);
}

/* Everything is given back: the test that forgets a descriptor fails here. */
static void teardown(struct pair *p)
{
    frame_reader_destroy(&p->in);
    frame_queue_clear(&p->out);
    close(p->a);
    close(p->b);
    cr_assert_eq(count_fds(), p->before, "descriptors leak");
}

static void send_bytes(int sock, const void *data, size_t len)
{
    cr_assert_eq(send(sock, data, len, MSG_NOSIGNAL), (ssize_t)len);
}

static void send_rights(int sock, const void *data, size_t len, const int *fds, unsigned n)
{
    char control[CMSG_SPACE(sizeof(int) * FRAME_MAX_FDS)] = {0};
    struct iovec iov = {(void *)data, len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control};
    struct cmsghdr *c;

    msg.msg_controllen = CMSG_SPACE(n * sizeof(int));
    c = CMSG_FIRSTHDR(&msg);
    *c = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(n * sizeof(int))};
    memcpy(CMSG_DATA(c), fds, n * sizeof(int));
    cr_assert_eq(sendmsg(sock, &msg, MSG_NOSIGNAL), (ssize_t)len);
}

/* A request whose token is `bytes` long and filled with `fill`. */
static struct frame_out *new_out(uint64_t id, size_t bytes, uint8_t fill, const int *fds,
                                 unsigned n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Write write = KVD__PROTO__WRITE__INIT;
    struct frame_out *out = NULL;
    uint8_t *data = malloc(bytes + 1);

    memset(data, fill, bytes);
    request.id = id;
    request.body_case = KVD__PROTO__REQUEST__BODY_WRITE;
    request.write = &write;
    write.data = (ProtobufCBinaryData){bytes, data};
    cr_assert_eq(frame_out_new(&request.base, MAX_FRAME, fds, n, &out), 0);
    free(data);
    return out;
}

static uint64_t check_request(const struct frame *f, size_t bytes, uint8_t fill)
{
    struct frame_budget budget;
    ProtobufCMessage *m;
    Kvd__Proto__Request *r;
    uint64_t id;

    frame_budget_init(&budget, 8 * MAX_FRAME);
    cr_assert_eq(frame_unpack(&kvd__proto__request__descriptor, f->data, f->len, &budget, &m), 0);
    r = (Kvd__Proto__Request *)m;
    id = r->id;
    cr_assert_eq(r->body_case, KVD__PROTO__REQUEST__BODY_WRITE);
    cr_assert_eq(r->write->data.len, bytes);
    for (size_t i = 0; i < bytes; i++)
        cr_assert_eq(r->write->data.data[i], fill);
    frame_unpack_free(m, &budget);
    return id;
}

static int open_null(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

    cr_assert_geq(fd, 0);
    return fd;
}

/* n descriptors of distinct empty files, so that a receiver can tell them apart. */
static void open_files(int *fds, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        fds[i] = memfd_create("test", MFD_CLOEXEC);
        cr_assert_geq(fds[i], 0);
    }
}

static void close_files(const int *fds, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        close(fds[i]);
}

static bool same_file(int a, int b)
{
    struct stat x, y;

    cr_assert_eq(fstat(a, &x), 0);
    cr_assert_eq(fstat(b, &y), 0);
    return x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

/* ---- bytes */

TestSuite(frame, .timeout = 60);

Test(frame, byte_by_byte)
{
    struct frame_out *out = new_out(7, 300, 'x', NULL, 0);
    struct pair p;
    struct frame f;

    setup(&p, 0);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), -EAGAIN);
    for (size_t i = 0; i < out->len; i++) {
        cr_assert_eq(frame_reader_next(&p.in, &f), 0);
        send_bytes(p.a, out->data + i, 1);
        cr_assert_eq(frame_reader_fill(&p.in, p.b), 1);
        cr_assert_eq(frame_reader_idle(&p.in), false);
    }
    cr_assert_eq(frame_reader_next(&p.in, &f), 1);
    cr_assert_eq(check_request(&f, 300, 'x'), 7);
    cr_assert_eq(frame_reader_next(&p.in, &f), 0);
    cr_assert(frame_reader_idle(&p.in));
    frame_out_free(out);
    teardown(&p);
}

Test(frame, many_in_one_read)
{
    struct pair p;
    struct frame f;
    ssize_t n;

    setup(&p, 0);
    for (uint64_t id = 1; id <= 50; id++)
        frame_queue_push(&p.out, new_out(id, id % 7, (uint8_t)id, NULL, 0));
    cr_assert_eq(frame_queue_flush(&p.out, p.a), 0);
    n = frame_reader_fill(&p.in, p.b);
    cr_assert_gt(n, 50);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), -EINVAL, "complete frames come first");
    for (uint64_t id = 1; id <= 50; id++) {
        cr_assert_eq(frame_reader_next(&p.in, &f), 1);
        cr_assert_eq(check_request(&f, id % 7, (uint8_t)id), id);
    }
    cr_assert_eq(frame_reader_next(&p.in, &f), 0);
    teardown(&p);
}

Test(frame, end_of_stream)
{
    struct pair p;
    struct frame f;

    setup(&p, 0);
    send_bytes(p.a, "\x05\0\0\0ab", 6);
    shutdown(p.a, SHUT_WR);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), 6);
    cr_assert_eq(frame_reader_next(&p.in, &f), 0);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), 0);
    cr_assert_not(frame_reader_idle(&p.in), "the frame was cut off");
    teardown(&p);
}

Test(frame, bad_lengths_are_seen_with_the_header)
{
    static const struct {
        uint8_t header[4];
        int result;
    } cases[] = {
        {{0, 0, 0, 0}, -EPROTO},
        {{1, 0, 0x10, 0}, -EMSGSIZE}, /* 1 MiB + 1 */
        {{0xff, 0xff, 0xff, 0xff}, -EMSGSIZE},
        {{0, 0, 0x10, 0}, 0}, /* 1 MiB */
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pair p;
        struct frame f;

        setup(&p, 0);
        send_bytes(p.a, cases[i].header, 4);
        cr_assert_eq(frame_reader_fill(&p.in, p.b), 4);
        cr_assert_eq(frame_reader_ready(&p.in), cases[i].result != 0);
        cr_assert_eq(frame_reader_next(&p.in, &f), cases[i].result);
        teardown(&p);
    }
}

Test(frame, good_frames_before_a_bad_one_count)
{
    struct frame_out *out = new_out(9, 10, 'y', NULL, 0);
    struct pair p;
    struct frame f;

    setup(&p, 0);
    send_bytes(p.a, out->data, out->len);
    send_bytes(p.a, "\0\0\0\0", 4);
    cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
    cr_assert_eq(frame_reader_next(&p.in, &f), 1);
    cr_assert_eq(check_request(&f, 10, 'y'), 9);
    cr_assert_eq(frame_reader_next(&p.in, &f), -EPROTO);
    frame_out_free(out);
    teardown(&p);
}

Test(frame, memory_follows_what_arrived)
{
    struct frame_out *out = new_out(1, MAX_FRAME - 64, 'z', NULL, 0);
    size_t sent = 0;
    struct pair p;
    struct frame f;

    setup(&p, 0);
    while (sent < out->len) {
        size_t n = out->len - sent < 1000 ? out->len - sent : 1000;

        send_bytes(p.a, out->data + sent, n);
        sent += n;
        while (frame_reader_next(&p.in, &f) == 0 && frame_reader_fill(&p.in, p.b) > 0)
            ;
        cr_assert_leq(p.in.cap, 2 * sent + BUFFER, "%zu for %zu bytes", p.in.cap, sent);
    }
    cr_assert_geq(p.in.cap, out->len);
    cr_assert_leq(p.in.cap, MAX_FRAME + FRAME_HEADER);
    send_bytes(p.a, "\x08", 1); /* one byte of the next frame must not keep the megabyte */
    cr_assert_eq(frame_reader_next(&p.in, &f), 0);
    cr_assert_leq(p.in.cap, BUFFER);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), 1);
    frame_out_free(out);
    teardown(&p);
}

Test(frame, a_long_buffer_with_a_rest_shrinks)
{
    struct frame_out *out = new_out(1, 200000, 'z', NULL, 0);
    struct pair p;
    struct frame f;
    int r;

    setup(&p, 0);
    frame_queue_push(&p.out, out);
    frame_queue_push(&p.out, new_out(2, 100000, 'q', NULL, 0));
    while ((r = frame_reader_next(&p.in, &f)) == 0) {
        frame_queue_flush(&p.out, p.a);
        cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
    }
    cr_assert_eq(r, 1);
    cr_assert_eq(check_request(&f, 200000, 'z'), 1);
    if (frame_reader_next(&p.in, &f) == 0)
        cr_assert_leq(p.in.cap, 4 * (p.in.len - p.in.off) + BUFFER);
    while (frame_reader_next(&p.in, &f) == 0) {
        frame_queue_flush(&p.out, p.a);
        cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
    }
    cr_assert_eq(check_request(&f, 100000, 'q'), 2);
    teardown(&p);
}

/* ---- descriptors */

Test(frame, fds_arrive_with_their_frame)
{
    int fds[3], taken;
    struct pair p;
    struct frame f;

    setup(&p, 3);
    open_files(fds, 3);
    frame_queue_push(&p.out, new_out(1, 1, 'a', NULL, 0));
    frame_queue_push(&p.out, new_out(2, 1, 'b', fds, 3));
    frame_queue_push(&p.out, new_out(3, 1, 'c', NULL, 0));
    cr_assert_eq(frame_queue_flush(&p.out, p.a), 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), 0);
    cr_assert_eq(f.n_fds, 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), 0);
    cr_assert_eq(check_request(&f, 1, 'b'), 2);
    cr_assert_eq(f.n_fds, 3);
    for (unsigned i = 0; i < 3; i++) {
        cr_assert(same_file(f.fds[i], fds[i]));
        cr_assert(fcntl(f.fds[i], F_GETFD) & FD_CLOEXEC);
    }
    taken = frame_take_fd(&f, 1);
    cr_assert_geq(taken, 0);
    cr_assert_eq(frame_take_fd(&f, 1), -1);
    cr_assert_eq(frame_take_fd(&f, 3), -1);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), 0);
    cr_assert_eq(f.n_fds, 0);
    cr_assert(same_file(taken, fds[1]), "a taken descriptor is ours for good");
    close(taken);
    close_files(fds, 3);
    teardown(&p);
}

/* The queue's copies go with the first byte, also when the frame is longer than the socket's
 * buffer. */
Test(frame, fds_are_sent_once)
{
    struct pair p;
    struct frame f;
    int null, before, r;

    setup(&p, 1);
    null = open_null();
    before = count_fds();
    frame_queue_push(&p.out, new_out(1, MAX_FRAME - 64, 'm', &null, 1));
    cr_assert_eq(count_fds(), before + 1, "a duplicate");
    cr_assert_eq(frame_queue_flush(&p.out, p.a), -EAGAIN);
    cr_assert_eq(count_fds(), before, "it is on its way");
    while ((r = frame_reader_next(&p.in, &f)) == 0) {
        cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
        frame_queue_flush(&p.out, p.a);
    }
    cr_assert_eq(r, 1);
    cr_assert_eq(f.n_fds, 1);
    cr_assert_eq(check_request(&f, MAX_FRAME - 64, 'm'), 1);
    close(null);
    teardown(&p);
}

Test(frame, as_many_fds_as_the_kernel_passes)
{
    int fds[FRAME_MAX_FDS + 1];
    Kvd__Proto__Event event = KVD__PROTO__EVENT__INIT;
    struct frame_out *out = NULL;
    struct pair p;
    struct frame f;

    setup(&p, FRAME_MAX_FDS);
    open_files(fds, FRAME_MAX_FDS + 1);
    event.kind = KVD__PROTO__EVENT__KIND__GOING;
    cr_assert_eq(frame_out_new(&event.base, MAX_FRAME, fds, FRAME_MAX_FDS + 1, &out), -EINVAL);
    frame_queue_push(&p.out, new_out(1, 1, 'a', fds, FRAME_MAX_FDS));
    cr_assert_eq(frame_queue_flush(&p.out, p.a), 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), 0);
    cr_assert_eq(f.n_fds, FRAME_MAX_FDS);
    for (unsigned i = 0; i < FRAME_MAX_FDS; i++)
        cr_assert(same_file(f.fds[i], fds[i]));
    close_files(fds, FRAME_MAX_FDS + 1);
    teardown(&p);
}

Test(frame, bad_fds_cannot_be_queued)
{
    Kvd__Proto__Event event = KVD__PROTO__EVENT__INIT;
    struct frame_out *out = NULL;
    int before = count_fds(), fds[2] = {open_null(), -1};

    event.kind = KVD__PROTO__EVENT__KIND__GOING;
    cr_assert_eq(frame_out_new(&event.base, MAX_FRAME, fds, 2, &out), -EBADF);
    cr_assert_null(out);
    close(fds[0]);
    cr_assert_eq(count_fds(), before, "the first duplicate leaks");
}

/* Raw senders that break the rules. */
Test(frame, fds_against_the_rules_are_closed)
{
    static const struct {
        const char *name;
        unsigned allowed, sent;
        size_t before; /* bytes of the frame sent ahead of those with the descriptors */

    } cases[] = {
        {"none allowed", 0, 1, 0},
        {"none allowed, many", 0, FRAME_MAX_FDS, 0},
        {"one too many", 2, 3, 0},
        {"in the middle", 2, 1, 2},
        {"in the middle, after the header", 2, 1, 5},
    };
    static const uint8_t bytes[] = {3, 0, 0, 0, 'a', 'b', 'c'};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int fds[FRAME_MAX_FDS];
        struct pair p;

        setup(&p, cases[i].allowed);
        open_files(fds, cases[i].sent);
        if (cases[i].before) {
            send_bytes(p.a, bytes, cases[i].before);
            cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
        }
        send_rights(p.a, bytes + cases[i].before, sizeof(bytes) - cases[i].before, fds,
                    cases[i].sent);
        cr_assert_eq(frame_reader_fill(&p.in, p.b), -EPROTO, "%s", cases[i].name);
        close_files(fds, cases[i].sent);
        teardown(&p);
    }
}

/* Descriptors that are never taken, in frames that are never asked for. */
Test(frame, forgotten_fds_are_closed)
{
    static const uint8_t bytes[] = {1, 0, 0, 0, 'a', 9, 0};
    struct pair p;
    int null;

    setup(&p, 4);
    null = open_null();
    send_rights(p.a, bytes, 5, &null, 1);
    send_rights(p.a, bytes + 5, 2, &null, 1);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), 5);
    close(null);
    teardown(&p);
}

/* The kernel installs what fits into the descriptor table and says MSG_CTRUNC. */
Test(frame, full_descriptor_table)
{
    struct rlimit old, low;
    int fds[8];
    struct pair p;

    setup(&p, 8);
    open_files(fds, 8);
    send_rights(p.a, "\x01\0\0\0a", 5, fds, 8);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = old;
    low.rlim_cur = (rlim_t)fds[7] + 4; /* room for three */
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &low), 0);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), -EMFILE);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    close_files(fds, 8);
    teardown(&p);
}

/* Credentials that the kernel adds, together with descriptors, which must not leak for it. */
Test(frame, another_control_message)
{
    struct pair p;
    int null, on = 1;

    setup(&p, 8);
    null = open_null();
    cr_assert_eq(setsockopt(p.b, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)), 0);
    send_rights(p.a, "\x01\0\0\0a", 5, &null, 1);
    cr_assert_eq(frame_reader_fill(&p.in, p.b), -EPROTO);
    close(null);
    teardown(&p);
}

static struct cmsghdr *put_control(struct msghdr *msg, size_t at, int level, int type, size_t len)
{
    struct cmsghdr *c = (struct cmsghdr *)((char *)msg->msg_control + at);

    *c = (struct cmsghdr){.cmsg_level = level, .cmsg_type = type, .cmsg_len = len};
    return c;
}

/* What no kernel should ever say. A real descriptor comes first, and must be closed each time. */
Test(frame, forged_control_messages)
{
    static const struct {
        const char *name;
        int level, type, flags;
        size_t len;
        int result;
    } cases[] = {
        {"good", SOL_SOCKET, SCM_RIGHTS, 0, CMSG_LEN(sizeof(int)), 0},
        {"level", SOL_SOCKET + 1, SCM_RIGHTS, 0, CMSG_LEN(sizeof(int)), -EPROTO},
        {"type", SOL_SOCKET, SCM_RIGHTS + 1, 0, CMSG_LEN(sizeof(int)), -EPROTO},
        {"no header", SOL_SOCKET, SCM_RIGHTS, 0, 3, -EPROTO},
        {"nothing in it", SOL_SOCKET, SCM_RIGHTS, 0, CMSG_LEN(0), -EPROTO},
        {"half a descriptor", SOL_SOCKET, SCM_RIGHTS, 0, CMSG_LEN(6), -EPROTO},
        {"beyond the end", SOL_SOCKET, SCM_RIGHTS, 0, CMSG_LEN(4000), -EPROTO},
        {"huge", SOL_SOCKET, SCM_RIGHTS, 0, SIZE_MAX - 7, -EPROTO},
        {"truncated data", SOL_SOCKET, SCM_RIGHTS, MSG_TRUNC, CMSG_LEN(sizeof(int)), -EPROTO},
        {"truncated control", SOL_SOCKET, SCM_RIGHTS, MSG_CTRUNC, CMSG_LEN(sizeof(int)), -EMFILE},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int)) * 2] = {0};
        struct msghdr msg = {.msg_control = control, .msg_controllen = sizeof(control)};
        int fds[FRAME_MAX_FDS], before = count_fds(), real = open_null(), none = -1;
        unsigned n = 0;
        struct cmsghdr *c;

        msg.msg_flags = cases[i].flags;
        c = put_control(&msg, 0, SOL_SOCKET, SCM_RIGHTS, CMSG_LEN(sizeof(int)));
        memcpy(CMSG_DATA(c), &real, sizeof(real));
        c = put_control(&msg, CMSG_SPACE(sizeof(int)), cases[i].level, cases[i].type, cases[i].len);
        memcpy(CMSG_DATA(c), &none, sizeof(none));
        cr_assert_eq(frame_take_control(&msg, 2, fds, &n), cases[i].result, "%s", cases[i].name);
        cr_assert_eq(n, cases[i].result ? 0 : 2);
        if (!cases[i].result)
            close(real);
        cr_assert_eq(count_fds(), before, "%s: leaks", cases[i].name);
    }
}

/* ---- any mixture, cut anywhere */

static size_t chunk; /* for the next two: how much one call moves */

static ssize_t recv_chunk(int sock, struct msghdr *msg, int flags)
{
    if (msg->msg_iov->iov_len > chunk)
        msg->msg_iov->iov_len = chunk;
    return recvmsg(sock, msg, flags);
}

static ssize_t send_chunk(int sock, const struct msghdr *msg, int flags)
{
    struct msghdr m = *msg;
    struct iovec iov = msg->msg_iov[0];

    m.msg_iov = &iov;
    m.msg_iovlen = 1;
    if (iov.iov_len > chunk)
        iov.iov_len = chunk;
    return sendmsg(sock, &m, flags);
}

struct expected {
    size_t bytes;
    unsigned n_fds;
};

static void plan(struct expected *e)
{
    static const size_t sizes[] = {0, 1, 100, 4000, 5000, 40000, 100000};

    e->bytes = sizes[(size_t)rand() % (sizeof(sizes) / sizeof(sizes[0]))];
    e->n_fds = rand() % 3 ? 0 : (unsigned)rand() % 4;
}

Test(frame, mixture)
{
    enum { N = 300 };
    unsigned seed = (unsigned)getpid();
    struct expected *e = calloc(N, sizeof(*e));
    int queued = 0, files[4];
    struct pair p;

    fprintf(stderr, "seed %u\n", seed);
    srand(seed);
    setup(&p, 4);
    open_files(files, 4);
    p.in.recvmsg = recv_chunk;
    p.out.sendmsg = send_chunk;
    for (int got = 0; got < N;) {
        struct frame f;
        int r;

        for (; queued < N && rand() % 3; queued++) {
            plan(&e[queued]);
            frame_queue_push(&p.out, new_out((uint64_t)queued + 1, e[queued].bytes, (uint8_t)queued,
                                             files, e[queued].n_fds));
        }
        chunk = (size_t)1 << rand() % 18;
        r = frame_queue_flush(&p.out, p.a);
        cr_assert(r == 0 || r == -EAGAIN);
        chunk = (size_t)1 << rand() % 18;
        while ((r = frame_reader_next(&p.in, &f)) == 1) {
            cr_assert_eq(check_request(&f, e[got].bytes, (uint8_t)got), (uint64_t)got + 1);
            cr_assert_eq(f.n_fds, e[got].n_fds, "frame %d", got);
            for (unsigned i = 0; i < f.n_fds; i++)
                cr_assert(same_file(f.fds[i], files[i]));
            got++;
        }
        cr_assert_eq(r, 0);
        if (got < N)
            cr_assert((r = (int)frame_reader_fill(&p.in, p.b)) > 0 || r == -EAGAIN, "%d", r);
    }
    close_files(files, 4);
    free(e);
    teardown(&p);
}

/* ---- sending */

Test(frame, messages_must_fit)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Ping empty = KVD__PROTO__PING__INIT;
    struct frame_out *out = NULL;
    size_t len;

    request.id = 1;
    len = kvd__proto__request__get_packed_size(&request);
    cr_assert_eq(frame_out_new(&request.base, len - 1, NULL, 0, &out), -EMSGSIZE);
    cr_assert_eq(frame_out_new(&empty.base, 100, NULL, 0, &out), -EINVAL);
    cr_assert_null(out);
    cr_assert_eq(frame_out_new(&request.base, len, NULL, 0, &out), 0);
    cr_assert_eq(out->len, FRAME_HEADER + len);
    cr_assert_eq(out->data[0], len);
    frame_out_free(out);
}

Test(frame, nobody_is_there)
{
    struct pair p;
    int null;

    setup(&p, 0);
    null = open_null();
    shutdown(p.b, SHUT_RDWR);
    frame_queue_push(&p.out, new_out(1, 10, 'a', &null, 1));
    frame_queue_push(&p.out, new_out(2, 10, 'a', &null, 1));
    cr_assert_eq(frame_queue_flush(&p.out, p.a), -EPIPE, "and no SIGPIPE");
    close(null);
    teardown(&p);
}

Test(frame, a_tag_is_in_the_queue_until_it_is_sent)
{
    struct frame_out *out = new_out(2, 10, 'a', NULL, 0);
    struct pair p;
    char sink[65536];

    setup(&p, 0);
    frame_queue_push(&p.out, new_out(1, MAX_FRAME - 64, 'a', NULL, 0));
    out->tag = 3;
    frame_queue_push(&p.out, out);
    cr_assert_eq(frame_queue_flush(&p.out, p.a), -EAGAIN);
    cr_assert(frame_queue_tagged(&p.out, 3));
    cr_assert_not(frame_queue_tagged(&p.out, 2));
    cr_assert_gt(p.out.bytes, MAX_FRAME);
    while (frame_queue_flush(&p.out, p.a) == -EAGAIN)
        cr_assert_gt(read(p.b, sink, sizeof(sink)), 0);
    cr_assert_not(frame_queue_tagged(&p.out, 3));
    cr_assert_eq(p.out.bytes, 0);
    cr_assert(frame_queue_empty(&p.out));
    teardown(&p);
}

static int interruptions;

static ssize_t send_interrupted(int sock, const struct msghdr *msg, int flags)
{
    if (interruptions-- > 0) {
        errno = EINTR;
        return -1;
    }
    return sendmsg(sock, msg, flags);
}

static ssize_t recv_interrupted(int sock, struct msghdr *msg, int flags)
{
    if (interruptions-- > 0) {
        errno = EINTR;
        return -1;
    }
    return recvmsg(sock, msg, flags);
}

Test(frame, interrupted_calls_go_on)
{
    struct pair p;
    struct frame f;

    setup(&p, 0);
    p.out.sendmsg = send_interrupted;
    p.in.recvmsg = recv_interrupted;
    frame_queue_push(&p.out, new_out(5, 10, 'a', NULL, 0));
    interruptions = 3;
    cr_assert_eq(frame_queue_flush(&p.out, p.a), 0);
    interruptions = 3;
    cr_assert_gt(frame_reader_fill(&p.in, p.b), 0);
    cr_assert_eq(frame_reader_next(&p.in, &f), 1);
    cr_assert_eq(check_request(&f, 10, 'a'), 5);
    teardown(&p);
}

/* A reader that drains while we send must not keep us there: one flush is a bounded number of
 * calls. */
static int calls;

static ssize_t send_for_ever(int sock, const struct msghdr *msg, int flags)
{
    (void)sock, (void)flags;
    calls++;
    return msg->msg_iov[0].iov_len > 0;
}

Test(frame, a_flush_ends)
{
    struct frame_queue q;

    frame_queue_init(&q);
    q.sendmsg = send_for_ever;
    frame_queue_push(&q, new_out(1, 1000, 'a', NULL, 0));
    cr_assert_eq(frame_queue_flush(&q, -1), -EAGAIN);
    cr_assert_leq(calls, 16);
    frame_queue_clear(&q);
}

/* ---- unpacking */

static int unpack(const void *data, size_t len, size_t bytes)
{
    struct frame_budget budget;
    ProtobufCMessage *m = NULL;
    int r;

    frame_budget_init(&budget, bytes);
    r = frame_unpack(&kvd__proto__request__descriptor, data, len, &budget, &m);
    cr_assert_eq(r == 0, m != NULL);
    frame_unpack_free(m, &budget);
    return r;
}

Test(frame, malformed_messages)
{
    static const struct {
        const char *bytes;
        size_t len;
        int result;
    } cases[] = {
        {"\x08\x01", 2, 0},                       /* id 1 and nothing else */
        {"\x62\x00", 2, -EBADMSG},                /* a Ping without an id */
        {"\x08", 1, -EBADMSG},                    /* cut in a varint */
        {"\x08\x01\x52\x00", 4, -EBADMSG},        /* a Hello without versions */
        {"\x08\x01\x52\x7f", 4, -EBADMSG},        /* longer than the frame */
        {"\x08\x01\x0b", 3, -EBADMSG},            /* a group */
        {"\x08\x01\xfa\x3e\x00", 5, 0},           /* field 1007 is of a later version */
        {"\x08\x01\x08\x02", 4, 0},               /* twice: the last one counts */
        {"GET / HTTP/1.1\r\n\r\n", 18, -EBADMSG}, /* somebody else's protocol */
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        cr_assert_eq(unpack(cases[i].bytes, cases[i].len, 65536), cases[i].result, "case %zu", i);
}

/* Lookup of `n` keys of one byte: about 5 bytes each in the frame, and 20 times that unpacked. */
static size_t pack_tiny_keys(uint8_t *buf, size_t n)
{
    static const uint8_t fixed[] = {0x08, 1, 0xf2, 0x01}; /* id, Lookup */
    size_t len = 4 + n * 5, at = 0;

    memcpy(buf, fixed, sizeof(fixed));
    at = sizeof(fixed);
    for (size_t v = len; v || at == sizeof(fixed); v >>= 7)
        buf[at++] = (uint8_t)((v & 0x7f) | (v >> 7 ? 0x80 : 0));
    memcpy(buf + at, "\x08\x01\x10\x01", 4); /* pool, epoch */
    at += 4;
    for (size_t i = 0; i < n; i++, at += 5)
        memcpy(buf + at, "\x1a\x03\x0a\x01k", 5);
    return at;
}

Test(frame, a_million_tiny_submessages)
{
    uint8_t *buf = malloc(5 << 20);
    size_t len = pack_tiny_keys(buf, 1000000);

    cr_assert_eq(unpack(buf, len, 8 * (size_t)MAX_FRAME), -EMSGSIZE);
    cr_assert_eq(unpack(buf, len, SIZE_MAX), 0, "it is a good message, just a big one");
    free(buf);
}

/* The budget of the daemon is for hostile messages only: a frame full of ordinary keys is far from
 * it. */
Test(frame, a_full_frame_of_keys_fits)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Lookup lookup = KVD__PROTO__LOOKUP__INIT;
    Kvd__Proto__Key key = KVD__PROTO__KEY__INIT, **keys;
    uint8_t hash[32] = {1}, *buf = malloc(MAX_FRAME);
    size_t n = MAX_FRAME / 40, len;

    key.hash = (ProtobufCBinaryData){sizeof(hash), hash};
    key.has_group = true;
    keys = malloc(n * sizeof(*keys));
    for (size_t i = 0; i < n; i++)
        keys[i] = &key;
    lookup.keys = keys;
    lookup.n_keys = n;
    request.id = 1;
    request.body_case = KVD__PROTO__REQUEST__BODY_LOOKUP;
    request.lookup = &lookup;
    len = kvd__proto__request__get_packed_size(&request);
    cr_assert_leq(len, MAX_FRAME);
    cr_assert_gt(len, MAX_FRAME * 9 / 10);
    kvd__proto__request__pack(&request, buf);
    cr_assert_eq(unpack(buf, len, 6 * (size_t)MAX_FRAME), 0, "with a margin");
    free(keys);
    free(buf);
}

/* The same oneof again and again: protobuf-c merges each with the ones before, which copies the
 * array of keys each time. Memory stays small, so only a cap on all allocations together bounds the
 * work. */
Test(frame, merging_is_bounded)
{
    static const uint8_t again[] = {0xf2, 0x01, 9, 8, 1, 0x10, 1, 0x1a, 3, 0x0a, 1, 'k'};
    size_t n = 50000, len = 2;
    uint8_t *buf = malloc(2 + n * sizeof(again));

    memcpy(buf, "\x08\x01", 2);
    for (size_t i = 0; i < n; i++, len += sizeof(again))
        memcpy(buf + len, again, sizeof(again));
    cr_assert_leq(len, MAX_FRAME);
    cr_assert_eq(unpack(buf, len, 8 * (size_t)MAX_FRAME), -EMSGSIZE);
    free(buf);
}

/* Each allocation fails once: nothing crashes, and (with a leak checker) nothing leaks. */
Test(frame, every_allocation_may_fail)
{
    uint8_t buf[1000];
    size_t len = pack_tiny_keys(buf, 40), bytes = 0;
    int r;

    while ((r = unpack(buf, len, bytes)) != 0) {
        cr_assert_eq(r, -EMSGSIZE);
        bytes++;
        cr_assert_lt(bytes, 65536);
    }
    cr_assert_gt(bytes, 40 * sizeof(Kvd__Proto__Key));
}

/* ---- with a deadline */

Test(frame, deadlines)
{
    struct pair p;
    struct frame f;

    setup(&p, 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), -ETIMEDOUT);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, frame_clock() + 1000000, &f), -ETIMEDOUT);
    cr_assert_eq(frame_send_wait(p.a, new_out(3, 10, 'a', NULL, 0), 0), 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, 0, &f), 0, "what is there counts after the deadline");
    cr_assert_eq(check_request(&f, 10, 'a'), 3);
    cr_assert_eq(frame_send_wait(p.a, new_out(4, MAX_FRAME - 64, 'a', NULL, 0), 0), -ETIMEDOUT);
    teardown(&p);
}

Test(frame, the_peer_goes_away)
{
    struct pair p;
    struct frame f;

    setup(&p, 0);
    cr_assert_eq(frame_send_wait(p.a, new_out(3, 10, 'a', NULL, 0), 0), 0);
    shutdown(p.a, SHUT_RDWR);
    cr_assert_eq(frame_send_wait(p.b, new_out(3, 10, 'a', NULL, 0), UINT64_MAX), -EPIPE);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, UINT64_MAX, &f), 0, "its last words");
    cr_assert_eq(frame_recv_wait(p.b, &p.in, UINT64_MAX, &f), -ECONNRESET);
    teardown(&p);
}

struct sender {
    pthread_t reader;
    int sock;
};

static void on_signal(int number)
{
    (void)number;
}

static void *interrupt_then_send(void *arg)
{
    const struct sender *s = arg;

    for (int i = 0; i < 20; i++) {
        pthread_kill(s->reader, SIGUSR1);
        usleep(1000);
    }
    cr_assert_eq(frame_send_wait(s->sock, new_out(8, MAX_FRAME - 64, 'a', NULL, 0), UINT64_MAX), 0);
    return NULL;
}

Test(frame, signals_do_not_end_a_wait)
{
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART */
    struct sender s = {.reader = pthread_self()};
    pthread_t thread;
    struct pair p;
    struct frame f;

    setup(&p, 0);
    s.sock = p.a;
    sigaction(SIGUSR1, &action, NULL);
    cr_assert_eq(pthread_create(&thread, NULL, interrupt_then_send, &s), 0);
    cr_assert_eq(frame_recv_wait(p.b, &p.in, UINT64_MAX, &f), 0);
    cr_assert_eq(check_request(&f, MAX_FRAME - 64, 'a'), 8);
    pthread_join(thread, NULL);
    teardown(&p);
}
