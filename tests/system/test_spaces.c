/* SPDX-License-Identifier: Apache-2.0 */
/* I6: whoever comes through a socket that shows only the space `mine` gets at nothing of
 * `theirs`: not by its name, not by numbers that it guesses, neither through the socket nor through
 * its ring. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "client/control.h"
#include "harness.h"
#include "objects.h"
#include "raw.h"
#include "shm/layout.h"
#include "shm/ring.h"

TestSuite(spaces, .init = harness_init, .fini = harness_fini);

/* As many slots, and the same keys: what is hit by mistake is found. */
static const char *const two_pools = "[space mine]\n[space theirs]\n"
                                     "[pool mine/kv]\nslot = 64K\nslots = 16\nlow_water = 0\n"
                                     "[pool theirs/kv]\nslot = 64K\nslots = 16\nlow_water = 0\n";

static struct daemon d;
static struct worker owner;
static char narrow[128], narrow_admin[128];
static uint32_t mine, theirs;
static struct counts before;

/* Two more sockets, which show only `mine`; objects 0 to 7 in `theirs`, of which the owner holds
 * four, and a reservation there. */
static void set_up(void)
{
    FILE *f;

    daemon_prepare(&d, NULL, two_pools);
    snprintf(narrow, sizeof(narrow), "%s/narrow.sock", d.runtime);
    snprintf(narrow_admin, sizeof(narrow_admin), "%s/narrow-admin.sock", d.runtime);
    f = fopen(d.config, "a");
    cr_assert_not_null(f);
    fprintf(f, "[socket narrow]\npath = %s\nrole = writer\nspaces = mine\n", narrow);
    fprintf(f, "[socket narrow-admin]\npath = %s\nrole = admin\nspaces = mine\n", narrow_admin);
    cr_assert_eq(fclose(f), 0);
    daemon_start(&d);
    mine = daemon_pool(&d, "mine/kv");
    theirs = daemon_pool(&d, "theirs/kv");
    cr_assert_neq(mine, theirs);
    worker_join(&owner, d.writer, "theirs", "kv", "");
    cr_assert_eq(worker_n(&owner, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&owner, "pin 0 4"), 4);
    cr_assert_eq(worker_n(&owner, "reserve 50 2"), 2);
    before = daemon_counts(&d, "theirs/kv");
    cr_assert_eq(before.pinned, 4);
    cr_assert_eq(before.reserved, 2);
}

static void nothing_has_changed(void)
{
    struct counts after = daemon_counts(&d, "theirs/kv");

    cr_assert_eq(memcmp(&before, &after, sizeof(before)), 0, "something has happened in `theirs`");
    worker_do(&owner, "current");
    cr_assert_eq(worker_n(&owner, "check"), 4);
    cr_assert_eq(worker_n(&owner, "lookup 0 8"), 8);
    cr_assert_eq(daemon_session(&d, owner.pid).pinned, 4);
}

static void tear_down(void)
{
    static const char *const pools[] = {"mine/kv", "theirs/kv", NULL};

    nothing_has_changed();
    worker_do(&owner, "fill");
    cr_assert_eq(worker_n(&owner, "commit"), 2);
    worker_quit(&owner);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* ---- every request that names a pool */

struct every {
    Kvd__Proto__PoolOpen pool_open;
    Kvd__Proto__ChunkMap chunk_map;
    Kvd__Proto__Lookup lookup;
    Kvd__Proto__Pin pin;
    Kvd__Proto__Release release;
    Kvd__Proto__Read read;
    Kvd__Proto__Reserve reserve;
    Kvd__Proto__Write write;
    Kvd__Proto__Commit commit;
    Kvd__Proto__Abort abort;
    Kvd__Proto__Observe observe;
    Kvd__Proto__Blocks blocks;
    Kvd__Proto__Why why;
    Kvd__Proto__Stats stats;
    Kvd__Proto__Evict evict;
    Kvd__Proto__Flush flush;
    Kvd__Proto__Request request[16];
    size_t n;
    bool admin[16]; /* asked of admins */

    uint64_t ticket, slots[16];
    uint8_t letters[8];
    struct kvd_key bytes;
    Kvd__Proto__Key key, *keys;
};

static Kvd__Proto__Request *next(struct every *e, Kvd__Proto__Request__BodyCase body)
{
    Kvd__Proto__Request *r = &e->request[e->n];

    kvd__proto__request__init(r);
    r->body_case = body;
    e->admin[e->n++] = body >= KVD__PROTO__REQUEST__BODY_STATUS;
    return r;
}

#define ASK(BODY, field, Type, ...)                                                                \
    do {                                                                                           \
        kvd__proto__##Type##__init(&e->field);                                                     \
        e->field.pool = pool;                                                                      \
        next(e, KVD__PROTO__REQUEST__BODY_##BODY)->field = &e->field;                              \
        __VA_ARGS__;                                                                               \
    } while (0)

#define WITH_KEYS(field)  (e->field.n_keys = 1, e->field.keys = &e->keys)
#define WITH_EPOCH(field) (e->field.epoch = 1, WITH_KEYS(field))

/* `ticket`: of a reservation that somebody really has. */
static void every_request(struct every *e, uint32_t pool, uint64_t ticket)
{
    *e = (struct every){.ticket = ticket, .bytes = object_key(0), .keys = &e->key};
    for (unsigned i = 0; i < 16; i++)
        e->slots[i] = i;
    raw_key(&e->key, &e->bytes);
    ASK(POOL_OPEN, pool_open, pool_open, );
    ASK(CHUNK_MAP, chunk_map, chunk_map, e->chunk_map.has_write = e->chunk_map.write = 1);
    ASK(LOOKUP, lookup, lookup, WITH_EPOCH(lookup));
    ASK(PIN, pin, pin, WITH_EPOCH(pin));
    ASK(RELEASE, release, release, e->release.n_slots = 16, e->release.slots = e->slots);
    ASK(READ, read, read, e->read.epoch = 1, e->read.key = &e->key);
    ASK(RESERVE, reserve, reserve, WITH_EPOCH(reserve));
    ASK(WRITE, write, write, e->write.ticket = ticket, e->write.data.len = 8,
        e->write.data.data = e->letters);
    ASK(COMMIT, commit, commit, e->commit.ticket = ticket, e->commit.bytes = 65536);
    ASK(ABORT, abort, abort, e->abort.n_tickets = 1, e->abort.tickets = &e->ticket);
    ASK(OBSERVE, observe, observe, WITH_EPOCH(observe));
    ASK(BLOCKS, blocks, blocks, );
    ASK(WHY, why, why, e->why.key = &e->key);
    ASK(STATS, stats, stats, e->stats.has_pool = 1);
    ASK(EVICT, evict, evict, WITH_KEYS(evict));
    ASK(FLUSH, flush, flush, );
    cr_assert_eq(e->n, 16);
}

/* ---- a session of our own, with its ring */

struct client {
    struct control *control;
    struct shm_session *session;
    size_t session_bytes;
    struct shm_cursor requests, completions;
};

static void attach(struct client *c, const char *socket)
{
    struct control_options o = {.socket = socket, .client = "guesser", .shm = true};
    struct control_reply reply = {0};
    struct stat st;
    uint32_t n;
    int fd;

    cr_assert_eq(control_new(&o, &c->control), 0);
    cr_assert_eq(control_connect(c->control, control_deadline(PATIENCE_MS), &reply), 0, "%s",
                 control_error(c->control));
    fd = control_take_fd(&reply, 1);
    cr_assert_eq(fstat(fd, &st), 0);
    c->session_bytes = (size_t)st.st_size;
    c->session = mmap(NULL, c->session_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(c->session, MAP_FAILED);
    close(fd);
    control_reply_free(&reply);
    n = (uint32_t)c->session->header.count;
    c->requests = (struct shm_cursor){.ring = &c->session->requests, .entries = n};
    c->completions = (struct shm_cursor){.ring = &c->session->completions, .entries = n};
}

/* With a Bye: this process lives on, and would keep its session. */
static void detach(struct client *c)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Bye bye = KVD__PROTO__BYE__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_BYE;
    request.bye = &bye;
    cr_assert_eq(control_call(c->control, &request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                              control_deadline(PATIENCE_MS), NULL),
                 0);
    control_free(c->control);
    munmap(c->session, c->session_bytes);
}

static int ask(struct client *c, Kvd__Proto__Request *request)
{
    struct control_reply reply = {0};
    int r = control_call(c->control, request, KVD__PROTO__RESPONSE__BODY__NOT_SET,
                         control_deadline(PATIENCE_MS), &reply);

    if (r == 0)
        control_reply_free(&reply);
    cr_assert(control_is_open(c->control), "it has hung up");
    return r;
}

/* Statistics are filtered rather than refused: those of a pool that is not shown are none. */
static void must_be_refused(struct client *c, Kvd__Proto__Request *request, int expected)
{
    struct control_reply reply = {0};

    if (request->body_case != KVD__PROTO__REQUEST__BODY_STATS) {
        cr_assert_eq(ask(c, request), expected, "request %d: %s", (int)request->body_case,
                     control_error(c->control));
        return;
    }
    cr_assert_eq(control_call(c->control, request, KVD__PROTO__RESPONSE__BODY_STATS,
                              control_deadline(PATIENCE_MS), &reply),
                 0);
    cr_assert_eq(reply.response->stats->n_stats, 0);
    control_reply_free(&reply);
}

/* A request on the ring, and its status. An observation has no answer: a ping behind it has. */
static int post(struct client *c, const struct shm_request *q)
{
    const struct shm_completion *done;
    int status;

    c->session->request[shm_ring_at(&c->requests, c->requests.mine)] = *q;
    shm_ring_produce(&c->requests, 1);
    cr_assert_eq(control_wake(c->control), 0);
    if (q->op == SHM_OBSERVE)
        return 0;
    eventually(shm_ring_waiting(&c->completions) > 0);
    done = shm_completion_array(c->session, c->completions.entries) +
           shm_ring_at(&c->completions, c->completions.mine);
    cr_assert_eq(done->user_data, q->user_data);
    status = done->status;
    shm_ring_consume(&c->completions, 1);
    return status;
}

static int post_reserve(struct client *c, uint32_t pool, uint64_t id)
{
    struct kvd_key of = object_key(id);
    struct shm_request q = {.op = SHM_RESERVE, .pool = pool, .epoch = 1, .user_data = id + 1};

    memcpy(&q.reserve.key, &of, sizeof(of));
    return post(c, &q);
}

static int post_commit(struct client *c, uint32_t pool, uint64_t ticket)
{
    struct shm_request q = {
        .op = SHM_COMMIT, .pool = pool, .epoch = 1, .user_data = ticket, .ticket = ticket};

    q.commit.bytes = 65536;
    return post(c, &q);
}

static void post_observe(struct client *c, uint32_t pool)
{
    struct kvd_key of = object_key(0);
    struct shm_request q = {.op = SHM_OBSERVE, .pool = pool, .epoch = 1};

    q.observe.n = 1;
    memcpy(&q.observe.keys[0], &of, sizeof(of));
    post(c, &q);
}

/* Of the owner's first reservation in `theirs`. */
static uint64_t ticket_of_owner(void)
{
    unsigned long long id, ticket;

    cr_assert_eq(sscanf(worker_do(&owner, "tickets"), "%llu:%llu:", &id, &ticket), 2);
    return ticket;
}

static void nothing_through_the_ring(struct client *c)
{
    for (uint32_t pool = 0; pool < 8; pool++) {
        if (pool == mine)
            continue;
        cr_assert_eq(post_reserve(c, pool, 60), -EBADF, "pool %u", pool);
        cr_assert_eq(post_reserve(c, pool, 0), -EBADF, "pool %u", pool);
        cr_assert_eq(post_commit(c, pool, ticket_of_owner()), -EBADF, "pool %u", pool);
        post_observe(c, pool);
    }
}

/* ---- */

/* Release came to an attach once, and then the ring was open. So: each request, and then the
 * ring. */
Test(spaces, pools_cannot_be_guessed)
{
    static struct every e;
    struct client c;

    set_up();
    every_request(&e, theirs, ticket_of_owner());
    for (size_t i = 0; i < e.n; i++) {
        attach(&c, narrow);
        must_be_refused(&c, &e.request[i], e.admin[i] ? -EACCES : -ENOENT);
        nothing_through_the_ring(&c);
        detach(&c);
        nothing_has_changed();
    }
    tear_down();
}

Test(spaces, an_admin_of_one_is_none_of_the_other)
{
    static struct every e;
    struct client c;

    set_up();
    attach(&c, narrow_admin);
    every_request(&e, theirs, ticket_of_owner());
    for (size_t i = 0; i < e.n; i++)
        must_be_refused(&c, &e.request[i], -ENOENT);
    nothing_through_the_ring(&c);
    detach(&c);
    tear_down();
}

/* The same requests are in order where they belong, so it was the space that they were refused
 * for. */
Test(spaces, the_same_requests_of_ones_own)
{
    static struct every e;
    struct worker w;
    struct client c;

    set_up();
    worker_join(&w, narrow, "mine", "kv", "");
    cr_assert_eq(worker_n(&w, "publish 0 1"), 1);
    attach(&c, narrow_admin);
    every_request(&e, mine, ticket_of_owner());
    for (size_t i = 0; i < e.n; i++) {
        int r = ask(&c, &e.request[i]);

        /* The ticket is of the other pool, and not good in this one. */
        cr_assert(r == 0 ||
                      (r == -ESTALE && e.request[i].body_case >= KVD__PROTO__REQUEST__BODY_WRITE &&
                       e.request[i].body_case <= KVD__PROTO__REQUEST__BODY_COMMIT),
                  "request %d: %d %s", (int)e.request[i].body_case, r, control_error(c.control));
    }
    cr_assert_eq(post_reserve(&c, mine, 60), KVD_NEW);
    cr_assert_eq(post_commit(&c, mine, ticket_of_owner()), -ESTALE);
    nothing_through_the_ring(&c);
    detach(&c);
    worker_quit(&w);
    tear_down();
}

static int open_space(struct client *c, const char *name, char *ret_message, size_t n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceOpen open_ = KVD__PROTO__SPACE_OPEN__INIT;
    int r;

    open_.name = (char *)name;
    request.body_case = KVD__PROTO__REQUEST__BODY_SPACE_OPEN;
    request.space_open = &open_;
    r = ask(c, &request);
    snprintf(ret_message, n, "%s", r < 0 ? control_error(c->control) : "");
    return r;
}

static int reset_space(struct client *c, uint32_t id)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceReset reset = KVD__PROTO__SPACE_RESET__INIT;

    reset.space = id;
    request.body_case = KVD__PROTO__REQUEST__BODY_SPACE_RESET;
    request.space_reset = &reset;
    return ask(c, &request);
}

/* Not even that it exists. */
Test(spaces, names_and_numbers_of_spaces)
{
    char there[256], nowhere[256], *at;
    struct client c;

    set_up();
    attach(&c, narrow);
    cr_assert_eq(open_space(&c, "theirs", there, sizeof(there)), -ENOENT);
    cr_assert_eq(open_space(&c, "nobody", nowhere, sizeof(nowhere)), -ENOENT);
    at = strstr(nowhere, "nobody");
    cr_assert_not_null(at);
    memcpy(at, "theirs", 6);
    cr_assert_str_eq(there, nowhere);
    cr_assert_eq(open_space(&c, "mine", there, sizeof(there)), 0);
    for (uint32_t i = 0; i < 8; i++)
        cr_assert_eq(reset_space(&c, i), i == 0 ? 0 : -ENOENT, "space %u", i);
    detach(&c);
    tear_down();
}

/* What is told of the whole daemon tells of the socket's spaces. */
Test(spaces, reports_are_of_ones_own)
{
    const char *const sockets[] = {narrow, narrow_admin};
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
    Kvd__Proto__Stats stats = KVD__PROTO__STATS__INIT;

    set_up();
    for (size_t s = 0; s < 2; s++) {
        Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
        size_t of_mine = 0;
        struct raw r;

        raw_join(&r, sockets[s]);
        request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
        request.status = &status;
        cr_assert_eq(raw_call(&r, &request), 0);
        cr_assert_eq(r.response->status_reply->n_spaces, 1);
        cr_assert_str_eq(r.response->status_reply->spaces[0]->name, "mine");
        cr_assert_eq(r.response->status_reply->n_pools, 1);
        cr_assert_eq(r.response->status_reply->pools[0]->info->pool, mine);
        request.body_case = KVD__PROTO__REQUEST__BODY_STATS;
        request.stats = &stats;
        cr_assert_eq(raw_call(&r, &request), 0);
        for (size_t i = 0; i < r.response->stats->n_stats; i++) {
            const char *pool = r.response->stats->stats[i]->pool;

            cr_assert(!pool || strcmp(pool, "mine/kv") == 0, "%s", pool);
            of_mine += pool != NULL;
        }
        cr_assert_gt(of_mine, 0);
        raw_close(&r);
    }
    tear_down();
}

/* Equal keys in both: each finds its own bytes. */
Test(spaces, equal_keys_are_different_objects)
{
    struct worker w;

    set_up();
    worker_join(&w, narrow, "mine", "kv", "");
    cr_assert_eq(worker_n(&w, "lookup 0 8"), 0);
    cr_assert_eq(worker_n(&w, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&w, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&w, "check"), 8);
    worker_do(&owner, "pin 4 4");
    cr_assert_eq(worker_n(&owner, "check"), 8);
    worker_do(&owner, "release 4");
    worker_quit(&w);
    tear_down();
}
