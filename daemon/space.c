/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/space.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/log.h"
#include "daemon/pool.h"
#include "daemon/session.h"
#include "daemon/spill/spill.h"

#define PURGE_STEP 4096u /* slots looked at in one turn of the loop */

struct space *core_space(struct core *c, const char *name)
{
    for (uint32_t i = 0; i < c->n_spaces; i++)
        if (strcmp(c->spaces[i].name, name) == 0)
            return &c->spaces[i];
    return NULL;
}

/* CBOR of a text string: head and bytes. */
static size_t cbor_text(const char *text, uint8_t *out)
{
    size_t n = strlen(text), head = n < 24 ? 1 : 2;

    out[0] = n < 24 ? (uint8_t)(0x60 | n) : 0x78;
    if (head == 2)
        out[1] = (uint8_t)n; /* seeds are shorter than 256 bytes */
    memcpy(out + head, text, n);
    return head + n;
}

int space_first_parent(struct space *s, const char *seed)
{
    uint8_t cbor[260];
    size_t n;

    if (!seed[0] || s->first_parent_len)
        return 0;
    if (strlen(seed) > 255)
        return -EINVAL;
    n = cbor_text(seed, cbor);
    if (strcmp(s->scheme, "vllm-xxhash-cbor") == 0) {
        XXH128_canonical_t c;

        XXH128_canonicalFromHash(&c, XXH3_128bits(cbor, n));
        memcpy(s->first_parent, c.digest, sizeof(c.digest));
        s->first_parent_len = sizeof(c.digest);
        return 0;
    }
    if (!EVP_Digest(cbor, n, s->first_parent, &s->first_parent_len, EVP_sha256(), NULL))
        return -ENOMEM;
    return 0;
}

static void hex(const uint8_t *bytes, size_t n, char *out)
{
    for (size_t i = 0; i < n && i < 8; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

/* Compares bytes of the client with ours; `what` names them. */
static int same_bytes(const char *what, const uint8_t *theirs, size_t theirs_len,
                      const uint8_t *ours, size_t ours_len, char *ret_why, size_t n)
{
    char a[17] = "none", b[17] = "none";

    if (theirs_len == ours_len && (!ours_len || memcmp(theirs, ours, ours_len) == 0))
        return 0;
    hex(theirs, theirs_len, a);
    hex(ours, ours_len, b);
    snprintf(ret_why, n,
             "%s differs: yours begins %s (%zu bytes), the space's %s (%zu bytes); the same tokens "
             "would "
             "get other keys and never hit",
             what, a, theirs_len, b, ours_len);
    return -EPROTOTYPE;
}

/* Bytes that the client may leave out. What the configuration leaves out, too, the first writer
 * decides for the others: `ours` has room for 32. */
static int check_bytes(const char *what, const uint8_t *theirs, size_t theirs_len, uint8_t *ours,
                       uint32_t *ours_len, bool decides, char *ret_why, size_t n)
{
    if (theirs_len > 32) {
        snprintf(ret_why, n, "a %s has at most 32 bytes, not %zu", what, theirs_len);
        return -EINVAL;
    }
    if (!theirs_len)
        return 0;
    if (*ours_len)
        return same_bytes(what, theirs, theirs_len, ours, *ours_len, ret_why, n);
    if (decides) {
        memcpy(ours, theirs, theirs_len);
        *ours_len = (uint32_t)theirs_len;
    }
    return 0;
}

int space_check_claim(struct space *s, const struct space_claim *c, char *ret_why, size_t n)
{
    int r;

    if (c->identity && s->identity[0] && strcmp(c->identity, s->identity) != 0) {
        snprintf(ret_why, n, "identity differs: yours is \"%.200s\", the space's \"%.200s\"",
                 c->identity, s->identity);
        return -EPROTOTYPE;
    }
    if (!c->scheme)
        return 0;
    if (strcmp(c->scheme, s->scheme) != 0) {
        snprintf(ret_why, n, "key scheme differs: yours is \"%.64s\", the space's \"%s\"",
                 c->scheme, s->scheme);
        return -EPROTOTYPE;
    }
    r = check_bytes("first parent", c->first_parent, c->first_parent_len, s->first_parent,
                    &s->first_parent_len, c->decides, ret_why, n);
    return r < 0 ? r
                 : check_bytes("test vector", c->vector_key, c->vector_key_len, s->vector_key,
                               &s->vector_key_len, c->decides, ret_why, n);
}

/* Reserved under the old weights: the writer may still be writing, so its slots are quarantined. */
static void unreserve_all(struct pool *p)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &p->attaches) {
        struct attach *a = list_entry(i, struct attach, in_pool);

        while (a->reserved.first != SLOT_NONE)
            pool_unreserve(p, a->reserved.first, true, HISTORY_RESET, p->space->epoch);
    }
}

void space_set_epoch(struct space *s, uint32_t epoch)
{
    s->epoch = epoch;
    core_save_epochs(s->core);
    for (uint32_t i = 0; i < s->n_pools; i++) {
        atomic_store(&s->pools[i]->index->epoch, epoch);
        if (s->pools[i]->nvme_index)
            atomic_store(&s->pools[i]->nvme_index->epoch, epoch);
    }
}

void space_reset(struct space *s)
{
    s->epoch++;
    s->resets++;
    core_save_epochs(s->core);
    for (uint32_t i = 0; i < s->n_pools; i++) {
        struct pool *p = s->pools[i];

        /* From here on nobody hits the old epoch; pairs with the acquire load at each lookup. */
        atomic_store_explicit(&p->index->epoch, s->epoch, memory_order_release);
        spill_reset(p);
        unreserve_all(p);
    }
    s->purging = true;
    s->purge_pool = s->purge_slot = 0;
    log_write(s->core->log, LOG_NOTICE, &(struct log_fields){.space = s->name},
              "reset to epoch %u: all that was stored before is unreachable", s->epoch);
}

void space_offline(struct space *s, const char *why)
{
    if (s->offline)
        return;
    s->offline = why;
    log_write(s->core->log, LOG_ERR, &(struct log_fields){.space = s->name},
              "offline: %s; restart kvd to bring it back", why);
    space_reset(s);
}

/* Slots that are pinned stay LIVE under their old epoch, where nobody finds them, and come up for
 * eviction like any other. */
bool space_purge(struct space *s)
{
    uint32_t old[PURGE_STEP], n = 0, looked = 0;
    struct pool *p;

    if (!s->purging)
        return false;
    if (s->purge_pool == s->n_pools) {
        s->purging = false;
        return false;
    }
    p = s->pools[s->purge_pool];
    for (; s->purge_slot < p->slots && looked < PURGE_STEP; looked++, s->purge_slot++) {
        const struct shm_slot *t = &p->table->slots[s->purge_slot];

        if (t->state == SHM_SLOT_LIVE && t->epoch != s->epoch)
            old[n++] = s->purge_slot;
    }
    pool_remove(p, old, n, HISTORY_RESET, s->epoch);
    if (s->purge_slot == p->slots) {
        s->purge_pool++;
        s->purge_slot = 0;
    }
    return true;
}
