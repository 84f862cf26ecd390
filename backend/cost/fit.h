// SPDX-License-Identifier: Apache-2.0
/* Fits curves to noisy measurements. */
#pragma once

#include "backend/cost/machine.h"

/* The median of count >= 1 values, or the mean of the middle two if count is even. Reorders the values. */
double sluice_median(double* values, int32_t count);
/* The value below which `share` of the values are, by the nearest rank; reorders. */
double sluice_quantile(double* values, int32_t count, double share);
/* Makes y nondecreasing: more rows never take less time, and noise only adds, so each size is capped by the larger
 * ones. */
void sluice_make_rising(double* y, int32_t count);
/* exchange_skew_gain of a machine with its exchange and world_size, if an exchange of the given bytes that only one
 * rank receives takes `seconds`. */
double sluice_fit_skew_gain(const sluice_machine_t* machine, double bytes, double seconds);
