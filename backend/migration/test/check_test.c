// SPDX-License-Identifier: Apache-2.0
/* The protocol checker finds no fault in the protocol, and finds each planted fault. */

#include "backend/migration/check.h"
#include "third_party/bazel/test.h"

enum { MAX_RULES = 32 };

typedef struct planted_s {
  sluice_move_rule_t rules[MAX_RULES];
  sluice_move_check_options_t options;
} planted_t;

static void plant(planted_t* p, int32_t ranks) {
  sluice_move_check_options_init(&p->options);
  assert_true(p->options.num_rules <= MAX_RULES);
  memcpy(p->rules, p->options.rules, (size_t)p->options.num_rules * sizeof p->rules[0]);
  p->options.rules = p->rules;
  p->options.num_ranks = ranks;
}

static sluice_move_rule_t* rule_of(planted_t* p, int32_t from, int32_t event) {
  for (int32_t i = 0; i < p->options.num_rules; ++i) {
    if (p->rules[i].from == from && p->rules[i].event == event) return &p->rules[i];
  }
  fail_msg("no rule for event %d in phase %d", event, from);
  return NULL;
}

static int32_t fault_of(const sluice_move_check_options_t* options) {
  int32_t fault, rank;
  int64_t states;
  assert_int_equal(sluice_move_check(options, sluice_process_allocator(), &fault, &rank, &states), SLUICE_OK);
  assert_true(states > 1);
  if (fault == SLUICE_MOVE_FAULT_NONE) print_message("%d ranks: %lld states\n", options->num_ranks, (long long)states);
  return fault;
}

/* ---- the protocol ---- */

TEST(Protocol_NothingGoesWrong_IsClean) {
  for (int32_t ranks = 2; ranks <= 3; ++ranks) {
    sluice_move_check_options_t options;
    sluice_move_check_options_init(&options);
    options.num_ranks = ranks;
    assert_int_equal(fault_of(&options), SLUICE_MOVE_FAULT_NONE);
  }
}

TEST(Protocol_RanksDieComeLateAndRefuse_OneEpochAndWholeState) {
  const int32_t most = getenv("SLUICE_FULL") != NULL ? 2 : 1;
  for (int32_t ranks = 2; ranks <= 3; ++ranks) {
    for (int32_t what = 0; what < 8; ++what) {
      sluice_move_check_options_t options;
      sluice_move_check_options_init(&options);
      options.num_ranks = ranks;
      options.max_killed = what & 1 ? (ranks == 3 ? most : 1) : 0;
      options.max_late = what & 2 ? 1 : 0;
      options.max_refusals = what & 4 ? 1 : 0;
      if (ranks == 3 && what == 7 && most == 1) continue; /* only with SLUICE_FULL: all three at once on three ranks */
      assert_int_equal(fault_of(&options), SLUICE_MOVE_FAULT_NONE);
    }
  }
}

/* ---- planted faults ---- */

TEST(Planted_RankThatCommitsBeforeAllAreReady_IsFound) {
  planted_t p;
  plant(&p, 3);
  p.options.max_killed = 1;
  sluice_move_rule_t* rule = rule_of(&p, SLUICE_MIGRATION_READY, SLUICE_MOVE_EVENT_ALL_READY);
  rule->to = SLUICE_MIGRATION_COMMITTED;
  rule->act = SLUICE_MOVE_DO_INSTALL;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_EPOCHS);
}

TEST(Planted_RankThatGoesBackAloneOnceItHasAgreed_IsFound) {
  planted_t p;
  plant(&p, 3);
  p.options.max_killed = 1;
  rule_of(&p, SLUICE_MIGRATION_AGREED, SLUICE_MOVE_EVENT_LOST)->to = SLUICE_MIGRATION_ABORTED;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_EPOCHS);
}

TEST(Planted_RankThatCommitsWhereItHasLostAnother_IsFound) {
  planted_t p;
  plant(&p, 2);
  p.options.max_late = 1;
  sluice_move_rule_t* rule = rule_of(&p, SLUICE_MIGRATION_READY, SLUICE_MOVE_EVENT_LOST);
  rule->to = SLUICE_MIGRATION_COMMITTED;
  rule->act = SLUICE_MOVE_DO_INSTALL;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_EPOCHS);
}

TEST(Planted_RankThatIsReadyBeforeAllIsHere_WaitsForNobodyAndIsFound) {
  planted_t p;
  plant(&p, 2);
  rule_of(&p, SLUICE_MIGRATION_FLUSHES, SLUICE_MOVE_EVENT_ALL_HERE)->say = SLUICE_MOVE_SAY_NOTHING;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_DEADLOCK);
}

TEST(Planted_WeightsOnly_AreFound) {
  planted_t p;
  plant(&p, 2);
  p.options.parts = SLUICE_MOVE_PART_WEIGHTS;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_MIXED);
}

TEST(Planted_GradientsThatStay_AreFound) {
  planted_t p;
  plant(&p, 2);
  p.options.parts = SLUICE_MOVE_PART_WEIGHTS | SLUICE_MOVE_PART_STATE;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_MIXED);
}

TEST(Planted_UpdateOfWhatHasBeenStreamed_IsAMissingStep) {
  planted_t p;
  plant(&p, 2);
  p.options.updates_first = 1;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_STEP);
}

TEST(Planted_StaleTableOfSlots_IsFound) {
  planted_t p;
  plant(&p, 2);
  p.options.keeps_table = 1;
  assert_int_equal(fault_of(&p.options), SLUICE_MOVE_FAULT_TABLE);
}
