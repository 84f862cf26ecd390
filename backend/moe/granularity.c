#include "backend/moe/granularity.h"

#include <string.h>

/* Enough one-chunk steps to get past cold caches and first allocations. */
#define REPORTS_NEEDED 3

/* Smaller products lose a little of their rate: charged per extra chunk, as a share of computation. */
#define GEMM_LOSS_PER_CHUNK 0.004

static const int32_t candidates[] = {1, 2, 3, 4, 6, 8, 12, 16};

void sluice_granularity_init(sluice_granularity_t* granularity, int32_t fixed, int32_t world_size) {
  memset(granularity, 0, sizeof *granularity);
  granularity->fixed = world_size == 1 && fixed == 0 ? 1 : fixed;
  granularity->current = granularity->fixed > 0 ? granularity->fixed : 1;
}

void sluice_granularity_observe(sluice_granularity_t* granularity, int32_t direction, int32_t num_chunks,
                                int64_t num_tokens, uint64_t comm_ns, uint64_t compute_ns, uint64_t header_ns) {
  if (num_chunks != 1) return;
  granularity->own.comm_ns[direction] = comm_ns;
  granularity->own.compute_ns[direction] = compute_ns;
  granularity->own.header_ns = header_ns;
  granularity->own.num_tokens = num_tokens;
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void keep_smallest(uint64_t* best, uint64_t value) {
  if (value != 0) *best = *best == 0 ? value : min_u64(*best, value);
}

static double predicted(const sluice_parts_report_t* parts, int32_t n) {
  double total = 0;
  for (int32_t direction = 0; direction < 2; ++direction) {
    double comm = (double)parts->comm_ns[direction];
    double comp = (double)parts->compute_ns[direction] * (1 + GEMM_LOSS_PER_CHUNK * (n - 1));
    double overlapped = comp + comm / n > comm + comp / n ? comp + comm / n : comm + comp / n;
    total += n == 1 ? comm + comp : overlapped;
    total += 2.0 * (n - 1) * (double)parts->header_ns; /* two more exchanges per chunk */
  }
  return total;
}

void sluice_granularity_agree(sluice_granularity_t* granularity, const sluice_parts_report_t* const* reports,
                              int32_t world_size) {
  if (granularity->fixed > 0 || granularity->num_reports > REPORTS_NEEDED) return;
  /* Computation is as slow as the slowest rank; the last rank to arrive sees the true time of an exchange. */
  sluice_parts_report_t step;
  memset(&step, 0, sizeof step);
  for (int32_t r = 0; r < world_size; ++r) {
    /* A forward without backward (evaluation) leaves the backward's part empty: wait until all ranks know both. */
    if (reports[r]->comm_ns[0] == 0 || reports[r]->comm_ns[1] == 0) return;
    for (int32_t direction = 0; direction < 2; ++direction) {
      step.compute_ns[direction] = max_u64(step.compute_ns[direction], reports[r]->compute_ns[direction]);
      keep_smallest(&step.comm_ns[direction], reports[r]->comm_ns[direction]);
    }
    keep_smallest(&step.header_ns, reports[r]->header_ns);
  }
  for (int32_t direction = 0; direction < 2; ++direction) {
    keep_smallest(&granularity->best.comm_ns[direction], step.comm_ns[direction]);
    keep_smallest(&granularity->best.compute_ns[direction], step.compute_ns[direction]);
  }
  keep_smallest(&granularity->best.header_ns, step.header_ns);
  if (++granularity->num_reports < REPORTS_NEEDED) return;
  double best_time = 0;
  for (size_t i = 0; i < sizeof candidates / sizeof candidates[0]; ++i) {
    double time = predicted(&granularity->best, candidates[i]);
    if (i == 0 || time < best_time) {
      best_time = time;
      granularity->current = candidates[i];
    }
  }
  granularity->num_reports = REPORTS_NEEDED + 1; /* decided */
}
