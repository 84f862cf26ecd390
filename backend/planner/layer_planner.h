// SPDX-License-Identifier: Apache-2.0
/* Answers questions about one layer without any rank: the bytes of its plans and, on a machine, the seconds of its
 * passes. It prices the ops of the real template (backend/cost/cost.h) and sizes the real plans (backend/plan).
 *
 * Arguments are checked by the caller (capi/src/planner.c). */
#pragma once

#include "backend/base/text.h"
#include "backend/cost/cost.h"
#include "backend/plan/plan.h"
#include "backend/planner/stages/model.h"
#include "sluice/planner.h"

#define SLUICE_PLANNER_MOST_CANDIDATES 512

/* The choice that the caller asks about, and what BY_CHUNK in it stands for. */
typedef struct sluice_planner_asked_s {
  sluice_planner_choice_t choice;
  sluice_chunk_policies_t policies;
} sluice_planner_asked_t;

/* Returns the plan problem of a workload on one of the machine's ranks, on a CPU whose GEMMs borrow memory. rings:
 * borrowed. */
sluice_plan_problem_t sluice_planner_problem(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                             const sluice_planner_asked_t* asked, sluice_ring_memo_t* rings);
/* Returns the bytes that the handles of a rank need before any plan: a context on a CPU, and this layer. */
uint64_t sluice_planner_base_bytes(const sluice_shape_t* shape);

/* Predicts bytes and seconds of one choice. out: without its struct_size. entries: [capacity], may be NULL with 0.
 * Errors: those of plans except OVER_BUDGET; INVALID_ARGUMENT (a machine without such links or GEMMs), NO_MEMORY. */
sluice_status_t sluice_planner_predict_layer(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                             const sluice_planner_asked_t* asked, sluice_planner_prediction_t* out,
                                             sluice_planner_entry_t* entries, int32_t capacity);

/* All candidates, and the chosen one. */
typedef struct sluice_planner_candidates_s {
  const sluice_machine_t* machine;
  sluice_workload_t work;
  int32_t count;
  int32_t best; /* index; -1: none fits */
  sluice_status_t status;
  sluice_planner_candidate_t list[SLUICE_PLANNER_MOST_CANDIDATES];
} sluice_planner_candidates_t;

/* Chooses a layer's plan. out: memory of that size. Errors: as above, and OVER_BUDGET, with the candidates, if none
 * fits. */
sluice_status_t sluice_planner_choose_layer(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                            const sluice_planner_asked_t* wanted, sluice_planner_candidates_t* out);

/* ---- options of the planner over layers ----
 *
 * Offers the plans of a Mixture-of-Experts layer as options to the planner over layers: bytes and seconds of each on
 * its machine.
 *
 * Tensors that outlive a forward count as held. The layer's handle, tables, orders, counts and schedules count as
 * resident. Slots, headers and borrowed GEMM memory belong to the context, which the layers of a stage share, as they
 * share the arena. Orders, counts and schedules are shared too, but the largest of each may come from different layers:
 * they are counted per layer, and the sum is an upper bound. Offloaded rows count as held, as under a memory_budget. */

/* The policies that options may use. */
typedef struct sluice_moe_allowed_s {
  int32_t recompute; /* policies that re-dispatch or recompute */
  int32_t offload;   /* policies that offload */
} sluice_moe_allowed_t;

typedef struct sluice_moe_options_s {
  int32_t count;
  int32_t reserved;
  sluice_stages_option_t list[SLUICE_PLANNER_MOST_CANDIDATES]; /* tag: index in this list */
  sluice_planner_choice_t choices[SLUICE_PLANNER_MOST_CANDIDATES];
} sluice_moe_options_t;

/* Makes options of every choice that `wanted` leaves open, whatever the workload's memory_budget is: bytes of one
 * outstanding forward, with as few rows kept as possible. out: memory of that size. workload, wanted: checked. Errors:
 * as sluice_planner_predict_layer; INVALID_ARGUMENT if none of the wanted choices is allowed. */
sluice_status_t sluice_moe_options_make(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                        const sluice_planner_asked_t* wanted, const sluice_moe_allowed_t* allowed,
                                        sluice_moe_options_t* out);

/* Writes the name of a choice: "n 4 (T_DI keep, T_M recompute, weight gradients per chunk)". */
void sluice_moe_options_name(const sluice_planner_choice_t* choice, sluice_text_t* text);
