// SPDX-License-Identifier: Apache-2.0
/* A partition during planning: the stage of each layer, and the cost of each stage with its best options. */
#pragma once

#include "backend/planner/stages/local/local.h"

/* The cost of a stage. */
typedef struct sluice_stage_judgement_s {
  double turn;
  double short_bytes; /* over its budget with the fewest bytes */
  int32_t is_proven;  /* the choice of options is optimal */
} sluice_stage_judgement_t;

/* Partitions are compared by these, in this order. */
typedef struct sluice_partition_score_s {
  double short_bytes; /* of the stage that exceeds its budget most */
  double slowest;     /* turn */
  double squares;     /* sum over all turns: evens out the other stages if the slowest stays the same */
} sluice_partition_score_t;

typedef struct sluice_partition_s {
  const sluice_stages_tables_t* tables;
  sluice_stages_local_t local;
  int32_t* stage_of;                /* [num_layers]; nondecreasing along every edge, and no stage is empty */
  int32_t* option_of;               /* [num_layers] as last settled */
  double* seconds_of;               /* [num_layers] with that option */
  sluice_stage_judgement_t* judged; /* [num_stages] as last settled */
  int32_t* members;                 /* [num_layers] scratch */
  void* block;
  uint64_t block_bytes;
} sluice_partition_t;

/* Allocates memory for one partition. most_nodes: of branch and bound per stage. Errors: NO_MEMORY, with everything
 * freed. */
sluice_status_t sluice_partition_make(const sluice_stages_tables_t* tables, uint64_t most_nodes,
                                      sluice_partition_t* out_partition);
void sluice_partition_deinit(sluice_partition_t* partition);

/* Chooses the options of one stage under stage_of. is_final: stores its layers' options and its cost. */
sluice_stage_judgement_t sluice_partition_judge(sluice_partition_t* partition, int32_t stage, int is_final);
/* The same for all stages, stored. */
void sluice_partition_settle(sluice_partition_t* partition);

sluice_partition_score_t sluice_partition_score(const sluice_stage_judgement_t* judged, int32_t num_stages);
/* Returns 1 if a is better than b, by more than rounding. */
int sluice_partition_is_better(const sluice_partition_score_t* a, const sluice_partition_score_t* b);

/* Returns the stage that determines the score. */
int32_t sluice_partition_worst_stage(const sluice_partition_t* partition);

/* Cuts the order of layers at the ends of the stages' runs. */
void sluice_partition_set_ends(sluice_partition_t* partition, const int32_t* ends);
void sluice_partition_copy(sluice_partition_t* to, const sluice_partition_t* from);
