// SPDX-License-Identifier: Apache-2.0
#include "capi/test/rig/layers_suite.h"

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

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
    uint64_t own = 0;
    WORKS(sluice_moe_smallest_budget(rigs[i].moe, TOKENS, &own));
    if (own > most) most = own;
  }
  close_model(suite, rigs);
  return most;
}

static uint64_t peak_of(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig->context, 0, &stats));
  return stats.peak_bytes;
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

void layers_all_have_their_room(const layers_suite_t* suite) {
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
      assert_true(peak_of(&rigs[0]) <= budget);
      close_model(suite, rigs);
    }
  }
}

void layers_batches_may_grow(const layers_suite_t* suite) {
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
