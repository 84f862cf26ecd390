// SPDX-License-Identifier: Apache-2.0
/* A stage program: the ops of each stage of a pipeline, as data.
 *
 * For each stage the program lists ops: receive, forward, send, backward, weight gradient, and one flush. An op is
 * *ready* when all ops that it needs have ended; these are ops of its own stage, including the receives of its input. A
 * ready receive may be posted; it ends when the message of its *match*, a send of another stage, has arrived. A ready
 * send may be posted; it ends when its slot may be written again. All other ops run on the stage's thread, one at a
 * time, in an order that the policy chooses among the ready ops (policy.h).
 *
 * Needs are derived from slots, never written by hand (build.h): micro-batch i of virtual stage c uses slot i mod ring
 * of each of c's tensors, and waits for the last use of that slot. Limits are sizes of rings: the ring of stashes is L,
 * so a forward waits for the backward of L micro-batches before it. There are no counters and no locks.
 *
 * Executor, simulator, checker and timeline pictures all read this. Immutable once built; any thread may read it. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/pipeline/policy.h"

typedef struct sluice_stage_slot_s {
  int16_t tensor; /* SLUICE_STAGE_T_* */
  int16_t virtual_stage;
  int32_t slot;
} sluice_stage_slot_t;

typedef struct sluice_stage_op_s {
  int16_t kind; /* SLUICE_STAGE_* */
  int16_t stage;
  int16_t virtual_stage; /* FLUSH: -1 */
  int16_t peer;          /* the stage at the other end of a message; -1: no message */
  int32_t micro_batch;   /* REDUCE: the last one; FLUSH: -1 */
  int32_t match;         /* op at the other end of a message; -1: no message */
  int32_t place;         /* in the policy's order of its stage; -1: not in it */
  int32_t first_need;    /* into program->needs */
  int32_t num_needs;
  int32_t num_reads;
  int32_t num_writes;
  sluice_stage_slot_t reads[SLUICE_STAGE_MAX_ACCESSES];
  sluice_stage_slot_t writes[SLUICE_STAGE_MAX_ACCESSES];
} sluice_stage_op_t;

typedef struct sluice_pipeline_program_s {
  sluice_pipeline_spec_t spec; /* in_flight and held are the limits in force: never 0 */
  const sluice_policy_t* policy;
  int32_t num_ops;
  int32_t num_needs;
  int32_t first_op[SLUICE_PIPELINE_MAX_STAGES + 1];       /* the ops of stage s are first_op[s] to first_op[s + 1] */
  int32_t first_position[SLUICE_PIPELINE_MAX_STAGES + 1]; /* into `order`, by stage; empty without an order */
  sluice_stage_op_t*
      ops; /* the ops of a stage, by micro-batch, in an order in which they could run serially; the flush last */
  int32_t* needs;
  int32_t* order; /* ops of a stage in the policy's order */
  int32_t ring[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES][SLUICE_STAGE_T_COUNT];
  void* memory;
  uint64_t memory_bytes;
} sluice_pipeline_program_t;

/* Returns the op, or -1. FLUSH: virtual_stage is the stage. */
int32_t sluice_pipeline_find(const sluice_pipeline_program_t* program, int32_t kind, int32_t virtual_stage,
                             int32_t micro_batch);

/* Sets the match of every message, by kind, virtual stage and micro-batch, at the stage that it names; -1: there is
 * none. Call after changing a program. */
void sluice_pipeline_match(sluice_pipeline_program_t* program);

/* Describes an op: "forward of micro-batch 3 in virtual stage 1 on stage 1". Returns the length, as snprintf. */
int sluice_stage_op_describe(const sluice_stage_op_t* op, char* text, size_t room);

/* Returns the bytes of a stage's slots with the limits in force: L micro-batches in flight, inputs that arrived ahead,
 * and what is held for weight gradients. */
uint64_t sluice_pipeline_stage_bytes(const sluice_pipeline_spec_t* spec, int32_t stage);

void sluice_pipeline_program_destroy(sluice_pipeline_program_t* program, sluice_allocator_t* allocator);
