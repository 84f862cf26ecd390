// SPDX-License-Identifier: Apache-2.0
/* Table entries that several modes share (mode.h). */
#pragma once

#include "backend/moe/run/mode.h"

/* ---- modes with a header in every call ---- */

/* fail: the next call's header reports it, unless the other ranks' exchanges of this pass wait for this rank. */
sluice_status_t sluice_mode_fail_by_header(const sluice_pass_t* pass, sluice_status_t status);

/* ---- modes without a plan ---- */

/* take_plan: no plan. Chooses the wgrad mode if rows are restored and the config names none. */
sluice_status_t sluice_mode_take_no_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                         const sluice_replay_forward_t* repeated);
/* propose: n and, for a forward that `is_known`, the hash that the ranks compare. */
void sluice_mode_propose_by_config(const sluice_forward_t* f, int is_known, sluice_proposal_t* proposal);
