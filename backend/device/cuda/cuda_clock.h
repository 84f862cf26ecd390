// SPDX-License-Identifier: Apache-2.0
/* Times of passes and their ops, implementing device/device_clock.h. */
#pragma once

#include "backend/device/device.h"

extern const sluice_device_clock_t sluice_cuda_clock;
