// SPDX-License-Identifier: Apache-2.0
/* Predictions from a pass of one chunk for more chunks, compared with the real schedule on a machine without
 * interference. */
#include <math.h>

#include "backend/cost/cost.h"
#include "backend/cost/bootstrap_model.h"
#include "third_party/bazel/test.h"

/* Exchanges take `comm` times as long as GEMMs. */
static sluice_machine_t machine(double comm) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2;
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){1, {1}, {1e-11}};
  m.exchange.bytes = (sluice_curve_t){1, {1}, {1e-11 * 2 * 2048 * comm}}; /* two GEMMs per row, two directions */
  return m;
}

static const sluice_workload_t work = {.model_width = 512,
                                       .hidden_width = 2048,
                                       .num_experts = 2,
                                       .top_k = 1,
                                       .gate_factor = 1,
                                       .dtype = SLUICE_DTYPE_F32,
                                       .world_size = 2,
                                       .num_tokens = 8192,
                                       .skew = 1};

static sluice_prediction_t predict(const sluice_machine_t* m, int32_t n, int32_t direction) {
  const sluice_choice_t choice = {.num_chunks = n};
  sluice_prediction_t p = {0};
  assert_int_equal(sluice_predict_pass_lanes(m, &work, &choice, direction, &p), SLUICE_OK);
  return p;
}

/* From links that never delay computation to links that dominate, both directions, every n. */
TEST(BootstrapModel_OfOneChunk_IsWhatTheScheduleTakes) {
  for (double comm = 0.125; comm <= 8; comm *= 2) {
    const sluice_machine_t m = machine(comm);
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
      const sluice_prediction_t one = predict(&m, 1, d);
      const sluice_lanes_t lanes = {one.busy[SLUICE_LANE_COMPUTE], one.busy[SLUICE_LANE_COMM], 0, 1e-6};
      const sluice_bootstrap_point_t point = {1, one.total, lanes};
      const sluice_bootstrap_work_t wanted = {8192, 1e-6, 0};
      for (int32_t n = 1; n <= 16; n += n < 4 ? 1 : 4) {
        double said = sluice_bootstrap_pass(&point, 1, d, &wanted, n), takes = predict(&m, n, d).total;
        if (fabs(said / takes - 1) > 0.06) printf("comm %g, direction %d, n %d: %g of %g s\n", comm, d, n, said, takes);
        assert_true(fabs(said / takes - 1) <= 0.06);
      }
    }
  }
}
