/* Memory that is to be found where a pass will find it: not in a cache. */
#ifndef SLUICE_BACKEND_BASE_CACHE_H_
#define SLUICE_BACKEND_BASE_CACHE_H_

#include <stdint.h>

/* Writes the lines of a range back to memory and drops them from every cache, so that who touches them next waits for
 * memory. What they hold stays. On x86-64; elsewhere nothing happens. NULL and 0 bytes are allowed. Any thread. */
void sluice_cache_evict(const void* data, uint64_t bytes);

#endif /* SLUICE_BACKEND_BASE_CACHE_H_ */
