/* SPDX-License-Identifier: Apache-2.0 */
/* A session segment as the core sees it: the input is what a hostile process writes into its
 * request ring, its indices and its pin counters. The core must serve, refuse or break the session,
 * and its sums must agree afterwards; a bystander's pinned object must stay. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/guard.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "shm/lookup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static char dir[] = "/dev/shm/kvd-fuzz-XXXXXX";
static struct core *core;
static uint64_t now = 1000000000;
static struct attach *bystander;
static struct shm_key kept = {.hash = {1}};

static uint64_t clock_ns(void *arg)
{
    (void)arg;
    return now;
}

static struct session *attach_process(void)
{
    struct session_spec spec = {
        .pid = 1, .role = ROLE_WRITER, .client = "fuzz", .ring_entries = 16};
    struct session *s;

    if (session_new(core, &spec, &s) < 0)
        abort();
    return s;
}

static void keep_one(void)
{
    struct reservation r;
    struct commit c = {.bytes = 1};
    struct shm_pinned p;
    size_t held;

    pool_reserve(core->pools[0], bystander, &kept, NULL, core->spaces[0].epoch, 0, &r);
    c.ticket = r.ticket;
    if (r.status != RESERVE_NEW || pool_commit(core->pools[0], bystander, &c) < 0)
        abort();
    shm_pin_keys(core->pools[0]->index, bystander->map.addr, &kept, 1, core->spaces[0].epoch, false,
                 0, &p, &held);
    if (held != 1)
        abort();
}

static void leave(void)
{
    core_free(core);
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static char text[256];
    struct config *config;
    struct core_options o;
    char why[512];
    FILE *f;

    (void)argc;
    (void)argv;
    if (!mkdtemp(dir) || atexit(leave) != 0)
        abort();
    snprintf(text, sizeof(text),
             "[daemon]\nruntime_dir = %s\nhugepages = off\n[space s]\n[pool s/a]\nslot = 4K\n"
             "slots = 32\n[pool s/b]\nslot = 8K\nparts = 2\nslots = 8\n",
             dir);
    f = fmemopen(text, strlen(text), "r");
    if (!f || config_load_stream(f, "fuzz", &config, NULL, NULL) < 0 || guard_install() < 0)
        abort();
    fclose(f);
    o = (struct core_options){.config = config, .clock = {.now_ns = clock_ns}};
    if (core_new(&o, why, sizeof(why), &core) < 0)
        abort();
    config_free(config);
    if (session_attach(attach_process(), core->pools[0], true, &bystander) < 0)
        abort();
    keep_one();
    return 0;
}

/* I4 in short: the five states sum up, and the bystander's object is there (I3). */
static void check(void)
{
    for (uint32_t i = 0; i < core->n_pools; i++) {
        const struct pool *p = core->pools[i];
        uint32_t counted[SHM_SLOT_QUARANTINED + 1] = {0};

        for (uint32_t s = 0; s < p->slots; s++)
            counted[p->table->slots[s].state]++;
        if (memcmp(counted, p->count, sizeof(counted)) != 0)
            abort();
    }
    if (shm_lookup(core->pools[0]->index, NULL, &kept, 1, core->spaces[0].epoch, NULL) != 1)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct session *s = attach_process();
    struct attach *a, *b;
    size_t n;

    if (session_attach(s, core->pools[0], true, &a) < 0 ||
        session_attach(s, core->pools[1], true, &b) < 0 || size < 8)
        goto out;
    memcpy((void *)&s->shm->requests.tail, data, 4);
    memcpy((void *)&s->shm->completions.head, data + 4, 4);
    atomic_store(&s->shm->requests.tail, atomic_load(&s->shm->requests.tail) % 20);
    n = size - 8 < 16 * sizeof(struct shm_request) ? size - 8 : 16 * sizeof(struct shm_request);
    memcpy(s->shm->request, data + 8, n);
    for (uint32_t i = 0; i < 32; i++) /* the tail of the input, as counters and stamps */
        memcpy(&((struct shm_pins *)a->map.addr)->pins[i], data + (size - 8) * i / 32, 8);
    while (session_serve(s, 5) > 0)
        core_work(core);
    check();
out:
    session_end(s, size & 1);
    now += 31000000000u;
    while (core_work(core))
        ;
    check();
    return 0;
}
