// SPDX-License-Identifier: Apache-2.0
/* Layers with a restore policy for each chunk: bits of a layer that keeps everything, planned bytes. */

#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { KEEP = SLUICE_RESTORE_KEEP, OFFLOAD = SLUICE_RESTORE_OFFLOAD };
enum { REDISPATCH = SLUICE_RESTORE_REDISPATCH, RECOMPUTE = SLUICE_RESTORE_RECOMPUTE, CHUNKS = 5 };

typedef struct lists_s {
  int32_t input[CHUNKS], pre_activation[CHUNKS];
} lists_t;

static const lists_t mixes[] = {
    {{KEEP, OFFLOAD, REDISPATCH, KEEP, OFFLOAD}, {RECOMPUTE, KEEP, OFFLOAD, KEEP, RECOMPUTE}},
    {{KEEP, KEEP, REDISPATCH, REDISPATCH, REDISPATCH}, {KEEP, KEEP, RECOMPUTE, RECOMPUTE, RECOMPUTE}},
    {{REDISPATCH, KEEP, REDISPATCH, KEEP, KEEP}, {OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD, KEEP}},
    {{OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD}, {KEEP, RECOMPUTE, KEEP, RECOMPUTE, KEEP}},
};
#define NUM_MIXES ((int)(sizeof mixes / sizeof mixes[0]))
/* The policies that callback experts support. */
static const lists_t callback_mix = {{KEEP, OFFLOAD, KEEP, REDISPATCH, KEEP},
                                     {KEEP, RECOMPUTE, KEEP, RECOMPUTE, RECOMPUTE}};

/* Compares with a layer that keeps everything: outputs and input gradients have the same bits, and so do weight
 * gradients if both layers sum them chunk by chunk. */
static void check_mix(case_t c, const lists_t* lists) {
  result_t kept, mixed;
  c.chunking = SLUICE_CHUNKING_TOKENS, c.num_chunks = CHUNKS;
  c.restore_input = c.restore_pre_activation = KEEP;
  world_run(&c, &kept);
  c.restore_input_of = lists->input, c.restore_pre_activation_of = lists->pre_activation;
  world_run(&c, &mixed);
  must_match(&c, &mixed);
  const int params = c.wgrad_mode == SLUICE_WGRAD_PER_CHUNK && !c.callback_experts && !c.separate_wgrad;
  must_be_same(&c, &kept, &mixed, params);
  world_free(&kept);
  world_free(&mixed);
}

static case_t base(int32_t w, int bits) {
  case_t c = world_small_case();
  c.world_size = w, c.gated = bits & 1, c.bias = bits >> 1 & 1, c.reuse_saved = bits >> 2 & 1;
  c.wgrad_mode = bits >> 3 & 1 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
  c.num_experts = 6, c.top_k = 2;
  for (int32_t r = 0; r < w; ++r) c.tokens[r] = 23 - 4 * r;
  return c;
}

TEST(Layer_PolicyByChunk_HasTheBitsOfKeepingEverything) {
  for (int32_t w = 1; w <= 3; ++w) {
    for (int bits = 0; bits < 16; ++bits) {
      const case_t plain = base(w, bits);
      case_t narrow = plain, copies = plain, halves = plain, restored = plain, capacity = plain;
      for (int i = 0; i < NUM_MIXES; ++i) check_mix(plain, &mixes[i]);
      narrow.dtype = copies.dtype = SLUICE_DTYPE_BF16, copies.deduplicate = 1;
      halves.separate_wgrad = 1, restored.restore = 1, capacity.capacity = 23 * 2;
      check_mix(narrow, &mixes[bits % NUM_MIXES]);
      check_mix(copies, &mixes[bits % NUM_MIXES]);
      check_mix(halves, &mixes[bits % NUM_MIXES]);
      check_mix(restored, &mixes[(bits + 1) % NUM_MIXES]);
      if (bits < NUM_MIXES) check_mix(capacity, &mixes[bits]);
    }
    case_t callbacks = base(w, 0);
    callbacks.callback_experts = 1;
    check_mix(callbacks, &callback_mix);
  }
}

/* Without weight gradients, a backward reads T_DI of few chunks or of none. */
static void frozen_round(const int32_t* inputs, const int32_t* pre_activations, float* grad_tokens,
                         float* grad_weights) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.chunking = SLUICE_CHUNKING_TOKENS;
  config.restore_input_of = inputs, config.restore_pre_activation_of = pre_activations;
  WORKS(rig_open(&rig, NULL, &config));
  rig.backward.grad_params = NULL;
  WORKS(rig_step(&rig));
  memcpy(grad_tokens, rig.grad_tokens.tensor.data, rig.grad_tokens.bytes);
  memcpy(grad_weights, rig.grad_weights.tensor.data, rig.grad_weights.bytes);
  rig_close(&rig);
}

TEST(Layer_PolicyByChunkOfFrozenExperts_HasTheBitsOfKeepingEverything) {
  const int32_t inputs[] = {KEEP, OFFLOAD, REDISPATCH}, pre_activations[] = {KEEP, OFFLOAD, RECOMPUTE};
  float kept_tokens[64] = {0}, kept_weights[64] = {0}, tokens[64] = {0}, weights[64] = {0};
  frozen_round(NULL, NULL, kept_tokens, kept_weights);
  for (int i = 0; i < 81; ++i) {
    const int32_t input[] = {inputs[i % 3], inputs[i / 3 % 3]},
                  pre_activation[] = {pre_activations[i / 9 % 3], pre_activations[i / 27]};
    frozen_round(input, pre_activation, tokens, weights);
    if (memcmp(tokens, kept_tokens, sizeof tokens) != 0 || memcmp(weights, kept_weights, sizeof weights) != 0)
      fail_msg("input %d, %d, pre-activation %d, %d: other bits", input[0], input[1], pre_activation[0],
               pre_activation[1]);
  }
}

TEST(Budget_PolicyByChunk_FromTheSmallestUp) {
  budget_by_chunk(&(budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1});
}

TEST(Plan_PolicyByChunk_PredictsTheAllocator) {
  budget_predictions_by_chunk(&(budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 2});
}
