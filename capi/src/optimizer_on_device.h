// SPDX-License-Identifier: Apache-2.0
/* Steps of an optimizer on the device of a context. Private to capi. */
#pragma once

#include "backend/optim/bucketed/bucketed.h"
#include "sluice/optimizer.h"

typedef struct sluice_optimizer_on_device_s sluice_optimizer_on_device_t;

/* Creates it from a config with a context, which is retained. Errors: as sluice_optimizer_create. */
sluice_status_t sluice_optimizer_on_device_create(const sluice_optimizer_config_t* config,
                                                  sluice_optimizer_on_device_t** out_on_device);
void sluice_optimizer_on_device_destroy(sluice_optimizer_on_device_t* on_device); /* accepts NULL */

/* As sluice_device_buckets_step. */
sluice_status_t sluice_optimizer_on_device_step(sluice_optimizer_on_device_t* on_device,
                                                const sluice_bucketed_step_t* step, sluice_stream_t stream,
                                                sluice_bucketed_outcome_t* out_outcome);
