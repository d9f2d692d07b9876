/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers and keys, for people and from people. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "kvctl.h"

void text_size(uint64_t bytes, char buf[static SMALL_TEXT_SIZE])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    char number[SMALL_TEXT_SIZE / 2];
    size_t unit = 0, n;

    while (value >= 1023.95 && unit + 1 < sizeof(units) / sizeof(units[0])) { /* not "1024.0 KiB" */
        value /= 1024;
        unit++;
    }
    n = (size_t)snprintf(number, sizeof(number), "%.*f", value >= 99.95 ? 0 : 1, value);
    if (n > 2 && strcmp(number + n - 2, ".0") == 0)
        number[n - 2] = '\0';
    snprintf(buf, SMALL_TEXT_SIZE, "%s %s", number, units[unit]);
}

void text_duration(uint64_t s, char buf[static SMALL_TEXT_SIZE])
{
    static const struct {
        uint64_t seconds, part;
        const char *name, *part_name;
    } units[] = {
        {86400, 3600, "d", "h"},
        {3600, 60, "h", "min"},
        {60, 1, "min", "s"},
    };

    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        uint64_t rest = s % units[i].seconds / units[i].part;

        if (s < units[i].seconds)
            continue;
        if (rest)
            snprintf(buf, SMALL_TEXT_SIZE, "%" PRIu64 " %s %" PRIu64 " %s", s / units[i].seconds,
                     units[i].name, rest, units[i].part_name);
        else
            snprintf(buf, SMALL_TEXT_SIZE, "%" PRIu64 " %s", s / units[i].seconds, units[i].name);
        return;
    }
    snprintf(buf, SMALL_TEXT_SIZE, "%" PRIu64 " s", s);
}

void text_hash(const uint8_t *hash, size_t len, char buf[static KEY_TEXT_SIZE])
{
    size_t used = len < 32 ? len : 32, shown = 32;

    while (used && !hash[used - 1])
        used--;
    /* By halves and not by bytes: a hash may end in a zero of its own. */
    while (shown > 8 && used <= shown / 2)
        shown /= 2;
    for (size_t i = 0; i < shown; i++)
        snprintf(buf + 2 * i, 3, "%02x", i < len ? hash[i] : 0);
}

static int digit(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *p = strchr(digits, c >= 'A' && c <= 'F' ? c + 'a' - 'A' : c);

    return c && p ? (int)(p - digits) : -1;
}

int parse_hex(const char *what, const char *text, uint8_t *ret, size_t max, size_t *ret_len)
{
    size_t n = strlen(text);

    if (n < 2 || n > 2 * max || n % 2)
        return ctl_fail(EXIT_USAGE,
                        "%s has an even number of hexadecimal digits, 2 to %zu; \"%.80s\" has %zu",
                        what, 2 * max, text, n);
    for (size_t i = 0; i < n; i++)
        if (digit(text[i]) < 0)
            return ctl_fail(EXIT_USAGE, "%s is hexadecimal; \"%.80s\" has a '%c' in it", what, text,
                            text[i]);
    for (size_t i = 0; i < n / 2; i++)
        ret[i] = (uint8_t)(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
    *ret_len = n / 2;
    return 0;
}

int parse_number(const char *what, const char *text, uint64_t min, uint64_t max, uint64_t *ret)
{
    unsigned long long value = 0;
    char *end = NULL;

    errno = 0;
    if (*text >= '0' && *text <= '9')
        value = strtoull(text, &end, 10);
    if (!end || *end || errno || value < min || value > max)
        return ctl_fail(EXIT_USAGE,
                        "%s is a whole number from %" PRIu64 " to %" PRIu64 ", not \"%.80s\"", what,
                        min, max, text);
    *ret = value;
    return 0;
}

int parse_size(const char *what, const char *text, uint64_t *ret)
{
    static const char units[] = "KMGT";
    unsigned long long value = 0;
    const char *unit;
    char *end = NULL;
    unsigned shift = 0;

    errno = 0;
    if (*text >= '0' && *text <= '9')
        value = strtoull(text, &end, 10);
    unit = end && *end ? strchr(units, *end & ~0x20) : NULL;
    if (unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        end += strncasecmp(end + 1, "iB", 2) == 0 ? 3 : 1;
    }
    if (!end || *end || errno || value > UINT64_MAX >> shift)
        return ctl_fail(EXIT_USAGE, "%s is a size such as 512K, 200M or 1G, not \"%.80s\"", what,
                        text);
    *ret = value << shift;
    return 0;
}

int parse_seconds(const char *what, const char *text, uint32_t *ret_ms)
{
    double value = 0;
    char *end = NULL;

    if ((*text >= '0' && *text <= '9') || *text == '.')
        value = strtod(text, &end);
    if (!end || end == text || *end || !(value >= 0.001) || value > TIMEOUT_MAX_S)
        return ctl_fail(EXIT_USAGE, "%s is a number of seconds from 0.001 to %d, not \"%.80s\"",
                        what, TIMEOUT_MAX_S, text);
    *ret_ms = (uint32_t)(value * 1000);
    return 0;
}

int parse_key(const char *text, struct kvd_key *ret_key)
{
    const char *colon = strchr(text, ':');
    struct kvd_key key = {.group = 0};
    uint64_t group = 0;
    char hex[256];
    size_t len;
    int r;

    snprintf(hex, sizeof(hex), "%.*s", (int)(colon ? colon - text : (ptrdiff_t)strlen(text)), text);
    r = parse_hex("a key", hex, key.hash, sizeof(key.hash), &len);
    if (r == 0 && colon)
        r = parse_number("the group of a key", colon + 1, 0, UINT32_MAX, &group);
    key.group = (uint32_t)group;
    if (r == 0)
        *ret_key = key;
    return r;
}
