// SPDX-License-Identifier: Apache-2.0
/* Shrinks the rings of mixed policies: removes slots that the dependencies make superfluous.
 *
 * If policies differ between chunks, two chunks that share a ring may be far from each other, or be ordered by the ops
 * between them; then one slot suffices for both without an additional wait. The hazard checker decides.
 */
#pragma once

#include "backend/schedule/schedule.h"

/* Gives `tensor` a ring of one slot instead of two if the template has no hazard then with its present dependencies;
 * otherwise leaves it alone. Errors: NO_MEMORY. */
sluice_status_t sluice_template_tighten(sluice_template_t* schedule, int32_t tensor);
