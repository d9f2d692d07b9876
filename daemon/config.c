/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In this order: sections and their keys, reading with inih, cross checks, and what config.h
 * promises.
 *
 * inih splits a line into name and value and takes comments away. What it would do silently is done
 * before it sees a line, in next_line(): lines longer than its buffer (200 bytes in Debian) would
 * go on as a line of their own; section names are cut after 49 bytes; a section without keys is not
 * reported; only the first bad line of a file is known; and an indented line would continue the
 * value before.
 */
#define _GNU_SOURCE
#include "config_keys.h"

#include "shm/layout.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <ini.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Files per pool, one for each part of each chunk; the daemon holds two descriptors of each. */
#define SEGMENTS_MAX 8192u
/* What a message holds beside its data. */
#define FRAME_OVERHEAD        4096u
#define POPULATE_THREADS_AUTO 8u

/* Objects that a store has room for: with fewer it is worth less than its trouble. */
#define STORE_OBJECTS_MIN 16u
/* What a store needs beside its data when it is that small: daemon/spill/format.h. */
#define STORE_OVERHEAD    (2u << 20)

#define SECTION_NAME_SIZE (3 * CONFIG_NAME_SIZE)
/* [daemon] and [tenant *] are not counted. */
#define SECTIONS_MAX                                                                               \
    (2 + CONFIG_SPACES_MAX + CONFIG_POOLS_MAX + CONFIG_SOCKETS_MAX + CONFIG_TENANTS_MAX +          \
     CONFIG_STORES_MAX)

/* ---- building */

struct origin {
    const char *file; /* NULL: nowhere, a default */
    unsigned line;
};

struct section {
    enum config_kind kind;
    void *object;                 /* in builder.config */
    char name[SECTION_NAME_SIZE]; /* "" of [daemon] */
    struct origin opened;         /* last */
    struct origin set[CONFIG_KEYS_OF_A_KIND_MAX];
    bool broken; /* a value was refused: cross checks would only repeat it */
};

/* Names of files outlive the reading: origins point to them. */
struct file {
    struct file *next;
    char name[];
};

/* Where a store lies, however it is called: the file, or where it would be made. */
struct place {
    bool known;
    mode_t type; /* S_IFMT of what is there; 0: nothing, or it cannot be looked at */
    dev_t dev;
    ino_t ino;                   /* of the file; of the folder when there is no file yet */
    char name[CONFIG_TEXT_SIZE]; /* in that folder */
};

struct builder {
    struct config *config;
    struct place *places;     /* of config->stores */
    struct section *sections; /* SECTIONS_MAX; [0] is [daemon] */
    size_t section_count;
    struct file *files;
    const char *main_file;
    unsigned errors;
    config_error_fn report;
    void *arg;
};

static __attribute__((format(printf, 4, 5))) void report(struct builder *b, bool warning,
                                                         struct origin at, const char *fmt, ...)
{
    char text[CONFIG_WHY_SIZE + SECTION_NAME_SIZE + 64];
    struct config_problem problem = {warning, at.file ? at.file : b->main_file, at.line, text};
    va_list ap;

    b->errors += !warning;
    if (!b->report)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    for (char *p = text; *p; p++)
        if (iscntrl((unsigned char)*p))
            *p = '?';
    b->report(b->arg, &problem);
}

static struct origin *key_origin(struct section *s, const char *name)
{
    return &s->set[config_key_ordinal(s->kind, config_key_find(s->kind, name))];
}

static bool is_set(struct section *s, const char *name)
{
    return key_origin(s, name)->file;
}

/* Where to blame: the key, or the section when the key was not written. */
static struct origin blame(struct section *s, const char *name)
{
    struct origin at = *key_origin(s, name);

    return at.file ? at : s->opened;
}

static struct section *add_section(struct builder *b, enum config_kind kind, void *object,
                                   const char *name)
{
    struct section *s = &b->sections[b->section_count++];
    const struct config_key *key;

    s->kind = kind;
    s->object = object;
    snprintf(s->name, sizeof(s->name), "%s", name);
    for (size_t i = 0; (key = config_key_nth(kind, i)); i++)
        config_key_default(key, object);
    return s;
}

static struct section *find_section(struct builder *b, enum config_kind kind, const char *name)
{
    for (size_t i = 0; i < b->section_count; i++)
        if (b->sections[i].kind == kind && strcmp(b->sections[i].name, name) == 0)
            return &b->sections[i];
    return NULL;
}

/* ---- section headers */

/* The number of one more of a kind, or why there is no room. */
static int take(uint32_t *count, uint32_t max, enum config_kind kind, char *why)
{
    if (*count == max)
        return config_complain(why, "more than %u sections %s", max, config_kind_header(kind));
    return (int)(*count)++;
}

static int check_name(const char *name, size_t len, char *why)
{
    if (config_is_name(name, len))
        return 0;
    return config_complain(
        why, "\"%.*s\" is not a name: 1 to %d of A-Z a-z 0-9 . _ -, not beginning with .",
        (int)(len < 80 ? len : 80), name, CONFIG_NAME_SIZE - 1);
}

/* The struct of a new section of that name; NULL: see `why`. */
static void *new_space(struct config *c, const char *name, char *why)
{
    int i = check_name(name, strlen(name), why);

    if (i == 0)
        i = take(&c->space_count, CONFIG_SPACES_MAX, CONFIG_KIND_SPACE, why);
    if (i < 0)
        return NULL;
    strcpy(c->spaces[i].name, name);
    return &c->spaces[i];
}

static void *new_pool(struct config *c, const char *name, char *why)
{
    const char *slash = strchr(name, '/');
    int i;

    if (!slash) {
        config_complain(why, "\"%.80s\" does not say of which space: [pool SPACE/NAME]", name);
        return NULL;
    }
    i = check_name(name, (size_t)(slash - name), why);
    if (i == 0)
        i = check_name(slash + 1, strlen(slash + 1), why);
    if (i == 0)
        i = take(&c->pool_count, CONFIG_POOLS_MAX, CONFIG_KIND_POOL, why);
    if (i < 0)
        return NULL;
    strcpy(c->pools[i].name, slash + 1);
    return &c->pools[i];
}

static void *new_socket(struct config *c, const char *name, char *why)
{
    int i = check_name(name, strlen(name), why);

    if (i == 0)
        i = take(&c->socket_count, CONFIG_SOCKETS_MAX, CONFIG_KIND_SOCKET, why);
    if (i < 0)
        return NULL;
    strcpy(c->sockets[i].name, name);
    return &c->sockets[i];
}

static void *new_tenant(struct config *c, const char *name, char *why)
{
    uint64_t number;
    int i;

    if (strcmp(name, "*") == 0)
        return &c->any_tenant;
    if (config_parse_digits(&name, &number, why) < 0 || *name || number > UINT32_MAX) {
        config_complain(why, "a tenant is a number up to %u, or *", UINT32_MAX);
        return NULL;
    }
    i = take(&c->tenant_count, CONFIG_TENANTS_MAX, CONFIG_KIND_TENANT, why);
    if (i < 0)
        return NULL;
    c->tenants[i].tenant = (uint32_t)number;
    return &c->tenants[i];
}

static void *new_store(struct config *c, const char *name, char *why)
{
    const char *slash = strchr(name, '/'), *last = slash ? strchr(slash + 1, '/') : NULL;
    int i;

    if (!last) {
        config_complain(
            why, "\"%.80s\" does not say of which space and pool: [spill SPACE/POOL/NAME]", name);
        return NULL;
    }
    i = check_name(name, (size_t)(slash - name), why);
    if (i == 0)
        i = check_name(slash + 1, (size_t)(last - slash - 1), why);
    if (i == 0)
        i = check_name(last + 1, strlen(last + 1), why);
    if (i == 0)
        i = take(&c->store_count, CONFIG_STORES_MAX, CONFIG_KIND_SPILL, why);
    if (i < 0)
        return NULL;
    strcpy(c->stores[i].name, last + 1);
    return &c->stores[i];
}

static void *new_object(struct config *c, enum config_kind kind, const char *name, char *why)
{
    switch (kind) {
    case CONFIG_KIND_SPACE:
        return new_space(c, name, why);
    case CONFIG_KIND_POOL:
        return new_pool(c, name, why);
    case CONFIG_KIND_SOCKET:
        return new_socket(c, name, why);
    case CONFIG_KIND_TENANT:
        return new_tenant(c, name, why);
    case CONFIG_KIND_SPILL:
        return new_store(c, name, why);
    default:
        config_complain(why, "[daemon] takes no name");
        return NULL;
    }
}

/* Splits "[kind name]" in place; the name may be "". */
static int split_header(char *line, char **ret_kind, char **ret_name, char *why)
{
    char *kind = line + 1, *end = strchr(line, ']'), *name;
    const char *rest;

    if (!end)
        return config_complain(why, "the ] of the section is missing");
    rest = end + 1 + strspn(end + 1, " \t");
    if (*rest && *rest != ';' && *rest != '#')
        return config_complain(why, "something follows the ] of the section: \"%.40s\"", rest);
    while (end > kind && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *end = '\0';
    kind += strspn(kind, " \t");
    name = kind + strcspn(kind, " \t");
    if (*name) {
        *name++ = '\0';
        name += strspn(name, " \t");
    }
    *ret_kind = kind;
    *ret_name = name;
    return 0;
}

/* Tenants are the same number however it is written. */
static void canonical_name(enum config_kind kind, char *name)
{
    size_t zeros;

    if (kind != CONFIG_KIND_TENANT)
        return;
    zeros = strspn(name, "0");
    if (zeros > 0 && name[zeros] == '\0')
        zeros--;
    memmove(name, name + zeros, strlen(name + zeros) + 1);
}

/* The section that a header line opens; NULL: see `why`. */
static struct section *enter_section(struct builder *b, char *line, struct origin at, char *why)
{
    char *kind_name = NULL, *name = NULL;
    struct section *s;
    void *object;
    int kind;

    if (split_header(line, &kind_name, &name, why) < 0)
        return NULL;
    kind = config_kind_find(kind_name, why);
    if (kind < 0)
        return NULL;
    if (kind != CONFIG_KIND_DAEMON && !*name) {
        config_complain(why, "the name is missing: %s", config_kind_header(kind));
        return NULL;
    }
    canonical_name(kind, name);
    s = find_section(b, kind, name);
    if (!s) {
        object = new_object(b->config, kind, name, why);
        if (!object)
            return NULL;
        s = add_section(b, kind, object, name);
    } else if (s->opened.file == at.file) {
        /* Not fatal for what follows: the keys are checked all the same. */
        report(b, false, at, "[%s%s%s] was already begun in line %u; merge the two", kind_name,
               *name ? " " : "", name, s->opened.line);
    }
    s->opened = at;
    return s;
}

/* ---- keys of a section */

/* Exactly one of an either-or: a later file overrides, but one file must decide. */
static int displace(struct section *s, const struct config_key *key, struct origin at, char *why)
{
    struct origin *other;

    if (!key->excludes)
        return 0;
    other = key_origin(s, key->excludes);
    if (other->file == at.file)
        return config_complain(why, "\"%s\" was set in line %u; give one of the two", key->excludes,
                               other->line);
    *other = (struct origin){0};
    config_key_default(config_key_find(s->kind, key->excludes), s->object);
    return 0;
}

static int set_key(struct section *s, const char *name, const char *value, struct origin at,
                   char *why)
{
    const struct config_key *key = config_key_find(s->kind, name);
    struct origin *origin;

    if (!key) {
        config_key_explain(s->kind, name, why);
        return -EINVAL;
    }
    origin = &s->set[config_key_ordinal(s->kind, key)];
    if (origin->file == at.file)
        return config_complain(why, "it was already set in line %u", origin->line);
    if (displace(s, key, at, why) < 0)
        return -EINVAL;
    *origin = at; /* a refused value is not a missing one */
    if (value[0] == '"')
        return config_complain(why, "leave the quotes out: they would be part of the value");
    if (strstr(value, " #"))
        return config_complain(why,
                               "a comment behind a value begins with ; (only a line of its own "
                               "may begin with #)");
    return key->parse(key, value, (char *)s->object + key->offset, why);
}

/* ---- reading */

struct reader {
    struct builder *b;
    FILE *f;
    struct origin at;        /* the line being read */
    struct section *section; /* NULL: none, or one that was refused */
    bool headed;             /* there was a section header, good or not */
    bool pending;            /* inih has a line that must come back as a key */
    int error;               /* errno of a failed read */
};

/* inih calls its handler for a "name = value" line before it asks for the next one; when it does
 * not, the line was something else. */
static void settle(struct reader *r)
{
    if (r->pending)
        report(r->b, false, r->at, "neither KEY = VALUE, nor [SECTION], nor a comment");
    r->pending = false;
}

/* One line without its end, at most size - 1 bytes. false: the file is at its end. */
static bool read_raw(struct reader *r, char *buf, size_t size)
{
    bool nul = false, cut = false;
    size_t n = 0;
    int c;

    while ((c = getc(r->f)) != EOF && c != '\n') {
        nul |= c == '\0';
        cut |= n == size - 1;
        if (n < size - 1)
            buf[n++] = (char)c;
    }
    if (c == EOF && ferror(r->f))
        r->error = errno;
    if (c == EOF && n == 0)
        return false;
    r->at.line++;
    if (cut)
        report(r->b, false, r->at, "the line is longer than %zu bytes", size - 1);
    else if (nul)
        report(r->b, false, r->at, "the line contains a zero byte: is this a text file?");
    buf[cut || nul ? 0 : n] = '\0';
    return true;
}

static void read_header(struct reader *r, char *line)
{
    char why[CONFIG_WHY_SIZE];

    r->headed = true;
    r->section = enter_section(r->b, line, r->at, why);
    if (!r->section)
        report(r->b, false, r->at, "%s", why);
}

/* ini_reader: like fgets(), but inih sees nothing but keys, unindented. */
static char *next_line(char *buf, int size, void *arg)
{
    struct reader *r = arg;
    char *begin = buf, *end;

    settle(r);
    if (size < 3 || !read_raw(r, buf, (size_t)size - 1)) /* - 1: room for the newline */
        return NULL;
    if (r->at.line == 1 && strncmp(buf, "\xef\xbb\xbf", 3) == 0)
        begin += 3;
    while (isspace((unsigned char)*begin))
        begin++;
    for (end = begin + strlen(begin); end > begin && isspace((unsigned char)end[-1]); end--)
        ;
    *end = '\0';
    if (*begin == '[')
        read_header(r, begin);
    if (*begin == '[' || *begin == ';' || *begin == '#')
        *begin = '\0';
    r->pending = *begin != '\0';
    memmove(buf, begin, strlen(begin) + 1);
    return strcat(buf, "\n");
}

/* ini_handler. Always 1: problems are ours to report, and the rest of the file is read as well. */
static int take_key(void *arg, const char *section, const char *name, const char *value)
{
    struct reader *r = arg;
    char why[CONFIG_WHY_SIZE];

    (void)section; /* cut after 49 bytes; next_line() knows better */
    r->pending = false;
    if (!r->headed) {
        report(r->b, false, r->at, "\"%.80s\" before the first [SECTION]", name);
    } else if (r->section && set_key(r->section, name, value ? value : "", r->at, why) < 0) {
        r->section->broken = true;
        report(r->b, false, r->at, "%s%s%s",
               config_key_find(r->section->kind, name) ? name : "", /* else `why` names it */
               config_key_find(r->section->kind, name) ? ": " : "", why);
    }
    return 1;
}

static const char *remember_file(struct builder *b, const char *name)
{
    struct file *file = malloc(sizeof(*file) + strlen(name) + 1);

    if (!file)
        return NULL;
    strcpy(file->name, name);
    file->next = b->files;
    b->files = file;
    return file->name;
}

static int read_stream(struct builder *b, FILE *f, const char *name)
{
    struct reader r = {.b = b, .f = f, .at.file = remember_file(b, name)};

    if (!r.at.file)
        return -ENOMEM;
    if (!b->main_file)
        b->main_file = r.at.file;
    ini_parse_stream(next_line, &r, take_key, &r);
    if (r.error)
        report(b, false, (struct origin){r.at.file, 0}, "cannot be read: %s",
               strerrordesc_np(r.error));
    return -r.error;
}

static int read_file(struct builder *b, const char *path)
{
    FILE *f = fopen(path, "re");
    int r;

    if (!f) {
        r = -errno;
        report(b, false, (struct origin){path, 0}, "cannot be opened: %s", strerrordesc_np(-r));
        return r;
    }
    r = read_stream(b, f, path);
    fclose(f);
    return r;
}

static int is_dropin(const struct dirent *d)
{
    size_t n = strlen(d->d_name);

    return d->d_name[0] != '.' && n > 5 && strcmp(d->d_name + n - 5, ".conf") == 0;
}

/* By bytes: alphasort() would depend on the locale. */
static int compare_names(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_dropin(struct builder *b, const char *dir, const char *name)
{
    char *path;
    int r;

    if (asprintf(&path, "%s/%s", dir, name) < 0)
        return -ENOMEM;
    r = read_file(b, path);
    free(path);
    return r == -ENOMEM ? r : 0; /* all else was reported, and the next file can still be read */
}

static int read_dir(struct builder *b, const char *dir)
{
    struct dirent **list;
    int n = scandir(dir, &list, is_dropin, compare_names), r = 0;

    if (n < 0) {
        r = -errno;
        if (r == -ENOENT || r == -ENOTDIR)
            return 0;
        if (r != -ENOMEM)
            report(b, false, (struct origin){dir, 0}, "cannot be read: %s", strerrordesc_np(-r));
        return r;
    }
    for (int i = 0; i < n; i++) {
        if (r == 0)
            r = read_dropin(b, dir, list[i]->d_name);
        free(list[i]);
    }
    free(list);
    return r;
}

static int read_dropins(struct builder *b, const char *path)
{
    const char *slash = strrchr(path, '/');
    char *dir;
    int r;

    if (asprintf(&dir, "%.*sconf.d", slash ? (int)(slash + 1 - path) : 0, path) < 0)
        return -ENOMEM;
    r = read_dir(b, dir);
    free(dir);
    return r;
}

/* ---- cross checks */

static void check_daemon(struct builder *b, struct section *s)
{
    const struct config_daemon *d = s->object;

    if (d->max_inline + FRAME_OVERHEAD > d->max_frame)
        report(b, false, blame(s, is_set(s, "max_inline") ? "max_inline" : "max_frame"),
               "max_inline (%" PRIu64 ") must be at least %u bytes less than max_frame (%" PRIu64
               ")",
               d->max_inline, FRAME_OVERHEAD, d->max_frame);
}

/* Bytes of a key; 0: any number. */
static uint32_t scheme_key_bytes(uint32_t scheme)
{
    switch (scheme) {
    case CONFIG_SCHEME_VLLM_SHA256_CBOR:
    case CONFIG_SCHEME_SGLANG:
        return 32;
    case CONFIG_SCHEME_VLLM_XXHASH_CBOR:
        return 16;
    default:
        return 0;
    }
}

static void check_vector_key(struct builder *b, struct section *s)
{
    const struct config_space *space = s->object;
    uint32_t bytes = scheme_key_bytes(space->scheme);

    if (space->vector_key.len && bytes && space->vector_key.len != bytes)
        report(b, false, blame(s, "vector_key"),
               "vector_key: a key of scheme %s has %u bytes, not %u",
               config_scheme_name(space->scheme), bytes, space->vector_key.len);
}

static void check_first_parent(struct builder *b, struct section *s)
{
    const struct config_space *space = s->object;
    const char *key = space->seed[0] ? "seed" : "first_parent";
    uint32_t len = space->first_parent.len;

    if (!space->seed[0] && len == 0)
        return;
    if (space->scheme == CONFIG_SCHEME_SGLANG)
        report(b, false, blame(s, key), "%s: scheme sglang has no first parent; leave it out", key);
    else if (space->scheme == CONFIG_SCHEME_OPAQUE && space->seed[0])
        report(b, false, blame(s, key),
               "seed: scheme opaque does not hash; set \"scheme\", or give \"first_parent\"");
    else if (space->scheme != CONFIG_SCHEME_OPAQUE && len && len != 16 && len != 32)
        report(b, false, blame(s, key),
               "first_parent: of scheme %s it has 32 bytes, or 16 as a hash of XXH3, but not %u",
               config_scheme_name(space->scheme), len);
}

static void check_space(struct builder *b, struct section *s)
{
    char identity[CONFIG_IDENTITY_SIZE];

    check_first_parent(b, s);
    check_vector_key(b, s);
    if (config_space_identity(s->object, identity, sizeof(identity)) < 0)
        report(
            b, false, s->opened,
            "model, revision, dtype and geometry are too long: as one string of at most %d bytes "
            "they identify the space",
            CONFIG_IDENTITY_SIZE - 1);
}

static bool has_pool(const struct config *c, uint32_t space)
{
    for (uint32_t i = 0; i < c->pool_count; i++)
        if (c->pools[i].space == space)
            return true;
    return false;
}

static bool is_served(const struct config *c, const char *space)
{
    for (uint32_t i = 0; i < c->socket_count; i++)
        if (config_socket_serves(&c->sockets[i], space))
            return true;
    return false;
}

/* After pools and sockets. */
static void check_space_used(struct builder *b, struct section *s)
{
    const struct config_space *space = s->object;

    if (!has_pool(b->config, (uint32_t)(space - b->config->spaces)))
        report(b, true, s->opened, "space \"%s\" has no [pool %s/NAME]: it can keep nothing",
               space->name, space->name);
    if (!is_served(b->config, space->name))
        report(b, true, s->opened, "space \"%s\" is in the \"spaces\" of no socket", space->name);
}

static void find_pool_space(struct builder *b, struct section *s)
{
    struct config_pool *pool = s->object;
    const char *names[CONFIG_SPACES_MAX];
    char name[CONFIG_NAME_SIZE], why[CONFIG_WHY_SIZE];

    snprintf(name, sizeof(name), "%.*s", (int)strcspn(s->name, "/"), s->name);
    for (uint32_t i = 0; i < b->config->space_count; i++) {
        if (strcmp(b->config->spaces[i].name, name) == 0) {
            pool->space = i;
            return;
        }
        names[i] = b->config->spaces[i].name;
    }
    pool->space = UINT32_MAX; /* of no space */
    config_complain(why, "there is no [space %s]", name);
    config_advise(why, name, names, b->config->space_count);
    report(b, false, s->opened, "%s", why);
}

static void check_marks(struct builder *b, struct section *s)
{
    struct config_pool *p = s->object;
    bool high_set = is_set(s, "high_water");

    p->low_water = config_resolve_mark(p->low_water, p->slots);
    p->high_water = high_set ? config_resolve_mark(p->high_water, p->slots) : 2 * p->low_water;
    if (!high_set && p->high_water > p->slots)
        p->high_water = p->slots;
    if (p->high_water > p->slots)
        report(b, false, blame(s, "high_water"),
               "high_water: %" PRIu64 " slots are more than the pool has (%" PRIu64 ")",
               p->high_water, p->slots);
    else if (p->low_water >= p->high_water && p->low_water + p->high_water > 0)
        report(b, false, blame(s, high_set ? "high_water" : "low_water"),
               "low_water (%" PRIu64 " slots) must be less than high_water (%" PRIu64 " slots)",
               p->low_water, p->high_water);
}

static void check_segments(struct builder *b, struct section *s)
{
    const struct config_pool *p = s->object;
    uint64_t chunk = p->chunk > p->slot_bytes ? p->chunk : p->slot_bytes;
    uint64_t segments = (p->size + chunk - 1) / chunk * p->parts;

    if (segments > SEGMENTS_MAX)
        report(b, false, blame(s, "chunk"),
               "chunk: %" PRIu64 " segments (chunks times parts) are more than %u; fix: larger "
               "chunks",
               segments, SEGMENTS_MAX);
}

/* slot, parts, and size or slots: makes the numbers that depend on each other. */
static int check_pool_size(struct builder *b, struct section *s)
{
    struct config_pool *p = s->object;

    if (!is_set(s, "slot")) {
        report(b, false, s->opened, "\"slot\" is missing: the bytes of a slot");
        return -EINVAL;
    }
    if (!is_set(s, "size") && !is_set(s, "slots")) {
        report(b, false, s->opened, "\"size\" (bytes) or \"slots\" (number) is missing");
        return -EINVAL;
    }
    if (p->slot_bytes % (p->parts * (uint64_t)SHM_PAGE)) {
        report(b, false, blame(s, "slot"), "slot: %" PRIu64 " is not a multiple of parts * %u = %u",
               p->slot_bytes, SHM_PAGE, p->parts * SHM_PAGE);
        return -EINVAL;
    }
    p->part_bytes = p->slot_bytes / p->parts;
    if (is_set(s, "size"))
        p->slots = p->size / p->slot_bytes;
    if (p->slots == 0 || p->slots > SHM_SLOTS_MAX) {
        report(b, false, blame(s, "size"), "size: room for %" PRIu64 " slots; 1 to %u are possible",
               p->slots, SHM_SLOTS_MAX);
        return -EINVAL;
    }
    p->size = p->slots * p->slot_bytes; /* < 2^28 * 2^32 */
    return 0;
}

static void check_pool(struct builder *b, struct section *s)
{
    find_pool_space(b, s);
    if (s->broken || check_pool_size(b, s) < 0) {
        s->broken = true; /* its numbers mean nothing to others either */
        return;
    }
    check_marks(b, s);
    check_segments(b, s);
}

/* No overflow: at most 256 pools of less than 2^60 bytes would be 2^68, so stop at the first
 * excess. */
static void check_total(struct builder *b)
{
    uint64_t total = 0;

    for (size_t i = 0; i < b->section_count; i++) {
        const struct config_pool *p = b->sections[i].object;

        if (b->sections[i].kind != CONFIG_KIND_POOL || b->sections[i].broken)
            continue;
        total += p->size;
        if (total > CONFIG_TOTAL_MAX) {
            report(b, false, b->sections[i].opened,
                   "all pools up to this one are %" PRIu64 " GiB; at most %llu are possible",
                   total >> 30, CONFIG_TOTAL_MAX >> 30);
            return;
        }
    }
}

static int join_path(const char *dir, const char *file, char ret[CONFIG_PATH_SIZE])
{
    char path[2 * CONFIG_PATH_SIZE];

    snprintf(path, sizeof(path), "%s/%s", dir, file);
    if (strlen(path) >= CONFIG_PATH_SIZE)
        return -ENAMETOOLONG;
    strcpy(ret, path);
    return 0;
}

static void check_socket_path(struct builder *b, struct section *s)
{
    struct config_socket *socket = s->object;
    const char *dir = b->config->daemon.runtime_dir;

    if (is_set(s, "path"))
        return;
    if (socket != b->config->sockets) {
        report(b, false, s->opened, "\"path\" is missing: only the first socket has a default");
        return;
    }
    if (join_path(dir, "kvd.sock", socket->path) < 0)
        report(b, false, blame(&b->sections[0], "runtime_dir"),
               "runtime_dir: too long for the path of a socket in it (%d bytes)",
               CONFIG_PATH_SIZE - 1);
}

static void check_same_path(struct builder *b, struct section *s)
{
    const struct config_socket *socket = s->object;

    for (const struct config_socket *o = b->config->sockets; o < socket; o++)
        if (o->path[0] && strcmp(o->path, socket->path) == 0)
            report(b, false, blame(s, "path"), "path: [socket %s] has the same one", o->name);
}

static void check_patterns(struct builder *b, struct section *s)
{
    const struct config_socket *socket = s->object;

    for (uint32_t i = 0; i < socket->spaces.count; i++) {
        const char *pattern = socket->spaces.list[i];
        bool hit = false;

        for (uint32_t j = 0; j < b->config->space_count; j++)
            hit |= fnmatch(pattern, b->config->spaces[j].name, 0) == 0;
        if (!hit && b->config->space_count)
            report(b, true, blame(s, "spaces"), "spaces: \"%s\" matches no space", pattern);
    }
}

static void check_socket(struct builder *b, struct section *s)
{
    struct config_socket *socket = s->object;
    uint32_t max = b->config->daemon.max_connections;

    check_socket_path(b, s);
    check_same_path(b, s);
    check_patterns(b, s);
    if (socket->max_connections == 0)
        socket->max_connections = max;
    if (socket->max_connections > max)
        report(b, false, blame(s, "max_connections"),
               "max_connections: %u is more than that of [daemon] (%u)", socket->max_connections,
               max);
    if ((socket->mode & 0002) && socket->uids.count == 0)
        report(b, true, blame(s, "mode"), "mode: every user of this machine may attach as %s",
               config_role_name(socket->role));
}

/* Without any [socket] there is one for workers and one for whoever runs the daemon. */
static void add_sockets(struct builder *b)
{
    static const struct {
        const char *name, *file;
        uint32_t role, mode;
    } implied[] = {
        {"kvd", "kvd.sock", CONFIG_ROLE_WRITER, 0660},
        {"kvd-admin", "kvd-admin.sock", CONFIG_ROLE_ADMIN, 0600},
    };
    struct config *c = b->config;

    for (size_t i = 0; i < sizeof(implied) / sizeof(implied[0]); i++) {
        struct config_socket *socket = &c->sockets[c->socket_count++];

        strcpy(socket->name, implied[i].name);
        socket->role = implied[i].role;
        socket->mode = implied[i].mode;
        socket->max_connections = c->daemon.max_connections;
        socket->spaces = (struct config_patterns){.count = 1, .list = {"*"}};
        if (join_path(c->daemon.runtime_dir, implied[i].file, socket->path) < 0)
            report(b, false, blame(&b->sections[0], "runtime_dir"),
                   "runtime_dir: too long for the path of %s in it (%d bytes)", implied[i].file,
                   CONFIG_PATH_SIZE - 1);
    }
}

/* ---- stores */

/* The pool's section; NULL: there is none, which was reported. */
static struct section *find_store_pool(struct builder *b, struct section *s)
{
    const char *names[CONFIG_POOLS_MAX];
    char name[SECTION_NAME_SIZE], why[CONFIG_WHY_SIZE];
    struct section *pool;
    size_t n = 0;

    strcpy(name, s->name);
    *strrchr(name, '/') = '\0';
    pool = find_section(b, CONFIG_KIND_POOL, name);
    if (pool)
        return pool;
    config_complain(why, "there is no [pool %.128s]", name);
    for (size_t i = 0; i < b->section_count && n < CONFIG_POOLS_MAX; i++)
        if (b->sections[i].kind == CONFIG_KIND_POOL)
            names[n++] = b->sections[i].name;
    config_advise(why, name, names, n);
    report(b, false, s->opened, "%s", why);
    return NULL;
}

static void find_place(const char *path, struct place *ret)
{
    const char *slash = strrchr(path, '/');
    char dir[CONFIG_TEXT_SIZE];
    struct stat st;

    *ret = (struct place){0};
    if (stat(path, &st) == 0) {
        ret->known = true;
        ret->type = st.st_mode & S_IFMT;
        ret->dev = S_ISBLK(st.st_mode) ? st.st_rdev : st.st_dev;
        ret->ino = S_ISBLK(st.st_mode) ? 0 : st.st_ino;
        return;
    }
    snprintf(dir, sizeof(dir), "%.*s", (int)(slash == path ? 1 : slash - path), path);
    if (stat(dir, &st) < 0)
        return;
    ret->known = true;
    ret->dev = st.st_dev;
    ret->ino = st.st_ino;
    strcpy(ret->name, slash + 1);
}

static bool is_same_place(const struct place *a, const struct place *b)
{
    return a->known && b->known && S_ISBLK(a->type) == S_ISBLK(b->type) && a->dev == b->dev &&
           a->ino == b->ino && strcmp(a->name, b->name) == 0;
}

static const struct section *store_section(const struct builder *b, const struct config_store *o)
{
    const struct section *s = b->sections;

    while (s->object != o)
        s++;
    return s;
}

/* Two stores in one file would write over each other; the lock would keep the second offline. */
static void check_store_places(struct builder *b, struct section *s)
{
    const struct config *c = b->config;
    const struct config_store *store = s->object;
    size_t n = (size_t)(store - c->stores);

    for (size_t i = 0; i < n; i++) {
        const struct config_store *o = &c->stores[i];
        bool same = o->path[0] && strcmp(o->path, store->path) == 0;
        const char *other = store_section(b, o)->name;

        if (same)
            report(b, false, blame(s, "path"), "path: [spill %s] has this path already", other);
        else if (is_same_place(&b->places[i], &b->places[n]))
            report(b, false, blame(s, "path"), "path: it is the same file as %.190s of [spill %s]",
                   o->path, other);
        else
            continue;
        return; /* the others were told the same */
    }
}

static int check_store_path(struct builder *b, struct section *s)
{
    struct config_store *store = s->object;
    struct place *place = &b->places[store - b->config->stores];

    if (!store->path[0]) {
        if (!is_set(s, "path"))
            report(b, false, s->opened, "\"path\" is missing: a file or a block device");
        return -EINVAL;
    }
    find_place(store->path, place);
    if (S_ISDIR(place->type)) {
        report(b, false, blame(s, "path"), "path: %s is a directory; fix: path = %.150s/%s.store",
               store->path, store->path, store->name);
    } else if (S_ISCHR(place->type)) {
        report(b, false, blame(s, "path"),
               "path: %s is a character device; of an NVMe drive take the namespace, as in "
               "/dev/nvme0n1",
               store->path);
    } else if (place->type && !S_ISREG(place->type) && !S_ISBLK(place->type)) {
        report(b, false, blame(s, "path"), "path: %s is neither a regular file nor a block device",
               store->path);
    } else {
        check_store_places(b, s);
        return 0;
    }
    return -EINVAL;
}

static void check_store_size(struct builder *b, struct section *s, const struct config_pool *p)
{
    const struct config_store *store = s->object;
    const struct place *place = &b->places[store - b->config->stores];
    uint64_t least = STORE_OVERHEAD + STORE_OBJECTS_MIN * p->slot_bytes;
    uint64_t mib = (least + (1u << 20) - 1) >> 20;

    if (store->size == 0 && !S_ISBLK(place->type))
        report(b, false, blame(s, "size"),
               "size: it is required, since %s is %s; fix: size = 100G, or the like", store->path,
               place->type ? "a file" : "no block device");
    else if (store->size && store->size < p->slot_bytes)
        report(b, false, blame(s, "size"),
               "size: less than one slot of the pool (%" PRIu64 " bytes); fix: at least %" PRIu64
               "M, for %u objects",
               p->slot_bytes, mib, STORE_OBJECTS_MIN);
    else if (store->size && store->size < least)
        report(b, false, blame(s, "size"),
               "size: too small for %u objects of %" PRIu64 " bytes; fix: at least %" PRIu64 "M",
               STORE_OBJECTS_MIN, p->slot_bytes, mib);
}

static void check_store_rates(struct builder *b, struct section *s, const struct config_pool *p)
{
    const struct config_store *store = s->object;

    if (store->wear && store->wear < p->slot_bytes)
        report(b, true, blame(s, "wear"),
               "wear: less than one slot (%" PRIu64 " bytes) a day: nothing will be written",
               p->slot_bytes);
    if (store->io == CONFIG_IO_THREADS && store->register_buffers == CONFIG_REGISTER_YES)
        report(b, true, blame(s, "register_buffers"),
               "register_buffers: only io_uring registers buffers, \"io = threads\" does not");
}

static void check_store(struct builder *b, struct section *s)
{
    struct config_store *store = s->object;
    struct section *pool = find_store_pool(b, s);

    if (pool)
        store->pool = (uint32_t)((struct config_pool *)pool->object - b->config->pools);
    else
        s->broken = true;
    if (check_store_path(b, s) < 0 || s->broken || pool->broken)
        return;
    check_store_size(b, s, pool->object);
    check_store_rates(b, s, pool->object);
}

/* All stores of a pool together, told at the first of them. */
static void check_store_use(struct builder *b, struct section *s)
{
    const struct config *c = b->config;
    const struct config_store *store = s->object;
    uint64_t sum = 0;

    for (uint32_t i = 0; i < c->store_count; i++) {
        const struct config_store *o = &c->stores[i];

        if (o->pool != store->pool)
            continue;
        if (o < store || o->size == 0) /* told already; a device of unknown size */
            return;
        sum += o->size;
    }
    if (sum < c->pools[store->pool].size)
        report(b, true, blame(s, "size"),
               "size: less than the pool itself (%" PRIu64 " MiB): of little use but after a "
               "restart",
               c->pools[store->pool].size >> 20);
}

/* What a tenant's own section does not say, [tenant *] does. */
static void inherit(struct builder *b, struct section *s)
{
    struct config_tenant *tenant = s->object;
    const struct config_tenant *any = &b->config->any_tenant;

    if (tenant == any)
        return;
    if (!is_set(s, "max_resident"))
        tenant->max_resident = any->max_resident;
    if (!is_set(s, "max_reserved"))
        tenant->max_reserved = any->max_reserved;
}

static int compare_tenants(const void *a, const void *b)
{
    uint32_t x = ((const struct config_tenant *)a)->tenant;
    uint32_t y = ((const struct config_tenant *)b)->tenant;

    return (x > y) - (x < y);
}

static void for_each(struct builder *b, enum config_kind kind,
                     void (*check)(struct builder *b, struct section *s))
{
    for (size_t i = 0; i < b->section_count; i++)
        if (b->sections[i].kind == kind)
            check(b, &b->sections[i]);
}

static void finish(struct builder *b)
{
    struct config *c = b->config;

    if (c->space_count == 0)
        report(b, false, (struct origin){0}, "there is no [space NAME]: nothing to serve");
    for_each(b, CONFIG_KIND_DAEMON, check_daemon);
    for_each(b, CONFIG_KIND_SPACE, check_space);
    for_each(b, CONFIG_KIND_POOL, check_pool);
    for_each(b, CONFIG_KIND_SOCKET, check_socket);
    for_each(b, CONFIG_KIND_TENANT, inherit);
    check_total(b);
    for_each(b, CONFIG_KIND_SPILL, check_store);
    if (b->errors == 0)
        for_each(b, CONFIG_KIND_SPILL, check_store_use);
    if (c->socket_count == 0)
        add_sockets(b);
    for_each(b, CONFIG_KIND_SPACE, check_space_used);
    /* Last: sections point into the array. */
    qsort(c->tenants, c->tenant_count, sizeof(c->tenants[0]), compare_tenants);
}

/* ---- loading */

static int builder_init(struct builder *b, config_error_fn fn, void *arg)
{
    *b = (struct builder){.report = fn, .arg = arg};
    b->config = calloc(1, sizeof(*b->config));
    b->sections = calloc(SECTIONS_MAX, sizeof(*b->sections));
    b->places = calloc(CONFIG_STORES_MAX, sizeof(*b->places));
    if (!b->config || !b->sections || !b->places)
        return -ENOMEM;
    add_section(b, CONFIG_KIND_DAEMON, &b->config->daemon, "");
    return 0;
}

static void builder_free(struct builder *b)
{
    while (b->files) {
        struct file *next = b->files->next;

        free(b->files);
        b->files = next;
    }
    free(b->places);
    free(b->sections);
    config_free(b->config);
}

/* Ends what a loader began; r is how its reading went. */
static int conclude(struct builder *b, int r, struct config **ret)
{
    if (r == 0)
        finish(b);
    if (r == 0 && b->errors)
        r = -EINVAL;
    if (r == 0) {
        *ret = b->config;
        b->config = NULL;
    }
    builder_free(b);
    return r;
}

int config_load(const char *path, struct config **ret, config_error_fn fn, void *arg)
{
    struct builder b;
    int r = builder_init(&b, fn, arg);

    if (r == 0)
        r = read_file(&b, path);
    if (r == 0)
        r = read_dropins(&b, path);
    return conclude(&b, r, ret);
}

int config_load_stream(FILE *f, const char *name, struct config **ret, config_error_fn fn,
                       void *arg)
{
    struct builder b;
    int r = builder_init(&b, fn, arg);

    if (r == 0)
        r = read_stream(&b, f, name);
    return conclude(&b, r, ret);
}

void config_free(struct config *config)
{
    free(config);
}

void config_problem_print(void *arg, const struct config_problem *p)
{
    const char *severity = p->warning ? "warning" : "error";

    if (p->line)
        fprintf(arg, "%s:%u: %s: %s\n", p->file, p->line, severity, p->text);
    else
        fprintf(arg, "%s: %s: %s\n", p->file, severity, p->text);
}

/* ---- questions */

ssize_t config_space_identity(const struct config_space *space, char *buf, size_t size)
{
    const struct {
        const char *name, *value;
    } fields[] = {
        {"model", space->model},
        {"revision", space->revision},
        {"dtype", space->dtype},
        {"geometry", space->geometry},
    };
    char text[4 * (sizeof(";revision=") + CONFIG_TEXT_SIZE)] = "";
    size_t n = 0;

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].value[0])
            n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s=%s", n ? ";" : "",
                                  fields[i].name, fields[i].value);
    if (n >= size)
        return -ENOBUFS;
    memcpy(buf, text, n + 1);
    return (ssize_t)n;
}

bool config_socket_serves(const struct config_socket *socket, const char *space)
{
    for (uint32_t i = 0; i < socket->spaces.count; i++)
        if (fnmatch(socket->spaces.list[i], space, 0) == 0)
            return true;
    return false;
}

bool config_socket_admits(const struct config_socket *socket, uint32_t uid)
{
    for (uint32_t i = 0; i < socket->uids.count; i++)
        if (socket->uids.list[i] == uid)
            return true;
    return socket->uids.count == 0;
}

const struct config_tenant *config_tenant(const struct config *config, uint32_t tenant)
{
    const struct config_tenant key = {.tenant = tenant};
    const struct config_tenant *found =
        bsearch(&key, config->tenants, config->tenant_count, sizeof(key), compare_tenants);

    return found ? found : &config->any_tenant;
}

uint32_t config_populate_threads(const struct config_daemon *daemon, uint32_t processors)
{
    if (daemon->populate_threads)
        return daemon->populate_threads;
    if (processors > POPULATE_THREADS_AUTO)
        return POPULATE_THREADS_AUTO;
    return processors ? processors : 1;
}

uint32_t config_digest_threads(const struct config_daemon *daemon, uint32_t processors)
{
    if (daemon->digest_threads)
        return daemon->digest_threads;
    return processors > 1 ? 2 : 1;
}
