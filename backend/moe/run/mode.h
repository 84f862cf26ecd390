// SPDX-License-Identifier: Apache-2.0
/* How the chunks of a pass get their counts, and so what its header is for. A mode is chosen when a layer is made, and
 * anew whenever a plan is installed or removed (choose_mode.h); forward and backward go through its table. An entry
 * that may be NULL says so, and what NULL means; all others are there in every mode.
 *
 *   exact                chunks are bound before the header, which carries their counts
 *   under a plan         chunks are cut by received rows, which takes an all-reduce after the header; counts follow
 *   capacity             counts are constants: no header once the ranks have agreed on a call of the kind; graphs
 *   capacity, planned    the same under a plan, which the header of its first call compares
 */
#ifndef SLUICE_BACKEND_MOE_RUN_MODE_H_
#define SLUICE_BACKEND_MOE_RUN_MODE_H_

#include "backend/moe/run/forward_call.h"

typedef struct sluice_mode_s {
  int32_t is_bounded; /* a plan has room for passes: their templates keep to its rings */

  /* ---- any collective call ---- */

  /* First: where no header will tell the other ranks of an earlier failure, an abort does. NULL: the header tells. */
  sluice_status_t (*tell_failure)(const sluice_moe_t* moe);
  /* Opens the call on its stream. STATE where that is captured into a graph, and the mode reads counts. */
  sluice_status_t (*open)(sluice_pass_t* pass);
  /* Once the schedule is known, in a capture: whether it may be. NULL: `open` has refused every capture. */
  sluice_status_t (*check_capture)(const sluice_pass_t* pass);
  /* The ranks agree; or have agreed on such calls before, and this rank goes on alone. */
  sluice_status_t (*agree)(sluice_pass_t* pass, const sluice_proposal_t* proposal, sluice_handshake_t* out_handshake);
  /* A pass that failed beyond its header: `status` with its record, and the others learn of it. */
  sluice_status_t (*fail)(const sluice_pass_t* pass, sluice_status_t status);
  /* The end of any call that got past open. NULL: nothing is remembered of a call. */
  void (*close)(const sluice_pass_t* pass, sluice_status_t status);

  /* ---- forward, in this order ---- */

  /* All that this rank can do, and refuse, alone: f->pass.schedule and binding, as far as they are known. */
  sluice_status_t (*bind_alone)(sluice_forward_t* f);
  /* What the header says of it. */
  void (*propose)(const sluice_forward_t* f, sluice_proposal_t* proposal);
  /* A plan, and room under it. OVER_BUDGET on all ranks alike. repeated: of the forward that this one repeats, or NULL.
   */
  sluice_status_t (*take_plan)(sluice_forward_t* f, const sluice_handshake_t* handshake,
                               const sluice_replay_forward_t* repeated);
  /* The rest of the binding; sluice_binding_finish is still to come. */
  sluice_status_t (*bind)(sluice_forward_t* f, const sluice_handshake_t* handshake);

  /* ---- backward ---- */

  /* wgrad, which asks nobody. NULL: nothing is remembered of a call. */
  void (*note_alone)(const sluice_pass_t* pass);
} sluice_mode_t;

extern const sluice_mode_t sluice_mode_exact;
extern const sluice_mode_t sluice_mode_under_plan;
extern const sluice_mode_t sluice_mode_capacity;
extern const sluice_mode_t sluice_mode_capacity_under_plan;

#endif /* SLUICE_BACKEND_MOE_RUN_MODE_H_ */
