// SPDX-License-Identifier: Apache-2.0
/* MPipeMoE equations 1 to 6: the device memory of one layer, in elements. */
#pragma once

#include "sluice/plan.h"

/* rows: B, the rows of one pass; the other sizes are M, H, E and n. sluice_paper_footprint_t names the equation of each
 * member. */
void sluice_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts, int32_t num_chunks,
                      sluice_paper_footprint_t* out);
