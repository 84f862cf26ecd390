// SPDX-License-Identifier: Apache-2.0
/* How long a plan of buckets takes, by prices: lanes run in order and side by side. Pure data, no clock. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_SIMULATE_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_SIMULATE_H_

#include "backend/optim/buckets/plan.h"

/* Of an op of each kind. */
typedef struct sluice_bucket_prices_s {
  double seconds[SLUICE_BUCKET_NUM_KINDS], seconds_per_element[SLUICE_BUCKET_NUM_KINDS];
} sluice_bucket_prices_t;

/* out_seconds: until the last op has ended. allocator: scratch. Errors: NO_MEMORY. */
sluice_status_t sluice_bucket_simulate(const sluice_bucket_plan_t* plan, const sluice_bucket_prices_t* prices,
                                       sluice_allocator_t* allocator, double* out_seconds);

/* All buckets in one chunk. */
#define SLUICE_BUCKET_ALL INT64_MAX

enum { SLUICE_BUCKET_NUM_CHUNKS = 4 };
/* k as they are compared [AxoNN, Fig. 8]: 1, 2, 4 and all. */
extern const int64_t sluice_bucket_chunks[SLUICE_BUCKET_NUM_CHUNKS];

/* The one of those whose plan takes least, the smaller of equal ones; `otherwise` where there is no memory to find out.
 * form->chunk is ignored. */
int64_t sluice_bucket_best_chunk(const sluice_bucket_form_t* form, const sluice_bucket_prices_t* prices,
                                 sluice_allocator_t* allocator, int64_t otherwise);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_SIMULATE_H_ */
