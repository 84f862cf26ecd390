// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/fake/fake_cublas_calls.h"

/* Ranks are threads and call at the same time. */
static struct {
  _Atomic int64_t calls;
  int64_t fail_at;
  _Atomic int fail_code, failed;
} plan = {.fail_at = -1};

void sluice_fake_cublas_fail_call(int64_t nth, int code) {
  plan.calls = 0;
  plan.fail_at = nth;
  plan.fail_code = code;
  plan.failed = 0;
}
int sluice_fake_cublas_failed(void) { return plan.failed; }

int sluice_fake_cublas_planned(void) {
  if (plan.calls++ != plan.fail_at) return 0;
  plan.failed = 1;
  return plan.fail_code;
}
