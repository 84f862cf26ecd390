// SPDX-License-Identifier: Apache-2.0
/* The list of a context's steps that have not been dropped: a handle is checked without dereferencing it.
 *
 * Thread-safe: a host drops steps from any thread. */
#pragma once

#include <pthread.h>

/* The first member of a step: its neighbours in the list. */
typedef struct sluice_live_link_s {
  struct sluice_live_link_s *older, *newer;
} sluice_live_link_t;

typedef struct sluice_live_steps_s {
  pthread_mutex_t mutex;
  sluice_live_link_t* first; /* linked through the steps themselves */
} sluice_live_steps_t;

void sluice_live_steps_init(sluice_live_steps_t* live);
void sluice_live_steps_deinit(sluice_live_steps_t* live);
void sluice_live_steps_add(sluice_live_steps_t* live, sluice_live_link_t* step);
void sluice_live_steps_remove(sluice_live_steps_t* live, sluice_live_link_t* step);
/* step: any pointer. A new step may have the address of a dropped one. */
int sluice_live_steps_has(sluice_live_steps_t* live, const void* step);
/* Whether `is_meant` returns true for any step. The callback must not use the list. */
int sluice_live_steps_any(sluice_live_steps_t* live, int (*is_meant)(const void* step, const void* user),
                          const void* user);
