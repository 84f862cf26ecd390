// SPDX-License-Identifier: Apache-2.0
/* Adam in host memory: errors against f64, and equal bits of all kernels. */
#include <math.h>

#include "backend/base/dtype.h"
#include "backend/base/test/fake_pool.h"
#include "backend/optim/adam_step.h"
#include "third_party/bazel/test.h"

/* ---- data ---- */

enum { COUNT = 100003 }; /* four pieces of work, the last of odd length */

typedef struct memory_s {
  float *p, *m, *v, *g;
  uint16_t *half_g, *half_p;
} memory_t;

static uint64_t random_state;
static double uniform(void) { /* in (-1, 1) */
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (double)(int64_t)(random_state >> 11) / 4503599627370496.0 - 1.0;
}

static void* zeros(size_t count, size_t bytes) {
  void* data = calloc(count, bytes);
  assert_non_null(data);
  return data;
}

/* Parameters in (-1, 1), moments of magnitudes that occur in training, gradients over ten orders of magnitude. */
static memory_t memory_of(int64_t count, int32_t dtype, uint64_t seed) {
  random_state = seed;
  const size_t n = (size_t)count;
  memory_t a = {zeros(n, 4), zeros(n, 4), zeros(n, 4), zeros(n, 4), zeros(n, 2), zeros(n, 2)};
  for (int64_t i = 0; i < count; ++i) {
    a.p[i] = (float)uniform();
    a.m[i] = (float)(uniform() * pow(10.0, 4.0 * uniform() - 4.0));
    a.v[i] = (float)fabs(uniform() * pow(10.0, 6.0 * uniform() - 6.0));
    a.g[i] = (float)(uniform() * pow(10.0, 5.0 * uniform() - 3.0));
    a.half_g[i] = dtype == SLUICE_DTYPE_BF16 ? sluice_f32_to_bf16(a.g[i]) : sluice_f32_to_f16(a.g[i]);
  }
  return a;
}

static void release(memory_t* a) { free(a->p), free(a->m), free(a->v), free(a->g), free(a->half_g), free(a->half_p); }

static void expect_same(const memory_t* a, const memory_t* b) {
  assert_memory_equal(a->p, b->p, COUNT * 4);
  assert_memory_equal(a->m, b->m, COUNT * 4);
  assert_memory_equal(a->v, b->v, COUNT * 4);
  assert_memory_equal(a->half_p, b->half_p, COUNT * 2);
}

static sluice_adam_tensor_t tensor_of(const memory_t* a, int64_t count, int32_t dtype, int64_t step) {
  const int is_half = dtype != SLUICE_DTYPE_F32;
  return (sluice_adam_tensor_t){
      .count = count,
      .step = step,
      .param = is_half ? (void*)a->half_p : a->p,
      .master = is_half ? a->p : NULL,
      .grad = is_half ? (const void*)a->half_g : a->g,
      .exp_avg = a->m,
      .exp_avg_sq = a->v,
      .param_dtype = dtype,
      .grad_dtype = dtype,
  };
}

static const sluice_adam_rule_t adamw = {.lr = 1e-3,
                                         .beta1 = 0.9,
                                         .beta2 = 0.999,
                                         .epsilon = 1e-8,
                                         .weight_decay = 0.1,
                                         .is_decoupled = 1,
                                         .corrects_the_bias = 1};

static sluice_threads_t no_threads;

static sluice_adam_step_t step_of(const sluice_adam_group_t* groups, int64_t num_groups) {
  return (sluice_adam_step_t){.groups = groups,
                              .num_groups = num_groups,
                              .loss_scale = 1.0,
                              .looks_first = 1,
                              .kernels = sluice_adam_plain,
                              .threads = &no_threads};
}

/* ---- numbers ---- */

static double ulp_of(double x) {
  const float f = (float)fabs(x);
  return (double)nextafterf(f, INFINITY) - (double)f;
}

static double larger(double a, double b) { return fabs(a) > fabs(b) ? fabs(a) : fabs(b); }

enum { TWO_ULP = 2 }; /* the bound in adam.h */

static void expect_near(float found, double wanted, double operand, const char* what, int64_t i) {
  if (fabs((double)found - wanted) <= TWO_ULP * ulp_of(operand)) return;
  fail_msg("%s of element %lld is %.9g, in f64 %.17g: %.2f ulp of %g", what, (long long)i, (double)found, wanted,
           fabs((double)found - wanted) / ulp_of(operand), operand);
}

/* The rules in f64, written independently of the kernels. p is computed from the m and v that the step has stored. */
static void expect_step(const sluice_adam_rule_t* rule, int64_t t, double scale, const memory_t* before,
                        const memory_t* after, int64_t i) {
  const double g0 = (double)before->g[i] * scale, p0 = before->p[i], m0 = before->m[i], v0 = before->v[i];
  const double l2 = rule->is_decoupled ? 0.0 : rule->weight_decay * p0, g = g0 + l2, summand = larger(g0, l2);
  const double m = rule->beta1 * m0 + (1.0 - rule->beta1) * g;
  const double v = rule->beta2 * v0 + (1.0 - rule->beta2) * g * g;
  const double c1 = 1.0 - pow(rule->beta1, (double)t), c2 = 1.0 - pow(rule->beta2, (double)t);
  const double kept_m = after->m[i], kept_v = after->v[i];
  const double moved = rule->lr / c1 * kept_m / (sqrt(kept_v) / sqrt(c2) + rule->epsilon);
  const double kept = rule->is_decoupled ? p0 * (1.0 - rule->lr * rule->weight_decay) : p0;
  expect_near(after->m[i], m, larger(m0, summand), "m", i);
  expect_near(after->v[i], v, larger(v0, summand * summand), "v", i);
  if (kept_v != 0.0 || rule->epsilon > 0.0) expect_near(after->p[i], kept - moved, larger(p0, moved), "p", i);
}

static void expect_rule(const sluice_adam_rule_t* rule, int64_t t, double loss_scale, const memory_t* before,
                        memory_t* after) {
  const sluice_adam_tensor_t tensor = tensor_of(after, COUNT, SLUICE_DTYPE_F32, t);
  const sluice_adam_group_t group = {.rule = *rule, .tensors = &tensor, .num_tensors = 1};
  sluice_adam_step_t step = step_of(&group, 1);
  step.loss_scale = loss_scale;
  step.kernels = sluice_adam_dispatch();
  sluice_adam_outcome_t outcome;
  assert_int_equal(sluice_adam_step(&step, &outcome), SLUICE_OK);
  for (int64_t i = 0; i < COUNT; ++i) expect_step(rule, t, 1.0 / loss_scale, before, after, i);
}

/* A random number of magnitude 2^low to 2^high; in a quarter of the cases 0, a power of two or a neighbour of one,
 * where rounding errors are largest and smallest. */
static float sharp(int low, int high) {
  const double sign = uniform() < 0.0 ? -1.0 : 1.0, power = low + (high - low) * fabs(uniform());
  switch ((int)(16.0 * fabs(uniform()))) {
    case 0: return 0.0F;
    case 1: return (float)(sign * exp2(floor(power)));
    case 2: return nextafterf((float)(sign * exp2(floor(power))), 0.0F);
    case 3: return nextafterf((float)(sign * exp2(floor(power))), (float)(2.0 * sign * exp2(floor(power))));
    default: return (float)(sign * exp2(power));
  }
}

/* Moments and gradients around 2^middle; parameters from far below their change in the step to far above. */
static void fill_sharply(memory_t* a, int middle) {
  for (int64_t i = 0; i < COUNT; ++i) {
    a->p[i] = sharp(-30, 4);
    a->m[i] = sharp(middle - 12, middle + 12);
    a->v[i] = fabsf(sharp(2 * middle - 24, 2 * middle + 24));
    a->g[i] = sharp(middle - 12, middle + 12);
  }
}

TEST(Step_FromSharpStates_IsTheRuleInF64WithinTwoUlp) {
  const double beta1[] = {0.0, 0.5, 0.9, 0.95}, beta2[] = {0.0, 0.5, 0.95, 0.999, 0.9999},
               epsilon[] = {0.0, 1e-8, 1e-15, 1.0};
  const int64_t steps[] = {1, 2, 10, 1000, 1000000};
  for (int round = 0; round < 80; ++round) {
    memory_t before = memory_of(COUNT, SLUICE_DTYPE_F32, 1), after = memory_of(COUNT, SLUICE_DTYPE_F32, 1);
    random_state = (uint64_t)round;
    const int middle = (int)(30.0 * uniform());
    fill_sharply(&before, middle);
    memcpy(after.p, before.p, COUNT * 4), memcpy(after.m, before.m, COUNT * 4);
    memcpy(after.v, before.v, COUNT * 4), memcpy(after.g, before.g, COUNT * 4);
    sluice_adam_rule_t rule = adamw;
    rule.lr = pow(10.0, -3.0 + 2.0 * uniform());
    rule.beta1 = beta1[round % 4];
    rule.beta2 = beta2[round % 5];
    rule.epsilon = epsilon[round / 4 % 4];
    rule.is_decoupled = round % 3 != 0 || rule.beta2 < 0.9;
    expect_rule(&rule, steps[round / 3 % 5], uniform() > 0.0 ? 1024.0 : 1.0, &before, &after);
    release(&before), release(&after);
  }
}

static void expect_plain_bits(sluice_adam_arithmetic_t how) {
  const sluice_adam_kernels_t* const sets[] = {sluice_adam_avx2(), sluice_adam_avx512()};
  const char* const names[] = {"avx2", "avx512"};
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&adamw, 7, 1.0 / 3.0);
  for (size_t s = 0; s < 2; ++s) {
    if (sets[s] == NULL) {
      print_message("SKIPPED: this processor has no %s\n", names[s]);
      continue;
    }
    for (size_t d = 0; d < 3; ++d) {
      memory_t plain = memory_of(COUNT, dtypes[d], 3), wide = memory_of(COUNT, dtypes[d], 3);
      const sluice_adam_tensor_t a = tensor_of(&plain, COUNT, dtypes[d], 7), b = tensor_of(&wide, COUNT, dtypes[d], 7);
      /* The starts are not aligned to vectors, and the ends are in the middle of one. */
      for (int64_t first = 0, size = 1; first < COUNT; first += size, size = size * 3 + 1) {
        const int64_t count = first + size < COUNT ? size : COUNT - first;
        sluice_adam_plain[how].update(&a, first, count, &numbers);
        sets[s][how].update(&b, first, count, &numbers);
        const sluice_adam_scan_t x = sluice_adam_plain[how].scan(a.grad, dtypes[d], first, count);
        const sluice_adam_scan_t y = sets[s][how].scan(b.grad, dtypes[d], first, count);
        assert_memory_equal(&x.sum_of_squares, &y.sum_of_squares, sizeof x.sum_of_squares);
        assert_memory_equal(&x.largest, &y.largest, sizeof x.largest);
        const sluice_adam_scan_t z = sets[s][how].look(b.grad, dtypes[d], first, count);
        assert_memory_equal(&x.largest, &z.largest, sizeof x.largest);
      }
      expect_same(&plain, &wide);
      release(&plain), release(&wide);
    }
  }
}

TEST(Kernels_OfEveryInstructionSet_GiveTheBitsOfThePlainOnes) {
  for (int how = 0; how < SLUICE_ADAM_ARITHMETICS; ++how) expect_plain_bits((sluice_adam_arithmetic_t)how);
}

/* A bad value at any place of a tensor, in whole vectors and in the rest after them. */
TEST(Look_OneGradientIsNoNumber_FindsIt) {
  enum { FEW = 300 };
  const sluice_adam_kernels_t* const sets[] = {sluice_adam_plain, sluice_adam_avx2(), sluice_adam_avx512()};
  const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
  float g[FEW];
  for (size_t s = 0; s < sizeof sets / sizeof *sets; ++s) {
    for (int64_t i = 0; i < FEW && sets[s] != NULL; ++i) {
      for (int64_t j = 0; j < FEW; ++j) g[j] = -(float)j;
      assert_float_equal(sets[s][SLUICE_ADAM_ROUNDED].look(g, SLUICE_DTYPE_F32, 0, i + 1).largest, (float)i, 0.0F);
      g[i] = bad[i % 4];
      assert_true(isinf(sets[s][SLUICE_ADAM_ROUNDED].look(g, SLUICE_DTYPE_F32, 0, FEW).largest));
    }
  }
}

/* ---- the ends of the range ---- */

typedef struct end_s {
  float p, m, v, g;                   /* before the step */
  float wanted_p, wanted_m, wanted_v; /* the result of torch in f32 */
  float wanted_p_of_adam;             /* with weight_decay 0 */
  double epsilon;
} end_t;

/* beta1 0.5, beta2 0.75, lr 1/8, weight decay 1/2, no bias correction: finite results are exact. */
static const end_t ends[] = {
    /* p, m, v, g */
    {1.0F, 0.0F, 0.0F, 0x1p+70F, 0.9375F, 0x1p+69F, INFINITY, 1.0F, 1e-8},
    {1.0F, 0.0F, 0.0F, -0x1p+127F, 0.9375F, -0x1p+126F, INFINITY, 1.0F, 1e-8},
    {1.0F, 0x1p+69F, INFINITY, 1.0F, 0.9375F, 0x1p+68F, INFINITY, 1.0F, 1e-8},
    {1.0F, 0.0F, INFINITY, 0.0F, 0.9375F, 0.0F, INFINITY, 1.0F, 1e-8},
    {-INFINITY, 0.0F, 0.0F, 0.0F, -INFINITY, 0.0F, 0.0F, -INFINITY, 1e-8},
    {INFINITY, 2.0F, 1.0F, 2.0F, INFINITY, 2.0F, 1.75F, INFINITY, 1e-8},
    {INFINITY, 0.0F, 0.0F, 0x1p+70F, INFINITY, 0x1p+69F, INFINITY, INFINITY, 1e-8},
    {0.0F, 0.0F, 0.0F, 0x1p-140F, -0x1p-144F, 0x1p-141F, 0.0F, -0x1p-144F, 1.0},
    {1.0F, 0.0F, 0.0F, 0x1p-140F, -INFINITY, 0x1p-141F, 0.0F, -INFINITY, 0.0},
    {1.0F, 0.0F, 0.0F, 0.0F, NAN, 0.0F, 0.0F, NAN, 0.0},
    {1.0F, 0.0F, 0.0F, 0.0F, 0.9375F, 0.0F, 0.0F, 1.0F, 1e-45},
    {1.0F, NAN, 1.0F, 0.0F, NAN, NAN, 0.75F, NAN, 1e-8},
    {1.0F, 0.0F, 0.0F, INFINITY, NAN, INFINITY, INFINITY, NAN, 1e-8},
    {NAN, 0.0F, 0.0F, 0.0F, NAN, 0.0F, 0.0F, NAN, 1e-8},
};

static int is_same(float found, float wanted) { return found == wanted || (isnan(found) && isnan(wanted)); }

static void expect_end(const sluice_adam_kernels_t* kernels, const end_t* end, double weight_decay, float wanted_p,
                       int64_t at) {
  enum { MANY = 1500 };
  float p[MANY], m[MANY], v[MANY], g[MANY], q[MANY], mq[MANY], vq[MANY];
  for (int64_t i = 0; i < MANY; ++i) p[i] = q[i] = 0.5F, m[i] = mq[i] = 0.25F, v[i] = vq[i] = 1.0F, g[i] = 0.125F;
  sluice_adam_rule_t rule = {0.125, 0.5, 0.75, end->epsilon, weight_decay, 1, 0, 0};
  const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&rule, 1, 1.0);
  const sluice_adam_tensor_t others = {MANY, 1, q, NULL, g, mq, vq, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32};
  kernels->update(&others, 0, MANY, &numbers);
  p[at] = end->p, m[at] = end->m, v[at] = end->v, g[at] = end->g;
  const sluice_adam_tensor_t tensor = {MANY, 1, p, NULL, g, m, v, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32};
  kernels->update(&tensor, 0, MANY, &numbers);
  if (!is_same(p[at], wanted_p) || !is_same(m[at], end->wanted_m) || !is_same(v[at], end->wanted_v))
    fail_msg("%s, weight decay %g, row %d at %d: p %g m %g v %g", kernels->name, weight_decay, (int)(end - ends),
             (int)at, (double)p[at], (double)m[at], (double)v[at]);
  p[at] = q[at], m[at] = mq[at], v[at] = vq[at];
  assert_memory_equal(p, q, sizeof p); /* the other elements are as they are without this one */
  assert_memory_equal(m, mq, sizeof m);
  assert_memory_equal(v, vq, sizeof v);
}

TEST(Update_AtTheEndsOfTheRange_IsThatOfTorch) {
  const sluice_adam_kernels_t* const sets[] = {sluice_adam_plain, sluice_adam_avx2(), sluice_adam_avx512()};
  const int64_t places[] = {0, 63, 64, 511, 512, 1499};
  for (size_t s = 0; s < 3; ++s) {
    for (size_t e = 0; sets[s] != NULL && e < sizeof ends / sizeof ends[0]; ++e) {
      for (size_t i = 0; i < sizeof places / sizeof places[0]; ++i) {
        expect_end(sets[s], &ends[e], 0.5, ends[e].wanted_p, places[i]);
        expect_end(sets[s], &ends[e], 0.0, ends[e].wanted_p_of_adam, places[i]);
      }
    }
  }
}

/* Parameters in bf16, with a master and without: a bf16 gradient may be as large as an f32 one. */
TEST(Update_OfHalfParametersAtTheEndsOfTheRange_StaysFinite) {
  const sluice_adam_kernels_t* const sets[] = {sluice_adam_plain, sluice_adam_avx2(), sluice_adam_avx512()};
  const sluice_adam_rule_t rule = {0.125, 0.5, 0.75, 1e-8, 0.5, 1, 0, 0};
  const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&rule, 1, 1.0);
  for (size_t s = 0; s < 3; ++s) {
    for (int with_master = 0; sets[s] != NULL && with_master < 2; ++with_master) {
      float master[] = {1.0F, -INFINITY}, m[2] = {0.0F}, v[2] = {0.0F};
      uint16_t p[] = {sluice_f32_to_bf16(1.0F), sluice_f32_to_bf16(-INFINITY)};
      const uint16_t g[] = {sluice_f32_to_bf16(0x1p+100F), 0};
      const sluice_adam_tensor_t tensor = {
          2, 1, p, with_master ? master : NULL, g, m, v, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16};
      sets[s]->update(&tensor, 0, 2, &numbers);
      sets[s]->update(&tensor, 0, 2, &numbers);
      assert_int_equal(p[0], sluice_f32_to_bf16(0.87890625F)); /* (15/16)^2 */
      assert_int_equal(p[1], sluice_f32_to_bf16(-INFINITY));
    }
  }
}

TEST(Step_OfHalfParameters_WritesTheMasterRoundedToNearest) {
  const int32_t dtypes[] = {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  for (size_t d = 0; d < 2; ++d) {
    memory_t a = memory_of(COUNT, dtypes[d], 5);
    const sluice_adam_tensor_t tensor = tensor_of(&a, COUNT, dtypes[d], 3);
    const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&adamw, 3, 1.0);
    sluice_adam_dispatch()->update(&tensor, 0, COUNT, &numbers);
    for (int64_t i = 0; i < COUNT; ++i) {
      const uint16_t wanted = d == 0 ? sluice_f32_to_bf16(a.p[i]) : sluice_f32_to_f16(a.p[i]);
      assert_int_equal(a.half_p[i], wanted);
    }
    release(&a);
  }
}

TEST(Step_OfHalfParametersWithoutMaster_IsThatOfAMasterThatStartsAtThem) {
  const int32_t dtypes[] = {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  for (size_t d = 0; d < 2; ++d) {
    memory_t a = memory_of(COUNT, dtypes[d], 7), b = memory_of(COUNT, dtypes[d], 7);
    for (int64_t i = 0; i < COUNT; ++i) {
      a.half_p[i] = b.half_p[i] = d == 0 ? sluice_f32_to_bf16(a.p[i]) : sluice_f32_to_f16(a.p[i]);
      b.p[i] = d == 0 ? sluice_bf16_to_f32(b.half_p[i]) : sluice_f16_to_f32(b.half_p[i]);
    }
    sluice_adam_tensor_t without = tensor_of(&a, COUNT, dtypes[d], 3), with = tensor_of(&b, COUNT, dtypes[d], 3);
    without.master = NULL;
    const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&adamw, 3, 1.0);
    sluice_adam_dispatch()->update(&without, 0, COUNT, &numbers);
    sluice_adam_dispatch()->update(&with, 0, COUNT, &numbers);
    assert_memory_equal(a.half_p, b.half_p, COUNT * 2);
    assert_memory_equal(a.m, b.m, COUNT * 4);
    assert_memory_equal(a.v, b.v, COUNT * 4);
    release(&a), release(&b);
  }
}

/* ---- norms, threads ---- */

TEST(Step_ThatClips_IsThatOfGradientsScaledDown) {
  memory_t clipped = memory_of(COUNT, SLUICE_DTYPE_F32, 6), before = memory_of(COUNT, SLUICE_DTYPE_F32, 6);
  double squares = 0.0;
  for (int64_t i = 0; i < COUNT; ++i) squares += (double)before.g[i] * (double)before.g[i];
  const sluice_adam_tensor_t tensor = tensor_of(&clipped, COUNT, SLUICE_DTYPE_F32, 5);
  const sluice_adam_group_t group = {adamw, &tensor, 1};
  sluice_adam_step_t step = step_of(&group, 1);
  step.loss_scale = 1024.0;
  step.max_norm = 1e-3;
  sluice_adam_outcome_t outcome;
  assert_int_equal(sluice_adam_step(&step, &outcome), SLUICE_OK);
  const double norm = sqrt(squares) / 1024.0;
  assert_true(fabs(outcome.norm / norm - 1.0) < 1e-12);
  assert_true(norm > step.max_norm);
  for (int64_t i = 0; i < COUNT; ++i) before.g[i] = (float)((double)before.g[i] * (1e-3 / (norm + 1e-6) / 1024.0));
  for (int64_t i = 0; i < COUNT; ++i) {
    /* The kernel rounds the factor to f32, this test each scaled gradient. */
    const double g = before.g[i], m = 0.9 * (double)before.m[i] + 0.1 * g;
    assert_true(fabs((double)clipped.m[i] - m) <= 2.0 * ulp_of(larger(before.m[i], g)));
  }
  release(&clipped), release(&before);
}

TEST(Step_WithAnyNumberOfThreads_HasTheSameBits) {
  memory_t single = memory_of(COUNT, SLUICE_DTYPE_F16, 4);
  double norm = 0.0;
  for (pool_max = 1; pool_max <= 4; ++pool_max) {
    memory_t a = memory_of(COUNT, SLUICE_DTYPE_F16, 4);
    memory_t* at = pool_max == 1 ? &single : &a;
    /* Two tensors of one group; the second starts in the middle of a vector. */
    sluice_adam_tensor_t tensors[] = {tensor_of(at, 40001, SLUICE_DTYPE_F16, 2),
                                      tensor_of(at, COUNT - 40001, SLUICE_DTYPE_F16, 2)};
    tensors[1].master += 40001, tensors[1].exp_avg += 40001, tensors[1].exp_avg_sq += 40001;
    tensors[1].grad = at->half_g + 40001;
    tensors[1].param = at->half_p + 40001;
    const sluice_adam_group_t group = {adamw, tensors, 2};
    sluice_adam_step_t step = step_of(&group, 1);
    step.kernels = sluice_adam_dispatch();
    step.threads = &fake_pool;
    step.max_norm = 0.01;
    sluice_adam_outcome_t outcome;
    assert_int_equal(sluice_adam_step(&step, &outcome), SLUICE_OK);
    if (pool_max == 1) norm = outcome.norm;
    assert_memory_equal(&norm, &outcome.norm, sizeof norm);
    if (pool_max > 1) assert_int_equal(pool_asked, pool_max);
    expect_same(&single, at);
    release(&a);
  }
  release(&single);
}
