// SPDX-License-Identifier: Apache-2.0
/* One forward, from its arguments to its pass, as forward.c and the modes see it. Private to moe/run. */
#pragma once

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/pass/pass.h"
#include "backend/moe/run/run.h"

typedef struct sluice_forward_s {
  sluice_pass_t pass;
  const sluice_moe_forward_args_t* args;
  int32_t repeats;  /* repeats an earlier forward while n or the plan is open */
  int32_t is_noted; /* likewise: is recorded for a repetition */
  sluice_step_t* step;
  int32_t* counts; /* under a plan: counts from reading the ids (routing/routes.h) */
  /* Before the header the wanted choice; afterwards that of the pass, or with n of its plan. Grouped if its chunks
   * allow it. */
  sluice_pass_choice_t choice;
  sluice_pass_choice_t expected; /* the choice if this forward repeats no earlier one on all ranks */
  int32_t plan;                  /* number of its plan in the layer's set */
  int32_t is_sized;              /* the open part of the choice is that for its T */
  int32_t is_resized;            /* the choice changed once the ranks knew their T: the schedule changes too */
  uint64_t routes;               /* hash of its routes if repetitions are recognised; else 0 */
  uint32_t like;                 /* earlier forwards that it may repeat on this rank (layer/replay.h) */
} sluice_forward_t;

static inline int sluice_forward_keeps(const sluice_forward_t* f) { return f->args->needs_backward != 0; }

/* The part of a template's spec that both directions share. keep: of a forward, that a backward follows. */
sluice_template_spec_t sluice_run_spec(const sluice_pass_t* pass, int32_t direction, int32_t keep);

/* Sets what the passes of the binding send, after sluice_binding_take_deduplication. */
void sluice_run_take_travel(sluice_pass_t* pass);

/* Takes the template for the current binding. */
sluice_status_t sluice_forward_take_template(sluice_forward_t* f);
/* The same for n chunks with these policies: for all chunks, and by chunk. */
sluice_status_t sluice_forward_choose_template(sluice_forward_t* f, int32_t num_chunks, int32_t restore_input,
                                               int32_t restore_pre_activation, const sluice_chunk_policies_t* by_chunk);
/* The same with the config's policies, or, if the config leaves them to reuse, those of the chosen restore set. */
sluice_status_t sluice_forward_choose_by_config(sluice_forward_t* f, int32_t num_chunks);
