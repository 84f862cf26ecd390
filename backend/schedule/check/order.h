// SPDX-License-Identifier: Apache-2.0
/* Happens-before of a template: lane order and dependencies, nothing else. Private to backend/schedule/check. */
#pragma once

#include "backend/schedule/schedule.h"

/* For each lane, the last op that is known to have ended before an op starts; -1: none. */
typedef int32_t sluice_before_t[SLUICE_NUM_LANES];

/* Computes before[index] from those of earlier ops. last_of_lane: of the ops so far, all -1 for the first op; updated.
 * Returns 0 if a dependency, *out_dep, is not an earlier op, else 1. */
int sluice_order_op(const sluice_template_t* schedule, int32_t index, sluice_before_t* before, int32_t* last_of_lane,
                    int32_t* out_dep);
/* Computes the same for all ops of a template whose dependencies are in order. */
void sluice_order_all(const sluice_template_t* schedule, sluice_before_t* before);

/* Returns whether `earlier` has ended when `later` starts. Both exchanges of a group have ended when the second has: an
 * op that waits only for the first may find its rows in flight. */
static inline int sluice_is_before(const sluice_template_t* schedule, const sluice_before_t* before, int32_t earlier,
                                   int32_t later) {
  return sluice_op_end(schedule->ops, earlier) <= before[later][schedule->ops[earlier].lane];
}
