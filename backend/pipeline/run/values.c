// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/values.h"

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
