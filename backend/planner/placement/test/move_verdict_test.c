// SPDX-License-Identifier: Apache-2.0
/* The verdict whether a move pays. */
#include <math.h>

#include "backend/planner/placement/move_verdict.h"
#include "third_party/bazel/test.h"

/* A step of 10 s becomes one of 9 s; the move takes 50 s, and the horizon is 100 steps. */
static sluice_planner_move_t a_good_move(void) {
  return (sluice_planner_move_t){.struct_size = sizeof(sluice_planner_move_t),
                                 .step_seconds = 10,
                                 .planned_step_seconds = 9,
                                 .move_seconds = 50,
                                 .horizon_steps = 100,
                                 .least_gain = 0.05,
                                 .steps_since_move = -1,
                                 .least_steps = 10};
}

static int32_t verdict_of(const sluice_planner_move_t* move) {
  int32_t verdict = -1;
  assert_int_equal(sluice_move_verdict(move, &verdict), SLUICE_OK);
  return verdict;
}

TEST(Verdict_EachReason_IsSaid) {
  sluice_planner_move_t m = a_good_move();
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_PAYS);
  m.planned_step_seconds = 10;
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_NO_GAIN);
  m.planned_step_seconds = 9.6;
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_SMALL);
  m = a_good_move(), m.steps_since_move = 9;
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_TOO_SOON);
  m.steps_since_move = 10;
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_PAYS);
  m = a_good_move(), m.horizon_steps = 50; /* gains 50 s, costs 50 s */
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_COSTS_MORE);
  m.horizon_steps = 51;
  assert_int_equal(verdict_of(&m), SLUICE_MOVE_PAYS);
}

TEST(Verdict_WhatIsNoNumber_IsRefused) {
  int32_t verdict = -1;
  sluice_planner_move_t m = a_good_move();
  m.step_seconds = NAN;
  assert_int_equal(sluice_move_verdict(&m, &verdict), SLUICE_E_INVALID_ARGUMENT);
  m = a_good_move(), m.move_seconds = -1;
  assert_int_equal(sluice_move_verdict(&m, &verdict), SLUICE_E_INVALID_ARGUMENT);
  m = a_good_move(), m.least_gain = 1;
  assert_int_equal(sluice_move_verdict(&m, &verdict), SLUICE_E_INVALID_ARGUMENT);
  m = a_good_move(), m.least_steps = -1;
  assert_int_equal(sluice_move_verdict(&m, &verdict), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(verdict, -1);
}
