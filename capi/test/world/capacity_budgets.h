// SPDX-License-Identifier: Apache-2.0
/* Cases for a layer under a capacity and a budget, on any device. Like budget_suite.h with another base case, in which
 * all ranks are equal and take exactly the planned bytes. */
#pragma once

#include "capi/test/world/budget_suite.h"

/* Numbers of ranks. */
extern const int32_t capacity_budget_ranks[3];

case_t capacity_budget_base(void);
/* Returns one of sixteen shapes. */
case_t capacity_budget_case(const budget_suite_t* suite, int32_t world_size, int32_t bits);
/* The smallest budget that the errors name; 0: no rank fails. */
uint64_t capacity_budget_smallest(const budget_suite_t* suite, const case_t* c);

/* Budgets from the smallest up work, with the results of no budget; one byte less is refused. */
void capacity_budget_peak_is_planned(const budget_suite_t* suite);
void capacity_budget_more_outstanding_than_said(const budget_suite_t* suite);
