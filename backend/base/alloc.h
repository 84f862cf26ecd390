/* The allocator: every byte Sluice asks for on a rank goes through one of these, so that `peak_bytes` is the truth.
 *
 * Blocks are 64-byte aligned (a recomputed product then sees the same alignment and repeats the same bits). Accounting
 * is exact: the bytes asked for, rounded up to 64. Thread-safe. The host's functions are called with nothing locked:
 * they may collect garbage, which frees what Sluice gave. */
#ifndef SLUICE_BACKEND_BASE_ALLOC_H_
#define SLUICE_BACKEND_BASE_ALLOC_H_

#include <pthread.h>

#include "backend/base/status.h"

#define SLUICE_ALIGNMENT 64u

typedef struct sluice_allocator_s {
  sluice_allocate_fn_t allocate; /* NULL: aligned_alloc */
  sluice_free_fn_t release;
  void* user;
  pthread_mutex_t mutex;
  uint64_t current_bytes;
  uint64_t asked_bytes; /* of the calls of `allocate` that have not returned: they count for the limit */
  uint64_t peak_bytes;
  uint64_t limit;     /* current_bytes may not pass it; 0: no limit */
  uint64_t num_live;  /* blocks not yet freed */
  int64_t fail_after; /* tests: the allocation with this number fails; < 0 never */
  /* Frees what nobody uses, asked once before anything is refused for the limit; NULL: there is nothing. */
  void (*reclaim)(void* user);
  void* reclaim_user;
} sluice_allocator_t;

void sluice_allocator_init(sluice_allocator_t* allocator, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                           void* user);
void sluice_allocator_deinit(sluice_allocator_t* allocator);

/* bytes rounded up to the alignment; saturates instead of wrapping. */
uint64_t sluice_align_up(uint64_t bytes);

/* NULL records NO_MEMORY, or OVER_BUDGET past the limit, with `what` and the bytes. Zero bytes give a valid block. */
void* sluice_alloc(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
/* Why the last one on this thread gave NULL: NO_MEMORY or OVER_BUDGET. */
sluice_status_t sluice_alloc_status(void);
#ifdef __clang_analyzer__ /* never OK, which it cannot see from another file */
#define sluice_alloc_status() ((void)(sluice_alloc_status)(), SLUICE_E_NO_MEMORY)
#endif
/* Whether a call failed for want of memory alone: what it worked on is as it was. */
static inline int sluice_is_out_of_memory(sluice_status_t status) {
  return status == SLUICE_E_NO_MEMORY || status == SLUICE_E_OVER_BUDGET;
}
void* sluice_alloc_zeroed(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
/* Accepts NULL; bytes as given to sluice_alloc. */
void sluice_free(sluice_allocator_t* allocator, void* data, uint64_t bytes);
/* Counts bytes that the host allocated on our behalf (saved buffers). OVER_BUDGET past the limit: nothing is counted.
 */
sluice_status_t sluice_allocator_charge(sluice_allocator_t* allocator, uint64_t bytes, const char* what);
void sluice_allocator_discharge(sluice_allocator_t* allocator, uint64_t bytes);
/* Starts a new peak at the current bytes. */
void sluice_allocator_reset_peak(sluice_allocator_t* allocator);

/* The process-wide allocator for handles and small records that outlive a context. */
sluice_allocator_t* sluice_process_allocator(void);

#endif /* SLUICE_BACKEND_BASE_ALLOC_H_ */
