/* Measures the machine that a context runs on, through its own GEMMs, communicator, kernels and lanes.
 *
 * Probes (one op at one size each) run in rounds, all of them once per round, so that drift hits all alike; a probe's
 * time is the lower quartile of its rounds (noise only adds), and over ranks the longest, so that all ranks end with
 * the same machine. A tenth or more of the probes is held out of the curves and says how device_memory the curves are
 * off.
 */
#ifndef SLUICE_BACKEND_CALIBRATE_CALIBRATE_H_
#define SLUICE_BACKEND_CALIBRATE_CALIBRATE_H_

#include "backend/calibrate/calibration.h"
#include "backend/cost/machine.h"
#include "backend/moe/context/context.h"

/* Collective over the context's communicator; the context is entered. Progress goes to the log callback (INFO).
 * out_machine is alike on all ranks. With device memory times are the device's own, on its default stream; exchanges
 * beside GEMMs and whole passes (contention.h, passes_fit.h) are not measured there. Errors: NO_MEMORY, OVER_BUDGET
 * (a host_memory_budget without room for what is copied), what GEMMs, exchanges and the device report. */
sluice_status_t sluice_calibrate(sluice_context_t* context, const sluice_calibration_t* wanted,
                                 sluice_machine_t* out_machine);

/* The cached machine where all ranks have the same one, else a calibration that all of them write down. folder: as
 * sluice_cache_path; "": no cache. refresh: measure anyway. Collective. Errors: as sluice_calibrate. */
sluice_status_t sluice_calibrate_cached(sluice_context_t* context, const sluice_calibration_t* wanted,
                                        const char* folder, int32_t refresh, sluice_machine_t* out_machine);

#endif /* SLUICE_BACKEND_CALIBRATE_CALIBRATE_H_ */
