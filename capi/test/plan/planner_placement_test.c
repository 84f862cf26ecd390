// SPDX-License-Identifier: Apache-2.0
/* The planner of placements through its public calls: a plan, and errors after which nothing has been written. */
#include <math.h>
#include <string.h>

#include "capi/test/rig/refusals.h"
#include "sluice/placement.h"

enum { EXPERTS = 8, RANKS = 4 };

/* Ranks 0 and 1 have the experts with high loads. */
typedef struct scene_s {
  uint64_t loads[EXPERTS], bytes[EXPERTS];
  int32_t rank[EXPERTS], slot[EXPERTS], new_rank[EXPERTS], new_slot[EXPERTS];
  sluice_placement_problem_t problem;
  sluice_placement_result_t result;
} scene_t;

static void open_scene(scene_t* s) {
  memset(s, 0, sizeof *s);
  for (int32_t e = 0; e < EXPERTS; ++e) {
    s->loads[e] = e < EXPERTS / 2 ? 100 : 10, s->bytes[e] = 1000;
    s->rank[e] = e / 2, s->slot[e] = e % 2, s->new_rank[e] = s->new_slot[e] = -7;
  }
  sluice_placement_problem_init(&s->problem, sizeof s->problem);
  s->problem.loads = s->loads, s->problem.expert_bytes = s->bytes;
  s->problem.expert_rank = s->rank, s->problem.expert_slot = s->slot;
  s->problem.num_experts = EXPERTS, s->problem.num_ranks = RANKS;
  sluice_placement_result_init(&s->result, sizeof s->result);
  s->result.expert_rank = s->new_rank, s->result.expert_slot = s->new_slot;
}

TEST(Placement_TwoFullRanks_SwapWithTheEmptyOnes) {
  scene_t s;
  open_scene(&s);
  WORKS(sluice_planner_placement(&s.problem, &s.result));
  assert_int_equal(s.result.load_before, 200);
  assert_int_equal(s.result.load, 110);
  assert_int_equal(s.result.bound_load, 110);
  assert_true(s.result.mean_load == 110.0);
  assert_int_equal(s.result.num_moves, 4);
  assert_int_equal(s.result.moved_bytes, 4000);
  assert_int_equal(s.result.is_optimal, 1);
  /* The plan becomes the current placement: it needs no change, and the result may overwrite its input. */
  s.result.expert_rank = memcpy(s.rank, s.new_rank, sizeof s.rank);
  s.result.expert_slot = memcpy(s.slot, s.new_slot, sizeof s.slot);
  WORKS(sluice_planner_placement(&s.problem, &s.result));
  assert_int_equal(s.result.num_moves, 0);
  assert_memory_equal(s.rank, s.new_rank, sizeof s.rank);
  assert_memory_equal(s.slot, s.new_slot, sizeof s.slot);
}

static void refused(scene_t* s, sluice_status_t status, const char* text) {
  REFUSED(sluice_planner_placement(&s->problem, &s->result), status, text);
  for (int32_t e = 0; e < EXPERTS; ++e) assert_true(s->new_rank[e] == -7 && s->new_slot[e] == -7);
  open_scene(s);
}

TEST(Placement_WhatCannotBe_IsRefusedByName) {
  static const sluice_ext_header_t extension;
  scene_t s;
  open_scene(&s);
  s.problem.num_experts = 0, refused(&s, BAD, "num_experts is 0");
  s.problem.num_experts = 4097, refused(&s, BAD, "num_experts is 4097");
  s.problem.num_ranks = 0, refused(&s, BAD, "num_ranks is 0");
  s.problem.num_ranks = 3, refused(&s, BAD, "expert_rank[6] is 3");
  s.problem.target = 0.9, refused(&s, BAD, "target is 0.9");
  s.problem.target = NAN, refused(&s, BAD, "target is ");
  s.problem.loads = NULL, refused(&s, BAD, "loads is NULL");
  s.problem.expert_rank = NULL, refused(&s, BAD, "expert_rank is NULL");
  s.problem.expert_slot = NULL, refused(&s, BAD, "expert_slot is NULL");
  s.result.expert_slot = NULL, refused(&s, BAD, "expert_slot is NULL");
  s.slot[3] = 0, refused(&s, BAD, "expert_slot[3] is 0: the 2 experts of rank 1");
  s.slot[3] = 2, refused(&s, BAD, "expert_slot[3] is 2");
  s.rank[3] = -1, refused(&s, BAD, "expert_rank[3] is -1");
  s.loads[2] = UINT64_MAX, refused(&s, BAD, "loads[2]");
  s.bytes[2] = (uint64_t)1 << 53, refused(&s, BAD, "expert_bytes[2]");
  s.problem.next = &extension, refused(&s, SLUICE_E_ABI, "extension");
  s.result.next = &extension, refused(&s, SLUICE_E_ABI, "extension");
  s.problem.struct_size = 8, refused(&s, SLUICE_E_ABI, "sluice_placement_problem_t");
  REFUSED(sluice_planner_placement(NULL, &s.result), BAD, "sluice_placement_problem_t");
  REFUSED(sluice_planner_placement(&s.problem, NULL), BAD, "sluice_placement_result_t");
}

TEST(Verdict_ByThePublicCall_HasItsDefaults) {
  DEFAULTS(sluice_planner_move, move);
  int32_t verdict = -1;
  move.step_seconds = 1, move.planned_step_seconds = 0.9, move.move_seconds = 9.9;
  WORKS(sluice_planner_move_verdict(&move, &verdict));
  assert_int_equal(verdict, SLUICE_MOVE_PAYS);
  move.planned_step_seconds = 0.96;
  WORKS(sluice_planner_move_verdict(&move, &verdict));
  assert_int_equal(verdict, SLUICE_MOVE_SMALL);
  move.horizon_steps = INFINITY;
  REFUSED(sluice_planner_move_verdict(&move, &verdict), BAD, "horizon_steps");
  REFUSED(sluice_planner_move_verdict(&move, NULL), BAD, "out_verdict");
  REFUSED(sluice_planner_move_verdict(NULL, &verdict), BAD, "sluice_planner_move_t");
}
