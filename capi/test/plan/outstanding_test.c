// SPDX-License-Identifier: Apache-2.0
/* Outstanding forwards are counted and reported with the number that plans assume. A forward is refused if it does not
 * fit. */

#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 4 };

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding) {
  const sluice_context_config_t context = own_rig_context(budget, max_outstanding);
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 0;
  own_rig_open(rig, &context, &config);
}

static void check_counts(const rig_t* rig, uint64_t now, uint64_t most, uint64_t planned) {
  const sluice_context_stats_t stats = own_rig_stats(rig);
  assert_int_equal(stats.num_outstanding, now);
  assert_int_equal(stats.most_outstanding, most);
  assert_int_equal(stats.planned_outstanding, planned);
}

static void take_back(rig_t* rig, sluice_step_t* step) {
  WORKS(rig_backward(rig, step));
  sluice_step_drop(step);
}

TEST(Stats_Outstanding_CountsTheMostAtOneTime) {
  rig_t rig;
  sluice_step_t* steps[STEPS];
  open_rig(&rig, 0, 0);
  check_counts(&rig, 0, 0, 0);
  for (int i = 0; i < STEPS; ++i) WORKS(rig_forward(&rig, &steps[i]));
  check_counts(&rig, STEPS, STEPS, 0);
  for (int i = 0; i < STEPS - 1; ++i) take_back(&rig, steps[i]);
  check_counts(&rig, 1, STEPS, 0);
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig.context, 1, &stats)); /* also resets this peak */
  check_counts(&rig, 1, 1, 0);
  rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(rig.moe, &rig.forward, NULL, NULL)); /* without a step */
  check_counts(&rig, 1, 1, 0);
  take_back(&rig, steps[STEPS - 1]);
  check_counts(&rig, 0, 1, 0);
  own_rig_close(&rig);
}

/* If a host keeps the saved buffers and drops the step, the forward stays outstanding until it frees them. */
typedef struct kept_s {
  sluice_context_t* context;
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
} kept_t;

static void* take(void* user, int32_t which, uint64_t bytes) {
  kept_t* kept = user;
  WORKS(sluice_context_allocate_saved(kept->context, which, bytes, &kept->data[which]));
  kept->bytes[which] = bytes;
  return kept->data[which];
}

TEST(Stats_StepDroppedAndBuffersKept_IsOutstandingStill) {
  rig_t rig;
  sluice_step_t* step = NULL;
  open_rig(&rig, 0, 0);
  kept_t kept = {.context = rig.context};
  rig.forward.save = take, rig.forward.save_user = &kept, rig.forward.save_is_counted = 1;
  WORKS(rig_forward(&rig, &step));
  sluice_step_drop(step);
  check_counts(&rig, 1, 1, 0);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) sluice_context_free(rig.context, kept.data[i], kept.bytes[i]);
  check_counts(&rig, 0, 1, 0);
  own_rig_close(&rig);
}

/* More steps than max_outstanding fit while they are smaller than the plan's capacities. When a step does not fit, the
 * error names the planned number. */
TEST(Budget_MoreThanPlanned_IsCountedAndRefusedWhereItDoesNotFit) {
  rig_t rig;
  sluice_step_t* steps[64];
  uint64_t least = 0;
  open_rig(&rig, 1 << 20, 2);
  WORKS(sluice_moe_smallest_budget(rig.moe, rig.num_tokens, &least));
  own_rig_close(&rig);
  open_rig(&rig, least, 2);
  int32_t count = 0;
  while (count < 64) {
    const sluice_status_t status = rig_forward(&rig, &steps[count]);
    if (status != SLUICE_OK) {
      REFUSED(status, SLUICE_E_OVER_BUDGET, "(max_outstanding is 2): run their backward or drop steps first, raise ");
      break;
    }
    ++count;
  }
  assert_true(count >= 2 && count < 64);
  printf("planned with 2, refused with %d outstanding\n", count);
  check_counts(&rig, (uint64_t)count, (uint64_t)count, 2);
  while (count > 0) take_back(&rig, steps[--count]);
  own_rig_close(&rig);
}
