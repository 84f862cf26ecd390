// SPDX-License-Identifier: Apache-2.0
/* The steps of a context that nobody has dropped yet: whether a handle is still one is known without looking at what it
 * points to.
 *
 * Thread-safe: a host drops steps from any thread. */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_LIVE_STEPS_H_
#define SLUICE_BACKEND_MOE_CONTEXT_LIVE_STEPS_H_

#include <pthread.h>

/* What a step begins with: its neighbours in the list. */
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
/* step: any pointer to a step. One that was dropped may be there again, as another step at the same address. */
int sluice_live_steps_has(sluice_live_steps_t* live, const void* step);
/* Whether `is_meant` says yes of any. It must not call the list. */
int sluice_live_steps_any(sluice_live_steps_t* live, int (*is_meant)(const void* step, const void* user),
                          const void* user);

#endif /* SLUICE_BACKEND_MOE_CONTEXT_LIVE_STEPS_H_ */
