// SPDX-License-Identifier: Apache-2.0
/* Rejects steps that a device does not support. Private to backend/optim/on_device. */
#pragma once

#include "backend/device/device.h"
#include "backend/optim/bucketed/request.h"

/* Checks a step. Errors: INVALID_ARGUMENT naming group and tensor, UNSUPPORTED naming the setting. */
sluice_status_t sluice_device_step_check(sluice_device_t* device, const sluice_bucketed_step_t* step);
