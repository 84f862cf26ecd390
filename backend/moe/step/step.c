// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/step/step.h"

#include <assert.h>
#include <stddef.h>
#include <unistd.h>

#include "backend/model/pass_sizes.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/step/saved_memory.h"

const char* const sluice_saved_names[SLUICE_SAVED_COUNT] = {"META", "INPUT", "PRE_ACTIVATION", "HOST_INPUT",
                                                            "HOST_PRE_ACTIVATION"};

static_assert(sizeof(sluice_step_t) == SLUICE_STEP_BYTES, "plans count it");
static_assert(offsetof(sluice_step_t, link) == 0, "a step is known by its link");

/* Counted bytes of the handle, which lies in host memory. */
static uint64_t handle_bytes(const sluice_moe_t* moe) {
  return moe->context->rows->counts_host_memory ? sluice_align_up(sizeof(sluice_step_t)) : 0;
}

sluice_status_t sluice_step_new(sluice_moe_t* moe, sluice_step_t** out_step) {
  *out_step = NULL;
  sluice_step_t* step = sluice_alloc_zeroed(&moe->context->allocator, sizeof *step, "step");
  if (step == NULL) return sluice_alloc_status();
  sluice_layer_retain(moe);
  step->moe = moe;
  atomic_fetch_add(&moe->context->step_bytes, handle_bytes(moe));
  sluice_live_steps_add(&moe->context->live_steps, &step->link);
  *out_step = step;
  return SLUICE_OK;
}

static const sluice_saved_memory_t* memory_of(const sluice_moe_t* moe) { return moe->strategies->saved; }

static void hold(sluice_step_t* step, int32_t which, uint64_t bytes) {
  step->held_bytes[which] = sluice_saved_is_counted(memory_of(step->moe), which) ? bytes : 0;
  atomic_fetch_add(&step->moe->context->step_bytes, step->held_bytes[which]);
}

/* A released buffer no longer counts. */
static void let_go(sluice_step_t* step, int32_t which) {
  atomic_fetch_sub(&step->moe->context->step_bytes, step->held_bytes[which]);
  step->held_bytes[which] = 0;
}

static sluice_status_t allocate_own(sluice_step_t* step, int32_t which, uint64_t bytes, sluice_stream_t stream) {
  uint64_t counted = 0;
  SLUICE_TRY(memory_of(step->moe)->allocate(step, which, bytes, stream, &counted));
  hold(step, which, counted);
  return SLUICE_OK;
}

/* Memory of a plan that a graph keeps stays counted, and so does the plan's promise. */
static int stays_counted(const sluice_step_t* step) { return step->is_captured && step->is_promised; }

static void free_own(sluice_step_t* step, int32_t which) {
  if (step->saved[which] == NULL) return;
  if (!stays_counted(step)) let_go(step, which);
  memory_of(step->moe)->release(step, which);
}

/* Records that the forward is outstanding, and, under a plan, the promised bytes that the buffer uses. */
static sluice_status_t enter_ledger(sluice_step_t* step, int32_t which, uint64_t bytes) {
  sluice_context_t* context = step->moe->context;
  const sluice_plan_data_t* plan = step->moe->plan;
  sluice_ledger_sums_t what = {0};
  const int is_offloaded = which == SLUICE_SAVED_HOST_INPUT || which == SLUICE_SAVED_HOST_PRE_ACTIVATION;
  if (which == SLUICE_SAVED_META) {
    what.steps = 1;
    what.promised = plan == NULL ? 0 : plan->bytes.step;
    what.promised_pool = plan == NULL ? 0 : sluice_plan_pool_of_step(plan);
    step->is_promised = plan != NULL;
  } else if (plan == NULL || !is_offloaded) {
    return SLUICE_OK;
  } else {
    what.pool = sluice_align_up(bytes);
    if (bytes == 0) return SLUICE_OK;
  }
  return sluice_ledger_add(&context->ledger, step->saved[which], step->moe, &what);
}

sluice_status_t sluice_step_allocate(sluice_step_t* step, const uint64_t* bytes, sluice_stream_t stream,
                                     sluice_save_fn_t save, void* save_user, int save_is_counted) {
  const sluice_saved_memory_t* memory = memory_of(step->moe);
  step->owns_saved = save == NULL;
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    step->saved_bytes[i] = bytes[i];
    if (save == NULL) {
      SLUICE_TRY(allocate_own(step, i, bytes[i], stream));
      SLUICE_TRY(enter_ledger(step, i, bytes[i]));
      continue;
    }
    if (!save_is_counted) {
      SLUICE_TRY(sluice_allocator_charge(memory->allocator(step->moe->context, i), bytes[i], sluice_saved_names[i]));
      step->num_charged = i + 1;
      hold(step, i, bytes[i]);
    }
    step->saved[i] = save(save_user, i, bytes[i]);
    if (step->saved[i] == NULL && bytes[i] > 0) {
      return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "layer %d: the host refused %llu bytes for the saved buffer %s",
                         step->moe->shape.config.layer_id, (unsigned long long)bytes[i], sluice_saved_names[i]);
    }
    SLUICE_TRY(enter_ledger(step, i, bytes[i]));
    SLUICE_TRY(memory->take_given(step, i, bytes[i]));
  }
  return SLUICE_OK;
}

void sluice_step_give_saved(const sluice_step_t* step, const sluice_binding_t* binding, void** given) {
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) given[sluice_saved_tensors[i]] = step->saved[i];
  char* input = step->saved[SLUICE_SAVED_INPUT];
  if (input != NULL) given[SLUICE_T_KEPT_DI] = input + sluice_binding_kept_bytes(binding);
}

sluice_status_t sluice_step_allocate_deferred(sluice_step_t* step, const uint64_t* bytes, sluice_stream_t stream) {
  const sluice_saved_memory_t* memory = memory_of(step->moe);
  uint64_t most[SLUICE_NUM_DEFERRED];
  SLUICE_TRY(sluice_saved_most_deferred(memory, step->moe, most));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) {
    const int32_t tensor = sluice_deferred_tensors[i];
    SLUICE_TRY(memory->allocate_deferred(step, tensor, bytes[i], most[i], stream));
    if (step->deferred[tensor] == NULL) continue;
    atomic_fetch_add(&step->moe->context->step_bytes, sluice_counted_bytes(step->deferred_bytes[tensor]));
  }
  return SLUICE_OK;
}

static void free_deferred(sluice_step_t* step, int32_t tensor) {
  sluice_context_t* context = step->moe->context;
  if (step->deferred[tensor] == NULL) return;
  if (!stays_counted(step)) {
    atomic_fetch_sub(&context->step_bytes, sluice_counted_bytes(step->deferred_bytes[tensor]));
  }
  memory_of(step->moe)->release_deferred(step, tensor);
  step->deferred[tensor] = NULL;
}

void sluice_step_free_deferred(sluice_step_t* step) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) free_deferred(step, t);
}

static sluice_status_t check_used_up(const sluice_moe_t* moe, const void* meta) {
  if (!sluice_binding_is_used_up(meta)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "layer %d: a backward has overwritten the saved buffers of this step; to run a second backward, "
                     "run the first one with may_reuse_saved = 0",
                     moe->shape.config.layer_id);
}

sluice_status_t sluice_step_check_saved(const sluice_step_t* step) {
  return check_used_up(step->moe, step->saved[SLUICE_SAVED_META]);
}

sluice_status_t sluice_step_from_saved(sluice_moe_t* moe, void* const* saved, const uint64_t* saved_bytes,
                                       sluice_step_t** out_step) {
  uint64_t wanted[SLUICE_SAVED_COUNT];
  SLUICE_TRY(sluice_binding_peek(moe, saved[SLUICE_SAVED_META], saved_bytes[SLUICE_SAVED_META], NULL, wanted, NULL));
  SLUICE_TRY(check_used_up(moe, saved[SLUICE_SAVED_META]));
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) {
    if (saved_bytes[i] < wanted[i] || (saved[i] == NULL && wanted[i] > 0)) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: saved buffer %s has %llu bytes; this step needs %llu",
                         moe->shape.config.layer_id, sluice_saved_names[i], (unsigned long long)saved_bytes[i],
                         (unsigned long long)wanted[i]);
    }
  }
  SLUICE_TRY(sluice_step_new(moe, out_step));
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    (*out_step)->saved[i] = saved[i];
    (*out_step)->saved_bytes[i] = saved_bytes[i];
  }
  return SLUICE_OK;
}

void sluice_step_drop(sluice_step_t* step) {
  if (step == NULL) return;
  sluice_moe_t* moe = step->moe;
  if (moe->context->pid != getpid()) return; /* in a forked child: the parent owns the memory */
  sluice_allocator_t* allocator = &moe->context->allocator;
  sluice_live_steps_remove(&moe->context->live_steps, &step->link);
  if (step->saved[SLUICE_SAVED_INPUT] == NULL) step->is_promised = 0; /* it failed before any block was taken */
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    if (step->owns_saved && stays_counted(step)) {
      sluice_ledger_keep(&moe->context->ledger, step->saved[i]);
    } else if (step->owns_saved || i < step->num_charged) {
      sluice_ledger_remove(&moe->context->ledger, step->saved[i]);
    }
    if (step->owns_saved) free_own(step, i);
    if (i < step->num_charged) {
      let_go(step, i);
      sluice_allocator_discharge(memory_of(moe)->allocator(moe->context, i), step->saved_bytes[i]);
    }
  }
  sluice_step_free_deferred(step);
  sluice_free(allocator, step, sizeof *step);
  atomic_fetch_sub(&moe->context->step_bytes, handle_bytes(moe));
  sluice_layer_release(moe);
}
