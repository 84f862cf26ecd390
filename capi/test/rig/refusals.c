// SPDX-License-Identifier: Apache-2.0
#include "capi/test/rig/refusals.h"

#include <stdlib.h>
#include <string.h>

static sluice_status_t warm_backward(fixture_t* f, int32_t halves, int wanted) {
  sluice_step_t* step = NULL;
  rig_reset(&f->rig);
  sluice_status_t status = rig_forward(&f->rig, &step);
  f->rig.backward.parts = halves == SLUICE_BACKWARD_BOTH ? halves : SLUICE_BACKWARD_DGRAD;
  if (!wanted) f->rig.backward.grad_params = NULL;
  if (status == SLUICE_OK) status = rig_backward(&f->rig, step);
  f->rig.backward.parts = SLUICE_BACKWARD_WGRAD;
  if (status == SLUICE_OK && halves == SLUICE_BACKWARD_WGRAD) status = rig_backward(&f->rig, step);
  sluice_step_drop(step);
  return status;
}

void open_with(fixture_t* f, const sluice_moe_config_t* config) {
  setenv("SLUICE_POISON", "1", 1); /* slots start as NaN */
  WORKS(rig_open(&f->rig, NULL, config));
  f->rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(f->rig.moe, &f->rig.forward, NULL, NULL));
  if (!config->callback_experts) {
    WORKS(warm_backward(f, SLUICE_BACKWARD_WGRAD, 1));
    WORKS(warm_backward(f, SLUICE_BACKWARD_BOTH, 0));
  }
  WORKS(rig_round(&f->rig, &f->digest));
  rig_reset(&f->rig);
  f->live_bytes = atomic_load(&f->rig.heap.live_bytes);
}

void open_default(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  open_with(f, &config);
}

void open_callbacks(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  config.callback_experts = 1;
  open_with(f, &config);
}

void check_nothing_lost(fixture_t* f) {
  uint64_t digest = 0;
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
  WORKS(rig_round(&f->rig, &digest));
  assert_true(digest == f->digest);
  rig_reset(&f->rig);
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
}

void close_fixture(fixture_t* f) {
  check_nothing_lost(f);
  rig_close(&f->rig);
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), 0);
  assert_int_equal(atomic_load(&f->rig.heap.live_blocks), 0);
}

sluice_step_t* fresh_step(fixture_t* f) {
  sluice_step_t* step = NULL;
  rig_reset(&f->rig);
  WORKS(rig_forward(&f->rig, &step));
  return step;
}

sluice_status_t make_context(fixture_t* f, const void* config) {
  (void)f;
  sluice_context_t* context = NULL;
  sluice_status_t status = sluice_context_create(config, NULL, &context);
  sluice_context_destroy(context);
  return status;
}
sluice_status_t make_layer(fixture_t* f, const void* config) {
  sluice_moe_t* moe = NULL;
  sluice_status_t status = sluice_moe_create(f->rig.context, config, &moe);
  sluice_moe_destroy(moe);
  return status;
}

void refuses_layer(rig_t* rig, const sluice_moe_config_t* config, sluice_status_t status, const char* text) {
  sluice_moe_t* moe = NULL;
  REFUSED(sluice_moe_create(rig->context, config, &moe), status, text);
  assert_null(moe);
}

void* save(void* user, int32_t which, uint64_t bytes) {
  saved_t* saved = user;
  if (saved->refuse == which) return NULL;
  saved->bytes[which] = bytes;
  free(saved->data[which]);
  saved->data[which] = aligned_alloc(64, (bytes + 127) / 64 * 64);
  return saved->data[which];
}

void free_saved(saved_t* saved) {
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) free(saved->data[i]);
}

/* ---- rigs with a context of the test's choice ---- */

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

sluice_plan_t* own_rig_plan(const rig_t* rig, const sluice_plan_config_t* config, sluice_plan_info_t* out_info) {
  sluice_plan_t* plan = NULL;
  out_info->struct_size = sizeof *out_info;
  WORKS(sluice_plan_create(rig->moe, config, &plan));
  WORKS(sluice_plan_get_info(plan, out_info));
  return plan;
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
