// SPDX-License-Identifier: Apache-2.0
/* Restore policies that the config names, without a budget: a pass holds at most the bytes that MPipeMoE's eq. 5 leaves
 * of 2 (2 B M + B H), in every weight-gradient mode. */

#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { F32 = 4, WORLD = 2 };

static case_t base(int32_t n, int64_t tokens) {
  case_t c = world_small_case();
  c.world_size = WORLD, c.num_chunks = n, c.top_k = 1, c.num_experts = 8, c.model_width = 48, c.hidden_width = 192;
  for (int32_t r = 0; r < WORLD; ++r) c.tokens[r] = tokens;
  c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  return c;
}

/* The most rows that a rank receives or sends in one of n chunks, which have equally many tokens. */
static int64_t fullest_chunk(const case_t* c) {
  int64_t most = c->tokens[0] / c->num_chunks;
  for (int32_t i = 0; i < c->num_chunks; ++i) {
    int64_t rows[WORLD] = {0};
    for (int32_t r = 0; r < WORLD; ++r) {
      const int64_t size = c->tokens[r] / c->num_chunks;
      for (int64_t t = i * size; t < (i + 1) * size; ++t) ++rows[world_owner(c, (int32_t)world_expert(c, r, t, 0))];
    }
    for (int32_t r = 0; r < WORLD; ++r) most = rows[r] > most ? rows[r] : most;
  }
  return most;
}

/* Eq. 5 leaves 2 (2 B M + B H) - 2 delta = 2 b (4 M + H), for B rows in chunks of b rows. */
static double left_by_eq5(const case_t* c, double element) {
  return element * (double)fullest_chunk(c) * (double)(8 * c->model_width + 2 * c->hidden_width);
}

static uint64_t most_slots(const case_t* c, result_t* got) {
  world_run(c, got);
  must_work(c, got);
  uint64_t most = 0;
  for (int32_t r = 0; r < WORLD; ++r) most = got->slot_bytes[r] > most ? got->slot_bytes[r] : most;
  return most;
}

static uint64_t slots_of(const case_t* c) {
  result_t got;
  const uint64_t most = most_slots(c, &got);
  world_free(&got);
  return most;
}

/* S1 to S4, and every other pair that does not keep both tensors. The papers do not count the 8 bytes of route scalars
 * for each row. */
TEST(NamedPolicy_NoBudget_HoldsWhatEq5Leaves) {
  for (int32_t n = 2; n <= 8; n *= 2) {
    case_t c = base(n, 256);
    const double scalars = 2.0 * 2 * F32 * (double)fullest_chunk(&c), lines = 16 * 64;
    for (int32_t i = 1; i < 9; ++i) {
      c.restore_input = i % 3, c.restore_pre_activation = world_pre_activations[i / 3], c.reuse_saved = i % 2;
      result_t got;
      const double slots = (double)most_slots(&c, &got), bound = left_by_eq5(&c, F32) + scalars + lines;
      must_match(&c, &got);
      if (slots > bound) {
        fail_msg("n %d, restore_input %d, restore_pre_activation %d: slots take %.0f bytes, eq. 5 leaves %.0f", n,
                 c.restore_input, c.restore_pre_activation, slots, bound);
      }
      world_free(&got);
    }
  }
}

/* In bf16, per-chunk mode holds f32 sums as large as all gradients; with few rows, deferred mode takes less. */
TEST(NamedPolicy_SixteenBits_TakesTheModeOfFewerBytes) {
  const int64_t tokens[] = {64, 2048};
  int taken[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    case_t c = base(4, tokens[i]);
    c.dtype = SLUICE_DTYPE_BF16;
    c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    const uint64_t open = slots_of(&c);
    uint64_t of_mode[2];
    for (int32_t mode = 0; mode < 2; ++mode) c.wgrad_mode = mode, of_mode[mode] = slots_of(&c);
    const int leaner = of_mode[1] < of_mode[0];
    assert_true(of_mode[0] != of_mode[1]);
    assert_true(open <= of_mode[leaner]); /* if deferred, it has fewer slots for sent and received rows */
    ++taken[leaner];
  }
  assert_true(taken[0] == 1 && taken[1] == 1); /* both cases occurred */
}

/* A named mode stays. If none is named, the mode with fewer bytes is chosen, here per chunk. */
TEST(NamedPolicy_NamedMode_IsKept) {
  case_t c = base(4, 256);
  c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  const uint64_t open = slots_of(&c);
  c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  assert_true(slots_of(&c) == open);
  c.wgrad_mode = SLUICE_WGRAD_DEFERRED;
  assert_true(slots_of(&c) > 2 * open);
}

/* For any chosen n and S1 to S4, results are right, and slots do not hold the rows of all chunks. */
TEST(Reuse_NoBudget_KeepsNoRowsOfAllChunks) {
  for (int32_t i = 0; i < 12; ++i) {
    case_t c = base(i % 3 == 0 ? 0 : 4, 256);
    c.reuse = 1, c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
    c.separate_wgrad = i == 9, c.outstanding = 1 + (i % 2 && i != 9), c.gated = i / 3 % 2,
    c.dtype = i % 4 == 1 ? SLUICE_DTYPE_BF16 : c.dtype;
    if (i == 5) c.callback_experts = 1, c.gated = 0, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    if (i == 7) c.hot_expert = 1;
    if (i == 8) c.deduplicate = 1, c.top_k = 2;
    c.halves_unsaid = c.separate_wgrad; /* without a budget, separate calls need not be declared */
    if (i == 10) c.capacity = 256;
    result_t got;
    world_run(&c, &got);
    must_match(&c, &got);
    case_t kept = c;
    kept.reuse = 0, kept.restore_input = kept.restore_pre_activation = SLUICE_RESTORE_KEEP, kept.num_chunks = 4;
    if (i == 2) { /* in f32, with the same number of chunks */
      assert_int_equal(got.num_chunks[0], 4);
      assert_true(2 * slots_of(&c) < slots_of(&kept));
    }
    world_free(&got);
  }
}
