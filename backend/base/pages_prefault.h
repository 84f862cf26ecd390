// SPDX-License-Identifier: Apache-2.0
/* Fresh memory that will be written completely, but later: a thread populates its pages in the background. On a host
 * that reclaims free memory, the gradients of a first backward are fresh, and waiting for their pages takes longer than
 * the GEMMs that write them; these GEMMs come last, so most of the wait overlaps the earlier work. Afterwards hosts
 * reuse the memory, and there is nothing to do. Ranges that are due for a measurement (pages_measure.h) are measured on
 * this thread too, so that a first backward does not wait for that either. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "backend/base/pages_measure.h"

/* Limits per pass: the number of gradient matrices, and their smallest size; the C library allocates smaller ones from
 * its own memory. */
enum { SLUICE_PAGES_PREFAULT_RANGES = 256 };
#define SLUICE_PAGES_PREFAULT_LEAST (UINT64_C(256) << 10)

typedef struct sluice_pages_prefault_s {
  uintptr_t begin[SLUICE_PAGES_PREFAULT_RANGES], end[SLUICE_PAGES_PREFAULT_RANGES]; /* whole pages */
  sluice_pages_range_t advice[SLUICE_PAGES_PREFAULT_RANGES];
  int32_t count, num_there; /* added ranges, and those that were in memory */
  int32_t num_measured;     /* among the added ones */
  int32_t is_running;
  atomic_int is_over; /* the thread ends after its current piece */
  pthread_t thread;
} sluice_pages_prefault_t;

/* Call before anything is added; there is nothing to release. */
void sluice_pages_prefault_init(sluice_pages_prefault_t* ahead);

/* Adds a range, in the order in which ranges will be written, and advises huge pages if they are faster. Returns 0 if
 * it is left to the caller: it is in memory already, small, beyond the capacity, or this process has only one core. If
 * the first few are in memory, the others are not checked. Call before `start`. */
int sluice_pages_prefault_add(sluice_pages_prefault_t* ahead, const void* data, uint64_t bytes);

/* Starts the thread if ranges were added. The contents of the memory are unchanged, and other threads may write it.
 * Never an error: without a thread, or on a system without support (Linux before 5.14), pages are populated on first
 * access. */
void sluice_pages_prefault_start(sluice_pages_prefault_t* ahead);

/* After this call the memory may be freed. Waits for one piece at most. */
void sluice_pages_prefault_stop(sluice_pages_prefault_t* ahead);
