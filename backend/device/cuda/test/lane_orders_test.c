// SPDX-License-Identifier: Apache-2.0
/* Planted races and orders are found, and the same kernels without them have no problem. */
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/lane_orders.h"
#include "backend/device/cuda/test/planted_kernels.h"

static void begin(void) {
  if (!sluice_fake_orders_begin()) skip_because("ThreadSanitizer: it has the hooks of the compiler itself");
}

TEST(LaneOrders_PlantedKernels_AreReportedByNameAndThePlainOnesAreNot) {
  enum { UNITS = 5 };
  begin();
  for (int i = 0; i < NUM_PLANTED; ++i) {
    const planted_kernel_t* kernel = &planted_kernels()[i];
    for (int is_planted = 0; is_planted < 2; ++is_planted) {
      int32_t data[32 * UNITS] = {0};
      char text[400];
      const planted_args_t args = {data, UNITS, is_planted};
      sluice_fake_run_in_orders(kernel->name, kernel->fn, 3, &args); /* a warp takes two units */
      const int64_t problems = sluice_fake_orders_end(text, sizeof text);
      print_message("%s: %s\n", kernel->name, is_planted ? text : "");
      if ((problems > 0) != is_planted) fail_msg("%s, planted %d: %s", kernel->name, is_planted, text);
      if (is_planted && (strstr(text, kernel->name) == NULL || strstr(text, kernel->problem) == NULL))
        fail_msg("%s", text);
    }
  }
}

/* Each order starts with the contents before the launch: sums that are added to memory are added once. */
TEST(LaneOrders_Accumulation_IsDoneOnce) {
  int32_t data[64] = {0};
  char text[400];
  const planted_args_t args = {data, 2, 0};
  begin();
  sluice_fake_run_in_orders("warps_add", planted_kernels()[3].fn, 2, &args);
  assert_int_equal(sluice_fake_orders_end(text, sizeof text), 0);
  assert_true(data[0] == 1 && data[32] == 1);
}
