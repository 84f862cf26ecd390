// SPDX-License-Identifier: Apache-2.0
/* Random loads of experts from a seed, after the workloads W0 to W7 of Megatron-LM's pull request 7488, each of which
 * isolates one effect. That pull request defines them by row; these are sums of rows by expert, reimplemented from its
 * table. */
#pragma once

#include <stdint.h>

typedef struct random_s {
  uint64_t state;
} random_t;

double random_unit(random_t* random); /* [0, 1) */
int32_t random_below(random_t* random, int32_t count);

enum {
  W0_BALANCED,
  W1_HOT_EXPERT_SET,     /* some experts, on any ranks */
  W2_HOT_RANK,           /* all experts of one rank, at the heat of W1 */
  W3_SPREAD_HOT_EXPERTS, /* the same heat on one expert of each of several ranks */
  W4_SOURCE_RAGGED,      /* sources with many rows prefer their own experts */
  W5_ZERO_EXPERT_RANK,   /* experts and whole ranks without a row */
  W6_ROTATING_HOTSPOT,   /* the hot set moves with each step */
  W7_BURST,              /* balanced except for hot steps */
  NUM_WORKLOADS
};

/* out_loads [num_experts], num_experts / num_ranks of them on each rank, contiguous. */
void workload_draw(int32_t workload, uint64_t seed, int32_t step, int32_t num_experts, int32_t num_ranks,
                   uint64_t* out_loads);
