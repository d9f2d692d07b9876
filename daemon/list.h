/* SPDX-License-Identifier: Apache-2.0 */
/* Doubly linked lists: of structs (struct list) and of slots, which are numbers (struct
 * slot_list). */
#ifndef KVD_DAEMON_LIST_H
#define KVD_DAEMON_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct list {
    struct list *prev, *next;
};

static inline void list_init(struct list *l)
{
    l->prev = l->next = l;
}

static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}

static inline void list_append(struct list *head, struct list *item)
{
    item->prev = head->prev;
    item->next = head;
    head->prev->next = item;
    head->prev = item;
}

/* An item that is in no list points to itself, so removing it twice is harmless. */
static inline void list_remove(struct list *item)
{
    item->prev->next = item->next;
    item->next->prev = item->prev;
    list_init(item);
}

#define list_entry(item, type, member) ((type *)((char *)(item)-offsetof(type, member)))

/* Safe against removal of the current item. */
#define kvd_list_for_each(pos, tmp, head)                                                          \
    for (pos = (head)->next, tmp = pos->next; pos != (head); pos = tmp, tmp = pos->next)

/* ---- lists of slots: links live in an array indexed by slot */

#define SLOT_NONE UINT32_MAX

struct slot_link {
    uint32_t prev, next;
};

struct slot_list {
    uint32_t first, last;
    uint32_t n;
};

static inline void slot_list_init(struct slot_list *l)
{
    *l = (struct slot_list){.first = SLOT_NONE, .last = SLOT_NONE};
}

static inline void slot_list_push_front(struct slot_list *l, struct slot_link *links, uint32_t s)
{
    links[s] = (struct slot_link){.prev = SLOT_NONE, .next = l->first};
    if (l->first != SLOT_NONE)
        links[l->first].prev = s;
    else
        l->last = s;
    l->first = s;
    l->n++;
}

static inline void slot_list_push_back(struct slot_list *l, struct slot_link *links, uint32_t s)
{
    links[s] = (struct slot_link){.prev = l->last, .next = SLOT_NONE};
    if (l->last != SLOT_NONE)
        links[l->last].next = s;
    else
        l->first = s;
    l->last = s;
    l->n++;
}

static inline void slot_list_remove(struct slot_list *l, struct slot_link *links, uint32_t s)
{
    struct slot_link k = links[s];

    if (k.prev != SLOT_NONE)
        links[k.prev].next = k.next;
    else
        l->first = k.next;
    if (k.next != SLOT_NONE)
        links[k.next].prev = k.prev;
    else
        l->last = k.prev;
    l->n--;
}

static inline uint32_t slot_list_pop(struct slot_list *l, struct slot_link *links)
{
    uint32_t s = l->first;

    if (s != SLOT_NONE)
        slot_list_remove(l, links, s);
    return s;
}

/* Moves all of `from` in front of `to`. */
static inline void slot_list_splice_front(struct slot_list *to, struct slot_list *from,
                                          struct slot_link *links)
{
    if (from->first == SLOT_NONE)
        return;
    links[from->last].next = to->first;
    if (to->first != SLOT_NONE)
        links[to->first].prev = from->last;
    else
        to->last = from->last;
    to->first = from->first;
    to->n += from->n;
    slot_list_init(from);
}

#endif
