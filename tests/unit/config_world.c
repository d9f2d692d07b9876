/* SPDX-License-Identifier: Apache-2.0 */
#include "config_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void collect(void *arg, const struct config_problem *p)
{
    struct problems *problems = arg;

    problems->errors += !p->warning;
    if (problems->n < 32) {
        struct problem *copy = &problems->list[problems->n];

        copy->warning = p->warning;
        copy->line = p->line;
        snprintf(copy->file, sizeof(copy->file), "%s", p->file);
        snprintf(copy->text, sizeof(copy->text), "%s", p->text);
    }
    problems->n++;
}

const char *all_of(const struct problems *p)
{
    static char text[65536];
    size_t n = 0;

    text[0] = '\0';
    for (unsigned i = 0; i < p->n && i < 32; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "\n%s:%u: %s: %s", p->list[i].file,
                              p->list[i].line, p->list[i].warning ? "warning" : "error",
                              p->list[i].text);
    return text;
}

int load_bytes(const char *text, size_t bytes, struct config **ret, struct problems *p)
{
    FILE *f = tmpfile();
    int r;

    cr_assert_not_null(f);
    cr_assert_eq(fwrite(text, 1, bytes, f), bytes);
    rewind(f);
    memset(p, 0, sizeof(*p));
    r = config_load_stream(f, "test.conf", ret, collect, p);
    fclose(f);
    return r;
}

int load(const char *text, struct config **ret, struct problems *p)
{
    return load_bytes(text, strlen(text), ret, p);
}

struct config *must_load(const char *text)
{
    struct config *config = NULL;
    struct problems p;

    cr_assert_eq(load(text, &config, &p), 0, "%s%s", text, all_of(&p));
    cr_assert_eq(p.n, 0, "%s%s", text, all_of(&p));
    cr_assert_not_null(config);
    return config;
}

void assert_problem(const char *text, bool warning, unsigned line, const char *says)
{
    struct config *untouched = (struct config *)&untouched, *config = untouched;
    struct problems p;
    int r = load(text, &config, &p);

    cr_assert_eq(p.n, 1, "%u problems with:\n%s%s", p.n, text, all_of(&p));
    cr_assert_eq(p.list[0].warning, warning, "%s%s", text, all_of(&p));
    cr_assert_eq(p.list[0].line, line, "%s%s", text, all_of(&p));
    cr_assert_not_null(strstr(p.list[0].text, says), "%s\n%s%s", says, text, all_of(&p));
    cr_assert_str_eq(p.list[0].file, "test.conf");
    if (warning) {
        cr_assert_eq(r, 0);
        config_free(config);
    } else {
        cr_assert_eq(r, -EINVAL);
        cr_assert_eq(config, untouched, "touched on failure");
    }
}

void assert_error(const char *text, unsigned line, const char *says)
{
    assert_problem(text, false, line, says);
}

const char *with(const char *section, const char *key, const char *value)
{
    static char text[4096];
    const char *before = MINIMAL "[daemon]\n";

    if (strcmp(section, "space") == 0)
        before = "[pool s/p]\nslot = 4K\nslots = 200\n[space s]\n";
    else if (strcmp(section, "pool") == 0)
        before = MINIMAL;
    else if (strcmp(section, "socket") == 0)
        before = MINIMAL "[socket k]\n";
    else if (strcmp(section, "tenant") == 0)
        before = MINIMAL "[tenant *]\n";
    else if (strcmp(section, "spill") == 0 && strcmp(key, "path") == 0)
        before = MINIMAL "[spill s/p/n]\nsize = 64M\n";
    else if (strcmp(section, "spill") == 0 && strcmp(key, "size") == 0)
        before = MINIMAL "[spill s/p/n]\npath = " NOWHERE "/n\n";
    else if (strcmp(section, "spill") == 0)
        before = MINIMAL STORE;
    snprintf(text, sizeof(text), "%s%s = %s\n", before, key, value);
    return text;
}

static unsigned lines_of(const char *text)
{
    unsigned n = 0;

    for (; *text; text++)
        n += *text == '\n';
    return n;
}

void assert_refused(const char *section, const char *key, const char *value, const char *says)
{
    const char *text = with(section, key, value);

    assert_error(text, lines_of(text), says);
}

char *format(const char *fmt, ...)
{
    char *text;
    va_list ap;

    va_start(ap, fmt);
    cr_assert_geq(vasprintf(&text, fmt, ap), 0);
    va_end(ap);
    return text;
}

/* ---- files */

char config_dir[] = "/tmp/kvd-test-config-XXXXXX";

void put(const char *name, const char *text)
{
    char *path = format("%s/%s", config_dir, name);
    FILE *f = fopen(path, "w");

    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    cr_assert_eq(fclose(f), 0);
    free(path);
}

void make_dir(void)
{
    char *path;

    cr_assert_not_null(mkdtemp(config_dir));
    path = format("%s/conf.d", config_dir);
    cr_assert_eq(mkdir(path, 0700), 0);
    free(path);
}

void remove_dir(void)
{
    char *command = format("rm -r -- %s", config_dir);

    cr_assert_eq(system(command), 0);
    free(command);
}

int load_dir(struct config **ret, struct problems *p)
{
    char *path = format("%s/kvd.conf", config_dir);
    int r;

    memset(p, 0, sizeof(*p));
    r = config_load(path, ret, collect, p);
    free(path);
    return r;
}
