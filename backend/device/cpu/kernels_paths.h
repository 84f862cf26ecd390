// SPDX-License-Identifier: Apache-2.0
/* The vectorised kernels, one table per instruction set, each compiled from the same text (kernels_rows.inc.h,
 * kernels_activation.inc.h) with the primitives of its own file. A table is NULL if this processor lacks the
 * instructions. All versions, including the plain one, give the same bits, except for activations: avx2 and avx512
 * agree bit for bit, and portable differs from them by the rounding of an emulated multiply-add
 * (kernels_accuracy_test.c has the measured errors). */
#pragma once

#include "backend/device/kernels.h"

const sluice_kernels_t* sluice_cpu_kernels_avx512(void);
const sluice_kernels_t* sluice_cpu_kernels_avx2(void);
const sluice_kernels_t* sluice_cpu_kernels_portable(void);
