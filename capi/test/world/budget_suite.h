// SPDX-License-Identifier: Apache-2.0
/* Requirements on a layer under a budget on any device: on this CPU, deduplicated, on a device with its own memory.
 * Each test sets how its ranks run and calls the cases; they fail through cmocka. */
#ifndef SLUICE_CAPI_TEST_WORLD_BUDGET_SUITE_H_
#define SLUICE_CAPI_TEST_WORLD_BUDGET_SUITE_H_

#include "capi/test/world/world.h"

typedef struct budget_suite_s {
  case_t base;                                 /* budget_base_case, modified */
  void (*run)(const case_t* c, result_t* out); /* world_run, or a wrapper of it */
  int32_t least_ranks;
  int32_t is_slow; /* fakes: fewer cases */
} budget_suite_t;

/* Twelve experts in uneven batches, everything left open. */
case_t budget_base_case(void);

/* The smallest budget that the errors of a case name, all of the right form; 0: it runs. */
uint64_t budget_smallest(const budget_suite_t* suite, case_t c);
/* Within its budgets, with the results of the f64 reference, and with the bits of the same layer in one chunk without a
 * budget. */
void budget_check(const budget_suite_t* suite, case_t c);

/* From the smallest budget up; one byte less is refused. */
void budget_from_the_smallest_up(const budget_suite_t* suite);
/* One expert ten times as hot as the mean, and all first routes of all ranks to it, K 1 and 2, own experts and
 * recomputing callbacks: memory stays within the plan, the number of chunks grows, nothing is dropped. */
void budget_one_hot_expert(const budget_suite_t* suite);
/* Few tokens, none on a rank, dropped routes, experts in another order, every policy. */
void budget_odd_shapes_and_policies(const budget_suite_t* suite);
/* Refused on all ranks before anything is sent, not by the allocator in the middle of a pass. */
void budget_more_outstanding_than_said(const budget_suite_t* suite);
/* Rounds of fewer and more tokens first, some forwards outstanding, from the budget that the largest batches need: each
 * size of a batch has its own plan, and memory of small ones is available to large ones. */
void budget_batches_differ(const budget_suite_t* suite);
/* dgrad and wgrad separately: what dgrad leaves for wgrad is part of the plan. */
void budget_separate_wgrad(const budget_suite_t* suite);
/* A plan without declared separate calls refuses dgrad alone, on all ranks and before anything is sent. */
void budget_halves_unsaid(const budget_suite_t* suite);
/* Offloaded rows of one hot expert: those that do not fit the pool are sent again and recomputed, with the same
 * results. */
void host_budget_one_hot_expert(const budget_suite_t* suite);

/* Plans of several ranks and their counts, over n, policies, modes, uneven batches and owners, dropped routes: the
 * allocator's peak on each rank equals the prediction exactly. Not on a device with its own memory. */
void budget_predictions(const budget_suite_t* suite);
/* The same of the host's own experts, kept and computed again. */
void budget_predictions_of_callbacks(const budget_suite_t* suite);
/* The same of layers whose chunks restore by a list. */
void budget_predictions_by_chunk(const budget_suite_t* suite);

/* Budgets between those of two policies of all chunks: the same, and results are. */
void budget_between_policies(const budget_suite_t* suite);

/* Layers whose chunks restore by a list, from the smallest budget up; one byte less is refused. */
void budget_by_chunk(const budget_suite_t* suite);

/* A test under cmocka of that name: one of the functions above with that suite. The entry lives as long as the
 * block.
 */
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

#endif /* SLUICE_CAPI_TEST_WORLD_BUDGET_SUITE_H_ */
