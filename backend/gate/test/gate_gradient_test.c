// SPDX-License-Identifier: Apache-2.0
/* The gate's backward against central differences of the slow gate in double, with the choices held as forward made
 * them: L = sum of g * weight + a * aux + b * z. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "backend/base/status.h"
#include "backend/base/test/refused.h"
#include "backend/gate/gate_choice.h"
#include "backend/gate/test/gate_reference.h"

static slow_t slow;
static double g[MAX_T][MAX_E];

static double loss(const sluice_gate_config_t* c, double a, double b) {
  double sum = 0;
  slow_scores(c, &slow);
  slow_finish(c, &slow);
  for (int t = 0; t < slow.T; ++t) {
    for (int k = 0; k < slow.K; ++k) sum += g[t][k] * slow.weight[t][k];
  }
  return sum + a * slow.aux + b * slow.z;
}

static void check(const sluice_gate_config_t* c, int tokens, int with_bias, int parts) {
  float logits[MAX_T * MAX_E], bias[MAX_E], weights[MAX_T * MAX_E], grads[MAX_T * MAX_E], out[MAX_T * (MAX_E + 2)];
  int32_t ids[MAX_T * MAX_E];
  test_tensor_t l, bt, i, w, gt, o;
  int E = c->num_experts, K = c->top_k;
  float a = parts & 2 ? (float)gate_random() : 0, b = parts & 4 ? (float)gate_random() : 0;
  memset(out, 0xff, sizeof out);
  memset(&slow, 0, sizeof slow);
  memset(g, 0, sizeof g);
  slow.T = tokens, slow.E = E, slow.K = K;
  for (int t = 0; t < tokens; ++t) {
    for (int e = 0; e < E; ++e) slow.logits[t][e] = logits[t * E + e] = (float)(3 * gate_random());
    for (int k = 0; k < K; ++k) grads[k * tokens + t] = (float)gate_random(); /* k-major */
  }
  for (int e = 0; e < E; ++e) slow.bias[e] = bias[e] = with_bias ? (float)(0.3 * gate_random()) : 0;
  const sluice_tensor_t* bias_tensor = with_bias ? REAL_1D(&bt, bias, E) : NULL;
  const sluice_tensor_t* id_tensor = tensor_of(&i, ids, SLUICE_TYPE_INT, 32, tokens, K, 1, tokens);
  assert_int_equal(sluice_gate_forward(c, REAL_2D(&l, logits, tokens, E, E), bias_tensor, id_tensor,
                                       REAL_2D(&w, weights, tokens, K, K), NULL, NULL, NULL),
                   SLUICE_OK);
  slow_gate(c, &slow, sluice_gate_capacity(c, tokens));
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < K; ++k) {
      assert_int_equal(ids[k * tokens + t], slow.kept[t][k] ? slow.id[t][k] : -1);
      g[t][k] = parts & 1 ? grads[k * tokens + t] : 0;
    }
  }
  const sluice_tensor_t* grad_tensor =
      parts & 1 ? tensor_of(&gt, grads, SLUICE_TYPE_FLOAT, 32, tokens, K, 1, tokens) : NULL;
  assert_int_equal(
      sluice_gate_backward(c, &l.tensor, bias_tensor, id_tensor, grad_tensor, a, b, REAL_2D(&o, out, tokens, E, E + 2)),
      SLUICE_OK);
  for (int t = 0; t < tokens; ++t) {
    for (int e = 0; e < E; ++e) {
      const double step = 1e-5;
      double x = slow.logits[t][e];
      slow.logits[t][e] = x + step;
      double above = loss(c, a, b);
      slow.logits[t][e] = x - step;
      double below = loss(c, a, b);
      slow.logits[t][e] = x;
      /* f32 scores and gradients of size 1 to 3, E of them summed: some 1e-6; differences add 1e-10. */
      double slope = (above - below) / (2 * step), found = (double)out[t * (E + 2) + e];
      if (!(fabs(slope - found) <= 4e-6))
        fail_msg("dlogits[%d, %d] is %.9g, differences give %.9g", t, e, found, slope);
    }
    assert_true(isnan(out[t * (E + 2) + E])); /* what lies between rows stays */
  }
}

TEST(Backward_ManyConfigs_MeetDifferences) {
  static const int tokens[] = {1, 5, 12};
  for (int run = 0; run < 1500; ++run) {
    int E = (int[]){1, 2, 6, 8}[run % 4];
    DEFAULTS(sluice_gate_config, c);
    c.num_experts = E;
    c.top_k = 1 + run / 4 % E;
    c.score = run / 3 % 2;
    c.renormalize = run / 5 % 2;
    c.scaling = run / 7 % 2 ? 2.5f : 1;
    c.drop_policy = run / 11 % 3;
    c.capacity = run / 13 % 4;
    c.capacity_factor = (float)(run / 17 % 3) * 0.5f;
    if (E % 2 == 0 && run / 19 % 2) {
      c.num_groups = 2;
      c.top_groups = c.top_k <= E / 2 ? 1 : 2;
    }
    check(&c, tokens[run / 23 % 3], run / 29 % 2, 1 + run / 31 % 7);
  }
}

TEST(Backward_NoTokens_DoesNothing) {
  DEFAULTS(sluice_gate_config, c);
  c.num_experts = 4, c.top_k = 2;
  check(&c, 0, 0, 7);
}

TEST(Backward_WhatIsNotAsked_IsZero) {
  DEFAULTS(sluice_gate_config, c);
  float logits[4] = {1, 2, 3, 4}, out[4] = {NAN, NAN, NAN, NAN};
  int32_t ids[1] = {3};
  test_tensor_t l, i, o;
  c.num_experts = 4;
  assert_int_equal(
      sluice_gate_backward(&c, REAL_2D(&l, logits, 1, 4, 4), NULL, tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 1, 1, 1, 1),
                           NULL, 0, 0, REAL_2D(&o, out, 1, 4, 4)),
      SLUICE_OK);
  for (int e = 0; e < 4; ++e) assert_true(out[e] == 0);
}

TEST(Backward_BadId_IsRefusedByPlace) {
  DEFAULTS(sluice_gate_config, c);
  float logits[8] = {0}, out[8] = {0};
  int32_t ids[2] = {0, 4};
  test_tensor_t l, i, o;
  c.num_experts = 4;
  REFUSED(
      sluice_gate_backward(&c, REAL_2D(&l, logits, 2, 4, 4), NULL, tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 1, 1, 1),
                           NULL, 0, 0, REAL_2D(&o, out, 2, 4, 4)),
      SLUICE_E_INVALID_ARGUMENT, "expert_ids[1, 0] is 4");

  ids[1] = 3;
  assert_int_equal(
      sluice_gate_backward(&c, REAL_2D(&l, logits, 2, 4, 0), NULL, tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 1, 0, 1),
                           NULL, 0, 0, REAL_2D(&o, out, 2, 4, 3)),
      SLUICE_E_INVALID_ARGUMENT); /* what is read may lie on itself */
  assert_non_null(strstr(last_message(), "grad_logits: strides 3, 1 of [2, 4] make elements overlap"));
}
