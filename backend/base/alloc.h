// SPDX-License-Identifier: Apache-2.0
/* The allocator. All memory that Sluice requests on a rank is allocated by one of these, so `peak_bytes` is exact.
 *
 * Blocks are 64-byte aligned (a recomputed product then has the same alignment and the same bits). Accounting uses the
 * requested bytes rounded up to 64. Thread-safe. The host's functions are called without a lock, because they may run a
 * garbage collection that frees Sluice's memory. */
#pragma once

#include <pthread.h>

#include "backend/base/status.h"

#define SLUICE_ALIGNMENT 64u

typedef struct sluice_allocator_s {
  sluice_allocate_fn_t allocate; /* NULL: aligned_alloc */
  sluice_free_fn_t release;
  void* user;
  pthread_mutex_t mutex;
  uint64_t current_bytes;
  uint64_t asked_bytes; /* of calls of `allocate` in progress, which count towards the limit */
  uint64_t peak_bytes;
  uint64_t limit;     /* current_bytes may not exceed it; 0: no limit */
  uint64_t num_live;  /* blocks not yet freed */
  int64_t fail_after; /* tests: the allocation with this number fails; < 0: none */
  /* Frees unused memory; called once before an allocation fails because of the limit. NULL: none. */
  void (*reclaim)(void* user);
  void* reclaim_user;
} sluice_allocator_t;

void sluice_allocator_init(sluice_allocator_t* allocator, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                           void* user);
void sluice_allocator_deinit(sluice_allocator_t* allocator);

/* Returns bytes rounded up to the alignment; saturates instead of wrapping. */
uint64_t sluice_align_up(uint64_t bytes);

/* Allocates a block, or returns NULL and records NO_MEMORY, or OVER_BUDGET beyond the limit, with `what` and the bytes.
 * Zero bytes give a valid block. */
void* sluice_alloc(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
/* Returns the reason for the last NULL on this thread: NO_MEMORY or OVER_BUDGET. */
sluice_status_t sluice_alloc_status(void);
#ifdef __clang_analyzer__ /* never OK, which the analyzer cannot see from another file */
#define sluice_alloc_status() ((void)(sluice_alloc_status)(), SLUICE_E_NO_MEMORY)
#endif
/* Returns whether a call failed only for lack of memory: its object is unchanged. */
static inline int sluice_is_out_of_memory(sluice_status_t status) {
  return status == SLUICE_E_NO_MEMORY || status == SLUICE_E_OVER_BUDGET;
}
void* sluice_alloc_zeroed(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
/* Accepts NULL; bytes as given to sluice_alloc. */
void sluice_free(sluice_allocator_t* allocator, void* data, uint64_t bytes);
/* Counts bytes that the host allocated for Sluice (saved buffers). OVER_BUDGET beyond the limit: nothing is counted. */
sluice_status_t sluice_allocator_charge(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
void sluice_allocator_discharge(sluice_allocator_t* allocator, uint64_t bytes);
/* Starts a new peak at the current bytes. */
void sluice_allocator_reset_peak(sluice_allocator_t* allocator);

/* Returns the process-wide allocator for handles and small records that outlive a context. */
sluice_allocator_t* sluice_process_allocator(void);
