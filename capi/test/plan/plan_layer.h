// SPDX-License-Identifier: Apache-2.0
/* A layer of one rank on a context of its own, for tests of plans. */
#ifndef SLUICE_CAPI_TEST_PLAN_PLAN_LAYER_H_
#define SLUICE_CAPI_TEST_PLAN_PLAN_LAYER_H_

#include "sluice/sluice.h"

typedef struct layer_s {
  sluice_context_t* context;
  sluice_moe_t* moe;
  int64_t tokens, width, hidden;
  int32_t experts, top_k;
  int32_t is_bf16; /* the layer is bf16, and reads the arrays as bf16 */
} layer_t;

void open_layer(layer_t* l, int32_t gated);
void close_layer(layer_t* l);

#endif /* SLUICE_CAPI_TEST_PLAN_PLAN_LAYER_H_ */
