// SPDX-License-Identifier: Apache-2.0
#include "backend/base/cache.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>

enum { LINE = 64 };

/* CLFLUSH serialises its lines, and every processor has it; CLFLUSHOPT does not serialise. */
static int is_unordered;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

static void look(void) {
  enum { CLFLUSHOPT = 1 << 23 };
  unsigned a, b, c, d;
  is_unordered = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & CLFLUSHOPT) != 0;
}

void sluice_cache_evict(const void* data, uint64_t bytes) {
  if (data == NULL || bytes == 0) return;
  pthread_once(&looked, look);
  const char* at = (const char*)((uintptr_t)data & ~(uintptr_t)(LINE - 1));
  const char* const end = (const char*)data + bytes;
  _mm_mfence(); /* makes earlier writes reach the lines */
  for (; at < end; at += LINE) {
    if (is_unordered) {
      __asm__ volatile("clflushopt %0" : : "m"(*at) : "memory");
    } else {
      _mm_clflush(at);
    }
  }
  _mm_mfence();
}

#else

void sluice_cache_evict(const void* data, uint64_t bytes) { (void)data, (void)bytes; }

#endif
