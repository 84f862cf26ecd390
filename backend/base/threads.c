// SPDX-License-Identifier: Apache-2.0
#include "backend/base/threads.h"

#include <dlfcn.h>
#include <stddef.h>

sluice_threads_t sluice_threads_find(void) {
  static const sluice_threads_t none = {NULL, NULL, NULL, NULL, NULL};
  sluice_threads_t pool = none;
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  void* handle = torch != NULL ? torch : RTLD_DEFAULT; /* a handle also searches the dependencies of the library */
  *(void**)&pool.parallel = dlsym(handle, "GOMP_parallel");
  *(void**)&pool.max_threads = dlsym(handle, "omp_get_max_threads");
  *(void**)&pool.num_threads = dlsym(handle, "omp_get_num_threads");
  *(void**)&pool.thread_num = dlsym(handle, "omp_get_thread_num");
  *(void**)&pool.in_parallel = dlsym(handle, "omp_in_parallel");
  if (torch != NULL) dlclose(torch); /* it stays loaded: only our reference is dropped */
  int complete = pool.parallel != NULL && pool.max_threads != NULL && pool.num_threads != NULL &&
                 pool.thread_num != NULL && pool.in_parallel != NULL;
  return complete ? pool : none;
}

static _Thread_local int forgoes;

void sluice_threads_forgo(void) { forgoes = 1; }

int sluice_threads_available(const sluice_threads_t* pool) {
  if (pool->parallel == NULL || forgoes || pool->in_parallel()) return 1;
  int threads = pool->max_threads();
  return threads > 1 ? threads : 1;
}

typedef struct region_s {
  const sluice_threads_t* pool;
  void (*fn)(void* data, int index, int count);
  void* data;
} region_t;

static void region(void* data) {
  const region_t* r = data;
  r->fn(r->data, r->pool->thread_num(), r->pool->num_threads());
}

void sluice_threads_run(const sluice_threads_t* pool, int wanted, void (*fn)(void* data, int index, int count),
                        void* data) {
  if (wanted <= 1 || pool->parallel == NULL) {
    fn(data, 0, 1);
    return;
  }
  region_t r = {pool, fn, data};
  pool->parallel(region, &r, (unsigned)wanted, 0);
}
