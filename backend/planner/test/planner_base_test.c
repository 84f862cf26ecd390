// SPDX-License-Identifier: Apache-2.0
/* The planner's byte counts for handles equal the real ones: a context on a CPU, and a layer in it. */

#include "backend/gemm/gemm.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/run/active_plan.h"
#include "backend/moe/run/run.h"
#include "backend/planner/layer_planner.h"
#include "third_party/bazel/test.h"

TEST(Base_OfPlanner_IsThatOfALiveLayer) {
  sluice_context_t* context = NULL;
  sluice_moe_t* moe = NULL;
  assert_int_equal(sluice_engine_create(NULL, NULL, NULL, NULL, &context), SLUICE_OK);
  assert_int_equal(sluice_cpu_device_create(&context->allocator, &context->device), SLUICE_OK);
  assert_int_equal(sluice_gemm_ref_create(&context->allocator, &context->gemm), SLUICE_OK);
  DEFAULTS(sluice_moe_config, config);
  config.model_width = 8, config.hidden_width = 8, config.num_experts = 100, config.top_k = 2;
  config.dtype = SLUICE_DTYPE_F32;
  assert_int_equal(sluice_layer_create(context, &config, NULL, &moe), SLUICE_OK);
  assert_int_equal(sluice_planner_base_bytes(&moe->shape), sluice_plan_base_bytes(context));
  sluice_layer_release(moe);
  sluice_engine_release(context);
}
