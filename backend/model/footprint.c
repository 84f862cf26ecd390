// SPDX-License-Identifier: Apache-2.0
#include "backend/model/footprint.h"

void sluice_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts, int32_t num_chunks,
                      sluice_paper_footprint_t* out) {
  double b = (double)rows, m = (double)model_width, h = (double)hidden_width, n = num_chunks;
  out->states = 4 * (num_experts * m + 2 * h * m);
  out->activations = 4 * b * m + b * h;
  out->temporaries = b * m + b * h;
  out->pipelined_temporaries = 4 * b * m + b * h;
  /* One chunk shares nothing. The printed equation counts two buffers of T_DI and T_DO, and would be negative. */
  out->saving = num_chunks == 1 ? 0 : b * (2 * m * (n - 2) / n + h * (n - 1) / n);
  out->saved_share = 2 * out->saving / (out->states + out->activations + out->pipelined_temporaries);
}
