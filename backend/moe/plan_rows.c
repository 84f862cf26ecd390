/* Ceilings of a plan in rows. */
#include "backend/moe/plan_sizes.h"

/* Chunks may receive a quarter more rows than balanced routing gives them before they are cut shorter. */
#define SLACK_NUMERATOR   5
#define SLACK_DENOMINATOR 4

int32_t sluice_plan_most_local(const sluice_moe_t* moe) {
  int32_t most = 0;
  for (int32_t r = 0; r < moe->context->world_size; ++r) {
    int32_t experts = sluice_layer_experts_of(moe, r);
    if (experts > most) most = experts;
  }
  return most;
}

/* Routes of one token that one rank can own while its ids differ. */
static int64_t routes_per_rank(const sluice_moe_t* moe) {
  return sluice_min_i64(moe->config.top_k, sluice_plan_most_local(moe));
}

int64_t sluice_plan_balanced_rows(const sluice_moe_t* moe, int64_t max_tokens) {
  return sluice_ceil_div(max_tokens * moe->context->world_size * moe->config.top_k * sluice_plan_most_local(moe),
                         moe->config.num_experts);
}

int64_t sluice_plan_with_slack(int64_t rows, int64_t parts) {
  return sluice_ceil_div(rows * SLACK_NUMERATOR, SLACK_DENOMINATOR * parts);
}

/* Under ceilings every chunk has the same rows on every rank: nothing is cut, and nothing needs to fall back. */
static void set_fixed_rows(const sluice_moe_t* moe, sluice_plan_data_t* plan) {
  plan->num_blocks = plan->num_chunks = plan->max_chunks = moe->config.num_chunks;
  plan->blocks_per_chunk = 1;
  plan->chunk_rows = moe->context->world_size * sluice_layer_ceiling(moe) * sluice_plan_most_local(moe);
  plan->worst_rows = plan->num_chunks * plan->chunk_rows;
}

void sluice_plan_set_ceilings(const sluice_moe_t* moe, int32_t n, sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) {
    set_fixed_rows(moe, plan);
    return;
  }
  int64_t tokens = plan->inputs.max_tokens, w = moe->context->world_size, routes = routes_per_rank(moe);
  int64_t balanced = sluice_plan_balanced_rows(moe, tokens);
  plan->num_blocks =
      sluice_is_far(moe) ? SLUICE_PLAN_BLOCKS : (int32_t)sluice_max_i64(1, sluice_min_i64(SLUICE_PLAN_BLOCKS, tokens));
  plan->num_chunks = n;
  plan->blocks_per_chunk = (int32_t)sluice_ceil_div(plan->num_blocks, n);
  plan->worst_rows = sluice_plan_any_rows(moe, plan);
  int64_t one_block = w * sluice_ceil_div(tokens, plan->num_blocks) * routes;
  int64_t wanted = sluice_plan_with_slack(balanced, n);
  plan->chunk_rows = sluice_min_i64(plan->worst_rows, sluice_max_i64(one_block, wanted));
  plan->max_chunks = n == 1 && plan->chunk_rows == plan->worst_rows ? 1 : plan->num_blocks;
}

/* Tokens of one chunk on any rank. */
static int64_t chunk_tokens(const sluice_plan_data_t* plan) {
  int64_t tokens = plan->inputs.max_tokens;
  return sluice_min_i64(tokens, plan->blocks_per_chunk * sluice_ceil_div(tokens, plan->num_blocks));
}

int64_t sluice_plan_sent_rows(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) return sluice_layer_ceiling(moe) * moe->config.num_experts;
  return chunk_tokens(plan) * moe->config.top_k;
}

int64_t sluice_plan_arriving_parcels(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_min_i64(plan->chunk_rows, moe->context->world_size * chunk_tokens(plan));
}

int64_t sluice_plan_travelling_rows(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (!sluice_layer_is_deduplicated(moe)) return sluice_max_i64(plan->chunk_rows, sluice_plan_sent_rows(moe, plan));
  int64_t ranks = sluice_min_i64(moe->context->world_size, moe->config.top_k);
  return sluice_max_i64(sluice_plan_arriving_parcels(moe, plan), ranks * chunk_tokens(plan));
}

int64_t sluice_plan_any_rows(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return moe->context->world_size * plan->inputs.max_tokens * moe->config.top_k;
}
