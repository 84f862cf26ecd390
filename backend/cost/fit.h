/* From noisy measurements to curves. */
#ifndef SLUICE_BACKEND_COST_FIT_H_
#define SLUICE_BACKEND_COST_FIT_H_

#include "backend/cost/machine.h"

/* Of count >= 1 values, which are reordered; the mean of the two middle ones where count is even. */
double sluice_median(double* values, int32_t count);
/* Value below which `share` of them lie, by the nearest rank; reorders. */
double sluice_quantile(double* values, int32_t count, double share);
/* More rows never take less time, and noise only adds: no size takes more than a larger one was seen to. */
void sluice_make_rising(double* y, int32_t count);
/* exchange_skew_gain of a machine with its exchange and world_size, where an exchange in which one rank alone receives,
 * so many bytes, takes `seconds`. */
double sluice_fit_skew_gain(const sluice_machine_t* machine, double bytes, double seconds);

#endif /* SLUICE_BACKEND_COST_FIT_H_ */
