// SPDX-License-Identifier: Apache-2.0
/* All device code, one fatbin: nvcc -fatbin -fmad=false -std=c++17 -I. sluice_kernels.cu */
#include "backend/device/cuda/kernels/activation.cu"
#include "backend/device/cuda/kernels/adam.cu"
#include "backend/device/cuda/kernels/decode.cu"
#include "backend/device/cuda/kernels/routing.cu"
#include "backend/device/cuda/kernels/token_copies.cu"
#include "backend/device/cuda/kernels/rows.cu"
#include "backend/device/cuda/kernels/sums.cu"
