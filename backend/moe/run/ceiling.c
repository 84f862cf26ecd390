#include "backend/moe/run/ceiling.h"

#include <string.h>

#include "backend/moe/context/row_memory.h"
#include "backend/moe/handshake/failure.h"
#include "backend/moe/routing/routes.h"

/* ---- capture ---- */

static int32_t kind_of(const sluice_ceiling_t* ceiling, uint64_t comm_hash) {
  for (int32_t i = 0; i < ceiling->num_kinds; ++i) {
    if (ceiling->kinds[i] == comm_hash) return i;
  }
  return -1;
}

static void fix_memory(sluice_pass_memory_t* memory, int32_t is_fixed) {
  memory->slots.is_fixed = memory->routes.is_fixed = is_fixed;
}

sluice_status_t sluice_ceiling_check_capture(const sluice_pass_t* pass) {
  if (!pass->captured) return SLUICE_OK;
  const sluice_ceiling_t* ceiling = pass->moe->ceiling;
  const sluice_comm_t* comm = pass->context->comm;
  if (pass->context->world_size > 1 && !comm->vtable->is_capturable) {
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED,
        "layer %d: the stream is being captured into a graph, and exchanges of a %s communicator meet on "
        "the host: use an nccl one",
        pass->moe->shape.config.layer_id, comm->name);
  }
  const sluice_template_t* schedule = pass->schedule; /* NULL: a forward that has no plan yet */
  int32_t kind = schedule != NULL ? kind_of(ceiling, schedule->comm_hash) : -1;
  if (kind < 0 || !ceiling->has_run[kind] || !ceiling->is_cleared) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "layer %d: the stream is being captured into a graph, and no such %s has run outside a capture "
                       "yet: make the same call once before",
                       pass->moe->shape.config.layer_id,
                       schedule == NULL || schedule->spec.direction == SLUICE_FORWARD ? "forward" : "backward");
  }
  fix_memory(pass->memory, 1);
  return SLUICE_OK;
}

void sluice_ceiling_close(const sluice_pass_t* pass, sluice_status_t status) {
  sluice_context_t* context = pass->context;
  if (pass->captured) {
    if (status == SLUICE_OK) ++context->num_captured;
    if (context->num_captured == 0) fix_memory(pass->memory, 0);
    return;
  }
  if (status != SLUICE_OK || pass->schedule == NULL) return;
  int32_t kind = kind_of(pass->moe->ceiling, pass->schedule->comm_hash);
  if (kind >= 0) pass->moe->ceiling->has_run[kind] = 1;
}

/* ---- binding ---- */

static sluice_status_t clear(const sluice_moe_t* moe, sluice_stream_t stream) {
  return moe->context->rows->fill(moe->context, stream, moe->ceiling->tally, 0, SLUICE_TALLY_BYTES);
}

sluice_status_t sluice_ceiling_bind(sluice_pass_t* pass, const sluice_tensor_t* expert_ids, int32_t num_chunks) {
  sluice_moe_t* moe = pass->moe;
  if (!moe->ceiling->is_cleared) SLUICE_TRY(clear(moe, pass->stream));
  moe->ceiling->is_cleared = 1;
  return moe->strategies->routes->order_capacity(moe, pass->stream, expert_ids, num_chunks, moe->ceiling->tally,
                                                 &pass->binding);
}

/* ---- agreement ---- */

int sluice_ceiling_is_agreed(const sluice_moe_t* moe, const sluice_template_t* schedule) {
  const sluice_ceiling_t* ceiling = moe->ceiling;
  if (schedule == NULL) return ceiling->num_kinds > 0;
  return kind_of(ceiling, schedule->comm_hash) >= 0;
}

sluice_status_t sluice_ceiling_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                     sluice_agreement_t* out_agreement) {
  const int refuses = proposal->local_status != SLUICE_OK;
  const int is_known = refuses || pass->schedule != NULL; /* else a plan is still to come */
  if (is_known && sluice_ceiling_is_agreed(pass->moe, refuses ? NULL : pass->schedule)) {
    *out_agreement = sluice_agreement_alone(proposal);
    if (!refuses && pass->context->comm != NULL) ++pass->context->comm->call_number;
    return proposal->local_status;
  }
  SLUICE_TRY(sluice_agree(pass->moe, proposal, NULL, out_agreement));
  if (pass->schedule != NULL) sluice_ceiling_note_agreed(pass);
  return SLUICE_OK;
}

void sluice_ceiling_note_agreed(const sluice_pass_t* pass) {
  sluice_ceiling_t* ceiling = pass->moe->ceiling;
  const uint64_t kind = pass->schedule->comm_hash;
  if (ceiling->num_kinds == SLUICE_MAX_KINDS || kind_of(ceiling, kind) >= 0) return;
  ceiling->kinds[ceiling->num_kinds] = kind;
  ceiling->has_run[ceiling->num_kinds++] = 0;
}

sluice_status_t sluice_ceiling_fail(const sluice_pass_t* pass, sluice_status_t status) {
  if (pass->captured || !pass->has_begun) return status; /* no row has left this rank */
  return sluice_fail_pass(pass->context, status, 0);
}

sluice_status_t sluice_ceiling_tell_failure(const sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  char text[256];
  if (!sluice_ceiling_is_agreed(moe, NULL) || context->told_failure == SLUICE_OK) return SLUICE_OK;
  sluice_status_t status = sluice_take_refusal(context, SLUICE_OK, text, sizeof text);
  return sluice_fail_pass(context, status, 0);
}

/* ---- the tally ---- */

sluice_status_t sluice_ceiling_take_tally(sluice_moe_t* moe, sluice_stream_t stream, int64_t* out_tally) {
  sluice_context_t* context = moe->context;
  int32_t captured = 0;
  memset(out_tally, 0, SLUICE_TALLY_BYTES);
  if (!moe->ceiling->is_cleared) return SLUICE_OK;
  SLUICE_TRY(context->rows->open(context, stream, &captured)); /* read refuses a captured stream */
  SLUICE_TRY(context->rows->read(context, stream, moe->ceiling->tally, out_tally, SLUICE_TALLY_BYTES));
  return clear(moe, stream);
}
