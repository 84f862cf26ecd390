// SPDX-License-Identifier: Apache-2.0
/* The hazard checker: proves that every run of a template, however its lanes interleave, gives the same result.
 *
 * Happens-before is lane order plus the template's dependencies; nothing else is assumed, in particular not that our
 * builder made the template. A template without findings has no race on a slot or host buffer, reads only rows that
 * were written for its chunk, leaves every chunk's output and kept rows in place, frees every slot that it takes
 * exactly once, after the last op that uses it, and cannot deadlock.
 */
#pragma once

#include "backend/schedule/check/finding.h"

/* Reports the first finding in program order; out_finding->hazard is NONE if the template is proved. memory: scratch.
 * Errors: NO_MEMORY. */
sluice_status_t sluice_schedule_check(const sluice_template_t* schedule, sluice_allocator_t* memory,
                                      sluice_finding_t* out_finding);
/* Returns OK, or INVALID_ARGUMENT with a description of the finding. */
sluice_status_t sluice_schedule_check_or_fail(const sluice_template_t* schedule, sluice_allocator_t* memory);

/* Returns whether two ranks with these templates issue the same exchanges in the same order and groups. */
int sluice_schedule_same_exchanges(const sluice_template_t* a, const sluice_template_t* b);
