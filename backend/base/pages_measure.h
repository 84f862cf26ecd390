// SPDX-License-Identifier: Apache-2.0
/* The cost of fresh memory in this process with small and with huge pages: measured as the first ranges are populated,
 * cached for this machine, and queried before later ranges. Never an error, and the contents of memory are unchanged.
 * Any thread. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

typedef enum sluice_pages_next_e {
  SLUICE_PAGES_LEAVE,    /* small pages, populated by the writes */
  SLUICE_PAGES_ASK_HUGE, /* huge pages were faster, or are always requested */
  SLUICE_PAGES_MEASURE   /* a fresh range, half with each kind */
} sluice_pages_next_t;

/* The whole huge pages of a range, and the action for them. */
typedef struct sluice_pages_range_s {
  sluice_pages_next_t next;
  uintptr_t begin, end;
} sluice_pages_range_t;

/* Call for memory that is about to be written. may_measure: the whole range will be written, and no thread writes it
 * yet. A range that is to be measured counts as advised. */
sluice_pages_range_t sluice_pages_next(const void* data, uint64_t bytes, int may_measure);

/* A hint: systems without huge pages ignore it. */
void sluice_pages_ask_huge(uintptr_t begin, uintptr_t end);

/* Populates a range, half with each kind of page, and records the times. Does nothing while another thread measures,
 * because they would disturb each other. is_over: for memory that other threads may write at the same time; pages that
 * they wrote are not counted. Once it is set, populating stops after at most one piece, and nothing is recorded. NULL:
 * no other thread writes. */
void sluice_pages_measure(const sluice_pages_range_t* range, const atomic_int* is_over);

/* Returns whether most of a range of at least a page is in memory already, by samples: then it is not fresh, and
 * writing it does not wait. */
int sluice_pages_are_resident(uintptr_t begin, uintptr_t end);

/* Populates whole pages. Their contents are unchanged, and other threads may write them at the same time. Returns 0 if
 * the system cannot (Linux before 5.14), or is out of memory: pages are then populated as they are written. */
int sluice_pages_populate(uintptr_t begin, uintptr_t end);
