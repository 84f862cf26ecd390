// SPDX-License-Identifier: Apache-2.0
#include "backend/base/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/pages.h"

void sluice_allocator_init(sluice_allocator_t* allocator, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                           void* user) {
  memset(allocator, 0, sizeof *allocator);
  allocator->allocate = allocate;
  allocator->release = release;
  allocator->user = user;
  allocator->fail_after = -1;
  pthread_mutex_init(&allocator->mutex, NULL);
}

void sluice_allocator_deinit(sluice_allocator_t* allocator) { pthread_mutex_destroy(&allocator->mutex); }

uint64_t sluice_align_up(uint64_t bytes) {
  if (bytes > UINT64_MAX - SLUICE_ALIGNMENT) return UINT64_MAX & ~(uint64_t)(SLUICE_ALIGNMENT - 1);
  return (bytes + SLUICE_ALIGNMENT - 1) & ~(uint64_t)(SLUICE_ALIGNMENT - 1);
}

static void account(sluice_allocator_t* allocator, uint64_t bytes) {
  allocator->current_bytes += bytes;
  if (allocator->current_bytes > allocator->peak_bytes) allocator->peak_bytes = allocator->current_bytes;
}

/* Returns 1 if a test makes this allocation fail. */
static int planned_failure(sluice_allocator_t* allocator) {
  if (allocator->fail_after < 0) return 0;
  return allocator->fail_after-- == 0;
}

static int passes_limit(const sluice_allocator_t* allocator, uint64_t bytes) {
  const uint64_t taken = allocator->current_bytes + allocator->asked_bytes;
  return allocator->limit != 0 && (bytes > allocator->limit || taken > allocator->limit - bytes);
}

/* Call with the mutex held; it is released while `reclaim` frees memory. */
static int stays_past_limit(sluice_allocator_t* allocator, uint64_t bytes) {
  if (!passes_limit(allocator, bytes)) return 0;
  if (allocator->reclaim == NULL) return 1;
  pthread_mutex_unlock(&allocator->mutex);
  allocator->reclaim(allocator->reclaim_user);
  pthread_mutex_lock(&allocator->mutex);
  return passes_limit(allocator, bytes);
}

static sluice_status_t fail_over_limit(const char* what, uint64_t bytes, uint64_t current, uint64_t limit) {
  return SLUICE_FAIL(SLUICE_E_OVER_BUDGET, "%s: %llu bytes more would exceed the memory budget of %llu (%llu in use)",
                     what, (unsigned long long)bytes, (unsigned long long)limit, (unsigned long long)current);
}

void* sluice_alloc(sluice_allocator_t* allocator, uint64_t bytes, const char* what) {
  uint64_t rounded = sluice_align_up(bytes == 0 ? 1 : bytes);
  void* data = NULL;
  pthread_mutex_lock(&allocator->mutex);
  int over = stays_past_limit(allocator, rounded);
  int is_asked = !over && !planned_failure(allocator);
  if (is_asked) {
    allocator->asked_bytes += rounded;
    pthread_mutex_unlock(&allocator->mutex);
    data = allocator->allocate != NULL ? allocator->allocate(allocator->user, rounded)
                                       : aligned_alloc(SLUICE_ALIGNMENT, rounded);
    if (data != NULL && allocator->allocate == NULL) sluice_pages_advise_room(data, rounded);
    pthread_mutex_lock(&allocator->mutex);
    allocator->asked_bytes -= rounded;
  }
  if (data != NULL) {
    account(allocator, rounded);
    ++allocator->num_live;
  }
  uint64_t current = allocator->current_bytes;
  pthread_mutex_unlock(&allocator->mutex);
  if (over) {
    (void)fail_over_limit(what, rounded, current, allocator->limit);
  } else if (data == NULL) {
    (void)SLUICE_FAIL(SLUICE_E_NO_MEMORY, "%s: %llu bytes refused by the allocator (%llu bytes in use by Sluice)", what,
                      (unsigned long long)rounded, (unsigned long long)current);
  }
  return data;
}

#undef sluice_alloc_status
sluice_status_t sluice_alloc_status(void) {
  sluice_error_info_t info;
  sluice_error_capture(&info);
  return info.status == SLUICE_E_OVER_BUDGET ? SLUICE_E_OVER_BUDGET : SLUICE_E_NO_MEMORY;
}

void* sluice_alloc_zeroed(sluice_allocator_t* allocator, uint64_t bytes, const char* what) {
  void* data = sluice_alloc(allocator, bytes, what);
  if (data != NULL) memset(data, 0, bytes == 0 ? 1 : bytes);
  return data;
}

void sluice_free(sluice_allocator_t* allocator, void* data, uint64_t bytes) {
  if (data == NULL) return;
  uint64_t rounded = sluice_align_up(bytes == 0 ? 1 : bytes);
  if (allocator->allocate != NULL) {
    if (allocator->release != NULL) allocator->release(allocator->user, data, rounded);
  } else {
    free(data);
  }
  pthread_mutex_lock(&allocator->mutex);
  allocator->current_bytes -= rounded;
  --allocator->num_live;
  pthread_mutex_unlock(&allocator->mutex);
}

sluice_status_t sluice_allocator_charge(sluice_allocator_t* allocator, uint64_t bytes, const char* what) {
  pthread_mutex_lock(&allocator->mutex);
  int over = stays_past_limit(allocator, bytes);
  if (!over) account(allocator, bytes);
  uint64_t current = allocator->current_bytes;
  pthread_mutex_unlock(&allocator->mutex);
  return over ? fail_over_limit(what, bytes, current, allocator->limit) : SLUICE_OK;
}

void sluice_allocator_discharge(sluice_allocator_t* allocator, uint64_t bytes) {
  pthread_mutex_lock(&allocator->mutex);
  allocator->current_bytes -= bytes;
  pthread_mutex_unlock(&allocator->mutex);
}

void sluice_allocator_reset_peak(sluice_allocator_t* allocator) {
  pthread_mutex_lock(&allocator->mutex);
  allocator->peak_bytes = allocator->current_bytes;
  pthread_mutex_unlock(&allocator->mutex);
}

static sluice_allocator_t process_allocator = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fail_after = -1};

/* Another thread may hold the mutex during a fork; the child has only the forking thread. */
static void reset_in_child(void) { pthread_mutex_init(&process_allocator.mutex, NULL); }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, reset_in_child); }

sluice_allocator_t* sluice_process_allocator(void) { return &process_allocator; }
