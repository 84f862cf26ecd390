// SPDX-License-Identifier: Apache-2.0
/* The layer that a public handle points to: a checked config and the tables of the placement. */
#pragma once

#include "backend/device/kernels.h"
#include "backend/model/pass_sizes.h"
#include "backend/model/shape.h"
#include "backend/moe/context/policy_hook.h"
#include "backend/moe/context/context.h"
#include "backend/moe/layer/replay.h"
#include "sluice/moe.h"

/* ---- strategies ---- */

/* The variants of a layer: a table of functions for each property, chosen once when the layer is made
 * (run/make_layer.c), so that no other code tests which variant it is. The folders above define the tables. */

struct sluice_copies_s;
struct sluice_pass_lanes_s;
struct sluice_routes_s;
struct sluice_saved_memory_s;
struct sluice_travel_s;

typedef struct sluice_strategies_s {
  const struct sluice_routes_s* routes;      /* memory and order of routes: routing/routes.h */
  const struct sluice_copies_s* copies;      /* what ranks exchange about token copies: routing/copies.h */
  const struct sluice_pass_lanes_s* lanes;   /* how ops are submitted and timed: pass/lanes.h */
  const struct sluice_saved_memory_s* saved; /* memory of saved buffers: step/saved_memory.h */
  const struct sluice_travel_s* travel;      /* what ranks send each other: ops/travel.h */
  /* By SLUICE_DEDUPLICATE_NONE, _RANKS and _NODES of a pass, if the layer leaves that open; else NULL. */
  const struct sluice_strategies_s* by_deduplication;
} sluice_strategies_t;

/* ---- the state under a capacity ---- */

#define SLUICE_DROP_COUNTERS_BYTES ((uint64_t)SLUICE_NUM_DROP_COUNTERS * sizeof(int64_t))

enum { SLUICE_MAX_KINDS = 16 }; /* of calls: direction, kept rows, parts, gradients; others always have a header */

typedef struct sluice_capacity_s {
  int64_t* drop_counters; /* [SLUICE_NUM_DROP_COUNTERS], in row memory */
  int32_t is_cleared;
  int32_t num_kinds;
  uint64_t kinds[SLUICE_MAX_KINDS]; /* comm_hash of the kinds that the ranks have agreed on */
  int32_t has_run[SLUICE_MAX_KINDS];
} sluice_capacity_t;

/* ---- the layer ---- */

/* Experts are numbered twice: by the host's id, and by position. Positions are sorted by (rank, slot), where a slot is
 * the local index, so that the rows for one rank, and for one of its experts, are consecutive in counts and orders. */

struct sluice_moe_s {
  _Atomic int32_t references;
  uint8_t plan_is_given;       /* the host gave the plan: it is not replaced when more tokens come */
  uint8_t plan_limits_context; /* this plan counts in num_given_plans */
  uint8_t has_told_fallback;   /* has logged that chunks did not fit the plan */
  uint8_t plan_number;         /* number of the plan in force (backend/plan/plans_by_size.h) */
  sluice_context_t* context;
  sluice_shape_t shape;                  /* plain data about the layer */
  const sluice_strategies_t* strategies; /* functions for its variant */
  const struct sluice_mode_s* mode;      /* how chunks get their counts (run/mode.h); set again with each plan */
  int32_t* expert_position;              /* [E] */
  int32_t* first_position;               /* [W + 1] positions of each rank's experts */
  uint64_t placement_epoch;              /* epoch of these tables */
  uint64_t kind;                         /* hash of the config, without the placement: the key of decisions */
  uint64_t fingerprint;                  /* hash of everything that must be equal on all ranks */
  sluice_decision_state_t decision;      /* the choice for its next pass */
  sluice_replay_t replay;                /* its last forwards, if the decision state has a choice */
  struct sluice_plans_by_size_s* plans;  /* NULL: passes allocate what their rows need */
  const struct sluice_plan_data_s* plan; /* the one of `plans` in force */
  sluice_capacity_t* capacity;           /* NULL: no capacity */
};

/* Called for a new plan: each kind of call has a header again, in which the ranks compare plans. */
static inline void sluice_capacity_forget_agreed(const sluice_moe_t* moe) {
  if (moe->capacity != NULL) moe->capacity->num_kinds = 0;
}

static inline sluice_unit_t sluice_layer_unit(const sluice_moe_config_t* config) {
  return (sluice_unit_t){config->activation, config->gated, config->swiglu_alpha, config->swiglu_limit,
                         config->swiglu_offset};
}

/* Whether the layer makes its own plans: to fit a budget, or to reuse buffers under a capacity, where no headers carry
 * reports by which strategies could be compared. */
static inline int sluice_makes_plans(const sluice_moe_t* moe) {
  const sluice_context_t* context = moe->context;
  return context->memory_budget > 0 || context->host_memory_budget > 0 ||
         (moe->shape.config.reuse && sluice_shape_capacity(&moe->shape) > 0);
}

/* Whether passes of this layer run under a plan. */
static inline int sluice_is_planned(const sluice_moe_t* moe) { return moe->plan != NULL || sluice_makes_plans(moe); }

/* SLUICE_WIRE_* of the layer's rows: the context's if rows are f32, leave the rank, and are wide enough to gain. */
static inline int32_t sluice_layer_wire(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const int is_coded = c->dtype == SLUICE_DTYPE_F32 && c->model_width > 1 && moe->context->world_size > 1;
  return is_coded ? moe->context->wire_dtype : SLUICE_WIRE_LAYER_DTYPE;
}

/* Counters of forwards since the layer was made: [E] rows of this rank's tokens by expert; [W] rows that each rank
 * received, as headers report them, one forward late and the same on all ranks; and the number of forwards in the
 * latter. They lie after the tables of the placement, so that the layer does not grow. */
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
