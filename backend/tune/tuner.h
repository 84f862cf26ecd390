// SPDX-License-Identifier: Apache-2.0
/* The policy hook of a context: one search per kind of layer, fed by the reports in headers, with predictions if a
 * machine is known. Layers that differ only in their number share a table and learn from each other. Candidates run as
 * ordinary steps.
 */
#pragma once

#include "backend/tune/tuner_state.h"

/* Installs a tuner in mode adaptive, without a machine, in the context, which owns it. Errors: NO_MEMORY. */
sluice_status_t sluice_tuner_install(sluice_context_t* context);
/* The tuner of the context, or NULL. */
sluice_tuner_t* sluice_tuner_of(const sluice_context_t* context);
/* Call before layers are created; machine may be NULL. Pass the same on all ranks: headers compare it. Errors: STATE
 * (layers exist). */
sluice_status_t sluice_tuner_configure(sluice_tuner_t* tuner, int32_t mode, const sluice_machine_t* machine);
