// SPDX-License-Identifier: Apache-2.0
/* The orders of a policy for all stages, before they are part of a program. Private to backend/pipeline. */
#pragma once

#include "backend/pipeline/program.h"

typedef struct sluice_pipeline_orders_s {
  int32_t first[SLUICE_PIPELINE_MAX_STAGES + 1]; /* into turns; all 0 if the policy has no order */
  sluice_stage_turn_t* turns;
  uint64_t bytes;
} sluice_pipeline_orders_t;

/* out_orders: release with sluice_pipeline_orders_free. Errors: NO_MEMORY, INTERNAL (more turns than a stage has
 * ops). */
sluice_status_t sluice_pipeline_orders_write(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_pipeline_orders_t* out_orders);
void sluice_pipeline_orders_free(sluice_pipeline_orders_t* orders, sluice_allocator_t* allocator);

/* Sets the limits that are 0 in the spec: to the maximum in flight and held of a planned order, else to p and m. */
void sluice_pipeline_orders_limit(const sluice_pipeline_orders_t* orders, sluice_pipeline_spec_t* spec);

/* Fills place and order of a program that has its ops. Errors: INTERNAL (a turn that is no op of the stage, an op
 * repeated or missing). */
sluice_status_t sluice_pipeline_orders_place(const sluice_pipeline_orders_t* orders,
                                             sluice_pipeline_program_t* program);

/* Checks that a planned order can complete under the limits. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_pipeline_orders_check(const sluice_pipeline_program_t* program, sluice_allocator_t* allocator);
