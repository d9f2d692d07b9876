/* SPDX-License-Identifier: Apache-2.0 */
#include "history.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define HISTORY_MAX (1u << 16) /* 4 MiB */

struct history {
    uint64_t mask;
    struct history_record records[];
};

int history_new(uint64_t slots, struct history **ret_history)
{
    uint64_t n = 64;
    struct history *h;

    while (n < slots * 2 && n < HISTORY_MAX)
        n *= 2;
    h = calloc(1, sizeof(*h) + n * sizeof(h->records[0]));
    if (!h)
        return -ENOMEM;
    h->mask = n - 1;
    *ret_history = h;
    return 0;
}

void history_free(struct history *h)
{
    free(h);
}

static uint64_t place_of(const struct history *h, const struct shm_key *key)
{
    return XXH3_64bits(key, sizeof(*key)) & h->mask;
}

void history_add(struct history *h, const struct shm_key *key, enum history_event event,
                 uint32_t detail, uint64_t now_ms)
{
    h->records[place_of(h, key)] =
        (struct history_record){.key = *key, .event = event, .detail = detail, .when_ms = now_ms};
}

const struct history_record *history_find(const struct history *h, const struct shm_key *key)
{
    const struct history_record *r = &h->records[place_of(h, key)];

    return r->event != HISTORY_NONE && memcmp(&r->key, key, sizeof(*key)) == 0 ? r : NULL;
}

const char *history_name(enum history_event event)
{
    static const char *const names[] = {
        [HISTORY_NONE] = "never stored", [HISTORY_EVICTED] = "evicted",
        [HISTORY_REMOVED] = "removed",   [HISTORY_REFUSED] = "refused",
        [HISTORY_ABORTED] = "aborted",   [HISTORY_ORPHANED] = "orphaned",
        [HISTORY_RESET] = "reset",
    };

    return names[event];
}
