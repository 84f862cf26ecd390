// SPDX-License-Identifier: Apache-2.0
/* Rigs with a context that the test configures, such as one with a budget, and a rig of two ranks for plans only. */
#pragma once

#include "capi/test/rig/rig.h"

/* A config with gemm "ref"; budget 0 means no budget. */
sluice_context_config_t own_rig_context(uint64_t budget, int32_t max_outstanding);
/* Opens a rig of one rank, whose context uses the rig's heap. All functions here fail the test if a call fails. */
void own_rig_open(rig_t* rig, const sluice_context_config_t* context, const sluice_moe_config_t* layer);
/* Also checks that the heap is empty. */
void own_rig_close(rig_t* rig);
sluice_context_stats_t own_rig_stats(const rig_t* rig);

/* The smallest budget for the rig's layer and number of tokens. The context needs a budget. */
uint64_t own_rig_smallest_budget(const rig_t* rig);

/* Saved buffers that the host keeps, from a context or (context NULL) from the test's memory. `live` and `most` count
 * offloaded rows. */
typedef struct held_saved_s {
  sluice_context_t* context;
  void* data[16];
  uint64_t bytes[16], live, most;
  int32_t count;
} held_saved_t;

/* The callback `save` with a held_saved_t, which hold_saved sets for the rig's next forwards. */
void* save_held(void* held, int32_t which, uint64_t bytes);
void hold_saved(rig_t* rig, held_saved_t* held);
void give_saved_back(held_saved_t* held, sluice_context_t* context);

typedef struct pair_s {
  sluice_local_group_t* group;
  sluice_comm_t* comm;
  rig_t rig; /* rank 0; the other rank does not exist */
} pair_t;

void pair_open(pair_t* pair, const sluice_moe_config_t* layer);
void pair_close(pair_t* pair);
