// SPDX-License-Identifier: Apache-2.0
/* Capacity mode: every expert position has the same number of rows in each chunk. The schedule is chosen first, because
 * it determines whether a call needs a header and may be captured. */
#include "backend/moe/run/capture.h"
#include "backend/moe/run/capacity.h"
#include "backend/moe/run/mode_steps.h"

static sluice_status_t bind_alone(sluice_forward_t* f) {
  SLUICE_TRY(sluice_capture_open(&f->pass));
  SLUICE_TRY(sluice_forward_choose_by_config(f, f->choice.num_chunks));
  SLUICE_TRY(sluice_capacity_check_capture(&f->pass));
  SLUICE_TRY(sluice_capacity_bind(&f->pass, f->args->expert_ids, f->choice.num_chunks));
  return sluice_forward_choose_by_config(f, f->choice.num_chunks); /* routing has reset the binding */
}

static void propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  sluice_mode_propose_by_config(f, proposal->local_status == SLUICE_OK, proposal);
}

static sluice_status_t bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  f->pass.binding.wgrad_mode = f->choice.wgrad_mode;
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_capacity = {.tell_failure = sluice_capacity_tell_failure,
                                            .open = sluice_capture_open,
                                            .check_capture = sluice_capacity_check_capture,
                                            .agree = sluice_capacity_agree,
                                            .fail = sluice_capacity_fail,
                                            .close = sluice_capacity_close,
                                            .bind_alone = bind_alone,
                                            .propose = propose,
                                            .take_plan = sluice_mode_take_no_plan,
                                            .bind = bind,
                                            .note_alone = sluice_capacity_note_agreed};
