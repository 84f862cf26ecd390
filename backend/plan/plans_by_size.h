// SPDX-License-Identifier: Apache-2.0
/* A layer's plans under one budget by batch size: with fewer tokens fewer chunks are best, and policies fit that need
 * too much memory for larger batches. */
#pragma once

#include <assert.h>

#include "backend/plan/candidates.h"

#define SLUICE_PLAN_SIZES 8

static_assert(SLUICE_PLAN_SIZES * SLUICE_PLAN_CANDIDATES < 255, "a plan's number travels in a byte, from 1");

/* Size s is for half as many tokens as size s - 1. The largest size has plans from the start; a smaller size gets its
 * own with its first batch, within the bytes that the largest size has reserved: nothing more is allocated, and no
 * existing plan changes. */
typedef struct sluice_plans_by_size_s {
  sluice_plan_set_t* of[SLUICE_PLAN_SIZES]; /* of the process's allocator. NULL: not made; empty: none fits */
} sluice_plans_by_size_t;

/* Return the size of a batch, and the tokens that the plans of a size are for; those of the largest size are for
 * most_tokens. */
int32_t sluice_plan_size(int64_t most_tokens, int64_t num_tokens);
int64_t sluice_plan_size_tokens(int64_t most_tokens, int32_t size);

/* Plans of all sizes have numbers, whether or not they exist. */
static inline int32_t sluice_plan_number(int32_t size, int32_t plan) { return size * SLUICE_PLAN_CANDIDATES + plan; }
static inline int32_t sluice_plan_number_size(int32_t number) { return number / SLUICE_PLAN_CANDIDATES; }
static inline int32_t sluice_plan_number_plan(int32_t number) { return number % SLUICE_PLAN_CANDIDATES; }

/* Creates the struct if there is none, and drops the plans of smaller sizes. Errors: NO_MEMORY. */
sluice_status_t sluice_plans_by_size_begin(sluice_plans_by_size_t** inout_plans);
/* Makes the plans of a smaller size, with the inputs of the largest; rates, most: as sluice_candidates_make. Errors:
 * NO_MEMORY, UNSUPPORTED. */
sluice_status_t sluice_plans_by_size_add(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                         const sluice_plan_rates_t* rates, int32_t most, int32_t size);
/* With device memory, or for the host pool: returns the size of one block for a step's rows in which every plan has
 * space for both tensors, each aligned. max_outstanding such blocks fit every plan's budget, since the rest is the same
 * for all. Pure. */
uint64_t sluice_plans_most_block_bytes(const sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                       int is_offloaded);
/* Accepts NULL. */
void sluice_plans_by_size_free(sluice_plans_by_size_t* plans);
