// SPDX-License-Identifier: Apache-2.0
/* The gate's forward: capacity, a slow reference over many configs, edges, and refusals. Its backward against central
 * differences of the slow gate. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/test/refused.h"
#include "backend/gate/gate_choice.h"
#include "backend/gate/test/gate_reference.h"

static sluice_gate_config_t config_of(int32_t experts, int32_t top_k) {
  DEFAULTS(sluice_gate_config, c);
  c.num_experts = experts;
  c.top_k = top_k;
  return c;
}

typedef struct {
  int32_t ids[MAX_T * MAX_E];
  float weights[MAX_T * MAX_E];
  int64_t counts[MAX_E];
  float aux, z;
} result_t;

static sluice_status_t forward(const sluice_gate_config_t* c, const float* logits, int64_t tokens, const float* bias,
                               result_t* r) {
  test_tensor_t l, b, i, w, n;
  memset(r, 0xff, sizeof *r);
  return sluice_gate_forward(c, REAL_2D(&l, (void*)(uintptr_t)logits, tokens, c->num_experts, c->num_experts),
                             bias == NULL ? NULL : REAL_1D(&b, (void*)(uintptr_t)bias, c->num_experts),
                             tensor_of(&i, r->ids, SLUICE_TYPE_INT, 32, tokens, c->top_k, c->top_k, 1),
                             REAL_2D(&w, r->weights, tokens, c->top_k, c->top_k), I64_1D(&n, r->counts, c->num_experts),
                             &r->aux, &r->z);
}

#define assert_ok(status) assert_int_equal((status), SLUICE_OK)
static void assert_near(double got, double want) {
  /* f32 results of a handful of operations: 8 roundings. */
  if (!(fabs(got - want) <= 8 * 0x1p-24 * (fabs(want) + 1e-30))) fail_msg("got %.9g, want %.9g", got, want);
}

TEST(Capacity_FactorTimesMean_IsRoundedUp) {
  sluice_gate_config_t c = config_of(8, 2);
  c.drop_policy = SLUICE_DROP_POSITION;
  c.capacity_factor = 1.1f;
  assert_int_equal(sluice_gate_capacity(&c, 40), 11); /* 10 * 1.1 is 11, though 1.1f is above 1.1 */
  assert_int_equal(sluice_gate_capacity(&c, 41), 12);
  c.capacity_factor = 0.01f, c.min_capacity = 4;
  assert_int_equal(sluice_gate_capacity(&c, 40), 4);
  assert_int_equal(sluice_gate_capacity(&c, 3), 3); /* a token chooses an expert once */
  c.capacity_factor = 3e38f;
  assert_int_equal(sluice_gate_capacity(&c, 40), 40);
  c.capacity = 7;
  assert_int_equal(sluice_gate_capacity(&c, 40), 7);
}

/* ---- the slow reference --------------------------------------------------------------------------------------- */

static slow_t slow;

static void compare_with_slow(const sluice_gate_config_t* c, int tokens, int with_bias, int layout) {
  float logits[MAX_T * (MAX_E + 3)], bias[MAX_E], weights[MAX_T * MAX_E * 3], aux, z;
  int32_t ids[MAX_T * MAX_E * 3];
  int64_t counts[MAX_E];
  test_tensor_t l, b, i, w, n;
  int E = c->num_experts, K = c->top_k, stride = E + (layout ? 3 : 0);
  memset(&slow, 0, sizeof slow);
  memset(weights, 0xff, sizeof weights);
  slow.T = tokens, slow.E = E, slow.K = K;
  for (int t = 0; t < tokens; ++t) {
    for (int e = 0; e < E; ++e) slow.logits[t][e] = logits[t * stride + e] = (float)(3 * gate_random());
  }
  for (int e = 0; e < E; ++e) slow.bias[e] = bias[e] = with_bias ? (float)(0.3 * gate_random()) : 0;
  /* Token-major, then k-major (DeepSpeed), then every third element. */
  int64_t st = layout == 0 ? K : layout == 1 ? 1 : 3 * K, sk = layout == 0 ? 1 : layout == 1 ? tokens : 3;
  assert_ok(sluice_gate_forward(c, REAL_2D(&l, logits, tokens, E, stride), with_bias ? REAL_1D(&b, bias, E) : NULL,
                                tensor_of(&i, ids, SLUICE_TYPE_INT, 32, tokens, K, st, sk),
                                tensor_of(&w, weights, SLUICE_TYPE_FLOAT, 32, tokens, K, st, sk), I64_1D(&n, counts, E),
                                &aux, &z));
  slow_gate(c, &slow, sluice_gate_capacity(c, tokens));
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < K; ++k) {
      assert_int_equal(ids[t * st + k * sk], slow.kept[t][k] ? slow.id[t][k] : -1);
      assert_near(weights[t * st + k * sk], slow.weight[t][k]);
    }
  }
  assert_memory_equal(counts, slow.counts, (size_t)E * sizeof *counts);
  assert_near(aux, slow.aux);
  assert_near(z, tokens == 0 ? 0 : slow.z);
}

TEST(Forward_ManyConfigs_MatchSlowGate) {
  static const int tokens[] = {0, 1, 7, 40};
  for (int run = 0; run < 3000; ++run) {
    int E = (int[]){1, 2, 6, 8, 16}[run % 5];
    sluice_gate_config_t c = config_of(E, 1 + run / 5 % E);
    c.score = run / 7 % 2;
    c.renormalize = run / 11 % 2;
    c.scaling = run / 13 % 2 ? 2.5f : 1;
    c.drop_policy = run / 17 % 3;
    c.capacity = run / 19 % 5; /* 0: from the factor */
    c.capacity_factor = (float)(run / 23 % 4) * 0.5f;
    c.min_capacity = run / 29 % 2;
    if (E % 2 == 0 && run / 31 % 2) {
      c.num_groups = run / 37 % 2 ? 2 : E / 2;
      c.top_groups = 1 + run / 41 % c.num_groups;
      if (c.top_groups * (E / c.num_groups) < c.top_k) c.top_groups = c.num_groups;
      c.group_score_top = run / 43 % 2;
    }
    compare_with_slow(&c, tokens[run / 3 % 4], run / 47 % 2, run / 53 % 3);
  }
}

/* ---- edges ---------------------------------------------------------------------------------------------------- */

TEST(Forward_Ties_GoToLowerExpertAndEarlierToken) {
  result_t r;
  static const float logits[4 * 4] = {0};
  static const int32_t want[] = {0, 1, 0, 1, -1, -1, -1, -1};
  sluice_gate_config_t c = config_of(4, 2);
  c.capacity = 2, c.drop_policy = SLUICE_DROP_SCORE;
  assert_ok(forward(&c, logits, 4, NULL, &r));
  assert_memory_equal(r.ids, want, sizeof want);
  c.drop_policy = SLUICE_DROP_POSITION;
  assert_ok(forward(&c, logits, 4, NULL, &r));
  assert_memory_equal(r.ids, want, sizeof want);
}

TEST(Forward_NanLogits_ChooseValidExpertsAndShow) {
  result_t r;
  static const float logits[] = {NAN, 1, 0, 0, 1, 0};
  for (int policy = 0; policy < 3; ++policy) {
    sluice_gate_config_t c = config_of(3, 2);
    c.drop_policy = policy, c.capacity = 1;
    assert_ok(forward(&c, logits, 2, NULL, &r));
    if (policy == SLUICE_DROP_NONE) {
      assert_true(r.ids[0] == 0 && r.ids[1] == 1 && isnan(r.weights[0]) && isnan(r.weights[1]));
    }
    if (policy == SLUICE_DROP_SCORE) assert_true(r.ids[1] == -1 && r.ids[2] == 1); /* a number before a NaN */
    assert_true(isnan(r.aux) && isnan(r.z));
    c.score = SLUICE_SCORE_SIGMOID;
    assert_ok(forward(&c, logits, 2, NULL, &r));
    for (int i = 0; i < 4; ++i) assert_true(r.ids[i] >= -1 && r.ids[i] < 3);
    if (policy == SLUICE_DROP_NONE) assert_true(r.ids[0] == 1 && r.ids[1] == 2);
  }
  sluice_gate_config_t c = config_of(4, 3); /* groups: a NaN never opens a group that was not chosen */
  static const float nans[] = {NAN, NAN, NAN, NAN};
  c.num_groups = 2, c.top_groups = 2;
  assert_ok(forward(&c, nans, 1, NULL, &r));
  assert_true(r.ids[0] == 0 && r.ids[1] == 1 && r.ids[2] == 2);
}

TEST(Forward_InfiniteLogits_StaySane) {
  result_t r;
  static const float masked[] = {-INFINITY, 0, -INFINITY, 0};
  sluice_gate_config_t c = config_of(4, 2);
  c.renormalize = 1;
  assert_ok(forward(&c, masked, 1, NULL, &r));
  assert_true(r.ids[0] == 1 && r.ids[1] == 3 && r.weights[0] == 0.5f && isfinite(r.aux) && isfinite(r.z));
  /* Sigmoid scores that are all 0: weights 0, not 0 / 0. */
  static const float low[] = {-INFINITY, -200, -INFINITY, -200};
  c.score = SLUICE_SCORE_SIGMOID;
  assert_ok(forward(&c, low, 1, NULL, &r));
  assert_true(r.weights[0] == 0 && r.weights[1] == 0 && r.aux == 0);
}

static const float two_tokens[6] = {0, 0.693147181f, 1.60943791f, 1.79175947f, 0, 0};

/* ---- refusals ------------------------------------------------------------------------------------------------- */

TEST(Forward_BadConfig_IsRefusedByName) {
  result_t r;
  static const float logits[8] = {0};
#define REFUSED_WITH(change, words)                                              \
  do {                                                                           \
    sluice_gate_config_t c = config_of(4, 2);                                    \
    change;                                                                      \
    result_t before;                                                             \
    memset(&before, 0xff, sizeof before);                                        \
    REFUSED(forward(&c, logits, 2, NULL, &r), SLUICE_E_INVALID_ARGUMENT, words); \
    assert_memory_equal(&r, &before, sizeof r); /* no effect */                  \
  } while (0)
  sluice_ext_header_t unknown = {.type = 99};
  REFUSED_WITH(c.num_experts = 0, "num_experts");
  REFUSED_WITH(c.top_k = 5, "top_k is 5");
  REFUSED_WITH(c.top_k = 0, "top_k");
  REFUSED_WITH(c.score = 2, "score is 2");
  REFUSED_WITH(c.renormalize = 2, "renormalize");
  REFUSED_WITH(c.num_groups = 3, "num_groups is 3");
  REFUSED_WITH(c.num_groups = 2, "top_groups is 0");
  REFUSED_WITH((c.num_groups = 4, c.top_groups = 1), "raise top_groups");
  REFUSED_WITH((c.num_groups = 2, c.top_groups = 1, c.group_score_top = 3), "group_score_top is 3");
  REFUSED_WITH(c.drop_policy = 3, "drop_policy is 3");
  REFUSED_WITH(c.capacity = -1, "capacity -1");
  REFUSED_WITH(c.capacity_factor = NAN, "capacity_factor");
  REFUSED_WITH(c.capacity_factor = INFINITY, "capacity_factor");
  REFUSED_WITH(c.next = &unknown, "type 99");
#undef REFUSED_WITH
  sluice_gate_config_t c = config_of(4, 2);
  c.struct_size = 8;
  REFUSED(forward(&c, logits, 2, NULL, &r), SLUICE_E_ABI, "sluice_gate_config_t");
  struct {
    sluice_gate_config_t config;
    int64_t future;
  } longer = {.config = config_of(4, 2)};
  longer.config.struct_size = sizeof longer;
  assert_ok(forward(&longer.config, logits, 2, NULL, &r));
  longer.future = 1;
  REFUSED(forward(&longer.config, logits, 2, NULL, &r), SLUICE_E_ABI, "sluice_gate_config_t");
}

TEST(Forward_BadTensors_AreRefusedByName) {
  sluice_gate_config_t c = config_of(4, 2);
  float logits[8] = {0}, weights[4];
  int32_t ids[4];
  test_tensor_t l, i, w, b;
  const sluice_tensor_t* good_l = REAL_2D(&l, logits, 2, 4, 4);
  const sluice_tensor_t* good_i = tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 2, 2, 1);
  const sluice_tensor_t* good_w = REAL_2D(&w, weights, 2, 2, 2);
  const int32_t bad = SLUICE_E_INVALID_ARGUMENT;
  assert_ok(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL));
  REFUSED(sluice_gate_forward(NULL, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "NULL");
  REFUSED(sluice_gate_forward(&c, NULL, NULL, good_i, good_w, NULL, NULL, NULL), bad, "logits: tensor is NULL");
  REFUSED(sluice_gate_forward(&c, good_l, NULL, NULL, good_w, NULL, NULL, NULL), bad, "expert_ids");
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, NULL, NULL, NULL, NULL), bad, "route_weights");
  REFUSED(sluice_gate_forward(&c, good_l, REAL_1D(&b, logits, 3), good_i, good_w, NULL, NULL, NULL), bad,
          "bias: dimension 0 is 3, want 4");
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, I64_1D(&b, logits, 3), NULL, NULL), bad,
          "counts: dimension 0 is 3, want 4");
  l.shape[1] = 3;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad,
          "logits: dimension 1 is 3, want 4");
  l.shape[1] = 4, l.strides[0] = 1, l.strides[1] = 2;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "stride of dimension 1");
  l.strides[0] = 4, l.strides[1] = 1, l.tensor.type_bits = 64;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "dtype is f64, want f32");
  l.tensor.type_bits = 24;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "unknown");
  l.tensor.type_bits = 32, l.tensor.type_lanes = 2;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "type_lanes is 2");
  l.tensor.type_lanes = 1, l.tensor.device_type = SLUICE_DEVICE_CUDA;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "device_type is 2");
  l.tensor.device_type = SLUICE_DEVICE_CPU, l.tensor.data = NULL;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "data is NULL");
  l.tensor.data = logits, l.tensor.ndim = 1;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "has 1 dimensions");
  l.tensor.ndim = 2, l.shape[0] = -1;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "want a size >= 0");
  l.shape[0] = INT64_MAX;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "range of int64");
  l.shape[0] = 2, i.tensor.type_bits = 64;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad, "expert_ids: dtype is i64");
  i.tensor.type_bits = 32, i.shape[0] = 3;
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL), bad,
          "expert_ids: dimension 0 is 3, want 2");
  /* What is written may lie anywhere, but not on itself. */
  const struct {
    int64_t down, across;
    int overlaps;
  } strides[] = {{1, 2, 0}, {2, -1, 0}, {-1, 2, 0}, {3, 2, 0}, {0, 1, 1}, {1, 0, 1}, {1, 1, 1}, {-1, 1, 1}};
  for (size_t n = 0; n < sizeof strides / sizeof strides[0]; ++n) {
    static int32_t wide_ids[16];
    static float wide_weights[16];
    const int64_t down = strides[n].down, across = strides[n].across;
    good_i = tensor_of(&i, wide_ids + 8, SLUICE_TYPE_INT, 32, 2, 2, down, across);
    good_w = REAL_2D(&w, weights, 2, 2, 2);
    sluice_status_t status = sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL);
    if (strides[n].overlaps) {
      REFUSED(status, bad, "expert_ids: strides");
    } else {
      assert_ok(status);
    }
    good_i = tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 2, 2, 1);
    good_w = tensor_of(&w, wide_weights + 8, SLUICE_TYPE_FLOAT, 32, 2, 2, down, across);
    status = sluice_gate_forward(&c, good_l, NULL, good_i, good_w, NULL, NULL, NULL);
    if (strides[n].overlaps) {
      REFUSED(status, bad, "route_weights: strides");
    } else {
      assert_ok(status);
    }
  }
  int64_t counted[4];
  I64_1D(&b, counted, 4);
  b.strides[0] = 0;
  good_w = REAL_2D(&w, weights, 2, 2, 2);
  REFUSED(sluice_gate_forward(&c, good_l, NULL, good_i, good_w, &b.tensor, NULL, NULL), bad, "counts: strides");
}

TEST(Forward_NthAllocationFails_NoEffectNoLeak) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_gate_config_t c = config_of(3, 2);
  c.drop_policy = SLUICE_DROP_SCORE, c.capacity = 1;
  uint64_t live = allocator->num_live;
  int n = 0;
  for (;; ++n) {
    result_t r, before;
    memset(&before, 0xff, sizeof before);
    allocator->fail_after = n;
    sluice_status_t status = forward(&c, two_tokens, 2, NULL, &r);
    allocator->fail_after = -1;
    assert_int_equal(allocator->num_live, live);
    if (status == SLUICE_OK) break;
    assert_int_equal(status, SLUICE_E_NO_MEMORY);
    assert_memory_equal(&r, &before, sizeof r);
  }
  assert_int_equal(n, 3);
}

static void* gate_thread(void* argument) {
  result_t* r = argument;
  sluice_gate_config_t c = config_of(3, 2);
  c.drop_policy = SLUICE_DROP_SCORE, c.capacity = 1;
  for (int i = 0; i < 200; ++i) {
    if (forward(&c, two_tokens, 2, NULL, r) != SLUICE_OK) return argument;
  }
  return NULL;
}

TEST(Forward_FourThreads_SameResults) {
  pthread_t threads[4];
  static result_t results[4];
  for (int i = 0; i < 4; ++i) assert_int_equal(pthread_create(&threads[i], NULL, gate_thread, &results[i]), 0);
  for (int i = 0; i < 4; ++i) {
    void* failed;
    assert_int_equal(pthread_join(threads[i], &failed), 0);
    assert_null(failed);
  }
  for (int i = 1; i < 4; ++i) assert_memory_equal(&results[0], &results[i], sizeof results[0]);
}

/* ---- the backward ---------------------------------------------------------------------------------------------- */

/* Choices are held as forward made them: L = sum of g * weight + a * aux + b * z. */
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

static void check_gradients(const sluice_gate_config_t* c, int tokens, int with_bias, int parts) {
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
    check_gradients(&c, tokens[run / 23 % 3], run / 29 % 2, 1 + run / 31 % 7);
  }
}

TEST(Backward_NoTokens_DoesNothing) {
  DEFAULTS(sluice_gate_config, c);
  c.num_experts = 4, c.top_k = 2;
  check_gradients(&c, 0, 0, 7);
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
