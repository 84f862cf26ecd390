// SPDX-License-Identifier: Apache-2.0
/* The state of a layer under a capacity: its drop counters, and the calls that the ranks have agreed on. */
#pragma once

#include "backend/moe/layer/layer.h"

#define SLUICE_DROP_COUNTERS_BYTES ((uint64_t)SLUICE_NUM_DROP_COUNTERS * sizeof(int64_t))

enum { SLUICE_MAX_KINDS = 16 }; /* of calls: direction, kept rows, parts, gradients; others always have a header */

struct sluice_capacity_s {
  int64_t* drop_counters; /* [SLUICE_NUM_DROP_COUNTERS], in row memory */
  int32_t is_cleared;
  int32_t num_kinds;
  uint64_t kinds[SLUICE_MAX_KINDS]; /* comm_hash of the kinds that the ranks have agreed on */
  int32_t has_run[SLUICE_MAX_KINDS];
};

/* Creates the state of a layer under a capacity; moe->capacity stays NULL for other layers. Errors: NO_MEMORY. */
sluice_status_t sluice_capacity_create(sluice_moe_t* moe);
void sluice_capacity_destroy(sluice_moe_t* moe);

/* Called for a new plan: each kind of call has a header again, in which the ranks compare plans. */
void sluice_capacity_forget_agreed(const sluice_moe_t* moe);
