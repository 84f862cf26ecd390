/* The placement part of DeepSeek's EPLB without replicas, written anew from its published description: experts by load,
 * heaviest first, each to the rank with the least that has a place. It looks at nothing that is in force; its ranks are
 * named afterwards so that fewest experts move, which it does not do itself. */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_TEST_BALANCER_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_TEST_BALANCER_H_

#include <stdint.h>

/* inout_rank: [num_experts] in force, then the new ones; equally many on each rank. out_load: of the fullest rank.
 * Returns the number of experts that move. */
int32_t balancer_place(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* inout_rank,
                       uint64_t* out_load);

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_TEST_BALANCER_H_ */
