// SPDX-License-Identifier: Apache-2.0
/* A layer's plans under one budget by the size of a batch: with fewer tokens fewer chunks are best, and policies fit
 * that have no room for more. */
#ifndef SLUICE_BACKEND_PLAN_PLANS_BY_SIZE_H_
#define SLUICE_BACKEND_PLAN_PLANS_BY_SIZE_H_

#include <assert.h>

#include "backend/plan/candidates.h"

#define SLUICE_PLAN_SIZES 8

static_assert(SLUICE_PLAN_SIZES * SLUICE_PLAN_CANDIDATES < 255, "a plan's number travels in a byte, from 1");

/* Those of size s are for half as many tokens as those of s - 1. The largest have plans from the first; a smaller size
 * gets its own when a batch of it comes, in the bytes that the largest's have reserved: nothing more is allocated, and
 * no plan that stands changes. */
typedef struct sluice_plans_by_size_s {
  sluice_plan_set_t* of[SLUICE_PLAN_SIZES]; /* of the process's allocator. NULL: not made; empty: none fits */
} sluice_plans_by_size_t;

/* Of a batch, and the tokens that a size's plans are for; the largest's are for most_tokens. */
int32_t sluice_plan_size(int64_t most_tokens, int64_t num_tokens);
int64_t sluice_plan_size_tokens(int64_t most_tokens, int32_t size);

/* Plans of all sizes have numbers, whichever are there. */
static inline int32_t sluice_plan_number(int32_t size, int32_t plan) { return size * SLUICE_PLAN_CANDIDATES + plan; }
static inline int32_t sluice_plan_number_size(int32_t number) { return number / SLUICE_PLAN_CANDIDATES; }
static inline int32_t sluice_plan_number_plan(int32_t number) { return number % SLUICE_PLAN_CANDIDATES; }

/* Puts an empty set there where there is none, and drops those of smaller sizes. Errors: NO_MEMORY. */
sluice_status_t sluice_plans_by_size_begin(sluice_plans_by_size_t** inout_plans);
/* Makes those of a smaller size, with the inputs of the largest's; rates, most: as sluice_candidates_make. Errors:
 * NO_MEMORY, UNSUPPORTED. */
sluice_status_t sluice_plans_by_size_add(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                         const sluice_plan_rates_t* rates, int32_t most, int32_t size);
/* Of device memory, or of the host pool: one block for a step's rows in which each of the plans finds room for both
 * tensors, each on a line of its own. It fits every plan's budget as often as steps may be outstanding, since the rest
 * is the same for all. Pure. */
uint64_t sluice_plans_most_block_bytes(const sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                       int is_offloaded);
/* NULL is allowed. */
void sluice_plans_by_size_free(sluice_plans_by_size_t* plans);

#endif /* SLUICE_BACKEND_PLAN_PLANS_BY_SIZE_H_ */
