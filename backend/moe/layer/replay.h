// SPDX-License-Identifier: Apache-2.0
/* What a layer's last forwards took, so that one that activation checkpointing runs again takes the same n and plan:
 * what both save has to have the same sizes, and a tuner may want others by now. Private to moe.
 *
 * A pipeline has several forwards outstanding, so a repetition is recognised by its routing: the ids of the first time
 * come again. On one rank two forwards may look alike (no tokens in both), and ranks that took different ones would
 * not fit together. So each rank proposes all that look like it, in its header, and what looks like it on every rank is
 * what is repeated. All ranks choose from it by the same rule, in the same list: forwards come into it in the order of
 * calls, once the ranks have agreed on one, with what they agreed on. (A rank that cannot go on alone between the two
 * aborts its communicator, and with it the context.)
 */
#ifndef SLUICE_BACKEND_MOE_LAYER_REPLAY_H_
#define SLUICE_BACKEND_MOE_LAYER_REPLAY_H_

#include "backend/moe/context/policy_hook.h"

#define SLUICE_REPLAY_FORWARDS 32 /* a bit of a proposal each */

typedef struct sluice_replay_forward_s {
  uint64_t routes;             /* of sluice_routes_hash */
  sluice_pass_choice_t choice; /* under a plan n alone counts, which is the plan's; n is 0: nothing is here */
  int16_t plan;                /* its number, under one */
  int32_t is_repeated;
} sluice_replay_forward_t;

typedef struct sluice_replay_s {
  sluice_replay_forward_t forwards[SLUICE_REPLAY_FORWARDS];
  uint32_t next;          /* the place of the next one, which is that of the oldest */
  int16_t last_was_saved; /* the last forward that was no repetition needed a backward: its repetition is bound */
  int16_t outstanding;    /* forwards that still need one, at most: some hosts let one go without */
} sluice_replay_t;

/* The forwards, a bit each, of that routing. */
uint32_t sluice_replay_like(const sluice_replay_t* replay, uint64_t routes);

/* Of `like` the oldest that has not been repeated, as pipelines go; else the newest. Of the newest that may need their
 * backward still, if one of these is like it: a batch may have trained without checkpointing before. Where none is like
 * it (a device with memory of its own, or it has left the list) the newest of all, if last_was_saved. NULL: the
 * repetition is bound to nothing. */
sluice_replay_forward_t* sluice_replay_choose(sluice_replay_t* replay, uint32_t like);

/* After the ranks have agreed on a forward that is no repetition. NULL: it needs no backward. */
void sluice_replay_add(sluice_replay_t* replay, const sluice_replay_forward_t* forward);

/* After a backward, which all ranks have run. */
void sluice_replay_end(sluice_replay_t* replay);

/* Plans are made anew: what forwards took has no number in them. */
void sluice_replay_forget(sluice_replay_t* replay);

#endif /* SLUICE_BACKEND_MOE_LAYER_REPLAY_H_ */
