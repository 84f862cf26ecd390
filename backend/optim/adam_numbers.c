// SPDX-License-Identifier: Apache-2.0
/* Checks the hyperparameters of Adam, and computes the constants of a step. */
#include <float.h>
#include <math.h>

#include "backend/optim/adam.h"

sluice_status_t sluice_adam_check(const sluice_adam_rule_t* rule) {
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(rule->lr) && rule->lr >= 0.0,
                            "optimizer: lr is %g; it must be finite and at least 0", rule->lr));
  SLUICE_TRY(SLUICE_REQUIRE(rule->beta1 >= 0.0 && rule->beta1 < 1.0, "optimizer: beta1 is %g; it must be in [0, 1)",
                            rule->beta1));
  SLUICE_TRY(SLUICE_REQUIRE(rule->beta2 >= 0.0 && rule->beta2 < 1.0, "optimizer: beta2 is %g; it must be in [0, 1)",
                            rule->beta2));
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(rule->epsilon) && rule->epsilon >= 0.0,
                            "optimizer: epsilon is %g; it must be finite and at least 0", rule->epsilon));
  return SLUICE_REQUIRE(isfinite(rule->weight_decay) && rule->weight_decay >= 0.0,
                        "optimizer: weight_decay is %g; it must be finite and at least 0", rule->weight_decay);
}

sluice_adam_numbers_t sluice_adam_numbers_of(const sluice_adam_rule_t* rule, int64_t t, double grad_scale) {
  /* Computed with pow from the step number, not as a running product, so that a resumed step has the same bits. */
  const double correction1 = rule->corrects_the_bias ? 1.0 - pow(rule->beta1, (double)t) : 1.0;
  const double root2 = rule->corrects_the_bias ? sqrt(1.0 - pow(rule->beta2, (double)t)) : 1.0;
  const double step_size = rule->lr * root2 / correction1, kept = rule->epsilon * root2;
  /* The reciprocal of a smaller epsilon is infinite in f32. */
  const double epsilon = kept > 0.0 && kept < FLT_MIN ? FLT_MIN : kept;
  return (sluice_adam_numbers_t){
      .grad_scale = (float)(rule->maximizes ? -grad_scale : grad_scale),
      .l2 = rule->is_decoupled ? 0.0F : (float)rule->weight_decay,
      .one_minus_beta1 = (float)(1.0 - rule->beta1),
      .one_minus_beta2 = (float)(1.0 - rule->beta2),
      .decay = rule->is_decoupled ? (float)(rule->lr * rule->weight_decay) : 0.0F,
      .beta2 = (float)rule->beta2,
      .kept = rule->is_decoupled ? (float)(1.0 - rule->lr * rule->weight_decay) : 1.0F,
      .epsilon_high = (float)epsilon,
      .epsilon_low = (float)(epsilon - (double)(float)epsilon),
      .step_high = (float)step_size,
      .step_low = (float)(step_size - (double)(float)step_size),
  };
}
