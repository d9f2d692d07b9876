/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares the library with golden values: vectors FILE.json
 *
 * The file is a list; each entry is one case. Entries with "scheme" are key chains and are compared
 * exactly: the first parent ("none_hash") and every key. An entry of a kind that this build cannot
 * check, and a field that it does not know, are failures: nothing passes by being overlooked.
 *
 * Exit status: 0 all passed, 1 some failed, 2 the file is not such a list.
 */
#include "client/kvd.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json-c/json.h>

enum { HASH_MAX = 32 };

/* One chain entry; pointers are into the JSON tree. */
struct chain {
    const char *scheme;
    const char *hash;
    const char *seed;
    const char *cache_salt;
    const char *extra_key;
    const char *lora;
    const char *none_hash;
    int64_t block_tokens;
    struct json_object *mm;
    struct json_object *tokens;
    struct json_object *keys;
};

/* Says what is wrong with the current entry and returns false. */
struct report {
    size_t entry;
    const char *kind;
};

__attribute__((format(printf, 2, 3))) static bool fail(const struct report *report,
                                                       const char *format, ...)
{
    va_list args;

    printf("entry %zu (%s): ", report->entry, report->kind);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    return false;
}

/* ---- reading an entry */

enum field_type { TEXT, NUMBER, LIST };

struct field {
    const char *name;
    enum field_type type;
    size_t offset; /* in struct chain */
};

static const struct field vllm_fields[] = {
    {"scheme", TEXT, offsetof(struct chain, scheme)},
    {"hash", TEXT, offsetof(struct chain, hash)},
    {"seed", TEXT, offsetof(struct chain, seed)},
    {"block_tokens", NUMBER, offsetof(struct chain, block_tokens)},
    {"cache_salt", TEXT, offsetof(struct chain, cache_salt)},
    {"lora", TEXT, offsetof(struct chain, lora)},
    {"mm", LIST, offsetof(struct chain, mm)},
    {"mm_items", LIST, offsetof(struct chain, mm)},
    {"multimodal", LIST, offsetof(struct chain, mm)},
    {"tokens", LIST, offsetof(struct chain, tokens)},
    {"none_hash", TEXT, offsetof(struct chain, none_hash)},
    {"keys", LIST, offsetof(struct chain, keys)},
    {NULL, TEXT, 0},
};

static const struct field sglang_fields[] = {
    {"scheme", TEXT, offsetof(struct chain, scheme)},
    {"page_tokens", NUMBER, offsetof(struct chain, block_tokens)},
    {"cache_salt", TEXT, offsetof(struct chain, cache_salt)},
    {"extra_key", TEXT, offsetof(struct chain, extra_key)},
    {"tokens", LIST, offsetof(struct chain, tokens)},
    {"keys", LIST, offsetof(struct chain, keys)},
    {NULL, TEXT, 0},
};

static bool get_text(struct json_object *value, const char **ret)
{
    const char *text = json_object_get_string(value);

    if (!json_object_is_type(value, json_type_string) ||
        strlen(text) != (size_t)json_object_get_string_len(value))
        return false;
    *ret = text;
    return true;
}

static bool get_number(struct json_object *value, int64_t min, int64_t max, int64_t *ret)
{
    int64_t number;

    if (!json_object_is_type(value, json_type_int))
        return false;
    number = json_object_get_int64(value);
    if (number < min || number > max)
        return false;
    *ret = number;
    return true;
}

/* One list may go by several names, but an entry has it once. */
static bool get_list(struct json_object *value, struct json_object **ret)
{
    if (!json_object_is_type(value, json_type_array) || *ret)
        return false;
    *ret = value;
    return true;
}

static bool get_field(const struct field *field, struct json_object *value, struct chain *chain)
{
    void *to = (char *)chain + field->offset;

    switch (field->type) {
    case TEXT:
        return get_text(value, to);
    case NUMBER:
        return get_number(value, 1, UINT32_MAX, to);
    case LIST:
        return get_list(value, to);
    }
    return false;
}

static bool read_chain(const struct report *report, struct json_object *entry,
                       const struct field *fields, struct chain *chain)
{
    json_object_object_foreach(entry, name, value)
    {
        const struct field *field = fields;

        while (field->name && strcmp(field->name, name) != 0)
            field++;
        if (!field->name)
            return fail(report, "unknown field \"%s\"", name);
        if (value && !get_field(field, value, chain)) /* null means absent */
            return fail(report, "field \"%s\" has a value that does not fit: %s", name,
                        json_object_to_json_string(value));
    }
    if (!chain->tokens || !chain->keys || !chain->block_tokens)
        return fail(report, "the tokens, the keys or the tokens per block are missing");
    return true;
}

static const char *scheme_name(const struct chain *chain)
{
    if (strcmp(chain->scheme, "sglang") == 0)
        return "sglang";
    if (!chain->hash)
        return NULL;
    if (strcmp(chain->hash, "sha256_cbor") == 0)
        return "vllm-sha256-cbor";
    if (strcmp(chain->hash, "xxhash_cbor") == 0)
        return "vllm-xxhash-cbor";
    return NULL;
}

/* ---- hexadecimal */

static void to_hex(const uint8_t *bytes, size_t n, char *ret)
{
    for (size_t i = 0; i < n; i++)
        sprintf(ret + 2 * i, "%02x", bytes[i]);
    ret[2 * n] = '\0';
}

static int hex_digit(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *at = c ? strchr(digits, c) : NULL;

    return at ? (int)(at - digits) : -1;
}

/* Returns the number of bytes, 0 when the text is not 1..HASH_MAX bytes of lower-case hexadecimal.
 */
static size_t from_hex(const char *text, uint8_t *ret)
{
    size_t n = strlen(text) / 2;

    if (strlen(text) % 2 || n > HASH_MAX)
        return 0;
    for (size_t i = 0; i < n; i++) {
        int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);

        if (high < 0 || low < 0)
            return 0;
        ret[i] = (uint8_t)(high << 4 | low);
    }
    return n;
}

/* ---- chains */

static bool read_tokens(const struct report *report, struct json_object *list, uint32_t *tokens)
{
    for (size_t i = 0; i < json_object_array_length(list); i++) {
        int64_t token;

        if (!get_number(json_object_array_get_idx(list, i), 0, UINT32_MAX, &token))
            return fail(report, "token %zu is not an integer of 32 bits", i);
        tokens[i] = (uint32_t)token;
    }
    return true;
}

/* An item is {"identifier", "offset", "length"} or a list of the three. */
static bool read_mm_item(struct json_object *value, struct kvd_mm_item *item)
{
    static const char *const names[] = {"identifier", "offset", "length"};
    struct json_object *fields[3] = {NULL};
    int64_t offset, length;

    for (size_t i = 0; i < 3; i++) {
        if (json_object_is_type(value, json_type_array) && json_object_array_length(value) == 3)
            fields[i] = json_object_array_get_idx(value, i);
        else if (json_object_is_type(value, json_type_object) &&
                 json_object_object_length(value) == 3)
            fields[i] = json_object_object_get(value, names[i]);
    }
    if (!get_text(fields[0], &item->identifier) || !get_number(fields[1], 0, INT64_MAX, &offset) ||
        !get_number(fields[2], 0, INT64_MAX, &length))
        return false;
    item->offset = (uint64_t)offset;
    item->length = (uint64_t)length;
    return true;
}

static bool read_mm(const struct report *report, struct json_object *list,
                    struct kvd_mm_item *items)
{
    for (size_t i = 0; list && i < json_object_array_length(list); i++) {
        if (!read_mm_item(json_object_array_get_idx(list, i), &items[i]))
            return fail(report, "item %zu is not {identifier, offset, length}", i);
    }
    return true;
}

static bool same(const struct report *report, const char *what, const uint8_t *got, size_t got_len,
                 const char *expected)
{
    char hex[2 * HASH_MAX + 1];

    to_hex(got, got_len, hex);
    if (strcmp(hex, expected) == 0)
        return true;
    return fail(report, "%s is %s, expected %s", what, hex, expected);
}

static bool compare_keys(const struct report *report, const struct kvd_hasher *hasher,
                         size_t hash_len, struct json_object *expected)
{
    static const uint8_t zeros[HASH_MAX];
    size_t n;
    const struct kvd_key *keys = kvd_hasher_keys(hasher, &n);
    bool ok = true;

    if (n != json_object_array_length(expected))
        return fail(report, "%zu keys, expected %zu", n, json_object_array_length(expected));
    for (size_t i = 0; i < n; i++) {
        const char *hex;
        char what[32];

        snprintf(what, sizeof(what), "key %zu", i);
        if (!get_text(json_object_array_get_idx(expected, i), &hex))
            ok = fail(report, "%s: the expected value is not text", what);
        else if (!same(report, what, keys[i].hash, hash_len, hex))
            ok = false;
        else if (memcmp(keys[i].hash + hash_len, zeros, HASH_MAX - hash_len) != 0)
            ok = fail(report, "%s is not padded with zeros", what);
    }
    return ok;
}

static bool compare_chain(const struct report *report, const struct chain *chain,
                          struct kvd_hasher *hasher, size_t hash_len, const uint32_t *tokens)
{
    size_t n = json_object_array_length(chain->tokens);
    uint8_t parent[HASH_MAX];
    size_t parent_len = kvd_hasher_first_parent(hasher, parent, sizeof(parent));
    ssize_t r;
    bool ok = true;

    if (chain->none_hash)
        ok = same(report, "none_hash", parent, parent_len, chain->none_hash);
    r = kvd_hasher_append(hasher, tokens, n);
    if (r < 0)
        return fail(report, "appending tokens: %s", strerror((int)-r));
    return compare_keys(report, hasher, hash_len, chain->keys) && ok;
}

static bool run_chain(const struct report *report, const struct chain *chain, uint32_t *tokens,
                      struct kvd_mm_item *items)
{
    struct kvd_hasher_options options;
    struct kvd_hasher *hasher;
    uint8_t parent[HASH_MAX];
    size_t hash_len;
    bool ok;
    int r;

    if (!read_tokens(report, chain->tokens, tokens) || !read_mm(report, chain->mm, items))
        return false;
    kvd_hasher_options_init(&options, sizeof(options));
    options.scheme = scheme_name(chain);
    if (!options.scheme)
        return fail(report, "unsupported here: hash \"%s\"", chain->hash ? chain->hash : "");
    hash_len = strcmp(options.scheme, "vllm-xxhash-cbor") == 0 ? 16 : 32;
    options.block_tokens = (uint32_t)chain->block_tokens;
    options.seed = chain->seed;
    options.cache_salt = chain->cache_salt;
    options.extra_key = chain->extra_key;
    options.lora = chain->lora;
    options.mm = items;
    options.mm_count = chain->mm ? json_object_array_length(chain->mm) : 0;
    if (!chain->seed && chain->none_hash) { /* a drawn first parent: it can only be told */
        options.first_parent = parent;
        options.first_parent_len = from_hex(chain->none_hash, parent);
    }
    r = kvd_hasher_new(&options, &hasher);
    if (r < 0)
        return fail(report, "making the hasher: %s", strerror(-r));
    ok = compare_chain(report, chain, hasher, hash_len, tokens);
    kvd_hasher_free(hasher);
    return ok;
}

static bool check_chain(const struct report *report, struct json_object *entry)
{
    struct chain chain = {0};
    const struct field *fields;
    uint32_t *tokens;
    struct kvd_mm_item *items;
    bool ok = false;

    if (!get_text(json_object_object_get(entry, "scheme"), &chain.scheme))
        return fail(report, "\"scheme\" is not text");
    if (strcmp(chain.scheme, "vllm") == 0)
        fields = vllm_fields;
    else if (strcmp(chain.scheme, "sglang") == 0)
        fields = sglang_fields;
    else
        return fail(report, "unsupported here: scheme \"%s\"", chain.scheme);
    if (!read_chain(report, entry, fields, &chain))
        return false;
    tokens = calloc(json_object_array_length(chain.tokens) + 1, sizeof(*tokens));
    items = calloc((chain.mm ? json_object_array_length(chain.mm) : 0) + 1, sizeof(*items));
    if (tokens && items)
        ok = run_chain(report, &chain, tokens, items);
    else
        fail(report, "out of memory");
    free(tokens);
    free(items);
    return ok;
}

/* ---- the file */

static bool check_entry(size_t index, struct json_object *entry)
{
    struct report report = {index, "unknown"};

    if (!json_object_is_type(entry, json_type_object))
        return fail(&report, "not an object");
    if (json_object_object_get_ex(entry, "scheme", NULL)) {
        report.kind = "chain";
        return check_chain(&report, entry);
    }
    if (json_object_object_get_ex(entry, "geometry", NULL) ||
        json_object_object_get_ex(entry, "c_token", NULL)) {
        report.kind = "cost";
        return fail(&report, "unsupported here: cost");
    }
    if (json_object_object_get_ex(entry, "moves", NULL)) {
        report.kind = "rope";
        return fail(&report, "unsupported here: rope");
    }
    return fail(&report, "unsupported here: neither \"scheme\" nor another kind that is known");
}

static int check_file(const char *path, struct json_object *list)
{
    size_t n, passed = 0;

    if (!json_object_is_type(list, json_type_array) || json_object_array_length(list) == 0) {
        fprintf(stderr, "vectors: %s: not a list of entries\n", path);
        return 2;
    }
    n = json_object_array_length(list);
    for (size_t i = 0; i < n; i++)
        passed += check_entry(i, json_object_array_get_idx(list, i));
    printf("%zu passed, %zu failed\n", passed, n - passed);
    return passed == n ? 0 : 1;
}

/* The whole file with a 0 after it; NULL with errno set. */
static char *read_file(const char *path, size_t *ret_n)
{
    size_t n = 0, room = 1 << 16;
    FILE *file = fopen(path, "r");
    char *text = file ? malloc(room) : NULL;

    while (text) {
        char *grown;

        n += fread(text + n, 1, room - n - 1, file);
        if (n < room - 1)
            break;
        grown = realloc(text, room *= 2);
        if (!grown)
            free(text);
        text = grown;
    }
    if (text && ferror(file)) {
        free(text);
        text = NULL;
    }
    if (file)
        fclose(file);
    if (text)
        text[n] = '\0';
    *ret_n = n;
    return text;
}

static int parse(const char *path, const char *text, size_t n, struct json_object **ret)
{
    struct json_tokener *tokener = json_tokener_new();
    struct json_object *object;
    enum json_tokener_error error;

    if (!tokener || n >= INT32_MAX) {
        fprintf(stderr, "vectors: %s: too large\n", path);
        if (tokener)
            json_tokener_free(tokener);
        return 2;
    }
    json_tokener_set_flags(tokener, JSON_TOKENER_STRICT);
    object = json_tokener_parse_ex(tokener, text, (int)n + 1); /* the 0 ends it */
    error = json_tokener_get_error(tokener);
    if (error != json_tokener_success)
        fprintf(stderr, "vectors: %s: byte %zu: %s\n", path, json_tokener_get_parse_end(tokener),
                json_tokener_error_desc(error));
    json_tokener_free(tokener);
    *ret = object;
    return error == json_tokener_success ? 0 : 2;
}

int main(int argc, char **argv)
{
    struct json_object *list = NULL;
    char *text;
    size_t n;
    int status;

    if (argc != 2) {
        fprintf(stderr, "usage: vectors FILE.json\n");
        return 2;
    }
    text = read_file(argv[1], &n);
    if (!text) {
        fprintf(stderr, "vectors: %s: %s\n", argv[1], strerror(errno));
        return 2;
    }
    status = parse(argv[1], text, n, &list);
    if (status == 0)
        status = check_file(argv[1], list);
    json_object_put(list);
    free(text);
    return status;
}
