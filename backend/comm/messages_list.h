// SPDX-License-Identifier: Apache-2.0
/* Lists of what has its link inside itself: an entry leaves in one step, wherever it stands. Private to backend/comm.
 */
#ifndef SLUICE_BACKEND_COMM_MESSAGES_LIST_H_
#define SLUICE_BACKEND_COMM_MESSAGES_LIST_H_

#include <stddef.h>

/* A list's head, or a link: it is in one list or, alone, in none. */
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

/* The oldest, NULL where there is none. */
static inline sluice_link_t* sluice_list_first(const sluice_link_t* list) {
  return list->next != list ? list->next : NULL;
}

#endif /* SLUICE_BACKEND_COMM_MESSAGES_LIST_H_ */
