// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/mode_steps.h"

#include "backend/model/pass_sizes.h"
#include "backend/moe/handshake/failure.h"

sluice_status_t sluice_mode_fail_by_header(const sluice_pass_t* pass, sluice_status_t status) {
  return sluice_fail_pass(pass->context, status, pass->is_complete);
}

/* The most rows that a rank receives if routing is balanced; under a capacity the number of places. */
static int64_t balanced_rows(const sluice_forward_t* f, const sluice_handshake_t* handshake) {
  const sluice_shape_t* shape = &f->pass.moe->shape;
  const int64_t capacity = sluice_shape_capacity(shape);
  if (capacity > 0) return capacity * shape->world_size * shape->most_local * f->choice.num_chunks;
  return handshake->max_tokens * shape->config.top_k;
}

/* Uses only values that all ranks know by now, so that they choose the same. */
static void choose_wgrad_mode(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  const sluice_moe_t* moe = f->pass.moe;
  if (!sluice_shape_is_lean(&moe->shape)) return;
  const int reuse = moe->shape.config.reuse;
  f->choice.wgrad_mode = (uint8_t)sluice_leanest_wgrad_mode(
      &moe->shape, reuse || sluice_shape_restores_input(&moe->shape),
      reuse || sluice_shape_restores_pre_activation(&moe->shape), f->choice.num_chunks, balanced_rows(f, handshake));
}

sluice_status_t sluice_mode_take_no_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                         const sluice_replay_forward_t* repeated) {
  (void)repeated;
  choose_wgrad_mode(f, handshake);
  return SLUICE_OK;
}

void sluice_mode_propose_by_config(const sluice_forward_t* f, int is_known, sluice_proposal_t* proposal) {
  proposal->num_chunks = f->choice.num_chunks;
  proposal->deduplicate = f->choice.deduplicate;
  proposal->comm_hash = is_known ? sluice_pass_comm_hash(&f->pass) : (uint64_t)sluice_forward_keeps(f);
}
