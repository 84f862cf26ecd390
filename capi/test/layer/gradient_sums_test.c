// SPDX-License-Identifier: Apache-2.0
/* 16-bit weight and bias gradients that several chunks add to are summed in f32 and rounded once, so they equal the
 * rounded f32 gradients of the same pass. A 16-bit running sum would round after every chunk. */

#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { NUM_KINDS = 6 };

static case_t base_case(void) {
  return (case_t){.world_size = 2,
                  .tokens = {150, 131, 7, 0},
                  .model_width = 9,
                  .hidden_width = 11,
                  .num_experts = 4,
                  .top_k = 2,
                  .num_chunks = 32,
                  .dtype = SLUICE_DTYPE_BF16,
                  .activation = SLUICE_ACTIVATION_SILU,
                  .gated = SLUICE_GATED_HALVES,
                  .bias = 1,
                  .wgrad_mode = SLUICE_WGRAD_PER_CHUNK,
                  .reuse_saved = 1,
                  .hot_expert = -1};
}

static void run_both(case_t c, result_t* narrow, result_t* wide) {
  world_run(&c, narrow);
  must_work(&c, narrow);
  c.grad_f32 = 1;
  world_run(&c, wide);
  must_work(&c, wide);
}

/* Compares the 16-bit gradients with the rounded f32 gradients. */
static void check(const case_t* c) {
  result_t narrow, wide;
  run_both(*c, &narrow, &wide);
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    for (int64_t i = 0; i < world_count(c, 2 + kind); ++i) {
      double want = world_rounded(c->dtype, wide.grad_params[kind][i]), got = narrow.grad_params[kind][i];
      if (got != want) {
        fail_msg("W %d, n %d, dtype %d, wgrad %d: gradient %lld of kind %d is %.9g; the f32 sum %.9g rounds to %.9g",
                 c->world_size, c->num_chunks, c->dtype, c->wgrad_mode, (long long)i, kind, got,
                 wide.grad_params[kind][i], want);
      }
    }
  }
  world_free(&narrow);
  world_free(&wide);
}

TEST(Gradients_ManyChunks_AreTheF32SumsRoundedOnce) {
  for (int bits = 0; bits < 64; ++bits) {
    case_t c = base_case();
    c.world_size = 1 + (bits & 1) * 2;
    c.num_experts = c.world_size == 3 ? 6 : 4;
    c.dtype = bits & 2 ? SLUICE_DTYPE_F16 : SLUICE_DTYPE_BF16;
    c.gated = bits & 4 ? SLUICE_GATED_HALVES : SLUICE_GATED_NO;
    c.transposed = bits >> 3 & 1;
    c.bias = bits >> 4 & 1;
    c.hot_expert = bits & 32 ? 1 : -1;
    c.restore_input = bits % 3, c.restore_pre_activation = bits % 2 ? SLUICE_RESTORE_RECOMPUTE : SLUICE_RESTORE_KEEP;
    check(&c);
  }
}

/* Some experts have rows in one chunk only or no rows at all, and some chunks have no rows. */
TEST(Gradients_FewTokens_AreTheF32SumsRoundedOnce) {
  for (int64_t tokens = 0; tokens < 9; ++tokens) {
    case_t c = base_case();
    c.num_experts = 8, c.num_chunks = 6;
    c.tokens[0] = tokens, c.tokens[1] = tokens / 2;
    c.drop_every = tokens % 2 ? 3 : 0;
    check(&c);
  }
}

/* wgrad runs separately, and deferred gradients run once over all chunks, whose rows are contiguous. */
TEST(Gradients_OtherOrders_AreTheF32SumsRoundedOnce) {
  for (int bits = 0; bits < 8; ++bits) {
    case_t c = base_case();
    c.wgrad_mode = bits & 1;
    c.separate_wgrad = bits >> 1 & 1;
    c.num_chunks = bits & 4 ? 1 : 16;
    check(&c);
  }
}

/* Under a budget only some chunks keep their rows. One op then adds chunk by chunk to the same f32 sums. */
TEST(Gradients_UnderABudget_AreTheF32SumsRoundedOnce) {
  int64_t checked = 0;
  for (int32_t mode = SLUICE_WGRAD_DEFERRED; mode <= SLUICE_WGRAD_PER_CHUNK; ++mode) {
    case_t c = base_case();
    c.tokens[0] = 192, c.tokens[1] = 160;
    c.num_chunks = 0, c.wgrad_mode = mode, c.hot_expert = 1, c.outstanding = 1;
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
    const uint64_t needs = budget_smallest(&(budget_suite_t){.run = world_run}, c);
    for (uint64_t i = 0; i < 4; ++i) {
      result_t got;
      c.budget = needs + needs * i / 40;
      check(&c);
      world_run(&c, &got);
      checked += got.num_chunks[0] > 1;
      world_free(&got);
    }
  }
  assert_true(checked > 0);
}

/* Sums are added to existing gradients at the end, with one rounding of half a unit in the last place. */
TEST(Gradients_OntoOthers_RoundOnce) {
  case_t c = base_case();
  c.accumulate = 1;
  result_t narrow, wide;
  run_both(c, &narrow, &wide);
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    for (int64_t i = 0; i < world_count(&c, 2 + kind); ++i) {
      double want = wide.grad_params[kind][i], off = narrow.grad_params[kind][i] - want;
      double bound = 0x1p-8 * (want < 0 ? -want : want) + 0x1p-18; /* the first term of the f32 sums differs */
      if (off > bound || off < -bound) fail_msg("gradient %lld of kind %d is off by %g", (long long)i, kind, off);
    }
  }
  world_free(&narrow);
  world_free(&wide);
}
