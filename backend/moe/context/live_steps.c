// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/context/live_steps.h"

void sluice_live_steps_init(sluice_live_steps_t* live) {
  pthread_mutex_init(&live->mutex, NULL);
  live->first = NULL;
}

void sluice_live_steps_deinit(sluice_live_steps_t* live) { pthread_mutex_destroy(&live->mutex); }

void sluice_live_steps_add(sluice_live_steps_t* live, sluice_live_link_t* step) {
  pthread_mutex_lock(&live->mutex);
  step->older = live->first;
  step->newer = NULL;
  if (live->first != NULL) live->first->newer = step;
  live->first = step;
  pthread_mutex_unlock(&live->mutex);
}

void sluice_live_steps_remove(sluice_live_steps_t* live, sluice_live_link_t* step) {
  pthread_mutex_lock(&live->mutex);
  if (step->older != NULL) step->older->newer = step->newer;
  if (step->newer != NULL) {
    step->newer->older = step->older;
  } else {
    live->first = step->older;
  }
  pthread_mutex_unlock(&live->mutex);
}

int sluice_live_steps_has(sluice_live_steps_t* live, const void* step) {
  pthread_mutex_lock(&live->mutex);
  const sluice_live_link_t* found = live->first;
  while (found != NULL && (const void*)found != step) found = found->older;
  pthread_mutex_unlock(&live->mutex);
  return found != NULL;
}

int sluice_live_steps_any(sluice_live_steps_t* live, int (*is_meant)(const void* step, const void* user),
                          const void* user) {
  pthread_mutex_lock(&live->mutex);
  const sluice_live_link_t* found = live->first;
  while (found != NULL && !is_meant(found, user)) found = found->older;
  pthread_mutex_unlock(&live->mutex);
  return found != NULL;
}
