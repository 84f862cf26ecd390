// SPDX-License-Identifier: Apache-2.0
/* Refused adapters: wrong combinations, ranks, scales, tensors and gradients, each reported by name. */
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { LA1 = RIG_NUM_PARAMS };
static const char* const names[] = {"la1", "lb1", "la3", "lb3", "la2", "lb2"};

static const sluice_tensor_t** member(sluice_expert_tensors_t* table, int kind) {
  const sluice_tensor_t** all[] = {&table->la1, &table->lb1, &table->la3, &table->lb3, &table->la2, &table->lb2};
  return all[kind];
}

static void open_adapted(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  config.lora_rank = 3;
  open_with(f, &config);
}

TEST(Adapters_HalfAPair_IsRefusedByName) {
  fixture_t f;
  open_adapted(&f);
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    if (kind == 2) continue; /* lb3 without la3 shares la1 */
    char text[128];
    rig_reset(&f.rig);
    *member(&f.rig.param_table, kind) = NULL;
    snprintf(text, sizeof text, "params.%s is given, but %s is NULL: an adapter has both factors", names[kind ^ 1],
             names[kind]);
    FORWARD_REFUSED(&f, BAD, text);
  }
  rig_reset(&f.rig);
  f.rig.param_table.la1 = f.rig.param_table.lb1 = f.rig.param_table.la3 = NULL;
  FORWARD_REFUSED(&f, BAD, "params.lb3 is given, but la3 is NULL");
  close_fixture(&f);
}

TEST(Adapters_BadTensors_AreNamedWithTheirExpert) {
  fixture_t f;
  open_adapted(&f);
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    char text[128];
    snprintf(text, sizeof text, "params.%s[1]", names[kind]);
    for (int how = 0; how < 6; ++how) {
      rig_reset(&f.rig);
      rig_tensor_t* t = &f.rig.params[LA1 + kind][1];
      switch (how) {
        case 0: f.rig.param_list[LA1 + kind][1].type_bits = 64; break; /* its dtype differs from that of expert 0 */
        case 1: t->shape[0] += 1; break;
        case 2: t->shape[1] += 1; break;
        case 3: f.rig.param_list[LA1 + kind][1].data = NULL; break;
        case 4: f.rig.param_list[LA1 + kind][1].device_type = SLUICE_DEVICE_CUDA; break;
        default: t->strides[1] = -1;
      }
      FORWARD_REFUSED(&f, BAD, how == 5 ? "none may be negative" : text);
    }
    rig_reset(&f.rig);
    for (int32_t e = 0; e < f.rig.num_local; ++e) f.rig.param_list[LA1 + kind][e].type_bits = 16;
    snprintf(text, sizeof text, "params.%s[0]: dtype is f16; adapters are f32 like the layer, or f32", names[kind]);
    FORWARD_REFUSED(&f, BAD, text);
  }
  close_fixture(&f);
}

static void set_rank(rig_t* rig, int pair, int64_t rank) {
  for (int32_t e = 0; e < rig->num_local; ++e) {
    rig->params[LA1 + 2 * pair][e].shape[0] = rank;
    rig->params[LA1 + 2 * pair + 1][e].shape[1] = rank;
  }
}

TEST(Adapters_RankBeyondTheConfigs_IsRefused) {
  fixture_t f;
  open_adapted(&f);
  for (int pair = 0; pair < 3; ++pair) {
    char text[128];
    const int64_t ranks[] = {0, 4};
    for (int i = 0; i < 2; ++i) {
      rig_reset(&f.rig);
      set_rank(&f.rig, pair, ranks[i]);
      snprintf(text, sizeof text, "params.%s has rank %d; it must be in [1, lora_rank = 3]", names[2 * pair],
               (int)ranks[i]);
      FORWARD_REFUSED(&f, BAD, text);
    }
  }
  close_fixture(&f);
  open_default(&f); /* opens a layer without adapters */
  rig_reset(&f.rig);
  f.rig.param_table.la2 = f.rig.param_list[2];
  FORWARD_REFUSED(&f, BAD, "params.la2 is given, but lora_rank is 0: create the layer with the largest rank");
  close_fixture(&f);
}

TEST(Adapters_BadScales_AreNamed) {
  fixture_t f;
  open_adapted(&f);
  const float bad[] = {0, NAN, INFINITY};
  for (int i = 0; i < 3; ++i) {
    float* scales[] = {&f.rig.param_table.lora_scale1, &f.rig.param_table.lora_scale3, &f.rig.param_table.lora_scale2};
    static const char* const texts[] = {"lora_scale1 is", "lora_scale3 is", "lora_scale2 is"};
    for (int s = 0; s < 3; ++s) {
      rig_reset(&f.rig);
      *scales[s] = bad[i];
      FORWARD_REFUSED(&f, BAD, texts[s]);
    }
  }
  close_fixture(&f);
}

TEST(Adapters_OfAnUpThatTheLayerLacks_AreRefused) {
  fixture_t f;
  sluice_moe_config_t config = rig_config();
  config.lora_rank = 3, config.gated = SLUICE_GATED_NO;
  WORKS(rig_open(&f.rig, NULL, &config));
  f.rig.forward.needs_backward = 0;
  REFUSED(rig_forward(&f.rig, NULL), BAD, "params.la3 is given, but only a layer with gated halves has a w3");
  f.rig.param_table.la3 = f.rig.param_table.lb3 = NULL;
  WORKS(rig_forward(&f.rig, NULL));
  close_fixture(&f);
}

TEST(Gradients_OfFrozenWeights_AreRefusedByName) {
  fixture_t f;
  open_adapted(&f);
  const char* const texts[] = {"grad_params.w1 is given", "grad_params.w3 is given",
                               "grad_params.w2 is given, but with lora_rank 3 the weights are frozen: pass NULL, or"};
  for (int i = 0; i < 3; ++i) {
    sluice_step_t* step = fresh_step(&f);
    const sluice_tensor_t** all[] = {&f.rig.grad_table.w1, &f.rig.grad_table.w3, &f.rig.grad_table.w2};
    *all[i] = f.rig.grad_list[i];
    BACKWARD_REFUSED(&f, step, BAD, texts[i]);
  }
  close_fixture(&f);
}

TEST(Gradients_OfAdapters_FitThem) {
  fixture_t f;
  open_adapted(&f);
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    char text[128];
    snprintf(text, sizeof text, "grad_params.%s[1]", names[kind]);
    sluice_step_t* step = fresh_step(&f);
    f.rig.grads[LA1 + kind][1].shape[0] += 1;
    BACKWARD_REFUSED(&f, step, BAD, text);
    step = fresh_step(&f);
    f.rig.grads[LA1 + kind][1].strides[0] = 2 * f.rig.grads[LA1 + kind][1].shape[1];
    f.rig.grads[LA1 + kind][1].strides[1] = 2;
    BACKWARD_REFUSED(&f, step, BAD, text);
    step = fresh_step(&f);
    f.rig.grad_list[LA1 + kind][0].type_bits = 16;
    snprintf(text, sizeof text, "grad_params.%s[0]: dtype is f16; gradients are f32 like the layer", names[kind]);
    BACKWARD_REFUSED(&f, step, BAD, text);
  }
  close_fixture(&f);
}

/* The backward has other adapters, or other properties of adapters, than the forward of this step. */
TEST(Backward_OtherAdaptersThanTheForwards_IsRefused) {
  static const char text[] = "params has other adapters than this step's forward";
  fixture_t f;
  open_adapted(&f);
  sluice_step_t* step = fresh_step(&f);
  f.rig.param_table.lora_scale2 = 3;
  BACKWARD_REFUSED(&f, step, BAD, text);
  step = fresh_step(&f);
  set_rank(&f.rig, 2, 2);
  f.rig.backward.grad_params = NULL;
  BACKWARD_REFUSED(&f, step, BAD, text);
  step = fresh_step(&f);
  f.rig.param_table.la2 = f.rig.param_table.lb2 = NULL;
  f.rig.grad_table.la2 = f.rig.grad_table.lb2 = NULL;
  BACKWARD_REFUSED(&f, step, BAD, text);
  step = fresh_step(&f);
  f.rig.param_table.la2 = f.rig.param_table.lb2 = NULL;
  BACKWARD_REFUSED(&f, step, BAD, "grad_params.la2 is given, but params.la2 is NULL: there is nothing");
  close_fixture(&f);
}

/* A caller with an older layout has no adapters, whatever bytes follow its struct. */
TEST(Structs_OfAnOlderLayout_HaveNoAdapters) {
  fixture_t f;
  open_default(&f);
  uint64_t digest = 0;
  rig_reset(&f.rig);
  sluice_expert_tensors_t* tables[] = {&f.rig.param_table, &f.rig.grad_table};
  sluice_step_t* step = NULL;
  for (int i = 0; i < 2; ++i) {
    memset((char*)tables[i] + offsetof(sluice_expert_tensors_t, la1), 0xff,
           sizeof *tables[i] - offsetof(sluice_expert_tensors_t, la1));
    tables[i]->struct_size = offsetof(sluice_expert_tensors_t, la1);
  }
  WORKS(rig_step(&f.rig));
  tables[0]->struct_size -= 1;
  REFUSED(rig_forward(&f.rig, &step), SLUICE_E_ABI, "sluice_expert_tensors_t");
  WORKS(rig_round(&f.rig, &digest));
  assert_true(digest == f.digest);
  close_fixture(&f);
}
