/* Who holds which bytes: a refused plan none, the layers of one context one set of slots, a pass without gradients no
 * step. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "capi/test/refusals.h"

static sluice_context_stats_t stats_of(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig->context, 0, &stats));
  return stats;
}

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding) {
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  heap_init(&rig->heap);
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref", context.memory_budget = budget, context.max_outstanding = max_outstanding;
  context.allocate = heap_allocate, context.release = heap_release, context.allocate_user = &rig->heap;
  WORKS(sluice_context_create(&context, NULL, &rig->context));
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 0;
  WORKS(rig_open_layer(rig, &config));
}

static void close_rig(rig_t* rig) {
  rig_close(rig);
  assert_int_equal(atomic_load(&rig->heap.live_bytes), 0);
}

/* The first forward is refused, and each one after it: not a byte more is held, and none was in between. */
static void Budget_Refused_NothingWasAllocated(void** state) {
  (void)state;
  rig_t rig;
  open_rig(&rig, 1 << 12, 1);
  const sluice_context_stats_t before = stats_of(&rig);
  const int64_t calls = atomic_load(&rig.heap.calls), live = atomic_load(&rig.heap.live_bytes);
  for (int i = 0; i < 3; ++i) {
    sluice_step_t* step = (sluice_step_t*)(uintptr_t)1;
    REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, "no plan fits the memory budget of 4096 bytes");
    assert_null(step);
    const sluice_context_stats_t after = stats_of(&rig);
    assert_memory_equal(&after, &before, sizeof after);
    assert_true(atomic_load(&rig.heap.calls) == calls && atomic_load(&rig.heap.live_bytes) == live);
  }
  close_rig(&rig);
}

enum { MOST_LAYERS = 4 };

/* What a context takes whose `count` layers have each run a step, all forwards before the first backward; without what
 * their making took. */
static sluice_context_stats_t run_layers(int32_t count) {
  rig_t rig;
  uint64_t made = 0;
  sluice_moe_t* layers[MOST_LAYERS] = {NULL};
  sluice_step_t* steps[MOST_LAYERS] = {NULL};
  open_rig(&rig, 0, 0);
  layers[0] = rig.moe;
  const uint64_t one = stats_of(&rig).current_bytes;
  for (int32_t i = 1; i < count; ++i) {
    sluice_moe_config_t config = rig.config;
    config.layer_id += i;
    WORKS(sluice_moe_create(rig.context, &config, &layers[i]));
  }
  made = stats_of(&rig).current_bytes - one;
  for (int32_t i = 0; i < count; ++i) {
    rig.moe = layers[i];
    WORKS(rig_forward(&rig, &steps[i]));
  }
  for (int32_t i = count - 1; i >= 0; --i) {
    rig.moe = layers[i];
    WORKS(rig_backward(&rig, steps[i]));
    sluice_step_drop(steps[i]);
  }
  sluice_context_stats_t stats = stats_of(&rig);
  assert_true(stats.current_bytes > made);
  stats.current_bytes -= made;
  for (int32_t i = 1; i < count; ++i) sluice_moe_destroy(layers[i]);
  rig.moe = layers[0];
  close_rig(&rig);
  return stats;
}

static void Layers_OfOneContext_ShareOneSetOfSlots(void** state) {
  (void)state;
  const sluice_context_stats_t one = run_layers(1), four = run_layers(MOST_LAYERS);
  assert_true(one.slot_bytes > 0);
  assert_int_equal(one.slot_bytes, four.slot_bytes);
  assert_int_equal(one.current_bytes, four.current_bytes); /* nothing that passes leave is any one layer's */
}

/* From the least budget of a step on: no step is made, nothing of it is held, and the outputs have the same bits. */
static void Budget_WithoutGradients_HoldsNoStep(void** state) {
  (void)state;
  rig_t rig;
  unsigned long long needs = 0;
  open_rig(&rig, 1 << 12, 1);
  REFUSED(rig_forward(&rig, NULL), SLUICE_E_INVALID_ARGUMENT, "out_step");
  sluice_step_t* step = NULL;
  REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, ") needs ");
  assert_int_equal(sscanf(strstr(last_message(), ") needs "), ") needs %llu", &needs), 1);
  close_rig(&rig);

  open_rig(&rig, needs, 1);
  float want[64];
  assert_true(rig.out.bytes <= sizeof want);
  WORKS(rig_forward(&rig, &step));
  memcpy(want, rig.out.tensor.data, rig.out.bytes);
  WORKS(rig_backward(&rig, step));
  sluice_step_drop(step);
  const uint64_t idle = stats_of(&rig).current_bytes;
  for (int i = 0; i < 4; ++i) { /* more than max_outstanding, were they steps */
    rig_reset(&rig);
    rig.forward.needs_backward = 0;
    WORKS(sluice_moe_forward(rig.moe, &rig.forward, NULL, NULL));
    assert_memory_equal(rig.out.tensor.data, want, rig.out.bytes);
    assert_int_equal(stats_of(&rig).current_bytes, idle);
  }
  assert_true(stats_of(&rig).peak_bytes <= needs);
  close_rig(&rig);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Budget_Refused_NothingWasAllocated),
      cmocka_unit_test(Layers_OfOneContext_ShareOneSetOfSlots),
      cmocka_unit_test(Budget_WithoutGradients_HoldsNoStep),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
