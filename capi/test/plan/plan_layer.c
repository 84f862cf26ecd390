// SPDX-License-Identifier: Apache-2.0
#include "capi/test/plan/plan_layer.h"

#include <stdint.h>

#include "third_party/bazel/test.h"

void open_layer(layer_t* l, int32_t gated) {
  DEFAULTS(sluice_context_config, context);
  context.gemm = "ref";
  assert_int_equal(sluice_context_create(&context, NULL, &l->context), SLUICE_OK);
  DEFAULTS(sluice_moe_config, config);
  config.model_width = l->width, config.hidden_width = l->hidden, config.num_experts = l->experts;
  config.top_k = l->top_k, config.gated = gated;
  config.dtype = l->is_bf16 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
  assert_int_equal(sluice_moe_create(l->context, &config, &l->moe), SLUICE_OK);
}

void close_layer(layer_t* l) {
  sluice_moe_destroy(l->moe);
  sluice_context_destroy(l->context);
}
