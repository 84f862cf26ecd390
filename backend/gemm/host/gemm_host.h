// SPDX-License-Identifier: Apache-2.0
/* What the selector needs of "host" beyond the vtable. */
#ifndef SLUICE_BACKEND_GEMM_HOST_GEMM_HOST_H_
#define SLUICE_BACKEND_GEMM_HOST_GEMM_HOST_H_

#include "backend/gemm/gemm.h"

/* Calls the host for GEMMs[index] only and returns its value: not 0 means that it declined and touched nothing. So a
 * list is never left half done with no way to go on: the caller gives that one GEMM to another gemm. */
int32_t sluice_gemm_host_call(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, int64_t index);

#endif /* SLUICE_BACKEND_GEMM_HOST_GEMM_HOST_H_ */
