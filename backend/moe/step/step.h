// SPDX-License-Identifier: Apache-2.0
/* One outstanding forward: its saved buffers and the state of its backward. */
#pragma once

#include "backend/moe/routing/binding.h"

typedef enum sluice_step_state_e {
  SLUICE_STEP_FRESH = 0,  /* forward done */
  SLUICE_STEP_DGRAD_DONE, /* dgrad is done, wgrad is open */
  SLUICE_STEP_DONE
} sluice_step_state_t;

struct sluice_step_s {
  sluice_live_link_t link; /* first member: entry in the context's list of live steps */
  sluice_moe_t* moe;       /* retained */
  void* saved[SLUICE_SAVED_COUNT];
  uint64_t saved_bytes[SLUICE_SAVED_COUNT];
  uint64_t held_bytes[SLUICE_SAVED_COUNT]; /* bytes counted in the context's step_bytes; blocks may be larger */
  int32_t owns_saved;                      /* the library allocated them; otherwise they are the host's */
  int32_t num_charged;                     /* host-allocated buffers counted in the context until the step is dropped */
  int32_t state;                           /* sluice_step_state_t */
  uint8_t is_captured;                     /* a graph uses its buffers: the library's own stay until the context ends */
  uint8_t is_promised;                     /* under a plan: its bytes are in the context's ledger */
  uint8_t reuses_saved;                    /* dgrad wrote dT_M over the saved T_M */
  uint8_t behind_first; /* bits by saved buffer: no block of its own, it follows the other buffer of its kind */
  /* Left by dgrad for wgrad: every slot that WEIGHT_GRAD reads and that the step does not save. */
  void* deferred[SLUICE_T_COUNT];
  uint64_t deferred_bytes[SLUICE_T_COUNT];
};

/* Makes a step from the saved buffers of an earlier one. Errors: INVALID_ARGUMENT, STATE (used up), NO_MEMORY. */
sluice_status_t sluice_step_from_saved(sluice_moe_t* moe, void* const* saved, const uint64_t* saved_bytes,
                                       sluice_step_t** out_step);
/* STATE if a backward has overwritten this step's saved rows. */
sluice_status_t sluice_step_check_saved(const sluice_step_t* step);
sluice_status_t sluice_step_new(sluice_moe_t* moe, sluice_step_t** out_step);
/* Allocates the saved buffers through the host's callback (which counts them itself if save_is_counted), or from the
 * context, for use on `stream`. On failure the caller drops the step. */
sluice_status_t sluice_step_allocate(sluice_step_t* step, const uint64_t* bytes, sluice_stream_t stream,
                                     sluice_save_fn_t save, void* save_user, int save_is_counted);
/* Allocates the rows that dgrad leaves for wgrad. bytes: by deferred tensor. */
sluice_status_t sluice_step_allocate_deferred(sluice_step_t* step, const uint64_t* bytes, sluice_stream_t stream);
void sluice_step_free_deferred(sluice_step_t* step);
/* Sets given [SLUICE_T_COUNT] to the kept tensors of this step. */
void sluice_step_give_saved(const sluice_step_t* step, const sluice_binding_t* binding, void** given);
