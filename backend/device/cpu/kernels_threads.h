/* Row kernels on the caller's OpenMP threads, where there is enough to do for more than one: between two GEMMs that
 * many threads shared, one thread's activation would be the longest part of a pass. */
#ifndef SLUICE_BACKEND_DEVICE_CPU_KERNELS_THREADS_H_
#define SLUICE_BACKEND_DEVICE_CPU_KERNELS_THREADS_H_

#include "backend/base/threads.h"
#include "backend/device/kernels.h"

/* Bytes that a call reads and writes for each thread that it takes. */
#define SLUICE_KERNELS_THREAD_BYTES (INT64_C(128) << 10)

/* Calls of `kernels`, parts of the rows (of the columns in sum_columns) on different threads: the same bits, since no
 * row's depend on how many rows a call has. One table per process: `kernels` and what `pool` points to live for ever,
 * and are those of the last call. Any thread. */
const sluice_kernels_t* sluice_cpu_kernels_over(const sluice_kernels_t* kernels, const sluice_threads_t* pool);

/* sluice_cpu_kernels over the pool of this process, if it has one by now. Any thread. */
const sluice_kernels_t* sluice_cpu_kernels_shared(void);

#endif /* SLUICE_BACKEND_DEVICE_CPU_KERNELS_THREADS_H_ */
