// SPDX-License-Identifier: Apache-2.0
/* A placement during planning: the rank of each expert, the load of each rank, the score, and the
 * changes that improve it. */
#pragma once

#include "backend/base/alloc.h"
#include "sluice/placement.h"

/* Checked, borrowed: see sluice_placement_problem_t. */
typedef struct sluice_placing_problem_s {
  const uint64_t* loads;   /* [num_experts] */
  const int32_t* home;     /* [num_experts] current ranks */
  const uint64_t* bytes;   /* [num_experts] */
  const int32_t* by_load;  /* [num_experts] heaviest first, then by number */
  const int32_t* capacity; /* [num_ranks] experts of each rank */
  const int32_t* first;    /* [num_ranks + 1] sums of capacity before a rank */
  uint64_t bound;          /* lower bound of the fullest rank's load */
  uint64_t limit;          /* a load that is good enough */
  int32_t num_experts;
  int32_t num_ranks;
} sluice_placing_problem_t;

/* The members of a rank begin at its `first`, in an order that depends only on the sequence of changes. */
typedef struct sluice_placing_s {
  const sluice_placing_problem_t* problem;
  int32_t* rank;    /* [num_experts] */
  int32_t* at;      /* [num_experts] index in members */
  int32_t* members; /* [num_experts] */
  uint64_t* load;   /* [num_ranks] */
  uint64_t bytes;   /* of experts that are not on their home rank */
} sluice_placing_t;

/* Smaller is better, compared lexicographically. */
typedef struct sluice_placing_score_s {
  uint64_t excess; /* load of the fullest rank, or the limit if that is larger */
  uint64_t bytes;
  uint64_t load; /* of the fullest rank */
} sluice_placing_score_t;

/* Makes a placement with every expert on its home rank, in one block of `allocator`. Errors: NO_MEMORY. */
sluice_status_t sluice_placing_make(const sluice_placing_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_placing_t* out);
void sluice_placing_deinit(sluice_placing_t* placing, sluice_allocator_t* allocator);

/* Sets the placement to `rank`, which gives each rank its number of experts. */
void sluice_placing_set(sluice_placing_t* placing, const int32_t* rank);
void sluice_placing_swap(sluice_placing_t* placing, int32_t a, int32_t b);

/* Returns a lower bound of the fullest rank's load over all placements, the maximum of: the mean, rounded up; and for
 * each k the k + 1 lightest of the k * W + 1 heaviest experts, since one of W ranks has k + 1 of them, plus the
 * lightest other experts that fill its places. k = 0 is the heaviest expert. Ranks without experts are not counted.
 * Reads loads, by_load and capacity. */
uint64_t sluice_placing_bound(const sluice_placing_problem_t* problem);

/* Returns the rank with the highest load; the lowest of several. */
int32_t sluice_placing_fullest(const sluice_placing_t* placing);
sluice_placing_score_t sluice_placing_score(const sluice_placing_t* placing);
int sluice_placing_is_better(sluice_placing_score_t a, sluice_placing_score_t b);

/* Returns the change in bytes away from home if expert e moves from one rank to another. */
static inline int64_t sluice_placing_cost(const sluice_placing_problem_t* p, int32_t e, int32_t from, int32_t to) {
  const int64_t bytes = (int64_t)p->bytes[e];
  return (to == p->home[e] ? 0 : bytes) - (from == p->home[e] ? 0 : bytes);
}

/* ---- swaps.c ---- */

/* Levels the loads until the limit is met or no swap helps: the fullest rank swaps an expert with another rank; if no
 * single swap helps, two experts for two, or a rotation over three ranks. Of the swaps that meet the limit it takes the
 * one with the fewest bytes, else the one that leaves the least load on the fuller of both ranks. Never increases the
 * load. */
void sluice_swaps_level(sluice_placing_t* placing);

/* Returns experts to their home rank with swaps that move fewer bytes in total, without a rank above the fullest load
 * or the limit. */
void sluice_swaps_return(sluice_placing_t* placing);

/* ---- relabel.c ---- */

/* Ranks with the same number of experts exchange all their experts at the least cost: an assignment problem, solved
 * exactly [Kuhn 1955, Munkres 1957, by shortest augmenting paths]. The loads remain the same numbers, on other ranks.
 * Errors: NO_MEMORY: nothing has changed. */
sluice_status_t sluice_relabel(sluice_placing_t* placing, sluice_allocator_t* allocator);
