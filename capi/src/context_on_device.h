// SPDX-License-Identifier: Apache-2.0
/* Creates a CUDA context from given tables instead of this machine's libraries, so that tests can pass fakes. Private
 * to capi; not exported. */
#pragma once

#include "backend/comm/nccl/nccl_comm.h"
#include "backend/device/cuda/cuda_device.h"
#include "backend/gemm/cublas/gemm_cublas.h"

typedef struct sluice_cuda_sources_s {
  const sluice_cuda_driver_t* driver; /* borrowed until the context is destroyed */
  sluice_cuda_image_t image;
  const sluice_cublas_symbols_t* cublas;     /* copied */
  const sluice_cublaslt_symbols_t* cublaslt; /* copied; NULL: none */
  const sluice_nccl_symbols_t* nccl;         /* copied */
  /* For an NCCL communicator: see sluice_nccl_options_t. */
  sluice_status_t (*open_headers)(sluice_comm_t* comm, sluice_comm_t** out_tcp);
} sluice_cuda_sources_t;

/* sluice_comm_create_nccl with `sources`; NULL: the driver and NCCL of this machine. */
sluice_status_t sluice_comm_create_nccl_from(const sluice_comm_config_t* config, const sluice_nccl_group_t* group,
                                             const sluice_cuda_sources_t* sources, sluice_comm_t** out_comm);

/* Gives a local communicator the device of a context that is created on it. Errors: INVALID_ARGUMENT (it has another
 * one), else as sluice_cuda_device_create. */
sluice_status_t sluice_comm_local_use_cuda(sluice_comm_t* comm, int32_t device_id,
                                           const sluice_cuda_sources_t* sources);

/* sluice_context_create with `sources`; NULL: the driver, kernels and cuBLAS of this machine. */
sluice_status_t sluice_context_create_from(const sluice_context_config_t* config, sluice_comm_t* comm,
                                           const sluice_cuda_sources_t* sources, sluice_context_t** out_context);
