// SPDX-License-Identifier: Apache-2.0
/* What a layer under a capacity remembers: the drop counters of its routes, and the calls that the ranks have agreed
 * on. */
#ifndef SLUICE_BACKEND_MOE_LAYER_CAPACITY_STATE_H_
#define SLUICE_BACKEND_MOE_LAYER_CAPACITY_STATE_H_

#include "backend/moe/layer/layer.h"

#define SLUICE_DROP_COUNTERS_BYTES ((uint64_t)SLUICE_NUM_DROP_COUNTERS * sizeof(int64_t))

enum { SLUICE_MAX_KINDS = 16 }; /* of calls: direction, what is kept, halves, gradients; others open a header each */

struct sluice_capacity_s {
  int64_t* drop_counters; /* [SLUICE_NUM_DROP_COUNTERS] where rows lie */
  int32_t is_cleared;
  int32_t num_kinds;
  uint64_t kinds[SLUICE_MAX_KINDS]; /* comm_hash of calls that the ranks have agreed on */
  int32_t has_run[SLUICE_MAX_KINDS];
};

/* The state of a layer; NULL stays NULL. Errors: NO_MEMORY. */
sluice_status_t sluice_capacity_create(sluice_moe_t* moe);
void sluice_capacity_destroy(sluice_moe_t* moe);

/* Another plan: its calls open a header each again, in which the ranks compare what they were given. */
void sluice_capacity_forget_agreed(const sluice_moe_t* moe);

#endif /* SLUICE_BACKEND_MOE_LAYER_CAPACITY_STATE_H_ */
