/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "config_keys.h"

#include "shm/layout.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <syslog.h>

#define KIB                  (1ull << 10)
#define MIB                  (1ull << 20)
#define GIB                  (1ull << 30)
#define TIB                  (1ull << 40)
#define SECOND_NS            1000000000ull

#define POPULATE_THREADS_MAX 64u
#define DIGEST_THREADS_MAX   64u
#define QUEUE_DEPTH_MAX      256u
#define STORE_MAX            (1024 * TIB)

/* ---- advice */

int config_complain(char *why, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(why, CONFIG_WHY_SIZE, fmt, ap);
    va_end(ap);
    return -EINVAL;
}

/* Levenshtein distance; b is a valid name, which bounds it. */
static size_t distance(const char *a, const char *b)
{
    size_t row[CONFIG_NAME_SIZE], n = strlen(b);

    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];

        row[0] = i + 1;
        for (size_t j = 1; j <= n; j++) {
            size_t cost =
                diagonal + (tolower((unsigned char)a[i]) != tolower((unsigned char)b[j - 1]));

            diagonal = row[j];
            if (row[j] + 1 < cost)
                cost = row[j] + 1;
            if (row[j - 1] + 1 < cost)
                cost = row[j - 1] + 1;
            row[j] = cost;
        }
    }
    return row[n];
}

/* NULL: none is near. */
static const char *find_near(const char *word, const char *const *names, size_t n)
{
    size_t best = SIZE_MAX;
    const char *nearest = NULL;

    for (size_t i = 0; i < n; i++) {
        size_t d = distance(word, names[i]);

        if (d < best) {
            best = d;
            nearest = names[i];
        }
    }
    return nearest && best <= (strlen(word) + 2) / 3 ? nearest : NULL;
}

void config_advise(char *why, const char *word, const char *const *names, size_t n)
{
    const char *nearest = find_near(word, names, n);
    size_t used = strlen(why);

    if (nearest) {
        snprintf(why + used, CONFIG_WHY_SIZE - used, "; did you mean \"%s\"?", nearest);
        return;
    }
    for (size_t i = 0; i < n && used < CONFIG_WHY_SIZE; i++)
        used += (size_t)snprintf(why + used, CONFIG_WHY_SIZE - used, "%s%s",
                                 i == 0 ? "; there is " : ", ", names[i]);
}

/* ---- values */

struct unit {
    const char *name;
    uint64_t factor;
};

/* Ascending; the first name of a factor is the one we write. */
static const struct unit size_units[] = {
    {"", 1},    {"B", 1},     {"K", KIB}, {"KiB", KIB}, {"M", MIB}, {"MiB", MIB},
    {"G", GIB}, {"GiB", GIB}, {"T", TIB}, {"TiB", TIB}, {NULL, 0},
};

static const struct unit time_units[] = {
    {"ns", 1},
    {"us", 1000},
    {"ms", 1000000},
    {"s", SECOND_NS},
    {"min", 60 * SECOND_NS},
    {"h", 3600 * SECOND_NS},
    {NULL, 0},
};

static const struct config_choice hugepages_choices[] = {
    {"off", CONFIG_HUGEPAGES_OFF},
    {"try", CONFIG_HUGEPAGES_TRY},
    {"require", CONFIG_HUGEPAGES_REQUIRE},
    {NULL, 0},
};

static const struct config_choice level_choices[] = {
    {"error", LOG_ERR}, {"warning", LOG_WARNING}, {"notice", LOG_NOTICE},
    {"info", LOG_INFO}, {"debug", LOG_DEBUG},     {NULL, 0},
};

static const struct config_choice target_choices[] = {
    {"auto", CONFIG_LOG_AUTO},
    {"stderr", CONFIG_LOG_STDERR},
    {"journal", CONFIG_LOG_JOURNAL},
    {NULL, 0},
};

static const struct config_choice scheme_choices[] = {
    {"opaque", CONFIG_SCHEME_OPAQUE},
    {"vllm-sha256-cbor", CONFIG_SCHEME_VLLM_SHA256_CBOR},
    {"vllm-xxhash-cbor", CONFIG_SCHEME_VLLM_XXHASH_CBOR},
    {"sglang", CONFIG_SCHEME_SGLANG},
    {NULL, 0},
};

static const struct config_choice policy_choices[] = {
    {"lru", CONFIG_POLICY_LRU},
    {NULL, 0},
};

static const struct config_choice admission_choices[] = {
    {"all", CONFIG_ADMIT_ALL},
    {"second_touch", CONFIG_ADMIT_SECOND_TOUCH},
    {NULL, 0},
};

static const struct config_choice io_choices[] = {
    {"auto", CONFIG_IO_AUTO},
    {"io_uring", CONFIG_IO_URING},
    {"threads", CONFIG_IO_THREADS},
    {NULL, 0},
};

static const struct config_choice register_choices[] = {
    {"auto", CONFIG_REGISTER_AUTO},
    {"yes", CONFIG_REGISTER_YES},
    {"no", CONFIG_REGISTER_NO},
    {NULL, 0},
};

static const struct config_choice role_choices[] = {
    {"reader", CONFIG_ROLE_READER},
    {"writer", CONFIG_ROLE_WRITER},
    {"admin", CONFIG_ROLE_ADMIN},
    {NULL, 0},
};

static const char *choice_name(const struct config_choice *choices, uint32_t value)
{
    for (; choices->name; choices++)
        if (choices->value == value)
            return choices->name;
    return "?";
}

static const char *skip_blanks(const char *p)
{
    return p + strspn(p, " \t");
}

/* Digits at *p; moves it behind them. */
int config_parse_digits(const char **p, uint64_t *ret, char *why)
{
    const char *text = *p;
    uint64_t value = 0;

    if (!isdigit((unsigned char)*text))
        return config_complain(why, "\"%.80s\" is not a number", text);
    for (; isdigit((unsigned char)**p); (*p)++)
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(**p - '0'), &value))
            return config_complain(why, "\"%.80s\" is too large a number", text);
    *ret = value;
    return 0;
}

/* Up to six digits behind a point at *p, in millionths. No point: 0. */
static int parse_fraction(const char **p, uint64_t *ret, char *why)
{
    uint64_t value = 0, scale = 1000000;
    const char *text = *p;

    if (**p == '.') {
        if (!isdigit((unsigned char)*++*p))
            return config_complain(why, "digits are missing after the point");
        for (; isdigit((unsigned char)**p); (*p)++) {
            scale /= 10;
            if (scale == 0)
                return config_complain(why, "\"%.80s\" has more than six digits after the point",
                                       text);
            value += (uint64_t)(**p - '0') * scale;
        }
    }
    *ret = value;
    return 0;
}

static const struct unit *find_unit(const struct unit *units, const char *name, char *why)
{
    bool sizes = units == size_units;

    for (const struct unit *u = units; u->name; u++)
        if (sizes ? strcasecmp(u->name, name) == 0 : strcmp(u->name, name) == 0)
            return u;
    if (sizes)
        config_complain(
            why, "\"%.16s\" is not a unit; there is K, M, G, T (or KiB and so on: 1,024 each)",
            name);
    else
        config_complain(why, "%s%.16s%s; there is us, ms, s, min, h",
                        *name ? "\"" : "the unit is missing", name,
                        *name ? "\" is not a unit" : "");
    return NULL;
}

static int parse_scaled(const struct unit *units, const char *text, uint64_t *ret, char *why)
{
    uint64_t whole, millionths, value;
    const struct unit *unit;
    const char *p = text;
    int r;

    if (!isdigit((unsigned char)*text))
        return config_complain(why, "\"%.80s\" is not a %s", text,
                               units == size_units ? "size such as 200M" : "duration such as 30s");
    r = config_parse_digits(&p, &whole, why);
    if (r < 0)
        return r;
    r = parse_fraction(&p, &millionths, why);
    if (r < 0)
        return r;
    p = skip_blanks(p);
    if (*p == '\0' && whole == 0 && millionths == 0) {
        *ret = 0; /* of whatever */
        return 0;
    }
    unit = find_unit(units, p, why);
    if (!unit)
        return -EINVAL;
    /* The second product cannot overflow: 10^6 * 1 h in ns is 3.6 * 10^18. */
    if (__builtin_mul_overflow(whole, unit->factor, &value) ||
        __builtin_add_overflow(value, millionths * unit->factor / 1000000, &value))
        return config_complain(why, "\"%.80s\" is too large", text);
    *ret = value;
    return 0;
}

/* As one would write it: with the largest unit that leaves a whole number. NULL units: a number. */
static void format_scaled(const struct unit *units, uint64_t value, char *buf, size_t size)
{
    uint64_t factor = 1;
    const char *name = "";

    for (; units && units->name && value > 0; units++)
        if (value % units->factor == 0 && (units->factor > factor || !*name)) {
            factor = units->factor;
            name = units->name;
        }
    snprintf(buf, size, "%" PRIu64 "%s", value / factor, name);
}

static int check_range(const struct config_key *key, const struct unit *units, uint64_t value,
                       const char *text, char *why)
{
    char min[32], max[32];

    if (value >= key->min && value <= key->max)
        return 0;
    format_scaled(units, key->min, min, sizeof(min));
    format_scaled(units, key->max, max, sizeof(max));
    return config_complain(why, "\"%.80s\" is out of range: %s to %s", text, min, max);
}

/* A field of 4 or 8 bytes; the range was checked. */
static void store(const struct config_key *key, void *field, uint64_t value)
{
    uint32_t narrow = (uint32_t)value;

    memcpy(field, key->size == sizeof(narrow) ? (void *)&narrow : (void *)&value, key->size);
}

static int parse_size(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t value;
    int r = parse_scaled(size_units, text, &value, why);

    if (r == 0)
        r = check_range(key, size_units, value, text, why);
    if (r == 0)
        store(key, field, value);
    return r;
}

static int parse_duration(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t value;
    int r = parse_scaled(time_units, text, &value, why);

    if (r == 0)
        r = check_range(key, time_units, value, text, why);
    if (r == 0)
        store(key, field, value);
    return r;
}

static int number(const struct config_key *key, const char *text, uint64_t *ret, char *why)
{
    const char *p = text;
    uint64_t value;
    int r = config_parse_digits(&p, &value, why);

    if (r == 0 && *p)
        r = config_complain(why, "\"%.80s\" is not a whole number", text);
    if (r == 0)
        r = check_range(key, NULL, value, text, why);
    if (r == 0)
        *ret = value;
    return r;
}

static int parse_number(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t value;
    int r = number(key, text, &value, why);

    if (r == 0)
        store(key, field, value);
    return r;
}

static int parse_power2(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t value;
    int r = number(key, text, &value, why);

    if (r == 0 && (value & (value - 1)))
        r = config_complain(why, "\"%.80s\" is not a power of two", text);
    if (r == 0)
        store(key, field, value);
    return r;
}

static int parse_auto_number(const struct config_key *key, const char *text, void *field, char *why)
{
    if (strcmp(text, "auto") != 0)
        return parse_number(key, text, field, why);
    store(key, field, 0);
    return 0;
}

static int parse_page_size(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t value = 0;
    int r = 0;

    if (strcmp(text, "auto") != 0) {
        r = parse_scaled(size_units, text, &value, why);
        if (r == 0)
            r = check_range(key, size_units, value, text, why);
        if (r == 0 && (value & (value - 1)))
            r = config_complain(why, "\"%.80s\" is not a power of two", text);
    }
    if (r == 0)
        store(key, field, value);
    return r;
}

static int parse_choice(const struct config_key *key, const char *text, void *field, char *why)
{
    const char *names[CONFIG_NAMES_MAX] = {NULL};
    char list[128];
    size_t n = 0;
    int used = 0;

    for (const struct config_choice *c = key->choices; c->name; c++) {
        if (strcmp(c->name, text) == 0) {
            store(key, field, c->value);
            return 0;
        }
        names[n++] = c->name;
    }
    if (find_near(text, names, n)) {
        config_complain(why, "\"%.80s\" is not a value of it", text);
        config_advise(why, text, names, n);
        return -EINVAL;
    }
    for (size_t i = 0; i < n; i++)
        used += snprintf(list + used, sizeof(list) - (size_t)used, "%s%s",
                         i == 0       ? ""
                         : i == n - 1 ? " or "
                                      : ", ",
                         names[i]);
    return config_complain(why, "it is %s, not \"%.80s\"", list, text);
}

static int parse_text(const struct config_key *key, const char *text, void *field, char *why)
{
    if (strlen(text) >= key->size)
        return config_complain(why, "longer than %zu bytes", key->size - 1);
    memset(field, 0, key->size);
    memcpy(field, text, strlen(text));
    return 0;
}

/* A field of config_space_identity(), which the semicolon separates. */
static int parse_identity(const struct config_key *key, const char *text, void *field, char *why)
{
    if (strchr(text, ';'))
        return config_complain(why, "it must not contain \";\"");
    return parse_text(key, text, field, why);
}

static int parse_path(const struct config_key *key, const char *text, void *field, char *why)
{
    if (text[0] != '/')
        return config_complain(why, "\"%.80s\" is not an absolute path", text);
    return parse_text(key, text, field, why);
}

static int parse_optional_path(const struct config_key *key, const char *text, void *field,
                               char *why)
{
    return text[0] ? parse_path(key, text, field, why) : parse_text(key, text, field, why);
}

bool config_is_name(const char *text, size_t len)
{
    if (len == 0 || len >= CONFIG_NAME_SIZE || text[0] == '.')
        return false;
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && !memchr("._-", text[i], 3))
            return false;
    return true;
}

static int parse_group(const struct config_key *key, const char *text, void *field, char *why)
{
    if (text[0] && !config_is_name(text, strlen(text)))
        return config_complain(why, "\"%.80s\" is not a group", text);
    return parse_text(key, text, field, why);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)tolower((unsigned char)c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int parse_hash(const struct config_key *key, const char *text, void *field, char *why)
{
    struct config_hash hash = {0};
    size_t n = strlen(text);

    (void)key;
    if (n % 2 || n > 2 * CONFIG_HASH_SIZE)
        return config_complain(why,
                               "%zu hexadecimal digits; at most %u are possible, an even number", n,
                               2 * CONFIG_HASH_SIZE);
    for (size_t i = 0; i < n; i++) {
        int digit = hex_digit(text[i]);

        if (digit < 0)
            return config_complain(why, "\"%.80s\" is not hexadecimal", text);
        hash.bytes[i / 2] = (uint8_t)(hash.bytes[i / 2] << 4 | digit);
    }
    hash.len = (uint32_t)(n / 2);
    memcpy(field, &hash, sizeof(hash));
    return 0;
}

static int parse_mode(const struct config_key *key, const char *text, void *field, char *why)
{
    size_t n = strlen(text);

    if (n == 0 || n > 4 || strspn(text, "01234567") != n || strtoul(text, NULL, 8) > 0777)
        return config_complain(why, "\"%.80s\" is not a file mode: three octal digits, as in 0660",
                               text);
    store(key, field, strtoul(text, NULL, 8));
    return 0;
}

/* The next item of a comma list, without blanks around it; NULL at the end. An empty list has one
 * empty item. */
static const char *next_item(const char **list, size_t *ret_len)
{
    const char *begin = *list, *end;

    if (!begin)
        return NULL;
    begin = skip_blanks(begin);
    end = begin + strcspn(begin, ",");
    *list = *end ? end + 1 : NULL;
    while (end > begin && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    *ret_len = (size_t)(end - begin);
    return begin;
}

static bool is_pattern(const char *text, size_t len)
{
    if (len == 0 || len >= CONFIG_NAME_SIZE)
        return false;
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && !memchr("._-*?[]!^", text[i], 9))
            return false;
    return true;
}

static int parse_patterns(const struct config_key *key, const char *text, void *field, char *why)
{
    struct config_patterns patterns = {0};
    const char *item;
    size_t len;

    (void)key;
    while ((item = next_item(&text, &len))) {
        if (!is_pattern(item, len))
            return config_complain(why, "\"%.*s\" is neither the name of a space nor a pattern",
                                   (int)(len < 80 ? len : 80), item);
        if (patterns.count == CONFIG_PATTERNS_MAX)
            return config_complain(why, "more than %d of them", CONFIG_PATTERNS_MAX);
        memcpy(patterns.list[patterns.count++], item, len);
    }
    memcpy(field, &patterns, sizeof(patterns));
    return 0;
}

static int parse_uids(const struct config_key *key, const char *text, void *field, char *why)
{
    struct config_uids uids = {0};
    const char *item;
    size_t len;

    (void)key;
    if (text[0] == '\0')
        text = NULL; /* anybody again */
    while ((item = next_item(&text, &len))) {
        const char *p = item;
        uint64_t uid;

        if (config_parse_digits(&p, &uid, why) < 0 || p != item + len || uid >= UINT32_MAX)
            return config_complain(why, "\"%.*s\" is not the number of a user",
                                   (int)(len < 80 ? len : 80), item);
        if (uids.count == CONFIG_UIDS_MAX)
            return config_complain(why, "more than %d of them", CONFIG_UIDS_MAX);
        uids.list[uids.count++] = (uint32_t)uid;
    }
    memcpy(field, &uids, sizeof(uids));
    return 0;
}

/* A water mark that is not slots yet but millionths of the pool. */
#define MARK_SHARE (1ull << 63)

static int parse_mark(const struct config_key *key, const char *text, void *field, char *why)
{
    uint64_t whole, millionths;
    const char *p = text;
    int r;

    if (!strchr(text, '%'))
        return parse_number(key, text, field, why);
    r = config_parse_digits(&p, &whole, why);
    if (r == 0)
        r = parse_fraction(&p, &millionths, why);
    if (r < 0)
        return r;
    if (strcmp(skip_blanks(p), "%") != 0)
        return config_complain(why, "\"%.80s\" is neither slots nor a percentage", text);
    if (whole > 100 || (whole == 100 && millionths > 0))
        return config_complain(why, "\"%.80s\" is more than all of it", text);
    store(key, field, MARK_SHARE | (whole * 10000 + millionths / 100));
    return 0;
}

uint64_t config_resolve_mark(uint64_t mark, uint64_t slots)
{
    /* No overflow: slots <= 2^28, a share <= 10^6. */
    return mark & MARK_SHARE ? slots * (mark & ~MARK_SHARE) / 1000000 : mark;
}

/* ---- keys */

#define FIELD(type, member)                                                                        \
    .offset = offsetof(struct type, member), .size = sizeof(((struct type *)NULL)->member)
#define LIMIT_MAX       (UINT64_MAX >> 1)

#define RANGE(from, to) .min = (from), .max = (to)

static const struct config_key daemon_keys[] = {
    {"runtime_dir", parse_path, FIELD(config_daemon, runtime_dir), .dflt = "/run/kvd"},
    {"hugepages", parse_choice, FIELD(config_daemon, hugepages), .dflt = "try",
     .choices = hugepages_choices},
    {"hugetlbfs", parse_optional_path, FIELD(config_daemon, hugetlbfs)},
    {"page_size", parse_page_size, FIELD(config_daemon, page_size), RANGE(64 * KIB, 16 * GIB),
     .dflt = "auto"},
    {"populate_threads", parse_auto_number, FIELD(config_daemon, populate_threads),
     RANGE(1, POPULATE_THREADS_MAX), .dflt = "auto"},
    {"engine_linger", parse_duration, FIELD(config_daemon, engine_linger_ns),
     RANGE(0, 3600 * SECOND_NS), .dflt = "30s"},
    {"quarantine", parse_duration, FIELD(config_daemon, quarantine_ns), RANGE(0, 3600 * SECOND_NS),
     .dflt = "30s"},
    {"max_connections", parse_number, FIELD(config_daemon, max_connections), RANGE(1, 65536),
     .dflt = "4096"},
    {"max_sessions", parse_number, FIELD(config_daemon, max_sessions), RANGE(1, 65536),
     .dflt = "1024"},
    {"max_frame", parse_size, FIELD(config_daemon, max_frame), RANGE(64 * KIB, 64 * MIB),
     .dflt = "1M"},
    {"max_inline", parse_size, FIELD(config_daemon, max_inline), RANGE(4 * KIB, 64 * MIB),
     .dflt = "256K"},
    {"ring_entries_max", parse_power2, FIELD(config_daemon, ring_entries_max),
     RANGE(SHM_RING_MIN, SHM_RING_MAX), .dflt = "4096"},
    {"core_spin", parse_duration, FIELD(config_daemon, core_spin_ns), RANGE(0, SECOND_NS / 10),
     .dflt = "20us"},
    {"fetch_deadline", parse_duration, FIELD(config_daemon, fetch_deadline_ns),
     RANGE(SECOND_NS / 1000, 600 * SECOND_NS), .dflt = "2s"},
    {"fetch_hold", parse_duration, FIELD(config_daemon, fetch_hold_ns), RANGE(0, 3600 * SECOND_NS),
     .dflt = "5s"},
    {"spill_start", parse_duration, FIELD(config_daemon, spill_start_ns),
     RANGE(0, 3600 * SECOND_NS), .dflt = "5s"},
    {"stop_flush", parse_duration, FIELD(config_daemon, stop_flush_ns), RANGE(0, 3600 * SECOND_NS),
     .dflt = "10s"},
    {"digest_threads", parse_auto_number, FIELD(config_daemon, digest_threads),
     RANGE(0, DIGEST_THREADS_MAX), .dflt = "auto"},
    {"log_level", parse_choice, FIELD(config_daemon, log_level), .dflt = "info",
     .choices = level_choices},
    {"log_target", parse_choice, FIELD(config_daemon, log_target), .dflt = "auto",
     .choices = target_choices},
};

static const struct config_key space_keys[] = {
    {"scheme", parse_choice, FIELD(config_space, scheme), .dflt = "opaque",
     .choices = scheme_choices},
    {"first_parent", parse_hash, FIELD(config_space, first_parent), .excludes = "seed"},
    {"seed", parse_text, FIELD(config_space, seed), .excludes = "first_parent"},
    {"block_tokens", parse_number, FIELD(config_space, block_tokens), RANGE(1, 65536),
     .dflt = "16"},
    {"vector_key", parse_hash, FIELD(config_space, vector_key)},
    {"model", parse_identity, FIELD(config_space, model)},
    {"revision", parse_identity, FIELD(config_space, revision)},
    {"dtype", parse_identity, FIELD(config_space, dtype)},
    {"geometry", parse_identity, FIELD(config_space, geometry)},
    {"max_pinned", parse_size, FIELD(config_space, max_pinned), RANGE(0, LIMIT_MAX), .dflt = "0"},
    {"max_reserved", parse_number, FIELD(config_space, max_reserved), RANGE(0, LIMIT_MAX),
     .dflt = "0"},
};

static const struct config_key pool_keys[] = {
    {"slot", parse_size, FIELD(config_pool, slot_bytes), RANGE(4 * KIB, 4 * GIB)},
    {"size", parse_size, FIELD(config_pool, size), RANGE(4 * KIB, CONFIG_TOTAL_MAX),
     .excludes = "slots"},
    {"slots", parse_number, FIELD(config_pool, slots), RANGE(1, SHM_SLOTS_MAX), .excludes = "size"},
    {"parts", parse_number, FIELD(config_pool, parts), RANGE(1, SHM_PARTS_MAX), .dflt = "1"},
    {"chunk", parse_size, FIELD(config_pool, chunk), RANGE(4 * KIB, TIB), .dflt = "1G"},
    {"low_water", parse_mark, FIELD(config_pool, low_water), RANGE(0, SHM_SLOTS_MAX), .dflt = "1%"},
    {"high_water", parse_mark, FIELD(config_pool, high_water), RANGE(0, SHM_SLOTS_MAX)},
    {"policy", parse_choice, FIELD(config_pool, policy), .dflt = "lru", .choices = policy_choices},
};

static const struct config_key socket_keys[] = {
    {"path", parse_path, FIELD(config_socket, path)},
    {"role", parse_choice, FIELD(config_socket, role), .dflt = "writer", .choices = role_choices},
    {"spaces", parse_patterns, FIELD(config_socket, spaces), .dflt = "*"},
    {"mode", parse_mode, FIELD(config_socket, mode), .dflt = "0660"},
    {"group", parse_group, FIELD(config_socket, group)},
    {"uids", parse_uids, FIELD(config_socket, uids)},
    {"max_connections", parse_number, FIELD(config_socket, max_connections), RANGE(1, 65536)},
};

static const struct config_key tenant_keys[] = {
    {"max_resident", parse_size, FIELD(config_tenant, max_resident), RANGE(0, LIMIT_MAX),
     .dflt = "0"},
    {"max_reserved", parse_number, FIELD(config_tenant, max_reserved), RANGE(0, LIMIT_MAX),
     .dflt = "0"},
};

static const struct config_key spill_keys[] = {
    {"path", parse_path, FIELD(config_store, path)},
    {"size", parse_size, FIELD(config_store, size), RANGE(0, STORE_MAX)},
    {"admission", parse_choice, FIELD(config_store, admission), .dflt = "all",
     .choices = admission_choices},
    {"bandwidth", parse_size, FIELD(config_store, bandwidth), RANGE(0, LIMIT_MAX), .dflt = "0"},
    {"wear", parse_size, FIELD(config_store, wear), RANGE(0, LIMIT_MAX), .dflt = "0"},
    {"queue_depth", parse_number, FIELD(config_store, queue_depth), RANGE(1, QUEUE_DEPTH_MAX),
     .dflt = "8"},
    {"io", parse_choice, FIELD(config_store, io), .dflt = "auto", .choices = io_choices},
    {"register_buffers", parse_choice, FIELD(config_store, register_buffers), .dflt = "auto",
     .choices = register_choices},
};

#define KEYS(array) array, sizeof(array) / sizeof((array)[0])

static const struct {
    const char *name;
    const char *header;
    const struct config_key *keys;
    size_t count;
} kinds[CONFIG_KINDS] = {
    [CONFIG_KIND_DAEMON] = {"daemon", "[daemon]", KEYS(daemon_keys)},
    [CONFIG_KIND_SPACE] = {"space", "[space NAME]", KEYS(space_keys)},
    [CONFIG_KIND_POOL] = {"pool", "[pool SPACE/NAME]", KEYS(pool_keys)},
    [CONFIG_KIND_SOCKET] = {"socket", "[socket NAME]", KEYS(socket_keys)},
    [CONFIG_KIND_TENANT] = {"tenant", "[tenant NUMBER]", KEYS(tenant_keys)},
    [CONFIG_KIND_SPILL] = {"spill", "[spill SPACE/POOL/NAME]", KEYS(spill_keys)},
};

#define KEYS_MAX(array)                                                                            \
    _Static_assert(sizeof(array) / sizeof((array)[0]) <= CONFIG_KEYS_OF_A_KIND_MAX, #array)
KEYS_MAX(daemon_keys);
KEYS_MAX(space_keys);
KEYS_MAX(pool_keys);
KEYS_MAX(socket_keys);
KEYS_MAX(tenant_keys);
KEYS_MAX(spill_keys);

int config_kind_find(const char *name, char *why)
{
    const char *names[CONFIG_KINDS];

    for (int i = 0; i < CONFIG_KINDS; i++) {
        if (strcmp(kinds[i].name, name) == 0)
            return i;
        names[i] = kinds[i].name;
    }
    config_complain(why, "unknown section [%.80s]", name);
    config_advise(why, name, names, CONFIG_KINDS);
    return -EINVAL;
}

const char *config_kind_header(enum config_kind kind)
{
    return kinds[kind].header;
}

const struct config_key *config_key_nth(enum config_kind kind, size_t i)
{
    return i < kinds[kind].count ? &kinds[kind].keys[i] : NULL;
}

const struct config_key *config_key_find(enum config_kind kind, const char *name)
{
    const struct config_key *key;

    for (size_t i = 0; (key = config_key_nth(kind, i)); i++)
        if (strcmp(key->name, name) == 0)
            return key;
    return NULL;
}

size_t config_key_ordinal(enum config_kind kind, const struct config_key *key)
{
    return (size_t)(key - kinds[kind].keys);
}

void config_key_explain(enum config_kind kind, const char *name, char *why)
{
    const char *names[CONFIG_NAMES_MAX] = {NULL};
    size_t n = 0;

    for (enum config_kind other = 0; other < CONFIG_KINDS; other++) {
        if (other != kind && config_key_find(other, name)) {
            config_complain(why, "\"%s\" belongs in %s, not in %s", name, kinds[other].header,
                            kinds[kind].header);
            return;
        }
    }
    for (; n < kinds[kind].count; n++)
        names[n] = kinds[kind].keys[n].name;
    config_complain(why, "unknown key \"%.80s\" in %s", name, kinds[kind].header);
    config_advise(why, name, names, n);
}

void config_key_default(const struct config_key *key, void *object)
{
    void *field = (char *)object + key->offset;
    char why[CONFIG_WHY_SIZE];

    memset(field, 0, key->size);
    if (key->dflt)
        key->parse(key, key->dflt, field, why); /* a unit test parses them all */
}

bool config_key_at(size_t i, struct config_key_info *ret)
{
    for (enum config_kind kind = 0; kind < CONFIG_KINDS; kind++) {
        if (i < kinds[kind].count) {
            const struct config_key *key = &kinds[kind].keys[i];

            *ret = (struct config_key_info){kinds[kind].name, key->name, key->dflt};
            return true;
        }
        i -= kinds[kind].count;
    }
    return false;
}

const char *config_scheme_name(uint32_t scheme)
{
    return choice_name(scheme_choices, scheme);
}

const char *config_role_name(uint32_t role)
{
    return choice_name(role_choices, role);
}
