// SPDX-License-Identifier: Apache-2.0
#include "capi/test/world/checks.h"

#include <math.h>

void must_match(const case_t* c, const result_t* got) {
  result_t want;
  must_work(c, got);
  world_reference(c, &want);
  const double distance = world_distance(c, got, &want);
  if (!(distance >= 0 && distance <= world_tolerance(c))) fail_msg("%s: distance %g", case_text(c), distance);
  world_free(&want);
}

void must_be_same(const case_t* c, const result_t* a, const result_t* b, int params) {
  must_work(c, a);
  must_work(c, b);
  if (world_identical(c, a, b, params)) return;
  fail_msg("%s: other bits%s, distance %g", case_text(c), world_identical(c, a, b, 0) ? " of parameter gradients" : "",
           world_distance(c, a, b));
}

void must_be_same_at_experts(const case_t* c, const result_t* a, const result_t* b) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_memory_equal(a->grad_weights[r], b->grad_weights[r],
                        (size_t)(c->tokens[r] * c->top_k) * sizeof *a->grad_weights[r]);
  }
  for (int kind = 0; kind < 3 && !c->callback_experts; ++kind) {
    const size_t bytes = (size_t)world_count(c, 2 + kind) * sizeof *a->grad_params[kind];
    assert_memory_equal(a->grad_params[kind], b->grad_params[kind], bytes);
  }
}

case_run_t case_run = world_run;

void check_matches(const case_t* c) {
  result_t got;
  case_run(c, &got);
  must_match(c, &got);
  world_free(&got);
}

void check_same_bits(const case_t* a, const case_t* b, int params) {
  result_t one, other;
  case_run(a, &one);
  case_run(b, &other);
  must_be_same(a, &one, &other, params);
  world_free(&one);
  world_free(&other);
}

void check_finite_differences(const case_t* c) {
  result_t got;
  world_run(c, &got);
  must_work(c, &got);
  for (int which = 0; which < 14; ++which) {
    if (which >= 2 && which < 5 && c->lora_rank > 0) continue; /* W is frozen */
    /* Route weights are f32 inputs. The layer is linear in them, so a wide step is exact and keeps rounding small. */
    const double h = which == 1 ? 0.25 : 1e-5;
    for (int64_t i = 0; i < world_count(c, which); ++i) {
      const double slope = (world_objective(c, which, i, h) - world_objective(c, which, i, -h)) / (2 * h);
      const double analytic = which == 0   ? got.grad_tokens[0][i]
                              : which == 1 ? got.grad_weights[0][i]
                                           : got.grad_params[which - 2][i];
      if (fabs(slope - analytic) > 2e-6 * (1 + fabs(analytic))) {
        fail_msg("%s: input %d, index %lld: finite difference %.9g, gradient %.9g", case_text(c), which, (long long)i,
                 slope, analytic);
      }
    }
  }
  world_free(&got);
}

int case_run_there(void** state) {
  case_run = (case_run_t)(uintptr_t)*state;
  return 0;
}

int case_run_here(void** state) {
  (void)state;
  case_run = world_run;
  return 0;
}
