// SPDX-License-Identifier: Apache-2.0
/* Refused adapters: wrong combinations, ranks, scales, tensors and gradients, each reported by name. */
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { LA1 = RIG_NUM_PARAMS };
static const char* const names[] = {"la1", "lb1", "la3", "lb3", "la2", "lb2"};

static const sluice_tensor_t** adapter_of(sluice_expert_tensors_t* table, int kind) {
  const sluice_tensor_t** all[] = {&table->la1, &table->lb1, &table->la3, &table->lb3, &table->la2, &table->lb2};
  return all[kind];
}

static void open_adapted(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  config.lora_rank = 3;
  open_with(f, &config);
}

LAYER_TEST(Adapters_HalfAPair_IsRefusedByName, open_adapted) {
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    if (kind == 2) continue; /* lb3 without la3 shares la1 */
    char text[128];
    snprintf(text, sizeof text, "params.%s is given, but %s is NULL: an adapter has both factors", names[kind ^ 1],
             names[kind]);
    FORWARD_REFUSED(f, *adapter_of(&f->rig.param_table, kind) = NULL, BAD, text);
  }
  FORWARD_REFUSED(f, f->rig.param_table.la1 = f->rig.param_table.lb1 = f->rig.param_table.la3 = NULL, BAD,
                  "params.lb3 is given, but la3 is NULL");
}

static void bend(rig_t* rig, int kind, int how) {
  rig_tensor_t* t = &rig->params[LA1 + kind][1];
  switch (how) {
    case 0: rig->param_list[LA1 + kind][1].type_bits = 64; break; /* its dtype differs from that of expert 0 */
    case 1: t->shape[0] += 1; break;
    case 2: t->shape[1] += 1; break;
    case 3: rig->param_list[LA1 + kind][1].data = NULL; break;
    case 4: rig->param_list[LA1 + kind][1].device_type = SLUICE_DEVICE_CUDA; break;
    default: t->strides[1] = -1;
  }
}

static void make_f16(rig_t* rig, int kind) {
  for (int32_t e = 0; e < rig->num_local; ++e) rig->param_list[LA1 + kind][e].type_bits = 16;
}

LAYER_TEST(Adapters_BadTensors_AreNamedWithTheirExpert, open_adapted) {
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    char text[128];
    snprintf(text, sizeof text, "params.%s[1]", names[kind]);
    for (int how = 0; how < 6; ++how) {
      FORWARD_REFUSED(f, bend(&f->rig, kind, how), BAD, how == 5 ? "none may be negative" : text);
    }
    snprintf(text, sizeof text, "params.%s[0]: dtype is f16; adapters are f32 like the layer, or f32", names[kind]);
    FORWARD_REFUSED(f, make_f16(&f->rig, kind), BAD, text);
  }
}

static void set_rank(rig_t* rig, int pair, int64_t rank) {
  for (int32_t e = 0; e < rig->num_local; ++e) {
    rig->params[LA1 + 2 * pair][e].shape[0] = rank;
    rig->params[LA1 + 2 * pair + 1][e].shape[1] = rank;
  }
}

LAYER_TEST(Adapters_RankBeyondTheConfigs_IsRefused, open_adapted) {
  for (int pair = 0; pair < 3; ++pair) {
    char text[128];
    const int64_t ranks[] = {0, 4};
    for (int i = 0; i < 2; ++i) {
      snprintf(text, sizeof text, "params.%s has rank %d; it must be in [1, lora_rank = 3]", names[2 * pair],
               (int)ranks[i]);
      FORWARD_REFUSED(f, set_rank(&f->rig, pair, ranks[i]), BAD, text);
    }
  }
}

LAYER_TEST(Adapters_OfALayerWithoutARank_AreRefused, open_default) {
  FORWARD_REFUSED(f, f->rig.param_table.la2 = f->rig.param_list[2], BAD,
                  "params.la2 is given, but lora_rank is 0: create the layer with the largest rank");
}

LAYER_TEST(Adapters_BadScales_AreNamed, open_adapted) {
  const float bad[] = {0, NAN, INFINITY};
  for (int i = 0; i < 3; ++i) {
    float* scales[] = {&f->rig.param_table.lora_scale1, &f->rig.param_table.lora_scale3,
                       &f->rig.param_table.lora_scale2};
    static const char* const texts[] = {"lora_scale1 is", "lora_scale3 is", "lora_scale2 is"};
    for (int s = 0; s < 3; ++s) FORWARD_REFUSED(f, *scales[s] = bad[i], BAD, texts[s]);
  }
}

TEST(Adapters_OfAnUpThatTheLayerLacks_AreRefused) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.lora_rank = 3, config.gated = SLUICE_GATED_NO;
  WORKS(rig_open(&rig, NULL, &config));
  rig.forward.needs_backward = 0;
  REFUSED(rig_forward(&rig, NULL), BAD, "params.la3 is given, but only a layer with gated halves has a w3");
  rig.param_table.la3 = rig.param_table.lb3 = NULL;
  WORKS(rig_forward(&rig, NULL));
  own_rig_close(&rig);
}

LAYER_TEST(Gradients_OfFrozenWeights_AreRefusedByName, open_adapted) {
  const char* const texts[] = {"grad_params.w1 is given", "grad_params.w3 is given",
                               "grad_params.w2 is given, but with lora_rank 3 the weights are frozen: pass NULL, or"};
  for (int i = 0; i < 3; ++i) {
    const sluice_tensor_t** all[] = {&f->rig.grad_table.w1, &f->rig.grad_table.w3, &f->rig.grad_table.w2};
    BACKWARD_REFUSED(f, *all[i] = f->rig.grad_list[i], BAD, texts[i]);
  }
}

LAYER_TEST(Gradients_OfAdapters_FitThem, open_adapted) {
  for (int kind = 0; kind < RIG_NUM_ADAPTERS; ++kind) {
    char text[128];
    snprintf(text, sizeof text, "grad_params.%s[1]", names[kind]);
    rig_tensor_t* grad = &f->rig.grads[LA1 + kind][1];
    BACKWARD_REFUSED(f, grad->shape[0] += 1, BAD, text);
    BACKWARD_REFUSED(f, (grad->strides[0] = 2 * grad->shape[1], grad->strides[1] = 2), BAD, text);
    snprintf(text, sizeof text, "grad_params.%s[0]: dtype is f16; gradients are f32 like the layer", names[kind]);
    BACKWARD_REFUSED(f, f->rig.grad_list[LA1 + kind][0].type_bits = 16, BAD, text);
  }
}

/* The backward has other adapters, or other properties of adapters, than the forward of this step. */
LAYER_TEST(Backward_OtherAdaptersThanTheForwards_IsRefused, open_adapted) {
  static const char text[] = "params has other adapters than this step's forward";
  sluice_expert_tensors_t *params = &f->rig.param_table, *grads = &f->rig.grad_table;
  BACKWARD_REFUSED(f, params->lora_scale2 = 3, BAD, text);
  BACKWARD_REFUSED(f, (set_rank(&f->rig, 2, 2), f->rig.backward.grad_params = NULL), BAD, text);
  BACKWARD_REFUSED(f, params->la2 = params->lb2 = grads->la2 = grads->lb2 = NULL, BAD, text);
  BACKWARD_REFUSED(f, params->la2 = params->lb2 = NULL, BAD,
                   "grad_params.la2 is given, but params.la2 is NULL: there is nothing");
}

/* A caller with an older layout has no adapters, whatever bytes follow its struct. */
LAYER_TEST(Structs_OfAnOlderLayout_HaveNoAdapters, open_default) {
  sluice_expert_tensors_t* tables[] = {&f->rig.param_table, &f->rig.grad_table};
  sluice_step_t* step = NULL;
  for (int i = 0; i < 2; ++i) {
    memset((char*)tables[i] + offsetof(sluice_expert_tensors_t, la1), 0xff,
           sizeof *tables[i] - offsetof(sluice_expert_tensors_t, la1));
    tables[i]->struct_size = offsetof(sluice_expert_tensors_t, la1);
  }
  WORKS(rig_step(&f->rig));
  tables[0]->struct_size -= 1;
  REFUSED(rig_forward(&f->rig, &step), SLUICE_E_ABI, "sluice_expert_tensors_t");
}
