// SPDX-License-Identifier: Apache-2.0
/* The accesses that an op must declare in a template of a spec: its lane, and the tensors that it reads and writes in
 * every template. Derived from the rows of op_table.h and the spec. Private to backend/schedule/check. */
#pragma once

#include "backend/schedule/op_table.h"

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
