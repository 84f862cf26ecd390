/* How many chunks, until backend/tune decides (the adaptive search of MPipeMoE Alg. 1 replaces this rule).
 *
 * Candidates are tried as ordinary training steps (results do not depend on n): each runs a few steps, and the pass
 * times of all ranks travel in later headers, so that every rank sees the same numbers and takes the same n: the one
 * whose fastest step, forward plus backward on the slowest rank, is shortest per token. The walk starts at one chunk
 * and ends once two candidates in a row did not improve. A forward without backward is no sample and changes nothing.
 */
#ifndef SLUICE_BACKEND_MOE_GRANULARITY_H_
#define SLUICE_BACKEND_MOE_GRANULARITY_H_

#include <stdint.h>

/* What one rank reports in its header: its last pass of each direction since its last report, 0 if there was none. */
typedef struct sluice_step_report_s {
  uint64_t pass_ns[2]; /* by direction, from the agreement to the end */
  int64_t num_tokens;
  int32_t num_chunks[2];
} sluice_step_report_t;

typedef struct sluice_granularity_s {
  int32_t fixed;   /* the config's n, 0 = chosen here */
  int32_t current; /* n of the next forward */
  int32_t decided;
  int32_t candidate;   /* index of the one on trial */
  int32_t num_samples; /* of it, warm-up included */
  int32_t best_candidate;
  int32_t num_worse;     /* candidates in a row that did not improve */
  double candidate_time; /* its fastest step, ns per token */
  double best_time;
  sluice_step_report_t own; /* what this rank will report */
} sluice_granularity_t;

void sluice_granularity_init(sluice_granularity_t* granularity, int32_t fixed, int32_t world_size);
/* After a pass on this rank. */
void sluice_granularity_observe(sluice_granularity_t* granularity, int32_t direction, int32_t num_chunks,
                                int64_t num_tokens, uint64_t pass_ns);
/* After a forward's header: the reports of all ranks, in rank order; may change `current` for the next forward. */
void sluice_granularity_agree(sluice_granularity_t* granularity, const sluice_step_report_t* const* reports,
                              int32_t world_size);

#endif /* SLUICE_BACKEND_MOE_GRANULARITY_H_ */
