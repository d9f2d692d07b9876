/* SPDX-License-Identifier: Apache-2.0 */
/* Commands that show what the daemon says: status, spaces, pools, sessions, blocks, why. */
#include <stdio.h>
#include <string.h>

#include "stores.h"

/* ---- spaces, pools, sockets */

static const struct out_column space_columns[] = {
    {"SPACE", "name", OUT_TEXT, 0},
    {"EPOCH", "epoch", OUT_NUMBER, 0},
    {"SCHEME", "scheme", OUT_TEXT, 0},
    {"BLOCK TOKENS", "block_tokens", OUT_NUMBER, 0},
    {"POOLS", "pools", OUT_NUMBER, 0},
    {"OBJECTS", "objects", OUT_NUMBER, 0},
    {"SESSIONS", "sessions", OUT_NUMBER, 0},
    {"STATE", "state", OUT_STATE, 0},
    {"IDENTITY", "identity", OUT_TEXT, OUT_CUT | OUT_MAYBE},
    {"OFFLINE BECAUSE", "offline", OUT_TEXT, OUT_CUT | OUT_MAYBE},
    {NULL, NULL, OUT_TEXT, 0},
};

static void add_spaces(struct json_object *o, const Kvd__Proto__StatusReply *s)
{
    struct json_object *rows = out_array(o, "spaces");

    for (size_t i = 0; i < s->n_spaces; i++) {
        const Kvd__Proto__SpaceStatus *x = s->spaces[i];
        struct json_object *row = out_row(rows);

        out_text(row, "name", x->name);
        out_number(row, "epoch", x->epoch);
        out_text(row, "scheme", x->scheme);
        if (x->has_block_tokens)
            out_number(row, "block_tokens", x->block_tokens);
        out_number(row, "pools", x->pools);
        if (x->has_objects)
            out_number(row, "objects", x->objects);
        out_number(row, "sessions", x->sessions);
        out_text(row, "state", x->offline ? "offline" : "online");
        if (x->identity && x->identity[0])
            out_text(row, "identity", x->identity);
        out_text(row, "offline", x->offline);
    }
}

static const struct out_column pool_columns[] = {
    {"POOL", "name", OUT_TEXT, 0},
    {"NR", "pool", OUT_NUMBER, 0},
    {"SLOT", "slot_bytes", OUT_SIZE, 0},
    {"SIZE", "bytes", OUT_SIZE, 0},
    {"SLOTS", "slots", OUT_NUMBER, 0},
    {"FREE", "free", OUT_NUMBER, 0},
    {"RESERVED", "reserved", OUT_NUMBER, 0},
    {"LIVE", "live", OUT_NUMBER, 0},
    {"PINNED", "pinned", OUT_NUMBER, 0},
    {"QUARANTINED", "quarantined", OUT_NUMBER, 0},
    {"EVICTED", "evicted_total", OUT_NUMBER, 0},
    {"STORED", "stored", OUT_NUMBER, OUT_MAYBE},
    {"BACKING", "backing", OUT_TEXT, 0},
    {"PAGE", "page_bytes", OUT_SIZE, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

/* Objects in the pool's stores. */
static void add_stored(struct json_object *row, const char *pool, const Kvd__Proto__SpillReply *s)
{
    uint64_t stored = 0, n = 0;

    for (size_t i = 0; i < s->n_stores; i++)
        if (store_is_of(s->stores[i], pool)) {
            stored += s->stores[i]->has_used ? s->stores[i]->used : 0;
            n++;
        }
    if (n)
        out_number(row, "stored", stored);
}

/* `stores` may be NULL. */
static void add_pool(struct json_object *rows, const Kvd__Proto__PoolStatus *x,
                     const Kvd__Proto__SpillReply *stores)
{
    const Kvd__Proto__PoolInfo *i = x->info;
    struct json_object *row = out_row(rows);
    struct pool_ref ref;

    ctl_pool_ref(i, &ref);
    out_text(row, "name", ref.name);
    out_number(row, "pool", i->pool);
    out_text(row, "space", i->space);
    out_number(row, "slot_bytes", i->part_bytes * i->parts);
    out_number(row, "part_bytes", i->part_bytes);
    out_number(row, "parts", i->parts);
    out_number(row, "bytes", i->slots * i->part_bytes * i->parts);
    out_number(row, "slots", i->slots);
    out_number(row, "free", x->free);
    out_number(row, "reserved", x->reserved);
    out_number(row, "live", x->live);
    out_number(row, "in_flight", x->in_flight);
    out_number(row, "quarantined", x->quarantined);
    out_number(row, "pinned", x->pinned);
    out_number(row, "evicted_total", x->evicted_total);
    out_number(row, "committed_total", x->committed_total);
    if (stores)
        add_stored(row, ref.name, stores);
    if (i->has_records)
        out_number(row, "records", i->records);
    if (x->has_low_water)
        out_number(row, "low_water", x->low_water);
    out_text(row, "policy", x->policy);
    out_number(row, "chunk_slots", i->chunk_slots);
    out_number(row, "chunks", i->chunks);
    out_text(row, "backing", i->backing);
    out_number(row, "page_bytes", i->page_bytes);
    out_text(row, "ladder", x->ladder);
}

static void add_pools(struct json_object *o, const Kvd__Proto__StatusReply *s,
                      const Kvd__Proto__SpillReply *stores)
{
    struct json_object *rows = out_array(o, "pools");

    for (size_t i = 0; i < s->n_pools; i++)
        add_pool(rows, s->pools[i], stores);
}

static const struct out_column socket_columns[] = {
    {"SOCKET", "path", OUT_TEXT, 0},
    {"ROLE", "role", OUT_TEXT, 0},
    {"CONNECTIONS", "connections", OUT_NUMBER, 0},
    {"SPACES", "spaces", OUT_LIST, OUT_CUT},
    {NULL, NULL, OUT_TEXT, 0},
};

static void add_sockets(struct json_object *o, const Kvd__Proto__StatusReply *s)
{
    struct json_object *rows = out_array(o, "sockets");

    for (size_t i = 0; i < s->n_sockets; i++) {
        const Kvd__Proto__SocketStatus *x = s->sockets[i];
        struct json_object *row = out_row(rows);

        out_text(row, "path", x->path);
        out_text(row, "role", x->role);
        out_number(row, "connections", x->connections);
        out_texts(row, "spaces", x->spaces, x->n_spaces);
    }
}

static const char no_spaces[] = "this socket shows no space";
static const char no_pools[] = "this socket shows no pool";

int run_spaces(struct ctl *c, char **args, int n)
{
    struct control_reply reply;
    struct json_object *o;
    int r = ctl_get_status(c, &reply);

    (void)args;
    (void)n;
    if (r)
        return r;
    o = out_document();
    add_spaces(o, reply.response->status_reply);
    out_rows(c, o, "spaces", space_columns, no_spaces);
    out_end(c, o);
    control_reply_free(&reply);
    return 0;
}

int run_pools(struct ctl *c, char **args, int n)
{
    struct control_reply reply, stores;
    struct json_object *o;
    int r = ctl_get_status(c, &reply);
    bool has_stores;

    (void)args;
    (void)n;
    if (r)
        return r;
    has_stores = stores_try(c, &stores);
    o = out_document();
    add_pools(o, reply.response->status_reply, has_stores ? stores.response->spill : NULL);
    out_rows(c, o, "pools", pool_columns, no_pools);
    out_end(c, o);
    if (has_stores)
        control_reply_free(&stores);
    control_reply_free(&reply);
    return 0;
}

/* ---- status */

static const struct out_column status_columns[] = {
    {"kvd", "version", OUT_TEXT, 0},
    {"state", "state", OUT_STATE, 0},
    {"pid", "pid", OUT_NUMBER, 0},
    {"up", "uptime_s", OUT_DURATION, 0},
    {"runtime directory", "runtime_dir", OUT_TEXT, 0},
    {"hugepages", "hugepages", OUT_TEXT, 0},
    {"sessions (with this one)", "sessions", OUT_NUMBER, 0},
    {"connections (with this one)", "connections", OUT_NUMBER, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

static struct json_object *status_document(const Kvd__Proto__StatusReply *s,
                                           const Kvd__Proto__SpillReply *stores)
{
    struct json_object *o = out_document();

    out_text(o, "version", s->version);
    out_text(o, "state", s->state);
    out_number(o, "pid", s->pid);
    out_number(o, "uptime_s", s->uptime_s);
    out_text(o, "runtime_dir", s->runtime_dir);
    out_text(o, "hugepages", s->hugepages);
    out_number(o, "sessions", s->sessions);
    out_number(o, "connections", s->connections);
    out_texts(o, "problems", s->problems, s->n_problems);
    add_spaces(o, s);
    add_pools(o, s, stores);
    if (stores)
        stores_add(o, stores);
    add_sockets(o, s);
    return o;
}

static void print_status(struct ctl *c, struct json_object *o, const Kvd__Proto__StatusReply *s,
                         const Kvd__Proto__SpillReply *stores)
{
    if (c->json)
        return;
    out_fields(c, o, status_columns);
    for (size_t i = 0; i < s->n_problems; i++) {
        fputs("\nproblem: ", stdout);
        out_clean(s->problems[i]);
    }
    putchar('\n');
    out_rows(c, o, "spaces", space_columns, no_spaces);
    putchar('\n');
    out_rows(c, o, "pools", pool_columns, no_pools);
    putchar('\n');
    if (stores) {
        stores_print(c, o, stores, s);
        putchar('\n');
    }
    out_rows(c, o, "sockets", socket_columns, "no sockets");
}

int run_status(struct ctl *c, char **args, int n)
{
    const Kvd__Proto__SpillReply *spill = NULL;
    const Kvd__Proto__StatusReply *s;
    struct control_reply reply, stores;
    struct json_object *o;
    int r = ctl_get_status(c, &reply);

    (void)args;
    (void)n;
    if (r)
        return r;
    s = reply.response->status_reply;
    if (stores_try(c, &stores))
        spill = stores.response->spill;
    o = status_document(s, spill);
    print_status(c, o, s, spill);
    out_end(c, o);
    if (spill)
        control_reply_free(&stores);
    r = strcmp(s->state, "ready") == 0 ? EXIT_FINE : EXIT_UNHEALTHY;
    control_reply_free(&reply);
    return r;
}

/* ---- sessions */

static const struct out_column session_columns[] = {
    {"SESSION", "session", OUT_NUMBER, 0},
    {"PID", "pid", OUT_NUMBER, 0},
    {"USER", "uid", OUT_USER, 0},
    {"ROLE", "role", OUT_TEXT, 0},
    {"STATE", "state", OUT_STATE, 0},
    {"AGE", "age_s", OUT_DURATION, 0},
    {"IDLE", "idle_s", OUT_DURATION, 0},
    {"PINNED", "pinned_objects", OUT_NUMBER, 0},
    {"BYTES", "pinned_bytes", OUT_SIZE, 0},
    {"OLDEST PIN", "oldest_pin_age_s", OUT_DURATION, 0},
    {"RESERVED", "reserved", OUT_NUMBER, 0},
    {"SPACES", "spaces", OUT_LIST, OUT_CUT},
    {"CLIENT", "client", OUT_TEXT, OUT_CUT},
    {"ENGINE", "engine", OUT_TEXT, OUT_MAYBE},
    {"NOTE", "note", OUT_TEXT, OUT_CUT | OUT_MAYBE},
    {NULL, NULL, OUT_TEXT, 0},
};

static void add_session(struct json_object *rows, const Kvd__Proto__SessionInfo *x, uint32_t own)
{
    struct json_object *row = out_row(rows);

    out_number(row, "session", x->session);
    out_number(row, "pid", x->pid);
    if (x->has_uid)
        out_number(row, "uid", x->uid);
    out_text(row, "role", x->role);
    out_text(row, "state", x->state);
    out_number(row, "age_s", x->age_s);
    if (x->has_idle_s)
        out_number(row, "idle_s", x->idle_s);
    out_number(row, "pinned_objects", x->pinned_objects);
    out_number(row, "pinned_bytes", x->pinned_bytes);
    if (x->has_oldest_pin_age_s && x->pinned_objects)
        out_number(row, "oldest_pin_age_s", x->oldest_pin_age_s);
    out_number(row, "reserved", x->reserved);
    out_texts(row, "spaces", x->spaces, x->n_spaces);
    out_text(row, "client", x->client);
    out_text(row, "engine", x->engine);
    out_text(row, "note", x->note ? x->note : x->session == own ? "this command" : NULL);
}

int run_sessions(struct ctl *c, char **args, int n)
{
    const Kvd__Proto__SessionsReply *s;
    struct control_reply reply;
    struct json_object *o, *rows;
    int r = ctl_get_sessions(c, &reply);

    (void)args;
    (void)n;
    if (r)
        return r;
    s = reply.response->sessions;
    o = out_document();
    rows = out_array(o, "sessions");
    for (size_t i = 0; i < s->n_sessions; i++)
        add_session(rows, s->sessions[i], control_hello(c->control)->session);
    out_rows(c, o, "sessions", session_columns, "no sessions");
    out_end(c, o);
    control_reply_free(&reply);
    return 0;
}

/* ---- blocks */

/* An answer must fit a message of the daemon's: so many bytes are the most that one object takes.
 */
#define BLOCK_MESSAGE_BYTES 512u
#define BLOCKS_DEFAULT      100u

static const struct out_column block_columns[] = {
    {"SLOT", "slot", OUT_NUMBER, 0},
    {"STATE", "state", OUT_TEXT, 0},
    {"BYTES", "bytes", OUT_SIZE, 0},
    {"PINS", "pins", OUT_NUMBER, 0},
    {"EPOCH", "epoch", OUT_NUMBER, 0},
    {"POSITION", "position", OUT_NUMBER, 0},
    {"TENANT", "tenant", OUT_NUMBER, 0},
    {"AGE", "age_s", OUT_DURATION, 0},
    {"WRITER", "session", OUT_NUMBER, OUT_MAYBE},
    {"STORE", "store", OUT_TEXT, OUT_MAYBE},
    {"KEY", "name", OUT_TEXT, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

/* Of tier nvme. */
static const struct out_column record_columns[] = {
    {"STORE", "store", OUT_TEXT, 0},
    {"RECORD", "slot", OUT_NUMBER, 0},
    {"BYTES", "bytes", OUT_SIZE, 0},
    {"EPOCH", "epoch", OUT_NUMBER, OUT_MAYBE},
    {"POSITION", "position", OUT_NUMBER, OUT_MAYBE},
    {"TENANT", "tenant", OUT_NUMBER, OUT_MAYBE},
    {"AGE", "age_s", OUT_DURATION, OUT_MAYBE},
    {"KEY", "name", OUT_TEXT, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

/* "key" and "group"; "name" is how a command takes both. */
static void add_key(struct json_object *o, const char *hash_key, const char *group_key,
                    const Kvd__Proto__Key *key)
{
    char text[KEY_TEXT_SIZE];

    text_hash(key->hash.data, key->hash.len, text);
    out_text(o, hash_key, text);
    out_number(o, group_key, key->has_group ? key->group : 0);
}

static void add_name(struct json_object *o, const Kvd__Proto__Key *key)
{
    char text[KEY_TEXT_SIZE];
    size_t n;

    text_hash(key->hash.data, key->hash.len, text);
    n = strlen(text);
    if (key->has_group && key->group)
        snprintf(text + n, sizeof(text) - n, ":%u", key->group);
    out_text(o, "name", text);
}

static void add_meta(struct json_object *o, const Kvd__Proto__Meta *m)
{
    if (m->has_position)
        out_number(o, "position", m->position);
    if (m->has_tenant)
        out_number(o, "tenant", m->tenant);
    if (m->parent) {
        add_key(o, "parent", "parent_group", m->parent);
    }
    if (m->has_layout)
        out_number(o, "layout", m->layout);
    if (m->has_checksum)
        out_number(o, "checksum", m->checksum);
    if (m->has_user)
        out_hex(o, "user", m->user.data, m->user.len);
}

/* As commands take it, "space/pool/name". */
static void add_store(struct json_object *o, const char *store, const char *pool)
{
    char name[2 * POOL_NAME_SIZE];

    if (!store || !store[0])
        return;
    snprintf(name, sizeof(name), "%s/%s", pool, store);
    out_text(o, "store", strchr(store, '/') ? store : name);
}

static void fill_block(struct json_object *o, const Kvd__Proto__BlockInfo *b, const char *pool)
{
    out_number(o, "slot", b->slot);
    add_name(o, b->key);
    add_key(o, "key", "group", b->key);
    out_text(o, "state", b->state);
    out_number(o, "bytes", b->bytes);
    out_number(o, "pins", b->pins);
    if (b->has_epoch)
        out_number(o, "epoch", b->epoch);
    if (b->has_parts_done)
        out_number(o, "parts_done", b->parts_done);
    if (b->has_session)
        out_number(o, "session", b->session);
    if (b->has_age_s)
        out_number(o, "age_s", b->age_s);
    add_store(o, b->store, pool);
    if (b->meta)
        add_meta(o, b->meta);
}

struct listing {
    struct pool_ref pool;
    const char *tier;
    uint64_t left;   /* may be shown */
    uint64_t cursor; /* slot to go on from */
    bool more;
};

static int next_blocks(struct ctl *c, struct listing *l, struct json_object *rows)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Blocks q = KVD__PROTO__BLOCKS__INIT;
    uint64_t most = control_hello(c->control)->max_frame / BLOCK_MESSAGE_BYTES;
    const Kvd__Proto__BlocksReply *b;
    struct control_reply reply;
    int r;

    q.pool = l->pool.id;
    q.has_cursor = q.has_limit = true;
    q.cursor = l->cursor;
    q.limit = (uint32_t)(l->left < most ? l->left : most);
    q.tier = (char *)(uintptr_t)l->tier; /* packed only */
    request.body_case = KVD__PROTO__REQUEST__BODY_BLOCKS;
    request.blocks = &q;
    r = ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_BLOCKS, &reply);
    if (r)
        return r;
    b = reply.response->blocks;
    for (size_t i = 0; i < b->n_blocks; i++)
        fill_block(out_row(rows), b->blocks[i], l->pool.name);
    l->more = b->has_next && b->next > l->cursor;
    l->cursor = b->next;
    l->left -= b->n_blocks < l->left ? b->n_blocks : l->left;
    control_reply_free(&reply);
    return 0;
}

static int blocks_limit(const struct ctl *c, uint64_t *ret_limit)
{
    const char *limit = ctl_option(c, "limit");

    if (limit && ctl_option(c, "all"))
        return ctl_fail(EXIT_USAGE, "--limit and --all exclude each other");
    *ret_limit = ctl_option(c, "all") ? UINT64_MAX : BLOCKS_DEFAULT;
    return limit ? parse_number("--limit", limit, 1, UINT32_MAX, ret_limit) : 0;
}

static int blocks_tier(const struct ctl *c, const char **ret_tier)
{
    const char *tier = ctl_option(c, "tier");

    *ret_tier = tier ? tier : "ram";
    if (strcmp(*ret_tier, "ram") == 0 || strcmp(*ret_tier, "nvme") == 0)
        return 0;
    return ctl_fail(EXIT_USAGE, "--tier is ram or nvme, not \"%.64s\"", tier);
}

static void print_blocks(struct ctl *c, struct json_object *o, bool nvme)
{
    out_rows(c, o, "blocks", nvme ? record_columns : block_columns,
             nvme ? "no object of the pool is in a spill store" : "the pool is empty");
}

int run_blocks(struct ctl *c, char **args, int n)
{
    struct listing l = {.more = true};
    struct json_object *o, *rows;
    int r = blocks_limit(c, &l.left);

    (void)n;
    if (r == 0)
        r = blocks_tier(c, &l.tier);
    if (r == 0)
        r = ctl_find_pool(c, args[0], &l.pool);
    if (r)
        return r;
    o = out_document();
    out_text(o, "pool", l.pool.name);
    out_text(o, "tier", l.tier);
    rows = out_array(o, "blocks");
    while (r == 0 && l.more && l.left)
        r = next_blocks(c, &l, rows);
    if (r == 0) {
        out_flag(o, "more", l.more);
        print_blocks(c, o, strcmp(l.tier, "nvme") == 0);
        out_end(c, o);
        if (l.more && !c->json)
            ctl_note("there are more; `--all` shows them");
    } else {
        json_object_put(o);
    }
    return r;
}

/* ---- why */

static const struct out_column why_columns[] = {
    {"key", "name", OUT_TEXT, 0},
    {"pool", "pool", OUT_TEXT, 0},
    {"state", "state", OUT_TEXT, 0},
    {"because", "detail", OUT_TEXT, 0}, /* of what is gone */
    {"since", "age_s", OUT_DURATION, 0},
    {"tier", "tier", OUT_TEXT, 0},
    {"slot", "block.slot", OUT_NUMBER, 0},
    {"store", "block.store", OUT_TEXT, 0},
    {"since", "block.age_s", OUT_DURATION, 0},
    {"bytes", "block.bytes", OUT_SIZE, 0},
    {"pins", "block.pins", OUT_NUMBER, 0},
    {"writer", "block.session", OUT_NUMBER, 0},
    {"position", "block.position", OUT_NUMBER, 0},
    {"tenant", "block.tenant", OUT_NUMBER, 0},
    {"parent", "block.parent", OUT_TEXT, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

/* In a store; what the daemon's detail says of it is here as well. */
static const struct out_column why_stored_columns[] = {
    {"key", "name", OUT_TEXT, 0},
    {"pool", "pool", OUT_TEXT, 0},
    {"state", "state", OUT_TEXT, 0},
    {"tier", "tier", OUT_TEXT, 0},
    {"store", "block.store", OUT_TEXT, 0},
    {"record", "block.slot", OUT_NUMBER, 0},
    {"since", "block.age_s", OUT_DURATION, 0},
    {"bytes", "block.bytes", OUT_SIZE, 0},
    {"position", "block.position", OUT_NUMBER, 0},
    {"tenant", "block.tenant", OUT_NUMBER, 0},
    {"parent", "block.parent", OUT_TEXT, 0},
    {NULL, NULL, OUT_TEXT, 0},
};

/* Objects of the pool are live, reserved or leaving; in a store they are none of these. */
static const char *tier_of(const Kvd__Proto__BlockInfo *b)
{
    bool ram = strcmp(b->state, "live") == 0 || strcmp(b->state, "reserved") == 0 ||
               strcmp(b->state, "leaving") == 0;

    return ram || !b->store ? "ram" : "nvme";
}

static int print_why(struct ctl *c, const struct pool_ref *pool, const Kvd__Proto__Key *key,
                     const Kvd__Proto__WhyReply *w)
{
    struct json_object *o = out_document();
    bool stored = w->block && strcmp(tier_of(w->block), "nvme") == 0;

    out_text(o, "pool", pool->name);
    add_name(o, key);
    add_key(o, "key", "group", key);
    out_text(o, "state", w->state);
    out_text(o, "detail", w->detail);
    if (w->has_age_s)
        out_number(o, "age_s", w->age_s);
    if (w->block) {
        out_text(o, "tier", tier_of(w->block));
        fill_block(out_object(o, "block"), w->block, pool->name);
    }
    if (!c->json)
        out_fields(c, o, stored ? why_stored_columns : why_columns);
    out_end(c, o);
    return w->block ? EXIT_FINE : EXIT_NOT_FOUND;
}

int run_why(struct ctl *c, char **args, int n)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Why why = KVD__PROTO__WHY__INIT;
    Kvd__Proto__Key key = KVD__PROTO__KEY__INIT;
    struct control_reply reply;
    struct pool_ref pool;
    struct kvd_key parsed;
    int r = parse_key(args[1], &parsed);

    (void)n;
    if (r == 0)
        r = ctl_find_pool(c, args[0], &pool);
    if (r)
        return r;
    key.hash = (ProtobufCBinaryData){.data = parsed.hash, .len = sizeof(parsed.hash)};
    key.has_group = true;
    key.group = parsed.group;
    why.pool = pool.id;
    why.key = &key;
    request.body_case = KVD__PROTO__REQUEST__BODY_WHY;
    request.why = &why;
    r = ctl_call(c, &request, KVD__PROTO__RESPONSE__BODY_WHY, &reply);
    if (r)
        return r;
    r = print_why(c, &pool, &key, reply.response->why);
    control_reply_free(&reply);
    return r;
}
