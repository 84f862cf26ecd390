// SPDX-License-Identifier: Apache-2.0
/* Grouped exchanges of several chunks give the same bits as sequential exchanges; invalid values are refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.num_chunks = 4, c.top_k = 2, c.bias = 1;
  return c;
}

/* Compares with the reference, and bit for bit with the layer without groups. */
static void check(const case_t* given) {
  result_t single, grouped, want;
  case_t c = *given;
  c.grouping = SLUICE_GROUPING_OFF;
  case_run(&c, &single);
  c.grouping = SLUICE_GROUPING_ON;
  case_run(&c, &grouped);
  world_reference(&c, &want);
  must_work(&c, &single);
  must_work(&c, &grouped);
  const double distance = world_distance(&c, &grouped, &want);
  if (!(distance >= 0 && distance <= world_tolerance(&c)) || !world_identical(&c, &grouped, &single, 1)) {
    fail_msg("W %d n %d K %d dtype %d gated %d dedup %d chunking %d wgrad %d restore %d %d halves %d: distance %g",
             c.world_size, c.num_chunks, c.top_k, c.dtype, c.gated, c.deduplicate, c.chunking, c.wgrad_mode,
             c.restore_input, c.restore_pre_activation, c.separate_wgrad, distance);
  }
  for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(grouped.bytes_sent[r], single.bytes_sent[r]);
  world_free(&single);
  world_free(&grouped);
  world_free(&want);
}

TEST(Grouping_RanksAndChunks_SameBits) {
  const int32_t chunks[] = {1, 2, 3, 4, 5, 7, 16};
  for (int32_t w = 1; w <= 4; ++w) {
    for (int32_t n = 0; n < 7; ++n) {
      case_t c = base_case();
      c.world_size = w, c.num_chunks = chunks[n], c.gated = (w + n) % 3 == 0, c.wgrad_mode = n % 2;
      c.chunking = (w + n / 2) % 2, c.hot_expert = n % 3 == 0 ? 1 : -1;
      check(&c);
    }
  }
}

TEST(Grouping_EveryPolicy_SameBits) {
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t p = 0; p < 9; ++p) {
    case_t c = base_case();
    c.world_size = 2 + p % 3, c.num_chunks = 3 + p % 4, c.gated = p % 2, c.chunking = p % 2;
    c.restore_input = inputs[p / 3], c.restore_pre_activation = pre_activations[p % 3];
    c.reuse_saved = p % 2, c.restore = p % 4 == 3, c.wgrad_mode = p % 2 - (p > 6);
    check(&c);
    c.restore = !c.restore, c.separate_wgrad = 1, c.outstanding = c.restore ? 1 : 2;
    check(&c);
  }
}

TEST(Grouping_DtypesCopiesAndCallbacks_SameBits) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  for (int32_t i = 0; i < 8; ++i) {
    case_t c = base_case();
    c.world_size = 2 + i % 3, c.num_chunks = 3 + i % 3, c.dtype = dtypes[i % 4], c.deduplicate = i / 4;
    c.top_k = 3, c.hot_expert = 2;
    check(&c);
    c.callback_experts = 1, c.bias = 0;
    check(&c);
  }
}

TEST(Grouping_RanksWithoutTokensOrExperts_SameBits) {
  case_t c = base_case();
  c.world_size = 3, c.num_chunks = 5, c.uneven_owners = 1;
  c.tokens[1] = 0;
  check(&c);
  c.tokens[0] = c.tokens[2] = 0;
  check(&c);
}

/* Groups need a second slot of sent and received rows in the forward or the backward, unless there is no pair. */
TEST(Grouping_Slots_AreTwoOfWhatTravels) {
  for (int32_t n = 2; n <= 4; ++n) {
    uint64_t bytes[2];
    for (int32_t on = 0; on < 2; ++on) {
      case_t c = base_case();
      result_t got;
      c.num_chunks = n, c.chunking = SLUICE_CHUNKING_TOKENS;
      c.grouping = on ? SLUICE_GROUPING_ON : SLUICE_GROUPING_OFF;
      case_run(&c, &got);
      must_work(&c, &got);
      bytes[on] = got.slot_bytes[0];
      world_free(&got);
    }
    if (n == 2) assert_int_equal(bytes[1], bytes[0]);
    if (n > 2) assert_int_not_equal(bytes[1], bytes[0]);
  }
}

TEST(Grouping_UnderABudget_IsLeftOut) {
  case_t c = base_case();
  result_t plain, got;
  c.chunking = SLUICE_CHUNKING_TOKENS, c.budget = 1 << 22;
  case_run(&c, &plain);
  c.grouping = SLUICE_GROUPING_ON;
  case_run(&c, &got);
  must_work(&c, &plain);
  must_work(&c, &got); /* and stays within its budget */
  assert_true(world_identical(&c, &got, &plain, 1));
  assert_int_equal(got.slot_bytes[0], plain.slot_bytes[0]);
  world_free(&plain);
  world_free(&got);
}

TEST(Grouping_UnknownValue_IsRefused) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.grouping = 3;
  assert_int_equal(rig_open(&rig, NULL, &config), SLUICE_E_INVALID_ARGUMENT);
  assert_string_equal(last_message(), "layer 3: grouping is 3; known are adaptive (0), off (1) and on (2)");
  rig_close(&rig);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* a slot is NaN once its ops have ended; the exchanges of a group end together */
  const struct CMUnitTest rows[] = {
      /* On a device the exchanges of a stream run sequentially in the order of the schedule, so groups gain nothing. */
      TEST_WITH(run_on_fakes, Grouping_EveryPolicy_SameBits),
      TEST_WITH(run_on_fakes, Grouping_DtypesCopiesAndCallbacks_SameBits),
  };
  return RUN_CASES_AFTER(rows);
}
