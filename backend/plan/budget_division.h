// SPDX-License-Identifier: Apache-2.0
/* One budget for several contexts of a device: what each gets of it.
 *
 * A plan takes as many rows as its budget has room for, so contexts cannot draw on one sum: the first to plan would
 * take all of it. Each context gets what it needs at least, and a share of the rest. Needs are asked for a first batch
 * and for larger ones, since shares stand once plans do: all contexts can then grow by the same factor until the whole
 * is spent on what they need at least. */
#ifndef SLUICE_BACKEND_PLAN_BUDGET_DIVISION_H_
#define SLUICE_BACKEND_PLAN_BUDGET_DIVISION_H_

#include "backend/base/status.h"
#include "sluice/plan.h"

/* The tokens of a batch of this size, [0, SLUICE_BUDGET_SIZES), where the first batch has num_tokens. Rounded up, at
 * most INT32_MAX. */
int64_t sluice_budget_tokens(int64_t num_tokens, int32_t size);

/* As sluice_budget_divide, with arguments that are checked. */
sluice_status_t sluice_budget_division(uint64_t total, int32_t num_contexts, const uint64_t* weights, int32_t num_sizes,
                                       const uint64_t* needs, uint64_t* out_shares);

#endif /* SLUICE_BACKEND_PLAN_BUDGET_DIVISION_H_ */
