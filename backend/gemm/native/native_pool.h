/* The caller's OpenMP threads, borrowed. Nothing links OpenMP: the runtime that the process already has is found by
 * name, so that there is never a second one. Internal to backend/gemm/native. */
#ifndef SLUICE_BACKEND_GEMM_NATIVE_NATIVE_POOL_H_
#define SLUICE_BACKEND_GEMM_NATIVE_NATIVE_POOL_H_

/* All NULL: no OpenMP in this process, one thread. */
typedef struct sluice_native_pool_s {
  void (*parallel)(void (*fn)(void* data), void* data, unsigned num_threads, unsigned flags); /* GOMP_parallel */
  int (*max_threads)(void);
  int (*num_threads)(void);
  int (*thread_num)(void);
  int (*in_parallel)(void);
} sluice_native_pool_t;

/* torch's runtime where torch is loaded, else one that the process shows to all. */
sluice_native_pool_t sluice_native_pool_find(void);

/* Threads that a call may use now: omp_get_max_threads of the calling thread; 1 inside a parallel region. */
int sluice_native_pool_threads(const sluice_native_pool_t* pool);

/* fn(data, index, count) on `count` <= wanted threads, index 0 .. count - 1; returns when all have. */
void sluice_native_pool_run(const sluice_native_pool_t* pool, int wanted, void (*fn)(void* data, int index, int count),
                            void* data);

#endif /* SLUICE_BACKEND_GEMM_NATIVE_NATIVE_POOL_H_ */
