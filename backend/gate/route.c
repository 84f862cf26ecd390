// SPDX-License-Identifier: Apache-2.0
/* sluice_route: a counting sort of routes by expert. */
#include "sluice/split.h"

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/base/tensor.h"

typedef struct {
  const char* data;
  int64_t t, k; /* elements from one token to the next, from one choice to the next */
  int wide;     /* i64 */
} ids_t;

static int64_t id_at(ids_t ids, int64_t t, int64_t k) {
  int64_t at = t * ids.t + k * ids.k;
  return ids.wide ? ((const int64_t*)(const void*)ids.data)[at] : ((const int32_t*)(const void*)ids.data)[at];
}

static sluice_status_t read_ids(const sluice_tensor_t* expert_ids, ids_t* out_ids) {
  SLUICE_TRY(sluice_tensor_check(expert_ids, "expert_ids", 0, 2, NULL));
  int32_t dtype = sluice_tensor_dtype(expert_ids);
  if (dtype != SLUICE_DTYPE_I32 && dtype != SLUICE_DTYPE_I64) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "expert_ids: dtype is %s, want i32 or i64: convert it",
                       sluice_dtype_name(dtype));
  }
  out_ids->data = sluice_tensor_data(expert_ids);
  out_ids->t = sluice_tensor_stride(expert_ids, 0);
  out_ids->k = sluice_tensor_stride(expert_ids, 1);
  out_ids->wide = dtype == SLUICE_DTYPE_I64;
  return SLUICE_OK;
}

sluice_status_t sluice_route(const sluice_tensor_t* expert_ids, int32_t num_experts, int64_t* out_rows_per_expert,
                             int64_t* out_order) {
  ids_t ids = {0};
  if (num_experts < 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "num_experts is %d: want at least 1", (int)num_experts);
  }
  if (out_rows_per_expert == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "out_rows_per_expert is NULL: pass room for %d counts",
                       (int)num_experts);
  }
  SLUICE_TRY(read_ids(expert_ids, &ids));
  /* A tensor without data has no elements, whatever its shape says. */
  int64_t num_tokens = ids.data == NULL ? 0 : expert_ids->shape[0], top_k = expert_ids->shape[1];
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t id = id_at(ids, t, k);
      if (id < -1 || id >= num_experts) {
        return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                           "expert_ids[%lld, %lld] is %lld; ids lie in [0, %d), or -1 to drop the route", (long long)t,
                           (long long)k, (long long)id, (int)num_experts);
      }
    }
  }
  uint64_t bytes = (uint64_t)num_experts * sizeof(int64_t);
  int64_t* next = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "sluice_route: counts");
  if (next == NULL) return sluice_alloc_status();
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t id = id_at(ids, t, k);
      if (id >= 0) ++next[id];
    }
  }
  int64_t begin = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    int64_t count = out_rows_per_expert[e] = next[e];
    next[e] = begin;
    begin += count;
  }
  if (out_order != NULL) {
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t k = 0; k < top_k; ++k) {
        int64_t id = id_at(ids, t, k);
        if (id >= 0) out_order[next[id]++] = t * top_k + k;
      }
    }
    for (int64_t i = begin; i < num_tokens * top_k; ++i) out_order[i] = -1;
  }
  sluice_free(sluice_process_allocator(), next, bytes);
  return SLUICE_OK;
}
