// SPDX-License-Identifier: Apache-2.0
/* The hazard checker proves every template of the builder, and reports the fault of a changed template. */

#include "backend/schedule/check/releases.h"
#include "backend/schedule/template/template.h"
#include "backend/schedule/test/forms.h"
#include "third_party/bazel/test.h"

static sluice_allocator_t* memory(void) { return sluice_process_allocator(); }

static const char* finding_text(const sluice_template_t* t, const sluice_finding_t* f) {
  static char text[512];
  sluice_finding_describe(t, f, text, sizeof text);
  return text;
}

static int32_t hazard_of(const sluice_template_t* t, sluice_finding_t* finding) {
  assert_int_equal(sluice_schedule_check(t, memory(), finding), SLUICE_OK);
  return finding->hazard;
}

static void prove(const sluice_template_t* t, void* user) {
  (void)user;
  sluice_finding_t finding;
  if (hazard_of(t, &finding) == SLUICE_HAZARD_NONE) return;
  char form[FORM_TEXT_BYTES];
  describe_form(t, form, sizeof form);
  fail_msg("%s: %s", form, finding_text(t, &finding));
}

TEST(Builder_EveryTemplate_IsProved) {
  int64_t uniform = 0, mixed = 0;
  for (int32_t n = 1; n <= 32; ++n) {
    for (int32_t policy = 0; policy < 9; ++policy) uniform += for_each_form(n, policy, 0, prove, NULL);
    for (uint32_t seed = 1; seed <= 4; ++seed) mixed += for_each_form(n, 9, seed * 977u + (uint32_t)n, prove, NULL);
  }
  const int32_t large[] = {64, 255, 256};
  for (int i = 0; i < 3; ++i) mixed += for_each_form(large[i], 9, 5, prove, NULL);
  printf("templates proved: %lld (n <= 32 x 9 uniform policies), %lld with mixed policies\n", (long long)uniform,
         (long long)mixed);
  assert_true(uniform > 10000 && mixed > 4000);
}

/* ---- the guards of a correct reuse schedule, each removed once ---- */

static sluice_template_t* build(sluice_template_spec_t spec) {
  sluice_template_t* t = NULL;
  assert_int_equal(sluice_template_build(&spec, memory(), &t), SLUICE_OK);
  return t;
}

static int32_t find(const sluice_template_t* t, int32_t kind, int32_t chunk, int32_t tensor) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (op->kind != kind || op->chunk != chunk) continue;
    if (tensor < 0 || (op->num_reads > 0 && op->reads[0].tensor == tensor) || op->writes[0].tensor == tensor) return i;
  }
  fail_msg("no op %s of chunk %d", sluice_op_name(kind), chunk);
  return -1;
}

/* Removes every dependency through which `later` waits for `earlier`'s lane, then expects the hazard. */
static void forget(sluice_template_spec_t spec, int32_t later_kind, int32_t later_chunk, int32_t earlier_lane,
                   int32_t hazard, const char* text) {
  sluice_template_t* t = build(spec);
  int32_t later = find(t, later_kind, later_chunk, -1), kept = 0;
  sluice_op_t* op = &t->ops[later];
  for (int32_t d = 0; d < op->num_deps; ++d) {
    int32_t dep = t->deps[op->first_dep + d];
    if (t->ops[dep].lane != earlier_lane) t->deps[op->first_dep + kept++] = dep;
  }
  assert_true(kept < op->num_deps);
  op->num_deps = kept;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), hazard);
  if (strstr(finding_text(t, &finding), text) == NULL) fail_msg("%s", finding_text(t, &finding));
  assert_int_equal(sluice_schedule_check_or_fail(t, memory()), SLUICE_E_INVALID_ARGUMENT);
  sluice_template_destroy(t, memory());
}

enum { S1 = 4, S2 = 5, S3 = 7, S4 = 8 }; /* policies of spec_with */

static sluice_template_spec_t backward(int32_t n, int32_t policy) {
  sluice_template_spec_t spec = spec_with(n, policy, 0);
  spec.keep = 0, spec.direction = SLUICE_BACKWARD, spec.dgrad = 1, spec.wgrad = SLUICE_WGRAD_CALL_NOW;
  spec.wgrad_mode = 1;
  return spec;
}

/* Both ops read T_DI and write T_M on the compute lane, but a forward cannot run a recomputation, and a backward cannot
 * run the first GEMM. */
TEST(Op_OfTheOtherDirection_IsFound) {
  const int32_t kinds[2][2] = {{SLUICE_OP_GEMM1, SLUICE_OP_RECOMPUTE}, {SLUICE_OP_RECOMPUTE, SLUICE_OP_GEMM1}};
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_template_t* t = build(direction == SLUICE_FORWARD ? spec_with(2, S4, 0) : backward(2, S4));
    const int32_t index = find(t, kinds[direction][0], 1, -1);
    t->ops[index].kind = (int16_t)kinds[direction][1];
    char want[64];
    snprintf(want, sizeof want, "op of the other direction: op %d (%s of chunk 1)", index,
             sluice_op_name(kinds[direction][1]));
    sluice_finding_t finding;
    assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_WRONG_PASS);
    assert_string_equal(finding_text(t, &finding), want);
    sluice_template_destroy(t, memory());
  }
}

/* ---- releases ---- */

static int32_t bit_of(const sluice_op_t* op, int32_t tensor, int writes) {
  for (int32_t i = 0; i < (writes ? op->num_writes : op->num_reads); ++i) {
    if ((writes ? op->writes : op->reads)[i].tensor == tensor) return SLUICE_RELEASES_READ(i) << (writes ? 8 : 0);
  }
  fail_msg("%s does not touch %s", sluice_op_name(op->kind), sluice_tensor_kind_name(tensor));
  return 0;
}

static void assert_found(const sluice_template_t* t, int32_t hazard, const char* format, int32_t a, int32_t b) {
  char want[256];
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), hazard);
  snprintf(want, sizeof want, format, a, b);
  assert_string_equal(finding_text(t, &finding), want);
}

TEST(Releases_TooManyTooFewOrTooEarly_AreNamed) {
  sluice_template_t* t = build((sluice_template_spec_t){.num_chunks = 2});
  int32_t first = find(t, SLUICE_OP_UNPACK, 0, -1), last = find(t, SLUICE_OP_GEMM1, 0, -1);
  sluice_op_t *unpack = &t->ops[first], *gemm1 = &t->ops[last], *reduce = &t->ops[find(t, SLUICE_OP_REDUCE, 0, -1)];
  const int32_t early = bit_of(unpack, SLUICE_T_DI, 1), right = bit_of(gemm1, SLUICE_T_DI, 0);
  assert_int_equal(gemm1->releases & right, right);
  gemm1->releases ^= right;
  assert_found(t, SLUICE_HAZARD_NOT_RELEASED,
               "missing release: op %d (gemm1 of chunk 0) is the last to use slot 0 of T_DI and does not free it", last,
               0);
  unpack->releases ^= early;
  assert_found(t, SLUICE_HAZARD_USE_AFTER_RELEASE,
               "use after release: op %d (gemm1 of chunk 0) uses slot 0 of T_DI, which op %d (unpack of chunk 0) has "
               "freed",
               last, first);
  gemm1->releases ^= right;
  assert_found(t, SLUICE_HAZARD_DOUBLE_RELEASE,
               "double release: op %d (gemm1 of chunk 0) frees slot 0 of T_DI, which op %d (unpack of chunk 0) has "
               "freed",
               last, first);
  unpack->releases ^= early;
  reduce->releases |= bit_of(reduce, SLUICE_T_OUT, 1);
  assert_found(
      t, SLUICE_HAZARD_DOUBLE_RELEASE,
      "double release: op %d (reduce of chunk 0) frees slot 0 of T_OUT, which this pass does not own at that point",
      find(t, SLUICE_OP_REDUCE, 0, -1), 0);
  sluice_template_destroy(t, memory());
}

TEST(Guard1_DispatchWaitsForTheSlotsReaders) {
  /* In a whole pass a combine between the two ops implies the edge; without the combine the edge is explicit. */
  sluice_template_spec_t spec = {.num_chunks = 4, .only = SLUICE_PART_DISPATCH | SLUICE_PART_EXPERTS};
  forget(spec, SLUICE_OP_UNPACK, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
  forget(spec_with(4, S3, 0), SLUICE_OP_UNPACK, 2, SLUICE_LANE_COPY_OUT, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
}

TEST(Guard2_FirstGemmWaitsForTheCopyOfItsSlot) {
  forget(spec_with(4, S2, 0), SLUICE_OP_GEMM1, 2, SLUICE_LANE_COPY_OUT, SLUICE_HAZARD_WRITE_AFTER_READ, "T_M");
}

TEST(Guard3_CopyWaitsForWhatItStores) {
  forget(spec_with(2, S2, 0), SLUICE_OP_COPY_OUT, 0, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_READ_AFTER_WRITE, "T_M");
}

TEST(Guard4_SecondGemmWaitsForTheCombine) {
  /* In a whole pass the dispatch of the same chunk, which follows that combine, implies the edge. */
  sluice_template_spec_t spec = spec_with(4, 0, 0);
  spec.bounded = 1, spec.only = SLUICE_PART_EXPERTS | SLUICE_PART_COMBINE;
  forget(spec, SLUICE_OP_GEMM2, 2, SLUICE_LANE_COMM, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DO");
}

TEST(Guard5_RestoreWaitsForTheSlotsLastReader) {
  forget(backward(4, S3), SLUICE_OP_COPY_IN, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
  forget(backward(4, S4), SLUICE_OP_UNPACK, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
}

static void expect_other_exchanges(sluice_template_spec_t spec, sluice_template_spec_t of_another_rank) {
  sluice_template_t *own = build(spec), *other = build(of_another_rank);
  assert_false(sluice_schedule_same_exchanges(own, other));
  assert_true(own->comm_hash != other->comm_hash);
  sluice_template_destroy(own, memory());
  sluice_template_destroy(other, memory());
}

TEST(Guard7_AllRanksIssueExchangesInOneOrder) {
  sluice_template_spec_t reuse = spec_with(4, S4, 0), grouped = reuse; /* slots reused: S1 S2 R1 S3 R2 .. */
  grouped.grouped = 1;
  expect_other_exchanges(reuse, spec_with(4, 0, 0)); /* T_DI kept: S1 S2 S3 S4 R1 .. */
  expect_other_exchanges(reuse, grouped);            /* the same order */
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_template_spec_t plain = direction == SLUICE_FORWARD ? reuse : backward(1, S2), experts_first = plain;
    experts_first.experts_first = 1;
    expect_other_exchanges(plain, experts_first);
  }
}

/* The experts of a chunk do not wait until an earlier chunk has returned: S1 S2 S3 R1 S4 R2 .. */
TEST(Forward_ExpertsFirst_SendsAChunkBeforeAnEarlierOneReturns) {
  sluice_template_spec_t spec = spec_with(5, S4, 0);
  spec.experts_first = 1;
  sluice_template_t* t = build(spec);
  int32_t sent = 0, returned = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sent += t->ops[i].kind == SLUICE_OP_DISPATCH;
    if (t->ops[i].kind != SLUICE_OP_COMBINE) continue;
    assert_int_equal(sent, returned + 3 < 5 ? returned + 3 : 5);
    ++returned;
  }
  assert_int_equal(returned, 5);
  sluice_template_destroy(t, memory());
}

/* Nothing but a weight gradient waits for rows that were sent after the gradients. */
TEST(Backward_ExpertsFirst_ExpertsDoNotWaitForRows) {
  sluice_template_spec_t spec = backward(1, S2);
  spec.experts_first = 1;
  sluice_template_t* t = build(spec);
  for (int32_t i = 0, rows_at = -1; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (op->kind == SLUICE_OP_DISPATCH_GRAD) assert_int_equal(rows_at, -1);
    if (op->kind == SLUICE_OP_UNPACK) rows_at = i;
    for (int32_t d = 0; d < op->num_deps && op->kind == SLUICE_OP_GEMM2_GRAD; ++d)
      assert_true(rows_at >= 0 && t->deps[op->first_dep + d] < rows_at);
  }
  sluice_template_destroy(t, memory());
}

typedef struct twins_s {
  uint32_t seed;
  int64_t equal, lone; /* lone: templates without a twin that differs and builds */
} twins_t;

/* Compares a template with that of another rank, which differs only in the policies of T_M. */
static void compare_with_twin(const sluice_template_t* t, void* user) {
  twins_t* twins = user;
  sluice_template_spec_t spec = t->spec;
  int differs = 0;
  for (int32_t i = 0; i < spec.num_chunks; ++i) {
    spec.restore_pre_activation[i] = restore_pre_activation_choices[(next_random(&twins->seed) >> 16) % 3];
    differs |= spec.restore_pre_activation[i] != t->spec.restore_pre_activation[i];
  }
  sluice_template_t* twin = NULL;
  if (!differs || sluice_template_build(&spec, memory(), &twin) != SLUICE_OK) {
    ++twins->lone;
    return;
  }
  if (!sluice_schedule_same_exchanges(t, twin) || t->comm_hash != twin->comm_hash) {
    char form[FORM_TEXT_BYTES];
    describe_form(t, form, sizeof form);
    fail_msg("exchanges differ: %s", form);
  }
  ++twins->equal;
  sluice_template_destroy(twin, memory());
}

TEST(Exchanges_OfRanksThatDifferInTM_AreEqual) {
  twins_t twins = {.seed = 29};
  for (int32_t n = 1; n <= 12; ++n) {
    for (int32_t policy = 0; policy < 9; ++policy) for_each_form(n, policy, 0, compare_with_twin, &twins);
    for (uint32_t seed = 1; seed <= 3; ++seed) for_each_form(n, 9, seed * 61u + (uint32_t)n, compare_with_twin, &twins);
  }
  printf("ranks that differ in T_M's policies: %lld pairs with equal exchanges, %lld templates without a twin\n",
         (long long)twins.equal, (long long)twins.lone);
  assert_true(twins.equal > 10000);
}

/* Both exchanges of a group are in flight together: in one slot the second would overwrite the first's data. */
TEST(Group_InOneSlot_IsFound) {
  sluice_template_spec_t spec = spec_with(4, 0, 0);
  spec.grouped = 1;
  sluice_template_t* t = build(spec);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    for (int32_t k = 0; k < op->num_writes; ++k) op->writes[k].slot *= op->writes[k].tensor != SLUICE_T_SEND;
  }
  for (int32_t i = 0; i < 4; ++i) t->homes[SLUICE_T_SEND * 4 + i].slot = 0;
  const int32_t opens = find(t, SLUICE_OP_COMBINE, 0, -1), closes = find(t, SLUICE_OP_DISPATCH, 2, -1);
  assert_int_equal(closes, opens + 1);
  assert_found(t, SLUICE_HAZARD_WRITE_AFTER_WRITE,
               "write-after-write on slot 0 of T_SEND: op %d (dispatch of chunk 2) does not wait for op %d (combine of "
               "chunk 0); the edge from the second to the first is missing",
               closes, opens);
  sluice_template_destroy(t, memory());
}

/* The exchange that opens a group has only posted its rows. */
TEST(Group_WaitedForByItsOpening_IsFound) {
  sluice_template_spec_t spec = spec_with(6, S4, 0);
  spec.grouped = 1;
  sluice_template_t* t = build(spec);
  const int32_t opens = find(t, SLUICE_OP_COMBINE, 0, -1), closes = opens + 1, later = find(t, SLUICE_OP_GEMM1, 2, -1);
  sluice_before_t* before = calloc((size_t)t->num_ops, sizeof *before);
  assert_true(t->ops[closes].group == SLUICE_GROUP_CLOSES && t->ops[later].num_deps == 1);
  t->deps[t->ops[later].first_dep] = opens;
  sluice_order_all(t, before);
  assert_false(sluice_is_before(t, before, opens, later));
  t->deps[t->ops[later].first_dep] = closes;
  sluice_order_all(t, before);
  assert_true(sluice_is_before(t, before, opens, later) && sluice_is_before(t, before, closes, later));
  free(before);
  t->ops[closes].group = SLUICE_GROUP_NONE; /* no op closes it */
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_FORM);
  sluice_template_destroy(t, memory());
}

/* T_M of S1 and S2 shares its two slots with T_ACT: in one slot, the copy would store activated rows. */
TEST(SharedAct_InTheSlotOfItsOwnTM_IsFound) {
  sluice_template_spec_t spec = {.num_chunks = 1, .keep = 1, .shares_act = 1};
  spec.restore_input[0] = SLUICE_RESTORE_REDISPATCH, spec.restore_pre_activation[0] = SLUICE_RESTORE_OFFLOAD;
  sluice_template_t* t = build(spec);
  assert_int_equal(t->ring[SLUICE_T_M], 2);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    for (int32_t k = 0; k < op->num_reads; ++k) op->reads[k].slot *= op->reads[k].tensor != SLUICE_T_M;
    for (int32_t k = 0; k < op->num_writes; ++k) op->writes[k].slot *= op->writes[k].tensor != SLUICE_T_M;
  }
  for (int32_t k = 0; k < SLUICE_T_COUNT; ++k) t->homes[k].slot *= t->homes[k].tensor != SLUICE_T_M;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_OTHER_TENSOR);
  assert_non_null(strstr(finding_text(t, &finding), "rows of another tensor: op"));
  assert_non_null(strstr(finding_text(t, &finding), "(activation of chunk 0) has put another tensor"));
  sluice_template_destroy(t, memory());
}

TEST(Guard8_HostCopiesAreOnePerChunk) {
  sluice_template_t* t = build(spec_with(3, S1, 0));
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    if (op->kind == SLUICE_OP_COPY_OUT) op->writes[0].slot = 0; /* MPipeMoE's public code has a single buffer */
  }
  for (int32_t i = 0; i < 3; ++i) {
    t->homes[SLUICE_T_HOST_DI * 3 + i].slot = 0;
    t->homes[SLUICE_T_HOST_M * 3 + i].slot = 0;
  }
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_LOST);
  if (strstr(finding_text(t, &finding), "does not hold chunk 0") == NULL) fail_msg("%s", finding_text(t, &finding));
  sluice_template_destroy(t, memory());
}

/* MPipeMoE's public code activates chunk 0 only; later ops then read rows of other chunks that no op has written. */
TEST(PublicCode_ActivationOfOneChunkOnly_IsFound) {
  sluice_template_spec_t spec = spec_with(3, S1, 0);
  spec.gated = 1;
  sluice_template_t* t = build(spec);
  int32_t at = find(t, SLUICE_OP_ACTIVATION, 1, -1);
  t->ops[at].num_writes = 0;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_MISSING_ACCESS);
  t->ops[at] = t->ops[find(t, SLUICE_OP_ACTIVATION, 0, -1)];
  assert_true(hazard_of(t, &finding) != SLUICE_HAZARD_NONE);
  sluice_template_destroy(t, memory());
}

TEST(Deadlock_WaitForALaterOp_IsFound) {
  sluice_template_t* t = build(spec_with(2, 0, 0));
  int32_t first = find(t, SLUICE_OP_GEMM1, 0, -1);
  t->deps[t->ops[first].first_dep] = t->num_ops - 1;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_DEADLOCK);
  if (strstr(finding_text(t, &finding), "is not submitted before it") == NULL)
    fail_msg("%s", finding_text(t, &finding));
  sluice_template_destroy(t, memory());
}
