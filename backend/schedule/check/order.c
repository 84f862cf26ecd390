// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/check/order.h"

int sluice_order_op(const sluice_template_t* t, int32_t index, sluice_before_t* before, int32_t* last_of_lane,
                    int32_t* out_dep) {
  const sluice_op_t* op = &t->ops[index];
  int32_t* own = before[index];
  int32_t previous = last_of_lane[op->lane];
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) own[lane] = previous >= 0 ? before[previous][lane] : -1;
  own[op->lane] = previous;
  for (int32_t d = 0; d < op->num_deps; ++d) {
    int32_t dep = t->deps[op->first_dep + d];
    *out_dep = dep;
    if (dep < 0 || dep >= index) return 0;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      if (before[dep][lane] > own[lane]) own[lane] = before[dep][lane];
    }
    int32_t lane = t->ops[dep].lane;
    if (dep > own[lane]) own[lane] = dep;
  }
  last_of_lane[op->lane] = index;
  return 1;
}

void sluice_order_all(const sluice_template_t* t, sluice_before_t* before) {
  int32_t last_of_lane[SLUICE_NUM_LANES], dep = 0;
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) last_of_lane[lane] = -1;
  for (int32_t i = 0; i < t->num_ops; ++i) (void)sluice_order_op(t, i, before, last_of_lane, &dep);
}
