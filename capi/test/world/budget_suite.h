// SPDX-License-Identifier: Apache-2.0
/* Cases for a layer under a budget, on this CPU, with deduplication, or on a device with memory of its own. A test sets
 * how ranks run and calls the cases, which fail through cmocka. */
#pragma once

#include "capi/test/world/world.h"

typedef struct budget_suite_s {
  case_t base;                                 /* budget_base_case, which the test may change */
  void (*run)(const case_t* c, result_t* out); /* world_run or a wrapper of it */
  int32_t least_ranks;
  int32_t is_slow; /* runs fewer cases, for fakes */
} budget_suite_t;

/* Twelve experts in uneven batches, with all choices adaptive. */
case_t budget_base_case(void);
/* This case on this CPU, from one rank on. */
budget_suite_t cpu_budget_suite(void);

/* The smallest budget that the errors of a case name; 0: no rank fails. A case without a budget gets one byte. Checks
 * the form of the errors. */
uint64_t budget_smallest(const budget_suite_t* suite, case_t c);
/* Checks that memory stays within the budgets, and that results match the f64 reference and have the bits of the same
 * layer in one chunk without a budget. */
void budget_check(const budget_suite_t* suite, case_t c);

/* Budgets from the smallest up work; one byte less is refused. */
void budget_from_the_smallest_up(const budget_suite_t* suite);
/* One expert has ten times the mean load, or all first routes of all ranks; K 1 and 2; fused experts and recomputing
 * callbacks. Memory stays within the plan, the number of chunks grows, and no route is dropped. */
void budget_one_hot_expert(const budget_suite_t* suite);
/* Few tokens, a rank without tokens, dropped routes, other owners, and every policy. */
void budget_odd_shapes_and_policies(const budget_suite_t* suite);
/* All ranks refuse before any row is sent; the allocator does not fail in the middle of a pass. */
void budget_more_outstanding_than_said(const budget_suite_t* suite);
/* Rounds of fewer and more tokens, with several outstanding forwards, from the budget that the largest batches need.
 * Each batch size has its own plan, and large batches may use the memory of small ones. */
void budget_batches_differ(const budget_suite_t* suite);
/* Separate dgrad and wgrad: the plan includes what dgrad keeps for wgrad. */
void budget_separate_wgrad(const budget_suite_t* suite);
/* If separate_wgrad was not configured, all ranks refuse dgrad alone, before any row is sent. */
void budget_halves_unsaid(const budget_suite_t* suite);
/* Offloaded rows of one hot expert that do not fit the pool are sent again and recomputed, with the same results. */
void host_budget_one_hot_expert(const budget_suite_t* suite);

/* Plans of least_ranks and more over n, policies, modes, uneven batches, owners and dropped routes: on each rank the
 * allocator's peak equals the prediction from the counts. Not for a device with memory of its own. */
void budget_predictions(const budget_suite_t* suite);
/* The same with a list of restore policies, also of callback experts. */
void budget_predictions_by_chunk(const budget_suite_t* suite);

/* The same with budgets between those of two policies for all chunks; results are also checked. */
void budget_between_policies(const budget_suite_t* suite);

/* Layers with a list of restore policies: budgets from the smallest up work; one byte less is refused. */
void budget_by_chunk(const budget_suite_t* suite);

/* A base case under a capacity: all ranks are equal and take exactly the planned bytes. */
case_t capacity_budget_base(void);
/* Returns one of sixteen shapes. */
case_t capacity_budget_case(const budget_suite_t* suite, int32_t world_size, int32_t bits);
/* Budgets from the smallest up work, with the results of no budget; one byte less is refused. */
void capacity_budget_peak_is_planned(const budget_suite_t* suite);
void capacity_budget_more_outstanding_than_said(const budget_suite_t* suite);

/* A cmocka test with this name that calls of_check with of_suite. The entry lives as long as the enclosing block. */
#define BUDGET_TEST(test, of_suite, of_check)                                        \
  {                                                                                  \
    .name = #test, .test_func = budget_run_test, .initial_state = &(budget_test_t) { \
      .suite = of_suite, .check = of_check                                           \
    }                                                                                \
  }

typedef struct budget_test_s {
  budget_suite_t suite;
  void (*check)(const budget_suite_t* suite);
} budget_test_t;

void budget_run_test(void** state);
