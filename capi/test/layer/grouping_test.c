// SPDX-License-Identifier: Apache-2.0
/* Grouped exchanges of several chunks give the same bits as sequential exchanges. */

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/world/sweeps.h"
#include "third_party/bazel/test.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.num_chunks = 4, c.top_k = 2, c.bias = 1;
  return c;
}

/* Compares with the reference, and bit for bit with the layer without groups, in chunks of rows and of tokens. */
static void check(const case_t* given) {
  for (int32_t chunking = SLUICE_CHUNKING_ADAPTIVE; chunking <= SLUICE_CHUNKING_TOKENS; ++chunking) {
    result_t single, grouped;
    case_t c = *given;
    c.chunking = chunking, c.grouping = SLUICE_GROUPING_OFF;
    case_run(&c, &single);
    c.grouping = SLUICE_GROUPING_ON;
    case_run(&c, &grouped);
    must_match(&c, &grouped);
    must_be_same(&c, &grouped, &single, 1);
    for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(grouped.bytes_sent[r], single.bytes_sent[r]);
    world_free(&single);
    world_free(&grouped);
  }
}

static void check_copies(const case_t* given) {
  case_t c = *given;
  for (c.deduplicate = 0; c.deduplicate < 2; ++c.deduplicate) check(&c);
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
  must_be_same(&c, &got, &plain, 1); /* and both stay within their budget */
  assert_int_equal(got.slot_bytes[0], plain.slot_bytes[0]);
  world_free(&plain);
  world_free(&got);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* a slot is NaN once its ops have ended; the exchanges of a group end together */
  const struct CMUnitTest rows[] = {
      /* On a device the exchanges of a stream run sequentially in the order of the schedule, so groups gain nothing. */
      SWEEP_TEST(Grouping_EveryPolicyOnFakes_SameBits, run_on_fakes, base_case(), check, sweep_policies),
      SWEEP_TEST(Grouping_DtypesAndCopiesOnFakes_SameBits, run_on_fakes, base_case(), check_copies, sweep_dtypes),
      SWEEP_TEST(Grouping_CallbackExpertsOnFakes_SameBits, run_on_fakes, base_case(), check_copies, sweep_callbacks),
      SWEEP_TEST(Grouping_RanksAndChunks_SameBits, world_run, base_case(), check, sweep_ranks_and_chunks),
      SWEEP_TEST(Grouping_EveryPolicy_SameBits, world_run, base_case(), check, sweep_policies),
      SWEEP_TEST(Grouping_DtypesAndCopies_SameBits, world_run, base_case(), check_copies, sweep_dtypes),
      SWEEP_TEST(Grouping_AnyRoutes_SameBits, world_run, base_case(), check, sweep_routes),
      SWEEP_TEST(Grouping_AnyBatches_SameBits, world_run, base_case(), check, sweep_batches),
      SWEEP_TEST(Grouping_CallbackExperts_SameBits, world_run, base_case(), check_copies, sweep_callbacks),
  };
  return RUN_CASES_AFTER(rows);
}
