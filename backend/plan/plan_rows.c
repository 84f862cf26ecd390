// SPDX-License-Identifier: Apache-2.0
/* The capacities of a plan in rows. */
#include "backend/plan/plan_sizes.h"

/* Chunks may receive a quarter more rows than under balanced routing before they get fewer blocks. */
#define SLACK_NUMERATOR   5
#define SLACK_DENOMINATOR 4

/* Returns the maximum number of routes of one token to one rank, if its ids are distinct. */
static int64_t routes_per_rank(const sluice_plan_problem_t* problem) {
  return sluice_min(problem->shape.config.top_k, problem->shape.most_local);
}

int64_t sluice_plan_balanced_rows(const sluice_plan_problem_t* problem, int64_t max_tokens) {
  return sluice_ceil_div(
      max_tokens * problem->shape.world_size * problem->shape.config.top_k * problem->shape.most_local,
      problem->shape.config.num_experts);
}

int64_t sluice_plan_with_slack(int64_t rows, int64_t parts) {
  return sluice_ceil_div(rows * SLACK_NUMERATOR, SLACK_DENOMINATOR * parts);
}

/* With a capacity every chunk has the same rows on every rank: there are no blocks and no fallback chunks. */
static void set_fixed_rows(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan) {
  plan->num_blocks = plan->num_chunks = plan->max_chunks = problem->shape.config.num_chunks;
  plan->blocks_per_chunk = 1;
  plan->chunk_rows = problem->shape.world_size * sluice_shape_capacity(&problem->shape) * problem->shape.most_local;
  plan->worst_rows = plan->num_chunks * plan->chunk_rows;
}

void sluice_plan_set_capacities(const sluice_plan_problem_t* problem, int32_t n, sluice_plan_data_t* plan) {
  if (sluice_shape_capacity(&problem->shape) > 0) {
    set_fixed_rows(problem, plan);
    return;
  }
  int64_t tokens = plan->inputs.max_tokens, w = problem->shape.world_size, routes = routes_per_rank(problem);
  int64_t balanced = sluice_plan_balanced_rows(problem, tokens);
  plan->num_blocks = problem->shape.on_device_memory ? SLUICE_PLAN_BLOCKS
                                                     : (int32_t)sluice_max(1, sluice_min(SLUICE_PLAN_BLOCKS, tokens));
  plan->num_chunks = n;
  plan->blocks_per_chunk = (int32_t)sluice_ceil_div(plan->num_blocks, n);
  plan->worst_rows = sluice_plan_any_rows(problem, plan);
  int64_t one_block = w * sluice_ceil_div(tokens, plan->num_blocks) * routes;
  int64_t wanted = sluice_plan_with_slack(balanced, n);
  plan->chunk_rows = sluice_min(plan->worst_rows, sluice_max(one_block, wanted));
  plan->max_chunks = n == 1 && plan->chunk_rows == plan->worst_rows ? 1 : plan->num_blocks;
}

/* Returns the maximum number of tokens of one chunk on any rank. */
static int64_t chunk_tokens(const sluice_plan_data_t* plan) {
  int64_t tokens = plan->inputs.max_tokens;
  return sluice_min(tokens, plan->blocks_per_chunk * sluice_ceil_div(tokens, plan->num_blocks));
}

int64_t sluice_plan_sent_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (sluice_shape_capacity(&problem->shape) > 0)
    return sluice_shape_capacity(&problem->shape) * problem->shape.config.num_experts;
  return chunk_tokens(plan) * problem->shape.config.top_k;
}

int64_t sluice_plan_arriving_token_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_min(plan->chunk_rows, problem->shape.world_size * chunk_tokens(plan));
}

int64_t sluice_plan_travelling_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (!sluice_shape_is_deduplicated(&problem->shape))
    return sluice_max(plan->chunk_rows, sluice_plan_sent_rows(problem, plan));
  const sluice_shape_t* shape = &problem->shape;
  const int two_levels = sluice_shape_has_two_levels(shape);
  const int64_t places = two_levels ? shape->world_size / shape->ranks_per_node : shape->world_size;
  const int64_t sent = sluice_min(places, shape->config.top_k) * chunk_tokens(plan);
  const int64_t arriving = sluice_max(sluice_plan_arriving_token_copies(problem, plan), sent);
  return two_levels ? sluice_max(arriving, sluice_plan_forwards(problem, plan)) : arriving;
}

/* Returns the rows for all tokens with this rank's local index, each once to every rank of the node that has experts of
 * it. Chunks are cut so that no rank forwards more rows than it may receive. Node copies from other nodes are not more,
 * since each is forwarded. */
int64_t sluice_plan_forwards(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const sluice_shape_t* shape = &problem->shape;
  const int64_t tokens = shape->world_size / shape->ranks_per_node * chunk_tokens(plan);
  return sluice_min(plan->chunk_rows, tokens * sluice_min(shape->ranks_per_node, shape->config.top_k));
}

int64_t sluice_plan_any_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return problem->shape.world_size * plan->inputs.max_tokens * problem->shape.config.top_k;
}
