// SPDX-License-Identifier: Apache-2.0
/* The table of row kernels (kernels.h) whose entries launch CUDA kernels. */
#pragma once

#include "backend/device/kernels.h"

const sluice_kernels_t* sluice_cuda_kernels(void);
