// SPDX-License-Identifier: Apache-2.0
/* Shares of speed, from the times of works alone and together [MPMoE II-C, alpha(y, x)]. */
#pragma once

/* Smaller shares are raised to this: a work that is nearly stopped would make predictions meaningless. */
#define SLUICE_LEAST_SHARE 0.05

/* For two works that begin together: the share of its speed that each keeps while the other runs. alone, together:
 * seconds, above 0. The longer one finishes alone. */
void sluice_shares_of_two(const double* alone, const double* together, double* out_share);

/* For three works: the share that each keeps while both others run. pair[y][x]: what y keeps while only x runs, as
 * sluice_shares_of_two finds it; after the first has ended, the other two continue at those shares. */
void sluice_shares_of_three(const double* alone, const double* together, const double (*pair)[3], double* out_share);
