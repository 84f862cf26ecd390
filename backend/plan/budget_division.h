// SPDX-License-Identifier: Apache-2.0
/* Divides one budget among several contexts of a device.
 *
 * A plan keeps as many rows as its budget allows, so contexts cannot draw on one sum: the first to plan would take all
 * of it. Each context gets its minimum need, and a share of the rest. Needs are given for a first batch and for larger
 * ones, because shares are fixed once there are plans: all contexts can then grow by the same factor until their
 * minimum needs exhaust the whole budget. */
#pragma once

#include "backend/base/status.h"
#include "sluice/plan.h"

/* Returns the tokens of a batch of this size, [0, SLUICE_BUDGET_SIZES), if the first batch has num_tokens. Rounded up,
 * at most INT32_MAX. */
int64_t sluice_budget_tokens(int64_t num_tokens, int32_t size);

/* As sluice_budget_divide, with checked arguments. */
sluice_status_t sluice_budget_division(uint64_t total, int32_t num_contexts, const uint64_t* weights, int32_t num_sizes,
                                       const uint64_t* needs, uint64_t* out_shares);
