// SPDX-License-Identifier: Apache-2.0
/* Entries that several modes share in their tables (mode.h). */
#ifndef SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_
#define SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_

#include "backend/moe/run/mode.h"

/* ---- where every call has a header ---- */

/* fail: the next call's header brings it to the others, unless their exchanges of this pass wait for this rank. */
sluice_status_t sluice_mode_fail_by_header(const sluice_pass_t* pass, sluice_status_t status);

/* ---- where there is no plan ---- */

/* take_plan: none. Where rows are restored and nobody named a mode, that of the weight gradients is chosen. */
sluice_status_t sluice_mode_take_no_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                         const sluice_replay_forward_t* repeated);
/* propose: n and, of a forward that `is_known`, what the ranks have to run alike. */
void sluice_mode_propose_by_config(const sluice_forward_t* f, int is_known, sluice_proposal_t* proposal);

#endif /* SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_ */
