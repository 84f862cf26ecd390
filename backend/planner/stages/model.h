// SPDX-License-Identifier: Apache-2.0
/* A model, a pipeline and its budgets as plain data, and the plan over them. Options, edges, links, choices and stage
 * predictions are the types of the public header, which has the formulas and their source; layers, problems and plans
 * are defined here as the solvers read them: every layer has a list of options.
 *
 * Keeping, recomputing and offloading activations are options (sluice_stages_options_of_profile makes the three); so
 * are the plans of a Mixture-of-Experts layer (backend/planner/layer_planner.h). */
#pragma once

#include <stdint.h>

#include "sluice/stages.h"

typedef struct sluice_stages_layer_s {
  const sluice_stages_option_t* options; /* [num_options] */
  uint64_t parameter_bytes;              /* one version of the weights */
  uint64_t state_bytes; /* gradients, master weights, moments: counted once, independent of outstanding micro-batches */
  uint64_t output_bytes; /* read by its readers; the gradient has the same size */
  int32_t num_options;   /* >= 1 */
  int32_t reserved;      /* 0 */
} sluice_stages_layer_t;

/* Fields of the same name are those of sluice_planner_problem_t. */
typedef struct sluice_stages_problem_s {
  const sluice_stages_layer_t* layers; /* [num_layers] in execution order */
  const sluice_stages_edge_t* edges;   /* [num_edges]; none: a chain, in which each layer reads the one before it */
  const sluice_stages_link_t* links;   /* [num_stages - 1]; NULL: messages take no time */
  const uint64_t* budget_bytes;        /* [num_stages] of device memory; NULL: no limits. 0: none for that stage */
  const int32_t* in_flight;            /* [num_stages] outstanding micro-batches instead of the schedule's, or NULL */
  uint64_t base_bytes;                 /* on each stage, independent of its layers */
  double copy_bytes_per_second;        /* between device and host memory; 0: nothing can be copied */
  int32_t num_layers;                  /* >= num_stages: no stage stays empty */
  int32_t num_edges;
  int32_t num_stages;
  int32_t num_micro_batches;  /* m >= 1 per step */
  int32_t schedule;           /* SLUICE_STAGES_1F1B, ... */
  int32_t in_flight_limit;    /* L of MESSAGE_DRIVEN; 0: num_stages */
  int32_t weight_versions;    /* 0: one (synchronous); 1: one per outstanding micro-batch (PipeDream) */
  int32_t copies_share_links; /* 1: copies share the wire of the messages, which have priority */
  int32_t method;             /* SLUICE_STAGES_AUTO, ... */
  int32_t reserved;           /* 0 */
} sluice_stages_problem_t;

/* Fields of the same name are those of sluice_planner_result_t. */
typedef struct sluice_stages_plan_s {
  sluice_stages_choice_t* choices; /* [num_layers], the caller's memory */
  sluice_stages_stage_t* stages;   /* [num_stages], the caller's memory */
  double slowest_seconds;          /* of the slowest stage: what a micro-batch adds to a step */
  double step_seconds;             /* m micro-batches: one through all stages, m - 1 at the slowest */
  uint64_t smallest_budget_bytes;  /* OVER_BUDGET: what blocking_stage needs in the partition with the smallest need */
  uint64_t short_bytes;            /* OVER_BUDGET: the least that every budget lacks */
  uint64_t steps;                  /* options and nodes visited, which is the cost of the plan on any machine */
  int32_t slowest_stage;           /* index */
  int32_t blocking_stage;          /* OVER_BUDGET: index; otherwise -1 */
  int32_t is_optimal;              /* 1: no plan has a faster slowest stage */
  int32_t num_rounds;              /* alternations of partition and options in the heuristic */
} sluice_stages_plan_t;

/* ---- activations that are kept, recomputed or offloaded as a whole ---- */

/* Measurements of a layer. */
typedef struct sluice_stages_profile_s {
  double forward_seconds;
  double backward_seconds;
  double recompute_seconds;  /* of the repeated forward, before the backward */
  uint64_t activation_bytes; /* needed by the backward, including the layer's input */
  uint64_t checkpoint_bytes; /* start of recomputation: the layer's input. <= activation_bytes */
  uint64_t workspace_bytes;  /* while it runs, with any option */
} sluice_stages_profile_t;

enum { SLUICE_STAGES_PROFILE_OPTIONS = 3 };

/* Makes the three options. Keep: all activations are held. Recompute: the checkpoint is held, and the rest exists once
 * while the layer runs. Offload: all go to host memory, and exist once while the layer runs. Indexed by
 * SLUICE_STAGES_KEEP, _RECOMPUTE, _OFFLOAD. Any thread; no errors. */
void sluice_stages_options_of_profile(const sluice_stages_profile_t* profile,
                                      sluice_stages_option_t out_options[SLUICE_STAGES_PROFILE_OPTIONS]);
