// SPDX-License-Identifier: Apache-2.0
/* The placement part of DeepSeek's EPLB without replicas, reimplemented from its published description: places experts
 * by load, heaviest first, each on the least loaded rank with a free place. It ignores the current placement. Here
 * ranks are then renamed so that the fewest experts move, which EPLB does not do. */
#pragma once

#include <stdint.h>

/* inout_rank: [num_experts] the current ranks, then the new ones; the same number on each rank. out_load: of the
 * fullest rank. Returns the number of experts that move. */
int32_t balancer_place(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* inout_rank,
                       uint64_t* out_load);
