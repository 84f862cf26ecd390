#include "backend/moe/layer/ceiling_state.h"

sluice_status_t sluice_ceiling_create(sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  if (sluice_shape_ceiling(&moe->shape) == 0) return SLUICE_OK;
  moe->ceiling = sluice_alloc_zeroed(&context->allocator, sizeof *moe->ceiling, "state of a layer under ceilings");
  if (moe->ceiling == NULL) return sluice_alloc_status();
  moe->ceiling->tally = sluice_alloc(context->memory, SLUICE_TALLY_BYTES, "tally of a layer under ceilings");
  return moe->ceiling->tally != NULL ? SLUICE_OK : sluice_alloc_status();
}

void sluice_ceiling_destroy(sluice_moe_t* moe) {
  if (moe->ceiling == NULL) return;
  sluice_free(moe->context->memory, moe->ceiling->tally, SLUICE_TALLY_BYTES);
  sluice_free(&moe->context->allocator, moe->ceiling, sizeof *moe->ceiling);
  moe->ceiling = NULL;
}

void sluice_ceiling_forget_agreed(const sluice_moe_t* moe) {
  if (moe->ceiling != NULL) moe->ceiling->num_kinds = 0;
}
