// SPDX-License-Identifier: Apache-2.0
/* Counts the memory that outstanding forwards hold. A host may drop a step and keep its saved buffers, so the bytes of
 * a forward are counted until its saved buffer is freed. (The allocator counts bytes too, but not by purpose.)
 *
 * Thread-safe, because a host frees buffers from any thread. Lines are in process memory, outside any budget. */
#pragma once

#include <pthread.h>

#include "backend/base/alloc.h"

/* The entry of one buffer, or the sum over all buffers. */
typedef struct sluice_ledger_sums_s {
  uint64_t pool;          /* bytes of offloaded rows */
  uint64_t promised;      /* bytes that plans reserve for the forwards, the same on all ranks */
  uint64_t promised_pool; /* the part of `promised` for offloaded rows */
  uint64_t steps;         /* forwards without their backward */
} sluice_ledger_sums_t;

typedef struct sluice_ledger_line_s sluice_ledger_line_t;

typedef struct sluice_ledger_s {
  pthread_mutex_t mutex;
  sluice_ledger_line_t* lines;
  int64_t count, capacity;
  sluice_ledger_sums_t sums;
  uint64_t most_steps; /* at one time, since the last reset */
  uint64_t pool_limit; /* of sums.pool; 0: no limit */
} sluice_ledger_t;

void sluice_ledger_init(sluice_ledger_t* ledger);
void sluice_ledger_deinit(sluice_ledger_t* ledger);

/* Counts `what` until the buffer `data` is removed; a NULL buffer is ignored. owner: for sluice_ledger_has. Errors:
 * OVER_BUDGET past pool_limit, NO_MEMORY; nothing is counted then. */
sluice_status_t sluice_ledger_add(sluice_ledger_t* ledger, const void* data, const void* owner,
                                  const sluice_ledger_sums_t* what);
/* Returns whether any buffer of this owner is counted. */
int sluice_ledger_has(sluice_ledger_t* ledger, const void* owner);
/* Call when an owner is destroyed, because another may get its address. Its buffers stay counted, without an owner. */
void sluice_ledger_disown(sluice_ledger_t* ledger, const void* owner);
/* Counts the buffer's entry permanently, because a captured graph uses the memory, and forgets the buffer's address. */
void sluice_ledger_keep(sluice_ledger_t* ledger, const void* data);
/* Call when a buffer is freed. Buffers that were never added are ignored. */
void sluice_ledger_remove(sluice_ledger_t* ledger, const void* data);
sluice_ledger_sums_t sluice_ledger_sums(sluice_ledger_t* ledger);
/* Returns the maximum of sums.steps since the last reset; reset != 0: resets it to the present number. */
uint64_t sluice_ledger_most_steps(sluice_ledger_t* ledger, int reset);
