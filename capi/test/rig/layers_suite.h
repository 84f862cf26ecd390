// SPDX-License-Identifier: Apache-2.0
/* Cases for layers of several shapes under one budget, on any device: every budget from the smallest that the layers
 * name fits a step of each layer. The caller opens and closes the first layer. */
#pragma once

#include "capi/test/rig/rig.h"

typedef struct layers_suite_s {
  /* Opens a context for num_layers layers with this budget, and the first layer. */
  void (*open)(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer);
  void (*close)(rig_t* rig); /* fails the test on a leak */
  int32_t is_slow;           /* fewer budgets are tested */
} layers_suite_t;

/* Two steps of all layers, and one step with smaller batches, stay within the budget. */
void layers_all_have_their_room(const layers_suite_t* suite);
/* Small batches run first. Memory that is kept for their plans must not lead to a refusal of large batches. */
void layers_batches_may_grow(const layers_suite_t* suite);
