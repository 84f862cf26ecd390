// SPDX-License-Identifier: Apache-2.0
/* Derives and proves releases.
 *
 * Exactly the ops of a use that no other op of the use follows must release it: with one release too few the slot is
 * reused unreleased, with one too many it is freed twice, or freed and then used.
 */
#pragma once

#include "backend/schedule/check/finding.h"
#include "backend/schedule/schedule.h"

/* ---- the order of ops ---- */

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

/* ---- releases ---- */

/* A use of a slot begins with a write that ignores its contents, and ends when every op that releases it has ended: its
 * last ops, which are several if they are on lanes that do not wait for each other. Slots whose rows the pass was
 * given, or leaves as its result, are released by no op. */
int sluice_op_releases(const sluice_op_t* op, int32_t tensor, int32_t slot);
int sluice_slot_outlasts(const sluice_template_spec_t* spec, int32_t tensor);

/* Sets every op's releases, from accesses and dependencies. Errors: NO_MEMORY, INTERNAL. */
sluice_status_t sluice_template_mark_releases(sluice_template_t* schedule);

/* Reports the first hazard of releases, for a template without other hazards; leaves out_finding unchanged if there is
 * none. Errors: NO_MEMORY. */
sluice_status_t sluice_releases_check(const sluice_template_t* schedule, const sluice_before_t* before,
                                      sluice_allocator_t* memory, sluice_finding_t* out_finding);

/* Returns how many slots the reads and writes of all ops touch, each access counted separately: the capacity of lists
 * of them. */
uint64_t sluice_template_count_touches(const sluice_template_t* schedule);
