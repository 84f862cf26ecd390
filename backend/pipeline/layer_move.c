// SPDX-License-Identifier: Apache-2.0
/* The public calls for a layer that changes its stage while a batch runs; sluice/pipeline.h has the rules. The tests
 * try every order of events. Source: vPipe (TPDS 2022), whose live migration this reconstructs. */
#include <stddef.h>

#include "sluice/pipeline.h"

void sluice_layer_move_begin(int32_t role, int32_t to_lower, sluice_layer_move_t* out_move) {
  if (out_move != NULL) *out_move = (sluice_layer_move_t){.role = role, .to_lower = to_lower, .trigger = -1};
}

void sluice_layer_move_arrived(sluice_layer_move_t* move) {
  if (move != NULL) move->has = 1;
}

void sluice_layer_move_heard(sluice_layer_move_t* move, uint64_t word) {
  if (move != NULL && (word & SLUICE_LAYER_MOVE_HAS) != 0) move->has = 1;
}

/* Decides whether this stage runs the layer. The upper stage sets the trigger, to the first micro-batch that it runs
 * after the receiver has the parameters. */
static int decide(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word) {
  if (move->role == SLUICE_LAYER_MOVE_LOWER) return (word & SLUICE_LAYER_MOVE_RAN) == 0;
  if (move->trigger < 0 && move->has) move->trigger = micro_batch;
  const int is_behind = move->trigger >= 0 && micro_batch >= move->trigger;
  return is_behind != move->to_lower;
}

int32_t sluice_layer_move_runs(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word) {
  if (move == NULL) return 0;
  const int runs = decide(move, micro_batch, word);
  if (sluice_layer_move_receives(move)) return runs;
  move->num_open += runs;
  move->is_over |= !runs;
  return runs;
}

void sluice_layer_move_ended(sluice_layer_move_t* move) {
  if (move != NULL && !sluice_layer_move_receives(move)) --move->num_open;
}

int32_t sluice_layer_move_is_final(const sluice_layer_move_t* move) {
  return move != NULL && !sluice_layer_move_receives(move) && move->is_over && move->num_open == 0;
}

uint64_t sluice_layer_move_activation_word(int32_t ran) { return ran ? SLUICE_LAYER_MOVE_RAN : 0; }

uint64_t sluice_layer_move_gradient_word(const sluice_layer_move_t* move) {
  return sluice_layer_move_receives(move) && move->has ? SLUICE_LAYER_MOVE_HAS : 0;
}

int32_t sluice_layer_move_receives(const sluice_layer_move_t* move) {
  return move != NULL && move->to_lower == move->role;
}
