// SPDX-License-Identifier: Apache-2.0
/* Estimates the rates of the machine from the passes of this process, if no calibrated machine is known. Headers carry
 * the lane times, so all ranks have the same numbers.
 *
 * The rates only order candidates that a race then confirms: the plans that a layer begins with under a budget
 * (plan/plan_time.c). Each rate is the median of the last forwards, since a single forward may have been delayed. */
#pragma once

#include <stdint.h>

#include "backend/plan/plan.h"

#define SLUICE_OBSERVED_PASSES 8
#define SLUICE_OBSERVED_LEAST  3 /* forwards; the earlier ones are dominated by first touches of memory */
#define SLUICE_OBSERVED_DTYPES 5 /* by SLUICE_DTYPE_* */

/* One forward: times of the rank that computed longest and of the rank that waited least for others. */
typedef struct sluice_observed_forward_s {
  double flops, compute_seconds;
  double bytes, comm_seconds; /* all exchanges of rows */
  int32_t num_exchanges;
  double startup_seconds; /* of an almost empty exchange */
} sluice_observed_forward_t;

typedef struct sluice_observed_rate_s {
  int32_t count; /* since the start */
  double rates[SLUICE_OBSERVED_PASSES];
} sluice_observed_rate_t;

typedef struct sluice_observed_rates_s {
  int32_t count[SLUICE_OBSERVED_DTYPES]; /* since the start */
  sluice_plan_rates_t rates[SLUICE_OBSERVED_DTYPES][SLUICE_OBSERVED_PASSES];
  sluice_observed_rate_t memory, copies; /* of passes of any dtype */
} sluice_observed_rates_t;

/* Ignores a pass without work on one of the lanes. */
void sluice_observed_rates_add(sluice_observed_rates_t* observed, int32_t dtype, const sluice_observed_forward_t* pass);
/* Adds the rates of one pass, in bytes per second; 0: not measured. */
void sluice_observed_rates_add_bytes(sluice_observed_rates_t* observed, double memory, double copies);
/* Returns 0, and leaves *out_rates alone, if too few passes of this dtype were seen. Until a pass has offloaded rows,
 * the rate of copies is assumed to be that of memory, with device memory at most that of a PCIe slot, so that plans
 * with offloading are tried where they may be fastest. */
int sluice_observed_rates_of(const sluice_observed_rates_t* observed, int32_t dtype, int32_t is_device,
                             sluice_plan_rates_t* out_rates);
