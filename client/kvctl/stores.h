/* SPDX-License-Identifier: Apache-2.0 */
/* Spill stores, as several commands show them. */
#ifndef KVD_KVCTL_STORES_H
#define KVD_KVCTL_STORES_H

#include "out.h"

/* What the daemon says of its stores. Silently: false when it does not know the question, may not answer
 * it, or has no stores. On true *ret_reply is to be freed. The connection is there. */
bool stores_try(struct ctl *c, struct control_reply *ret_reply);

/* The array "stores" of a document. */
void stores_add(struct json_object *o, const Kvd__Proto__SpillReply *s);

/* ... as a table, with what is wrong with them below; but not what `said`, which may be NULL, says. */
void stores_print(struct ctl *c, struct json_object *o, const Kvd__Proto__SpillReply *s,
                  const Kvd__Proto__StatusReply *said);

/* A problem of the daemon's speaks of the store. */
bool store_is_mentioned(const Kvd__Proto__StatusReply *s, const char *store);

/* It does not do what it should; perhaps it will by itself, but nobody knows when. */
bool store_is_unwell(const Kvd__Proto__StoreStatus *s);

/* The store belongs to the pool "SPACE/NAME". */
bool store_is_of(const Kvd__Proto__StoreStatus *s, const char *pool);

#endif
