// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/fake_rigs.h"

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

sluice_moe_config_t config_under(int64_t capacity) {
  sluice_moe_config_t config = rig_config();
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = capacity;
  return config;
}

int64_t close_all(rig_t* rig) {
  char hazard[200], live[200];
  rig_close(rig);
  const int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
  return hazards;
}

void open_all(rig_t* rig, const sluice_moe_config_t* config) {
  fakes_open(1, 1);
  rig_use_machine(fakes_machine(), 0);
  if (rig_open(rig, NULL, config) != SLUICE_OK) fail_msg("%s", last_message());
}

sluice_plan_t* use_plan_in_its_bytes(rig_t* rig, sluice_plan_config_t* config, sluice_plan_info_t* info) {
  sluice_plan_destroy(own_rig_plan(rig, config, info));
  config->memory_budget = info->total_bytes;
  sluice_plan_t* plan = own_rig_plan(rig, config, info);
  assert_int_equal(info->total_bytes, info->base_bytes + info->slot_bytes + info->routing_bytes +
                                          (uint64_t)config->max_outstanding * info->step_bytes);
  assert_int_equal(sluice_moe_use_plan(rig->moe, plan), SLUICE_OK);
  return plan;
}

void run_planned(rig_t* rig, int32_t outstanding) {
  for (int round = 0; round < 3; ++round) {
    sluice_step_t* steps[4] = {NULL};
    for (int32_t s = 0; s < outstanding; ++s) {
      if (rig_forward(rig, &steps[s]) != SLUICE_OK) fail_msg("%s", last_message());
    }
    for (int32_t s = 0; s < outstanding; ++s) sluice_step_drop(steps[s]);
    if (rig_round(rig, NULL) != SLUICE_OK) fail_msg("%s", last_message());
  }
}

void close_planned(rig_t* rig, sluice_plan_t* plan, const sluice_plan_info_t* info) {
  assert_int_equal(own_rig_stats(rig).peak_bytes, info->total_bytes);
  sluice_plan_destroy(plan);
  assert_int_equal(close_all(rig), 0);
}

static void* rank_main(void* argument) {
  rank_t* r = argument;
  rig_t rig;
  sluice_comm_t* comm = NULL;
  DEFAULTS(sluice_comm_config, config);
  config.rank = r->rank, config.world_size = r->world_size, config.timeout_ns = 300000000000u;
  rig_use_machine(fakes_machine(), r->rank);
  if (r->world_size > 1) r->status = fakes_machine()->make_comm(r->rank, &config, &comm);
  if (r->status == SLUICE_OK) r->status = rig_open(&rig, comm, r->config);
  if (r->status != SLUICE_OK) abort();
  r->body(r, &rig);
  if (r->status != SLUICE_OK && r->why[0] == '\0') snprintf(r->why, sizeof r->why, "%s", last_message());
  pthread_barrier_wait(r->barrier);
  rig_close(&rig);
  sluice_comm_destroy(comm);
  return NULL;
}

static void run(int is_local, int may_fail, int32_t world_size, const sluice_moe_config_t* config,
                void (*body)(rank_t*, rig_t*), rank_t* ranks) {
  pthread_t threads[4];
  pthread_barrier_t barrier;
  char live[200], hazard[200];
  (is_local ? fakes_open_local : fakes_open)(world_size, 1);
  pthread_barrier_init(&barrier, NULL, (unsigned)world_size);
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] = (rank_t){.rank = r, .world_size = world_size, .config = config, .barrier = &barrier, .body = body};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  pthread_barrier_destroy(&barrier);
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  const int64_t left = fakes_close(live, sizeof live);
  for (int r = 0; r < world_size; ++r) { /* errors come first, since a rank that failed may also leak */
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d: %s", r, ranks[r].status, ranks[r].why);
  }
  if (left != 0) fail_msg("left: %s", live);
  if (hazards != 0 && !may_fail) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
}

void run_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*), rank_t* ranks) {
  run(0, 0, world_size, config, body, ranks);
}

void run_failing_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*),
                       rank_t* ranks) {
  run(0, 1, world_size, config, body, ranks);
}

void run_local_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*),
                     rank_t* ranks) {
  run(1, 0, world_size, config, body, ranks);
}
