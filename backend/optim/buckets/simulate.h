// SPDX-License-Identifier: Apache-2.0
/* Predicts the duration of a plan from prices of ops. Each lane runs in order, and lanes run concurrently. Pure data,
 * no clock. */
#pragma once

#include "backend/optim/buckets/plan.h"

/* The price of an op of each kind. */
typedef struct sluice_bucket_prices_s {
  double seconds[SLUICE_BUCKET_NUM_KINDS], seconds_per_element[SLUICE_BUCKET_NUM_KINDS];
} sluice_bucket_prices_t;

/* out_seconds: the time at which the last op ends. allocator: scratch. Errors: NO_MEMORY. */
sluice_status_t sluice_bucket_simulate(const sluice_bucket_plan_t* plan, const sluice_bucket_prices_t* prices,
                                       sluice_allocator_t* allocator, double* out_seconds);

/* All buckets in one chunk. */
#define SLUICE_BUCKET_ALL INT64_MAX

enum { SLUICE_BUCKET_NUM_CHUNKS = 4 };
/* The values of k that are compared [AxoNN, Fig. 8]: 1, 2, 4 and all. */
extern const int64_t sluice_bucket_chunks[SLUICE_BUCKET_NUM_CHUNKS];

/* Returns the one of those k whose plan is fastest, the smaller if equal; `otherwise` if memory does not suffice to
 * find out. form->chunk is ignored. */
int64_t sluice_bucket_best_chunk(const sluice_bucket_form_t* form, const sluice_bucket_prices_t* prices,
                                 sluice_allocator_t* allocator, int64_t otherwise);
