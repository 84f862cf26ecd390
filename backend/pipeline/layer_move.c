// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/layer_move.h"

void sluice_live_arrived(sluice_layer_move_t* live) { live->has = 1; }

void sluice_live_heard(sluice_layer_move_t* live, uint64_t word) {
  if ((word & SLUICE_LAYER_MOVE_HAS) != 0) live->has = 1;
}

/* Decides whether this stage runs L. The upper stage sets the trigger, to the first micro-batch that it runs after the
 * receiver has the parameters. */
static int decide(sluice_layer_move_t* live, int32_t micro_batch, uint64_t word) {
  if (live->role == SLUICE_LAYER_MOVE_LOWER) return (word & SLUICE_LAYER_MOVE_RAN) == 0;
  if (live->trigger < 0 && live->has) live->trigger = micro_batch;
  const int is_behind = live->trigger >= 0 && micro_batch >= live->trigger;
  return is_behind != live->to_lower;
}

int sluice_live_forward(sluice_layer_move_t* live, int32_t micro_batch, uint64_t word) {
  const int runs = decide(live, micro_batch, word);
  if (sluice_live_receives(live)) return runs;
  live->num_open += runs;
  live->is_over |= !runs;
  return runs;
}

void sluice_live_ended(sluice_layer_move_t* live) {
  if (!sluice_live_receives(live)) --live->num_open;
}

int sluice_live_is_final(const sluice_layer_move_t* live) {
  return !sluice_live_receives(live) && live->is_over && live->num_open == 0;
}

uint64_t sluice_live_activation_word(int ran) { return ran ? SLUICE_LAYER_MOVE_RAN : 0; }

uint64_t sluice_live_gradient_word(const sluice_layer_move_t* live) {
  return sluice_live_receives(live) && live->has ? SLUICE_LAYER_MOVE_HAS : 0;
}
