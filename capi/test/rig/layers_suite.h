// SPDX-License-Identifier: Apache-2.0
/* Layers of several shapes under one budget: from the smallest that they name, any budget fits a step of each. The same
 * on every device: the caller opens the first layer and closes it. */
#ifndef SLUICE_CAPI_TEST_RIG_LAYERS_SUITE_H_
#define SLUICE_CAPI_TEST_RIG_LAYERS_SUITE_H_

#include "capi/test/rig/rig.h"

typedef struct layers_suite_s {
  /* A context for num_layers layers with that budget, and the first of them. */
  void (*open)(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer);
  void (*close)(rig_t* rig); /* nothing may leak */
  int32_t is_slow;           /* fewer budgets */
} layers_suite_t;

/* Two steps of all layers, and one of smaller batches, stay within the budget. */
void layers_all_have_their_room(const layers_suite_t* suite);
/* Small batches first: memory kept for their plans is no reason to refuse large ones. */
void layers_batches_may_grow(const layers_suite_t* suite);

#endif /* SLUICE_CAPI_TEST_RIG_LAYERS_SUITE_H_ */
