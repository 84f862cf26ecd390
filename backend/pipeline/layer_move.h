// SPDX-License-Identifier: Apache-2.0
/* Rules for a layer that changes its stage while a batch runs, without a drain: which stage runs it for which
 * micro-batch.
 *
 * The layer L is at the cut between two neighbours, the *upper* stage and the *lower* one, which gets its activations
 * from the upper stage; L moves from one to the other. Its state is sent during the batch. From the *trigger* on, a
 * micro-batch chosen by the upper stage, forwards run L on the new stage; the backward of a micro-batch runs where its
 * forward ran. No stage waits, and messages carry everything that the stages must know:
 *
 *   activation (upper to lower)  whether L has run: SLUICE_LAYER_MOVE_RAN in the host's word
 *   gradient (lower to upper)    whether the lower stage has L's parameters: SLUICE_LAYER_MOVE_HAS in that word
 *
 * Gradients of L before the trigger are summed on the old stage; later ones are kept separately on the new stage, by
 * micro-batch. The sum is sent as soon as it is final, at the latest at the flush, and the kept gradients are added to
 * it in the order of micro-batches. So every micro-batch runs L forward and backward exactly once, with the parameters
 * of the last update, and gradients have the bits of a batch in which nothing moves. A layer whose parameters arrive
 * too late for a trigger moves at the flush, as between two batches.
 *
 * Hosts call these functions (sluice_layer_move_*), and so does the checker, which tries every order of events
 * (test/layer_move_test.c). Pure. Source: vPipe (TPDS 2022), whose live migration this reconstructs. */
#pragma once

#include <stdint.h>

#include "sluice/pipeline.h"

static inline sluice_layer_move_t sluice_live_begin(int32_t role, int32_t to_lower) {
  return (sluice_layer_move_t){.role = role, .to_lower = to_lower, .trigger = -1};
}

/* Returns whether L moves to this stage, which then keeps gradients of L separately until the sum of the others has
 * arrived. */
static inline int sluice_live_receives(const sluice_layer_move_t* live) { return live->to_lower == live->role; }

/* The parameters of L have arrived on this stage, which receives it. */
void sluice_live_arrived(sluice_layer_move_t* live);
/* The upper stage has received a gradient with this word. */
void sluice_live_heard(sluice_layer_move_t* live, uint64_t word);

/* Returns whether this stage runs L in the forward of a micro-batch, and so in its backward. word: on the lower stage,
 * the word of the activation. */
int sluice_live_forward(sluice_layer_move_t* live, int32_t micro_batch, uint64_t word);
/* The backward of a micro-batch that ran L on this stage has ended. */
void sluice_live_ended(sluice_layer_move_t* live);
/* Returns whether L leaves this stage and no further forward or backward of this batch will run it here. */
int sluice_live_is_final(const sluice_layer_move_t* live);
/* Returns the word of an activation of the upper stage. ran: whether its forward has run L. */
uint64_t sluice_live_activation_word(int ran);
/* Returns the word of a gradient of the lower stage. */
uint64_t sluice_live_gradient_word(const sluice_layer_move_t* live);
