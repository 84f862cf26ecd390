// SPDX-License-Identifier: Apache-2.0
/* Measures the machine that a context runs on, with its own GEMMs, communicator, kernels and lanes.
 *
 * Probes (one op at one size each) run in rounds, each probe once per round, so that drift affects all equally. A
 * probe's time is the lower quartile of its rounds (noise only adds), and the maximum over ranks, so that all ranks get
 * the same machine. At least a tenth of the probes is held out of the curves and gives their error.
 */
#pragma once

#include "backend/calibrate/calibration.h"
#include "backend/cost/machine.h"
#include "backend/moe/context/context.h"

/* Collective over the context's communicator; the context is entered. Progress goes to the log callback (INFO).
 * out_machine is the same on all ranks. With device memory, times are taken by the device, on its default stream;
 * exchanges during GEMMs and whole passes (contention.h, passes_fit.h) are not measured there. Errors: NO_MEMORY,
 * OVER_BUDGET (a host_memory_budget without space for copies), errors of GEMMs, exchanges and the device. */
sluice_status_t sluice_calibrate(sluice_context_t* context, const sluice_calibration_t* wanted,
                                 sluice_machine_t* out_machine);

/* The cached machine if all ranks have the same one, else a calibration that every rank stores. folder: as
 * sluice_cache_path; "": no cache. refresh: always measure. Collective. Errors: as sluice_calibrate. */
sluice_status_t sluice_calibrate_cached(sluice_context_t* context, const sluice_calibration_t* wanted,
                                        const char* folder, int32_t refresh, sluice_machine_t* out_machine);
