// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages.h"

#include "backend/base/pages_measure.h"
#include "backend/base/tensor.h"

static void advise_range(const void* data, uint64_t bytes, int may_measure) {
  const sluice_pages_range_t range = sluice_pages_next(data, bytes, may_measure);
  if (range.next == SLUICE_PAGES_ASK_HUGE) sluice_pages_ask_huge(range.begin, range.end);
  if (range.next == SLUICE_PAGES_MEASURE) sluice_pages_measure(&range, NULL);
}

void sluice_pages_advise(const void* data, uint64_t bytes) { advise_range(data, bytes, 1); }

void sluice_pages_advise_room(const void* data, uint64_t bytes) { advise_range(data, bytes, 0); }

typedef struct range_s {
  const char* begin;
  const char* end;
} range_t;

/* Returns the memory of the tensor's elements; empty for tensors with gaps or overlaps, or not on the CPU. */
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

static void advise_run(range_t run, sluice_pages_prefault_t* ahead) {
  const uint64_t bytes = (uint64_t)(run.end - run.begin);
  if (ahead == NULL || !sluice_pages_prefault_add(ahead, run.begin, bytes)) sluice_pages_advise(run.begin, bytes);
}

void sluice_pages_advise_slices(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                                sluice_pages_prefault_t* ahead) {
  range_t run = {NULL, NULL};
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t k = 0; k < num_lists; ++k) {
      range_t next = range_of(lists[k] == NULL ? NULL : &lists[k][i]);
      if (next.begin == NULL) continue;
      if (next.begin == run.end) {
        run.end = next.end;
        continue;
      }
      advise_run(run, ahead);
      run = next;
    }
  }
  advise_run(run, ahead);
}
