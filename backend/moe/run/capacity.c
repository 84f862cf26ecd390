// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/capacity.h"

#include <string.h>

#include "backend/moe/context/row_memory.h"
#include "backend/moe/handshake/handshake.h"
#include "backend/moe/routing/routes.h"

/* ---- capture ---- */

static int32_t kind_of(const sluice_capacity_t* capacity, uint64_t comm_hash) {
  for (int32_t i = 0; i < capacity->num_kinds; ++i) {
    if (capacity->kinds[i] == comm_hash) return i;
  }
  return -1;
}

static void fix_memory(sluice_pass_memory_t* memory, int32_t is_fixed) {
  memory->slots.is_fixed = memory->routes.is_fixed = is_fixed;
}

sluice_status_t sluice_capacity_check_capture(const sluice_pass_t* pass) {
  if (!pass->captured) return SLUICE_OK;
  const sluice_capacity_t* capacity = pass->moe->capacity;
  const sluice_comm_t* comm = pass->context->comm;
  if (pass->context->world_size > 1 && !comm->vtable->is_capturable) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: the stream is being captured into a graph, but exchanges of a %s communicator "
                       "synchronize on the host: use an nccl communicator",
                       pass->moe->shape.config.layer_id, comm->name);
  }
  const sluice_template_t* schedule = pass->schedule; /* NULL: the forward has no plan yet */
  int32_t kind = schedule != NULL ? kind_of(capacity, schedule->comm_hash) : -1;
  if (kind < 0 || !capacity->has_run[kind] || !capacity->is_cleared) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "layer %d: the stream is being captured into a graph, but this %s has not run outside of a "
                       "capture yet: run the same call once before the capture",
                       pass->moe->shape.config.layer_id,
                       schedule == NULL || schedule->spec.direction == SLUICE_FORWARD ? "forward" : "backward");
  }
  fix_memory(pass->memory, 1);
  return SLUICE_OK;
}

void sluice_capacity_close(const sluice_pass_t* pass, sluice_status_t status) {
  sluice_context_t* context = pass->context;
  if (pass->captured) {
    if (status == SLUICE_OK) ++context->num_captured;
    if (context->num_captured == 0) fix_memory(pass->memory, 0);
    return;
  }
  if (status != SLUICE_OK || pass->schedule == NULL) return;
  int32_t kind = kind_of(pass->moe->capacity, pass->schedule->comm_hash);
  if (kind >= 0) pass->moe->capacity->has_run[kind] = 1;
}

/* ---- binding ---- */

static sluice_status_t clear(const sluice_moe_t* moe, sluice_stream_t stream) {
  return moe->context->rows->fill(moe->context, stream, moe->capacity->drop_counters, 0, SLUICE_DROP_COUNTERS_BYTES);
}

sluice_status_t sluice_capacity_bind(sluice_pass_t* pass, const sluice_tensor_t* expert_ids, int32_t num_chunks) {
  sluice_moe_t* moe = pass->moe;
  if (!moe->capacity->is_cleared) SLUICE_TRY(clear(moe, pass->stream));
  moe->capacity->is_cleared = 1;
  return moe->strategies->routes->order_capacity(moe, pass->stream, expert_ids, num_chunks,
                                                 moe->capacity->drop_counters, &pass->binding);
}

/* ---- handshake ---- */

int sluice_capacity_is_agreed(const sluice_moe_t* moe, const sluice_template_t* schedule) {
  const sluice_capacity_t* capacity = moe->capacity;
  if (schedule == NULL) return capacity->num_kinds > 0;
  return kind_of(capacity, schedule->comm_hash) >= 0;
}

sluice_status_t sluice_capacity_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                      sluice_handshake_t* out_handshake) {
  const int refuses = proposal->local_status != SLUICE_OK;
  const int is_known = refuses || pass->schedule != NULL; /* else there is no plan yet */
  if (is_known && sluice_capacity_is_agreed(pass->moe, refuses ? NULL : pass->schedule)) {
    *out_handshake = sluice_handshake_alone(proposal);
    out_handshake->wants_wgrad = 1; /* without a header this rank cannot know that no rank wants any */
    if (!refuses && pass->context->comm != NULL) ++pass->context->comm->call_number;
    return proposal->local_status;
  }
  SLUICE_TRY(sluice_handshake(pass->moe, proposal, NULL, out_handshake));
  out_handshake->wants_wgrad = 1;
  if (pass->schedule != NULL) sluice_capacity_note_agreed(pass);
  return SLUICE_OK;
}

void sluice_capacity_note_agreed(const sluice_pass_t* pass) {
  sluice_capacity_t* capacity = pass->moe->capacity;
  const uint64_t kind = pass->schedule->comm_hash;
  if (capacity->num_kinds == SLUICE_MAX_KINDS || kind_of(capacity, kind) >= 0) return;
  capacity->kinds[capacity->num_kinds] = kind;
  capacity->has_run[capacity->num_kinds++] = 0;
}

sluice_status_t sluice_capacity_fail(const sluice_pass_t* pass, sluice_status_t status) {
  if (pass->captured || !pass->has_begun) return status; /* this rank has sent no row */
  return sluice_fail_pass(pass->context, status, 0);
}

sluice_status_t sluice_capacity_tell_failure(const sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  char text[256];
  if (!sluice_capacity_is_agreed(moe, NULL) || context->pending_failure == SLUICE_OK) return SLUICE_OK;
  sluice_status_t status = sluice_take_refusal(context, SLUICE_OK, text, sizeof text);
  return sluice_fail_pass(context, status, 0);
}

/* ---- the drop counters ---- */

sluice_status_t sluice_capacity_take_drop_counters(sluice_moe_t* moe, sluice_stream_t stream,
                                                   int64_t* out_drop_counters) {
  sluice_context_t* context = moe->context;
  int32_t captured = 0;
  memset(out_drop_counters, 0, SLUICE_DROP_COUNTERS_BYTES);
  if (!moe->capacity->is_cleared) return SLUICE_OK;
  SLUICE_TRY(context->rows->open(context, stream, &captured)); /* read refuses a captured stream */
  SLUICE_TRY(context->rows->read(context, stream, moe->capacity->drop_counters, out_drop_counters,
                                 SLUICE_DROP_COUNTERS_BYTES));
  return clear(moe, stream);
}
