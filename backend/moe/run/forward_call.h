// SPDX-License-Identifier: Apache-2.0
/* One forward in the making, from its arguments to its pass: what forward.c, the modes and replay work on. Private to
 * moe/run. */
#ifndef SLUICE_BACKEND_MOE_RUN_FORWARD_CALL_H_
#define SLUICE_BACKEND_MOE_RUN_FORWARD_CALL_H_

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/pass/pass.h"
#include "backend/moe/run/run.h"

typedef struct sluice_forward_s {
  sluice_pass_t pass;
  const sluice_moe_forward_args_t* args;
  int32_t repeats;  /* an earlier one, where somebody chooses n or plans (repeats.h) */
  int32_t is_noted; /* likewise: for a repetition that may come */
  sluice_step_t* step;
  int32_t* counts; /* under a plan: what the look at the ids brought (routing/routes.h) */
  /* Wanted before the header; afterwards that of the pass, or with n of its plan. Grouped where its chunks allow it. */
  sluice_pass_choice_t choice;
  sluice_pass_choice_t expected; /* the choice if this forward repeats no earlier one on all ranks */
  int32_t plan;                  /* its number among the layer's */
  int32_t is_sized;              /* the choice is that of its T, as far as it is open */
  int32_t is_resized;            /* and became another when the ranks had said theirs: its schedule is another one */
  uint64_t routes;               /* their hash, where somebody looks back; else 0 */
  uint32_t like;                 /* the earlier forwards that this rank takes it to repeat (layer/replay.h) */
} sluice_forward_t;

static inline int sluice_forward_keeps(const sluice_forward_t* f) { return f->args->needs_backward != 0; }

/* What both directions say of a schedule. keep: of a forward, that a backward follows. */
sluice_template_spec_t sluice_run_spec(const sluice_pass_t* pass, int32_t direction, int32_t keep);

/* Sets what the passes of the binding send, once that is chosen (sluice_binding_take_deduplication). */
void sluice_run_take_travel(sluice_pass_t* pass);

/* The template for the binding as it is. */
sluice_status_t sluice_forward_take_template(sluice_forward_t* f);
/* The same for n chunks with these policies: of all chunks, and by chunk. */
sluice_status_t sluice_forward_choose_template(sluice_forward_t* f, int32_t num_chunks, int32_t restore_input,
                                               int32_t restore_pre_activation, const sluice_chunk_policies_t* by_chunk);
/* The config's policies, or where it leaves them to reuse, those of the chosen restore set. */
sluice_status_t sluice_forward_choose_by_config(sluice_forward_t* f, int32_t num_chunks);

#endif /* SLUICE_BACKEND_MOE_RUN_FORWARD_CALL_H_ */
