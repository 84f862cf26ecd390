// SPDX-License-Identifier: Apache-2.0
/* A policy: what a stage runs next of what is ready.
 *
 * The program alone says what is *ready*, and that is safe in any order. A policy orders it, in one of two ways:
 *   - by a rule over the ready ops (`before`): the stage runs whatever has arrived and never waits while something is
 *     ready. This is message-driven scheduling [AxoNN, Algorithm 2]. A rule may follow an order as a hint.
 *   - by a plan: an order for each stage, which it keeps even if something else is ready. A *blocking* plan orders the
 *     sends and receives too, and the stage waits in each: what hosts do today.
 * Policies are rows of a table (policy_table.h), chosen once, when a program is built. They are immutable. */
#ifndef SLUICE_BACKEND_PIPELINE_POLICY_H_
#define SLUICE_BACKEND_PIPELINE_POLICY_H_

#include "backend/pipeline/ops.h"

enum {
  SLUICE_POLICY_OPEN = -1,          /* none yet: choose_policy.h sets one of those below */
  SLUICE_POLICY_MESSAGE_DRIVEN = 0, /* Algorithm 2 as printed: inject L, run what arrives */
  SLUICE_POLICY_BACKWARD_FIRST,
  SLUICE_POLICY_1F1B_HINT,    /* 1F1B where it is ready, else whatever is */
  SLUICE_POLICY_1F1B,         /* planned, messages beside computation */
  SLUICE_POLICY_GPIPE,        /* all forwards, then all backwards */
  SLUICE_POLICY_ZERO_BUBBLE,  /* ZB-H1 */
  SLUICE_POLICY_LOOPED,       /* interleaved 1F1B */
  SLUICE_POLICY_V,            /* zero bubble over virtual stages in V */
  SLUICE_POLICY_FORWARD_ONLY, /* in the order of arrival */
  SLUICE_POLICY_DEEPSPEED,    /* the stock 1F1B of DeepSpeed, blocking sends and receives: the baseline */
  SLUICE_POLICY_COUNT
};

/* What a rule sees of an op that is ready. */
typedef struct sluice_stage_candidate_s {
  int32_t op; /* of the program */
  int32_t kind;
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t place;      /* in the policy's order; -1 where it has none */
  int32_t by_message; /* it takes a message; else ops of this stage alone made it ready, or the start */
  int64_t since;      /* a number that grows with the moment at which its message arrived, or it became ready */
} sluice_stage_candidate_t;

/* One entry of an order. */
typedef struct sluice_stage_turn_s {
  int32_t kind;
  int32_t virtual_stage;
  int32_t micro_batch;
} sluice_stage_turn_t;

/* An order that is being written. Who adds checks nothing: what has no room is counted, and the builder refuses. */
typedef struct sluice_stage_order_s {
  sluice_stage_turn_t* turns;
  int32_t capacity;
  int32_t count; /* of all that was added */
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
  const char* source;     /* where it is published */
  int32_t is_planned;     /* the order binds */
  int32_t is_blocking;    /* the order holds sends and receives */
  int32_t placement;      /* that it asks for; -1: any */
  int32_t min_virtual;    /* of v */
  int32_t max_virtual;    /* 0: any */
  int32_t separate_wgrad; /* that it asks for; -1: either */
  int32_t forward_only;
  /* Further things that it refuses; NULL: nothing. Errors: INVALID_ARGUMENT. */
  sluice_status_t (*check)(const sluice_pipeline_spec_t* spec);
  /* The order of a stage: each of its forwards, backwards and weight gradients once; NULL: none. */
  void (*order)(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* order);
  /* Whether a goes before b, for a != b; NULL where the order binds. */
  int (*before)(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b);
} sluice_policy_t;

#endif /* SLUICE_BACKEND_PIPELINE_POLICY_H_ */
