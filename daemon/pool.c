/* SPDX-License-Identifier: Apache-2.0 */
/* Making and unmaking pools. */
#include "daemon/pool.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <xxhash.h>

#include "daemon/space.h"
#include "shm/header.h"

/* A hugetlbfs mount is shared by all daemons of a machine: names carry a digest of the runtime
 * directory, of which each daemon has its own. */
static void data_name(const struct pool *p, const struct pool_spec *spec, uint32_t chunk,
                      uint32_t part, char *ret, size_t n)
{
    uint32_t d = XXH32(p->core->runtime_dir, strlen(p->core->runtime_dir), 0);

    snprintf(ret, n, "kvd-%08x-%s-%s-%u.%u", d, spec->space_name, spec->name, chunk, part);
}

int pool_make_small(struct pool *p, const char *what, enum shm_kind kind, uint64_t bytes,
                    uint64_t count, struct segment *segment, struct segment_mapping *map)
{
    char name[64];
    struct segment_spec spec = {.name = name,
                                .kind = SEGMENT_SMALL,
                                .bytes = bytes,
                                .runtime_dir = p->core->runtime_dir,
                                .replace = true};
    int r;

    snprintf(name, sizeof(name), "kvd-%s-%u", what, p->id);
    r = segment_make(&spec, NULL, segment);
    if (r < 0)
        return r;
    r = segment_map(NULL, segment->fd, segment->bytes, SEGMENT_WRITE, SEGMENT_DONTFORK, map);
    if (r < 0)
        return r;
    shm_header_fill(map->addr, kind, segment->bytes, count, p->core->instance);
    ((struct shm_header *)map->addr)->space = p->space->id;
    ((struct shm_header *)map->addr)->pool = p->id;
    return 0;
}

static int make_tables(struct pool *p)
{
    uint64_t lines = index_lines_for(p->slots);
    int r = pool_make_small(p, "index", SHM_INDEX, shm_index_bytes(lines), lines, &p->index_segment,
                            &p->index_map);

    if (r == 0)
        r = pool_make_small(p, "meta", SHM_META, shm_metas_bytes(p->slots), p->slots,
                            &p->meta_segment, &p->meta_map);
    if (r == 0)
        r = pool_make_small(p, "slots", SHM_SLOTS, shm_slots_bytes(p->slots), p->slots,
                            &p->slots_segment, &p->slots_map);
    if (r < 0)
        return r;
    p->index = p->index_map.addr;
    p->metas = p->meta_map.addr;
    p->table = p->slots_map.addr;
    if (getrandom(p->index->seed, sizeof(p->index->seed), 0) != sizeof(p->index->seed))
        return -EIO;
    p->index->slots = p->slots;
    p->index->part_bytes = p->part_bytes;
    p->index->chunk_slots = p->chunk_slots;
    p->index->parts = p->parts;
    p->index->chunks = p->chunks;
    atomic_store(&p->index->epoch, p->space->epoch);
    p->tick_ms[0] = core_now_ms(p->core);
    return 0;
}

static int make_lists(struct pool *p)
{
    p->slot = calloc(p->slots, sizeof(*p->slot));
    p->links = calloc(p->slots, sizeof(*p->links));
    if (!p->slot || !p->links)
        return -ENOMEM;
    for (uint32_t i = p->slots; i-- > 0;) {
        p->slot[i].parent = SLOT_NONE;
        slot_list_push_front(&p->free, p->links, i); /* slot 0 is granted first */
    }
    p->count[SHM_SLOT_FREE] = p->slots;
    return p->ops->make(p->slots, &p->policy);
}

/* Slots of a chunk: as many as its size says, such that each part's segment is whole hugepages and
 * the next chunk continues at the same stride. */
static uint64_t chunk_slots_for(const struct pool_spec *spec, uint64_t page)
{
    uint64_t slots = spec->chunk_bytes / (spec->part_bytes * spec->parts);
    uint64_t unit = 1;

    while (unit * spec->part_bytes % page)
        unit++;
    slots = slots / unit * unit;
    if (!slots)
        slots = unit;
    if (slots > spec->slots)
        slots = (spec->slots + unit - 1) / unit * unit;
    return slots;
}

/* The last chunk holds what is left. */
static uint64_t slots_of_chunk(const struct pool *p, uint32_t chunk)
{
    uint64_t first = (uint64_t)chunk * p->chunk_slots;

    return p->slots - first < p->chunk_slots ? p->slots - first : p->chunk_slots;
}

/* "hugetlbfs, 2048 KiB pages", and what kept chunks from a better rung; a pool may stand on several
 * when hugepages ran out half-way. */
static void describe(struct pool *p, const struct segment *s, const struct segment_reasons *why)
{
    size_t n = strlen(p->ladder);

    if (s->page_size > p->page_bytes) /* the largest: what clients align their mappings to */
        p->page_bytes = s->page_size;
    if (n && s->rung <= p->rung)
        return;
    if (n)
        n += (size_t)snprintf(p->ladder + n, sizeof(p->ladder) - n, "; then ");
    p->rung = s->rung;
    if (n < sizeof(p->ladder))
        n += (size_t)snprintf(p->ladder + n, sizeof(p->ladder) - n, "%s, %llu KiB pages",
                              segment_rung_name(s->rung), (unsigned long long)s->page_size >> 10);
    for (unsigned i = 0; i < why->n && n < sizeof(p->ladder); i++)
        n += (size_t)snprintf(p->ladder + n, sizeof(p->ladder) - n, "; not %s", why->list[i].text);
}

static void explain(char *ret_why, size_t n, const struct pool_spec *spec,
                    const struct segment_reasons *why, int error)
{
    if (!ret_why)
        return;
    snprintf(ret_why, n, "pool %s/%s: %s", spec->space_name, spec->name,
             why->n ? why->list[why->n - 1].text : strerror(-error));
}

/* One part of one chunk: made by the ladder, and mapped behind the chunks before it. Where
 * hugepages are wanted, all parts are as long as if they had them: they may stand on different
 * rungs, and clients are told one length. */
static int make_chunk_part(struct pool *p, const struct pool_spec *spec, uint64_t page,
                           uint32_t chunk, uint32_t part, char *ret_why, size_t why_bytes)
{
    char name[224];
    struct segment_reasons why = {.n = 0};
    struct segment_spec memory = *spec->memory;
    struct segment *s = &p->data[chunk * p->parts + part];
    void *addr;
    int r;

    data_name(p, spec, chunk, part, name, sizeof(name));
    memory.name = name;
    memory.kind = SEGMENT_POOL;
    memory.bytes = slots_of_chunk(p, chunk) * p->part_bytes;
    if (memory.hugepages != SEGMENT_HUGEPAGES_OFF)
        memory.bytes = (memory.bytes + page - 1) / page * page;
    memory.replace = true;
    r = segment_make(&memory, &why, s);
    if (r < 0) {
        s->fd = -1;
        explain(ret_why, why_bytes, spec, &why, r);
        return r;
    }
    describe(p, s, &why);
    r = segment_append(NULL, &p->base[part], s->fd, s->bytes, SEGMENT_WRITE,
                       SEGMENT_DONTFORK | SEGMENT_DONTDUMP, &addr);
    if (r < 0)
        explain(ret_why, why_bytes, spec, &why, r);
    return r;
}

static int make_data(struct pool *p, const struct pool_spec *spec, uint64_t page, char *ret_why,
                     size_t why_bytes)
{
    uint64_t reach = (uint64_t)p->chunks * p->chunk_slots * p->part_bytes;
    int r = 0;

    p->data = calloc((size_t)p->chunks * p->parts, sizeof(*p->data));
    if (!p->data)
        return -ENOMEM;
    for (uint32_t i = 0; i < p->chunks * p->parts; i++)
        p->data[i].fd = p->data[i].reader_fd = -1;
    for (uint32_t part = 0; part < p->parts && r == 0; part++) {
        r = segment_reserve(NULL, reach + page, page, &p->base[part]);
        for (uint32_t chunk = 0; chunk < p->chunks && r == 0; chunk++)
            r = make_chunk_part(p, spec, page, chunk, part, ret_why, why_bytes);
    }
    return r;
}

static int check_spec(const struct pool_spec *spec)
{
    if (!spec->slots || spec->slots > SHM_SLOTS_MAX - 1 || !spec->parts ||
        spec->parts > SHM_PARTS_MAX)
        return -EINVAL;
    if (!spec->part_bytes || spec->part_bytes % 4096 || spec->part_bytes > (uint64_t)4 << 30)
        return -EINVAL;
    if (spec->high_water < spec->low_water || spec->high_water > spec->slots)
        return -EINVAL;
    return policy_find(spec->policy) ? 0 : -EINVAL;
}

static int pool_make(struct pool *p, const struct pool_spec *spec, char *ret_why, size_t why_bytes)
{
    uint64_t page = segment_hugepage(spec->memory);
    int r;

    p->slots = (uint32_t)spec->slots;
    p->parts = spec->parts;
    p->part_bytes = spec->part_bytes;
    p->chunk_slots = (uint32_t)chunk_slots_for(spec, page);
    p->chunks = (uint32_t)((spec->slots + p->chunk_slots - 1) / p->chunk_slots);
    p->low_water = spec->low_water;
    p->high_water = spec->high_water;
    p->ops = policy_find(spec->policy);
    slot_list_init(&p->free);
    slot_list_init(&p->quarantine);
    r = make_lists(p);
    if (r == 0)
        r = history_new(p->slots, &p->history);
    if (r == 0)
        r = make_data(p, spec, page, ret_why, why_bytes);
    return r < 0 ? r : make_tables(p);
}

int pool_new(struct core *core, struct space *space, uint32_t id, const struct pool_spec *spec,
             char *ret_why, size_t why_bytes, struct pool **ret_pool)
{
    struct pool *p;
    int r = check_spec(spec);

    if (r < 0)
        return r;
    p = calloc(1, sizeof(*p));
    if (!p)
        return -ENOMEM;
    p->core = core;
    p->space = space;
    p->id = id;
    p->index_segment.fd = p->meta_segment.fd = p->slots_segment.fd = -1;
    p->index_segment.reader_fd = p->meta_segment.reader_fd = p->slots_segment.reader_fd = -1;
    snprintf(p->name, sizeof(p->name), "%s", spec->name);
    list_init(&p->attaches);
    if (ret_why && why_bytes)
        ret_why[0] = 0;
    r = pool_make(p, spec, ret_why, why_bytes);
    if (r < 0) {
        if (ret_why && why_bytes && !ret_why[0])
            snprintf(ret_why, why_bytes, "pool %s/%s: %s", spec->space_name, spec->name,
                     strerror(-r));
        pool_free(p);
        return r;
    }
    *ret_pool = p;
    return 0;
}

void pool_drop_small(struct segment *s, struct segment_mapping *m)
{
    if (s->fd < 0)
        return;
    if (m->addr)
        segment_unmap(m);
    segment_unlink(s);
    segment_close(s);
}

void pool_free(struct pool *p)
{
    if (!p)
        return;
    assert(list_empty(&p->attaches));
    if (p->index) /* whoever still has it mapped finds nothing any more */
        atomic_store(&p->index->retired, 1);
    for (uint32_t part = 0; part < p->parts; part++)
        if (p->base[part].base)
            segment_unreserve(&p->base[part]);
    for (uint32_t i = 0; p->data && i < p->chunks * p->parts; i++) {
        if (p->data[i].fd < 0)
            continue;
        segment_unlink(&p->data[i]);
        segment_close(&p->data[i]);
    }
    pool_drop_small(&p->index_segment, &p->index_map);
    pool_drop_small(&p->meta_segment, &p->meta_map);
    pool_drop_small(&p->slots_segment, &p->slots_map);
    if (p->ops)
        p->ops->destroy(p->policy);
    history_free(p->history);
    free(p->sources);
    if (p->held)
        munmap(p->held, shm_pins_bytes(p->slots));
    free(p->data);
    free(p->links);
    free(p->slot);
    free(p);
}
