// SPDX-License-Identifier: Apache-2.0
/* The spec of a pipeline: stages, virtual stages, micro-batches, limits. Plain data.
 *
 * The layers of a model are divided into p·v *virtual stages*, numbered c in the order of the layers. A *stage* is one
 * rank of the pipeline and has v of them, by the placement. A batch is divided into m *micro-batches*. Every virtual
 * stage runs each micro-batch forward and backward once, and a *flush* ends the batch, so that the optimizer sees what
 * one device would have computed [AxoNN, section III-C].
 *
 * Two equal specs give the same program. A spec is immutable once filled in; any thread may read it. */
#pragma once

#include "backend/base/status.h"

#define SLUICE_PIPELINE_MAX_STAGES         64
#define SLUICE_PIPELINE_MAX_VIRTUAL_STAGES 128  /* p·v */
#define SLUICE_PIPELINE_MAX_TURNS          1024 /* m·v: forwards of one stage in a batch */

/* The stage of virtual stage c. Looped: c mod p. V: down the stages and up again, so that with v = 2 the first stage
 * has the first and the last layers, and c and c + 1 are on one stage where the V turns. */
enum { SLUICE_PLACEMENT_LOOPED = 0, SLUICE_PLACEMENT_V = 1 };

typedef struct sluice_pipeline_spec_s {
  int32_t num_stages;        /* p in [1, 64] */
  int32_t num_virtual;       /* v, on each stage */
  int32_t num_micro_batches; /* m */
  int32_t placement;         /* SLUICE_PLACEMENT_* */
  int32_t policy;            /* SLUICE_POLICY_* of policy.h */
  int32_t separate_wgrad;    /* a backward computes only the input gradients; weight gradients are separate ops */
  int32_t forward_only;      /* no backward: evaluation */
  int32_t receives_ahead;    /* inputs that may have arrived in addition to those in flight */
  int32_t reduces;  /* gradients of a virtual stage are reduced over replicas as soon as they are complete; ignored with
                       forward_only */
  int32_t reserved; /* 0, because a spec is hashed as bytes */
  /* Limits and sizes by virtual stage. */
  int32_t
      in_flight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* L: forwards whose backward has not run; 0: the policy's value */
  int32_t held[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];  /* backwards whose weight gradient has not run; 0: no limit */
  uint64_t activation_bytes[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* of one micro-batch in flight, with its input, output
                                                                    and their gradients */
  uint64_t held_bytes[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];       /* of one micro-batch held for its weight gradient */
  uint64_t message_bytes[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];    /* from c to c + 1, and of the gradient back */
  uint8_t expert_parallel[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];   /* F and B contain collectives over the replicas of a
                                                                    stage */
  /* By stage: limit for all of the above, with every slot filled; 0: no limit. */
  uint64_t byte_limit[SLUICE_PIPELINE_MAX_STAGES];
} sluice_pipeline_spec_t;

static inline int32_t sluice_pipeline_num_virtual_stages(const sluice_pipeline_spec_t* spec) {
  return spec->num_stages * spec->num_virtual;
}

/* Returns the number of reductions of one stage. */
static inline int32_t sluice_pipeline_num_reduces(const sluice_pipeline_spec_t* spec) {
  return spec->reduces && !spec->forward_only ? spec->num_virtual : 0;
}

/* Returns the stage of virtual stage c. */
int32_t sluice_pipeline_stage_of(const sluice_pipeline_spec_t* spec, int32_t virtual_stage);
/* Returns the k-th virtual stage of a stage in the order of the layers, k in [0, v). */
int32_t sluice_pipeline_virtual_stage(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t k);
/* Returns whether the output of c is sent to another stage. c + 1 must exist. */
int sluice_pipeline_crosses(const sluice_pipeline_spec_t* spec, int32_t virtual_stage);
/* Returns whether all limits of micro-batches in flight are open. */
int sluice_pipeline_is_open(const sluice_pipeline_spec_t* spec);

/* Checks the ranges of all members except the policy. Errors: INVALID_ARGUMENT naming the field. */
sluice_status_t sluice_pipeline_spec_check(const sluice_pipeline_spec_t* spec);

/* ---- the ops of a stage, and the tensors that each op reads and writes; for the builder and the checker ---- */

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

/* Returns "forward" and the like; "?" for an unknown number. */
const char* sluice_stage_op_name(int32_t kind);

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
