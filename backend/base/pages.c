#include "backend/base/pages.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/base/tensor.h"

#define HUGE_PAGE ((uintptr_t)2 << 20)

static int wanted;
static pthread_once_t asked = PTHREAD_ONCE_INIT;

static void ask(void) {
  const char* setting = getenv("SLUICE_HUGE_PAGES");
  wanted = setting == NULL || strcmp(setting, "0") != 0;
}

void sluice_pages_advise(const void* data, uint64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (data == NULL || bytes < SLUICE_PAGES_LARGE) return;
  pthread_once(&asked, ask);
  uintptr_t begin = ((uintptr_t)data + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(HUGE_PAGE - 1);
  if (!wanted || end <= begin) return;
  int before = errno; /* a system without huge pages refuses: nothing is lost */
  (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);
  errno = before;
#else
  (void)data, (void)bytes;
#endif
}

typedef struct range_s {
  const char* begin;
  const char* end;
} range_t;

/* Where the tensor's elements lie; empty for tensors with gaps, with overlaps, or not on the CPU. */
static range_t range_of(const sluice_tensor_t* t) {
  const range_t none = {NULL, NULL};
  if (t == NULL || t->data == NULL || t->device_type != SLUICE_DEVICE_CPU) return none;
  int64_t last = 0, elements = sluice_tensor_elements(t), size = t->type_bits / 8;
  for (int32_t d = 0; d < t->ndim; ++d) {
    int64_t stride = sluice_tensor_stride(t, d);
    if (stride < 0) return none;
    last += (t->shape[d] - 1) * stride;
  }
  if (elements <= 0 || last + 1 != elements) return none;
  const char* data = sluice_tensor_data(t);
  return (range_t){data, data + elements * size};
}

void sluice_pages_advise_tensor(const sluice_tensor_t* tensor) {
  range_t range = range_of(tensor);
  sluice_pages_advise(range.begin, (uint64_t)(range.end - range.begin));
}

void sluice_pages_advise_slices(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count) {
  range_t run = {NULL, NULL};
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t k = 0; k < num_lists; ++k) {
      range_t next = range_of(lists[k] == NULL ? NULL : &lists[k][i]);
      if (next.begin == NULL) continue;
      if (next.begin == run.end) {
        run.end = next.end;
        continue;
      }
      sluice_pages_advise(run.begin, (uint64_t)(run.end - run.begin));
      run = next;
    }
  }
  sluice_pages_advise(run.begin, (uint64_t)(run.end - run.begin));
}
