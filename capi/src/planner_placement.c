// SPDX-License-Identifier: Apache-2.0
/* The public calls for planning placements: read the structs, then call backend/planner/placement. */
#include "sluice/placement.h"

#include "backend/base/alloc.h"
#include "backend/base/check.h"
#include "backend/base/structs.h"
#include "backend/planner/placement/move_verdict.h"
#include "backend/planner/placement/plan_placement.h"

void sluice_placement_problem_init(sluice_placement_problem_t* out_problem, size_t struct_size) {
  static const sluice_placement_problem_t defaults = {.target = 1.05};
  sluice_struct_init(out_problem, struct_size, &defaults, sizeof defaults);
}

void sluice_placement_result_init(sluice_placement_result_t* out_result, size_t struct_size) {
  sluice_struct_init(out_result, struct_size, NULL, 0);
}

void sluice_planner_move_init(sluice_planner_move_t* out_move, size_t struct_size) {
  static const sluice_planner_move_t defaults = {.horizon_steps = 100, .least_gain = 0.05, .steps_since_move = -1};
  sluice_struct_init(out_move, struct_size, &defaults, sizeof defaults);
}

sluice_status_t sluice_planner_placement(const sluice_placement_problem_t* problem,
                                         sluice_placement_result_t* inout_result) {
  sluice_placement_problem_t p;
  sluice_placement_result_t r;
  sluice_placement_problem_init(&p, sizeof p);
  SLUICE_TRY(sluice_struct_copy(&p, sizeof p, problem, sizeof p, "sluice_placement_problem_t"));
  SLUICE_TRY(sluice_struct_check_next(p.next, "sluice_placement_problem_t"));
  sluice_placement_result_init(&r, sizeof r);
  SLUICE_TRY(sluice_struct_copy(&r, sizeof r, inout_result, sizeof r, "sluice_placement_result_t"));
  SLUICE_TRY(sluice_struct_check_next(r.next, "sluice_placement_result_t"));
  SLUICE_TRY(SLUICE_REQUIRE(r.expert_rank != NULL && r.expert_slot != NULL,
                            "result: %s is NULL; pass an array with one entry for each expert",
                            r.expert_rank == NULL ? "expert_rank" : "expert_slot"));
  SLUICE_TRY(sluice_placement_plan(&p, sluice_process_allocator(), &r));
  sluice_struct_give(inout_result, &r, sizeof r);
  return SLUICE_OK;
}

sluice_status_t sluice_planner_move_verdict(const sluice_planner_move_t* move, int32_t* out_verdict) {
  sluice_planner_move_t m;
  SLUICE_TRY(SLUICE_REQUIRE(out_verdict != NULL, "sluice_planner_move_verdict: out_verdict is NULL"));
  sluice_planner_move_init(&m, sizeof m);
  SLUICE_TRY(sluice_struct_copy(&m, sizeof m, move, sizeof m, "sluice_planner_move_t"));
  SLUICE_TRY(sluice_struct_check_next(m.next, "sluice_planner_move_t"));
  return sluice_move_verdict(&m, out_verdict);
}
