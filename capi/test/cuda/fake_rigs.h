// SPDX-License-Identifier: Apache-2.0
/* Rigs on fake GPUs: one rig, or one rig on each of W ranks, which are threads. */
#pragma once

#include <pthread.h>

#include "capi/test/rig/rig.h"
#include "sluice/sluice.h"

sluice_moe_config_t config_under(int64_t capacity);

/* Both fail the test if the rig cannot be opened or leaks. close_all returns the number of hazards. */
void open_all(rig_t* rig, const sluice_moe_config_t* config);
int64_t close_all(rig_t* rig);

/* Makes the rig's layer use a plan of config under a budget of exactly the plan's bytes, which is stored in config. */
sluice_plan_t* use_plan_in_its_bytes(rig_t* rig, sluice_plan_config_t* config, sluice_plan_info_t* out_info);
/* Three rounds of this many outstanding forwards, whose steps are dropped, and of one training step. */
void run_planned(rig_t* rig, int32_t outstanding);
/* Closes the plan and the rig. The device's peak must equal the planned bytes. */
void close_planned(rig_t* rig, sluice_plan_t* plan, const sluice_plan_info_t* info);

typedef struct rank_s {
  int32_t rank, world_size;
  const sluice_moe_config_t* config;
  pthread_barrier_t* barrier;
  void (*body)(struct rank_s* rank, rig_t* rig);
  int64_t waits, queries;
  sluice_status_t status;
  char why[600];
} rank_t;

/* Runs body on each rank with a rig of config. The test fails if a rank's status is an error, on any leak, and on any
 * hazard. */
void run_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*), rank_t* ranks);
/* The same for ranks of which calls fail: hazards are no failure. */
void run_failing_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*),
                       rank_t* ranks);
/* The same for ranks that share a device and a local group. */
void run_local_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*),
                     rank_t* ranks);
