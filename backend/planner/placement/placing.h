/* A placement being changed: who is where, what each rank has to do, and how it is judged. */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_PLACING_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_PLACING_H_

#include "backend/base/alloc.h"
#include "sluice/placement.h"

/* Checked, borrowed: see sluice_placement_problem_t. */
typedef struct sluice_placing_problem_s {
  const uint64_t* loads;   /* [num_experts] */
  const int32_t* home;     /* [num_experts] ranks in force */
  const uint64_t* bytes;   /* [num_experts] */
  const int32_t* by_load;  /* [num_experts] heaviest first, then by number */
  const int32_t* capacity; /* [num_ranks] experts of each rank */
  const int32_t* first;    /* [num_ranks + 1] sums of capacity before a rank */
  uint64_t bound;          /* least load of the fullest rank */
  uint64_t limit;          /* good enough */
  int32_t num_experts;
  int32_t num_ranks;
} sluice_placing_problem_t;

/* Lists of members stand at `first` of their rank, in any order that follows from the changes made. */
typedef struct sluice_placing_s {
  const sluice_placing_problem_t* problem;
  int32_t* rank;    /* [num_experts] */
  int32_t* at;      /* [num_experts] index in members */
  int32_t* members; /* [num_experts] */
  uint64_t* load;   /* [num_ranks] */
  uint64_t bytes;   /* of experts that are not at home */
} sluice_placing_t;

/* Smaller is better, the first difference decides. */
typedef struct sluice_placing_score_s {
  uint64_t excess; /* the fullest rank, or the limit where that is more */
  uint64_t bytes;
  uint64_t load; /* of the fullest rank */
} sluice_placing_score_t;

/* out: everybody at home. One block of `allocator`. Errors: NO_MEMORY. */
sluice_status_t sluice_placing_make(const sluice_placing_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_placing_t* out);
void sluice_placing_deinit(sluice_placing_t* placing, sluice_allocator_t* allocator);

/* As `rank` says, which gives each rank its number of experts. */
void sluice_placing_set(sluice_placing_t* placing, const int32_t* rank);
void sluice_placing_swap(sluice_placing_t* placing, int32_t a, int32_t b);

/* The lowest of those with the most. */
int32_t sluice_placing_fullest(const sluice_placing_t* placing);
sluice_placing_score_t sluice_placing_score(const sluice_placing_t* placing);
int sluice_placing_is_better(sluice_placing_score_t a, sluice_placing_score_t b);

/* Bytes away from home after e has gone from one rank to another, minus those before. */
static inline int64_t sluice_placing_cost(const sluice_placing_problem_t* p, int32_t e, int32_t from, int32_t to) {
  const int64_t bytes = (int64_t)p->bytes[e];
  return (to == p->home[e] ? 0 : bytes) - (from == p->home[e] ? 0 : bytes);
}

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_PLACING_H_ */
