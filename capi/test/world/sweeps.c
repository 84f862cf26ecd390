// SPDX-License-Identifier: Apache-2.0
#include "capi/test/world/sweeps.h"

enum { RANKS = 4, CHUNKS = 5, PAIRS = 9, VARIANTS = 3, DTYPES = 4, ROUTES = 12, BATCHES = 5, CALLBACKS = 4 };

static void set_ranks(case_t* c, int32_t world_size) {
  if (c->ranks_per_node == 0) c->world_size = world_size;
}

int sweep_ranks_and_chunks(const case_t* base, int32_t i, case_t* c) {
  static const int32_t chunks[CHUNKS] = {1, 2, 3, 5, 16};
  const int32_t w = 1 + i / CHUNKS, n = i % CHUNKS;
  *c = *base;
  set_ranks(c, w);
  c->num_chunks = chunks[n], c->gated = (w + n) % 3, c->bias = (w + n) % 2 == 0, c->wgrad_mode = n % 2;
  c->transposed = w % 2, c->accumulate = n % 2;
  return i < RANKS * CHUNKS;
}

int sweep_policies(const case_t* base, int32_t i, case_t* c) {
  const int32_t pair = i % PAIRS, variant = i / PAIRS;
  *c = *base;
  set_ranks(c, 1 + (pair + variant) % RANKS);
  c->num_chunks = 1 + (pair + variant) % 6, c->gated = (pair + variant) % 2;
  c->restore_input = pair / 3, c->restore_pre_activation = world_pre_activations[pair % 3];
  c->reuse_saved = pair % 2, c->restore = (pair % 4 == 3) != (variant > 0);
  if (variant == 1) c->separate_wgrad = 1, c->outstanding = c->restore ? 1 : 2, c->wgrad_mode = 1;
  if (variant == 2) c->dtype = SLUICE_DTYPE_BF16;
  return i < PAIRS * VARIANTS;
}

int sweep_dtypes(const case_t* base, int32_t i, case_t* c) {
  static const int32_t dtypes[DTYPES] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  const int32_t w = 1 + i / DTYPES;
  *c = *base;
  set_ranks(c, w);
  c->num_chunks = 3, c->dtype = dtypes[i % DTYPES], c->gated = w % 2 == 0, c->grad_f32 = c->accumulate = w > 2;
  return i < RANKS * DTYPES;
}

int sweep_routes(const case_t* base, int32_t i, case_t* c) {
  static const int32_t top[] = {1, 3, 4, 12};
  const int32_t w = 1 + i / ROUTES, kind = i % ROUTES;
  *c = *base;
  set_ranks(c, w);
  c->num_chunks = 2 + kind % 2;
  if (kind < 4) c->top_k = top[kind];
  if (kind >= 4 && kind < 7) c->drop_every = kind - 3;
  if (kind >= 7 && kind < 10) c->drop_every = 5, c->repeat_every = kind - 6;
  if (kind >= 10) c->hot_expert = 11, c->uneven_owners = kind == 11;
  if (kind == 11 && w > 2) c->top_k = 1;
  return i < RANKS * ROUTES;
}

int sweep_batches(const case_t* base, int32_t i, case_t* c) {
  *c = *base;
  set_ranks(c, i == 2 ? 1 : 3);
  c->num_chunks = 4, c->uneven_owners = i == 3;
  if (i == 4) c->cycles = 3;
  if (i < 4) c->tokens[1] = 0;
  for (int32_t r = 0; (i == 1 || i == 2) && r < WORLD_MAX_RANKS; ++r) c->tokens[r] = 0;
  return i < BATCHES;
}

int sweep_callbacks(const case_t* base, int32_t i, case_t* c) {
  static const int32_t inputs[CALLBACKS] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD,
                                            SLUICE_RESTORE_REDISPATCH};
  const int32_t policy = i % CALLBACKS, many = i / CALLBACKS % 2;
  *c = *base;
  set_ranks(c, 1 + i / (2 * CALLBACKS));
  c->callback_experts = 1, c->bias = 0, c->num_chunks = many ? 4 : 1, c->restore = many && policy < 2;
  c->restore_input = inputs[policy];
  c->restore_pre_activation = policy == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
  return i < 3 * 2 * CALLBACKS;
}

void sweep_run_test(void** state) {
  const sweep_test_t* test = *state;
  case_t c;
  case_run = test->run;
  for (int32_t i = 0; test->sweep(&test->base, i, &c); ++i) test->check(&c);
}
