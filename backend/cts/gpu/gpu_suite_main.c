// SPDX-License-Identifier: Apache-2.0
/* Requirements on a GPU, as one program without a test framework: kernels against the plain ones, routing against a
 * plain sort, GEMMs by cuBLAS against f64, copies and pinned memory, passes on streams, NCCL with one rank, steps of
 * Adam.
 *
 *   gpu_suite --list            the parts
 *   gpu_suite PART... [--coverage]
 *                               runs them; a line per case, the last `N passed, N failed`; exit 0, 1, or 77: no GPU
 *                               here. --coverage (fakes): in several orders of lanes and warps; then a case for races,
 *                               and one for each kernel, whether a part launched it
 *
 * integration_tests/gpu/run runs it, under compute-sanitizer too. Bazel builds the same source with the fake driver and
 * cuBLAS (-DSLUICE_GPU_SUITE_FAKE) as a test of the suite itself. */
#include <stdio.h>
#include <string.h>

#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "sluice/base.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/lane_orders.h"
#endif

enum { NO_GPU = 77 };

static const struct {
  const char* name;
  void (*run)(void);
} parts[] = {{"kernels", gpu_part_kernels},
             {"routing", gpu_part_routing},
             {"gemm", gpu_part_gemm},
             {"gemm_by_rule", gpu_part_gemm_by_rule},
             {"gemm_grouped", gpu_part_gemm_grouped},
             {"gemm_single", gpu_part_gemm_single},
             {"gemm_lt", gpu_part_gemm_lt},
             {"choice", gpu_part_choice},
             {"rates", gpu_part_rates},
             {"streams", gpu_part_streams},
             {"memory", gpu_part_memory},
             {"nccl", gpu_part_nccl},
             {"adam", gpu_part_adam},
             {"profile_kernels", gpu_part_profile_kernels},
             {"profile_grouped", gpu_part_profile_grouped},
             {"profile_single", gpu_part_profile_single}};
enum { NUM_PARTS = sizeof parts / sizeof parts[0] };

static void print_log(void* user, int32_t level, const char* message) {
  (void)user, (void)level;
  printf("     %s\n", message);
}

static int part_of(const char* name) {
  int part = 0;
  while (part < NUM_PARTS && strcmp(name, parts[part].name) != 0) ++part;
  return part < NUM_PARTS ? part : -1;
}

static void list(void) {
  for (int i = 0; i < NUM_PARTS; ++i) printf("%s\n", parts[i].name);
}

/* Only with the fake driver: kernels run in several orders of lanes and warps. The report has a case for races and for
 * orders with other bits, and one for each kernel of the image: whether a part has launched it. */
#ifdef SLUICE_GPU_SUITE_FAKE

static void begin_coverage(void) {
  if (!sluice_fake_orders_begin()) printf("     ThreadSanitizer: lanes and warps have one order\n");
}

static void report_coverage(void) {
  static const char* const names[] = {
#define KERNEL(name, args) "sluice_" #name,
#define KERNEL_DTYPES(name, args) \
  "sluice_" #name "_f32", "sluice_" #name "_bf16", "sluice_" #name "_f16", "sluice_" #name "_f64",
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  };
  char problem[400];
  const int64_t problems = sluice_fake_orders_end(problem, sizeof problem);
  gpu_report("lanes and warps have no race, and the same bits in every order", problems > 0 ? problem : NULL);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    gpu_report(names[i], sluice_fake_cuda_has_kernel(names[i]) ? NULL : "no part launches it");
  }
}

#else

static void begin_coverage(void) {}
static void report_coverage(void) {
  gpu_report("coverage", "the driver does not tell: run the suite over the fake one");
}

#endif

int main(int argc, char** argv) {
  int covers = argc > 2 && strcmp(argv[argc - 1], "--coverage") == 0, end = argc - covers;
  if (argc == 2 && strcmp(argv[1], "--list") == 0) {
    list();
    return 0;
  }
  for (int i = 1; i < end || end < 2; ++i) {
    if (end >= 2 && part_of(argv[i]) >= 0) continue;
    fprintf(stderr, "usage: gpu_suite --list | PART... [--coverage]\n");
    return 2;
  }
  sluice_set_log(print_log, NULL, SLUICE_LOG_INFO); /* a library that declines a request says so in the log */
  sluice_status_t status = gpu_rig_open();
  if (status == SLUICE_E_NOT_FOUND) {
    printf("no GPU: %s\n", last_message());
    return NO_GPU;
  }
  if (status != SLUICE_OK) gpu_die("device");
  if (covers) begin_coverage();
  gpu_enter(); /* the default stream of this device, for the suite's own waits */
  for (int i = 1; i < end; ++i) parts[part_of(argv[i])].run();
  gpu_leave();
  if (covers) report_coverage();
  gpu_rig_close();
  printf("%d passed, %d failed\n", gpu_rig.passed, gpu_rig.failed);
  return gpu_rig.failed == 0 && gpu_rig.passed > 0 ? 0 : 1;
}
