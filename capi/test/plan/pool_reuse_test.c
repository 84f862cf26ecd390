// SPDX-License-Identifier: Apache-2.0
/* Offloaded rows on a CPU are stored in pool blocks that steps reuse: after the first step no block is allocated,
 * whether Sluice or the host holds the rows, and the context frees the blocks. */

#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 20, MOST_HELD = 16 };

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding, int32_t input, int32_t pre_activation) {
  const sluice_context_config_t context = own_rig_context(budget, max_outstanding);
  sluice_moe_config_t config = rig_config();
  config.restore_input = input, config.restore_pre_activation = pre_activation;
  own_rig_open(rig, &context, &config);
}

/* Saved buffers of one step, allocated from the context as by a host with its own autograd. */
typedef struct held_s {
  sluice_context_t* context;
  void* data[MOST_HELD];
  uint64_t bytes[MOST_HELD];
  int32_t count;
} held_t;

static void* take_saved(void* user, int32_t which, uint64_t bytes) {
  held_t* held = user;
  void* data = NULL;
  assert_true(held->count < MOST_HELD);
  assert_int_equal(sluice_context_allocate_saved(held->context, which, bytes, &data), SLUICE_OK);
  held->data[held->count] = data, held->bytes[held->count++] = bytes;
  return data;
}

static void give_back(held_t* held, sluice_context_t* context) {
  for (int32_t i = 0; i < held->count; ++i) sluice_context_free(context, held->data[i], held->bytes[i]);
  held->count = 0;
}

/* Runs `outstanding` forwards and then their backwards. Gradients must have the bits of the first round. */
static void run_round(rig_t* rig, held_t* held, int32_t outstanding, float* want, int is_first) {
  sluice_step_t* steps[4] = {NULL};
  for (int32_t i = 0; i < outstanding; ++i) {
    rig_reset(rig);
    if (held != NULL) {
      rig->forward.save = take_saved, rig->forward.save_user = &held[i], rig->forward.save_is_counted = 1;
    }
    WORKS(rig_forward(rig, &steps[i]));
  }
  for (int32_t i = outstanding; i-- > 0;) {
    WORKS(rig_backward(rig, steps[i]));
    sluice_step_drop(steps[i]);
    if (held != NULL) give_back(&held[i], rig->context);
  }
  if (is_first) memcpy(want, rig->grad_tokens.tensor.data, rig->grad_tokens.bytes);
  assert_memory_equal(rig->grad_tokens.tensor.data, want, rig->grad_tokens.bytes);
}

TEST(Offload_TwentySteps_AllocateTheBlocksOfOne) {
  for (int by_host = 0; by_host < 2; ++by_host) {
    for (int32_t outstanding = 1; outstanding <= 3; ++outstanding) {
      rig_t rig;
      held_t held[4];
      float want[64];
      memset(held, 0, sizeof held);
      open_rig(&rig, 0, outstanding, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD);
      for (int i = 0; i < 4; ++i) held[i].context = rig.context;
      uint64_t idle = 0, peak = 0;
      for (int i = 0; i < STEPS; ++i) {
        run_round(&rig, by_host ? held : NULL, outstanding, want, i == 0);
        const sluice_context_stats_t stats = own_rig_stats(&rig);
        if (i == 0) idle = stats.idle_pool_bytes, peak = stats.peak_bytes;
        assert_int_equal(stats.num_pool_allocations, 2 * outstanding); /* T_DI and T_M of each forward */
        assert_true(stats.idle_pool_bytes == idle && stats.peak_bytes == peak && idle > 0);
      }
      own_rig_close(&rig);
    }
  }
}

/* Under the smallest budget of the plan, with backwards in reverse order. Afterwards another allocation uses the bytes
 * of idle blocks. */
TEST(Offload_UnderItsLeastBudget_StaysWithin) {
  rig_t rig;
  float want[64];
  unsigned long long needs = 0;
  sluice_step_t* step = NULL;
  open_rig(&rig, 1 << 10, 2, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD);
  REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, ") needs ");
  assert_int_equal(sscanf(strstr(last_message(), ") needs "), ") needs %llu", &needs), 1);
  own_rig_close(&rig);

  open_rig(&rig, needs, 2, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD);
  for (int i = 0; i < STEPS; ++i) run_round(&rig, NULL, 2, want, i == 0);
  sluice_context_stats_t stats = own_rig_stats(&rig);
  assert_true(stats.peak_bytes <= needs && stats.num_pool_allocations == 4);
  /* An allocation that needs the bytes of idle blocks frees them, and the next step allocates its blocks again. */
  void* data = NULL;
  const uint64_t room = (needs - stats.current_bytes + stats.idle_pool_bytes) / 64 * 64;
  assert_true(stats.idle_pool_bytes > 0);
  WORKS(sluice_context_allocate(rig.context, room, &data));
  assert_int_equal(own_rig_stats(&rig).idle_pool_bytes, 0);
  sluice_context_free(rig.context, data, room);
  run_round(&rig, NULL, 2, want, 0);
  stats = own_rig_stats(&rig);
  assert_true(stats.peak_bytes <= needs && stats.num_pool_allocations == 8);
  own_rig_close(&rig);
}

/* A buffer may outlive its context; then the host frees it with NULL. */
TEST(Saved_OutlivesTheContext_IsFreedWithoutIt) {
  rig_t rig;
  held_t held = {0};
  void* data = NULL;
  open_rig(&rig, 0, 1, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD);
  held.context = rig.context;
  for (int32_t which = 0; which < SLUICE_SAVED_COUNT; ++which) (void)take_saved(&held, which, 100 + (uint64_t)which);
  REFUSED(sluice_context_allocate_saved(rig.context, SLUICE_SAVED_COUNT, 1, &data), SLUICE_E_INVALID_ARGUMENT,
          "which is 5");
  REFUSED(sluice_context_allocate_saved(NULL, 0, 1, &data), SLUICE_E_INVALID_ARGUMENT, "context is NULL");
  own_rig_close(&rig);
  give_back(&held, NULL);
}
