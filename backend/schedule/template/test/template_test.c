// SPDX-License-Identifier: Apache-2.0
/* The ops of templates and the lanes, slots and runs they take. check_test and mutants_test show that the dependencies
 * suffice and that none is superfluous. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/schedule/schedule.h"
#include "backend/schedule/template/template.h"
#include "backend/schedule/test/forms.h"
#include "sluice/moe.h"

typedef void (*check_fn_t)(const sluice_template_t* t);

static void run_check(const sluice_template_t* t, void* user) { (*(check_fn_t*)user)(t); }

/* Checks every form with n chunks, under each uniform policy and a mixed one. Returns the number of forms. */
static int64_t for_each_template(int32_t n, check_fn_t check) {
  int64_t seen = 0;
  for (int32_t policy = 0; policy <= 9; ++policy) seen += for_each_form(n, policy, 1, run_check, &check);
  return seen;
}

static sluice_template_t* build(sluice_template_spec_t spec) {
  sluice_template_t* t = NULL;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_OK);
  return t;
}

TEST(Template_OneRank_HasNoExchangeAndOneLane) {
  sluice_template_t* t = build((sluice_template_spec_t){.num_chunks = 3, .single_rank = 1, .keep = 1});
  for (int32_t i = 0; i < t->num_ops; ++i) {
    assert_int_equal(t->ops[i].lane, SLUICE_LANE_COMPUTE);
    assert_false(sluice_op_is_exchange(t->ops[i].kind));
  }
  assert_int_equal(t->num_deps, 0);
  sluice_template_destroy(t, sluice_process_allocator());
}

/* The return of a chunk is grouped with the dispatch two chunks later, even if dispatches could run further ahead. */
TEST(Template_Grouped_ReturnsOneChunkWhileAnotherLeaves) {
  for (int32_t form = 0; form < 6; ++form) {
    const int backward = form % 2, by_rows = form / 2 == 1, again = form / 2 == 2;
    sluice_template_spec_t spec = {.num_chunks = 4, .grouped = 1, .keep = !backward, .direction = backward};
    spec.chunks_by_experts = (int16_t)by_rows;
    if (backward) spec.dgrad = 1, spec.wgrad = SLUICE_WGRAD_CALL_NOW;
    for (int32_t i = 0; i < 4 && again; ++i) spec.restore_input[i] = SLUICE_RESTORE_REDISPATCH;
    sluice_template_t* t = build(spec);
    char order[128] = "";
    for (int32_t i = 0; i < t->num_ops; ++i) {
      const sluice_op_t* op = &t->ops[i];
      if (!sluice_op_is_exchange(op->kind)) continue;
      const int returns = op->kind == SLUICE_OP_COMBINE || op->kind == SLUICE_OP_COMBINE_GRAD;
      char name[8] = {op->group == SLUICE_GROUP_OPENS ? '(' : ' ', returns ? 'R' : 'S', (char)('1' + op->chunk),
                      op->group == SLUICE_GROUP_CLOSES ? ')' : ' '};
      if (op->kind == SLUICE_OP_REDISPATCH) name[1] = 'D';
      strcat(order, name);
    }
    const char* want =
        backward && again ? " D1  S1  D2  S2 (R1  D3) S3 (R2  D4) S4  R3  R4 " : " S1  S2 (R1  S3)(R2  S4) R3  R4 ";
    assert_string_equal(order, want);
    assert_int_equal(t->ring[SLUICE_T_SEND], 2);
    assert_int_equal(t->ring[SLUICE_T_RECV], by_rows ? 4 : 2);
    sluice_template_destroy(t, sluice_process_allocator());
  }
}

TEST(Template_GroupedWhereNothingReturns_IsRefused) {
  sluice_template_t* t = NULL;
  sluice_template_spec_t spec = {.num_chunks = 4, .grouped = 1, .single_rank = 1};
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_UNSUPPORTED);
  spec.single_rank = 0, spec.only = SLUICE_PART_DISPATCH;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_UNSUPPORTED);
  assert_null(t);
}

/* A run is one job of a lane: only its first op may have dependencies, and other ops may wait for its last op only. */
static void check_runs(const sluice_template_t* t) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    for (int32_t d = 0; d < op->num_deps; ++d) assert_true(sluice_ends_run(t, t->deps[op->first_dep + d]));
    if (op->first_of_run == i) continue;
    assert_true(i > 0 && op->first_of_run == t->ops[i - 1].first_of_run && op->first_of_run < i);
    assert_int_equal(op->lane, t->ops[i - 1].lane);
    assert_int_equal(op->num_deps, 0);
    assert_false(sluice_op_is_exchange(op->kind) || sluice_op_is_exchange(t->ops[i - 1].kind));
  }
}

TEST(Template_Runs_NeitherWaitNorAreAwaitedInTheirMiddle) { assert_true(for_each_template(3, check_runs) > 0); }

TEST(Template_ExpertsOfAChunk_AreOneRun) {
  sluice_template_t* t = build((sluice_template_spec_t){.num_chunks = 8, .keep = 1});
  int32_t runs = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    runs += sluice_ends_run(t, i);
    if (t->ops[i].lane == SLUICE_LANE_COMPUTE)
      assert_int_equal(sluice_ends_run(t, i), t->ops[i].kind == SLUICE_OP_GEMM2);
  }
  assert_int_equal(t->num_ops, 8 * 7);
  assert_int_equal(runs, 8 * 5); /* dispatch; unpack; the experts' three ops; combine; reduce */
  sluice_template_destroy(t, sluice_process_allocator());
}

TEST(Template_ChunksOutOfRange_AreRefused) {
  sluice_template_t* t = NULL;
  sluice_template_spec_t spec = {.num_chunks = 0};
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_INVALID_ARGUMENT);
  spec.num_chunks = SLUICE_MAX_CHUNKS + 1;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_INVALID_ARGUMENT);
  assert_null(t);
}

TEST(Template_PolicyOfTheOtherTensor_IsRefusedWithThoseThatFit) {
  sluice_template_t* t = NULL;
  sluice_template_spec_t spec = {.num_chunks = 2, .keep = 1};
  spec.restore_pre_activation[1] = SLUICE_RESTORE_REDISPATCH;
  REFUSED(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_INVALID_ARGUMENT,
          "of T_M in chunk 1 of 2 is 2; known are keep (0), offload (1) and recompute (3)");
  spec.restore_pre_activation[1] = 0, spec.restore_input[0] = SLUICE_RESTORE_RECOMPUTE;
  REFUSED(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_INVALID_ARGUMENT,
          "of T_DI in chunk 0 of 2 is 3; known are keep (0), offload (1) and re-dispatch (2)");
  spec.restore_input[0] = 0, spec.restore_input[2] = SLUICE_RESTORE_OFFLOAD;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_E_INVALID_ARGUMENT);
}

/* Counts the ops of a kind in the template of a spec with these policies for all chunks. */
static int32_t count_ops(sluice_template_spec_t spec, int32_t di, int32_t m, int32_t kind) {
  for (int32_t i = 0; i < spec.num_chunks; ++i)
    spec.restore_input[i] = (uint8_t)di, spec.restore_pre_activation[i] = (uint8_t)m;
  sluice_template_t* t = build(spec);
  int32_t count = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) count += t->ops[i].kind == kind;
  sluice_template_destroy(t, sluice_process_allocator());
  return count;
}

/* Each policy of backend/model/restore.h adds copies for rows in host memory, exchanges and GEMMs, and no other op. */
TEST(Template_EachPolicy_AddsTheOpsOfItsRow) {
  const int32_t n = 3;
  const sluice_template_spec_t forward = {.num_chunks = n, .keep = 1};
  const sluice_template_spec_t backward = {
      .direction = SLUICE_BACKWARD, .num_chunks = n, .dgrad = 1, .wgrad = SLUICE_WGRAD_CALL_NOW};
  for (int32_t di = 0; di < SLUICE_NUM_RESTORES; ++di) {
    for (int32_t m = 0; m < SLUICE_NUM_RESTORES; ++m) {
      if (!sluice_restore_is_for(di, SLUICE_T_DI) || !sluice_restore_is_for(m, SLUICE_T_M)) continue;
      const sluice_restore_t *a = sluice_restore(di), *b = sluice_restore(m);
      const int32_t copies = a->host_rows + b->host_rows, exchanges = a->exchanges + b->exchanges;
      for (int32_t kind = 0; kind < SLUICE_OP_COUNT; ++kind) {
        int32_t in_forward = kind == SLUICE_OP_COPY_OUT ? copies : 0;
        int32_t in_backward = kind == SLUICE_OP_COPY_IN                                  ? copies
                              : kind == SLUICE_OP_REDISPATCH || kind == SLUICE_OP_UNPACK ? exchanges
                              : kind == SLUICE_OP_RECOMPUTE                              ? a->gemms + b->gemms
                                                                                         : 0;
        assert_int_equal(count_ops(forward, di, m, kind) - count_ops(forward, 0, 0, kind), n * in_forward);
        assert_int_equal(count_ops(backward, di, m, kind) - count_ops(backward, 0, 0, kind), n * in_backward);
      }
    }
  }
}

static int32_t last_of_kind(const sluice_template_t* t, int32_t kind, int32_t chunk, int32_t tensor) {
  int32_t found = -1;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (op->kind != kind || op->chunk != chunk) continue;
    if (tensor < 0 || (op->num_writes > 0 && op->writes[0].tensor == tensor)) found = i;
  }
  return found;
}

static int is_waited_for(const sluice_template_t* t, int32_t op, int32_t other) {
  for (int32_t d = 0; d < t->ops[op].num_deps; ++d) {
    if (t->deps[t->ops[op].first_dep + d] == other) return 1;
  }
  return 0;
}

/* With shared slots, S1 and S2 hold two tensors of width H per chunk, as S3 and S4 do. The cost is a wait: the slot for
 * activated rows may still be copied for the previous chunk. */
TEST(Template_SharedAct_TakesTheSlotThatWasCopied) {
  for (int32_t shares = 0; shares < 2; ++shares) {
    sluice_template_spec_t spec = {.num_chunks = 4, .keep = 1, .shares_act = shares};
    for (int32_t i = 0; i < 4; ++i)
      spec.restore_input[i] = SLUICE_RESTORE_REDISPATCH, spec.restore_pre_activation[i] = SLUICE_RESTORE_OFFLOAD;
    sluice_template_t* t = build(spec);
    assert_int_equal(t->ring[SLUICE_T_M], 2);
    assert_int_equal(t->ring[SLUICE_T_ACT], shares ? 0 : 1);
    const int32_t act = last_of_kind(t, SLUICE_OP_ACTIVATION, 1, -1);
    const int32_t copy = last_of_kind(t, SLUICE_OP_COPY_OUT, 0, SLUICE_T_HOST_M);
    assert_int_equal(is_waited_for(t, act, copy), shares);
    sluice_template_destroy(t, sluice_process_allocator());
    spec.direction = SLUICE_BACKWARD, spec.keep = 0, spec.dgrad = 1, spec.wgrad = SLUICE_WGRAD_CALL_NOW;
    spec.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
    t = build(spec);
    assert_int_equal(t->ring[SLUICE_T_M], 2);
    assert_int_equal(t->ring[SLUICE_T_DACT], shares ? 0 : 1);
    const int32_t back = last_of_kind(t, SLUICE_OP_COPY_IN, 1, SLUICE_T_M);
    assert_int_equal(is_waited_for(t, back, last_of_kind(t, SLUICE_OP_WEIGHT_GRAD, 0, -1)), shares);
    sluice_template_destroy(t, sluice_process_allocator());
  }
}

/* If T_M is not recomputed, only the weight gradients read T_DI, so its copy comes second. */
TEST(Template_TwoCopiesIn_BeginWithTheOneThatIsReadFirst) {
  sluice_template_spec_t spec = {.direction = SLUICE_BACKWARD,
                                 .num_chunks = 3,
                                 .dgrad = 1,
                                 .wgrad = SLUICE_WGRAD_CALL_NOW,
                                 .wgrad_mode = SLUICE_WGRAD_PER_CHUNK};
  for (int32_t i = 0; i < 3; ++i) spec.restore_input[i] = spec.restore_pre_activation[i] = SLUICE_RESTORE_OFFLOAD;
  for (spec.shares_act = 0; spec.shares_act < 2; ++spec.shares_act) {
    sluice_template_t* t = build(spec);
    for (int32_t i = 0; i < 3; ++i) {
      const int32_t m = last_of_kind(t, SLUICE_OP_COPY_IN, i, SLUICE_T_M);
      const int32_t di = last_of_kind(t, SLUICE_OP_COPY_IN, i, SLUICE_T_DI);
      assert_true(m >= 0 && di >= 0);
      if (!spec.shares_act || i == 0) assert_true(m < di);
    }
    sluice_template_destroy(t, sluice_process_allocator());
  }
}
