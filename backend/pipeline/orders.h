// SPDX-License-Identifier: Apache-2.0
/* The orders that a policy gives to the stages, on their way into a program. Private to backend/pipeline. */
#ifndef SLUICE_BACKEND_PIPELINE_ORDERS_H_
#define SLUICE_BACKEND_PIPELINE_ORDERS_H_

#include "backend/pipeline/program.h"

typedef struct sluice_pipeline_orders_s {
  int32_t first[SLUICE_PIPELINE_MAX_STAGES + 1]; /* into turns; all 0 for a policy without an order */
  sluice_stage_turn_t* turns;
  uint64_t bytes;
} sluice_pipeline_orders_t;

/* out_orders: sluice_pipeline_orders_free. Errors: NO_MEMORY, INTERNAL (more turns than a stage has ops). */
sluice_status_t sluice_pipeline_orders_write(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_pipeline_orders_t* out_orders);
void sluice_pipeline_orders_free(sluice_pipeline_orders_t* orders, sluice_allocator_t* allocator);

/* Puts limits where the spec has 0: what a planned order has in flight and holds at most, else p and m. */
void sluice_pipeline_orders_limit(const sluice_pipeline_orders_t* orders, sluice_pipeline_spec_t* spec);

/* Fills place and order of a program that has its ops. Errors: INTERNAL (a turn that is no op of the stage, an op twice
 * or left out). */
sluice_status_t sluice_pipeline_orders_place(const sluice_pipeline_orders_t* orders,
                                             sluice_pipeline_program_t* program);

/* That a planned order runs to its end under the limits. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_pipeline_orders_check(const sluice_pipeline_program_t* program, sluice_allocator_t* allocator);

#endif /* SLUICE_BACKEND_PIPELINE_ORDERS_H_ */
