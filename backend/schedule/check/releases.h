// SPDX-License-Identifier: Apache-2.0
/* Derives and proves releases.
 *
 * Exactly the ops of a use that no other op of the use follows must release it: with one release too few the slot is
 * reused unreleased, with one too many it is freed twice, or freed and then used.
 */
#pragma once

#include "backend/schedule/check/finding.h"
#include "backend/schedule/check/order.h"

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
