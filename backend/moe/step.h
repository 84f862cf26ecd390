/* One outstanding forward: its saved buffers and how far its backward has come. */
#ifndef SLUICE_BACKEND_MOE_STEP_H_
#define SLUICE_BACKEND_MOE_STEP_H_

#include "backend/moe/layer.h"

typedef enum sluice_step_state_e {
  SLUICE_STEP_FRESH = 0,  /* forward done */
  SLUICE_STEP_INPUT_DONE, /* the input half is done, the weight half is open */
  SLUICE_STEP_DONE
} sluice_step_state_t;

struct sluice_step_s {
  sluice_moe_t* moe; /* retained */
  void* saved[SLUICE_SAVED_COUNT];
  uint64_t saved_bytes[SLUICE_SAVED_COUNT];
  int32_t owns_saved; /* the library allocated them; otherwise they are the host's */
  int32_t charged;    /* host-allocated, and counted in the context's bytes until the step is dropped */
  int32_t state;      /* sluice_step_state_t */
  /* Left by the input half for the weight half: T_DDO, T_ROUTE, T_DM, T_WACT over the whole pass. */
  void* deferred[SLUICE_T_COUNT];
  uint64_t deferred_bytes[SLUICE_T_COUNT];
};

sluice_status_t sluice_step_new(sluice_moe_t* moe, sluice_step_t** out_step);
/* Allocates the saved buffers through the host's callback, or from the context. On failure nothing is kept. */
sluice_status_t sluice_step_allocate(sluice_step_t* step, const uint64_t* bytes, sluice_save_fn_t save,
                                     void* save_user);

#endif /* SLUICE_BACKEND_MOE_STEP_H_ */
