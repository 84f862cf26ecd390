/* Plans a model over a pipeline: which layer runs on which stage, and what is done with its activations, so that the
 * slowest stage is as fast as budgets in bytes allow. Pure: no ranks, no clock, no random numbers; equal problems give
 * equal plans on every machine of a kind. The types are in model.h, units and formulas in sluice/stages.h.
 *
 * Chains (no edges, or each layer reads the one before alone) are planned by dynamic programming over (first, end,
 * stage) with branch and bound within each run; plan->is_optimal says whether that ended before its limit of nodes.
 * Other graphs take vPipe's decomposition (coarsen, Kernighan-Lin, refine, in turns with the options of each stage)
 * and the best cut of the order, whichever is better. One stage needs neither: then the options alone are chosen.
 *
 * Source: vPipe (TPDS 2022); PipeDream (SOSP 2019) for the dynamic programme. docs/planner.md has the method. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PLAN_STAGES_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PLAN_STAGES_H_

#include "backend/base/alloc.h"
#include "backend/planner/stages/problem/model.h"

/* Fills *plan, whose choices [num_layers] and stages [num_stages] are the caller's memory.
 *
 * Owns: everything is borrowed for the call; what it takes of the allocator it gives back.
 * Threads: any, with plans of their own.
 * Errors: INVALID_ARGUMENT, naming the field: no effect. NO_MEMORY: no plan. OVER_BUDGET: nothing fits; the record
 * names the stage in the way and the smallest budget in bytes with which it would not be, plan->blocking_stage and
 * ->smallest_budget_bytes have the same as numbers, and the rest of the plan is what needs fewest bytes. For a chain
 * that is exact: with budgets all alike, smallest_budget_bytes on every stage fits and one byte less does not; else
 * every budget has to grow by short_bytes. */
sluice_status_t sluice_stages_plan(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                   sluice_stages_plan_t* plan);

/* The same, and out_steps: how many options and nodes were looked at, which is what the plan cost on any machine. */
sluice_status_t sluice_stages_plan_counted(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                           sluice_stages_plan_t* plan, uint64_t* out_steps);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PLAN_STAGES_H_ */
