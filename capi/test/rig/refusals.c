// SPDX-License-Identifier: Apache-2.0
#include "capi/test/rig/refusals.h"

#include <stdlib.h>

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
  f->live_bytes = atomic_load(&f->rig.heap.live_bytes);
}

void open_default(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  open_with(f, &config);
}

void check_nothing_lost(fixture_t* f) {
  uint64_t digest = 0;
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
  WORKS(rig_round(&f->rig, &digest));
  assert_true(digest == f->digest);
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
}

void close_fixture(fixture_t* f) {
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
