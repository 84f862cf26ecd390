// SPDX-License-Identifier: Apache-2.0
/* One system call or allocation fails (nth_ranks.h) while ranks train a step of layers with special exchanges: grouped
 * chunks, and deduplication by node and rank. */

#include "capi/test/nth/nth_ranks.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

enum { NUM_CHUNKS = 4 }; /* combines of one chunk are in flight with dispatches of a later chunk */

static sluice_status_t train(nth_rank_t* me, sluice_comm_t* comm, sluice_moe_config_t* layer) {
  rig_t rig;
  layer->num_experts = 2 * me->world_size;
  layer->num_chunks = NUM_CHUNKS, layer->chunking = SLUICE_CHUNKING_TOKENS;
  sluice_status_t status = rig_open(&rig, comm, layer);
  if (status == SLUICE_OK) status = rig_round(&rig, &me->digest);
  (void)nth_said(me, status);
  rig_close(&rig);
  me->live_blocks = atomic_load(&rig.heap.live_blocks);
  return status;
}

/* The backward dispatches rows again, so its exchanges are grouped as well. */
static sluice_status_t grouped(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  sluice_moe_config_t layer = rig_config();
  layer.grouping = SLUICE_GROUPING_ON;
  layer.restore_input = SLUICE_RESTORE_REDISPATCH, layer.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  return train(me, comm, &layer);
}

static sluice_status_t by_node(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  sluice_moe_config_t layer = rig_config();
  layer.deduplicate = SLUICE_DEDUPLICATE_NODES;
  layer.restore_input = SLUICE_RESTORE_OFFLOAD, layer.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  return train(me, comm, &layer);
}

TEST(TwoRanks_NthCallOfGroupedExchangesFails_HaveStatusesAndLeaveNothing) { nth_call(2, NTH_OVER_TCP, grouped); }
TEST(TwoNodes_NthCallOfTwoLevelsFails_HaveStatusesAndLeaveNothing) {
  nth_call(4, NTH_WITHIN, by_node); /* two nodes of two ranks: rig.c */
}
