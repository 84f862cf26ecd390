/* How many chunks, until backend/tune decides (the adaptive search of MPipeMoE Alg. 1 replaces this rule).
 *
 * The first steps of a layer run with one chunk, where nothing overlaps: their communication and computation times are
 * the parts. They travel in later headers, so that every rank sees the same numbers of all ranks and takes the same n:
 * the one with the smallest  sum over directions of max(comp + comm / n, comm + comp / n) + n * cost of a chunk. */
#ifndef SLUICE_BACKEND_MOE_GRANULARITY_H_
#define SLUICE_BACKEND_MOE_GRANULARITY_H_

#include <stdint.h>

/* What one rank reports in its header: times of its last one-chunk pass of each direction, 0 if there was none. */
typedef struct sluice_parts_report_s {
  uint64_t comm_ns[2]; /* by direction */
  uint64_t compute_ns[2];
  uint64_t header_ns; /* one small exchange */
  int64_t num_tokens; /* of those passes */
} sluice_parts_report_t;

typedef struct sluice_granularity_s {
  int32_t fixed;              /* the config's n, 0 = chosen here */
  int32_t current;            /* n of the next forward */
  int32_t num_reports;        /* agreed reports seen */
  sluice_parts_report_t own;  /* what this rank will report */
  sluice_parts_report_t best; /* smallest agreed parts so far */
} sluice_granularity_t;

void sluice_granularity_init(sluice_granularity_t* granularity, int32_t fixed, int32_t world_size);
/* After a pass on this rank: its parts, if it ran with one chunk. */
void sluice_granularity_observe(sluice_granularity_t* granularity, int32_t direction, int32_t num_chunks,
                                int64_t num_tokens, uint64_t comm_ns, uint64_t compute_ns, uint64_t header_ns);
/* After a forward's header: the reports of all ranks, in rank order; may change `current` for the next forward. */
void sluice_granularity_agree(sluice_granularity_t* granularity, const sluice_parts_report_t* const* reports,
                              int32_t world_size);

#endif /* SLUICE_BACKEND_MOE_GRANULARITY_H_ */
