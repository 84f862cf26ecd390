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
