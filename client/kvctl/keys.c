/* SPDX-License-Identifier: Apache-2.0 */
/* `kvctl keys`: the chain of keys of a token file. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "out.h"

/* ---- reading */

struct bytes {
    char *data;
    size_t n;
};

static int read_stream(FILE *f, const char *name, struct bytes *ret)
{
    struct bytes b = {NULL, 0};
    size_t room = 0, got;

    do {
        if (b.n == room) {
            room = room ? 2 * room : 1 << 16;
            b.data = realloc(b.data, room);
            if (!b.data)
                ctl_out_of_memory();
        }
        got = fread(b.data + b.n, 1, room - b.n, f);
        b.n += got;
    } while (got);
    if (ferror(f)) {
        free(b.data);
        return ctl_fail(EXIT_FAILED, "cannot read %s: %m", name);
    }
    *ret = b;
    return 0;
}

static int read_file(const char *path, struct bytes *ret)
{
    FILE *f;
    int r;

    if (strcmp(path, "-") == 0)
        return read_stream(stdin, "standard input", ret);
    f = fopen(path, "re");
    if (!f)
        return ctl_fail(ctl_status_of(-errno), "cannot open %s: %m", path);
    r = read_stream(f, path, ret);
    fclose(f);
    return r;
}

/* ---- tokens */

struct tokens {
    uint32_t *ids;
    size_t n;
};

static void make_room(struct tokens *t, size_t n)
{
    t->ids = calloc(n + 1, sizeof(*t->ids));
    if (!t->ids)
        ctl_out_of_memory();
    t->n = n;
}

static int from_bytes(const char *name, const struct bytes *b, struct tokens *ret)
{
    (void)name;
    make_room(ret, b->n);
    for (size_t i = 0; i < b->n; i++)
        ret->ids[i] = (uint8_t)b->data[i];
    return 0;
}

static int from_u32(const char *name, const struct bytes *b, struct tokens *ret)
{
    if (b->n % 4)
        return ctl_fail(EXIT_FAILED, "%s has %zu bytes, which are no whole number of 4-byte tokens",
                        name, b->n);
    make_room(ret, b->n / 4);
    for (size_t i = 0; i < ret->n; i++) {
        const uint8_t *p = (const uint8_t *)b->data + 4 * i;

        ret->ids[i] = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    }
    return 0;
}

static int take_array(const char *name, struct json_object *array, struct tokens *ret)
{
    size_t n = json_object_array_length(array);

    make_room(ret, n);
    for (size_t i = 0; i < n; i++) {
        struct json_object *v = json_object_array_get_idx(array, i);
        int64_t id = json_object_get_int64(v);

        if (!json_object_is_type(v, json_type_int) || id < 0 || id > UINT32_MAX)
            return ctl_fail(EXIT_FAILED, "%s: token %zu is %.40s, not a number from 0 to %u", name,
                            i, v ? json_object_to_json_string(v) : "null", UINT32_MAX);
        ret->ids[i] = (uint32_t)id;
    }
    return 0;
}

/* Only blanks may follow. */
static bool ends_there(const struct bytes *b, size_t at)
{
    while (at < b->n && strchr(" \t\r\n", b->data[at]) && b->data[at])
        at++;
    return at == b->n;
}

static int from_json(const char *name, const struct bytes *b, struct tokens *ret)
{
    struct json_tokener *tok = json_tokener_new();
    struct json_object *o;
    size_t end;
    int r;

    if (!tok)
        ctl_out_of_memory();
    if (b->n > INT32_MAX) {
        json_tokener_free(tok);
        return ctl_fail(EXIT_FAILED, "%s is larger than 2 GiB; write it as u32", name);
    }
    o = json_tokener_parse_ex(tok, b->data, (int)b->n);
    end = json_tokener_get_parse_end(tok);
    if (json_tokener_get_error(tok) != json_tokener_success)
        r = ctl_fail(EXIT_FAILED, "%s is not JSON: %s at byte %zu", name,
                     json_tokener_get_error(tok) == json_tokener_continue
                         ? "it ends too early"
                         : json_tokener_error_desc(json_tokener_get_error(tok)),
                     end);
    else if (!json_object_is_type(o, json_type_array) || !ends_there(b, end))
        r = ctl_fail(EXIT_FAILED, "%s is not one JSON array of numbers", name);
    else
        r = take_array(name, o, ret);
    json_object_put(o);
    json_tokener_free(tok);
    return r;
}

static const struct format {
    const char *name, *suffix;
    int (*read)(const char *name, const struct bytes *b, struct tokens *ret);
} formats[] = {
    {"bytes", NULL, from_bytes},
    {"json", ".json", from_json},
    {"u32", ".u32", from_u32},
};

static bool has_suffix(const char *path, const char *suffix)
{
    size_t n = strlen(path), k = strlen(suffix);

    return n > k && strcmp(path + n - k, suffix) == 0;
}

static int choose_format(const char *path, const char *wanted, const struct format **ret)
{
    *ret = &formats[0];
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
        if (wanted ? strcmp(formats[i].name, wanted) == 0
                   : formats[i].suffix && has_suffix(path, formats[i].suffix)) {
            *ret = &formats[i];
            return 0;
        }
    }
    if (wanted)
        return ctl_fail(EXIT_USAGE, "--format is bytes, json or u32, not \"%.64s\"", wanted);
    return 0;
}

static int read_tokens(const struct ctl *c, const char *path, struct tokens *ret)
{
    const char *name = strcmp(path, "-") == 0 ? "standard input" : path;
    const struct format *format;
    struct bytes b;
    int r = choose_format(path, ctl_option(c, "format"), &format);

    if (r == 0)
        r = read_file(path, &b);
    if (r)
        return r;
    r = format->read(name, &b, ret);
    free(b.data);
    return r;
}

/* ---- hashing */

struct chain {
    struct kvd_hasher_options options;
    uint8_t first_parent[32];
    struct kvd_hasher *hasher;
};

static int parse_chain(const struct ctl *c, struct chain *h)
{
    const char *first = ctl_option(c, "first-parent"), *tokens = ctl_option(c, "block-tokens");
    const char *group = ctl_option(c, "group");
    uint64_t value;
    int r = 0;

    kvd_hasher_options_init(&h->options, sizeof(h->options));
    h->options.scheme = ctl_option(c, "scheme");
    h->options.seed = ctl_option(c, "seed");
    h->options.cache_salt = ctl_option(c, "salt");
    h->options.lora = ctl_option(c, "lora");
    h->options.extra_key = ctl_option(c, "extra-key");
    if (!h->options.scheme)
        return ctl_fail(EXIT_USAGE, "which --scheme? vllm-sha256-cbor, vllm-xxhash-cbor or sglang");
    if (first) {
        h->options.first_parent = h->first_parent;
        r = parse_hex("--first-parent", first, h->first_parent, sizeof(h->first_parent),
                      &h->options.first_parent_len);
    }
    if (r == 0 && tokens) {
        r = parse_number("--block-tokens", tokens, 1, 65536, &value);
        if (r == 0)
            h->options.block_tokens = (uint32_t)value;
    }
    if (r == 0 && group) {
        r = parse_number("--group", group, 0, UINT32_MAX, &value);
        if (r == 0)
            h->options.group = (uint32_t)value;
    }
    return r;
}

/* Which of the options does not go with the scheme; the library refuses them without a word. */
static int explain_refusal(const struct kvd_hasher_options *o)
{
    bool sglang = strcmp(o->scheme, "sglang") == 0;

    if (sglang && (o->seed || o->first_parent))
        return ctl_fail(EXIT_USAGE,
                        "scheme sglang has no first parent: leave --seed and --first-parent out");
    if (sglang && o->lora)
        return ctl_fail(
            EXIT_USAGE,
            "scheme sglang knows no --lora; SGLang puts it into its extra key (--extra-key)");
    if (!sglang && o->extra_key)
        return ctl_fail(EXIT_USAGE, "--extra-key belongs to scheme sglang only");
    if (o->seed && o->first_parent)
        return ctl_fail(EXIT_USAGE, "give --seed or --first-parent, not both");
    if (o->first_parent)
        return ctl_fail(EXIT_USAGE, "--first-parent has 16 or 32 bytes, not %zu",
                        o->first_parent_len);
    if (strcmp(o->scheme, "vllm-xxhash-cbor") == 0 && !o->seed)
        return ctl_fail(
            EXIT_USAGE,
            "scheme vllm-xxhash-cbor needs --seed or --first-parent: without one, vLLM draws "
            "it at random. `kvctl spaces -o json` and the engine's log may have it");
    return ctl_fail(EXIT_USAGE, "scheme %s does not take these options together", o->scheme);
}

static int make_hasher(struct chain *h)
{
    int r = kvd_hasher_new(&h->options, &h->hasher);

    if (r == -ENOTSUP)
        return ctl_fail(
            EXIT_USAGE,
            "there is no scheme \"%.64s\"; there are vllm-sha256-cbor, vllm-xxhash-cbor "
            "and sglang",
            h->options.scheme);
    if (r == -EINVAL)
        return explain_refusal(&h->options);
    return r < 0 ? ctl_fail(EXIT_FAILED, "cannot hash: %s", strerror(-r)) : 0;
}

/* ---- showing */

static const struct out_column key_columns[] = {
    {"BLOCK", "block", OUT_NUMBER, 0}, {"FROM", "from", OUT_NUMBER, 0}, {"TO", "to", OUT_NUMBER, 0},
    {"KEY", "name", OUT_TEXT, 0},      {NULL, NULL, OUT_TEXT, 0},
};

/* As long as the scheme's hash, whatever its last bytes are. */
static void add_hash(struct json_object *row, const struct chain *h, const struct kvd_key *key)
{
    size_t n = strcmp(h->options.scheme, "vllm-xxhash-cbor") == 0 ? 16 : 32;
    char name[KEY_TEXT_SIZE];
    size_t at = 0;

    out_hex(row, "key", key->hash, n);
    out_number(row, "group", key->group);
    for (size_t i = 0; i < n; i++)
        at += (size_t)snprintf(name + at, sizeof(name) - at, "%02x", key->hash[i]);
    if (key->group)
        snprintf(name + at, sizeof(name) - at, ":%u", key->group);
    out_text(row, "name", name);
}

static void add_first_parent(struct json_object *o, const struct chain *h)
{
    uint8_t parent[32];
    size_t n = kvd_hasher_first_parent(h->hasher, parent, sizeof(parent));

    if (n)
        out_hex(o, "first_parent", parent, n);
}

static struct json_object *chain_document(const struct chain *h)
{
    uint32_t block = h->options.block_tokens;
    struct json_object *o = out_document(), *rows;
    const struct kvd_key *keys;
    size_t n;

    out_text(o, "scheme", h->options.scheme);
    out_number(o, "block_tokens", block);
    add_first_parent(o, h);
    out_number(o, "tokens", kvd_hasher_tokens(h->hasher));
    rows = out_array(o, "keys");
    keys = kvd_hasher_keys(h->hasher, &n);
    for (size_t i = 0; i < n; i++) {
        struct json_object *row = out_row(rows);

        out_number(row, "block", i);
        out_number(row, "from", i * block);
        out_number(row, "to", (i + 1) * block - 1);
        add_hash(row, h, &keys[i]);
    }
    return o;
}

static void show_chain(const struct ctl *c, const struct chain *h)
{
    struct json_object *o = chain_document(h), *rows = NULL;
    size_t tokens = kvd_hasher_tokens(h->hasher), rest = tokens % h->options.block_tokens;

    json_object_object_get_ex(o, "keys", &rows);
    if (!c->json && json_object_array_length(rows))
        out_table(c, rows, key_columns);
    out_end(c, o);
    if (!c->json && rest)
        ctl_note("the last %zu of %zu tokens fill no block and have no key", rest, tokens);
}

int run_keys(struct ctl *c, char **args, int n)
{
    struct tokens tokens = {NULL, 0};
    struct chain h = {.hasher = NULL};
    int r = parse_chain(c, &h);

    (void)n;
    if (r == 0)
        r = make_hasher(&h);
    if (r == 0)
        r = read_tokens(c, args[0], &tokens);
    if (r == 0) {
        ssize_t keys = kvd_hasher_append(h.hasher, tokens.ids, tokens.n);

        if (keys < 0)
            r = ctl_fail(EXIT_FAILED, "cannot hash: %s", strerror((int)-keys));
        else
            show_chain(c, &h);
    }
    free(tokens.ids);
    kvd_hasher_free(h.hasher);
    return r;
}
