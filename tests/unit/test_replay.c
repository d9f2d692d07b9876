/* SPDX-License-Identifier: Apache-2.0 */
/* I2 on a real trace: requests are replayed through the core, several in flight, into a pool that holds a
 * fraction of what they touch. What is kept must be reachable: all ancestors kept, too. KVD_TRACE names
 * another file of the same form. */
#include <criterion/criterion.h>
#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spill_world.h"

#define IN_FLIGHT 8

struct request {
    uint64_t *ids;
    size_t n;
    struct shm_pinned *pins; /* of its leading hits */
    size_t n_pins;
};

struct trace {
    struct request *requests;
    size_t n;
    uint64_t *parent; /* of each id, plus 1; 0: none */
    uint64_t ids;     /* all are below */
};

static void read_request(struct trace *t, const char *line)
{
    struct json_object *o = json_tokener_parse(line), *list;
    struct request *r;

    cr_assert(o && json_object_object_get_ex(o, "hash_ids", &list));
    t->requests = reallocarray(t->requests, t->n + 1, sizeof(*t->requests));
    r = &t->requests[t->n++];
    *r = (struct request){.n = json_object_array_length(list)};
    r->ids = calloc(r->n + 1, sizeof(*r->ids));
    for (size_t i = 0; i < r->n; i++) {
        r->ids[i] = (uint64_t)json_object_get_int64(json_object_array_get_idx(list, i));
        t->ids = r->ids[i] >= t->ids ? r->ids[i] + 1 : t->ids;
    }
    json_object_put(o);
}

static struct trace read_trace(void)
{
    const char *path = getenv("KVD_TRACE");
    struct trace t = {.n = 0};
    char *line = NULL;
    size_t room = 0;
    FILE *f = fopen(path ? path : KVD_SOURCE_DIR "/tests/data/conversation.jsonl", "r");

    cr_assert(f);
    while (getline(&line, &room, f) > 0)
        read_request(&t, line);
    free(line);
    fclose(f);
    t.parent = calloc(t.ids + 1, sizeof(*t.parent));
    for (size_t r = 0; r < t.n; r++)
        for (size_t i = 1; i < t.requests[r].n; i++)
            t.parent[t.requests[r].ids[i]] = t.requests[r].ids[i - 1] + 1;
    return t;
}

static void begin(struct attach *a, struct request *r, uint64_t *hits)
{
    bool leading = true;

    r->pins = calloc(r->n + 1, sizeof(*r->pins));
    for (size_t i = 0; i < r->n; i++) {
        struct shm_key key = world_key(r->ids[i]), parent = world_key(i ? r->ids[i - 1] : 0);

        leading = leading && world_pin(a, &key, &r->pins[r->n_pins]);
        r->n_pins += leading;
        *hits += leading;
        if (!leading)
            world_put(a, &key, i ? &parent : NULL);
    }
}

static void end(struct attach *a, struct request *r)
{
    while (r->n_pins)
        world_unpin(a, &r->pins[--r->n_pins]);
    free(r->pins);
    free(r->ids);
}

static bool is_stored(struct pool *p, const struct shm_key *key)
{
    return spill_has(p, key, p->space->epoch);
}

/* Objects that `has` says are kept, and those of them whose ancestors are all kept. */
static void count_reachable(const struct trace *t, struct pool *p,
                            bool (*has)(struct pool *p, const struct shm_key *key), uint64_t *kept,
                            uint64_t *reachable)
{
    for (uint64_t id = 0; id < t->ids; id++) {
        struct shm_key key = world_key(id);
        uint64_t up = id + 1;

        if (!has(p, &key))
            continue;
        ++*kept;
        while (up) {
            key = world_key(up - 1);
            if (!has(p, &key))
                break;
            up = t->parent[up - 1];
        }
        *reachable += up == 0;
    }
}

Test(replay, what_is_kept_is_reachable)
{
    static const unsigned int sizes[] = {512, 2048, 8192};
    uint64_t blocks = 0;

    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        struct trace t = read_trace();
        uint64_t kept = 0, reachable = 0, hits = 0;
        struct world w;
        struct attach *a;
        char text[128];

        snprintf(text, sizeof(text), "[space s]\n[pool s/kv]\nslot = 4K\nslots = %u\n", sizes[s]);
        world_open(&w, text);
        a = world_attach(world_session(&w, "", 0), w.pool);
        for (size_t i = 0; i < t.n + IN_FLIGHT; i++) {
            if (i >= IN_FLIGHT)
                end(a, &t.requests[i - IN_FLIGHT]);
            if (i < t.n) {
                blocks += t.requests[i].n;
                begin(a, &t.requests[i], &hits);
            }
            world_sleep(&w, 100);
            if (i % 20 == 0)
                core_tick(w.core);
        }
        count_reachable(&t, w.pool, world_has, &kept, &reachable);
        cr_log_info("%u slots: %llu kept, %llu reachable, %llu evicted, %llu hits of %llu blocks",
                    sizes[s], (unsigned long long)kept, (unsigned long long)reachable,
                    (unsigned long long)w.pool->stats.evicted, (unsigned long long)hits,
                    (unsigned long long)blocks);
        cr_assert_gt(kept, sizes[s] / 2);
        cr_assert_geq(reachable * 100, kept * 99);
        world_close(&w);
        free(t.requests);
        free(t.parent);
        blocks = 0;
    }
}

/* Keeps nothing but what is on the disk. `hurry`: as fast as the core can, so that writing behind falls
 * behind; else the disk may catch up from time to time, as it does in the hours that the trace covers. */
static void replay_and_lose_ram(struct place *p, struct trace *t, const char *text, bool hurry)
{
    uint64_t hits = 0;

    place_open(p, text);
    for (size_t i = 0; i < t->n + IN_FLIGHT; i++) {
        if (i >= IN_FLIGHT)
            end(p->attach, &t->requests[i - IN_FLIGHT]);
        if (i < t->n)
            begin(p->attach, &t->requests[i], &hits);
        place_turn(p);
        if (!hurry && i % 4 == 0)
            place_write_all(p);
    }
    place_close(p);
    place_open(p, text);
}

Test(replay, what_is_stored_is_reachable_after_losing_all_ram)
{
    static const unsigned int records[] = {1024, 4096, 32768};

    for (size_t k = 0; k < 2 * sizeof(records) / sizeof(records[0]); k++) {
        struct trace t = read_trace();
        uint64_t stored = 0, reachable = 0;
        struct spill_totals totals;
        struct place p;
        char text[256];

        place_new(&p);
        snprintf(text, sizeof(text),
                 "[space s]\n[pool s/kv]\nslot = 4K\nslots = 1024\n[spill s/kv/disk]\n"
                 "path = %%s/disk\nsize = %uK\n",
                 records[k / 2] * 5 + 4096);
        replay_and_lose_ram(&p, &t, text, k % 2);
        spill_totals(p.w.pool, &totals);
        count_reachable(&t, p.w.pool, is_stored, &stored, &reachable);
        cr_log_info("%llu records%s: %llu stored, %llu reachable",
                    (unsigned long long)totals.records, k % 2 ? ", in a hurry" : "",
                    (unsigned long long)stored, (unsigned long long)reachable);
        cr_assert_gt(stored, 500u);
        cr_assert_geq(reachable * 100, stored * 99); /* I2 */
        place_close(&p);
        place_free(&p);
        free(t.requests);
        free(t.parent);
    }
}
