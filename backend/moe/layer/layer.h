// SPDX-License-Identifier: Apache-2.0
/* The layer that the public handle points to: a checked config and the tables of who owns which expert. */
#ifndef SLUICE_BACKEND_MOE_LAYER_LAYER_H_
#define SLUICE_BACKEND_MOE_LAYER_LAYER_H_

#include "backend/device/kernels.h"
#include "backend/model/pass_sizes.h"
#include "backend/model/shape.h"
#include "backend/moe/context/policy_hook.h"
#include "backend/moe/context/context.h"
#include "backend/moe/layer/replay.h"
#include "backend/moe/layer/strategies.h"
#include "sluice/moe.h"

typedef struct sluice_capacity_s sluice_capacity_t; /* capacity_state.h */

/* Experts are numbered twice: by the host's id, and by position: sorted by (rank, slot), where a slot is the local
 * index. Counts and row orders use positions, so that the rows for one rank, and for one expert on it, are consecutive.
 */

struct sluice_moe_s {
  _Atomic int32_t references;
  uint8_t plan_is_given;       /* by the host: not made again when more tokens come */
  uint8_t plan_limits_context; /* that plan counts in num_given_plans */
  uint8_t has_told_fallback;   /* that chunks did not fit what the plan keeps */
  uint8_t plan_number;         /* of the plan in force (backend/plan/plans_by_size.h) */
  sluice_context_t* context;
  sluice_shape_t shape;                  /* what it is */
  const sluice_strategies_t* strategies; /* and how it does it */
  const struct sluice_mode_s* mode;      /* how its chunks get their counts: run/mode.h; chosen again with each plan */
  int32_t* expert_position;              /* [E] */
  int32_t* first_position;               /* [W + 1] positions of each rank's experts */
  uint64_t placement_epoch;              /* of these tables */
  uint64_t kind;                         /* hash of the config: what decisions are kept for, wherever experts lie */
  uint64_t fingerprint;                  /* of everything that must be equal on all ranks */
  sluice_decision_state_t decision;      /* what it does next */
  sluice_replay_t replay;                /* and what it did, where the decision state has a choice */
  struct sluice_plans_by_size_s* plans;  /* NULL: passes take what their rows need */
  const struct sluice_plan_data_s* plan; /* of those, what is in force */
  struct sluice_capacity_s* capacity;    /* NULL: rows travel as they are */
};

/* Whether the kernels' activation_forward and _backward suffice; other layers take unit_forward and _backward. */
static inline int sluice_layer_is_plain(const sluice_moe_config_t* config) {
  return config->activation <= SLUICE_ACTIVATION_SILU && config->gated != SLUICE_GATED_INTERLEAVED;
}

static inline sluice_unit_t sluice_layer_unit(const sluice_moe_config_t* config) {
  return (sluice_unit_t){config->activation, config->gated, config->swiglu_alpha, config->swiglu_limit,
                         config->swiglu_offset};
}

/* Whether the layer makes plans of its own: to fit a budget, or to reuse buffers under a capacity, where no headers
 * come in which strategies could be compared. */
static inline int sluice_makes_plans(const sluice_moe_t* moe) {
  const sluice_context_t* context = moe->context;
  return context->memory_budget > 0 || context->host_memory_budget > 0 ||
         (moe->shape.config.reuse && sluice_shape_capacity(&moe->shape) > 0);
}

/* Whether passes of this layer run under a plan. */
static inline int sluice_is_planned(const sluice_moe_t* moe) { return moe->plan != NULL || sluice_makes_plans(moe); }

/* SLUICE_WIRE_* of its rows: what the context says, where they are f32, travel, and are wide enough to gain. */
static inline int32_t sluice_layer_wire(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const int is_coded = c->dtype == SLUICE_DTYPE_F32 && c->model_width > 1 && moe->context->world_size > 1;
  return is_coded ? moe->context->wire_dtype : SLUICE_WIRE_LAYER_DTYPE;
}

/* What forwards have counted since the layer was made: rows of this rank's tokens by expert [E]; rows that each rank
 * received [W], as headers report them, one forward late and the same on all ranks; and, after these, such forwards.
 * They lie after the tables of the placement, so that the layer does not grow. */
static inline int64_t* sluice_layer_expert_rows(const sluice_moe_t* moe) {
  const uint64_t offset = sluice_layer_loads_offset(moe->shape.config.num_experts, moe->context->world_size);
  return (int64_t*)(void*)((char*)moe->expert_position + offset);
}
static inline int64_t* sluice_layer_rank_rows(const sluice_moe_t* moe) {
  return sluice_layer_expert_rows(moe) + moe->shape.config.num_experts;
}

static inline int32_t sluice_layer_experts_of(const sluice_moe_t* moe, int32_t rank) {
  return moe->first_position[rank + 1] - moe->first_position[rank];
}

#endif /* SLUICE_BACKEND_MOE_LAYER_LAYER_H_ */
