// SPDX-License-Identifier: Apache-2.0
/* The choices of a layer's last forwards, so that a forward that activation checkpointing runs again takes the same n
 * and plan: the buffers that both save must have the same sizes, but a tuner may have changed its choice. Private to
 * moe.
 *
 * A pipeline has several forwards outstanding, so a repetition is recognised by its routing: the same ids come again.
 * On one rank two forwards may look the same (no tokens in both), and ranks that took different ones would not fit
 * together. So each rank's header proposes all forwards with this routing, and the repeated one is among those that
 * every rank proposes. All ranks choose from them by the same rule, in the same list: forwards enter the list in the
 * order of calls, after the ranks have agreed on one, with the choice that they agreed on. (A rank that cannot continue
 * alone between the two aborts its communicator, and with it the context.) */
#pragma once

#include "backend/moe/context/policy_hook.h"

#define SLUICE_REPLAY_FORWARDS 32 /* one bit each in a proposal */

typedef struct sluice_replay_forward_s {
  uint64_t routes;             /* hash of its ids (routing/routes.h) */
  sluice_pass_choice_t choice; /* under a plan only n is used, that of the plan; n = 0: the entry is empty */
  int16_t plan;                /* the number of its plan, if any */
  int32_t is_repeated;
} sluice_replay_forward_t;

typedef struct sluice_replay_s {
  sluice_replay_forward_t forwards[SLUICE_REPLAY_FORWARDS];
  uint32_t next;          /* place of the next forward, which holds the oldest */
  int16_t last_was_saved; /* the last forward that is no repetition needed a backward: its repetition is bound */
  int16_t outstanding;    /* upper bound of forwards that await their backward: some hosts drop one */
} sluice_replay_t;

/* The forwards with this routing, as bits. */
uint32_t sluice_replay_like(const sluice_replay_t* replay, uint64_t routes);

/* Chooses among `like` the oldest forward that has not been repeated, the order of pipelines; else the newest. Forwards
 * that may still await their backward take precedence, since a batch may have trained without checkpointing before. If
 * `like` is empty (a device with memory of its own, or the forward has left the list): the newest of all, if
 * last_was_saved. NULL: the repetition is bound to nothing. */
sluice_replay_forward_t* sluice_replay_choose(sluice_replay_t* replay, uint32_t like);

/* Called after the ranks have agreed on a forward that is no repetition. NULL: it needs no backward. */
void sluice_replay_add(sluice_replay_t* replay, const sluice_replay_forward_t* forward);

/* Called after a backward, which all ranks have run. */
void sluice_replay_end(sluice_replay_t* replay);

/* Called when plans are made again: plan numbers of earlier forwards are no longer valid. */
void sluice_replay_forget(sluice_replay_t* replay);
