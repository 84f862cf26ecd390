// SPDX-License-Identifier: Apache-2.0
/* Shared by tests under cmocka that run cases of the world. */
#pragma once

#include "capi/test/world/world.h"
#include "third_party/bazel/test.h"

/* Checks that no rank failed, and that ranks stayed within their budget. */
static inline void must_work(const case_t* c, const result_t* got) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (got->status[r] != SLUICE_OK) {
      fail_msg("budget %llu, rank %d: %d: %s", (unsigned long long)c->budget, r, got->status[r], got->message[r]);
    }
    if (c->budget > 0 && got->peak_bytes[r] > c->budget) {
      fail_msg("rank %d took %llu of %llu bytes", r, (unsigned long long)got->peak_bytes[r],
               (unsigned long long)c->budget);
    }
    if (c->cycles > 0 && got->growth[r] != 0) {
      fail_msg("rank %d took %llu bytes more after the last cycle", r, (unsigned long long)got->growth[r]);
    }
  }
}

/* Checks that no rank failed, and that results are within the tolerance of the f64 reference. */
void must_match(const case_t* c, const result_t* got);

/* Checks that no rank failed, and that outputs and input gradients (with params also parameter gradients) have the same
 * bits. */
void must_be_same(const case_t* c, const result_t* a, const result_t* b, int params);

/* Checks that gradients of experts and of route weights have the same bits, as if rows reach experts unchanged. */
void must_be_same_at_experts(const case_t* c, const result_t* a, const result_t* b);

/* The function that runs a suite's cases: world_run, or another one within TEST_WITH. */
typedef void (*case_run_t)(const case_t* c, result_t* out);
extern case_run_t case_run;

/* Both run cases by case_run and check the results. */
void check_matches(const case_t* c);
void check_same_bits(const case_t* a, const case_t* b, int params);

/* Checks that each gradient of a case of one rank is the slope of world_objective. */
void check_finite_differences(const case_t* c);

/* A test of a suite that calls case_run. `there` becomes case_run and a part of the test's name. */
#define TEST_WITH(there, test)                                                                                 \
  {                                                                                                            \
    .name = #test "_" #there, .test_func = test, .setup_func = case_run_there, .teardown_func = case_run_here, \
    .initial_state = (void*)(uintptr_t)(there)                                                                 \
  }

/* A test whose state is the variable `parameter`, which becomes a part of its name. */
#define TEST_OF(parameter, test) \
  { .name = #test "_" #parameter, .test_func = test, .initial_state = &(parameter) }

int case_run_there(void** state);
int case_run_here(void** state);
