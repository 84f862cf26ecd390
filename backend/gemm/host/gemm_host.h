// SPDX-License-Identifier: Apache-2.0
/* The call into the host for a single GEMM, which the selector uses in addition to the vtable of "host". */
#pragma once

#include "backend/gemm/gemm.h"

/* Calls the host for problem `index` only and returns the host's value. If it is not 0, the host declined and has not
 * touched C, so the caller can compute that GEMM with another implementation. */
int32_t sluice_gemm_host_call(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, int64_t index);
