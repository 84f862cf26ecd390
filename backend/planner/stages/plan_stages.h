// SPDX-License-Identifier: Apache-2.0
/* Plans a model over a pipeline: the stage of each layer and the handling of its activations, so that the slowest stage
 * is as fast as budgets in bytes allow. Pure: no ranks, no clock, no random numbers; equal problems give equal plans on
 * every machine of a kind. model.h has the types, sluice/stages.h units and formulas.
 *
 * Chains (no edges, or each layer reads only its predecessor) are planned by dynamic programming over (first, end,
 * stage) with branch and bound within each run; plan->is_optimal says whether that ended before its limit of nodes.
 * Other graphs take the better of vPipe's decomposition (coarsen, Kernighan-Lin, refine, alternating with the options
 * of each stage) and the best cut of the order. For a single stage only the options are chosen.
 *
 * Source: vPipe (TPDS 2022); PipeDream (SOSP 2019) for the dynamic programme. docs/planner.md describes the method. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/text.h"
#include "backend/planner/stages/model.h"

/* Fills *plan, whose choices [num_layers] and stages [num_stages] are the caller's memory.
 *
 * Owns: everything is borrowed for the call; all allocations are freed. Threads: any, with separate plans. Errors:
 * INVALID_ARGUMENT, naming the field: no effect. NO_MEMORY: no plan. OVER_BUDGET: nothing fits; the record names the
 * blocking stage and the smallest budget in bytes that would unblock it, plan->blocking_stage and
 * ->smallest_budget_bytes have the same as numbers, and the rest of the plan is the one with the fewest bytes. For a
 * chain that is exact: if all budgets are equal, smallest_budget_bytes on every stage fits and one byte less does not;
 * otherwise every budget has to grow by short_bytes. */
sluice_status_t sluice_stages_plan(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                   sluice_stages_plan_t* plan);

/* Predicts a plan whose stages are given: plan->choices[i].stage, and in all choices .option, or -1 in all, where the
 * fastest options that fit are chosen. Errors: as sluice_stages_plan. OVER_BUDGET is about these stages; with -1 the
 * options with the fewest bytes are taken then. */
sluice_status_t sluice_stages_price(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_stages_plan_t* plan);

/* ---- explain.c: a plan in sentences: one line per stage with the reason for its first layer, and one per layer with
 * the reason for its option ---- */

/* Returns "keep", "recompute", "offload", "mixed"; "?" for other numbers. Immutable. */
const char* sluice_stages_kind_name(int32_t kind);

/* Writes the name of an option for a sentence. */
typedef struct sluice_stages_names_s {
  void (*add)(void* user, int32_t layer, int32_t option, sluice_text_t* text);
  void* user;
} sluice_stages_names_t;

/* Writes the explanation. plan: the result of sluice_stages_plan for problem, also after OVER_BUDGET. names NULL:
 * options by kind and number. Any thread; no errors. */
void sluice_stages_explain(const sluice_stages_problem_t* problem, const sluice_stages_plan_t* plan,
                           const sluice_stages_names_t* names, sluice_text_t* text);
