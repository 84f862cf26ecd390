// SPDX-License-Identifier: Apache-2.0
/* A layer that changes its stage while a batch runs, without a drain: who runs it for which micro-batch, as rules.
 *
 * The layer L lies at the cut between two neighbours, the *upper* stage and the *lower* one, which gets its activations
 * from there; it goes from one to the other. Its state travels beside the batch. From the *trigger* on, a micro-batch
 * chosen by the upper stage, forwards run L where it goes; the backward of a micro-batch runs where its forward ran.
 * Nobody waits, and messages say all that has to be known:
 *
 *   activation (upper to lower)  whether L has run: SLUICE_LAYER_MOVE_RAN in the host's word
 *   gradient (lower to upper)    whether L's parameters lie in the lower stage: SLUICE_LAYER_MOVE_HAS in that word
 *
 * Gradients of L fold where it lay up to the trigger; behind it they are held apart, by micro-batch. That sum follows
 * as soon as it is final, at the latest at the flush, and what was held is added to it in the order of micro-batches.
 * So every micro-batch runs L forward and
 * backward exactly once, with the parameters of the last update, and gradients have the bits of a batch in which
 * nothing moves. A layer whose parameters come too late for a trigger goes at the flush, as between two batches.
 *
 * Hosts ask these functions (sluice_layer_move_*), and so does the checker, which goes through every order of events
 * (test/layer_move_test.c). Pure. Source: vPipe (TPDS 2022), whose live migration this reconstructs. */
#ifndef SLUICE_BACKEND_PIPELINE_LAYER_MOVE_H_
#define SLUICE_BACKEND_PIPELINE_LAYER_MOVE_H_

#include <stdint.h>

#include "sluice/pipeline.h"

static inline sluice_layer_move_t sluice_live_begin(int32_t role, int32_t to_lower) {
  return (sluice_layer_move_t){.role = role, .to_lower = to_lower, .trigger = -1};
}

/* Whether L goes to this stage, which so holds gradients of L apart until the sum of the others is here. */
static inline int sluice_live_receives(const sluice_layer_move_t* live) { return live->to_lower == live->role; }

/* The parameters of L have come to this stage, which receives it. */
void sluice_live_arrived(sluice_layer_move_t* live);
/* The upper stage has taken a gradient with this word. */
void sluice_live_heard(sluice_layer_move_t* live, uint64_t word);

/* Whether this stage runs L in the forward of a micro-batch, which is also whether it does in its backward. word: of
 * the activation that the lower stage was given. */
int sluice_live_forward(sluice_layer_move_t* live, int32_t micro_batch, uint64_t word);
/* The backward of a micro-batch that ran L here has ended. */
void sluice_live_ended(sluice_layer_move_t* live);
/* L leaves this stage, and neither a forward nor a backward of this batch will run it here any more. */
int sluice_live_is_final(const sluice_layer_move_t* live);
/* The word of the activation of a forward of the upper stage that has run L, or has not. */
uint64_t sluice_live_activation_word(int ran);
/* The word of a gradient of the lower stage. */
uint64_t sluice_live_gradient_word(const sluice_layer_move_t* live);

#endif /* SLUICE_BACKEND_PIPELINE_LAYER_MOVE_H_ */
