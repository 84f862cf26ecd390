// SPDX-License-Identifier: Apache-2.0
/* Evicts memory from the caches, so that a measurement finds it where a pass would. */
#pragma once

#include <stdint.h>

/* Writes the lines of a range back to memory and drops them from every cache, so that the next access waits for memory.
 * The contents are unchanged. On x86-64; on other processors it does nothing. Accepts NULL and 0 bytes. Any thread. */
void sluice_cache_evict(const void* data, uint64_t bytes);
