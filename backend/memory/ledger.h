// SPDX-License-Identifier: Apache-2.0
/* What outstanding forwards hold, by the buffer that says so: a host may drop a step and keep its saved buffers, so
 * that bytes are counted for as long as the buffer lives. Beside the allocator's sums, which know no purposes.
 *
 * Thread-safe: a host frees buffers from any thread. Lines lie in process memory, outside any budget. */
#ifndef SLUICE_BACKEND_MEMORY_LEDGER_H_
#define SLUICE_BACKEND_MEMORY_LEDGER_H_

#include <pthread.h>

#include "backend/base/alloc.h"

/* Of one buffer, or of all. */
typedef struct sluice_ledger_sums_s {
  uint64_t pool;          /* bytes of offloaded rows */
  uint64_t promised;      /* bytes that plans set aside for the forwards, alike on all ranks */
  uint64_t promised_pool; /* of those, of offloaded rows */
  uint64_t steps;         /* forwards without their backward */
} sluice_ledger_sums_t;

typedef struct sluice_ledger_line_s sluice_ledger_line_t;

typedef struct sluice_ledger_s {
  pthread_mutex_t mutex;
  sluice_ledger_line_t* lines;
  int64_t count, capacity;
  sluice_ledger_sums_t sums;
  uint64_t most_steps; /* at one time, since the last reset */
  uint64_t pool_limit; /* sums.pool may not pass it; 0: no limit */
} sluice_ledger_t;

void sluice_ledger_init(sluice_ledger_t* ledger);
void sluice_ledger_deinit(sluice_ledger_t* ledger);

/* Counts `what` for as long as the buffer `data` lives; nothing for NULL. owner: whose it is, for sluice_ledger_has.
 * Errors: OVER_BUDGET past the limit, with nothing counted; NO_MEMORY. */
sluice_status_t sluice_ledger_add(sluice_ledger_t* ledger, const void* data, const void* owner,
                                  const sluice_ledger_sums_t* what);
/* Whether any buffer of this owner lives. */
int sluice_ledger_has(sluice_ledger_t* ledger, const void* owner);
/* The owner is gone, and another may come to lie at its address: its buffers stay counted, as nobody's. */
void sluice_ledger_disown(sluice_ledger_t* ledger, const void* owner);
/* The buffer's address may serve another one, but what it took stays counted for good: a graph uses it. */
void sluice_ledger_keep(sluice_ledger_t* ledger, const void* data);
/* The buffer is gone; one that was never added is none of the ledger's business. */
void sluice_ledger_remove(sluice_ledger_t* ledger, const void* data);
sluice_ledger_sums_t sluice_ledger_sums(sluice_ledger_t* ledger);
/* The most forwards at one time since the last reset; reset != 0: from now on that of those there are now. */
uint64_t sluice_ledger_most_steps(sluice_ledger_t* ledger, int reset);

#endif /* SLUICE_BACKEND_MEMORY_LEDGER_H_ */
