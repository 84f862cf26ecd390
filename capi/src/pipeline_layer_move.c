// SPDX-License-Identifier: Apache-2.0
/* The public calls for a layer that moves during a batch. */
#include "backend/pipeline/layer_move.h"
#include "sluice/pipeline.h"

void sluice_layer_move_begin(int32_t role, int32_t to_lower, sluice_layer_move_t* out_move) {
  if (out_move != NULL) *out_move = sluice_live_begin(role, to_lower);
}

void sluice_layer_move_arrived(sluice_layer_move_t* move) {
  if (move != NULL) sluice_live_arrived(move);
}

void sluice_layer_move_heard(sluice_layer_move_t* move, uint64_t word) {
  if (move != NULL) sluice_live_heard(move, word);
}

int32_t sluice_layer_move_runs(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word) {
  return move != NULL && sluice_live_forward(move, micro_batch, word);
}

uint64_t sluice_layer_move_activation_word(int32_t ran) { return sluice_live_activation_word(ran); }

uint64_t sluice_layer_move_gradient_word(const sluice_layer_move_t* move) {
  return move != NULL ? sluice_live_gradient_word(move) : 0;
}

void sluice_layer_move_ended(sluice_layer_move_t* move) {
  if (move != NULL) sluice_live_ended(move);
}

int32_t sluice_layer_move_is_final(const sluice_layer_move_t* move) {
  return move != NULL && sluice_live_is_final(move);
}

int32_t sluice_layer_move_receives(const sluice_layer_move_t* move) {
  return move != NULL && sluice_live_receives(move);
}
