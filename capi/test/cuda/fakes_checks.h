// SPDX-License-Identifier: Apache-2.0
/* Cases of the test world on fake GPUs, under cmocka, for suites that also run on this CPU. */
#pragma once

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/world/checks.h"

/* Fails the test on any hazard and on any leak. */
static inline void fakes_must_be_clean(void) {
  char text[200], live[200];
  const int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  if (hazards != 0) fail_msg("%lld hazards: %s", (long long)hazards, text);
}

/* Runs the case on the open fakes, whose only GEMM library is cuBLAS. */
static inline void run_on_open_fakes(const case_t* c, result_t* out) {
  case_t there = *c;
  there.machine = fakes_machine(), there.gemm = NULL;
  world_run(&there, out);
  fakes_must_be_clean();
}

/* Runs the case with a device for each rank and NCCL between the ranks. */
static inline void run_on_fakes(const case_t* c, result_t* out) {
  fakes_open(c->world_size, 1);
  run_on_open_fakes(c, out);
}

/* Runs the case with one device for all ranks and a local communicator. */
static inline void run_on_local_fakes(const case_t* c, result_t* out) {
  fakes_open_local(c->world_size, 1);
  run_on_open_fakes(c, out);
}

/* Runs the case with a cuBLAS without grouped GEMMs. */
static inline void run_on_old_fakes(const case_t* c, result_t* out) {
  fakes_open(c->world_size, 0);
  run_on_open_fakes(c, out);
}

/* Checks the reads that the host waited for in passes of one direction, on the fakes of the last run. */
static inline void must_read(const case_t* c, uint64_t forward, uint64_t backward) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_int_equal(fakes_waits(r, SLUICE_FORWARD).reads, forward);
    assert_int_equal(fakes_waits(r, SLUICE_BACKWARD).reads, backward);
  }
  if (c->world_size > 1) return;
  assert_int_equal(fakes_waits(0, SLUICE_FORWARD).of_driver, forward);
  assert_int_equal(fakes_waits(0, SLUICE_BACKWARD).of_driver, backward);
}
