// SPDX-License-Identifier: Apache-2.0
/* Requirements on a layer under a capacity and a budget on any device. Like budget_suite.h, with its own base case; all
 * ranks are equal, so that each takes exactly the planned bytes. */
#ifndef SLUICE_CAPI_TEST_WORLD_CAPACITY_BUDGETS_H_
#define SLUICE_CAPI_TEST_WORLD_CAPACITY_BUDGETS_H_

#include "capi/test/world/budget_suite.h"

/* Three numbers of ranks. */
extern const int32_t capacity_budget_ranks[3];

case_t capacity_budget_base(void);
/* One of sixteen shapes. */
case_t capacity_budget_case(const budget_suite_t* suite, int32_t world_size, int32_t bits);
/* The smallest budget that the errors of all ranks name, the same on each; 0: it ran. */
uint64_t capacity_budget_smallest(const budget_suite_t* suite, const case_t* c);

/* From the smallest budget up; one byte less is refused, and the results are those without a budget. */
void capacity_budget_peak_is_planned(const budget_suite_t* suite);
void capacity_budget_more_outstanding_than_said(const budget_suite_t* suite);

#endif /* SLUICE_CAPI_TEST_WORLD_CAPACITY_BUDGETS_H_ */
