// SPDX-License-Identifier: Apache-2.0
/* The caller's OpenMP threads, borrowed. Sluice does not link OpenMP: the runtime that the process already has is found
 * by name, so that there is never a second one. */
#pragma once

/* All NULL: this process has no OpenMP, and one thread is used. */
typedef struct sluice_threads_s {
  void (*parallel)(void (*fn)(void* data), void* data, unsigned num_threads, unsigned flags); /* GOMP_parallel */
  int (*max_threads)(void);
  int (*num_threads)(void);
  int (*thread_num)(void);
  int (*in_parallel)(void);
} sluice_threads_t;

/* Finds torch's runtime if torch is loaded, else a globally visible one. */
sluice_threads_t sluice_threads_find(void);

/* Returns the number of threads that a call may use now: omp_get_max_threads of the calling thread; 1 inside a parallel
 * region, and in a thread that has called sluice_threads_forgo. */
int sluice_threads_available(const sluice_threads_t* pool);

/* From now on the calling thread uses no other threads. For a lane that runs during GEMMs, whose threads occupy the
 * cores. */
void sluice_threads_forgo(void);

/* Calls fn(data, index, count) on `count` <= wanted threads, index 0 .. count - 1; returns when all have finished. */
void sluice_threads_run(const sluice_threads_t* pool, int wanted, void (*fn)(void* data, int index, int count),
                        void* data);
