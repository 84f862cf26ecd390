// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages_prefault.h"

#include <signal.h>
#include <unistd.h>

#include "backend/base/pages_rates.h"
#include "backend/base/processors.h"

/* Stopping waits for one piece: some milliseconds on a slow host. */
static const uintptr_t PIECE = (uintptr_t)4 << 20;
/* After this many ranges in memory and none fresh, the pass counts as a steady-state one and checks no more, because
 * each check is a system call. */
enum { SETTLED = 8 };

void sluice_pages_prefault_init(sluice_pages_prefault_t* ahead) {
  ahead->count = ahead->num_there = ahead->num_measured = 0;
  ahead->is_running = 0;
  atomic_init(&ahead->is_over, 0);
}

/* Only a few ranges are measured per pass, however many are due: they give similar results. */
static void advise(sluice_pages_prefault_t* ahead, const void* data, uint64_t bytes) {
  sluice_pages_range_t* advice = &ahead->advice[ahead->count];
  *advice = sluice_pages_next(data, bytes, ahead->num_measured < SLUICE_PAGES_FIRST);
  ahead->num_measured += advice->next == SLUICE_PAGES_MEASURE;
  if (advice->next == SLUICE_PAGES_ASK_HUGE) sluice_pages_ask_huge(advice->begin, advice->end);
}

int sluice_pages_prefault_add(sluice_pages_prefault_t* ahead, const void* data, uint64_t bytes) {
  if (data == NULL || bytes < SLUICE_PAGES_PREFAULT_LEAST || ahead->count == SLUICE_PAGES_PREFAULT_RANGES) return 0;
  if (ahead->count == 0 && (ahead->num_there == SETTLED || sluice_processors_count() < 2)) return 0;
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t begin = ((uintptr_t)data + page - 1) & ~(page - 1);
  const uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(page - 1);
  if (sluice_pages_are_resident(begin, end)) {
    ++ahead->num_there;
    return 0;
  }
  advise(ahead, data, bytes);
  ahead->begin[ahead->count] = begin;
  ahead->end[ahead->count++] = end;
  return 1;
}

static void* run(void* data) {
  sluice_pages_prefault_t* ahead = data;
  for (int32_t i = 0; i < ahead->count; ++i) {
    if (ahead->advice[i].next == SLUICE_PAGES_MEASURE) sluice_pages_measure(&ahead->advice[i], &ahead->is_over);
    for (uintptr_t at = ahead->begin[i]; at < ahead->end[i]; at += PIECE) {
      const uintptr_t next = ahead->end[i] - at < PIECE ? ahead->end[i] : at + PIECE;
      if (atomic_load(&ahead->is_over) || !sluice_pages_populate(at, next)) return NULL;
    }
  }
  return NULL;
}

void sluice_pages_prefault_start(sluice_pages_prefault_t* ahead) {
  if (ahead->count == 0) return;
  sigset_t all, before;
  sigfillset(&all); /* the host's signal handlers run on the host's threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  ahead->is_running = pthread_create(&ahead->thread, NULL, run, ahead) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void sluice_pages_prefault_stop(sluice_pages_prefault_t* ahead) {
  if (!ahead->is_running) return;
  atomic_store(&ahead->is_over, 1);
  pthread_join(ahead->thread, NULL);
  ahead->is_running = 0;
}
