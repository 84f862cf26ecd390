// SPDX-License-Identifier: Apache-2.0
/* The table of tensors is complete. A failure names the tensor and what it lacks. */

#include "backend/schedule/tensor_table.h"
#include "third_party/bazel/test.h"

TEST(TensorTable_EveryTensor_HasANameOfItsOwn) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (sluice_tensor_row(t)->name == NULL) fail_msg("tensor %d has no name in backend/schedule/tensor_table.c", t);
    for (int32_t u = 0; u < t; ++u) assert_string_not_equal(sluice_tensor_row(t)->name, sluice_tensor_row(u)->name);
  }
}

/* Without a lifetime, slots would be freed, and filled with NaN in debug runs, while they are still needed. */
TEST(TensorTable_EveryTensor_SaysHowLongItLives) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    const int32_t lives = sluice_tensor_row(t)->lives;
    const int longer = SLUICE_LIVES_FOR_SPLIT | SLUICE_LIVES_FOR_WGRAD;
    const int is_one = lives == SLUICE_LIVES_FOR_USE || lives == SLUICE_LIVES_FOR_EVER;
    if (is_one || (lives != 0 && (lives & ~longer) == 0)) continue;
    fail_msg("tensor %d, %s, does not say how long it lives in backend/schedule/tensor_table.c", t,
             sluice_tensor_kind_name(t));
  }
}
