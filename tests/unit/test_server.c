/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: requests, answers, limits, ends. */
#define _GNU_SOURCE
#include "server_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

TestSuite(server, .timeout = 60);

/* ---- requests and answers */

Test(server, a_request_is_answered)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 42);
    turn(&w, 5);
    expect_answer(&c, 42, 0);
    cr_assert_eq(w.requests, 1);
    cr_assert_eq(conn_socket(w.conn), &w.socket);
    cr_assert_eq(conn_pid(w.conn), getpid());
    cr_assert_eq(conn_uid(w.conn), getuid());
    cr_assert_eq(conn_gid(w.conn), getgid());
    cr_assert_eq(conn_start_time(w.conn), own_start_time());
    cr_assert_eq(conn_id(w.conn), 1);
    cr_assert_null(conn_user(w.conn));
    conn_set_user(w.conn, &w);
    cr_assert_eq(conn_user(w.conn), &w);
    cr_assert_eq(server_connections(w.server, NULL), 1);
    cr_assert_eq(server_connections(w.server, &w.socket), 1);
    close_client(&c);
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    cr_assert_eq(server_connections(w.server, &w.socket), 0);
    cr_assert_eq(w.notes, 0, "%s", w.last_note);
    teardown(&w);
}

/* When nothing is going on, nothing wakes the daemon. */
Test(server, rests)
{
    struct client c;
    struct world w;

    setup(&w);
    turn(&w, 1);
    cr_assert_eq(w.last_timeout, -1);
    connect_client(&w, &c);
    turn(&w, 5);
    cr_assert_gt(w.last_timeout, 1000, "only the first request's deadline");
    send_ping(&c, 1);
    turn(&w, 5);
    w.now += 60 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.last_timeout, -1);
    close_client(&c);
    teardown(&w);
}

Test(server, byte_by_byte)
{
    struct frame_out *out = new_ping(7);
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    for (size_t i = 0; i < out->len; i++) {
        cr_assert_eq(w.requests, 0);
        send_raw(&c, out->data + i, 1);
        turn(&w, 5);
    }
    expect_answer(&c, 7, 0);
    frame_out_free(out);
    close_client(&c);
    teardown(&w);
}

Test(server, unknown_requests_are_the_dispatchers)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_raw(&c, "\x05\0\0\0\x08\x03\xfa\x3e\x00", 9); /* id 3, and field 1007 */
    turn(&w, 5);
    cr_assert_eq(w.requests, 1);
    cr_assert_eq(w.bodies, 0);
    expect_answer(&c, 3, 0);
    close_client(&c);
    teardown(&w);
}

/* ---- what breaks a connection */

static void check_bad_bytes(const void *bytes, size_t len, int status)
{
    struct client bad, good;
    struct world w;

    setup(&w);
    connect_client(&w, &bad);
    connect_client(&w, &good);
    send_ping(&bad, 5);
    send_raw(&bad, bytes, len);
    turn(&w, 5);
    expect_answer(&bad, 5, 0);
    expect_answer(&bad, 0, status);
    expect_end(&bad);
    cr_assert_eq(w.last_status, status);
    cr_assert_eq(w.requests, 1, "nothing of the bad frame is acted on");
    cr_assert_eq(w.closed, 1);
    cr_assert_eq(server_stats(w.server)->protocol_errors, 1);
    send_ping(&good, 6);
    turn(&w, 5);
    expect_answer(&good, 6, 0);
    close_client(&bad);
    close_client(&good);
    teardown(&w);
}

Test(server, bad_bytes_end_their_connection)
{
    check_bad_bytes("\0\0\0\0", 4, -EPROTO);
    check_bad_bytes("\x01\0\x04\0", 4, -EMSGSIZE); /* 256 KiB + 1 */
    check_bad_bytes("\xff\xff\xff\xff", 4, -EMSGSIZE);
    check_bad_bytes("GET / HTTP/1.1\r\n\r\n", 18, -EMSGSIZE);
    check_bad_bytes("\x02\0\0\0\x62\0", 6, -EBADMSG);         /* no id */
    check_bad_bytes("\x04\0\0\0\x08\x01\x52\0", 8, -EBADMSG); /* a Hello without versions */
    check_bad_bytes("\x02\0\0\0\xff\xff", 6, -EBADMSG);
    check_bad_bytes("\x04\0\0\0\x08\0\x62\0", 8, -EPROTO); /* id 0 */
}

/* A frame of the allowed length whose parts would take far more memory and time than that. */
Test(server, explosive_messages_are_refused)
{
    static const uint8_t again[] = {0xf2, 0x01, 9, 8, 1, 0x10, 1, 0x1a, 3, 0x0a, 1, 'k'};
    size_t n = 20000, len = 2 + n * sizeof(again);
    uint8_t *frame = malloc(4 + len);
    struct client c;
    struct world w;

    frame[0] = (uint8_t)len;
    frame[1] = (uint8_t)(len >> 8);
    frame[2] = (uint8_t)(len >> 16);
    frame[3] = 0;
    memcpy(frame + 4, "\x08\x01", 2);
    for (size_t i = 0; i < n; i++)
        memcpy(frame + 6 + i * sizeof(again), again, sizeof(again));
    setup(&w);
    connect_client(&w, &c);
    turn(&w, 1);
    for (size_t sent = 0; sent < 4 + len;) {
        ssize_t r = send(c.fd, frame + sent, 4 + len - sent, MSG_NOSIGNAL | MSG_DONTWAIT);

        sent += r > 0 ? (size_t)r : 0;
        turn(&w, 1);
    }
    turn(&w, 20);
    expect_answer(&c, 0, -EMSGSIZE);
    expect_end(&c);
    cr_assert_eq(w.requests, 0);
    free(frame);
    close_client(&c);
    teardown(&w);
}

Test(server, descriptors_are_refused)
{
    int fds[FRAME_MAX_FDS], n = count_fds();
    Kvd__Proto__Request r = KVD__PROTO__REQUEST__INIT;
    struct frame_out *out;
    struct client c;
    struct world w;

    setup(&w);
    for (int i = 0; i < FRAME_MAX_FDS; i++)
        fds[i] = w.null;
    r.id = 1;
    connect_client(&w, &c);
    turn(&w, 1);
    n = count_fds();
    cr_assert_eq(frame_out_new(&r.base, MAX_FRAME, fds, FRAME_MAX_FDS, &out), 0);
    cr_assert_eq(frame_send_wait(c.fd, out, 0), 0);
    turn(&w, 5);
    expect_answer(&c, 0, -EPROTO);
    expect_end(&c);
    cr_assert_eq(w.requests, 0);
    cr_assert_lt(count_fds(), n);
    close_client(&c);
    teardown(&w);
}

Test(server, a_frame_that_is_cut_off)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_raw(&c, "\x10\0\0\0\x08", 5);
    close_client(&c);
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    cr_assert_eq(w.last_status, -EPROTO);
    cr_assert_eq(server_stats(w.server)->protocol_errors, 1);
    teardown(&w);
}

static void count_only(struct world *w, struct conn *conn, const Kvd__Proto__Request *request)
{
    (void)w, (void)conn, (void)request;
}

/* What a process sent before it died still counts. */
Test(server, last_requests_of_the_dead)
{
    struct client c;
    struct world w;

    setup(&w);
    w.behave = count_only;
    connect_client(&w, &c);
    for (uint64_t id = 1; id <= 100; id++)
        send_ping(&c, id);
    close_client(&c);
    turn(&w, 12);
    cr_assert_eq(w.requests, 100);
    cr_assert_eq(w.closed, 1);
    teardown(&w);
}

Test(server, who_stops_sending_still_gets_answers)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    send_ping(&c, 2);
    shutdown(c.fd, SHUT_WR);
    turn(&w, 5);
    expect_answer(&c, 1, 0);
    expect_answer(&c, 2, 0);
    expect_end(&c);
    cr_assert_eq(w.closed, 1);
    close_client(&c);
    teardown(&w);
}

/* ---- silent, slow, greedy */

/* Half a frame holds memory, so it has a deadline at any time, of its own each time. */
Test(server, half_a_frame_has_a_deadline)
{
    struct client slow, good;
    struct world w;

    setup(&w);
    connect_client(&w, &slow);
    connect_client(&w, &good);
    send_ping(&slow, 1);
    send_ping(&good, 1);
    turn(&w, 5);
    w.now += 100 * SECOND;
    turn(&w, 5);
    for (int i = 0; i < 3; i++) { /* who completes it in time may take as long again */
        struct frame_out *ping = new_ping(2);

        send_raw(&good, ping->data, ping->len - 1);
        turn(&w, 5);
        w.now += 9 * SECOND;
        turn(&w, 5);
        send_raw(&good, ping->data + ping->len - 1, 1);
        frame_out_free(ping);
        turn(&w, 5);
    }
    send_raw(&slow, "\x05", 1);
    turn(&w, 5);
    w.now += 10 * SECOND - 1;
    send_raw(&slow, "\x00", 1); /* another byte is no reason to wait longer */
    turn(&w, 5);
    cr_assert_eq(w.closed, 0);
    w.now += 1;
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    expect_answer(&slow, 1, 0);
    expect_answer(&slow, 0, -ETIMEDOUT);
    expect_end(&slow);
    w.now += 100000 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    close_client(&slow);
    close_client(&good);
    teardown(&w);
}

Test(server, silent_peers_are_sent_away)
{
    struct client silent, slow, late, good;
    struct world w;

    setup(&w);
    connect_client(&w, &silent);
    connect_client(&w, &slow);
    connect_client(&w, &good);
    turn(&w, 5);
    send_ping(&good, 1);
    w.now += 5 * SECOND;
    connect_client(&w, &late);
    turn(&w, 5);
    send_raw(&slow, "\x05", 1); /* a byte now and then is no request */
    w.now += 5 * SECOND - 1;
    turn(&w, 5);
    cr_assert_eq(w.closed, 0);
    w.now += 1;
    turn(&w, 5);
    cr_assert_eq(w.closed, 2);
    expect_answer(&silent, 0, -ETIMEDOUT);
    expect_end(&silent);
    expect_answer(&slow, 0, -ETIMEDOUT);
    expect_end(&slow);
    cr_assert_eq(server_stats(w.server)->silent, 2);
    w.now += 5 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.closed, 3);
    expect_answer(&late, 0, -ETIMEDOUT);
    w.now += 100000 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.closed, 3, "who has spoken once may be silent for ever");
    send_ping(&good, 2);
    turn(&w, 5);
    expect_answer(&good, 1, 0);
    expect_answer(&good, 2, 0);
    cr_assert_eq(conn_last_activity(w.conn), w.now);
    close_client(&silent);
    close_client(&slow);
    close_client(&late);
    close_client(&good);
    teardown(&w);
}

static int answer_long(struct world *w, struct conn *conn, uint64_t id)
{
    char *text = malloc(w->answer_bytes + 1);
    int r;

    memset(text, 'x', w->answer_bytes);
    text[w->answer_bytes] = 0;
    r = conn_status(conn, id, 0, text);
    free(text);
    return r;
}

static void long_answer(struct world *w, struct conn *conn, const Kvd__Proto__Request *request)
{
    cr_assert_eq(answer_long(w, conn, request->id), 0);
}

/* Answers that come later than the request: nothing but the limit stops them. */
Test(server, who_does_not_read_is_cut_off)
{
    struct client slow, good;
    struct world w;
    size_t queued = 0;
    struct conn *conn;
    int r;

    setup(&w);
    connect_client(&w, &slow);
    send_ping(&slow, 1);
    turn(&w, 5);
    conn = w.conn;
    connect_client(&w, &good);
    w.answer_bytes = 100000;
    while ((r = answer_long(&w, conn, 2)) == 0) {
        queued += w.answer_bytes;
        cr_assert_lt(queued, 2 * MAX_QUEUE);
        send_ping(&good, queued);
        turn(&w, 1);
        turn(&w, 1);
        expect_answer(&good, queued, 0);
    }
    cr_assert_eq(r, -ENOTCONN);
    cr_assert_gt(queued, MAX_QUEUE - 2 * w.answer_bytes);
    cr_assert_eq(server_stats(w.server)->overflowed, 1);
    turn(&w, 1);
    cr_assert_eq(w.closed, 1);
    close_client(&slow);
    close_client(&good);
    teardown(&w);
}

/* A client that asks for a lot at once and reads late is not punished: its requests wait. */
Test(server, requests_wait_for_room)
{
    enum { N = 60 };
    struct client c;
    struct world w;

    setup(&w);
    w.behave = long_answer;
    w.answer_bytes = 50000;
    connect_client(&w, &c);
    for (uint64_t id = 1; id <= N; id++)
        send_ping(&c, id);
    turn(&w, 200);
    cr_assert_lt(w.requests, N, "it asked for more than fits");
    cr_assert_leq((size_t)w.requests * w.answer_bytes, MAX_QUEUE / 4 + 500000);
    cr_assert_gt(w.last_timeout, 1000, "and waiting is no work");
    for (uint64_t id = 1; id <= N; id++) {
        struct answer a;

        while ((a = receive(&c)).result == -ETIMEDOUT)
            turn(&w, 1);
        cr_assert_eq(a.result, 0);
        cr_assert_eq(a.id, id);
        cr_assert_gt(a.bytes, w.answer_bytes);
    }
    cr_assert_eq(w.requests, N);
    cr_assert_eq(w.closed, 0);
    close_client(&c);
    teardown(&w);
}

/* It is blocked on output, so only the hang-up can tell that nobody is there. A peer that shuts
 * down but keeps its socket also keeps what it has not read: that never becomes writable, only
 * hangs up. */
static void check_blocked_peer(bool dies)
{
    struct client c;
    struct world w;

    setup(&w);
    w.behave = long_answer;
    w.answer_bytes = 50000;
    connect_client(&w, &c);
    for (uint64_t id = 1; id <= 60; id++)
        send_ping(&c, id);
    turn(&w, 50);
    cr_assert_eq(w.closed, 0);
    if (dies)
        close_client(&c);
    else
        shutdown(c.fd, SHUT_RDWR);
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    if (!dies)
        close_client(&c);
    teardown(&w);
}

Test(server, a_blocked_peer_that_goes_away)
{
    check_blocked_peer(true);
    check_blocked_peer(false);
}

Test(server, turns_are_shared)
{
    struct client greedy, modest;
    struct world w;

    setup_folder(&w);
    w.options.requests_per_turn = 10;
    cr_assert_eq(start(&w), 0);
    connect_client(&w, &greedy);
    connect_client(&w, &modest);
    turn(&w, 1);
    for (uint64_t id = 1; id <= 35; id++)
        send_ping(&greedy, id);
    send_ping(&modest, 1);
    turn(&w, 1);
    cr_assert_eq(w.requests, 11);
    expect_answer(&modest, 1, 0);
    turn(&w, 1);
    cr_assert_eq(w.requests, 21);
    turn(&w, 5);
    cr_assert_eq(w.requests, 36);
    for (uint64_t id = 1; id <= 35; id++)
        expect_answer(&greedy, id, 0);
    close_client(&greedy);
    close_client(&modest);
    teardown(&w);
}

Test(server, long_answers_are_errors_of_the_dispatcher)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    w.answer_bytes = MAX_FRAME;
    cr_assert_eq(answer_long(&w, w.conn, 2), -EMSGSIZE);
    cr_assert_eq(conn_status(w.conn, 3, -E2BIG, "too much"), 0);
    expect_answer(&c, 1, 0);
    expect_answer(&c, 3, -E2BIG);
    close_client(&c);
    teardown(&w);
}

/* ---- events */

Test(server, events_are_not_piled_up)
{
    struct client c;
    struct world w;
    int events = 0, answers = 0;
    struct answer a;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    cr_assert_eq(conn_event(w.conn, KVD__PROTO__EVENT__KIND__COMPLETIONS), 0);
    expect_answer(&c, 1, 0);
    cr_assert_eq(receive(&c).event, KVD__PROTO__EVENT__KIND__COMPLETIONS);
    w.answer_bytes = 200000;
    for (int i = 0; i < 3; i++)
        cr_assert_eq(answer_long(&w, w.conn, 2), 0);
    for (int i = 0; i < 100000; i++)
        cr_assert_eq(conn_event(w.conn, KVD__PROTO__EVENT__KIND__COMPLETIONS), 0);
    server_event(w.server, KVD__PROTO__EVENT__KIND__GOING);
    for (;;) {
        turn(&w, 5);
        a = receive(&c);
        if (a.result)
            break;
        events += a.event == KVD__PROTO__EVENT__KIND__COMPLETIONS;
        answers += a.event < 0;
        if (a.event == KVD__PROTO__EVENT__KIND__GOING)
            break;
    }
    cr_assert_eq(a.event, KVD__PROTO__EVENT__KIND__GOING);
    cr_assert_eq(answers, 3);
    cr_assert_eq(events, 1);
    cr_assert_eq(conn_event(w.conn, KVD__PROTO__EVENT__KIND__COMPLETIONS), 0);
    cr_assert_eq(receive(&c).event, KVD__PROTO__EVENT__KIND__COMPLETIONS);
    close_client(&c);
    teardown(&w);
}

/* Not even a peer that reads nothing at all makes them pile up. */
Test(server, events_for_the_deaf)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    for (int i = 0; i < 100000; i++)
        cr_assert_eq(conn_event(w.conn, KVD__PROTO__EVENT__KIND__COMPLETIONS), 0);
    turn(&w, 5);
    cr_assert_eq(w.closed, 0);
    close_client(&c);
    teardown(&w);
}

Test(server, who_has_not_spoken_gets_no_event)
{
    struct client a, b;
    struct world w;

    setup(&w);
    connect_client(&w, &a);
    connect_client(&w, &b);
    send_ping(&a, 1);
    turn(&w, 5);
    server_event(w.server, KVD__PROTO__EVENT__KIND__GOING);
    expect_answer(&a, 1, 0);
    cr_assert_eq(receive(&a).event, KVD__PROTO__EVENT__KIND__GOING);
    cr_assert_eq(receive(&b).result, -ETIMEDOUT);
    close_client(&a);
    close_client(&b);
    teardown(&w);
}

/* ---- ends */

static void close_at_once(struct world *w, struct conn *conn, const Kvd__Proto__Request *request)
{
    conn_close(conn);
    cr_assert_eq(conn_status(conn, request->id, 0, NULL), -ENOTCONN);
    cr_assert_eq(w->closed, 0, "never from inside");
}

static void answer_and_finish(struct world *w, struct conn *conn,
                              const Kvd__Proto__Request *request)
{
    cr_assert_eq(answer_long(w, conn, request->id), 0);
    conn_finish(conn);
    cr_assert_eq(conn_status(conn, request->id, 0, NULL), -ENOTCONN);
}

Test(server, closed_inside_a_request)
{
    struct client c;
    struct world w;

    setup(&w);
    w.behave = close_at_once;
    connect_client(&w, &c);
    for (uint64_t id = 1; id <= 5; id++)
        send_ping(&c, id);
    turn(&w, 5);
    cr_assert_eq(w.requests, 1);
    cr_assert_eq(w.closed, 1);
    expect_end(&c);
    close_client(&c);
    teardown(&w);
}

Test(server, finished_inside_a_request)
{
    struct client c;
    struct world w;

    setup(&w);
    w.behave = answer_and_finish;
    w.answer_bytes = 10;
    connect_client(&w, &c);
    send_ping(&c, 1);
    send_ping(&c, 2);
    turn(&w, 5);
    cr_assert_eq(w.requests, 1);
    cr_assert_eq(w.closed, 1);
    expect_answer(&c, 1, 0);
    expect_end(&c);
    close_client(&c);
    teardown(&w);
}

/* More waits than the socket takes: it goes on until all is sent ... */
Test(server, finishing_takes_as_long_as_the_peer_reads)
{
    struct client c;
    struct world w;
    struct answer a;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    w.answer_bytes = 200000;
    for (uint64_t id = 2; id <= 4; id++)
        cr_assert_eq(answer_long(&w, w.conn, id), 0);
    conn_finish(w.conn);
    turn(&w, 5);
    cr_assert_eq(w.closed, 0);
    expect_answer(&c, 1, 0);
    for (uint64_t id = 2; id <= 4; id++) {
        while ((a = receive(&c)).result == -ETIMEDOUT)
            turn(&w, 1);
        cr_assert_eq(a.id, id);
    }
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    expect_end(&c);
    close_client(&c);
    teardown(&w);
}

/* ... but not for ever. */
Test(server, finishing_has_a_deadline)
{
    struct client c;
    struct world w;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    w.now += 100 * SECOND;
    turn(&w, 1);
    w.answer_bytes = 200000;
    for (int i = 0; i < 3; i++)
        cr_assert_eq(answer_long(&w, w.conn, 2), 0);
    conn_finish(w.conn);
    w.now += 9 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.closed, 0);
    w.now += 1 * SECOND;
    turn(&w, 5);
    cr_assert_eq(w.closed, 1);
    close_client(&c);
    teardown(&w);
}

Test(server, the_server_goes_first)
{
    struct client spoken, silent, waiting;
    struct world w;

    setup(&w);
    connect_client(&w, &spoken);
    connect_client(&w, &silent);
    send_ping(&spoken, 1);
    turn(&w, 5);
    conn_close(w.conn); /* not yet buried */
    connect_client(&w, &waiting);
    stop(&w);
    cr_assert_eq(w.closed, 2);
    expect_answer(&spoken, 1, 0);
    expect_end(&spoken);
    expect_end(&silent);
    close_client(&spoken);
    close_client(&silent);
    close_client(&waiting);
    cr_assert_eq(start(&w), 0, "and comes again");
    teardown(&w);
}

/* ---- descriptors for clients */

static int reply_fds(struct world *w, struct conn *conn, uint64_t id, unsigned n)
{
    Kvd__Proto__Response r = KVD__PROTO__RESPONSE__INIT;
    int fds[FRAME_MAX_FDS];

    for (unsigned i = 0; i < n; i++)
        fds[i] = w->null;
    r.id = id;
    return conn_reply(conn, &r, fds, n);
}

static void answer_with_fds(struct world *w, struct conn *conn, const Kvd__Proto__Request *request)
{
    cr_assert_eq(reply_fds(w, conn, request->id, (unsigned)request->id), 0);
}

Test(server, answers_carry_descriptors)
{
    struct client c;
    struct world w;
    int before;

    setup(&w);
    w.behave = answer_with_fds;
    connect_client(&w, &c);
    turn(&w, 1);
    before = count_fds();
    for (uint64_t id = 1; id <= 20; id++)
        send_ping(&c, id);
    turn(&w, 4);
    cr_assert_eq(w.requests, 20);
    cr_assert_eq(count_fds(), before, "the server keeps no copies");
    for (uint64_t id = 1; id <= 20; id++) {
        struct answer a = receive(&c);

        cr_assert_eq(a.id, id);
        cr_assert_eq(a.fds, id);
    }
    cr_assert_eq(receive(&c).result, -ETIMEDOUT);
    cr_assert_eq(reply_fds(&w, w.conn, 99, FRAME_MAX_FDS), 0);
    cr_assert_eq(receive(&c).fds, FRAME_MAX_FDS);
    close_client(&c);
    teardown(&w);
}

/* Descriptors in flight are charged to the daemon's user. */
Test(server, unread_descriptors_are_limited)
{
    struct client c;
    struct world w;
    unsigned sent = 0;

    setup(&w);
    connect_client(&w, &c);
    send_ping(&c, 1);
    turn(&w, 5);
    for (int i = 0; i < 50; i++) { /* who reads gets any number */
        cr_assert_eq(reply_fds(&w, w.conn, 2, 100), 0);
        while (receive(&c).result == 0)
            ;
    }
    while (reply_fds(&w, w.conn, 2, 100) == 0)
        sent += 100;
    cr_assert_geq(sent, 1000);
    cr_assert_leq(sent, 1100);
    cr_assert_eq(server_stats(w.server)->overflowed, 1);
    turn(&w, 1);
    cr_assert_eq(w.closed, 1);
    close_client(&c);
    teardown(&w);
}
