// SPDX-License-Identifier: Apache-2.0
/* The checker finds planted faults: a need removed, a limit off by one, a message to another stage, swapped ops of a
 * plan, a follower that ignores its leader, a slot or op in another place. An independent ordering decides whether a
 * removed need matters: if so the checker must find it, otherwise it must find nothing. */
#include "backend/pipeline/check/check.h"
#include "backend/pipeline/test/pipelines.h"

static sluice_pipeline_finding_t explore(const sluice_pipeline_program_t* program, int32_t replicas,
                                         int32_t is_buffered, int32_t followers_choose) {
  sluice_pipeline_check_options_t options;
  sluice_pipeline_check_options_init(&options);
  options.replicas = replicas;
  options.is_buffered = is_buffered;
  options.is_reduced = replicas > 1;
  options.followers_choose = followers_choose;
  sluice_pipeline_finding_t finding;
  if (sluice_pipeline_explore(program, &options, sluice_process_allocator(), &finding, NULL) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  return finding;
}

static int32_t form_of(const sluice_pipeline_program_t* program) {
  sluice_pipeline_finding_t finding;
  sluice_pipeline_check_form(program, &finding);
  return finding.fault;
}

static void assert_described(const sluice_pipeline_program_t* program, const sluice_pipeline_finding_t* finding) {
  char text[512] = "";
  sluice_pipeline_finding_describe(program, finding, text, sizeof text);
  assert_true(strlen(text) > 20);
  assert_null(strstr(text, "no op"));
}

/* ---- dropped needs ---- */

/* Whether b follows a on every path: needs, the plan's order, and a message after its send. */
static void close(const sluice_pipeline_program_t* program, char* reaches) {
  int32_t n = program->num_ops;
  memset(reaches, 0, (size_t)n * (size_t)n);
  for (int32_t b = 0; b < n; ++b) {
    const sluice_stage_op_t* op = &program->ops[b];
    for (int32_t k = 0; k < op->num_needs; ++k) reaches[program->needs[op->first_need + k] * n + b] = 1;
    if (sluice_stage_op_is_message(op->kind) && !sluice_stage_op_is_send(op->kind)) reaches[op->match * n + b] = 1;
    if (program->policy->is_planned && op->place > 0) {
      reaches[program->order[program->first_position[op->stage] + op->place - 1] * n + b] = 1;
    }
  }
  for (int32_t k = 0; k < n; ++k) {
    for (int32_t a = 0; a < n; ++a) {
      for (int32_t b = 0; reaches[a * n + k] && b < n; ++b) reaches[a * n + b] |= reaches[k * n + b];
    }
  }
}

static int is_ordered(const sluice_pipeline_program_t* program, char* reaches) {
  close(program, reaches);
  for (int32_t s = 0; s < program->spec.num_stages; ++s) {
    for (int32_t b = program->first_op[s]; b < program->first_op[s + 1]; ++b) {
      for (int32_t a = program->first_op[s]; a < b; ++a) {
        int is_conflict = sluice_stage_conflict(&program->ops[a], &program->ops[b]) != SLUICE_PIPELINE_FAULT_NONE;
        if (is_conflict && !reaches[a * program->num_ops + b]) return 0;
      }
    }
  }
  return 1;
}

static void drop_each_need(const sluice_pipeline_spec_t* spec, int32_t* found, int32_t* implied) {
  sluice_pipeline_program_t* program = program_of(spec);
  char* reaches = malloc((size_t)program->num_ops * (size_t)program->num_ops);
  assert_non_null(reaches);
  for (int32_t i = 0; i < program->num_ops; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    for (int32_t k = 0; k < op->num_needs; ++k) {
      int32_t *at = &program->needs[op->first_need + k], *last = &program->needs[op->first_need + op->num_needs - 1];
      int32_t dropped = *at;
      *at = *last;
      --op->num_needs;
      sluice_pipeline_finding_t finding = explore(program, 1, 1, 0);
      if (is_ordered(program, reaches)) {
        assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_NONE);
        ++*implied;
      } else {
        assert_true(finding.fault == SLUICE_PIPELINE_FAULT_OVERWRITTEN ||
                    finding.fault == SLUICE_PIPELINE_FAULT_UNDEFINED ||
                    finding.fault == SLUICE_PIPELINE_FAULT_IN_FLIGHT);
        assert_described(program, &finding);
        ++*found;
      }
      ++op->num_needs;
      *at = dropped;
    }
  }
  free(reaches);
  free_program(program);
}

TEST(Need_Dropped_IsFoundWhereNothingElseImpliesIt) {
  int32_t found = 0, implied = 0;
  for (int32_t limit = 1; limit <= 3; ++limit) {
    sluice_pipeline_spec_t spec = pipeline_of(3, 1, 3, SLUICE_POLICY_MESSAGE_DRIVEN, limit);
    drop_each_need(&spec, &found, &implied);
    spec = pipeline_of(2, 2, 3, SLUICE_POLICY_MESSAGE_DRIVEN, limit);
    spec.placement = SLUICE_PLACEMENT_V;
    drop_each_need(&spec, &found, &implied);
    spec = pipeline_of(2, 1, 3, SLUICE_POLICY_MESSAGE_DRIVEN, limit);
    spec.separate_wgrad = 1;
    spec.held[0] = spec.held[1] = 1;
    drop_each_need(&spec, &found, &implied);
    spec.reduces = 1;
    drop_each_need(&spec, &found, &implied);
  }
  const int32_t plans[] = {SLUICE_POLICY_1F1B, SLUICE_POLICY_GPIPE, SLUICE_POLICY_ZERO_BUBBLE, SLUICE_POLICY_DEEPSPEED};
  for (size_t i = 0; i < sizeof plans / sizeof plans[0]; ++i) {
    sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, plans[i], 0);
    drop_each_need(&spec, &found, &implied);
  }
  print_message("%d dropped needs found, %d implied by others\n", found, implied);
  assert_true(found > 400);
}

/* ---- limits ---- */

TEST(Limit_OffByOne_IsFound) {
  for (int32_t c = 0; c < 3; ++c) {
    sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 3);
    sluice_pipeline_program_t* program = program_of(&spec);
    /* The program has slots for three, and two were requested. */
    program->spec.in_flight[c] = 2;
    sluice_pipeline_finding_t finding = explore(program, 1, 0, 0);
    assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_IN_FLIGHT);
    assert_int_equal(program->ops[finding.op].virtual_stage, c);
    assert_described(program, &finding);
    free_program(program);
    spec.separate_wgrad = 1;
    spec.held[c] = 2;
    program = program_of(&spec);
    program->spec.held[c] = 1;
    finding = explore(program, 1, 0, 0);
    assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_IN_FLIGHT);
    assert_int_equal(program->ops[finding.op].kind, SLUICE_STAGE_BACKWARD);
    free_program(program);
  }
}

/* ---- messages ---- */

TEST(Message_ToAnotherStage_IsFound) {
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  for (int32_t i = 0; i < program->num_ops; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    if (!sluice_stage_op_is_message(op->kind)) continue;
    int16_t peer = op->peer;
    for (op->peer = 0; op->peer < 3; ++op->peer) {
      if (op->peer == peer) continue;
      sluice_pipeline_match(program);
      assert_int_equal(form_of(program), SLUICE_PIPELINE_FAULT_MESSAGE);
      for (int32_t is_buffered = 0; is_buffered < 2; ++is_buffered) {
        sluice_pipeline_finding_t finding = explore(program, 1, is_buffered, 0);
        assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_DEADLOCK);
        assert_described(program, &finding);
      }
    }
    op->peer = peer;
  }
  sluice_pipeline_match(program);
  assert_int_equal(form_of(program), SLUICE_PIPELINE_FAULT_NONE);
  free_program(program);
}

/* ---- plans ---- */

static void swap_places(sluice_pipeline_program_t* program, int32_t a, int32_t b) {
  sluice_stage_op_t *one = &program->ops[a], *other = &program->ops[b];
  int32_t first = program->first_position[one->stage], place = one->place;
  one->place = other->place;
  other->place = place;
  program->order[first + one->place] = a;
  program->order[first + other->place] = b;
}

TEST(Plan_WithAnOpBeforeWhatItNeeds_IsADeadlock) {
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, SLUICE_POLICY_ZERO_BUBBLE, 0);
  sluice_pipeline_program_t* program = program_of(&spec);
  static const int32_t pairs[][2] = {{SLUICE_STAGE_BACKWARD, SLUICE_STAGE_WEIGHT_GRAD},
                                     {SLUICE_STAGE_FORWARD, SLUICE_STAGE_BACKWARD}};
  for (size_t k = 0; k < 2; ++k) {
    for (int32_t c = 0; c < 3; ++c) {
      for (int32_t i = 0; i < 4; ++i) {
        int32_t a = sluice_pipeline_find(program, pairs[k][0], c, i);
        int32_t b = sluice_pipeline_find(program, pairs[k][1], c, i);
        swap_places(program, a, b);
        assert_int_equal(form_of(program), SLUICE_PIPELINE_FAULT_NONE);
        sluice_pipeline_finding_t finding = explore(program, 1, 1, 0);
        assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_DEADLOCK);
        assert_described(program, &finding);
        swap_places(program, a, b);
      }
    }
  }
  assert_int_equal(explore(program, 1, 1, 0).fault, SLUICE_PIPELINE_FAULT_NONE);
  free_program(program);
}

TEST(StockOrder_WithASendBeforeItsReceive_HangsUnlessSendsAreBuffered) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 3, SLUICE_POLICY_DEEPSPEED, 0);
  sluice_pipeline_program_t* program = program_of(&spec);
  swap_places(program, sluice_pipeline_find(program, SLUICE_STAGE_RECEIVE_GRADIENT, 0, 0),
              sluice_pipeline_find(program, SLUICE_STAGE_SEND_ACTIVATION, 0, 1));
  assert_int_equal(explore(program, 1, 0, 0).fault, SLUICE_PIPELINE_FAULT_DEADLOCK);
  assert_int_equal(explore(program, 1, 1, 0).fault, SLUICE_PIPELINE_FAULT_NONE);
  free_program(program);
}

/* ---- columns ---- */

TEST(Follower_ThatIgnoresItsLeader_IsFound) {
  static const int32_t policies[] = {SLUICE_POLICY_MESSAGE_DRIVEN, SLUICE_POLICY_BACKWARD_FIRST};
  for (size_t i = 0; i < 2; ++i) {
    for (int32_t p = 2; p <= 4; ++p) {
      sluice_pipeline_spec_t spec = pipeline_of(p, 1, 4, policies[i], 3);
      for (int32_t c = 0; c < p; ++c) spec.expert_parallel[c] = 1;
      sluice_pipeline_program_t* program = program_of(&spec);
      assert_int_equal(explore(program, 2, 0, 0).fault, SLUICE_PIPELINE_FAULT_NONE);
      sluice_pipeline_finding_t finding = explore(program, 2, 0, 1);
      assert_int_equal(finding.fault, SLUICE_PIPELINE_FAULT_COLUMN_ORDER);
      assert_described(program, &finding);
      free_program(program);
    }
  }
  /* Without collectives, no replica has to follow. */
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 3, SLUICE_POLICY_MESSAGE_DRIVEN, 3);
  sluice_pipeline_program_t* program = program_of(&spec);
  assert_int_equal(explore(program, 2, 0, 1).fault, SLUICE_PIPELINE_FAULT_NONE);
  free_program(program);
}

/* ---- forms ---- */

TEST(Program_ChangedInOnePlace_IsMalformed) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 2, 3, SLUICE_POLICY_BACKWARD_FIRST, 2);
  spec.separate_wgrad = 1;
  spec.reduces = 1;
  sluice_pipeline_program_t* program = program_of(&spec);
  for (int32_t i = 0; i < program->num_ops; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    const sluice_stage_op_t kept = *op;
#define CHANGED(change, fault) (change, assert_int_equal(form_of(program), fault), *op = kept)
    CHANGED(op->kind = SLUICE_STAGE_OP_COUNT, SLUICE_PIPELINE_FAULT_FORM);
    CHANGED(op->kind = (int16_t)(kept.kind == 0 ? 1 : kept.kind - 1), SLUICE_PIPELINE_FAULT_FORM);
    CHANGED(op->stage = (int16_t)(1 - kept.stage), SLUICE_PIPELINE_FAULT_FORM);
    CHANGED(op->num_needs = -1, SLUICE_PIPELINE_FAULT_FORM);
    CHANGED(op->first_need = program->num_needs + 1, SLUICE_PIPELINE_FAULT_FORM);
    if (kept.kind == SLUICE_STAGE_FLUSH) continue;
    CHANGED(op->virtual_stage = 4, SLUICE_PIPELINE_FAULT_FORM);
    CHANGED(op->micro_batch = 3, SLUICE_PIPELINE_FAULT_FORM);
    if (kept.micro_batch > 0) CHANGED(--op->micro_batch, SLUICE_PIPELINE_FAULT_FORM);
    if (kept.num_reads > 0) {
      CHANGED(--op->num_reads, SLUICE_PIPELINE_FAULT_ACCESS);
      CHANGED(++op->reads[0].slot, SLUICE_PIPELINE_FAULT_ACCESS);
    }
    if (kept.num_writes > 0) CHANGED(op->writes[0].tensor ^= 1, SLUICE_PIPELINE_FAULT_ACCESS);
    if (sluice_stage_op_is_message(kept.kind)) CHANGED(op->match = -1, SLUICE_PIPELINE_FAULT_MESSAGE);
    if (kept.num_needs > 0) {
      int32_t *need = &program->needs[kept.first_need], needed = *need;
      CHANGED(*need = i, SLUICE_PIPELINE_FAULT_FORM);
      CHANGED(*need = program->first_op[kept.stage] - 1, SLUICE_PIPELINE_FAULT_FORM);
      *need = needed;
    }
  }
  assert_int_equal(form_of(program), SLUICE_PIPELINE_FAULT_NONE);
  free_program(program);
}
