// SPDX-License-Identifier: Apache-2.0
/* The ops of a stage, and the tensors that each op reads and writes. Used by both the builder and the checker. */
#pragma once

#include "backend/pipeline/spec.h"

typedef enum sluice_stage_op_kind_e {
  SLUICE_STAGE_RECEIVE_ACTIVATION = 0, /* the input of a forward, from the stage of c - 1 */
  SLUICE_STAGE_FORWARD,
  SLUICE_STAGE_SEND_ACTIVATION,
  SLUICE_STAGE_RECEIVE_GRADIENT, /* the gradient of the output, from the stage of c + 1 */
  SLUICE_STAGE_BACKWARD,         /* with separate_wgrad only the gradient of the input */
  SLUICE_STAGE_SEND_GRADIENT,
  SLUICE_STAGE_WEIGHT_GRAD, /* W [zero bubble, section 2] */
  SLUICE_STAGE_REDUCE,      /* sums the gradients of a virtual stage over replicas, after its last micro-batch */
  SLUICE_STAGE_FLUSH,       /* the end of the batch on this stage */
  SLUICE_STAGE_OP_COUNT
} sluice_stage_op_kind_t;

typedef enum sluice_stage_tensor_e {
  SLUICE_STAGE_T_INPUT = 0,
  SLUICE_STAGE_T_STASH, /* what a forward saves for its backward */
  SLUICE_STAGE_T_OUTPUT,
  SLUICE_STAGE_T_OUTPUT_GRAD,
  SLUICE_STAGE_T_INPUT_GRAD,
  SLUICE_STAGE_T_HELD,          /* what a backward saves for its weight gradient */
  SLUICE_STAGE_T_FORWARD_STATE, /* one per virtual stage: random numbers, running statistics; it keeps forwards in
                                   micro-batch order */
  SLUICE_STAGE_T_BACKWARD_STATE,
  SLUICE_STAGE_T_GRADIENTS, /* one per virtual stage: weight gradients, which are added in micro-batch order */
  SLUICE_STAGE_T_COUNT
} sluice_stage_tensor_t;

/* Return "forward" and the like; "?" for an unknown number. */
const char* sluice_stage_op_name(int32_t kind);
const char* sluice_stage_tensor_name(int32_t tensor);

/* Returns whether the op is a send or a receive, which the transport executes. All others run on the stage's thread; a
 * reduction only starts there and completes asynchronously. */
static inline int sluice_stage_op_is_message(int32_t kind) {
  return kind == SLUICE_STAGE_RECEIVE_ACTIVATION || kind == SLUICE_STAGE_SEND_ACTIVATION ||
         kind == SLUICE_STAGE_RECEIVE_GRADIENT || kind == SLUICE_STAGE_SEND_GRADIENT;
}

static inline int sluice_stage_op_is_send(int32_t kind) {
  return kind == SLUICE_STAGE_SEND_ACTIVATION || kind == SLUICE_STAGE_SEND_GRADIENT;
}

/* Returns whether the program of this spec has ops of the kind for a micro-batch of virtual stage c. REDUCE and FLUSH:
 * no. */
int sluice_stage_op_exists(const sluice_pipeline_spec_t* spec, int32_t kind, int32_t virtual_stage);
/* Returns the virtual stage at the other end of a message of c. */
int32_t sluice_stage_op_other_end(int32_t kind, int32_t virtual_stage);
/* Returns the kind of op that writes weight gradients: the last of a micro-batch in a virtual stage. */
static inline int32_t sluice_stage_gradient_kind(const sluice_pipeline_spec_t* spec) {
  return spec->separate_wgrad ? SLUICE_STAGE_WEIGHT_GRAD : SLUICE_STAGE_BACKWARD;
}
/* Returns whether the op is collective over the replicas of a stage: forwards and backwards of expert-parallel virtual
 * stages, and reductions. */
int sluice_stage_op_is_collective(const sluice_pipeline_spec_t* spec, int32_t kind, int32_t virtual_stage);

/* A tensor of a virtual stage on the same stage. */
typedef struct sluice_stage_access_s {
  int32_t tensor;
  int32_t virtual_stage;
} sluice_stage_access_t;

#define SLUICE_STAGE_MAX_ACCESSES 4

typedef struct sluice_stage_accesses_s {
  int32_t num_reads;
  int32_t num_writes;
  sluice_stage_access_t reads[SLUICE_STAGE_MAX_ACCESSES];
  sluice_stage_access_t writes[SLUICE_STAGE_MAX_ACCESSES];
} sluice_stage_accesses_t;

/* Returns the tensors that an op reads and writes. If c and its neighbour are on the same stage, the neighbour's slot
 * is read in place. FLUSH: none; it waits for every other op of its stage. */
sluice_stage_accesses_t sluice_stage_op_accesses(const sluice_pipeline_spec_t* spec, int32_t kind,
                                                 int32_t virtual_stage);
