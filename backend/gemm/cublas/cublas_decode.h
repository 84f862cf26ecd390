// SPDX-License-Identifier: Apache-2.0
/* Decodes packed weights of a list to its scratch memory, some GEMMs at a time. */
#pragma once

#include "backend/device/cuda/cuda_launch.h"
#include "backend/gemm/gemm.h"

/* The GEMMs of a part of a list. */
typedef struct sluice_cublas_decoded_s {
  sluice_gemm_problem_t problems[SLUICE_CUDA_DECODED];
  sluice_cuda_packed_t weights[SLUICE_CUDA_DECODED];
} sluice_cublas_decoded_t;

/* Whether the scratch memory of the list can hold each of its decoded weights. */
int sluice_cublas_can_decode(const sluice_grouped_gemm_t* list);

/* Makes a list of the GEMMs from *inout_next on, as many as `decoded` and the scratch memory hold, and enqueues the
 * decoding of their weights on the list's stream. Weights of one kind, such as those of an op of a layer, take one
 * launch. Decodes nothing for empty GEMMs. Work that reads the previous part must be on that stream, or joined
 * to it. Call it between enter and leave of the device. */
sluice_status_t sluice_cublas_decode_next(const sluice_grouped_gemm_t* list, int64_t* inout_next,
                                          sluice_cublas_decoded_t* decoded, sluice_grouped_gemm_t* out_part);
