// SPDX-License-Identifier: Apache-2.0
/* Exact mode: all routed rows, in chunks of equal sizes, bound before the header, which carries their counts. */
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capture.h"
#include "backend/moe/run/mode_steps.h"

static sluice_status_t agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                             sluice_handshake_t* out_handshake) {
  const int has_counts = proposal->direction == SLUICE_FORWARD && proposal->local_status == SLUICE_OK;
  return sluice_handshake(pass->moe, proposal, has_counts ? &pass->binding : NULL, out_handshake);
}

static sluice_status_t bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_capture_refuse(&f->pass));
  f->pass.binding.deduplicate = f->choice.deduplicate;
  SLUICE_TRY(
      moe->strategies->routes->order(moe, f->pass.stream, f->args->expert_ids, f->choice.num_chunks, &f->pass.binding));
  return sluice_forward_choose_by_config(f, f->choice.num_chunks);
}

/* The n of a repeated or sized forward is not known yet, nor is its schedule. */
static void propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  const int is_known = proposal->local_status == SLUICE_OK && !f->repeats && !f->is_sized;
  proposal->is_sized = f->is_sized;
  sluice_mode_propose_by_config(f, is_known, proposal);
}

/* Binds again if some rank bound other chunks than the repeated forward had, or than the largest T needs. */
static sluice_status_t bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  if (handshake->is_uncounted) {
    f->choice.num_chunks = (int16_t)handshake->num_chunks;
    SLUICE_TRY(bind_alone(f));
    SLUICE_TRY(sluice_exchange_counts(&f->pass.binding));
  } else if (f->repeats || f->is_resized) { /* the repeated forward may have had another strategy */
    SLUICE_TRY(sluice_forward_choose_by_config(f, f->choice.num_chunks));
  }
  f->pass.binding.wgrad_mode = f->choice.wgrad_mode;
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_exact = {.open = sluice_capture_refuse,
                                         .agree = agree,
                                         .fail = sluice_mode_fail_by_header,
                                         .bind_alone = bind_alone,
                                         .propose = propose,
                                         .take_plan = sluice_mode_take_no_plan,
                                         .bind = bind};
