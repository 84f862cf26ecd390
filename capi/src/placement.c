// SPDX-License-Identifier: Apache-2.0
/* Reads and replaces the placement of experts. After a refusal the collective call is still opened, so that all ranks
 * fail in the same way. */
#include <stddef.h>
#include <string.h>

#include "backend/base/structs.h"
#include "backend/moe/layer/placement.h"
#include "backend/moe/run/run.h"

SLUICE_DEFINE_INIT(sluice_expert_placement, 0)

static sluice_status_t check(const sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  const sluice_moe_config_t* c = &moe->shape.config;
  SLUICE_TRY(sluice_struct_check_next(placement->next, "sluice_expert_placement_t"));
  SLUICE_TRY(SLUICE_REQUIRE(placement->expert_rank != NULL && placement->expert_slot != NULL,
                            "layer %d: %s is NULL: give the owner and the slot of each of the %d experts", c->layer_id,
                            placement->expert_rank == NULL ? "expert_rank" : "expert_slot", c->num_experts));
  SLUICE_TRY(sluice_placement_check(placement, c->layer_id, c->num_experts, moe->context->world_size));
  if (placement->epoch > moe->placement_epoch) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: epoch is %llu, and the placement in force has %llu: number each above the one before",
                     c->layer_id, (unsigned long long)placement->epoch, (unsigned long long)moe->placement_epoch);
}

sluice_status_t sluice_moe_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_replace_experts: moe is NULL");
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_replace_experts"));
  sluice_expert_placement_t checked;
  sluice_expert_placement_init(&checked, sizeof checked);
  sluice_status_t refusal =
      sluice_struct_copy(&checked, sizeof checked, placement, sizeof checked, "sluice_expert_placement_t");
  if (refusal == SLUICE_OK) refusal = check(moe, &checked);
  sluice_status_t status = sluice_run_replace_experts(moe, &checked, refusal);
  sluice_engine_leave(moe->context);
  return status;
}

sluice_status_t sluice_moe_get_loads(const sluice_moe_t* moe, int64_t* out_expert_rows, int64_t* out_rank_rows,
                                     int64_t* out_num_forwards) {
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_get_loads: moe is NULL");
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_get_loads"));
  const size_t experts = (size_t)moe->shape.config.num_experts, ranks = (size_t)moe->context->world_size;
  if (out_expert_rows != NULL) memcpy(out_expert_rows, sluice_layer_expert_rows(moe), experts * sizeof(int64_t));
  if (out_rank_rows != NULL) memcpy(out_rank_rows, sluice_layer_rank_rows(moe), ranks * sizeof(int64_t));
  if (out_num_forwards != NULL) *out_num_forwards = sluice_layer_rank_rows(moe)[ranks];
  sluice_engine_leave(moe->context);
  return SLUICE_OK;
}

sluice_status_t sluice_moe_get_placement(const sluice_moe_t* moe, int32_t* out_expert_rank, int32_t* out_expert_slot,
                                         uint64_t* out_epoch) {
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_get_placement: moe is NULL");
  for (int32_t e = 0; e < moe->shape.config.num_experts; ++e) {
    const int32_t position = moe->expert_position[e];
    const int32_t rank = sluice_rank_of_position(moe->first_position, moe->context->world_size, position);
    if (out_expert_rank != NULL) out_expert_rank[e] = rank;
    if (out_expert_slot != NULL) out_expert_slot[e] = position - moe->first_position[rank];
  }
  if (out_epoch != NULL) *out_epoch = moe->placement_epoch;
  return SLUICE_OK;
}
