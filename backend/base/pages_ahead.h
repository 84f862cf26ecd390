/* Fresh memory that is about to be written whole, but not yet: a thread of its own has the system bring the pages in
 * meanwhile. On a host that takes free memory back the gradients of a first backward are fresh, and waiting for their
 * pages takes longer than the GEMMs that write them; these write last, so most of the wait fits beside what comes
 * before. Afterwards hosts use the memory again, and there is nothing to do. Ranges that are to be measured
 * (pages_measure.h) are measured there too: a first backward does not wait for that either. */
#ifndef SLUICE_BACKEND_BASE_PAGES_AHEAD_H_
#define SLUICE_BACKEND_BASE_PAGES_AHEAD_H_

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "backend/base/pages_measure.h"

/* Of one pass: gradients of so many matrices, from so many bytes on; smaller ones the C library has from its own. */
enum { SLUICE_PAGES_AHEAD_RANGES = 256 };
#define SLUICE_PAGES_AHEAD_LEAST (UINT64_C(256) << 10)

typedef struct sluice_pages_ahead_s {
  uintptr_t begin[SLUICE_PAGES_AHEAD_RANGES], end[SLUICE_PAGES_AHEAD_RANGES]; /* whole pages */
  sluice_pages_range_t advice[SLUICE_PAGES_AHEAD_RANGES];
  int32_t count, num_there; /* ranges noted, and those that were in memory */
  int32_t num_measured;     /* of those noted */
  int32_t is_running;
  atomic_int is_over; /* the thread ends with the piece that it has */
  pthread_t thread;
} sluice_pages_ahead_t;

/* Before anything is added; there is nothing to release. */
void sluice_pages_ahead_init(sluice_pages_ahead_t* ahead);

/* Notes a range, in the order in which ranges will be written, and asks for huge pages where they are faster. 0: left
 * to the caller: it is in memory already, small, more than there is room for, or this process may use one core alone.
 * Where the first few are in memory nobody looks at the others. Before `start`. */
int sluice_pages_ahead_add(sluice_pages_ahead_t* ahead, const void* data, uint64_t bytes);

/* Begins, where something was noted. What the memory holds stays, and others may write it. Never an error: without a
 * thread, or on a system that cannot (Linux before 5.14), pages come as ever. */
void sluice_pages_ahead_start(sluice_pages_ahead_t* ahead);

/* Afterwards the memory may go. Waits for one piece at most. */
void sluice_pages_ahead_stop(sluice_pages_ahead_t* ahead);

#endif /* SLUICE_BACKEND_BASE_PAGES_AHEAD_H_ */
