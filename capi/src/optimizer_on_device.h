/* Steps of an optimizer on the device of a context. Private to capi. */
#ifndef SLUICE_CAPI_SRC_OPTIMIZER_ON_DEVICE_H_
#define SLUICE_CAPI_SRC_OPTIMIZER_ON_DEVICE_H_

#include "backend/optim/adam_request.h"
#include "sluice/optimizer.h"

typedef struct sluice_optimizer_on_device_s sluice_optimizer_on_device_t;

/* Of a config with a context, which it retains. Errors: as sluice_optimizer_create. */
sluice_status_t sluice_optimizer_on_device_create(const sluice_optimizer_config_t* config,
                                                  sluice_optimizer_on_device_t** out_on_device);
void sluice_optimizer_on_device_destroy(sluice_optimizer_on_device_t* on_device); /* accepts NULL */

/* UNSUPPORTED for what a step on a device does not do. */
sluice_status_t sluice_optimizer_on_device_check(const sluice_optimizer_step_args_t* args);

sluice_status_t sluice_optimizer_on_device_step(sluice_optimizer_on_device_t* on_device, const sluice_adam_step_t* step,
                                                sluice_stream_t stream, int32_t* out_is_skipped);

#endif /* SLUICE_CAPI_SRC_OPTIMIZER_ON_DEVICE_H_ */
