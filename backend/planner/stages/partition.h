// SPDX-License-Identifier: Apache-2.0
/* A partition during planning: the stage of each layer, and the cost of each stage with its best options. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/planner/stages/local.h"

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

/* ---- cut_order.c ---- */

/* Sets and settles the partition with the fastest slowest stage. out_is_optimal: no cut of the order is better.
 * out_exists 0: none fits, and the partition is unchanged. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fastest(sluice_partition_t* partition, int32_t* out_exists, int32_t* out_is_optimal);

/* Sets and settles the partition whose stages exceed their budgets by the fewest bytes, exactly. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_leanest(sluice_partition_t* partition);

/* Finds out whether any cut of the order fits. If none does, the partition is set and settled as by _leanest; otherwise
 * it is undefined. Fast if budgets leave room. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fits(sluice_partition_t* partition, int32_t* out_fits);

/* Divides the layers evenly by one number per layer, as hosts do today; a start for refinement. Sets and settles.
 * weights: [num_layers + 1] sums before a layer. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_evenly(sluice_partition_t* partition, const double* weights);

/* ---- refine.c ---- */

/* partition: settled before and after; its score never gets worse. Errors: NO_MEMORY. */
sluice_status_t sluice_partition_refine(sluice_partition_t* partition);

/* ---- search.c ---- */

/* Nodes are runs of layers: out_first [num_layers + 1] has the first layer of each, followed by num_layers. Returns the
 * number of nodes, at least num_stages; if nests leave fewer, each layer is a node. scratch: [num_layers + 1]. */
int32_t sluice_stages_coarsen(const sluice_stages_tables_t* tables, int32_t* out_first, int32_t* scratch);
/* Makes each layer a node. */
int32_t sluice_stages_leave_fine(const sluice_stages_tables_t* tables, int32_t* out_first);

/* first: [num_nodes + 1] of the runs of layers that form nodes. seconds_of: [num_layers]. out_stage_of: [num_layers].
 * Errors: NO_MEMORY. */
sluice_status_t sluice_stages_kernighan_lin(const sluice_stages_tables_t* tables, const int32_t* first,
                                            int32_t num_nodes, const double* seconds_of, int32_t* out_stage_of);

/* Sets and settles the best partition found: by Kernighan and Lin alternating with the choice of options, and refined
 * from the even divisions that hosts use, so that it is never worse than these. scratch: another partition of the
 * tables. out_num_rounds: alternations. Errors: NO_MEMORY. */
sluice_status_t sluice_stages_search(sluice_partition_t* partition, sluice_partition_t* scratch, int32_t coarsen,
                                     int32_t* out_num_rounds);
