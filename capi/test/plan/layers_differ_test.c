// SPDX-License-Identifier: Apache-2.0
/* Layers of several shapes under one budget, on a CPU and on a fake GPU: every budget from the smallest that the layers
 * name fits a step of each layer. */

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

typedef struct layers_suite_s {
  /* Opens a context for num_layers layers with this budget, and the first layer. */
  void (*open)(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer);
  void (*close)(rig_t* rig); /* fails the test on a leak */
  int32_t is_slow;           /* fewer budgets are tested */
} layers_suite_t;

enum { LAYERS = 3, TOKENS = 256 };

typedef struct sizes_s {
  int32_t hidden_width[LAYERS], top_k[LAYERS], num_experts[LAYERS];
} sizes_t;

/* In some models a layer's passes need much memory; in others its steps keep much. */
static const sizes_t models[] = {
    {{8, 96, 8}, {4, 1, 4}, {4, 4, 4}},
    {{96, 8, 8}, {1, 4, 1}, {4, 4, 4}},
    {{24, 24, 64}, {4, 1, 2}, {8, 4, 8}},
    {{64, 16, 64}, {4, 1, 1}, {8, 2, 4}},
};
enum { MODELS = sizeof models / sizeof models[0] };

static sluice_moe_config_t config_of(const sizes_t* model, int layer) {
  sluice_moe_config_t config = rig_config();
  config.model_width = 16, config.hidden_width = model->hidden_width[layer];
  config.num_experts = model->num_experts[layer], config.top_k = model->top_k[layer];
  config.num_chunks = 0, config.layer_id = layer;
  return config;
}

static void set_tokens(rig_t* rig, int64_t num_tokens) {
  rig->num_tokens = num_tokens;
  rig_reset(rig);
}

/* Opens all layers in one context, which rigs[0] owns. */
static void open_model(const layers_suite_t* suite, const sizes_t* model, uint64_t budget, rig_t rigs[LAYERS]) {
  for (int i = 0; i < LAYERS; ++i) {
    const sluice_moe_config_t config = config_of(model, i);
    if (i == 0) {
      suite->open(&rigs[0], budget, LAYERS, &config);
    } else {
      memset(&rigs[i], 0, sizeof rigs[i]);
      rigs[i].world_size = 1, rigs[i].context = rigs[0].context;
      WORKS(rig_open_layer(&rigs[i], &config));
    }
    set_tokens(&rigs[i], TOKENS);
  }
}

static void close_model(const layers_suite_t* suite, rig_t rigs[LAYERS]) {
  for (int i = LAYERS - 1; i > 0; --i) {
    rigs[i].context = NULL;
    rig_close(&rigs[i]);
  }
  suite->close(&rigs[0]);
}

static uint64_t smallest_budget(const layers_suite_t* suite, const sizes_t* model) {
  rig_t rigs[LAYERS];
  uint64_t most = 0;
  open_model(suite, model, 1 << 24, rigs);
  for (int i = 0; i < LAYERS; ++i) {
    const uint64_t own = own_rig_smallest_budget(&rigs[i]);
    if (own > most) most = own;
  }
  close_model(suite, rigs);
  return most;
}

/* Runs all forwards, then all backwards. */
static void train(rig_t rigs[LAYERS], const char* what) {
  sluice_step_t* steps[LAYERS] = {NULL};
  for (int i = 0; i < LAYERS; ++i) {
    if (rig_forward(&rigs[i], &steps[i]) != SLUICE_OK) fail_msg("%s, layer %d: %s", what, i, last_message());
  }
  for (int i = LAYERS - 1; i >= 0; --i) {
    if (rig_backward(&rigs[i], steps[i]) != SLUICE_OK) fail_msg("%s, layer %d: %s", what, i, last_message());
    sluice_step_drop(steps[i]);
  }
}

/* Two steps of all layers, and one step with smaller batches, stay within the budget. */
static void Budget_LayersOfSeveralShapes_AllHaveTheirRoom(void** state) {
  const layers_suite_t* suite = *state;
  for (int m = 0; m < MODELS; ++m) {
    const uint64_t least = smallest_budget(suite, &models[m]);
    for (uint64_t spare = 0; spare < 24; spare += suite->is_slow ? 5 : 1) {
      rig_t rigs[LAYERS];
      char what[64];
      const uint64_t budget = least + least * spare / 16;
      snprintf(what, sizeof what, "model %d, smallest budget + %d/16", m, (int)spare);
      open_model(suite, &models[m], budget, rigs);
      for (int round = 0; round < 2; ++round) train(rigs, what);
      for (int i = 0; i < LAYERS; ++i) set_tokens(&rigs[i], TOKENS / 4);
      train(rigs, what);
      assert_true(own_rig_stats(&rigs[0]).peak_bytes <= budget);
      close_model(suite, rigs);
    }
  }
}

/* Small batches run first. Memory that is kept for their plans must not lead to a refusal of large batches. */
static void Budget_LayersOfSeveralShapes_BatchesMayGrow(void** state) {
  const layers_suite_t* suite = *state;
  for (int m = 0; m < MODELS; ++m) {
    const uint64_t least = smallest_budget(suite, &models[m]);
    for (uint64_t spare = 0; spare < 24; spare += suite->is_slow ? 7 : 3) {
      rig_t rigs[LAYERS];
      char what[64];
      snprintf(what, sizeof what, "model %d, smallest budget + %d/16, growing", m, (int)spare);
      open_model(suite, &models[m], least + least * spare / 16, rigs);
      for (int64_t tokens = TOKENS / 4; tokens <= TOKENS; tokens *= 2) {
        for (int i = 0; i < LAYERS; ++i) set_tokens(&rigs[i], tokens);
        train(rigs, what);
      }
      close_model(suite, rigs);
    }
  }
}

/* ---- machines ---- */

static void open_cpu(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer) {
  sluice_context_config_t context = own_rig_context(budget, num_layers);
  context.num_layers = num_layers;
  own_rig_open(rig, &context, layer);
}

static void open_fake(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer) {
  const world_machine_t* machine = fakes_machine();
  fakes_open(1, 1);
  rig_use_machine(machine, 0);
  WORKS(rig_open_context(rig, NULL));
  sluice_context_destroy(rig->context);
  DEFAULTS(sluice_context_config, config);
  config.device_type = machine->device_type, config.device_id = machine->device_id(0);
  config.memory_budget = budget, config.max_outstanding = num_layers, config.num_layers = num_layers;
  WORKS(machine->make_context(0, &config, NULL, &rig->context));
  WORKS(rig_open_layer(rig, layer));
}

static void close_fake(rig_t* rig) {
  rig_close(rig);
  fakes_must_be_clean();
  rig_use_machine(NULL, 0);
}

static layers_suite_t on_cpu = {.open = open_cpu, .close = own_rig_close};
static layers_suite_t on_fakes = {.open = open_fake, .close = close_fake, .is_slow = 1};

/* The smallest budget of a layer includes memory of layers with other shapes. */
TEST(SmallestBudget_WithAnotherShape_IsLarger) {
  sluice_moe_config_t wide = rig_config(), narrow = rig_config();
  wide.num_chunks = narrow.num_chunks = 0, wide.hidden_width = 96;
  sluice_context_config_t context = own_rig_context(1 << 24, 3);
  rig_t rig;
  sluice_moe_t *like = NULL, *other = NULL;
  context.num_layers = 3;
  own_rig_open(&rig, &context, &narrow);
  rig.num_tokens = TOKENS;
  const uint64_t alone = own_rig_smallest_budget(&rig);
  WORKS(sluice_moe_create(rig.context, &narrow, &like));
  assert_int_equal(own_rig_smallest_budget(&rig), alone);
  WORKS(sluice_moe_create(rig.context, &wide, &other));
  assert_true(own_rig_smallest_budget(&rig) > alone);
  sluice_moe_destroy(other);
  sluice_moe_destroy(like);
  own_rig_close(&rig);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      TEST_OF(on_cpu, Budget_LayersOfSeveralShapes_AllHaveTheirRoom),
      TEST_OF(on_cpu, Budget_LayersOfSeveralShapes_BatchesMayGrow),
      TEST_OF(on_fakes, Budget_LayersOfSeveralShapes_AllHaveTheirRoom),
      TEST_OF(on_fakes, Budget_LayersOfSeveralShapes_BatchesMayGrow),
  };
  return RUN_CASES_AFTER(rows);
}
