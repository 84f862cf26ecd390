// SPDX-License-Identifier: Apache-2.0
/* Planted races, orders and accesses are found, and the same kernels without them have no problem. */
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/lane_orders.h"
#include "backend/device/cuda/kernels/kernel_args.h"
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

/* A second row in the launch, of which the run and so the list of accesses have only one. */
TEST(LaneOrders_AccessThatIsNotListed_IsReportedByName) {
  const sluice_cuda_driver_t* driver = sluice_fake_cuda_driver();
  void *context = NULL, *library = NULL, *kernel = NULL;
  begin();
  sluice_fake_cuda_reset();
  assert_int_equal(driver->cuDevicePrimaryCtxRetain(&context, 100), 0);
  assert_int_equal(driver->cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(driver->cuLibraryLoadData(&library, "", NULL, NULL, 0, NULL, NULL, 0), 0);
  assert_int_equal(driver->cuLibraryGetKernel(&kernel, library, "sluice_move_rows"), 0);
  for (int is_planted = 0; is_planted < 2; ++is_planted) {
    char from[2][16] = {{1}, {2}}, to[2][16], text[400];
    const sluice_move_args_t args = {.src = from,
                                     .dst = to,
                                     .units = 2,
                                     .row_bytes = 16,
                                     .piece = 1,
                                     .num_runs = 1,
                                     .runs = {{.src_row = 0, .dst_row = 0, .end = is_planted ? 1 : 2}}};
    void* parameters[1] = {(void*)(uintptr_t)&args};
    begin();
    assert_int_equal(driver->cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL), 0);
    assert_memory_equal(from, to, sizeof from);
    assert_int_equal(sluice_fake_orders_end(text, sizeof text) > 0, is_planted);
    if (is_planted) assert_non_null(strstr(text, "reads 1 bytes"));
    if (is_planted) assert_non_null(strstr(text, "which kernel_accesses.c does not list"));
  }
  assert_int_equal(driver->cuCtxPopCurrent_v2(&context), 0);
  sluice_fake_cuda_reset();
}
