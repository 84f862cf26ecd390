// SPDX-License-Identifier: Apache-2.0
#include "capi/test/rig/own_rig.h"

#include <stdlib.h>
#include <string.h>

#include "capi/test/rig/refusals.h"

sluice_context_config_t own_rig_context(uint64_t budget, int32_t max_outstanding) {
  DEFAULTS(sluice_context_config, config);
  config.gemm = "ref", config.memory_budget = budget, config.max_outstanding = max_outstanding;
  return config;
}

void own_rig_open(rig_t* rig, const sluice_context_config_t* context, const sluice_moe_config_t* layer) {
  sluice_context_config_t config = *context;
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  heap_init(&rig->heap);
  config.allocate = heap_allocate, config.release = heap_release, config.allocate_user = &rig->heap;
  WORKS(sluice_context_create(&config, NULL, &rig->context));
  WORKS(rig_open_layer(rig, layer));
}

void own_rig_close(rig_t* rig) {
  rig_close(rig);
  assert_int_equal(atomic_load(&rig->heap.live_bytes), 0);
}

sluice_context_stats_t own_rig_stats(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig->context, 0, &stats));
  return stats;
}

uint64_t own_rig_smallest_budget(const rig_t* rig) {
  uint64_t least = 0;
  WORKS(sluice_moe_smallest_budget(rig->moe, rig->num_tokens, &least));
  return least;
}

void* save_held(void* user, int32_t which, uint64_t bytes) {
  held_saved_t* held = user;
  void* data = NULL;
  assert_true(held->count < COUNT(held->data));
  if (held->context == NULL) data = malloc(bytes + 1);
  if (held->context != NULL) WORKS(sluice_context_allocate_saved(held->context, which, bytes, &data));
  if (which == SLUICE_SAVED_HOST_INPUT || which == SLUICE_SAVED_HOST_PRE_ACTIVATION) held->live += bytes;
  if (held->live > held->most) held->most = held->live;
  held->data[held->count] = data, held->bytes[held->count++] = bytes;
  return data;
}

void hold_saved(rig_t* rig, held_saved_t* held) {
  rig->forward.save = save_held, rig->forward.save_user = held;
  rig->forward.save_is_counted = held->context != NULL;
}

void give_saved_back(held_saved_t* held, sluice_context_t* context) {
  for (int32_t i = 0; i < held->count; ++i) {
    if (held->context == NULL) free(held->data[i]);
    if (held->context != NULL) sluice_context_free(context, held->data[i], held->bytes[i]);
  }
  held->count = 0, held->live = 0;
}

void pair_open(pair_t* pair, const sluice_moe_config_t* layer) {
  DEFAULTS(sluice_comm_config, comm);
  comm.rank = 0, comm.world_size = 2;
  WORKS(sluice_local_group_create(2, &pair->group));
  WORKS(sluice_comm_create_local(pair->group, &comm, &pair->comm));
  WORKS(rig_open(&pair->rig, pair->comm, layer));
}

void pair_close(pair_t* pair) {
  rig_close(&pair->rig);
  sluice_comm_destroy(pair->comm);
  sluice_local_group_destroy(pair->group);
}
