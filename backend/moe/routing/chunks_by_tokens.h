// SPDX-License-Identifier: Apache-2.0
/* Cuts tokens into chunks by the rows that ranks receive. Private to moe.
 *
 * Each rank counts, per block of its tokens, the rows for each destination, and with two levels also the rows that each
 * rank forwards. One all-reduce sums the table [G, W] or [2, G, W]; all ranks then make equal cuts between blocks. */
#pragma once

#include "backend/moe/layer/layer.h"
#include "backend/plan/plan.h"

typedef struct sluice_chunks_by_tokens_s {
  int32_t num_chunks;
  int32_t first_block[SLUICE_MAX_CHUNKS + 1];
  uint8_t is_kept[SLUICE_MAX_CHUNKS]; /* the chunk's rows fit kept_rows on every rank */
} sluice_chunks_by_tokens_t;

/* Counts this rank's tokens: out_table [G, W], rows per block and destination rank. Errors: INVALID_ARGUMENT naming an
 * id. */
sluice_status_t sluice_chunks_by_tokens_count(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                              int32_t num_blocks, int64_t* out_table);
/* Computes the same table from counts by place [num_blocks, E]. */
void sluice_chunks_by_tokens_add(const sluice_moe_t* moe, const int32_t* counts, int32_t num_blocks,
                                 int64_t* out_table);
/* With two levels: appends to the table [G, W] of this rank's tokens those rows by block and forwarding rank, which on
 * each node is the one with this rank's local index. */
void sluice_chunks_by_tokens_count_forwards(const sluice_moe_t* moe, int32_t num_blocks, int64_t* inout_table);
/* table: summed over all ranks; with two levels if the plan has them. Errors: OVER_BUDGET if one block exceeds
 * chunk_rows. */
sluice_status_t sluice_chunks_by_tokens_make(const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                                             const int64_t* table, sluice_chunks_by_tokens_t* out_cut);
/* First token of each chunk on a rank with num_tokens: [n + 1]. */
void sluice_chunks_by_tokens_of(const sluice_chunks_by_tokens_t* cut, int32_t num_blocks, int64_t num_tokens,
                                int64_t* out_first_token);
