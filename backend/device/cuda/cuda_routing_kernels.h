// SPDX-License-Identifier: Apache-2.0
/* The kernels of cuda_routing.h and cuda_token_copies.h, implementing device/routing_kernels.h. */
#pragma once

#include "backend/device/device.h"

extern const sluice_routing_kernels_t sluice_cuda_routing_kernels;
