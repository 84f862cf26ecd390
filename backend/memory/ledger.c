// SPDX-License-Identifier: Apache-2.0
#include "backend/memory/ledger.h"

#include <string.h>

struct sluice_ledger_line_s {
  const void* data;
  const void* owner; /* NULL after sluice_ledger_disown */
  sluice_ledger_sums_t what;
};

void sluice_ledger_init(sluice_ledger_t* ledger) {
  memset(ledger, 0, sizeof *ledger);
  pthread_mutex_init(&ledger->mutex, NULL);
}

void sluice_ledger_deinit(sluice_ledger_t* ledger) {
  sluice_free(sluice_process_allocator(), ledger->lines, (uint64_t)ledger->capacity * sizeof *ledger->lines);
  pthread_mutex_destroy(&ledger->mutex);
}

static sluice_status_t make_room(sluice_ledger_t* ledger) {
  if (ledger->count < ledger->capacity) return SLUICE_OK;
  int64_t capacity = ledger->capacity > 0 ? 2 * ledger->capacity : 16;
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_ledger_line_t* lines = sluice_alloc(allocator, (uint64_t)capacity * sizeof *lines, "ledger of saved buffers");
  if (lines == NULL) return sluice_alloc_status();
  if (ledger->count > 0) memcpy(lines, ledger->lines, (size_t)ledger->count * sizeof *lines);
  sluice_free(allocator, ledger->lines, (uint64_t)ledger->capacity * sizeof *lines);
  ledger->lines = lines;
  ledger->capacity = capacity;
  return SLUICE_OK;
}

static sluice_status_t add(sluice_ledger_t* ledger, const void* data, const void* owner,
                           const sluice_ledger_sums_t* what) {
  sluice_ledger_sums_t* sums = &ledger->sums;
  if (ledger->pool_limit > 0 && what->pool > 0 && sums->pool + what->pool > ledger->pool_limit) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "offloaded rows of outstanding forwards take %llu bytes, and %llu more would exceed the "
                       "host_memory_budget of %llu: run backwards or drop steps first, or raise the budget",
                       (unsigned long long)sums->pool, (unsigned long long)what->pool,
                       (unsigned long long)ledger->pool_limit);
  }
  SLUICE_TRY(make_room(ledger));
  ledger->lines[ledger->count++] = (sluice_ledger_line_t){data, owner, *what};
  sums->pool += what->pool;
  sums->promised += what->promised;
  sums->promised_pool += what->promised_pool;
  sums->steps += what->steps;
  if (sums->steps > ledger->most_steps) ledger->most_steps = sums->steps;
  return SLUICE_OK;
}

sluice_status_t sluice_ledger_add(sluice_ledger_t* ledger, const void* data, const void* owner,
                                  const sluice_ledger_sums_t* what) {
  if (data == NULL) return SLUICE_OK;
  pthread_mutex_lock(&ledger->mutex);
  sluice_status_t status = add(ledger, data, owner, what);
  pthread_mutex_unlock(&ledger->mutex);
  return status;
}

int sluice_ledger_has(sluice_ledger_t* ledger, const void* owner) {
  int found = 0;
  pthread_mutex_lock(&ledger->mutex);
  for (int64_t i = 0; i < ledger->count && !found; ++i) found = ledger->lines[i].owner == owner;
  pthread_mutex_unlock(&ledger->mutex);
  return found;
}

void sluice_ledger_disown(sluice_ledger_t* ledger, const void* owner) {
  pthread_mutex_lock(&ledger->mutex);
  for (int64_t i = 0; i < ledger->count; ++i) {
    if (ledger->lines[i].owner == owner) ledger->lines[i].owner = NULL;
  }
  pthread_mutex_unlock(&ledger->mutex);
}

void sluice_ledger_keep(sluice_ledger_t* ledger, const void* data) {
  pthread_mutex_lock(&ledger->mutex);
  for (int64_t i = ledger->count; i-- > 0 && data != NULL;) {
    if (ledger->lines[i].data != data) continue;
    ledger->lines[i] = ledger->lines[--ledger->count];
    break;
  }
  pthread_mutex_unlock(&ledger->mutex);
}

void sluice_ledger_remove(sluice_ledger_t* ledger, const void* data) {
  pthread_mutex_lock(&ledger->mutex);
  for (int64_t i = ledger->count; i-- > 0;) {
    if (ledger->lines[i].data != data) continue;
    const sluice_ledger_sums_t* what = &ledger->lines[i].what;
    ledger->sums.pool -= what->pool;
    ledger->sums.promised -= what->promised;
    ledger->sums.promised_pool -= what->promised_pool;
    ledger->sums.steps -= what->steps;
    ledger->lines[i] = ledger->lines[--ledger->count];
    break;
  }
  pthread_mutex_unlock(&ledger->mutex);
}

sluice_ledger_sums_t sluice_ledger_sums(sluice_ledger_t* ledger) {
  pthread_mutex_lock(&ledger->mutex);
  sluice_ledger_sums_t sums = ledger->sums;
  pthread_mutex_unlock(&ledger->mutex);
  return sums;
}

uint64_t sluice_ledger_most_steps(sluice_ledger_t* ledger, int reset) {
  pthread_mutex_lock(&ledger->mutex);
  const uint64_t most = ledger->most_steps;
  if (reset) ledger->most_steps = ledger->sums.steps;
  pthread_mutex_unlock(&ledger->mutex);
  return most;
}
