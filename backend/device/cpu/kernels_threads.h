// SPDX-License-Identifier: Apache-2.0
/* Runs row kernels on the caller's OpenMP threads, if there is enough work for more than one: between two
 * multi-threaded GEMMs, a single-threaded activation would be the longest part of a pass. */
#pragma once

#include "backend/base/threads.h"
#include "backend/device/kernels.h"

/* Bytes that a call reads and writes per thread. */
#define SLUICE_KERNELS_THREAD_BYTES (INT64_C(128) << 10)

/* Runs `kernels` with parts of the rows (of the columns in sum_columns) on different threads. The bits are the same,
 * since those of a row do not depend on the number of rows in a call. One table per process: `kernels` and the target
 * of `pool` must never be freed; those of the last call are used. Any thread. */
const sluice_kernels_t* sluice_cpu_kernels_over(const sluice_kernels_t* kernels, const sluice_threads_t* pool);

/* sluice_cpu_kernels over the thread pool of this process, if it exists. Any thread. */
const sluice_kernels_t* sluice_cpu_kernels_shared(void);
