/* Experts that change owner and slot between steps of layers on CUDA contexts, executed by the fake driver, cuBLAS and
 * NCCL: the bits of a run on the same fakes in which nothing moves. Nothing here says anything about a GPU's speed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/world/checks.h"

enum { ROUNDS = 3 };

static void run_on_fakes(const case_t* c, int is_local, result_t* out) {
  char live[200], hazard[200];
  case_t there = *c;
  if (is_local) {
    fakes_open_local(c->world_size, 1);
  } else {
    fakes_open(c->world_size, 1);
  }
  there.machine = fakes_machine();
  world_run(&there, out);
  const int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  const int64_t left = fakes_close(live, sizeof live);
  must_work(c, out);
  if (hazards != 0) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
  if (left != 0) fail_msg("left: %s", live);
}

static void check(const case_t* c, int is_local) {
  for (int32_t moves = WORLD_MOVES_EVEN; moves <= WORLD_MOVES_UNEVEN; ++moves) {
    result_t moved, still;
    case_t with = *c, without = *c;
    with.moves = moves;
    run_on_fakes(&with, is_local, &moved);
    run_on_fakes(&without, is_local, &still);
    assert_true(isfinite(still.out[0][0]) && still.out[0][0] != 0);
    const double distance = world_distance(c, &moved, &still);
    const int is_near = distance >= 0 && distance <= world_tolerance(c);
    if (c->deduplicate ? !is_near : !world_identical(c, &moved, &still, 1)) {
      fail_msg("W %d n %d K %d dtype %d gated %d restore %d %d capacity %lld moves %d: distance %g", c->world_size,
               c->num_chunks, c->top_k, c->dtype, c->gated, c->restore_input, c->restore_pre_activation,
               (long long)c->capacity, moves, distance);
    }
    world_free(&moved);
    world_free(&still);
  }
}

static case_t base_case(int32_t world_size) {
  case_t c = world_small_case();
  c.world_size = world_size, c.num_chunks = 2, c.bias = 1, c.rounds = ROUNDS;
  c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK, c.accumulate = world_size > 2;
  return c;
}

static void CudaMoves_RanksAndDtypes_HaveTheBitsOfNone(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 4; w *= 2) {
    case_t c = base_case(w);
    check(&c, 0);
    c.dtype = SLUICE_DTYPE_BF16, c.gated = 1;
    check(&c, w > 1);
  }
}

static void CudaMoves_Policies_HaveTheBitsOfNone(void** state) {
  (void)state;
  case_t c = base_case(2);
  c.restore_input = SLUICE_RESTORE_OFFLOAD, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE, c.restore = 1;
  check(&c, 0);
  c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD, c.restore = 0;
  check(&c, 0);
}

static void CudaMoves_UnderACapacity_HaveTheBitsOfNone(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; w *= 2) {
    case_t c = base_case(w);
    c.capacity = 18;
    check(&c, 0);
    c.capacity = 2;
    check(&c, 0);
  }
}

static void CudaMoves_CallbackExperts_HaveTheBitsOfNone(void** state) {
  (void)state;
  case_t c = base_case(4);
  c.callback_experts = 1;
  check(&c, 0);
}

static void CudaMoves_Deduplicated_AreNear(void** state) {
  (void)state;
  case_t c = base_case(2);
  c.deduplicate = 1, c.top_k = 4;
  check(&c, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaMoves_RanksAndDtypes_HaveTheBitsOfNone),
      cmocka_unit_test(CudaMoves_Policies_HaveTheBitsOfNone),
      cmocka_unit_test(CudaMoves_UnderACapacity_HaveTheBitsOfNone),
      cmocka_unit_test(CudaMoves_CallbackExperts_HaveTheBitsOfNone),
      cmocka_unit_test(CudaMoves_Deduplicated_AreNear),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
