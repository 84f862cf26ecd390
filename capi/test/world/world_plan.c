// SPDX-License-Identifier: Apache-2.0
/* The layer's own plan, and its rule that divides rows into chunks. */
#include "capi/test/world/world_split.h"

#include <string.h>

#define MOST_BLOCKS 64

/* Counts the rows of all ranks by block and receiving rank. */
static void count_blocks(const case_t* c, int32_t num_blocks, int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS]) {
  memset(table, 0, MOST_BLOCKS * sizeof *table);
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int32_t g = 0; g < num_blocks; ++g) {
      for (int64_t t = c->tokens[from] * g / num_blocks; t < c->tokens[from] * (g + 1) / num_blocks; ++t) {
        for (int32_t k = 0; k < c->top_k; ++k) {
          int64_t e = world_expert(c, from, t, k);
          if (e >= 0) ++table[g][world_owner(c, (int32_t)e)];
        }
      }
    }
  }
}

/* Blocks form a chunk while no rank receives more than chunk_rows. Writes this rank's rows by chunk; returns n. */
static int32_t rows_by_chunk(const case_t* c, const sluice_plan_info_t* info, int32_t rank, int64_t* rows,
                             int32_t* out_kept) {
  int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS], so_far[WORLD_MAX_RANKS] = {0};
  int32_t most_blocks = (info->num_blocks + info->num_chunks - 1) / info->num_chunks, n = 0;
  count_blocks(c, info->num_blocks, table);
  *out_kept = 0;
  for (int32_t first = 0, end = 0; first < info->num_blocks; first = end, ++n) {
    int64_t sums[WORLD_MAX_RANKS] = {0}, most = 0;
    for (end = first; end < info->num_blocks && end - first < most_blocks; ++end) {
      most = 0;
      for (int32_t w = 0; w < c->world_size; ++w)
        most = sums[w] + table[end][w] > most ? sums[w] + table[end][w] : most;
      if (most > info->chunk_rows && end > first) break;
      for (int32_t w = 0; w < c->world_size; ++w) sums[w] += table[end][w];
    }
    rows[n] = sums[rank], most = 0;
    for (int32_t w = 0; w < c->world_size; ++w) {
      so_far[w] += sums[w];
      if (so_far[w] > most) most = so_far[w];
    }
    if (most <= info->kept_rows) *out_kept = n + 1;
  }
  return n;
}

sluice_status_t world_use_plan(rank_t* r, sluice_moe_t* moe) {
  const case_t* c = r->c;
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  int64_t rows[256], sent = 0;
  int32_t kept = 0;
  uint64_t step = 0, outstanding = (uint64_t)c->plan->max_outstanding;
  sluice_status_t status = sluice_plan_create(moe, c->plan, &plan);
  if (status == SLUICE_OK) status = sluice_moe_use_plan(moe, plan);
  if (status == SLUICE_OK) status = sluice_plan_get_info(plan, &info);
  if (status == SLUICE_OK) {
    int32_t n = rows_by_chunk(c, &info, r->rank, rows, &kept);
    for (int64_t t = 0; t < c->tokens[r->rank]; ++t) {
      for (int32_t k = 0; k < c->top_k; ++k) sent += world_expert(c, r->rank, t, k) >= 0;
    }
    status = sluice_plan_predict_step(plan, n, rows, kept, c->tokens[r->rank], sent, &step);
  }
  r->out->planned_bytes[r->rank] = info.total_bytes;
  r->out->predicted_bytes[r->rank] = info.total_bytes - outstanding * info.step_bytes + outstanding * step;
  r->out->lent_bytes[r->rank] = info.gemm_bytes;
  sluice_plan_destroy(plan);
  return status;
}
