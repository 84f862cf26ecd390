// SPDX-License-Identifier: Apache-2.0
/* Fits the difference between whole passes and the predicted sum of their ops. Probes repeat a single op, while a pass
 * wakes its lanes for each op, meets cold memory and waits for peers between ops.
 *
 * Passes of a layer run with few rows and with many, in one chunk. The ratio of measured to predicted compute lane time
 * corrects GEMMs, by rows and direction. With more rows than a cache holds, the remaining ratio is the cache-miss
 * factor. With few rows passes also run in several chunks: pass_seconds is the excess of one chunk over its prediction,
 * and op_seconds spreads the excess of each further chunk over its ops.
 *
 * Source: ours.
 */
#pragma once

#include "backend/calibrate/pass_source.h"

/* Corrects GEMMs, pass_seconds and op_seconds of an otherwise measured machine; takes about `seconds` and skips passes
 * that would take too long. Errors: those of the source and of predictions. */
sluice_status_t sluice_passes_fit(const sluice_passes_source_t* source, double seconds, sluice_machine_t* machine);
