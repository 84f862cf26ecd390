// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/chunks_by_experts.h"

#include <string.h>

#include "backend/schedule/uneven_chunks.h"

int sluice_chunks_by_experts(const sluice_moe_t* moe, int32_t num_chunks) {
  return !sluice_is_planned(moe) && sluice_shape_chunks_by_experts(&moe->shape, num_chunks);
}

/* The first row of piece `piece` of the rows for one rank: the nearest first row of an expert, if that is at most a
 * quarter of an average piece away. `counts`: rows of each of that rank's `experts`. */
static int64_t piece_start(const int64_t* counts, int32_t experts, int64_t rows, int32_t piece, int32_t num_pieces) {
  int64_t start = sluice_uneven_chunk_start(rows, piece, num_pieces), best = start,
          distance = rows / (4 * (int64_t)num_pieces);
  int64_t first = 0;
  for (int32_t e = 0; e <= experts; ++e) {
    int64_t off = first < start ? start - first : first - start;
    if (off <= distance) best = first, distance = off - 1;
    if (e < experts) first += counts[e];
  }
  return best;
}

/* Sets send_counts of the places of one rank. */
static void cut_rank(sluice_binding_t* b, const int64_t* counts, int32_t first_position, int32_t experts) {
  int64_t rows = 0, start = 0;
  for (int32_t e = 0; e < experts; ++e) rows += counts[e];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int64_t end = i + 1 < b->num_chunks ? piece_start(counts, experts, rows, i + 1, b->num_chunks) : rows;
    int64_t first = 0; /* first row of the expert */
    for (int32_t e = 0; e < experts; ++e) {
      int64_t low = first > start ? first : start, high = first + counts[e] < end ? first + counts[e] : end;
      b->send_counts[(int64_t)i * b->moe->shape.config.num_experts + first_position + e] =
          high > low ? (int32_t)(high - low) : 0;
      first += counts[e];
    }
    start = end;
  }
}

/* Distributes rows of a place over its chunks in order. `cursor` holds chunk << 32 | rows taken there, `start_row`
 * [n][E] the place's first row in the chunk's sent order. */
static void order_routes(sluice_binding_t* b, int64_t* cursor, const int32_t* start_row) {
  int64_t num_experts = b->moe->shape.config.num_experts, num_routes = b->num_tokens * b->top_k;
  memset(cursor, 0, (size_t)num_experts * sizeof *cursor);
  for (int64_t route = 0; route < num_routes; ++route) {
    int32_t place = b->position[route];
    if (place < 0) continue;
    int64_t chunk = cursor[place] >> 32, taken = cursor[place] & INT32_MAX;
    while (taken == b->send_counts[chunk * num_experts + place]) ++chunk, taken = 0;
    b->order[b->first_sent[chunk] + start_row[chunk * num_experts + place] + taken] = (int32_t)route;
    cursor[place] = chunk << 32 | (taken + 1);
  }
}

void sluice_chunks_by_experts_order(sluice_binding_t* b, int64_t* cursor) {
  const sluice_moe_t* moe = b->moe;
  int32_t num_experts = moe->shape.config.num_experts;
  for (int32_t r = 0; r < b->world_size; ++r) {
    cut_rank(b, cursor + moe->first_position[r], moe->first_position[r],
             moe->first_position[r + 1] - moe->first_position[r]);
  }
  int32_t* start_row = b->counts_out; /* free until the header packs its counts */
  int64_t sent = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t row = 0;
    b->first_sent[i] = sent;
    for (int32_t place = 0; place < num_experts; ++place) {
      start_row[(int64_t)i * num_experts + place] = row;
      row += sluice_send_count(b, i, place);
    }
    sent += row;
  }
  b->first_sent[b->num_chunks] = b->num_sent = sent;
  order_routes(b, cursor, start_row);
}

void sluice_chunks_by_experts_place(sluice_binding_t* b) {
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int64_t first = b->first_sent[i];
    for (int64_t s = first; s < b->first_sent[i + 1]; ++s) {
      b->position[b->order[s]] = (int32_t)(b->first_returned[i] + s - first);
    }
  }
}
