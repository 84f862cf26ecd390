/* What whole passes take beyond the sum that a prediction makes of their ops: probes of single ops run one thing over
 * and over, while a pass wakes its lanes for each op, meets cold memory and waits for peers between ops.
 *
 * Passes of a layer run with few rows and with many, in one chunk. What the compute lane takes over what is said of it
 * corrects GEMMs, by rows and direction. With so many rows that they do not stay in a cache, what the lane takes
 * beyond that is the cache-miss factor. With few rows passes run in several chunks too: what one chunk takes beyond its
 * prediction is then pass_seconds, what each further chunk takes beyond its own is of every op: op_seconds.
 *
 * Source: ours.
 */
#ifndef SLUICE_BACKEND_CALIBRATE_PASSES_FIT_H_
#define SLUICE_BACKEND_CALIBRATE_PASSES_FIT_H_

#include "backend/calibrate/pass_source.h"

/* Corrects GEMMs, pass_seconds and op_seconds of a machine that is measured otherwise; takes about
 * `seconds`, leaving out what would take too long. Errors: those of the source and of predictions. */
sluice_status_t sluice_passes_fit(const sluice_passes_source_t* source, double seconds, sluice_machine_t* machine);

#endif /* SLUICE_BACKEND_CALIBRATE_PASSES_FIT_H_ */
