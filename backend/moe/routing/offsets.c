// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/offsets.h"

#include <limits.h>

#include "backend/base/math.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/routes.h"

static void finish_sent(sluice_binding_t* b, int32_t i) {
  const sluice_moe_t* moe = b->moe;
  int64_t* of_rank = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t row = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = row;
    for (int32_t p = moe->first_position[r]; p < moe->first_position[r + 1]; ++p) row += sluice_send_count(b, i, p);
  }
  of_rank[b->world_size] = row;
}

static void finish_received(sluice_binding_t* b, int32_t i) {
  int64_t* of_rank = b->recv_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t* rows = b->rows_of_expert + (int64_t)i * b->num_local;
  int64_t remote = 0;
  for (int32_t e = 0; e < b->num_local; ++e) rows[e] = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = remote;
    for (int32_t e = 0; e < b->num_local; ++e) {
      int64_t count = sluice_recv_count(b, r, i, e);
      rows[e] += count;
      if (r != b->moe->context->rank) remote += count;
    }
  }
  of_rank[b->world_size] = remote;
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    b->first_in_chunk[(int64_t)i * b->num_local + e] = row;
    row += rows[e];
  }
  b->first_of_chunk[i + 1] = b->first_of_chunk[i] + row;
}

sluice_status_t sluice_binding_finish(sluice_binding_t* b) {
  int32_t self = b->moe->context->rank;
  b->first_of_chunk[0] = b->first_returned[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    finish_sent(b, i);
    finish_received(b, i);
    const int64_t* sent = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
    int64_t remote_sent = sent[b->world_size] - (sent[self + 1] - sent[self]);
    int64_t remote_received = b->recv_of_rank[(int64_t)i * (b->world_size + 1) + b->world_size];
    const int64_t returned = b->chunks_by_experts ? sluice_max(remote_received, sent[b->world_size]) : 0;
    b->first_returned[i + 1] = b->first_returned[i] + returned;
    b->max_chunk_remote = sluice_max(b->max_chunk_remote, sluice_max(remote_sent, remote_received));
    b->max_chunk_sent = sluice_max(b->max_chunk_sent, sent[b->world_size]);
    b->max_chunk_rows = sluice_max(b->max_chunk_rows, b->first_of_chunk[i + 1] - b->first_of_chunk[i]);
  }
  b->num_rows = b->first_of_chunk[b->num_chunks];
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t i = 0; i < b->num_chunks; ++i) {
      b->first_in_pass[(int64_t)i * b->num_local + e] = row;
      row += b->rows_of_expert[(int64_t)i * b->num_local + e];
    }
  }
  b->routes->finish(b);
  /* Positions number the returned rows with 32 bits. */
  if (sluice_max(b->num_rows, b->first_returned[b->num_chunks]) > INT32_MAX) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: this rank would receive %lld rows; at most 2^31 are possible",
                       b->moe->shape.config.layer_id, (long long)b->num_rows);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert, sluice_binding_t* b) {
  sluice_binding_init(b, moe, 1, 0);
  SLUICE_TRY(
      sluice_arena_reset(&b->memory->binding, sluice_binding_bytes_of(&moe->shape, 1, 0, 0, 0), "offsets of a pass"));
  sluice_binding_take_offsets(b, 0);
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    if (rows_per_expert[e] < 0 || rows_per_expert[e] > INT32_MAX - row) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "layer %d: rows_per_expert[%d] is %lld; counts are not negative and sum to less "
                         "than 2^31",
                         moe->shape.config.layer_id, e, (long long)rows_per_expert[e]);
    }
    b->rows_of_expert[e] = rows_per_expert[e];
    b->first_in_chunk[e] = b->first_in_pass[e] = row;
    row += rows_per_expert[e];
  }
  b->first_of_chunk[0] = b->first_returned[0] = b->first_returned[1] = 0;
  b->first_of_chunk[1] = b->num_rows = b->max_chunk_rows = row;
  return SLUICE_OK;
}
