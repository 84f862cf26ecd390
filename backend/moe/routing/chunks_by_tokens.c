// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/chunks_by_tokens.h"

#include <string.h>

#include "backend/moe/layer/placement.h"
#include "backend/moe/routing/route_ids.h"

static int64_t block_start(int64_t num_tokens, int32_t block, int32_t num_blocks) {
  return num_tokens * block / num_blocks;
}

sluice_status_t sluice_chunks_by_tokens_count(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                              int32_t num_blocks, int64_t* table) {
  sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  int64_t num_tokens = expert_ids->shape[0];
  int32_t w = moe->context->world_size;
  memset(table, 0, (size_t)num_blocks * (size_t)w * sizeof *table);
  for (int32_t g = 0; g < num_blocks; ++g) {
    int64_t end = block_start(num_tokens, g + 1, num_blocks);
    for (int64_t t = block_start(num_tokens, g, num_blocks); t < end; ++t) {
      for (int32_t k = 0; k < moe->shape.config.top_k; ++k) {
        int32_t place = 0;
        SLUICE_TRY(sluice_place_of_route(moe, &reader, t, k, &place));
        if (place >= 0) ++table[(int64_t)g * w + sluice_rank_of_position(moe->first_position, w, place)];
      }
    }
  }
  return SLUICE_OK;
}

void sluice_chunks_by_tokens_add(const sluice_moe_t* moe, const int32_t* counts, int32_t num_blocks, int64_t* table) {
  int32_t w = moe->context->world_size, num_experts = moe->shape.config.num_experts;
  memset(table, 0, (size_t)num_blocks * (size_t)w * sizeof *table);
  for (int32_t g = 0; g < num_blocks; ++g) {
    for (int32_t r = 0; r < w; ++r) {
      for (int32_t p = moe->first_position[r]; p < moe->first_position[r + 1]; ++p) {
        table[(int64_t)g * w + r] += counts[(int64_t)g * num_experts + p];
      }
    }
  }
}

void sluice_chunks_by_tokens_count_forwards(const sluice_moe_t* moe, int32_t num_blocks, int64_t* table) {
  const int32_t w = moe->context->world_size, per_node = moe->shape.ranks_per_node;
  int64_t* through = table + (int64_t)num_blocks * w;
  memset(through, 0, (size_t)num_blocks * (size_t)w * sizeof *through);
  for (int32_t g = 0; g < num_blocks; ++g) {
    for (int32_t r = 0; r < w; ++r) {
      const int32_t by = r / per_node * per_node + moe->context->rank % per_node;
      through[(int64_t)g * w + by] += table[(int64_t)g * w + r];
    }
  }
}

/* The most rows of blocks [first, end) that any rank receives. */
static int64_t most_rows(const int64_t* table, int32_t world_size, int32_t first, int32_t end) {
  int64_t most = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    int64_t rows = 0;
    for (int32_t g = first; g < end; ++g) rows += table[(int64_t)g * world_size + r];
    if (rows > most) most = rows;
  }
  return most;
}

/* The most rows that any rank receives or forwards. */
static int64_t most_moved(const sluice_plan_data_t* plan, const int64_t* table, int32_t world_size, int32_t first,
                          int32_t end) {
  const int64_t received = most_rows(table, world_size, first, end);
  if (!plan->two_levels) return received;
  const int64_t passed_on = most_rows(table + (int64_t)plan->num_blocks * world_size, world_size, first, end);
  return passed_on > received ? passed_on : received;
}

sluice_status_t sluice_chunks_by_tokens_make(const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                                             const int64_t* table, sluice_chunks_by_tokens_t* cut) {
  int32_t w = moe->context->world_size;
  memset(cut, 0, sizeof *cut);
  for (int32_t g = 0; g < plan->num_blocks; ++g) {
    int64_t alone = most_moved(plan, table, w, g, g + 1);
    if (alone > plan->chunk_rows) {
      return SLUICE_FAIL(
          SLUICE_E_OVER_BUDGET,
          "layer %d: block %d of %d sends %lld rows to one rank%s, more than the %lld that a chunk may have "
          "under this plan (do ids repeat within a token?); ask for fewer chunks or give a larger memory budget",
          moe->shape.config.layer_id, g, plan->num_blocks, (long long)alone, plan->two_levels ? ", or through one" : "",
          (long long)plan->chunk_rows);
    }
    int32_t first = cut->first_block[cut->num_chunks];
    int full = g - first == plan->blocks_per_chunk || most_moved(plan, table, w, first, g + 1) > plan->chunk_rows;
    if (full) cut->first_block[++cut->num_chunks] = g;
  }
  cut->first_block[++cut->num_chunks] = plan->num_blocks;
  for (int32_t i = 0; i < cut->num_chunks; ++i) {
    cut->is_kept[i] = most_rows(table, w, 0, cut->first_block[i + 1]) <= plan->kept_rows;
  }
  return SLUICE_OK;
}

void sluice_chunks_by_tokens_of(const sluice_chunks_by_tokens_t* cut, int32_t num_blocks, int64_t num_tokens,
                                int64_t* first_token) {
  for (int32_t i = 0; i <= cut->num_chunks; ++i) {
    first_token[i] = block_start(num_tokens, cut->first_block[i], num_blocks);
  }
}
