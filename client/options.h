/* SPDX-License-Identifier: Apache-2.0 */
/* Structs of options that grow at their end: the caller's may be of an older or a newer library.
 * The first field is always its size_t size. */
#ifndef KVD_CLIENT_OPTIONS_H
#define KVD_CLIENT_OPTIONS_H

#include <errno.h>
#include <stddef.h>
#include <string.h>

/* Gives the caller as much of the defaults in `own` as his struct of `size` bytes has room for. */
static inline void options_init(void *options, size_t size, const void *own, size_t own_bytes)
{
    if (size < sizeof(size))
        return;
    memset(options, 0, size);
    memcpy(options, own, size < own_bytes ? size : own_bytes);
    memcpy(options, &size, sizeof(size));
}

/* Copies what the caller has set over the defaults in `own`. -EINVAL: no size (the init function
 * was not called), or a newer caller uses fields that this version does not know. */
static inline int options_copy(void *own, size_t own_bytes, const void *given)
{
    size_t bytes;

    memcpy(&bytes, given, sizeof(bytes));
    if (bytes < sizeof(bytes))
        return -EINVAL;
    for (size_t i = own_bytes; i < bytes; i++)
        if (((const char *)given)[i])
            return -EINVAL;
    memcpy(own, given, bytes < own_bytes ? bytes : own_bytes);
    memcpy(own, &own_bytes, sizeof(own_bytes));
    return 0;
}

#endif
