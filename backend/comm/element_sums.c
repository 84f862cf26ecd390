// SPDX-License-Identifier: Apache-2.0
/* Loads, adds and stores elements in loops that the compiler vectorizes. No result depends on the vector width. */
#include "backend/comm/element_sums.h"

#include <stddef.h>

#include "backend/base/dtype.h"

/* NOLINTBEGIN(bugprone-macro-parentheses): types cannot be in parentheses. */
#define DEFINE_ELEMENT(name, type, sum_type, to_sum, plus, from_sum)          \
  static void load_##name(const void* data, int64_t count, void* sums) {      \
    const type* restrict from = data;                                         \
    sum_type* restrict to = sums;                                             \
    for (int64_t i = 0; i < count; ++i) to[i] = to_sum(from[i]);              \
  }                                                                           \
  static void add_##name(const void* data, int64_t count, void* sums) {       \
    const type* restrict from = data;                                         \
    sum_type* restrict to = sums;                                             \
    for (int64_t i = 0; i < count; ++i) to[i] = plus(to[i], to_sum(from[i])); \
  }                                                                           \
  static void store_##name(const void* sums, int64_t count, void* data) {     \
    const sum_type* restrict from = sums;                                     \
    type* restrict to = data;                                                 \
    for (int64_t i = 0; i < count; ++i) to[i] = from_sum(from[i]);            \
  }

#define AS_IT_IS(x)  (x)
#define PLUS(a, b)   ((a) + (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
DEFINE_ELEMENT(f32, float, float, AS_IT_IS, PLUS, AS_IT_IS)
DEFINE_ELEMENT(f64, double, double, AS_IT_IS, PLUS, AS_IT_IS)
DEFINE_ELEMENT(bf16, uint16_t, float, sluice_bf16_to_f32, PLUS, sluice_f32_to_bf16)
DEFINE_ELEMENT(f16, uint16_t, float, sluice_f16_to_f32, PLUS, sluice_f32_to_f16)
DEFINE_ELEMENT(sum, uint64_t, uint64_t, AS_IT_IS, PLUS, AS_IT_IS) /* unsigned: it wraps around */
DEFINE_ELEMENT(max, int64_t, int64_t, AS_IT_IS, LARGER, AS_IT_IS)
/* NOLINTEND(bugprone-macro-parentheses) */

const sluice_element_sums_t sluice_i64_sums = {SLUICE_DTYPE_I64, 8, load_sum, add_sum, store_sum};
const sluice_element_sums_t sluice_i64_maxima = {SLUICE_DTYPE_I64, 8, load_max, add_max, store_max};

static const sluice_element_sums_t elements[] = {
    {SLUICE_DTYPE_F32, 4, load_f32, add_f32, store_f32},
    {SLUICE_DTYPE_BF16, 2, load_bf16, add_bf16, store_bf16},
    {SLUICE_DTYPE_F16, 2, load_f16, add_f16, store_f16},
    {SLUICE_DTYPE_F64, 8, load_f64, add_f64, store_f64},
};

const sluice_element_sums_t* sluice_element_sums_of(int32_t dtype) {
  for (size_t i = 0; i < sizeof elements / sizeof elements[0]; ++i) {
    if (elements[i].dtype == dtype) return &elements[i];
  }
  return NULL;
}
