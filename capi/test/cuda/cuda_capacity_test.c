// SPDX-License-Identifier: Apache-2.0
/* Graph mode: layers under a capacity on a CUDA context, executed by the fake driver, cuBLAS and NCCL. Checks host
 * waits, bytes sent, hazards and reports. capacity_test compares results, also on these fakes; cuda_graph_test tests
 * captures. */
#include <stdlib.h>

#include "backend/base/test/refused.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"

static const int32_t RANKS[] = {1, 2, 4};

TEST(CudaCapacity_HostWaits_NoneInForwardAndBackward) {
  for (int w = 0; w < 3; ++w) {
    case_t c = world_small_case();
    result_t out;
    c.world_size = RANKS[w], c.num_chunks = 4, c.bias = 1, c.capacity = 18;
    run_on_fakes(&c, &out);
    must_work(&c, &out);
    must_read(&c, 0, 0);
    world_free(&out);
  }
}

/* In both modes the statistics equal the bytes that the same case sends on a CPU. A capacity sends more bytes. */
TEST(CudaCapacity_BytesOnTheWire_AreThoseOfTheCpuInBothModes) {
  for (int32_t w = 2; w <= 4; w += 2) {
    uint64_t exact = 0;
    for (int64_t capacity = 0; capacity <= 18; capacity += 18) {
      case_t c = world_small_case();
      result_t got, cpu;
      c.world_size = w, c.num_chunks = 2, c.capacity = capacity;
      run_on_fakes(&c, &got);
      must_work(&c, &got);
      world_run(&c, &cpu);
      must_work(&c, &cpu);
      for (int32_t r = 0; r < w; ++r) assert_int_equal(got.bytes_sent[r], cpu.bytes_sent[r]);
      assert_true(got.bytes_sent[0] > exact);
      exact = got.bytes_sent[0];
      world_free(&got);
      world_free(&cpu);
    }
  }
}

/* Counts the waits and queries of the host in a forward and a backward, after all ranks have run one step. */
static void count_waits(rank_t* r, rig_t* rig) {
  sluice_step_t* step = NULL;
  r->status = rig_round(rig, NULL);
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits(), r->queries = sluice_fake_cuda_queries();
  pthread_barrier_wait(r->barrier);
  if (r->status == SLUICE_OK) r->status = rig_forward(rig, &step);
  if (r->status == SLUICE_OK) r->status = rig_backward(rig, step);
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits() - r->waits, r->queries = sluice_fake_cuda_queries() - r->queries;
  pthread_barrier_wait(r->barrier);
  sluice_step_drop(step);
}

TEST(CudaCapacity_CallsAfterTheFirst_HaveNoHeaderEither) {
  const sluice_moe_config_t config = config_under(6), exact = rig_config();
  for (int w = 0; w < 3; ++w) {
    rank_t ranks[4];
    run_ranks(RANKS[w], &config, count_waits, ranks);
    for (int32_t r = 0; r < RANKS[w]; ++r) {
      assert_int_equal(ranks[r].waits, 0);
      assert_int_equal(ranks[r].queries, 0);
    }
    run_ranks(RANKS[w], &exact, count_waits, ranks);
    assert_int_equal(ranks[0].waits, RANKS[w]); /* one read in each rank's forward */
    if (RANKS[w] > 1) assert_true(ranks[0].queries > 0);
  }
}

/* ---- overflow -------------------------------------------------------------------------------------------------- */

TEST(CudaCapacity_RoutesBeyondItAndBadIds_AreCountedAndReported) {
  rig_t rig;
  const sluice_moe_config_t config = config_under(1);
  open_all(&rig, &config);
  int32_t* ids = rig.ids.tensor.data; /* 6 tokens, 2 routes, 2 chunks */
  for (int t = 0; t < 6; ++t) ids[t * 2] = 2, ids[t * 2 + 1] = t % 2;
  sluice_step_t* step = NULL;
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
    sluice_step_drop(step);
  }
  DEFAULTS(sluice_capacity_report, report);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_CAPACITY,
          "layer 3, rank 0: 12 of 24 routes in 2 forwards");
  assert_int_equal(report.num_forwards, 2);
  assert_int_equal(report.num_routes, 24);
  assert_int_equal(report.num_dropped, 12); /* in each chunk, two routes to expert 2 and one to expert 0 or 1 */
  assert_int_equal(report.most_rows, 3);
  assert_int_equal(report.most_expert, 2);
  ids[7] = 4;
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_step_drop(step);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_INVALID_ARGUMENT,
          "expert_ids[3, 1] was out of range");
  assert_int_equal(report.bad_route, 7);
  assert_int_equal(report.num_forwards, 1);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_OK);
  assert_int_equal(report.num_forwards, 0);
  close_all(&rig);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass, so padding must be written */
  return run_cases(NULL, NULL);
}
