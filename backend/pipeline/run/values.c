// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/values.h"

#include <stdlib.h>

/* ---- memory of arriving messages ---- */

static void* allocate(void* user, uint64_t bytes) {
  (void)user;
  return aligned_alloc(SLUICE_ALIGNMENT, sluice_align_up(bytes));
}

/* A closing endpoint frees its arrivals, even those that a host keeps: the block of such an arrival now belongs to the
 * host. */
static void give_up(void* user, void* data, uint64_t bytes) {
  sluice_stage_endpoint_t* endpoint = user;
  if (atomic_load(&endpoint->is_closing)) {
    pthread_mutex_lock(&endpoint->mutex);
    for (sluice_stage_kept_t* kept = endpoint->kept; kept != NULL; kept = kept->next) {
      if ((const char*)kept->data < (char*)data || (const char*)kept->data >= (char*)data + bytes) continue;
      kept->block = data;
      data = NULL;
      break;
    }
    pthread_mutex_unlock(&endpoint->mutex);
  }
  free(data);
}

/* ---- create and destroy ---- */

sluice_stage_endpoint_t* sluice_stage_endpoint_new(sluice_comm_t* comm) {
  sluice_stage_endpoint_t* endpoint = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *endpoint, "pipeline");
  if (endpoint == NULL) return NULL;
  sluice_allocator_init(&endpoint->memory, allocate, give_up, endpoint);
  pthread_mutex_init(&endpoint->mutex, NULL);
  atomic_init(&endpoint->references, 1);
  atomic_init(&endpoint->is_closing, 0);
  sluice_comm_retain(comm);
  endpoint->comm = comm;
  return endpoint;
}

static void leave(sluice_stage_endpoint_t* endpoint) {
  if (atomic_fetch_sub_explicit(&endpoint->references, 1, memory_order_acq_rel) > 1) return;
  pthread_mutex_destroy(&endpoint->mutex);
  sluice_allocator_deinit(&endpoint->memory);
  sluice_free(sluice_process_allocator(), endpoint, sizeof *endpoint);
}

void sluice_stage_endpoint_close(sluice_stage_endpoint_t* endpoint) {
  if (endpoint == NULL) return;
  pthread_mutex_lock(&endpoint->mutex);
  atomic_store(&endpoint->is_closing, 1);
  pthread_mutex_unlock(&endpoint->mutex);
  sluice_messages_close(endpoint->messages);
  endpoint->messages = NULL;
  sluice_comm_release(endpoint->comm);
  leave(endpoint);
}

uint64_t sluice_stage_endpoint_peak(sluice_stage_endpoint_t* endpoint) {
  pthread_mutex_lock(&endpoint->memory.mutex);
  const uint64_t bytes = endpoint->memory.peak_bytes;
  pthread_mutex_unlock(&endpoint->memory.mutex);
  return bytes;
}

/* ---- kept arrivals ---- */

sluice_status_t sluice_stage_keep(sluice_stage_endpoint_t* endpoint, sluice_message_arrival_t* arrival,
                                  const void* data, sluice_stage_kept_t** out_kept) {
  *out_kept = NULL;
  sluice_stage_kept_t* kept = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *kept, "pipeline: kept tensors");
  if (kept == NULL) return sluice_alloc_status();
  atomic_init(&kept->holders, 1);
  kept->endpoint = endpoint;
  kept->arrival = arrival;
  kept->data = data;
  atomic_fetch_add_explicit(&endpoint->references, 1, memory_order_relaxed);
  pthread_mutex_lock(&endpoint->mutex);
  kept->next = endpoint->kept;
  if (kept->next != NULL) kept->next->previous = kept;
  endpoint->kept = kept;
  pthread_mutex_unlock(&endpoint->mutex);
  *out_kept = kept;
  return SLUICE_OK;
}

static void unlink_kept(sluice_stage_kept_t* kept) {
  if (kept->previous != NULL) {
    kept->previous->next = kept->next;
  } else {
    kept->endpoint->kept = kept->next;
  }
  if (kept->next != NULL) kept->next->previous = kept->previous;
}

void sluice_stage_kept_release(sluice_stage_kept_t* kept) {
  if (kept == NULL || atomic_fetch_sub_explicit(&kept->holders, 1, memory_order_acq_rel) > 1) return;
  sluice_stage_endpoint_t* endpoint = kept->endpoint;
  /* Closing cannot begin while the mutex is held: either the endpoint takes the arrival back, or it frees it when it
   * closes, or it has left the block here. */
  pthread_mutex_lock(&endpoint->mutex);
  unlink_kept(kept);
  if (!atomic_load(&endpoint->is_closing)) sluice_messages_release(endpoint->messages, kept->arrival);
  pthread_mutex_unlock(&endpoint->mutex);
  free(kept->block);
  sluice_free(sluice_process_allocator(), kept, sizeof *kept);
  leave(endpoint);
}

/* ---- values ---- */

sluice_status_t sluice_stage_value_give(sluice_stage_value_t* value, const sluice_stage_tensors_t* given,
                                        const char* where, int32_t readers) {
  sluice_stage_packed_t packed;
  SLUICE_TRY(sluice_stage_pack(given, where, &packed));
  value->packed = packed;
  value->view = (sluice_stage_tensors_t){packed.tensors, given->num_tensors, 1, given->word};
  value->bytes = packed.tensor_bytes;
  value->readers = readers;
  return SLUICE_OK;
}

sluice_status_t sluice_stage_value_arrive(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                          const sluice_message_completion_t* completion, const char* where) {
  const sluice_stage_head_t* head = completion->head;
  sluice_tensor_t* tensors;
  sluice_status_t status = sluice_stage_unpack(completion->payload, completion->payload_bytes, head->num_tensors, where,
                                               &tensors, &value->bytes);
  if (status != SLUICE_OK) {
    sluice_messages_release(endpoint->messages, completion->arrival);
    return status;
  }
  value->view = (sluice_stage_tensors_t){tensors, head->num_tensors, 0, head->word};
  value->arrival = completion->arrival;
  value->readers = 1;
  return SLUICE_OK;
}

int sluice_stage_value_drop(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint) {
  if (value->readers == 0) return 0;
  if (value->kept != NULL) {
    sluice_stage_kept_release(value->kept);
  } else if (value->arrival != NULL) {
    sluice_messages_release(endpoint->messages, value->arrival);
  }
  sluice_stage_packed_free(&value->packed);
  *value = (sluice_stage_value_t){.since_ns = value->since_ns};
  return 1;
}

int sluice_stage_value_leave(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint) {
  if (value->readers > 1) {
    --value->readers;
    return 0;
  }
  return sluice_stage_value_drop(value, endpoint);
}

sluice_status_t sluice_stage_value_keep(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                        sluice_stage_kept_t** out_kept) {
  *out_kept = NULL;
  if (value->kept == NULL) {
    SLUICE_TRY(sluice_stage_keep(endpoint, value->arrival, value->view.tensors, &value->kept));
  }
  atomic_fetch_add_explicit(&value->kept->holders, 1, memory_order_relaxed);
  *out_kept = value->kept;
  return SLUICE_OK;
}
