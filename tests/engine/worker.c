/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker of an inference engine, as small as one can be that really uses kvd: it runs the model
 * of model.h over prompts, reads cached blocks where they lie in shared memory (those that are on NVMe it
 * has brought back first), resumes from a snapshot, and computes new blocks straight into reserved slots.
 *
 *   engine-worker [--socket PATH --space NAME] [--stride BLOCKS]
 *
 * Without a socket it computes everything itself: the run to compare with. It reads lines from
 *   stdin: run FILE GENERATE FILE: the prompt, little-endian u32 tokens; GENERATE: tokens to decode
 *   and answers each with one line of JSON. The digest covers the bits of all logits.
 *
 * The space needs two pools: "kv" with two parts (K and V) of model_part_bytes(), and "snapshots"
 * with one part of model_snapshot_bytes(), both rounded up to 4 KiB.
 */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "client/kvd.h"
#include "model.h"

struct worker {
    struct model_config config;
    struct model *model;
    struct kvd *kvd; /* NULL: no cache */
    struct kvd_space *space;
    struct kvd_pool *kv, *snapshots;
    struct kvd_hasher *hasher;
    size_t stride; /* a snapshot every so many blocks, and one at the prompt's last boundary */
};

/* One request. */
struct request {
    struct worker *w;
    struct seq *seq;
    const uint32_t *prompt;
    size_t n_prompt, n_generate;
    const struct kvd_key *keys; /* of the prompt's whole blocks */
    size_t n_keys;
    struct kvd_pinset *pins;           /* what is read from the cache, and what was written to it */
    struct kvd_reservation *slots;     /* of blocks from `resume` on */
    size_t block_hits, resume, stored; /* in blocks */
    size_t promoted;                   /* of those before `resume`: were on NVMe */
    size_t snapshots_stored;
    XXH3_state_t *digest;
    uint32_t *generated;
    double prefill_ms, decode_ms;
};

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static int complain(const struct worker *w, const char *what, int error)
{
    fprintf(stderr, "engine-worker: %s: %s%s%s\n", what, strerror(-error), w->kvd ? "; " : "",
            w->kvd ? kvd_last_error(w->kvd) : "");
    return error;
}

/* ---- finding where to resume */

/* The deepest boundary at or before the last cached block at which a snapshot lies, in blocks. */
static size_t find_resume(struct request *q)
{
    uint8_t *states = malloc(q->n_keys + 1);
    size_t at = 0;

    if (!states)
        return 0;
    q->block_hits = (size_t)kvd_lookup(q->w->kv, q->keys, q->n_keys, NULL);
    kvd_lookup(q->w->snapshots, q->keys, q->block_hits, states);
    for (size_t i = 0; i < q->block_hits; i++) /* at least one token is computed: for its logits */
        if ((states[i] == KVD_RAM || states[i] == KVD_NVME) &&
            (i + 1) * q->w->config.block_tokens < q->n_prompt)
            at = i + 1;
    free(states);
    return at;
}

/* Brings back what is not resident of the first `at` blocks and of their snapshot. False: not all of it
 * can be had. */
static bool fetch(struct request *q, size_t at)
{
    struct worker *w = q->w;
    struct kvd_fetch blocks = {.keys = q->keys, .n = at, .chain = 1};
    struct kvd_fetch snapshot = {.keys = &q->keys[at - 1], .n = 1};
    uint8_t *states = malloc(at);
    int32_t *status = calloc(at, sizeof(*status)), one;
    bool all = false;

    if (states && status) {
        kvd_lookup(w->kv, q->keys, at, states);
        for (size_t i = 0; i < at; i++)
            q->promoted += states[i] == KVD_NVME;
        all = kvd_fetch(w->kv, &blocks, status) == (ssize_t)at &&
              kvd_fetch(w->snapshots, &snapshot, &one) == 1;
    }
    free(states);
    free(status);
    return all;
}

/* Pins the blocks before the boundary and its snapshot; whatever was evicted in between makes the
 * boundary useless, and the request starts from nothing: a miss is always a right answer. */
static int resume(struct request *q)
{
    struct worker *w = q->w;
    size_t at = find_resume(q), n = 0;
    struct kvd_meta meta;
    int r = 0;

    if (at && !fetch(q, at))
        at = q->promoted = 0;
    while (at) {
        n = (size_t)kvd_pin(q->pins, w->kv, q->keys, at, 0);
        if (n == at && kvd_pin(q->pins, w->snapshots, &q->keys[at - 1], 1, 0) == 1 &&
            kvd_pinset_meta(q->pins, at, &meta) == 0 &&
            meta.layout == model_layout_digest(&w->config) &&
            meta.position == at * w->config.block_tokens - 1)
            break;
        kvd_pinset_release(q->pins);
        at = 0;
    }
    q->resume = at;
    for (size_t i = 0; i < at && r == 0; i++)
        r = seq_attach_block(q->seq, i, kvd_pinset_data(q->pins, i, 0),
                             kvd_pinset_data(q->pins, i, 1));
    if (at && r == 0)
        r = seq_load_snapshot(q->seq, at * w->config.block_tokens, kvd_pinset_data(q->pins, at, 0));
    return r;
}

/* ---- publishing */

/* Slots for the blocks that will be computed. A block without one is computed in private memory:
 * the cache being full, or somebody else being busy with the same block, never stops a request. */
static int reserve(struct request *q)
{
    size_t n = q->n_keys - q->resume;
    struct kvd_reserve ask = {.keys = q->keys + q->resume,
                              .n = n,
                              .parent = q->resume ? &q->keys[q->resume - 1] : NULL,
                              .chain = 1};
    ssize_t got;

    if (!n)
        return 0;
    got = kvd_reserve(q->w->kv, &ask, q->slots);
    if (got < 0) {
        complain(q->w, "nothing will be stored", (int)got);
        for (size_t i = 0; i < n; i++)
            q->slots[i].status = (int32_t)got;
    }
    for (size_t i = 0; i < n; i++) {
        struct kvd_reservation *s = &q->slots[i];
        int r;

        if (s->status != KVD_NEW)
            continue;
        r = kvd_pin_reserved(q->pins, q->w->kv, s); /* it stays ours to read after the commit */
        if (r == 0)
            r = seq_provide_block(q->seq, q->resume + i, kvd_slot_rw(q->w->kv, s->slot, 0),
                                  kvd_slot_rw(q->w->kv, s->slot, 1));
        if (r < 0)
            return r;
    }
    return 0;
}

/* Commits both parts of the blocks from `from` to `to`, which are complete. */
static int commit(struct request *q, size_t from, size_t to)
{
    const struct model_config *m = &q->w->config;
    struct kvd_commit *c = calloc(2 * (to - from) + 1, sizeof(*c));
    size_t n = 0;
    ssize_t done;

    if (!c)
        return -ENOMEM;
    for (size_t i = from; i < to; i++)
        for (uint32_t part = 0; part < 2 && q->slots[i - q->resume].status == KVD_NEW; part++)
            c[n++] = (struct kvd_commit){.ticket = q->slots[i - q->resume].ticket,
                                         .part = part,
                                         .bytes = model_part_bytes(m),
                                         .position = i * m->block_tokens,
                                         .layout = model_layout_digest(m)};
    done = n ? kvd_commit(q->w->kv, c, n) : 0;
    free(c);
    if (done > 0)
        q->stored += (size_t)done / 2;
    return done < 0 ? complain(q->w, "commit", (int)done) : 0;
}

static int save_snapshot(struct request *q, size_t blocks)
{
    const struct model_config *m = &q->w->config;
    struct kvd_reserve ask = {.keys = &q->keys[blocks - 1], .n = 1};
    struct kvd_reservation s;
    struct kvd_commit c;

    if (kvd_reserve(q->w->snapshots, &ask, &s) != 1)
        return 0; /* there already, or no room */
    seq_save_snapshot(q->seq, kvd_slot_rw(q->w->snapshots, s.slot, 0));
    c = (struct kvd_commit){.ticket = s.ticket,
                            .bytes = model_snapshot_bytes(m),
                            .position = blocks * m->block_tokens - 1,
                            .layout = model_layout_digest(m)};
    q->snapshots_stored += kvd_commit(q->w->snapshots, &c, 1) == 1;
    return 0;
}

/* ---- running */

static bool wants_snapshot(const struct request *q, size_t blocks)
{
    return q->w->kvd && blocks > q->resume && (blocks % q->w->stride == 0 || blocks == q->n_keys);
}

/* The next boundary after `first` blocks at which prefill stops: for a snapshot, or because no
 * whole block is left. */
static size_t next_cut(const struct request *q, size_t first)
{
    while (first < q->n_keys)
        if (wants_snapshot(q, ++first))
            break;
    return first;
}

/* The prompt from the resume point on. */
static int prefill(struct request *q, float *logits)
{
    size_t block = q->w->config.block_tokens, at = q->resume * block;
    int r = 0;

    while (at < q->n_prompt && r == 0) {
        size_t first = at / block, last = next_cut(q, first);
        size_t end = last > first ? last * block : q->n_prompt;

        r = model_forward(q->w->model, q->seq, q->prompt + at, end - at, logits);
        if (r == 0 && q->w->kvd && last > first)
            r = commit(q, first, last);
        if (r == 0 && wants_snapshot(q, last) && last > first)
            r = save_snapshot(q, last);
        at = end;
    }
    return r;
}

static int decode(struct request *q, float *logits)
{
    size_t vocab = q->w->config.vocab;
    int r = 0;

    XXH3_64bits_update(q->digest, logits, vocab * sizeof(*logits));
    for (size_t i = 0; i < q->n_generate && r == 0; i++) {
        q->generated[i] = model_argmax(q->w->model, logits);
        r = model_forward(q->w->model, q->seq, &q->generated[i], 1, logits);
        XXH3_64bits_update(q->digest, logits, vocab * sizeof(*logits));
    }
    return r;
}

static void report(const struct request *q)
{
    size_t block = q->w->config.block_tokens;

    printf("{\"prompt\": %zu, \"cached\": %zu, \"reused\": %zu, \"promoted\": %zu, \"prefilled\": "
           "%zu, "
           "\"stored\": %zu, \"snapshots\": %zu, \"prefill_ms\": %.3f, \"decode_ms\": %.3f, "
           "\"logits\": \"%016llx\", "
           "\"tokens\": [",
           q->n_prompt, q->block_hits * block, q->resume * block, q->promoted * block,
           q->n_prompt - q->resume * block, q->stored, q->snapshots_stored, q->prefill_ms,
           q->decode_ms, (unsigned long long)XXH3_64bits_digest(q->digest));
    for (size_t i = 0; i < q->n_generate; i++)
        printf("%s%u", i ? ", " : "", q->generated[i]);
    printf("]}\n");
    fflush(stdout);
}

static int request_hash(struct request *q)
{
    ssize_t n;
    int r = kvd_hasher_truncate(q->w->hasher, 0);

    if (r < 0)
        return r;
    n = kvd_hasher_append(q->w->hasher, q->prompt, q->n_prompt);
    q->keys = kvd_hasher_keys(q->w->hasher, &q->n_keys);
    return n < 0 ? (int)n : 0;
}

static int request_run(struct request *q, float *logits)
{
    double start = now_ms(), middle;
    int r = 0;

    if (q->w->kvd) {
        r = request_hash(q);
        if (r == 0)
            r = kvd_pinset_new(q->w->kvd, q->n_keys + 1, &q->pins);
        q->slots = calloc(q->n_keys + 1, sizeof(*q->slots));
        if (r == 0)
            r = q->slots ? resume(q) : -ENOMEM;
        if (r == 0)
            r = reserve(q);
    }
    if (r == 0)
        r = prefill(q, logits);
    middle = now_ms();
    if (r == 0)
        r = decode(q, logits);
    q->prefill_ms = middle - start;
    q->decode_ms = now_ms() - middle;
    return r;
}

static int run(struct worker *w, const uint32_t *prompt, size_t n, size_t generate)
{
    struct request q = {.w = w, .prompt = prompt, .n_prompt = n, .n_generate = generate};
    float *logits = malloc(w->config.vocab * sizeof(*logits));
    int r = seq_new(w->model, n + generate, &q.seq);

    q.generated = calloc(generate + 1, sizeof(*q.generated));
    q.digest = XXH3_createState();
    if (r == 0 && (!logits || !q.generated || !q.digest))
        r = -ENOMEM;
    if (r == 0) {
        XXH3_64bits_reset(q.digest);
        r = request_run(&q, logits);
    }
    if (r == 0)
        report(&q);
    else
        complain(w, "run", r);
    seq_free(q.seq); /* it reads the pinned slots: before they are released */
    kvd_pinset_free(q.pins);
    XXH3_freeState(q.digest);
    free(q.generated);
    free(q.slots);
    free(logits);
    return r;
}

static int load_and_run(struct worker *w, const char *line)
{
    char path[512];
    size_t generate, n = 0, max = 1 << 20;
    uint32_t *prompt;
    FILE *f;
    int r;

    if (sscanf(line, "run %511s %zu", path, &generate) != 2)
        return complain(w, line, -EINVAL);
    f = fopen(path, "rb");
    prompt = malloc(max * sizeof(*prompt));
    if (f && prompt)
        n = fread(prompt, sizeof(*prompt), max, f);
    r = n ? run(w, prompt, n, generate) : complain(w, path, -ENODATA);
    free(prompt);
    if (f)
        fclose(f);
    return r;
}

/* ---- attaching */

static int open_space(struct worker *w, const char *space)
{
    struct kvd_space_options o;
    uint8_t parent[32];
    struct kvd_key vector;
    int r;

    kvd_space_options_init(&o, sizeof(o));
    o.scheme = "vllm-sha256-cbor";
    o.first_parent = parent;
    o.first_parent_len = kvd_hasher_first_parent(w->hasher, parent, sizeof(parent));
    r = kvd_hasher_vector(w->hasher, &vector);
    if (r < 0)
        return r;
    o.vector_key = vector.hash;
    o.vector_key_len = sizeof(vector.hash);
    o.write = 1;
    r = kvd_space_open(w->kvd, space, &o, &w->space);
    if (r == 0)
        r = kvd_pool_get(w->space, "kv", &w->kv);
    if (r == 0)
        r = kvd_pool_get(w->space, "snapshots", &w->snapshots);
    return r;
}

static int check_pools(const struct worker *w)
{
    struct kvd_pool_info kv, snapshots;

    kvd_pool_info(w->kv, &kv);
    kvd_pool_info(w->snapshots, &snapshots);
    if (kv.parts == 2 && kv.part_bytes >= model_part_bytes(&w->config) &&
        snapshots.part_bytes >= model_snapshot_bytes(&w->config))
        return 0;
    fprintf(stderr,
            "engine-worker: the pools do not fit the model: kv needs 2 parts of %zu bytes, "
            "snapshots %zu bytes\n",
            model_part_bytes(&w->config), model_snapshot_bytes(&w->config));
    return -EINVAL;
}

static int attach(struct worker *w, const char *socket, const char *space)
{
    struct kvd_hasher_options h;
    struct kvd_options o;
    int r;

    kvd_hasher_options_init(&h, sizeof(h));
    h.scheme = "vllm-sha256-cbor";
    h.block_tokens = w->config.block_tokens;
    r = kvd_hasher_new(&h, &w->hasher);
    if (r < 0)
        return complain(w, "hasher", r);
    kvd_options_init(&o, sizeof(o));
    o.socket = socket;
    o.client = "engine-worker";
    r = kvd_connect(&o, &w->kvd);
    if (r < 0) {
        fprintf(stderr, "engine-worker: %s\n", kvd_last_error(NULL));
        return r;
    }
    r = open_space(w, space);
    return r < 0 ? complain(w, space, r) : check_pools(w);
}

static void detach(struct worker *w)
{
    kvd_space_close(w->space);
    kvd_close(w->kvd);
    kvd_hasher_free(w->hasher);
    model_free(w->model);
}

static int sizes(const struct model_config *m)
{
    printf("%zu %zu\n", model_part_bytes(m), model_snapshot_bytes(m));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"socket", required_argument, NULL, 's'},
        {"space", required_argument, NULL, 'n'},
        {"stride", required_argument, NULL, 't'},
        {"sizes", no_argument, NULL, 'z'},
        {NULL, 0, NULL, 0},
    };
    struct worker w = {.stride = 16};
    const char *socket = NULL, *space = "demo";
    char line[600];
    int c, r;

    model_config_default(&w.config);
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 's')
            socket = optarg;
        else if (c == 'n')
            space = optarg;
        else if (c == 't' && atoi(optarg) > 0)
            w.stride = (size_t)atoi(optarg);
        else if (c == 'z')
            return sizes(&w.config);
        else
            return 2;
    }
    r = model_new(&w.config, &w.model);
    if (r == 0 && socket)
        r = attach(&w, socket, space);
    if (r == 0) {
        printf("ready\n");
        fflush(stdout);
    }
    while (r == 0 && fgets(line, sizeof(line), stdin))
        r = load_and_run(&w, line);
    detach(&w);
    return r < 0 ? 1 : 0;
}
