// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages_resident.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* headers may be older than the system */
#endif

enum { FEW = 2, MANY = 8 }; /* sampled pages; each is a system call */
static const uintptr_t LARGE = (uintptr_t)4 << 20;

int sluice_pages_are_resident(uintptr_t begin, uintptr_t end) {
  const int places = end - begin < LARGE ? FEW : MANY;
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), step = (end - begin) / (uintptr_t)places;
  int found = 0;
  for (int i = 0; i < places; ++i) {
    unsigned char state = 0;
    void* at = (void*)((begin + step * (uintptr_t)i) & ~(page - 1));
    found += mincore(at, page, &state) == 0 && (state & 1) != 0;
  }
  return found > places / 2;
}

int sluice_pages_populate(uintptr_t begin, uintptr_t end) {
  while (madvise((void*)begin, end - begin, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINTR && errno != EAGAIN) return 0;
  }
  return 1;
}
