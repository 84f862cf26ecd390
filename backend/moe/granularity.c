#include "backend/moe/granularity.h"

#include <string.h>

/* The first step of a candidate meets new slot sizes; of the others the fastest counts, since noise only ever adds. */
#define WARM_UP 1
#define SAMPLES 4

static const int32_t candidates[] = {1, 2, 3, 4, 6, 8, 12, 16};
#define NUM_CANDIDATES ((int32_t)(sizeof candidates / sizeof candidates[0]))

void sluice_granularity_init(sluice_granularity_t* granularity, int32_t fixed, int32_t world_size) {
  memset(granularity, 0, sizeof *granularity);
  granularity->fixed = world_size == 1 && fixed == 0 ? 1 : fixed;
  granularity->current = granularity->fixed > 0 ? granularity->fixed : candidates[0];
}

void sluice_granularity_observe(sluice_granularity_t* granularity, int32_t direction, int32_t num_chunks,
                                int64_t num_tokens, uint64_t pass_ns) {
  granularity->own.pass_ns[direction] = pass_ns;
  granularity->own.num_chunks[direction] = num_chunks;
  granularity->own.num_tokens = num_tokens;
}

/* ns per token of the slowest rank; negative when the reports are not those of one whole step at the current n. */
static double step_time(const sluice_granularity_t* granularity, const sluice_step_report_t* const* reports,
                        int32_t world_size) {
  uint64_t slowest[2] = {0, 0};
  int64_t tokens = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    for (int32_t direction = 0; direction < 2; ++direction) {
      if (reports[r]->pass_ns[direction] == 0 || reports[r]->num_chunks[direction] != granularity->current) return -1;
      if (reports[r]->pass_ns[direction] > slowest[direction]) slowest[direction] = reports[r]->pass_ns[direction];
    }
    if (reports[r]->num_tokens > tokens) tokens = reports[r]->num_tokens;
  }
  return tokens == 0 ? -1 : (double)(slowest[0] + slowest[1]) / (double)tokens;
}

static void finish_candidate(sluice_granularity_t* granularity, int64_t tokens) {
  int improved = granularity->candidate == 0 || granularity->candidate_time < granularity->best_time;
  if (improved) {
    granularity->best_time = granularity->candidate_time;
    granularity->best_candidate = granularity->candidate;
  }
  granularity->num_worse = improved ? 0 : granularity->num_worse + 1;
  int32_t next = granularity->candidate + 1;
  granularity->decided = granularity->num_worse == 2 || next == NUM_CANDIDATES || candidates[next] > tokens;
  granularity->candidate = granularity->decided ? granularity->best_candidate : next;
  granularity->current = candidates[granularity->candidate];
  granularity->num_samples = 0;
}

void sluice_granularity_agree(sluice_granularity_t* granularity, const sluice_step_report_t* const* reports,
                              int32_t world_size) {
  if (granularity->fixed > 0 || granularity->decided) return;
  double time = step_time(granularity, reports, world_size);
  int64_t tokens = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->num_tokens > tokens) tokens = reports[r]->num_tokens;
  }
  memset(&granularity->own, 0, sizeof granularity->own); /* reported: no step counts twice */
  if (time < 0) return;
  int32_t sample = granularity->num_samples++ - WARM_UP;
  if (sample == 0 || (sample > 0 && time < granularity->candidate_time)) granularity->candidate_time = time;
  if (sample + 1 == SAMPLES) finish_candidate(granularity, tokens);
}
