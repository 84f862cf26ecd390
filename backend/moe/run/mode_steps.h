/* What several modes do alike in their tables (mode.h), and what they do where there is nothing to do. */
#ifndef SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_
#define SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_

#include "backend/moe/run/mode.h"

/* ---- where every call has a header ---- */

/* tell_failure: the header will. */
sluice_status_t sluice_mode_header_tells(const sluice_moe_t* moe);
/* check_capture: open has refused every capture. */
sluice_status_t sluice_mode_captures_none(const sluice_pass_t* pass);
/* fail: the next call's header brings it to the others, unless their exchanges of this pass wait for this rank. */
sluice_status_t sluice_mode_fail_by_header(const sluice_pass_t* pass, sluice_status_t status);
/* close, note_alone: nothing is remembered of a call. */
void sluice_mode_close_nothing(const sluice_pass_t* pass, sluice_status_t status);
void sluice_mode_note_nothing(const sluice_pass_t* pass);

/* ---- where there is no plan ---- */

/* take_plan: none. Where rows are restored and nobody named a mode, that of the weight gradients is chosen. */
sluice_status_t sluice_mode_take_no_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                         const sluice_replay_forward_t* repeated);
/* wgrad_mode: the forward's. */
int32_t sluice_mode_forward_wgrad_mode(const sluice_moe_t* moe, const sluice_binding_t* binding);
/* check_separate_wgrad: there is no budget that they could pass. */
sluice_status_t sluice_mode_allow_separate_wgrad(sluice_pass_t* pass);
/* propose: n and, of a forward that `is_known`, what the ranks have to run alike. */
void sluice_mode_propose_by_config(const sluice_forward_t* f, int is_known, sluice_proposal_t* proposal);

#endif /* SLUICE_BACKEND_MOE_RUN_MODE_STEPS_H_ */
