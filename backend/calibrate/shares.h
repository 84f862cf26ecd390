/* Shares of speed from what works took alone and together [MPMoE II-C, alpha(y, x)]. */
#ifndef SLUICE_BACKEND_CALIBRATE_SHARES_H_
#define SLUICE_BACKEND_CALIBRATE_SHARES_H_

/* No share is taken for less: a work that is nearly stopped would make predictions of anything. */
#define SLUICE_LEAST_SHARE 0.05

/* Of two works that begin at once: what each keeps of its speed while the other runs. alone, together: seconds, above
 * 0. The longer one does its rest alone. */
void sluice_shares_of_two(const double* alone, const double* together, double* out_share);

/* Of three: what each keeps while both others run. pair[y][x]: what y keeps while x alone runs beside it, as
 * sluice_shares_of_two finds it; the two that are left when the first has ended go on at those. */
void sluice_shares_of_three(const double* alone, const double* together, const double (*pair)[3], double* out_share);

#endif /* SLUICE_BACKEND_CALIBRATE_SHARES_H_ */
