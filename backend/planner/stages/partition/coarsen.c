// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/partition/coarsen.h"

#include <string.h>

static double limit_of(const sluice_stages_tables_t* t) { return t->fastest[t->num_layers] / (4.0 * t->num_stages); }

/* Sets crossing[i] to the number of short tensors that cross the boundary before layer i. */
static void count_short_tensors(const sluice_stages_tables_t* t, int32_t* crossing) {
  const double limit = limit_of(t);
  memset(crossing, 0, ((size_t)t->num_layers + 1) * sizeof *crossing);
  for (int32_t i = 0; i < t->num_layers; ++i) {
    int32_t last = i;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a) {
      const int32_t to = t->readers[a];
      if (to > last && sluice_stages_run_fastest(t, i + 1, to) <= limit) last = to;
    }
    ++crossing[i + 1], --crossing[last + 1]; /* differences first */
  }
  for (int32_t i = 0; i < t->num_layers; ++i) crossing[i + 1] += crossing[i];
}

/* Returns where to divide a heavy nest that began at first: the place with the fewest bytes in the second half of the
 * allowed range. */
static int32_t divide_nest(const sluice_stages_tables_t* t, int32_t first, int32_t end) {
  const double limit = limit_of(t);
  int32_t best = -1;
  for (int32_t at = first + 1; at <= end; ++at) {
    const double seconds = sluice_stages_run_fastest(t, first, at);
    if (best > 0 && seconds > limit) break;
    if (seconds < limit / 2 && at < end) continue;
    if (best < 0 || t->cut[at] <= t->cut[best]) best = at;
  }
  return best < 0 ? end : best;
}

int32_t sluice_stages_leave_fine(const sluice_stages_tables_t* t, int32_t* out_first) {
  for (int32_t i = 0; i <= t->num_layers; ++i) out_first[i] = i;
  return t->num_layers;
}

int32_t sluice_stages_coarsen(const sluice_stages_tables_t* t, int32_t* out_first, int32_t* crossing) {
  const double limit = limit_of(t);
  int32_t count = 0;
  count_short_tensors(t, crossing);
  for (int32_t first = 0, end; first < t->num_layers; first = end) {
    out_first[count++] = first;
    for (end = first + 1; end < t->num_layers && crossing[end] > 1; ++end) {
    }
    if (sluice_stages_run_fastest(t, first, end) > limit) end = divide_nest(t, first, end);
  }
  out_first[count] = t->num_layers;
  return count >= t->num_stages ? count : sluice_stages_leave_fine(t, out_first);
}
