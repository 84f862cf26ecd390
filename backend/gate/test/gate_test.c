// SPDX-License-Identifier: Apache-2.0
/* The gate's forward: capacity, a slow reference over many configs, edges, and refusals. Its backward against central
 * differences of the slow gate. The counts and order of sluice_route. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/test/refused.h"
#include "backend/gate/gate_choice.h"
#include "sluice/gate.h"
#include "sluice/split.h"

enum { MAX_T = 40, MAX_E = 16 };

/* ---- tensors ---- */

typedef struct {
  sluice_tensor_t tensor;
  int64_t shape[2], strides[2];
} test_tensor_t;

static const sluice_tensor_t* tensor_of(test_tensor_t* t, void* data, int code, int bits, int64_t rows, int64_t columns,
                                        int64_t row_stride, int64_t column_stride) {
  memset(t, 0, sizeof *t);
  t->shape[0] = rows, t->shape[1] = columns, t->strides[0] = row_stride, t->strides[1] = column_stride;
  t->tensor = (sluice_tensor_t){.data = data,
                                .device_type = SLUICE_DEVICE_CPU,
                                .ndim = columns < 0 ? 1 : 2,
                                .type_code = (uint8_t)code,
                                .type_bits = (uint8_t)bits,
                                .type_lanes = 1,
                                .shape = t->shape,
                                .strides = t->strides};
  return &t->tensor;
}
#define REAL_2D(t, data, rows, columns, stride) tensor_of(t, data, SLUICE_TYPE_FLOAT, 32, rows, columns, stride, 1)
#define REAL_1D(t, data, count)                 tensor_of(t, data, SLUICE_TYPE_FLOAT, 32, count, -1, 1, 0)
#define I64_1D(t, data, count)                  tensor_of(t, data, SLUICE_TYPE_INT, 64, count, -1, 1, 0)

static uint64_t gate_seed = 11;
static double gate_random(void) {
  gate_seed = gate_seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(gate_seed >> 33) / 2147483648.0 * 2 - 1;
}

/* ---- the slow gate ---- */

typedef struct {
  int T, E, K;
  double logits[MAX_T][MAX_E], bias[MAX_E];
  double score[MAX_T][MAX_E];
  int id[MAX_T][MAX_E];   /* before dropping */
  int kept[MAX_T][MAX_E]; /* by k */
  double weight[MAX_T][MAX_E];
  int64_t counts[MAX_E];
  double aux, z;
} slow_t;

static void slow_scores(const sluice_gate_config_t* c, slow_t* s) {
  s->z = 0;
  for (int t = 0; t < s->T; ++t) {
    double sum = 0;
    for (int e = 0; e < s->E; ++e) sum += exp(s->logits[t][e]);
    for (int e = 0; e < s->E; ++e) {
      s->score[t][e] = c->score == SLUICE_SCORE_SOFTMAX ? exp(s->logits[t][e]) / sum : 1 / (1 + exp(-s->logits[t][e]));
    }
    s->z += log(sum) * log(sum) / s->T;
  }
}

/* The index of the greatest value not yet taken, the first of equals. */
static int slow_argmax(const double* value, const int* taken, int count) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || value[i] > value[best])) best = i;
  }
  return best;
}

static void slow_choose(const sluice_gate_config_t* c, slow_t* s) {
  memset(s->counts, 0, sizeof s->counts);
  for (int t = 0; t < s->T; ++t) {
    double choosing[MAX_E];
    int taken[MAX_E] = {0};
    for (int e = 0; e < s->E; ++e) choosing[e] = s->score[t][e] + s->bias[e];
    if (c->num_groups > 1) {
      int size = s->E / c->num_groups, group_taken[MAX_E] = {0}, top = c->group_score_top ? c->group_score_top : 2;
      double group[MAX_E];
      for (int g = 0; g < c->num_groups; ++g) {
        int used[MAX_E] = {0};
        group[g] = 0;
        for (int i = 0; i < (top < size ? top : size); ++i) {
          int at = slow_argmax(choosing + g * size, used, size);
          used[at] = 1;
          group[g] += choosing[g * size + at];
        }
      }
      for (int i = 0; i < c->top_groups; ++i) group_taken[slow_argmax(group, group_taken, c->num_groups)] = 1;
      for (int e = 0; e < s->E; ++e) taken[e] = !group_taken[e / size];
    }
    for (int k = 0; k < s->K; ++k) {
      int e = slow_argmax(choosing, taken, s->E);
      taken[e] = 1;
      s->id[t][k] = e;
      s->kept[t][k] = 1;
      ++s->counts[e];
    }
  }
}

/* One expert's routes are ranked by counting the routes that come before each. */
static void slow_drop(const sluice_gate_config_t* c, slow_t* s, int64_t capacity) {
  if (c->drop_policy == SLUICE_DROP_NONE) return;
  for (int t = 0; t < s->T; ++t) {
    for (int k = 0; k < s->K; ++k) {
      int64_t rank = 0;
      int e = s->id[t][k];
      for (int u = 0; u < s->T; ++u) {
        for (int j = 0; j < s->K; ++j) {
          if (s->id[u][j] != e) continue;
          if (c->drop_policy == SLUICE_DROP_POSITION) {
            rank += j < k || (j == k && u < t);
          } else {
            rank += s->score[u][e] > s->score[t][e] || (s->score[u][e] == s->score[t][e] && u < t);
          }
        }
      }
      s->kept[t][k] = rank < capacity;
    }
  }
}

/* Weights and losses for the choices that stand in s. */
static void slow_finish(const sluice_gate_config_t* c, slow_t* s) {
  double mean[MAX_E] = {0};
  for (int t = 0; t < s->T; ++t) {
    double sum = 0, all = 0;
    for (int k = 0; k < s->K; ++k) sum += s->kept[t][k] ? s->score[t][s->id[t][k]] : 0;
    for (int e = 0; e < s->E; ++e) all += s->score[t][e];
    for (int e = 0; e < s->E; ++e) mean[e] += s->score[t][e] / all / s->T;
    for (int k = 0; k < s->K; ++k) {
      double w = s->kept[t][k] ? s->score[t][s->id[t][k]] : 0;
      if (c->renormalize && s->kept[t][k]) w /= sum;
      s->weight[t][k] = w * (double)c->scaling;
    }
  }
  s->aux = 0;
  for (int e = 0; e < s->E && s->T > 0; ++e) s->aux += s->E * (double)s->counts[e] / (s->T * s->K) * mean[e];
}

static void slow_gate(const sluice_gate_config_t* c, slow_t* s, int64_t capacity) {
  slow_scores(c, s);
  slow_choose(c, s);
  slow_drop(c, s, capacity);
  slow_finish(c, s);
}

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

/* ---- the slow reference ---- */

static slow_t slow;

/* With the choices of the forward: L = sum of g * weight + a * aux + b * z. */
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

/* Compares out [T, E], with rows `stride` apart, with central differences. */
static void compare_gradients(const sluice_gate_config_t* c, float a, float b, const float* out, int stride) {
  const double step = 1e-5;
  for (int t = 0; t < slow.T; ++t) {
    for (int e = 0; e < slow.E; ++e) {
      double x = slow.logits[t][e];
      slow.logits[t][e] = x + step;
      double above = loss(c, a, b);
      slow.logits[t][e] = x - step;
      double below = loss(c, a, b);
      slow.logits[t][e] = x;
      /* f32 scores and gradients of size 1 to 3, E of them summed: some 1e-6; differences add 1e-10. */
      double slope = (above - below) / (2 * step), found = (double)out[t * stride + e];
      if (!(fabs(slope - found) <= 4e-6))
        fail_msg("dlogits[%d, %d] is %.9g, differences give %.9g", t, e, found, slope);
    }
    assert_true(isnan(out[t * stride + slow.E])); /* what lies between rows stays */
  }
}

/* parts: bits of the gradients that the backward gets: of weights, of aux, of z. Without any, what it writes is 0. */
static void compare_with_slow(const sluice_gate_config_t* c, int tokens, int with_bias, int layout, int parts) {
  float logits[MAX_T * (MAX_E + 3)], bias[MAX_E], weights[MAX_T * MAX_E * 3], grads[MAX_T * MAX_E * 3], aux, z;
  float out[MAX_T * (MAX_E + 2)];
  int32_t ids[MAX_T * MAX_E * 3];
  int64_t counts[MAX_E];
  test_tensor_t l, b, i, w, n, gt, o;
  int E = c->num_experts, K = c->top_k, stride = E + (layout ? 3 : 0);
  memset(&slow, 0, sizeof slow);
  memset(weights, 0xff, sizeof weights);
  memset(out, 0xff, sizeof out);
  slow.T = tokens, slow.E = E, slow.K = K;
  for (int t = 0; t < tokens; ++t) {
    for (int e = 0; e < E; ++e) slow.logits[t][e] = logits[t * stride + e] = (float)(3 * gate_random());
  }
  for (int e = 0; e < E; ++e) slow.bias[e] = bias[e] = with_bias ? (float)(0.3 * gate_random()) : 0;
  /* Token-major, then k-major (DeepSpeed), then every third element. */
  int64_t st = layout == 0 ? K : layout == 1 ? 1 : 3 * K, sk = layout == 0 ? 1 : layout == 1 ? tokens : 3;
  REAL_2D(&l, logits, tokens, E, stride);
  const sluice_tensor_t* bias_tensor = with_bias ? REAL_1D(&b, bias, E) : NULL;
  tensor_of(&i, ids, SLUICE_TYPE_INT, 32, tokens, K, st, sk);
  assert_ok(sluice_gate_forward(c, &l.tensor, bias_tensor, &i.tensor,
                                tensor_of(&w, weights, SLUICE_TYPE_FLOAT, 32, tokens, K, st, sk), I64_1D(&n, counts, E),
                                &aux, &z));
  slow_gate(c, &slow, sluice_gate_capacity(c, tokens));
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < K; ++k) {
      assert_int_equal(ids[t * st + k * sk], slow.kept[t][k] ? slow.id[t][k] : -1);
      assert_near(weights[t * st + k * sk], slow.weight[t][k]);
      grads[t * st + k * sk] = (float)gate_random();
      g[t][k] = parts & 1 ? grads[t * st + k * sk] : 0;
    }
  }
  assert_memory_equal(counts, slow.counts, (size_t)E * sizeof *counts);
  assert_near(aux, slow.aux);
  assert_near(z, tokens == 0 ? 0 : slow.z);
  if (E > 8 || tokens > 12) return; /* differences take time */
  float of_aux = parts & 2 ? (float)gate_random() : 0, of_z = parts & 4 ? (float)gate_random() : 0;
  assert_ok(sluice_gate_backward(c, &l.tensor, bias_tensor, &i.tensor,
                                 parts & 1 ? tensor_of(&gt, grads, SLUICE_TYPE_FLOAT, 32, tokens, K, st, sk) : NULL,
                                 of_aux, of_z, REAL_2D(&o, out, tokens, E, E + 2)));
  compare_gradients(c, of_aux, of_z, out, E + 2);
  for (int at = 0; parts == 0 && at < tokens * E; ++at) assert_true(out[at / E * (E + 2) + at % E] == 0);
}

TEST(ForwardAndBackward_ManyConfigs_MatchSlowGateAndDifferences) {
  static const int tokens[] = {0, 1, 5, 12, 40};
  for (int run = 0; run < 4000; ++run) {
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
    compare_with_slow(&c, tokens[run / 3 % 5], run / 47 % 2, run / 53 % 3, run / 59 % 8);
  }
}

/* ---- edges ---- */

TEST(Forward_Ties_GoToLowerExpertAndEarlierToken) {
  result_t r;
  static const float logits[4 * 4] = {0};
  static const int32_t want[] = {0, 1, 0, 1, -1, -1, -1, -1};
  sluice_gate_config_t c = config_of(4, 2);
  c.capacity = 2;
  for (int by_score = 0; by_score < 2; ++by_score) {
    c.drop_policy = by_score ? SLUICE_DROP_SCORE : SLUICE_DROP_POSITION;
    assert_ok(forward(&c, logits, 4, NULL, &r));
    assert_memory_equal(r.ids, want, sizeof want);
  }
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

/* ---- refusals ---- */

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

/* The arguments of a valid call for two tokens, four experts and two choices. */
typedef struct {
  float logits[8], bias[4], weights[16];
  int32_t ids[16];
  int64_t counts[4];
  test_tensor_t l, b, i, w, n;
} arguments_t;

static void make(arguments_t* a) {
  memset(a, 0, sizeof *a);
  REAL_2D(&a->l, a->logits, 2, 4, 4), REAL_1D(&a->b, a->bias, 4), I64_1D(&a->n, a->counts, 4);
  tensor_of(&a->i, a->ids + 8, SLUICE_TYPE_INT, 32, 2, 2, 2, 1), REAL_2D(&a->w, a->weights + 8, 2, 2, 2);
}

static sluice_status_t run(const arguments_t* a) {
  sluice_gate_config_t c = config_of(4, 2);
  return sluice_gate_forward(&c, &a->l.tensor, &a->b.tensor, &a->i.tensor, &a->w.tensor, &a->n.tensor, NULL, NULL);
}

TEST(Forward_BadTensors_AreRefusedByName) {
  sluice_gate_config_t c = config_of(4, 2);
  const int32_t bad = SLUICE_E_INVALID_ARGUMENT;
  arguments_t a;
  make(&a);
  const sluice_tensor_t *l = &a.l.tensor, *i = &a.i.tensor, *w = &a.w.tensor;
  assert_ok(run(&a));
  assert_ok(sluice_gate_forward(&c, l, NULL, i, w, NULL, NULL, NULL));
  REFUSED(sluice_gate_forward(NULL, l, NULL, i, w, NULL, NULL, NULL), bad, "NULL");
  REFUSED(sluice_gate_forward(&c, NULL, NULL, i, w, NULL, NULL, NULL), bad, "logits: tensor is NULL");
  REFUSED(sluice_gate_forward(&c, l, NULL, NULL, w, NULL, NULL, NULL), bad, "expert_ids");
  REFUSED(sluice_gate_forward(&c, l, NULL, i, NULL, NULL, NULL, NULL), bad, "route_weights");
#define REFUSED_WITH(change, words) \
  do {                              \
    make(&a);                       \
    change;                         \
    REFUSED(run(&a), bad, words);   \
  } while (0)
  REFUSED_WITH(a.b.shape[0] = 3, "bias: dimension 0 is 3, want 4");
  REFUSED_WITH(a.n.shape[0] = 3, "counts: dimension 0 is 3, want 4");
  REFUSED_WITH(a.l.shape[1] = 3, "logits: dimension 1 is 3, want 4");
  REFUSED_WITH((a.l.strides[0] = 1, a.l.strides[1] = 2), "stride of dimension 1");
  REFUSED_WITH(a.l.tensor.type_bits = 64, "dtype is f64, want f32");
  REFUSED_WITH(a.l.tensor.type_bits = 24, "unknown");
  REFUSED_WITH(a.l.tensor.type_lanes = 2, "type_lanes is 2");
  REFUSED_WITH(a.l.tensor.device_type = SLUICE_DEVICE_CUDA, "device_type is 2");
  REFUSED_WITH(a.l.tensor.data = NULL, "data is NULL");
  REFUSED_WITH(a.l.tensor.ndim = 1, "has 1 dimensions");
  REFUSED_WITH(a.l.shape[0] = -1, "want a size >= 0");
  REFUSED_WITH(a.l.shape[0] = INT64_MAX, "range of int64");
  REFUSED_WITH(a.i.tensor.type_bits = 64, "expert_ids: dtype is i64");
  REFUSED_WITH(a.i.shape[0] = 3, "expert_ids: dimension 0 is 3, want 2");
  REFUSED_WITH(a.n.strides[0] = 0, "counts: strides");
#undef REFUSED_WITH
}

/* What is written may lie anywhere, but not on itself. */
TEST(Forward_AnyStrides_AreTakenUnlessElementsOverlap) {
  static const struct {
    int64_t down, across;
    int overlaps;
  } strides[] = {{1, 2, 0}, {2, -1, 0}, {-1, 2, 0}, {3, 2, 0}, {0, 1, 1}, {1, 0, 1}, {1, 1, 1}, {-1, 1, 1}};
  for (size_t n = 0; n < 2 * (sizeof strides / sizeof strides[0]); ++n) {
    arguments_t a;
    make(&a);
    test_tensor_t* t = n % 2 ? &a.w : &a.i;
    t->strides[0] = strides[n / 2].down, t->strides[1] = strides[n / 2].across;
    const sluice_status_t status = run(&a);
    if (strides[n / 2].overlaps) {
      REFUSED(status, SLUICE_E_INVALID_ARGUMENT, n % 2 ? "route_weights: strides" : "expert_ids: strides");
    } else {
      assert_ok(status);
    }
  }
}

static const float two_tokens[6] = {0, 0.693147181f, 1.60943791f, 1.79175947f, 0, 0};

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

/* ---- the backward ---- */

TEST(Backward_BadId_IsRefusedByPlace) {
  sluice_gate_config_t c = config_of(4, 1);
  float logits[8] = {0}, out[8] = {0};
  int32_t ids[2] = {0, 4};
  test_tensor_t l, i, o;
  REFUSED(
      sluice_gate_backward(&c, REAL_2D(&l, logits, 2, 4, 4), NULL, tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 1, 1, 1),
                           NULL, 0, 0, REAL_2D(&o, out, 2, 4, 4)),
      SLUICE_E_INVALID_ARGUMENT, "expert_ids[1, 0] is 4");

  ids[1] = 3; /* what is read may lie on itself, and what is written may not */
  REFUSED(
      sluice_gate_backward(&c, REAL_2D(&l, logits, 2, 4, 0), NULL, tensor_of(&i, ids, SLUICE_TYPE_INT, 32, 2, 1, 0, 1),
                           NULL, 0, 0, REAL_2D(&o, out, 2, 4, 3)),
      SLUICE_E_INVALID_ARGUMENT, "grad_logits: strides 3, 1 of [2, 4] make elements overlap");
}

/* ---- sluice_route ---- */

TEST(Route_OfIdsOfAnyLayout_SortsByExpertTokenK) {
  enum { T = 50, K = 3, E = 7 };
  for (int layout = 0; layout < 3; ++layout) { /* i64 [T, K], i64 [K, T] and, as DeepSpeed has them, i32 [K, T] */
    int64_t ids[T * K], counts[E], order[T * K], at = 0;
    int32_t short_ids[T * K];
    test_tensor_t t;
    for (int i = 0; i < T * K; ++i) short_ids[i] = (int32_t)(ids[i] = (int64_t)((gate_random() + 1) / 2 * (E + 1)) - 1);
    tensor_of(&t, layout == 2 ? (void*)short_ids : ids, SLUICE_TYPE_INT, layout == 2 ? 32 : 64, T, K,
              layout == 0 ? K : 1, layout == 0 ? 1 : T);
    if (layout == 0) t.tensor.strides = NULL;
    assert_ok(sluice_route(&t.tensor, E, counts, NULL));
    assert_ok(sluice_route(&t.tensor, E, counts, order));
    for (int e = 0; e < E; ++e) {
      const int64_t first = at;
      for (int i = 0; i < T * K; ++i) {
        if (ids[layout == 0 ? i : i % K * T + i / K] == e) assert_int_equal(order[at++], i);
      }
      assert_int_equal(counts[e], at - first);
    }
    for (; at < T * K; ++at) assert_int_equal(order[at], -1);
  }
}

static void assert_refused(const sluice_tensor_t* ids, int32_t experts, int64_t* counts, const char* words) {
  int64_t order[4] = {7, 7, 7, 7};
  REFUSED(sluice_route(ids, experts, counts, order), SLUICE_E_INVALID_ARGUMENT, words);
  for (int i = 0; i < 4; ++i) assert_int_equal(order[i], 7); /* no effect */
}

TEST(Route_BadArguments_AreRefusedByName) {
  int32_t ids[4] = {0, 1, 2, 3};
  int64_t counts[4];
  float reals[4];
  test_tensor_t t, f;
  const sluice_tensor_t* good = tensor_of(&t, ids, SLUICE_TYPE_INT, 32, 2, 2, 2, 1);
  assert_refused(NULL, 4, counts, "expert_ids: tensor is NULL");
  assert_refused(good, 0, counts, "num_experts is 0");
  assert_refused(good, 4, NULL, "out_rows_per_expert");
  assert_refused(good, 3, counts, "expert_ids[1, 1] is 3");
  ids[2] = -2;
  assert_refused(good, 4, counts, "expert_ids[1, 0] is -2");
  assert_refused(REAL_2D(&f, reals, 2, 2, 2), 4, counts, "dtype is f32");
}

TEST(Route_AllocationFails_NoEffectNoLeak) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  const uint64_t live = allocator->num_live;
  int32_t ids[2] = {0, 1};
  int64_t counts[2] = {5, 5};
  test_tensor_t t;
  allocator->fail_after = 0;
  const sluice_status_t status = sluice_route(tensor_of(&t, ids, SLUICE_TYPE_INT, 32, 2, 1, 1, 1), 2, counts, NULL);
  allocator->fail_after = -1;
  assert_true(status == SLUICE_E_NO_MEMORY && counts[0] == 5 && allocator->num_live == live);
}
