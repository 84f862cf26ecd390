// SPDX-License-Identifier: Apache-2.0
/* The possible findings of the proofs of a template: a hazard, and its place. */
#pragma once

#include "backend/schedule/op_table.h"
#include "backend/schedule/schedule.h"

typedef enum sluice_hazard_e {
  SLUICE_HAZARD_NONE = 0,
  SLUICE_HAZARD_FORM,             /* an index, kind, lane or count out of range */
  SLUICE_HAZARD_DEADLOCK,         /* an op waits for one that is submitted after it, or for itself */
  SLUICE_HAZARD_WRONG_PASS,       /* an op that belongs to the other direction */
  SLUICE_HAZARD_WRONG_LANE,       /* an op on a lane that its kind does not belong to */
  SLUICE_HAZARD_MISSING_ACCESS,   /* an op does not declare a tensor that its kind reads or writes */
  SLUICE_HAZARD_READ_AFTER_WRITE, /* a read that may precede the write it needs */
  SLUICE_HAZARD_WRITE_AFTER_READ, /* a write that may precede the end of an earlier reader */
  SLUICE_HAZARD_WRITE_AFTER_WRITE,
  SLUICE_HAZARD_UNDEFINED,    /* a read of a slot that nothing wrote */
  SLUICE_HAZARD_OTHER_CHUNK,  /* a read of a slot that holds another chunk's rows at that point */
  SLUICE_HAZARD_OTHER_TENSOR, /* a read of a slot that holds another tensor of the chunk at that point */
  SLUICE_HAZARD_LOST,         /* an output or kept rows that the pass does not leave in place */
  /* hazards of releases, checked if there is no other hazard */
  SLUICE_HAZARD_DOUBLE_RELEASE, /* a release of a slot that is already free, or that the pass does not own */
  SLUICE_HAZARD_NOT_RELEASED,   /* a slot whose last user does not free it: it leaks, or is reused unreleased */
  SLUICE_HAZARD_USE_AFTER_RELEASE,
  SLUICE_HAZARD_COUNT
} sluice_hazard_t;

typedef struct sluice_finding_s {
  int32_t hazard; /* sluice_hazard_t */
  int32_t op;     /* index of the op at fault; -1: none */
  int32_t other;  /* index of the conflicting op; -1: none */
  int32_t tensor;
  int32_t slot;
  int32_t chunk;
} sluice_finding_t;

/* Describes the finding: the hazard, the ops, slot and chunk, and the missing edge. Returns the length, as snprintf. */
int sluice_finding_describe(const sluice_template_t* schedule, const sluice_finding_t* finding, char* text,
                            uint64_t text_bytes);

/* ---- declared accesses ---- */

typedef struct sluice_op_rule_s {
  int32_t lane; /* with one rank the communication lane's ops run on the compute lane */
  int16_t reads[SLUICE_OP_TABLE_ACCESSES];
  int16_t num_reads;
  int16_t writes[SLUICE_OP_TABLE_ACCESSES];
  int16_t num_writes;
} sluice_op_rule_t;

/* Returns the rule of a kind in a template of this spec: for one rank or several, deduplicated or not. COPY_OUT and
 * COPY_IN have no tensors here: theirs follow from the policy of their chunk. */
sluice_op_rule_t sluice_op_rule(int32_t kind, const sluice_template_spec_t* spec);
