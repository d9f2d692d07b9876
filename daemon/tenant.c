/* SPDX-License-Identifier: Apache-2.0 */
#include "tenant.h"

#include <errno.h>
#include <stdlib.h>

static size_t place_of(const struct tenants *t, uint32_t id)
{
    return (id * 0x9e3779b1u) & (t->size - 1);
}

/* The tenant's place, or the free one where it belongs. The table is never full. */
static size_t find(const struct tenants *t, uint32_t id)
{
    size_t i = place_of(t, id);

    while (t->table[i].used && t->table[i].id != id)
        i = (i + 1) & (t->size - 1);
    return i;
}

void tenants_free(struct tenants *t)
{
    free(t->table);
    t->table = NULL;
    t->size = t->n = 0;
}

struct tenant tenants_get(const struct tenants *t, uint32_t id)
{
    size_t i = t->size ? find(t, id) : 0;

    return t->size && t->table[i].used ? t->table[i] : (struct tenant){.id = id};
}

static const struct tenant_limit *limit_of(const struct tenants *t, uint32_t id)
{
    const struct tenant_limit *any = NULL;

    for (size_t i = 0; i < t->n_limits; i++) {
        if (!t->limits[i].any && t->limits[i].id == id)
            return &t->limits[i];
        if (t->limits[i].any)
            any = &t->limits[i];
    }
    return any;
}

int tenants_check(const struct tenants *t, uint32_t id, uint64_t bytes)
{
    const struct tenant_limit *l = limit_of(t, id);
    struct tenant now;

    if (!l)
        return 0;
    now = tenants_get(t, id);
    if (l->max_reserved && now.reserved >= l->max_reserved)
        return -EDQUOT;
    if (l->max_resident_bytes &&
        now.resident_bytes + now.reserved_bytes + bytes > l->max_resident_bytes)
        return -EDQUOT;
    return 0;
}

static int grow(struct tenants *t)
{
    struct tenants bigger = {.size = t->size ? t->size * 2 : 16};

    bigger.table = calloc(bigger.size, sizeof(*bigger.table));
    if (!bigger.table)
        return -ENOMEM;
    for (size_t i = 0; i < t->size; i++)
        if (t->table[i].used)
            bigger.table[find(&bigger, t->table[i].id)] = t->table[i];
    free(t->table);
    t->table = bigger.table;
    t->size = bigger.size;
    return 0;
}

int tenants_want(struct tenants *t, uint32_t id)
{
    size_t i;

    if ((t->n + 1) * 2 > t->size) {
        int r = grow(t);

        if (r < 0)
            return r;
    }
    i = find(t, id);
    if (t->table[i].used)
        return 0;
    if (t->n >= TENANTS_MAX)
        return -EDQUOT;
    t->table[i] = (struct tenant){.id = id, .used = true};
    t->n++;
    return 0;
}

/* Takes out the entry at i and moves those behind it that would no longer be found. */
static void take_out(struct tenants *t, size_t i)
{
    size_t mask = t->size - 1, j = i;

    t->table[i].used = false;
    t->n--;
    for (;;) {
        size_t home;

        j = (j + 1) & mask;
        if (!t->table[j].used)
            return;
        home = place_of(t, t->table[j].id);
        if (((j - home) & mask) >= ((j - i) & mask)) {
            t->table[i] = t->table[j];
            t->table[j].used = false;
            i = j;
        }
    }
}

void tenants_add(struct tenants *t, uint32_t id, int64_t reserved, int64_t resident, uint64_t bytes)
{
    size_t i;
    struct tenant *e;

    if (!t->size)
        return;
    i = find(t, id);
    e = &t->table[i];
    if (!e->used)
        return;
    e->reserved += (uint64_t)reserved;
    e->resident += (uint64_t)resident;
    e->reserved_bytes += (uint64_t)reserved * bytes;
    e->resident_bytes += (uint64_t)resident * bytes;
    if (!e->reserved && !e->resident)
        take_out(t, i);
}
