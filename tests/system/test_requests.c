/* SPDX-License-Identifier: Apache-2.0 */
/* Well-formed requests with numbers that may be anything, by several sessions that come and go, on the
 * sockets of a real daemon. What holds is I4, and that a bystander notices nothing.
 *
 * KVD_SEED=N repeats a run; KVD_ROUNDS=N: more of them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "objects.h"
#include "raw.h"

TestSuite(requests, .init = harness_init, .fini = harness_fini);

#define LIST_MAX 12
#define RECENT   16
#define CLIENTS  6

static struct daemon d;
static struct worker bystander;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};
static uint64_t seed;

static struct {
    uint32_t pool;
    uint64_t ticket;
} granted[RECENT]; /* the last ones, to whomever */
static unsigned n_granted;

/* What a request is made of. */
static struct {
    struct kvd_key bytes[LIST_MAX];
    Kvd__Proto__Key keys[LIST_MAX], *list[LIST_MAX];
    uint64_t numbers[LIST_MAX];
    size_t n;
    Kvd__Proto__Meta meta;
    uint8_t data[4096];
} x;

static uint64_t pick(uint64_t n)
{
    seed = object_mix(seed + UINT64_C(0x9e3779b97f4a7c15));
    return seed % n;
}

/* Mostly what makes sense, sometimes what does not. */
static uint64_t number(uint64_t n)
{
    static const uint64_t odd[] = {64, 65, UINT32_MAX, UINT64_C(1) << 63, UINT64_MAX};

    return pick(16) ? pick(n) : odd[pick(5)];
}

/* Pools of space one; the bystander's is left alone. */
static uint32_t some_pool(void)
{
    return (uint32_t)number(2);
}

static uint32_t some_epoch(void)
{
    return (uint32_t)(pick(8) ? d.epoch : number(3));
}

static void choose(void)
{
    x.n = pick(LIST_MAX);
    for (size_t i = 0; i < LIST_MAX; i++) {
        x.bytes[i] = object_key(pick(40));
        raw_key(&x.keys[i], &x.bytes[i]);
        x.list[i] = &x.keys[i];
        x.numbers[i] = pick(4) ? granted[pick(RECENT)].ticket : number(64);
    }
    kvd__proto__meta__init(&x.meta);
    x.meta.has_user = (int)pick(2);
    x.meta.user = (ProtobufCBinaryData){.data = x.data, .len = pick(20) ? pick(128) : 129};
}

static void send_it(struct raw *r, Kvd__Proto__Request *q, Kvd__Proto__Request__BodyCase body)
{
    q->body_case = body;
    cr_assert_neq(raw_call(r, q), RAW_END, "request %d ends the connection", (int)body);
}

/* ---- reading */

static void ask_lookup(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Lookup m = KVD__PROTO__LOOKUP__INIT;

    m.pool = some_pool();
    m.epoch = some_epoch();
    m.n_keys = x.n;
    m.keys = x.list;
    q.lookup = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_LOOKUP);
}

static void ask_pin(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Pin m = KVD__PROTO__PIN__INIT;

    m.pool = some_pool();
    m.epoch = some_epoch();
    m.n_keys = x.n;
    m.keys = x.list;
    m.has_all = 1;
    m.all = (int)pick(2);
    q.pin = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_PIN);
}

static void ask_release(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Release m = KVD__PROTO__RELEASE__INIT;

    for (size_t i = 0; i < x.n; i++)
        x.numbers[i] = number(64);
    m.pool = some_pool();
    m.n_slots = x.n;
    m.slots = x.numbers;
    q.release = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_RELEASE);
}

static void ask_read(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Read m = KVD__PROTO__READ__INIT;

    m.pool = some_pool();
    m.epoch = some_epoch();
    m.key = x.list[0];
    m.has_part = m.has_offset = m.has_bytes = 1;
    m.part = (uint32_t)number(2);
    m.offset = number(65536);
    m.bytes = number(65536);
    q.read = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_READ);
}

static void ask_observe(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Observe m = KVD__PROTO__OBSERVE__INIT;

    m.pool = some_pool();
    m.epoch = some_epoch();
    m.n_keys = x.n;
    m.keys = x.list;
    q.observe = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_OBSERVE);
}

/* ---- publishing */

static void ask_reserve(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Reserve m = KVD__PROTO__RESERVE__INIT;

    m.pool = some_pool();
    m.epoch = some_epoch();
    m.n_keys = x.n;
    m.keys = x.list;
    m.has_chain = m.has_tenant = 1;
    m.chain = (int)pick(2);
    m.tenant = (uint32_t)pick(3);
    m.parent = pick(2) ? x.list[LIST_MAX - 1] : NULL;
    q.reserve = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_RESERVE);
    if (r->response->status < 0)
        return;
    for (size_t i = 0; i < r->response->reserve->n_reservations; i++)
        if (r->response->reserve->reservations[i]->has_ticket) {
            granted[n_granted % RECENT].pool = m.pool;
            granted[n_granted++ % RECENT].ticket = r->response->reserve->reservations[i]->ticket;
        }
}

static void ask_write(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Write m = KVD__PROTO__WRITE__INIT;
    unsigned recent = (unsigned)pick(RECENT);

    m.pool = pick(16) ? granted[recent].pool : some_pool();
    m.ticket = pick(16) ? granted[recent].ticket : x.numbers[0];
    m.has_part = m.has_offset = 1;
    m.part = (uint32_t)number(2);
    m.offset = number(16384);
    m.data = (ProtobufCBinaryData){.data = x.data, .len = pick(sizeof(x.data))};
    q.write = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_WRITE);
}

static void ask_commit(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Commit m = KVD__PROTO__COMMIT__INIT;
    unsigned recent = (unsigned)pick(RECENT);

    m.pool = pick(16) ? granted[recent].pool : some_pool();
    m.ticket = pick(16) ? granted[recent].ticket : x.numbers[0];
    m.has_part = 1;
    m.part = (uint32_t)number(2);
    m.bytes = pick(16) ? 16384 : number(65537);
    m.meta = pick(2) ? &x.meta : NULL;
    q.commit = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_COMMIT);
}

static void ask_abort(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Abort m = KVD__PROTO__ABORT__INIT;

    m.pool = some_pool();
    m.n_tickets = pick(3);
    m.tickets = x.numbers;
    q.abort = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_ABORT);
}

/* ---- administration */

static void ask_reset(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceReset m = KVD__PROTO__SPACE_RESET__INIT;

    if (pick(8)) /* it undoes what all the others have done */
        return;
    q.space_reset = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_SPACE_RESET);
    if (r->response->status == 0)
        d.epoch = r->response->space_reset->epoch;
}

static void ask_flush(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Flush m = KVD__PROTO__FLUSH__INIT;

    m.pool = some_pool();
    m.has_cursor = 1;
    m.cursor = number(64);
    q.flush = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_FLUSH);
}

static void ask_evict(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Evict m = KVD__PROTO__EVICT__INIT;

    m.pool = some_pool();
    m.n_keys = pick(2) ? x.n : 0;
    m.keys = x.list;
    m.has_count = m.has_cursor = 1;
    m.has_tenant = (int)pick(2);
    m.tenant = (uint32_t)pick(3);
    m.count = number(8);
    m.cursor = number(64);
    q.evict = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_EVICT);
}

static void ask_blocks(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Blocks m = KVD__PROTO__BLOCKS__INIT;

    m.pool = some_pool();
    m.has_cursor = m.has_limit = 1;
    m.cursor = number(64);
    m.limit = (uint32_t)number(64);
    q.blocks = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_BLOCKS);
}

static void ask_why(struct raw *r)
{
    Kvd__Proto__Request q = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Why m = KVD__PROTO__WHY__INIT;

    m.pool = some_pool();
    m.key = x.list[0];
    q.why = &m;
    send_it(r, &q, KVD__PROTO__REQUEST__BODY_WHY);
}

/* ---- */

/* How often, of all requests. */
static const struct {
    unsigned share;
    void (*ask)(struct raw *r);
} requests[] = {
    {60, ask_reserve}, {200, ask_commit}, {40, ask_write},  {20, ask_abort},   {20, ask_lookup},
    {30, ask_pin},     {60, ask_release}, {30, ask_read},   {20, ask_observe}, {1, ask_reset},
    {2, ask_flush},    {6, ask_evict},    {20, ask_blocks}, {20, ask_why},
};

static void ask_something(struct raw *r)
{
    uint64_t total = 0, at;

    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++)
        total += requests[i].share;
    at = pick(total);
    for (size_t i = 0;; at -= requests[i++].share)
        if (at < requests[i].share) {
            requests[i].ask(r);
            return;
        }
}

static void same_engine(Kvd__Proto__Hello *hello, void *token)
{
    hello->has_engine_token = 1;
    hello->engine_token = (ProtobufCBinaryData){.data = token, .len = 6};
}

/* Two of one engine, two writers, a reader, an administrator. */
static void come(struct raw *r, int i)
{
    char token[] = "engine";

    raw_connect(r, i == 5 ? d.admin : i == 4 ? d.reader : d.writer);
    cr_assert_eq(raw_hello(r, i < 2 ? same_engine : NULL, token), 0);
}

static uint64_t given(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);

    return text ? strtoull(text, NULL, 0) : otherwise;
}

static uint64_t committed(const char *pool)
{
    return daemon_stat(&d, "kvd_committed_objects_total", pool);
}

Test(requests, at_random, .timeout = 280)
{
    uint64_t n = given("KVD_ROUNDS", 20000);
    struct raw r[CLIENTS];

    seed = given("KVD_SEED", clock_us());
    cr_log_info("KVD_SEED=%llu", (unsigned long long)seed);
    daemon_up(&d, "quarantine = 2ms\nengine_linger = 5ms\n", usual_pools);
    bystander_start(&bystander, &d);
    d.epoch = 1;
    for (int i = 0; i < CLIENTS; i++)
        come(&r[i], i);
    for (uint64_t i = 0; i < n; i++) {
        int who = (int)pick(CLIENTS);

        choose();
        ask_something(&r[who]);
        if (!pick(64)) {
            raw_close(&r[who]);
            come(&r[who], who);
        }
        if (!pick(32))
            daemon_counts(&d, pick(2) ? "one/kv" : "one/parts");
    }
    for (int i = 0; i < CLIENTS; i++)
        raw_close(&r[i]);
    cr_log_info("%llu and %llu committed, epoch %u", (unsigned long long)committed("one/kv"),
                (unsigned long long)committed("one/parts"), d.epoch);
    cr_assert(committed("one/kv") && committed("one/parts"), "it was too random for anything");
    bystander_stop(&bystander);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}
