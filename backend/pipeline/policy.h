// SPDX-License-Identifier: Apache-2.0
/* A policy chooses the op that a stage runs next among the ready ops.
 *
 * The program alone determines what is *ready*, and ready ops are safe in any order. A policy orders them in one of two
 * ways:
 *   - by a rule over the ready ops (`before`): the stage runs whatever has arrived and never waits while something is
 *     ready. This is message-driven scheduling [AxoNN, Algorithm 2]. A rule may follow an order as a hint.
 *   - by a plan: an order for each stage, which it follows even if something else is ready. A *blocking* plan orders
 *     the sends and receives too, and the stage waits in each of them, as hosts do today.
 * Policies are rows of a table (policy.c), selected once, when a program is built. They are immutable. */
#pragma once

#include "backend/pipeline/spec.h"

enum {
  SLUICE_POLICY_OPEN = -1,          /* not yet chosen: choose.h sets one of the following */
  SLUICE_POLICY_MESSAGE_DRIVEN = 0, /* Algorithm 2 as printed: inject L, run what arrives */
  SLUICE_POLICY_BACKWARD_FIRST,
  SLUICE_POLICY_1F1B_HINT,    /* 1F1B if its next op is ready, else any ready op */
  SLUICE_POLICY_1F1B,         /* planned; messages overlap with computation */
  SLUICE_POLICY_GPIPE,        /* all forwards, then all backwards */
  SLUICE_POLICY_ZERO_BUBBLE,  /* ZB-H1 */
  SLUICE_POLICY_LOOPED,       /* interleaved 1F1B */
  SLUICE_POLICY_V,            /* zero bubble with virtual stages placed in a V */
  SLUICE_POLICY_FORWARD_ONLY, /* in order of arrival */
  SLUICE_POLICY_DEEPSPEED,    /* the stock 1F1B of DeepSpeed, blocking sends and receives: the baseline */
  SLUICE_POLICY_COUNT
};

/* The properties of a ready op that a rule can use. */
typedef struct sluice_stage_candidate_s {
  int32_t op; /* of the program */
  int32_t kind;
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t place;      /* in the policy's order; -1: the policy has none */
  int32_t by_message; /* it consumes a message; otherwise only ops of this stage made it ready, or it was ready at the
                         start */
  int64_t since;      /* increases with the time at which its message arrived, or it became ready */
} sluice_stage_candidate_t;

/* One entry of an order. */
typedef struct sluice_stage_turn_s {
  int32_t kind;
  int32_t virtual_stage;
  int32_t micro_batch;
} sluice_stage_turn_t;

/* An order under construction. Adding checks nothing: turns beyond the capacity are only counted, and the builder
 * refuses the order. */
typedef struct sluice_stage_order_s {
  sluice_stage_turn_t* turns;
  int32_t capacity;
  int32_t count; /* including turns beyond the capacity */
} sluice_stage_order_t;

static inline void sluice_order_add(sluice_stage_order_t* order, int32_t kind, int32_t virtual_stage,
                                    int32_t micro_batch) {
  if (order->count < order->capacity) {
    order->turns[order->count] = (sluice_stage_turn_t){kind, virtual_stage, micro_batch};
  }
  ++order->count;
}

typedef struct sluice_policy_s {
  const char* name;
  const char* source;     /* the publication */
  int32_t is_planned;     /* the order is binding */
  int32_t is_blocking;    /* the order contains sends and receives */
  int32_t placement;      /* the required one; -1: any */
  int32_t min_virtual;    /* smallest v */
  int32_t max_virtual;    /* largest v; 0: no limit */
  int32_t separate_wgrad; /* the required value; -1: either */
  int32_t forward_only;
  /* Checks further requirements; NULL: there are none. Errors: INVALID_ARGUMENT. */
  sluice_status_t (*check)(const sluice_pipeline_spec_t* spec);
  /* Writes the order of a stage: each of its forwards, backwards and weight gradients once; NULL: none. */
  void (*order)(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* order);
  /* Returns whether a runs before b, for a != b; NULL if the order is binding. */
  int (*before)(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b);
} sluice_policy_t;

/* ---- the table ---- */

/* Returns the row, or NULL for an unknown number. */
const sluice_policy_t* sluice_policy(int32_t policy);
/* Returns its name; "adaptive" for an open policy, "?" for an unknown number. */
const char* sluice_policy_name(int32_t policy);
/* Finds a policy that a host may name; NULL: the default. is_simulated: also the baseline. Errors: INVALID_ARGUMENT
 * naming the known ones. */
sluice_status_t sluice_policy_find(const char* name, int32_t is_simulated, int32_t* out_policy);
/* Replaces open values, -1, by those of the policy. Another separate_wgrad becomes 0 or 1. */
void sluice_policy_fill(int32_t policy, int32_t* inout_placement, int32_t* inout_separate_wgrad);
/* Checks that a policy supports this spec. Errors: INVALID_ARGUMENT naming the requirement. */
sluice_status_t sluice_policy_check(const sluice_pipeline_spec_t* spec);
