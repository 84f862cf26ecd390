// SPDX-License-Identifier: Apache-2.0
/* unit_backward of the plain kernels in f64 against central differences of unit_forward.
 *
 * With L = sum over rows i and h of weight[i] * dact[i, h] * act[i, h]:  dpre = dL/dpre, dweight = dL/dweight, and
 * act_w = dL/d dact. A step of 1e-5 leaves about 1e-10 of truncation and rounding error; 1e-8 shows that the formulas
 * agree. */
#include <math.h>

#include "backend/device/kernels.h"
#include "third_party/bazel/test.h"

enum { R = 3, H = 19 };

static uint64_t seed = 7;
static double random_real(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return ((double)(seed >> 33) / 2147483648.0 - 0.5) * 6;
}

typedef struct {
  sluice_unit_t unit;
  double pre[R * 2 * H], dact[R * H];
  float weight[R];
} problem_t;

static double loss(const problem_t* p, double* act) {
  double pre[R * 2 * H], sum = 0;
  memcpy(pre, p->pre, sizeof pre);
  sluice_cpu_kernels_ref()->unit_forward(NULL, SLUICE_DTYPE_F64, &p->unit, R, H, pre, NULL, NULL, act);
  for (int i = 0; i < R * H; ++i) sum += (double)p->weight[i / H] * p->dact[i] * act[i];
  return sum;
}

static void check(int32_t activation, int32_t gated) {
  problem_t p = {.unit = {activation, gated, 1.702f, 1.25f, 1.0f}};
  double dpre[R * 2 * H], act_w[R * H], act[R * H], scratch[R * H];
  float dweight[R];
  int count = R * H * (gated ? 2 : 1);
  for (int i = 0; i < count; ++i) p.pre[i] = random_real();
  for (int i = 0; i < R * H; ++i) p.dact[i] = random_real();
  for (int i = 0; i < R; ++i) p.weight[i] = (float)random_real();
  sluice_cpu_kernels_ref()->unit_backward(NULL, SLUICE_DTYPE_F64, &p.unit, R, H, p.pre, p.dact, p.weight, dpre, act_w,
                                          dweight);
  for (int i = 0; i < count; ++i) {
    const double step = 1e-5;
    double x = p.pre[i];
    p.pre[i] = x + step;
    double above = loss(&p, scratch);
    p.pre[i] = x - step;
    double below = loss(&p, scratch);
    p.pre[i] = x;
    double slope = (above - below) / (2 * step);
    if (fabs(slope - dpre[i]) > 1e-8 * (10 + fabs(slope))) {
      fail_msg("activation %d, gated %d: dpre[%d] is %.12g, differences give %.12g", activation, gated, i, dpre[i],
               slope);
    }
  }
  (void)loss(&p, act);
  for (int r = 0; r < R; ++r) {
    double sum = 0; /* L is linear in the weights */
    for (int h = 0; h < H; ++h) {
      sum += p.dact[r * H + h] * act[r * H + h];
      assert_true(act_w[r * H + h] == (double)p.weight[r] * act[r * H + h]);
    }
    assert_true(fabs(sum - (double)dweight[r]) <= 1e-7 * (10 + fabs(sum))); /* dweight is f32 */
  }
}

TEST(ActivationBackward_EveryKind_MeetsDifferences) {
  for (int32_t activation = 0; activation <= SLUICE_ACTIVATION_SWIGLU; ++activation) {
    for (int32_t gated = activation == SLUICE_ACTIVATION_SWIGLU; gated <= 2; ++gated) check(activation, gated);
  }
}
