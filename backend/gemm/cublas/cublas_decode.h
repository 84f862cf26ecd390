// SPDX-License-Identifier: Apache-2.0
/* Packed weights of a list, decoded to the list's scratch memory, some GEMMs at a time. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_DECODE_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_DECODE_H_

#include "backend/device/cuda/cuda_launch.h"
#include "backend/gemm/gemm.h"

/* The GEMMs of a part. */
typedef struct sluice_cublas_decoded_s {
  sluice_gemm_problem_t problems[SLUICE_CUDA_DECODED];
  sluice_cuda_packed_t weights[SLUICE_CUDA_DECODED];
} sluice_cublas_decoded_t;

/* Whether the list's scratch memory holds each of its packed weights, decoded. */
int sluice_cublas_can_decode(const sluice_grouped_gemm_t* list);

/* Makes a list of the next GEMMs from *inout_next on, as many as `decoded` and the scratch memory hold, whose weights
 * launches on the list's stream decode: one launch where the weights are of one kind, as those of a layer's op are. Of
 * GEMMs without an element nothing is decoded. What read the part before on that stream, or is joined to it, comes
 * first. Between enter and leave of the device. */
sluice_status_t sluice_cublas_decode_next(const sluice_grouped_gemm_t* list, int64_t* inout_next,
                                          sluice_cublas_decoded_t* decoded, sluice_grouped_gemm_t* out_part);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_DECODE_H_ */
