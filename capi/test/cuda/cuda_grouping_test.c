/* Exchanges in groups on a CUDA context, on fakes: enqueued in the order of the schedule, without a hazard between any
 * two accesses, and with the bits of a layer that groups nothing. (Two exchanges of one stream run one after the other
 * there: nothing is gained yet.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/world/checks.h"

static void run(case_t c, int32_t grouping, result_t* out) {
  char text[200], live[200];
  fakes_open(c.world_size, 1);
  c.machine = fakes_machine(), c.grouping = grouping;
  world_run(&c, out);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  must_work(&c, out);
}

static void check(const case_t* c) {
  result_t single, grouped;
  run(*c, SLUICE_GROUPING_OFF, &single);
  run(*c, SLUICE_GROUPING_ON, &grouped);
  if (!world_identical(c, &grouped, &single, 1)) {
    fail_msg("W %d n %d dedup %d restore %d %d: other bits, distance %g", c->world_size, c->num_chunks, c->deduplicate,
             c->restore_input, c->restore_pre_activation, world_distance(c, &grouped, &single));
  }
  world_free(&single);
  world_free(&grouped);
}

static void CudaGrouping_RanksChunksAndPolicies_SameBitsAndNoHazard(void** state) {
  (void)state;
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t p = 0; p < 9; ++p) {
    case_t c = world_small_case();
    c.world_size = 2 + p % 3, c.num_chunks = 3 + p % 3, c.top_k = 2, c.bias = 1;
    c.dtype = SLUICE_DTYPE_F64;            /* GEMMs of the fake cuBLAS then sum as gemm ref does */
    c.activation = SLUICE_ACTIVATION_RELU; /* no function whose last bits are a library's */
    c.restore_input = inputs[p / 3], c.restore_pre_activation = pre_activations[p % 3];
    c.deduplicate = p % 2, c.wgrad_mode = p % 2, c.hot_expert = p % 4 == 0 ? 1 : -1;
    check(&c);
  }
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* a slot is NaN once its ops have ended: a group ends as one */
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaGrouping_RanksChunksAndPolicies_SameBitsAndNoHazard),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
