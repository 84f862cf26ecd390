// SPDX-License-Identifier: Apache-2.0
/* Events in the order of their time; events of equal time in the order of insertion. Private to
 * backend/pipeline/simulate. */
#pragma once

#include <stdint.h>

typedef struct sluice_pipeline_event_s {
  double time;
  int64_t number;
  int32_t op;
} sluice_pipeline_event_t;

typedef struct sluice_event_queue_s {
  sluice_pipeline_event_t* heap; /* memory for all events, owned by the caller */
  int32_t count;
  int64_t added;
} sluice_event_queue_t;

static inline int sluice_event_before(const sluice_pipeline_event_t* a, const sluice_pipeline_event_t* b) {
  return a->time < b->time || (a->time <= b->time && a->number < b->number);
}

static inline void sluice_event_swap(sluice_pipeline_event_t* a, sluice_pipeline_event_t* b) {
  sluice_pipeline_event_t kept = *a;
  *a = *b;
  *b = kept;
}

static inline void sluice_event_add(sluice_event_queue_t* queue, double time, int32_t op) {
  int32_t at = queue->count++;
  queue->heap[at] = (sluice_pipeline_event_t){time, queue->added++, op};
  for (; at > 0 && sluice_event_before(&queue->heap[at], &queue->heap[(at - 1) / 2]); at = (at - 1) / 2) {
    sluice_event_swap(&queue->heap[at], &queue->heap[(at - 1) / 2]);
  }
}

/* The queue must not be empty. */
static inline sluice_pipeline_event_t sluice_event_take(sluice_event_queue_t* queue) {
  sluice_pipeline_event_t first = queue->heap[0];
  queue->heap[0] = queue->heap[--queue->count];
  for (int32_t at = 0, least = 0;; at = least) {
    for (int32_t child = 2 * at + 1; child <= 2 * at + 2 && child < queue->count; ++child) {
      if (sluice_event_before(&queue->heap[child], &queue->heap[least])) least = child;
    }
    if (least == at) return first;
    sluice_event_swap(&queue->heap[at], &queue->heap[least]);
  }
}
