// SPDX-License-Identifier: Apache-2.0
/* Token copies on the device: the routes of a token that share a row on their way to a rank. Runs after routing.cu,
 * whose sort orders them. No atomics: each entry has one writer. */

SLUICE_FN void token_copy_ranks(const sluice_token_copy_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t r = unit * 32 + lane;
    if (r < a.num_routes) {
      const int32_t rank = slot_of_id(a, id_of_route(a, r));
      int32_t first = rank;
      for (int64_t before = r - r % a.top_k; before < r; ++before) {
        if (slot_of_id(a, id_of_route(a, before)) == rank) first = -1;
      }
      a.rank[r] = rank;
      a.first[r] = first;
    }
  }
}
SLUICE_KERNEL(token_copy_ranks, sluice_token_copy_args_t)

/* route_index[row of (t, k)] = (token copy of (t, rank of (t, k)) - first token copy of that rank) * K + k */
SLUICE_FN void token_copy_index(const sluice_token_copy_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t r = unit * 32 + lane;
    if (r < a.num_routes && a.rank[r] >= 0) {
      int64_t first = r - r % a.top_k;
      while (first < r && a.first[first] != a.rank[r]) ++first;
      a.route_index[a.row[r]] =
          (a.token_copy[first] - a.offsets[a.rank[r]]) * (int32_t)a.top_k + (int32_t)(r % a.top_k);
    }
  }
}
SLUICE_KERNEL(token_copy_index, sluice_token_copy_args_t)

/* table[t, w] = the token copy of the one k with first[t, k] = w, or -1 */
SLUICE_FN void token_copy_table(const sluice_token_copy_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t i = unit * 32 + lane, t = i / a.num_ranks, w = i % a.num_ranks;
    if (t * a.top_k < a.num_routes) {
      int32_t token_copy = -1;
      for (int64_t r = t * a.top_k; r < (t + 1) * a.top_k; ++r) {
        if (a.first[r] == w) token_copy = a.token_copy[r];
      }
      a.table[i] = token_copy;
    }
  }
}
SLUICE_KERNEL(token_copy_table, sluice_token_copy_args_t)

/* Places route u of all runs together. A route index that its source cannot have is ignored: its row becomes zeros, and
 * nothing is written out of bounds. */
SLUICE_FN void place_route(const sluice_token_copy_place_args_t& a, int64_t u) {
  int64_t low = 0, high = a.num_runs - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.runs[middle].end > u) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const sluice_token_copy_run_t& run = a.runs[low];
  const int32_t inside = (int32_t)u - (low > 0 ? a.runs[low - 1].end : 0), k = (int32_t)a.top_k;
  const int32_t index = a.route_index[run.route_index + inside];
  const int32_t is_own = run.weight < 0;
  if (index < 0 || index / k >= run.token_copies) {
    a.origin[run.origin + inside] = -1;
    return;
  }
  const int64_t at = (int64_t)run.token_copy * k + index;
  const int32_t from = is_own ? a.token[run.from + index / k] : run.from + index / k;
  a.position[at] = run.row + inside;
  a.weight[at] = is_own ? from * k + index % k : run.weight + inside;
  a.origin[run.origin + inside] = is_own ? -2 - from : from;
}

SLUICE_FN void token_copy_place(const sluice_token_copy_place_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    if (unit * 32 + lane < a.count) place_route(a, unit * 32 + lane);
  }
}
SLUICE_KERNEL(token_copy_place, sluice_token_copy_place_args_t)
