// SPDX-License-Identifier: Apache-2.0
/* Plans as handles: errors for bad input, writing and reading back, their categories, and the footprint of MPipeMoE. */
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static sluice_moe_config_t open_config(int64_t model_width) {
  sluice_moe_config_t layer = rig_config();
  layer.model_width = model_width, layer.num_chunks = 0;
  return layer;
}

TEST(Plan_BadInput_IsNamed) {
  rig_t l, other;
  const sluice_moe_config_t layer = open_config(8), wider = open_config(9);
  WORKS(rig_open(&l, NULL, &layer));
  sluice_plan_t* plan = NULL;
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 64, config.max_outstanding = 4;
  const sluice_plan_config_t good = config;
#define REFUSES(field, value, status, text)                         \
  config.field = (value);                                           \
  REFUSED(sluice_plan_create(l.moe, &config, &plan), status, text); \
  config = good
  REFUSES(max_tokens, 0, BAD, "max_tokens is 0");
  REFUSES(max_outstanding, 0, BAD, "max_outstanding is 0");
  REFUSES(num_chunks, 300, BAD, "num_chunks is 300");
  REFUSES(restore_pre_activation, SLUICE_RESTORE_REDISPATCH, BAD, "restore_pre_activation is 2");
  const int32_t list[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_RECOMPUTE};
  REFUSES(restore_pre_activation_of, list, BAD, "plan: restore_pre_activation_of names a policy for each chunk");
  REFUSES(memory_budget, 1000, SLUICE_E_OVER_BUDGET,
          "no plan fits the memory budget of 1000 bytes (1.0 KiB): the leanest (n = ");
#undef REFUSES
  REFUSED(sluice_plan_create(NULL, &config, &plan), BAD, "moe is NULL");
  REFUSED(sluice_plan_create(l.moe, &config, NULL), BAD, "out_plan is NULL");
  assert_null(plan);

  WORKS(sluice_plan_create(l.moe, &config, &plan));
  int32_t count = 0;
  sluice_plan_candidate_t lines[512];
  WORKS(sluice_plan_candidates(plan, lines, 512, &count));
  assert_int_equal(count, 8 * 9 * 2); /* n x policies x weight-gradient modes */
  for (int32_t i = 0; i < count; ++i) assert_true(lines[i].fits && lines[i].total_bytes > 0);

  char bytes[1024];
  uint64_t size = 0;
  WORKS(sluice_plan_write(plan, NULL, &size));
  assert_true(size < sizeof bytes);
  WORKS(sluice_plan_write(plan, bytes, &size));
  sluice_plan_t* again = NULL;
  for (uint64_t at = 0; at < size; ++at) {
    bytes[at] ^= 1;
    assert_int_equal(sluice_plan_read(l.moe, bytes, size, &again), SLUICE_E_INVALID_ARGUMENT);
    bytes[at] ^= 1;
  }
  REFUSED(sluice_plan_read(l.moe, bytes, size - 1, &again), BAD, "bytes; a plan has");
  WORKS(sluice_plan_read(l.moe, bytes, size, &again));
  sluice_plan_info_t a = {.struct_size = sizeof a}, b = {.struct_size = sizeof b};
  WORKS(sluice_plan_get_info(plan, &a));
  WORKS(sluice_plan_get_info(again, &b));
  assert_memory_equal(&a, &b, sizeof a);

  WORKS(rig_open(&other, NULL, &wider));
  REFUSED(sluice_moe_use_plan(other.moe, plan), BAD, "which has another config");
  sluice_plan_t* none = NULL;
  REFUSED(sluice_plan_read(other.moe, bytes, size, &none), BAD, "another layer");
  rig_close(&other);
  WORKS(sluice_moe_use_plan(l.moe, plan));
  WORKS(sluice_moe_use_plan(l.moe, NULL));
  sluice_plan_destroy(plan);
  sluice_plan_destroy(again);
  sluice_plan_destroy(NULL);
  rig_close(&l);
}

TEST(Plan_BadQuestions_AreNamed) {
  rig_t l;
  const sluice_moe_config_t layer = open_config(8);
  WORKS(rig_open(&l, NULL, &layer));
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 64;
  sluice_plan_t* plan = NULL;
  WORKS(sluice_plan_create(l.moe, &config, &plan));
  sluice_plan_info_t info = {.struct_size = 0};
  REFUSED(sluice_plan_get_info(NULL, &info), BAD, "plan is NULL");
  REFUSED(sluice_plan_get_info(plan, NULL), BAD, "out_info is NULL");
  REFUSED(sluice_plan_get_info(plan, &info), SLUICE_E_ABI, "struct_size is 0");
  int32_t count = 0;
  REFUSED(sluice_plan_candidates(NULL, NULL, 0, &count), BAD, "plan is NULL");
  REFUSED(sluice_plan_candidates(plan, NULL, 1, &count), BAD, "out_candidates is NULL");
  REFUSED(sluice_plan_candidates(plan, NULL, 0, NULL), BAD, "out_count is NULL");
  const int64_t rows[] = {32, 32};
  uint64_t bytes = 0;
  WORKS(sluice_plan_predict_step(plan, 2, rows, 2, 64, 64, &bytes));
#define STEP(n, rows, kept, tokens, sent) sluice_plan_predict_step(plan, n, rows, kept, tokens, sent, &bytes)
  REFUSED(sluice_plan_predict_step(NULL, 2, rows, 2, 64, 64, &bytes), BAD, "plan is NULL");
  REFUSED(sluice_plan_predict_step(plan, 2, rows, 2, 64, 64, NULL), BAD, "out_bytes is NULL");
  REFUSED(STEP(2, NULL, 2, 64, 64), BAD, "rows_per_chunk is NULL");
  REFUSED(STEP(0, rows, 2, 64, 64), BAD, "num_chunks is 0");
  REFUSED(STEP(2, rows, -1, 64, 64), BAD, "kept_chunks is -1");
  REFUSED(STEP(2, rows, 2, -64, 64), BAD, "num_tokens is -64");
  REFUSED(STEP(2, rows, 2, 64, INT64_MAX), BAD, "num_sent is 9223372036854775807");
  const int64_t negative[] = {32, -1}, absurd[] = {INT64_MAX, INT64_MAX};
  REFUSED(STEP(2, negative, 2, 64, 64), BAD, "rows_per_chunk[1] is -1");
  REFUSED(STEP(2, absurd, 2, 64, 64), BAD, "rows_per_chunk[0] is 9223372036854775807");
  sluice_plan_destroy(plan);
  rig_close(&l);
}

static sluice_plan_info_t info_of(pair_t* p, int32_t n, int32_t restore_input, int32_t restore_pre_activation,
                                  int32_t halves) {
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 64, config.num_chunks = n, config.separate_wgrad = halves;
  config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  config.restore_input = restore_input, config.restore_pre_activation = restore_pre_activation;
  sluice_plan_info_t info;
  sluice_plan_destroy(own_rig_plan(&p->rig, &config, &info));
  return info;
}

TEST(PlanInfo_Categories_SayWhatTheyHold) {
  pair_t p;
  sluice_moe_config_t layer = rig_config();
  layer.model_width = 16, layer.hidden_width = 64, layer.top_k = 1, layer.gated = 0, layer.num_chunks = 0;
  pair_open(&p, &layer);
  for (int32_t n = 1; n <= 8; n *= 2) {
    const sluice_plan_info_t none = info_of(&p, n, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, 0);
    const sluice_plan_info_t s4 = info_of(&p, n, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, 0);
    const sluice_plan_info_t split = info_of(&p, n, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, 1);
    /* Sent and received rows of one chunk; more slots if more chunks are in flight. */
    const uint64_t most = (uint64_t)(none.chunk_rows > 64 ? none.chunk_rows : 64) * 16 * sizeof(float);
    assert_true(none.communication_bytes >= 2 * (uint64_t)none.chunk_rows * 16 * sizeof(float));
    assert_true(none.communication_bytes <= 4 * (most + 64) && none.communication_bytes < none.slot_bytes);
    assert_true(none.saved_bytes >= (uint64_t)none.kept_rows * (16 + 64) * sizeof(float));
    assert_true(s4.kept_rows == 0 && s4.saved_bytes <= (uint64_t)(2 + s4.max_chunks) * 2 * 64);
    assert_true(none.deferred_bytes == 0 && split.deferred_bytes > 0);
    assert_int_equal(split.step_bytes - split.deferred_bytes, none.step_bytes);
    assert_int_equal(none.peak_direction, SLUICE_BACKWARD); /* which has two tensors of width H; a forward has one */
    assert_true(none.peak_slot_bytes <= none.slot_bytes && s4.peak_slot_bytes <= s4.slot_bytes);
    /* The weight gradients of one chunk read T_DI, dT_DO, and two tensors of width H at once. */
    assert_true(s4.peak_slot_bytes >= (uint64_t)s4.chunk_rows * (2 * 16 + 2 * 64) * sizeof(float));
    if (strstr(s4.peak_op, "_grad") == NULL) fail_msg("n %d: %s", n, s4.peak_op);
    printf("n %d: S4 takes %llu of slots, %llu at once at %s\n", n, (unsigned long long)s4.slot_bytes,
           (unsigned long long)s4.peak_slot_bytes, s4.peak_op);
  }
  pair_close(&p);
}

TEST(PaperFootprint_IsAsPrinted) {
  sluice_paper_footprint_t f;
  sluice_paper_footprint(1024, 768, 3072, 64, 4, &f);
  assert_true(f.states == 4.0 * (64 * 768.0 + 2.0 * 3072 * 768));
  assert_true(f.activations == 4.0 * 1024 * 768 + 1024.0 * 3072);
  assert_true(f.temporaries == 1024.0 * 768 + 1024.0 * 3072);
  assert_true(f.pipelined_temporaries == 4.0 * 1024 * 768 + 1024.0 * 3072);
  assert_true(f.saving == 1024 * (2 * 768.0 * 2 / 4 + 3072.0 * 3 / 4));
  assert_true(f.saved_share == 2 * f.saving / (f.states + 2 * f.activations));
  /* Values computed by hand. One chunk saves nothing. */
  assert_true(f.states == 19070976 && f.activations == 6291456 && f.saving == 3145728);
  assert_true(fabs(f.saved_share - 6291456.0 / 31653888.0) < 1e-15);
  sluice_paper_footprint(1024, 768, 3072, 64, 1, &f);
  assert_true(f.saving == 0 && f.saved_share == 0);
}

/* ---- ownership of memory: a refused plan holds none, and a pass without gradients has no step ---- */

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding) {
  const sluice_context_config_t context = own_rig_context(budget, max_outstanding);
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 0;
  own_rig_open(rig, &context, &config);
}

/* A refused forward holds no memory and makes no allocation, neither the first nor a later one. */
TEST(Budget_Refused_NothingWasAllocated) {
  rig_t rig;
  open_rig(&rig, 1 << 12, 1);
  const sluice_context_stats_t before = own_rig_stats(&rig);
  const int64_t calls = atomic_load(&rig.heap.calls), live = atomic_load(&rig.heap.live_bytes);
  for (int i = 0; i < 3; ++i) {
    sluice_step_t* step = (sluice_step_t*)(uintptr_t)1;
    REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, "no plan fits the memory budget of 4096 bytes");
    assert_null(step);
    const sluice_context_stats_t after = own_rig_stats(&rig);
    assert_memory_equal(&after, &before, sizeof after);
    assert_true(atomic_load(&rig.heap.calls) == calls && atomic_load(&rig.heap.live_bytes) == live);
  }
  own_rig_close(&rig);
}

/* From the smallest budget of a training step up: no step is created, no memory stays, and outputs have the same bits.
 * */
TEST(Budget_WithoutGradients_HoldsNoStep) {
  rig_t rig;
  open_rig(&rig, 1 << 20, 1);
  const uint64_t needs = own_rig_smallest_budget(&rig);
  own_rig_close(&rig);

  open_rig(&rig, needs, 1);
  float want[64];
  assert_true(rig.out.bytes <= sizeof want);
  WORKS(rig_step(&rig));
  memcpy(want, rig.out.tensor.data, rig.out.bytes);
  const uint64_t idle = own_rig_stats(&rig).current_bytes;
  for (int i = 0; i < 4; ++i) { /* more than max_outstanding */
    rig_reset(&rig);
    rig.forward.needs_backward = 0;
    WORKS(sluice_moe_forward(rig.moe, &rig.forward, NULL, NULL));
    assert_memory_equal(rig.out.tensor.data, want, rig.out.bytes);
    assert_int_equal(own_rig_stats(&rig).current_bytes, idle);
  }
  assert_true(own_rig_stats(&rig).peak_bytes <= needs);
  own_rig_close(&rig);
}

/* Passes with many tokens leave large slots. Under a plan for fewer tokens they shrink to the plan's bytes. */
TEST(UsePlan_AfterPassesWithoutOne_HoldsThePlansBytes) {
  rig_t rig;
  sluice_context_config_t context = own_rig_context(0, 0);
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 1;
  own_rig_open(&rig, &context, &config);
  rig.num_tokens = 4096;
  WORKS(rig_round(&rig, NULL));
  const uint64_t before = own_rig_stats(&rig).current_bytes;
  rig.num_tokens = 512;
  DEFAULTS(sluice_plan_config, wanted);
  wanted.max_tokens = rig.num_tokens, wanted.num_chunks = 2;
  sluice_plan_info_t info;
  sluice_plan_t* plan = own_rig_plan(&rig, &wanted, &info);
  WORKS(sluice_moe_use_plan(rig.moe, plan));
  WORKS(rig_round(&rig, NULL));
  WORKS(rig_round(&rig, NULL));
  const sluice_context_stats_t after = own_rig_stats(&rig);
  printf("without a plan %llu bytes, under it %llu of %llu\n", (unsigned long long)before,
         (unsigned long long)after.current_bytes, (unsigned long long)info.total_bytes);
  assert_true(after.current_bytes < before);
  assert_true(after.current_bytes <= info.total_bytes);
  WORKS(sluice_moe_use_plan(rig.moe, NULL));
  sluice_plan_destroy(plan);
  own_rig_close(&rig);
}
