// SPDX-License-Identifier: Apache-2.0
/* Refused values and handles of calls, steps in a wrong order or context, and damaged saved buffers. */
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

LAYER_TEST(Ids_OutOfRange_NameTheEntry, open_default) {
  const int64_t wrong[] = {4, -2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, (int64_t)1 << 32};
  for (int i = 0; i < COUNT(wrong); ++i) {
    char text[96];
    snprintf(text, sizeof text, "layer 3: expert_ids[4, 1] is %lld", (long long)wrong[i]);
    int64_t wide[12];
    int32_t* narrow = f->rig.ids.tensor.data;
    for (int at = 0; at < 12; ++at) wide[at] = narrow[at];
    wide[9] = wrong[i];
    if (wrong[i] == (int32_t)wrong[i]) FORWARD_REFUSED(f, narrow[9] = (int32_t)wrong[i], BAD, text);
    f->rig.ids.tensor.data = wide, f->rig.ids.tensor.type_bits = 64;
    sluice_step_t* step = NULL;
    REFUSED(rig_forward(&f->rig, &step), BAD, text);
    f->rig.ids.tensor.data = narrow;
    check_nothing_lost(f);
  }
}

LAYER_TEST(RouteWeights_NaNAndInfinity_PassThrough, open_default) {
  ((float*)f->rig.weights.tensor.data)[2 * 2] = NAN;      /* token 2 */
  ((float*)f->rig.weights.tensor.data)[4 * 2] = INFINITY; /* token 4 */
  WORKS(rig_step(&f->rig));
  const float* out = f->rig.out.tensor.data;
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t m = 0; m < 5; ++m) {
      if (t == 2) assert_true(isnan(out[t * 5 + m]));
      if (t == 4) assert_false(isfinite(out[t * 5 + m]));
      if (t != 2 && t != 4) assert_true(isfinite(out[t * 5 + m]));
    }
  }
  for (int64_t m = 0; m < 5; ++m) assert_true(isfinite(((float*)f->rig.grad_tokens.tensor.data)[m]));
}

LAYER_TEST(Calls_StreamHandlesFlags_AreChecked, open_default) {
  sluice_step_t* step = NULL;
  int dummy;
  REFUSED(sluice_moe_forward(NULL, &f->rig.forward, NULL, &step), BAD, "moe is NULL");
  REFUSED(sluice_moe_forward(f->rig.moe, &f->rig.forward, &dummy, &step), BAD, "stream must be NULL");
  REFUSED(sluice_moe_forward(f->rig.moe, &f->rig.forward, NULL, NULL), BAD, "out_step is NULL");
  f->rig.forward.local_message = "the host's own reason";
  FORWARD_REFUSED(f, f->rig.forward.local_status = SLUICE_E_OVER_BUDGET, SLUICE_E_OVER_BUDGET, "the host's own reason");
  /* 5 is not a status of Sluice. */
  FORWARD_REFUSED(f, f->rig.forward.local_status = 5, SLUICE_E_EXTERNAL, "no reason given");

  f->rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(f->rig.moe, &f->rig.forward, NULL, NULL));
  step = (sluice_step_t*)(uintptr_t)1;
  WORKS(rig_forward(&f->rig, &step));
  assert_null(step);
  check_nothing_lost(f);

  REFUSED(sluice_moe_backward(NULL, step, &f->rig.backward, NULL), BAD, "moe is NULL");
  REFUSED(rig_backward(&f->rig, NULL), BAD, "step is NULL");
  step = fresh_step(f);
  REFUSED(sluice_moe_backward(f->rig.moe, step, &f->rig.backward, &dummy), BAD, "stream must be NULL");
  sluice_step_drop(step);
  sluice_moe_backward_args_t* args = &f->rig.backward;
  BACKWARD_REFUSED(f, (args->local_status = BAD, args->local_message = "changed in place"), BAD, "changed in place");
  const int32_t halves[] = {0, 4, -1};
  for (int i = 0; i < COUNT(halves); ++i) BACKWARD_REFUSED(f, args->parts = halves[i], BAD, "parts is");
  BACKWARD_REFUSED(f, args->grad_mode = 2, BAD, "grad_mode is 2");
  BACKWARD_REFUSED(f, (args->parts = SLUICE_BACKWARD_WGRAD, args->grad_params = NULL), BAD, "wgrad needs grad_params");
}

/* ---- steps ---- */

LAYER_TEST(Backward_InTheWrongOrder_IsStateError, open_default) {
  sluice_step_t* step = fresh_step(f);
  WORKS(rig_backward(&f->rig, step));
  REFUSED(rig_backward(&f->rig, step), SLUICE_E_STATE, "layer 3: this step has run its backward already");
  f->rig.backward.parts = SLUICE_BACKWARD_WGRAD;
  REFUSED(rig_backward(&f->rig, step), SLUICE_E_STATE, "has run its backward already");
  sluice_step_drop(step);
  check_nothing_lost(f);

  step = fresh_step(f);
  f->rig.backward.parts = SLUICE_BACKWARD_WGRAD;
  REFUSED(rig_backward(&f->rig, step), SLUICE_E_STATE, "has not run dgrad yet; run it first");
  f->rig.backward.parts = SLUICE_BACKWARD_DGRAD;
  WORKS(rig_backward(&f->rig, step));
  REFUSED(rig_backward(&f->rig, step), SLUICE_E_STATE, "only wgrad is left");
  f->rig.backward.parts = SLUICE_BACKWARD_BOTH;
  REFUSED(rig_backward(&f->rig, step), SLUICE_E_STATE, "only wgrad is left");
  /* wgrad does not read the row tensors, so garbage is valid. */
  sluice_tensor_t garbage;
  memset(&garbage, 0xee, sizeof garbage);
  garbage.shape = NULL;
  f->rig.backward.grad_out = f->rig.backward.tokens = &garbage;
  f->rig.backward.parts = SLUICE_BACKWARD_WGRAD;
  WORKS(rig_backward(&f->rig, step));
  sluice_step_drop(step);
  check_nothing_lost(f);

  /* A step dropped between dgrad and wgrad also frees the gradient rows that dgrad kept. */
  step = fresh_step(f);
  f->rig.backward.parts = SLUICE_BACKWARD_DGRAD;
  WORKS(rig_backward(&f->rig, step));
  sluice_step_drop(step);
  sluice_step_drop(NULL);
}

TEST(Backward_AfterDrop_IsStateError) {
  fixture_t f, other;
  open_default(&f);
  open_default(&other);
  sluice_step_t* kept = fresh_step(&f);
  sluice_step_t* dropped = fresh_step(&f);
  sluice_step_t* later = fresh_step(&f);
  sluice_step_drop(dropped);
  const int32_t halves[] = {SLUICE_BACKWARD_BOTH, SLUICE_BACKWARD_DGRAD, SLUICE_BACKWARD_WGRAD};
  for (int i = 0; i < COUNT(halves); ++i) {
    f.rig.backward.parts = halves[i];
    REFUSED(rig_backward(&f.rig, dropped), SLUICE_E_STATE, "layer 3: this step is not outstanding: it was dropped");
  }
  f.rig.backward.parts = SLUICE_BACKWARD_BOTH;
  REFUSED(rig_backward(&other.rig, later), SLUICE_E_STATE, "or is of another context");
  WORKS(rig_backward(&f.rig, later));
  WORKS(rig_backward(&f.rig, kept));
  sluice_step_drop(kept);
  sluice_step_drop(later);
  close_fixture(&other);
  close_fixture(&f);
}

LAYER_TEST(Backward_StepOfAnotherLayer_NamesBoth, open_default) {
  sluice_moe_config_t config = rig_config();
  config.layer_id = 9;
  sluice_moe_t* other = NULL;
  WORKS(sluice_moe_create(f->rig.context, &config, &other));
  sluice_step_t* step = fresh_step(f);
  REFUSED(sluice_moe_backward(other, step, &f->rig.backward, NULL), BAD, "layer 9: this step is of layer 3");
  WORKS(rig_backward(&f->rig, step));
  /* The step keeps its layer alive. */
  sluice_moe_destroy(other);
  sluice_step_drop(step);
}

LAYER_TEST(Restore_DamagedOrForeignBuffers_AreRefused, open_default) {
  saved_t saved = {.refuse = -1};
  f->rig.forward.save = save, f->rig.forward.save_user = &saved;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f->rig, &step));
  sluice_step_drop(step);
  sluice_moe_t* moe = f->rig.moe;
  REFUSED(sluice_step_restore(moe, saved.data, saved.bytes, NULL), BAD, "out_step is NULL");
  step = (sluice_step_t*)(uintptr_t)1;
  REFUSED(sluice_step_restore(NULL, saved.data, saved.bytes, &step), BAD, "moe is NULL");
  assert_null(step);
  REFUSED(sluice_step_restore(moe, NULL, saved.bytes, &step), BAD, "saved is NULL");
  REFUSED(sluice_step_restore(moe, saved.data, NULL, &step), BAD, "saved_bytes is NULL");

  unsigned char* meta = saved.data[SLUICE_SAVED_META];
  for (uint64_t at = 0; at < saved.bytes[SLUICE_SAVED_META]; ++at) {
    for (int bit = 0; bit < 8; bit += 7) {
      meta[at] ^= (unsigned char)(1 << bit);
      REFUSED(sluice_step_restore(moe, saved.data, saved.bytes, &step), BAD, "layer 3: the saved buffer META");
      meta[at] ^= (unsigned char)(1 << bit);
    }
  }
  static const char* const buffers[] = {"META", "buffer INPUT", "buffer PRE_ACTIVATION"}; /* nothing is offloaded */
  for (int i = 0; i < COUNT(buffers); ++i) {
    for (int how = 0; how < 3; ++how) {
      saved_t bent = saved;
      if (how == 0) bent.bytes[i] -= 1;
      if (how == 1) bent.data[i] = NULL;
      if (how == 2) bent.bytes[i] = 0;
      REFUSED(sluice_step_restore(moe, bent.data, bent.bytes, &step), BAD, buffers[i]);
    }
  }
  sluice_moe_config_t config = rig_config();
  config.hidden_width = 8, config.layer_id = 9;
  sluice_moe_t* other = NULL;
  WORKS(sluice_moe_create(f->rig.context, &config, &other));
  REFUSED(sluice_step_restore(other, saved.data, saved.bytes, &step), BAD, "layer 9");
  sluice_moe_destroy(other);

  /* Damage between restore and backward is detected again; after a repair the backward works. */
  WORKS(sluice_step_restore(moe, saved.data, saved.bytes, &step));
  meta[saved.bytes[SLUICE_SAVED_META] - 1] ^= 0x40;
  REFUSED(rig_backward(&f->rig, step), BAD, "META is damaged");
  REFUSED(sluice_step_info(step, NULL, NULL), BAD, "META is damaged");
  meta[saved.bytes[SLUICE_SAVED_META] - 1] ^= 0x40;
  int32_t chunks = 0;
  int64_t rows[4] = {-1, -1, -1, -1};
  WORKS(sluice_step_info(step, &chunks, rows));
  assert_int_equal(chunks, 2);
  assert_int_equal(rows[0] + rows[1] + rows[2] + rows[3], 12);
  REFUSED(sluice_step_info(NULL, &chunks, rows), BAD, "step is NULL");
  WORKS(rig_backward(&f->rig, step));
  sluice_step_drop(step);
  free_saved(&saved);
}

LAYER_TEST(Forward_HostRefusesASavedBuffer_IsNoMemory, open_default) {
  static const char* const names[] = {"META", "INPUT", "PRE_ACTIVATION"};
  for (int32_t which = 0; which < SLUICE_SAVED_HOST_INPUT; ++which) { /* nothing is offloaded */
    saved_t saved = {.refuse = which};
    f->rig.forward.save_user = &saved;
    FORWARD_REFUSED(f, f->rig.forward.save = save, SLUICE_E_NO_MEMORY, names[which]);
    free_saved(&saved);
  }
}
