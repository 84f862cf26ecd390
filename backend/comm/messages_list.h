// SPDX-License-Identifier: Apache-2.0
/* Intrusive lists: an entry is removed in one step, wherever it is. Private to backend/comm. */
#pragma once

#include <stddef.h>

/* The head of a list, or a link in an entry. A link is in one list, or points to itself. */
typedef struct sluice_link_s {
  struct sluice_link_s* prev;
  struct sluice_link_s* next;
} sluice_link_t;

#define SLUICE_ENTRY_OF(link, type, member) ((type*)(void*)((char*)(link)-offsetof(type, member)))

static inline void sluice_list_init(sluice_link_t* list) { list->prev = list->next = list; }

static inline void sluice_list_append(sluice_link_t* list, sluice_link_t* link) {
  link->prev = list->prev;
  link->next = list;
  list->prev->next = link;
  list->prev = link;
}

static inline void sluice_list_remove(sluice_link_t* link) {
  link->prev->next = link->next;
  link->next->prev = link->prev;
  sluice_list_init(link);
}

/* Returns the oldest entry, or NULL. */
static inline sluice_link_t* sluice_list_first(const sluice_link_t* list) {
  return list->next != list ? list->next : NULL;
}
