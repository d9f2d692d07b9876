/* SPDX-License-Identifier: Apache-2.0 */
#include "header.h"

#include <errno.h>
#include <string.h>

void shm_header_fill(struct shm_header *h, enum shm_kind kind, uint64_t bytes, uint64_t count,
                     const uint8_t instance[16])
{
    *h = (struct shm_header){
        .magic = SHM_MAGIC, .version = SHM_VERSION, .kind = kind, .bytes = bytes, .count = count};
    memcpy(h->instance, instance, sizeof(h->instance));
}

static uint64_t needed_bytes(enum shm_kind kind, uint64_t count)
{
    switch (kind) {
    case SHM_INDEX:
    case SHM_NVME:
        return shm_index_bytes(count);
    case SHM_META:
        return shm_metas_bytes(count);
    case SHM_SLOTS:
        return shm_slots_bytes(count);
    case SHM_PINS:
        return shm_pins_bytes(count);
    case SHM_SESSION:
        return shm_session_bytes((uint32_t)count);
    case SHM_CORE:
        return sizeof(struct shm_core);
    }
    return UINT64_MAX;
}

int shm_header_check(const struct shm_header *h, enum shm_kind kind, uint64_t mapped_bytes)
{
    if (mapped_bytes < sizeof(*h) || h->magic != SHM_MAGIC)
        return -EPROTO;
    if (h->version != SHM_VERSION)
        return -EPROTONOSUPPORT;
    if (h->kind != kind)
        return -EPROTO;
    if (h->count > UINT32_MAX || h->bytes > mapped_bytes || needed_bytes(kind, h->count) > h->bytes)
        return -ERANGE;
    return 0;
}
