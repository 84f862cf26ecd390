// SPDX-License-Identifier: Apache-2.0
/* How the chunks of a pass get their counts, which determines the use of its header. A mode is chosen when a layer is
 * made, and again whenever a plan is installed or removed (sluice_layer_choose_mode); forward and backward call its
 * table. Entries that may be NULL say what NULL means; call these by the functions below the table.
 *
 *   exact                chunks are bound before the header, which carries their counts
 *   under a plan         chunks are cut by received rows, which takes an all-reduce after the header; counts follow
 *   capacity             counts are constants: no header once the ranks have agreed on a call of the kind; graphs
 *   capacity, planned    the same under a plan, which the header of its first call compares */
#pragma once

#include "backend/moe/run/forward_call.h"

typedef struct sluice_mode_s {
  int32_t is_bounded; /* a plan has room for passes: their templates keep to its rings */

  /* ---- any collective call ---- */

  /* Called first: reports an earlier failure by an abort if no header will report it. NULL: the header does. */
  sluice_status_t (*tell_failure)(const sluice_moe_t* moe);
  /* Opens the call on its stream. STATE if the stream is being captured into a graph and the mode reads counts. */
  sluice_status_t (*open)(sluice_pass_t* pass);
  /* In a capture, once the schedule is known: whether it can be captured. NULL: `open` has refused every capture. */
  sluice_status_t (*check_capture)(const sluice_pass_t* pass);
  /* Agrees with the other ranks; or continues without a header if they have agreed on such calls before. */
  sluice_status_t (*agree)(sluice_pass_t* pass, const sluice_proposal_t* proposal, sluice_handshake_t* out_handshake);
  /* Called for a pass that failed after its header: returns `status` with its record; other ranks are informed. */
  sluice_status_t (*fail)(const sluice_pass_t* pass, sluice_status_t status);
  /* Ends any call that was opened. NULL: nothing is recorded of a call. */
  void (*close)(const sluice_pass_t* pass, sluice_status_t status);

  /* ---- forward, in this order ---- */

  /* Runs the steps and checks that need no other rank: f->pass.schedule and binding, as far as they are known. */
  sluice_status_t (*bind_alone)(sluice_forward_t* f);
  /* Fills in the header's proposal. */
  void (*propose)(const sluice_forward_t* f, sluice_proposal_t* proposal);
  /* Takes a plan and checks its room. OVER_BUDGET on all ranks. repeated: the forward that this one repeats, or NULL.
   */
  sluice_status_t (*take_plan)(sluice_forward_t* f, const sluice_handshake_t* handshake,
                               const sluice_replay_forward_t* repeated);
  /* Completes the binding, except for sluice_binding_finish. */
  sluice_status_t (*bind)(sluice_forward_t* f, const sluice_handshake_t* handshake);

  /* ---- backward ---- */

  /* Called for wgrad, which involves no other rank. NULL: nothing is recorded of a call. */
  void (*note_alone)(const sluice_pass_t* pass);
} sluice_mode_t;

static inline sluice_status_t sluice_mode_tell_failure(const sluice_moe_t* moe) {
  return moe->mode->tell_failure == NULL ? SLUICE_OK : moe->mode->tell_failure(moe);
}
static inline sluice_status_t sluice_mode_check_capture(const sluice_pass_t* pass) {
  const sluice_mode_t* mode = pass->moe->mode;
  return mode->check_capture == NULL ? SLUICE_OK : mode->check_capture(pass);
}
static inline void sluice_mode_close(const sluice_pass_t* pass, sluice_status_t status) {
  if (pass->moe->mode->close != NULL) pass->moe->mode->close(pass, status);
}
static inline void sluice_mode_note_alone(const sluice_pass_t* pass) {
  if (pass->moe->mode->note_alone != NULL) pass->moe->mode->note_alone(pass);
}

extern const sluice_mode_t sluice_mode_exact;
extern const sluice_mode_t sluice_mode_under_plan;
extern const sluice_mode_t sluice_mode_capacity;
extern const sluice_mode_t sluice_mode_capacity_under_plan;

/* Called for a new layer, and whenever a plan has been installed or removed. */
void sluice_layer_choose_mode(sluice_moe_t* moe);

/* A new pass of a layer, with its mode, its ops and its strategies. stream: the host's; NULL on a CPU. */
sluice_pass_t sluice_run_pass(sluice_moe_t* moe, int32_t direction, sluice_stream_t stream);
