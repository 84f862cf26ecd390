// SPDX-License-Identifier: Apache-2.0
/* Sweeps over the axes of a case, which every mode of the layer passes. A suite gives its base case and its check. */
#pragma once

#include "capi/test/world/checks.h"

/* Sets case i of a sweep; returns 0 after the last one. Ranks change unless the base case has nodes. */
typedef int (*sweep_t)(const case_t* base, int32_t i, case_t* c);

/* Ranks, chunks, gates, biases, weight-gradient modes, transposed parameters, added gradients. */
int sweep_ranks_and_chunks(const case_t* base, int32_t i, case_t* c);
/* Nine pairs of restore policies in f32 and bf16, with steps that are rebuilt, outstanding, or split into dgrad and
 * wgrad. */
int sweep_policies(const case_t* base, int32_t i, case_t* c);
/* Every dtype, also with gradients in f32 that are added to existing ones. */
int sweep_dtypes(const case_t* base, int32_t i, case_t* c);
/* Any K; dropped and repeated routes; one hot expert; owners with different numbers of experts. */
int sweep_routes(const case_t* base, int32_t i, case_t* c);
/* Ranks without tokens, with and without experts, and rounds of other batches, which must keep no memory. */
int sweep_batches(const case_t* base, int32_t i, case_t* c);
/* Callback experts that keep or recompute. */
int sweep_callbacks(const case_t* base, int32_t i, case_t* c);

typedef struct sweep_test_s {
  case_t base;
  void (*check)(const case_t* c);
  sweep_t sweep;
  case_run_t run; /* becomes case_run */
} sweep_test_t;

/* A cmocka test with this name. The entry lives as long as the enclosing block. */
#define SWEEP_TEST(test, there, of_base, of_check, of_sweep)                                                       \
  {                                                                                                                \
    .name = #test, .test_func = sweep_run_test, .teardown_func = case_run_here, .initial_state = &(sweep_test_t) { \
      .base = of_base, .check = of_check, .sweep = of_sweep, .run = there                                          \
    }                                                                                                              \
  }

void sweep_run_test(void** state);
