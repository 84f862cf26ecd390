// SPDX-License-Identifier: Apache-2.0
#include "capi/src/optimizer_on_device.h"

#include <unistd.h>

#include "backend/moe/context/context.h"
#include "backend/optim/on_device/on_device.h"

struct sluice_optimizer_on_device_s {
  sluice_context_t* context;
  sluice_device_buckets_t* buckets;
};

static sluice_status_t acquire(sluice_context_t* context, const sluice_optimizer_config_t* config,
                               sluice_device_buckets_t** out_buckets) {
  SLUICE_TRY(sluice_engine_enter(context, "sluice_optimizer_create"));
  const sluice_status_t status =
      sluice_device_buckets_create(context->device, context->memory, sluice_process_allocator(), config->device_bucket,
                                   config->device_num_slots, out_buckets);
  sluice_engine_leave(context);
  return status;
}

sluice_status_t sluice_optimizer_on_device_create(const sluice_optimizer_config_t* config,
                                                  sluice_optimizer_on_device_t** out_on_device) {
  *out_on_device = NULL;
  sluice_optimizer_on_device_t* on_device =
      sluice_alloc_zeroed(sluice_process_allocator(), sizeof *on_device, "optimizer on a device");
  if (on_device == NULL) return sluice_alloc_status();
  const sluice_status_t status = acquire(config->context, config, &on_device->buckets);
  if (status != SLUICE_OK) {
    sluice_free(sluice_process_allocator(), on_device, sizeof *on_device);
    return status;
  }
  sluice_engine_retain(config->context);
  on_device->context = config->context;
  *out_on_device = on_device;
  return SLUICE_OK;
}

void sluice_optimizer_on_device_destroy(sluice_optimizer_on_device_t* on_device) {
  if (on_device == NULL) return;
  /* A forked child leaves device memory to its parent. */
  const int is_own = on_device->context->pid == getpid();
  if (is_own) sluice_device_buckets_destroy(on_device->buckets);
  sluice_engine_release(on_device->context);
  sluice_free(sluice_process_allocator(), on_device, sizeof *on_device);
}

sluice_status_t sluice_optimizer_on_device_step(sluice_optimizer_on_device_t* on_device,
                                                const sluice_bucketed_step_t* step, sluice_stream_t stream,
                                                sluice_bucketed_outcome_t* out_outcome) {
  sluice_context_t* context = on_device->context;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_optimizer_step"));
  const sluice_status_t status = sluice_device_buckets_step(on_device->buckets, step, stream, out_outcome);
  sluice_engine_leave(context);
  return status;
}
