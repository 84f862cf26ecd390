/* The policy hook of a context: one search per kind of layer, fed by the reports in headers, with predictions from a
 * machine where one is known. Layers that are alike (all but their number) share a table and so learn from each other.
 *
 * Candidates are ordinary steps.
 */
#ifndef SLUICE_BACKEND_TUNE_TUNER_H_
#define SLUICE_BACKEND_TUNE_TUNER_H_

#include "backend/tune/tuner_state.h"

/* A tuner in mode adaptive without a machine, put into the context, which owns it. Errors: NO_MEMORY. */
sluice_status_t sluice_tuner_install(sluice_context_t* context);
/* The context's, or NULL. */
sluice_tuner_t* sluice_tuner_of(const sluice_context_t* context);
/* Before layers are made; machine may be NULL. Alike on all ranks: headers compare it. Errors: STATE (layers exist). */
sluice_status_t sluice_tuner_configure(sluice_tuner_t* tuner, int32_t mode, const sluice_machine_t* machine);

#endif /* SLUICE_BACKEND_TUNE_TUNER_H_ */
