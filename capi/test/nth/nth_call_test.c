// SPDX-License-Identifier: Apache-2.0
/* One system call or allocation fails (nth_ranks.h) while ranks create a tcp communicator, a context and a layer, train
 * a step, move the state of an expert, and settle over another communicator whether the old or the new state is valid.
 * Layers with grouped chunks, and with deduplication by node and rank, train a step. */

#include "backend/base/status.h"
#include "capi/test/nth/nth_ranks.h"
#include "capi/test/rig/rig.h"
#include "sluice/migration.h"
#include "third_party/bazel/test.h"

static sluice_status_t train(nth_rank_t* me, sluice_comm_t* comm, sluice_moe_config_t layer) {
  rig_t rig;
  layer.num_experts = 2 * me->world_size;
  sluice_status_t status = rig_open(&rig, comm, &layer);
  if (status == SLUICE_OK) status = rig_round(&rig, &me->digest);
  (void)nth_said(me, status);
  rig_close(&rig);
  me->live_blocks = atomic_load(&rig.heap.live_blocks);
  return status;
}

static sluice_status_t finish_move(sluice_migration_t* migration, sluice_migration_item_t* items, int32_t num_items) {
  SLUICE_TRY(sluice_migration_begin(migration, 1, items, num_items));
  return sluice_migration_commit(migration, NULL);
}

static uint64_t epoch_of(sluice_migration_t* migration) {
  sluice_migration_progress_t progress = {.struct_size = sizeof progress};
  return sluice_migration_get_progress(migration, &progress) == SLUICE_OK ? progress.epoch : UINT64_MAX;
}

/* Settles on one epoch for all ranks, whatever the result of the move. */
static sluice_status_t settle(nth_rank_t* me, sluice_migration_t* migration, sluice_comm_t* later) {
  uint64_t epoch = UINT64_MAX;
  const sluice_status_t status = sluice_migration_settle(migration, later, &epoch);
  if (status == SLUICE_OK && epoch != epoch_of(migration)) me->is_torn = 1;
  if (status == SLUICE_E_INTERNAL) me->is_torn = 1;
  return status;
}

/* Moves an expert to the next rank, at a rate, so that the migration's thread sends it. */
static sluice_status_t migrate(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* later) {
  static char expert[NTH_MOST_RANKS][20000];
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_migration_config, config);
  char* own = expert[me->rank];
  memset(own, 'a' + me->rank, sizeof expert[0]);
  const sluice_migration_span_t spans[2] = {{own, 15000, SLUICE_MIGRATION_STILL, 0},
                                            {own + 15000, 5000, SLUICE_MIGRATION_AT_COMMIT, 0}};
  const int32_t next = (me->rank + 1) % me->world_size, previous = (me->rank + me->world_size - 1) % me->world_size;
  sluice_migration_item_t items[2] = {{(uint64_t)me->rank, next, SLUICE_MIGRATION_LEAVES, spans, 2, 0},
                                      {(uint64_t)previous, previous, SLUICE_MIGRATION_ARRIVES, spans, 2, 0}};
  config.chunk_bytes = 4096, config.bytes_per_second = 100000000;
  sluice_status_t status = nth_said(me, sluice_migration_create(comm, &config, &migration));
  if (status != SLUICE_OK) return status;
  status = nth_said(me, finish_move(migration, items, me->world_size > 1 ? 2 : 0));
  if (status == SLUICE_OK && epoch_of(migration) != 1) me->is_torn = 1;
  const sluice_status_t settled = settle(me, migration, later);
  if (status == SLUICE_OK) status = nth_said(me, settled);
  /* The state is either completely old or completely new. */
  const char wanted = (char)('a' + (epoch_of(migration) == 1 ? previous : me->rank));
  if (own[0] != wanted || memcmp(own, own + 1, sizeof expert[0] - 1) != 0) me->is_torn = 1;
  sluice_migration_destroy(migration);
  return status;
}

static sluice_status_t work(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  const sluice_status_t status = train(me, comm, rig_config());
  return status == SLUICE_OK ? migrate(me, comm, me->later) : status;
}

TEST(OneRank_NthCallFails_HasAStatusAndLeavesNothing) { nth_call(1, NTH_OVER_TCP_AND_LATER, work); }
TEST(TwoRanks_NthCallFails_HaveStatusesAndLeaveNothing) { nth_call(2, NTH_OVER_TCP_AND_LATER, work); }
TEST(ThreeRanks_NthCallFails_HaveStatusesAndLeaveNothing) { nth_call(3, NTH_OVER_TCP_AND_LATER, work); }

/* ---- a step of layers with special exchanges; combines of one chunk are in flight with dispatches of a later chunk
 * ---- */

static sluice_moe_config_t chunked_layer(void) {
  sluice_moe_config_t layer = rig_config();
  layer.num_chunks = 4, layer.chunking = SLUICE_CHUNKING_TOKENS;
  return layer;
}

/* The backward dispatches rows again, so its exchanges are grouped as well. */
static sluice_status_t grouped(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  sluice_moe_config_t layer = chunked_layer();
  layer.grouping = SLUICE_GROUPING_ON;
  layer.restore_input = SLUICE_RESTORE_REDISPATCH, layer.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  return train(me, comm, layer);
}

static sluice_status_t by_node(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  sluice_moe_config_t layer = chunked_layer();
  layer.deduplicate = SLUICE_DEDUPLICATE_NODES;
  layer.restore_input = layer.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  return train(me, comm, layer);
}

TEST(GroupedExchanges_NthCallFails_HaveStatusesAndLeaveNothing) { nth_call(2, NTH_OVER_TCP, grouped); }

/* Two nodes of two ranks: rig.c. */
TEST(TwoNodes_NthCallFails_HaveStatusesAndLeaveNothing) { nth_call(4, NTH_WITHIN, by_node); }
