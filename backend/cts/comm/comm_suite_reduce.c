// SPDX-License-Identifier: Apache-2.0
/* Cases of the all-reduce of floats: the bits are those of a sum in rank order, on all ranks, however data is
 * divided. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/base/test/elements.h"
#include "backend/cts/comm/comm_suite_case.h"

/* Values whose sums depend on their order: magnitudes from 2^-12 to 2^11, with both signs. */
static double value(int32_t rank, int64_t i) {
  const uint64_t x = ((uint64_t)rank * 7919 + (uint64_t)i) * UINT64_C(0x9e3779b97f4a7c15);
  const double mantissa = 1.0 + (double)(x >> 40) / 16777216.0;
  const double scale = (double)(UINT64_C(1) << (x >> 8 & 23)) / 4096.0;
  return (x & 1 ? -1 : 1) * mantissa * scale;
}

/* The sum as a single rank with all data would compute it, one addition after the other. */
static void write_expected(void* data, int64_t i, int32_t dtype, int32_t world_size, void* scratch) {
  double wide = 0;
  float narrow = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    set_element(scratch, 0, dtype, value(r, i));
    const double x = get_element(scratch, 0, dtype);
    wide = r == 0 ? x : wide + x;
    narrow = r == 0 ? (float)x : narrow + (float)x;
  }
  set_element(data, i, dtype, dtype == SLUICE_DTYPE_F64 ? wide : (double)narrow);
}

static int fill_and_reduce(cts_rank_t* me, char* data, const char* expected, int64_t count, int32_t dtype,
                           int64_t piece) {
  const uint64_t bytes = sluice_dtype_bytes(dtype);
  for (int64_t i = 0; i < count; ++i) set_element(data, i, dtype, value(me->rank, i));
  for (int64_t begin = 0; begin < count; begin += piece) {
    const int64_t n = sluice_min(piece, count - begin);
    if (sluice_comm_all_reduce_f32(me->comm, data + (uint64_t)begin * bytes, n, dtype, "sums of the suite") !=
        SLUICE_OK) {
      return 0;
    }
  }
  return memcmp(data, expected, (uint64_t)count * bytes) == 0;
}

static void reduce_floats(cts_rank_t* me) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  /* The last exceeds one piece of the largest element. */
  static const int64_t counts[] = {1, 2, 7, 255, 1000, 50003, 1100003};
  for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; ++d) {
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
      const uint64_t bytes = (uint64_t)counts[c] * sluice_dtype_bytes(dtypes[d]);
      char* data = malloc(bytes);
      char* expected = malloc(bytes);
      double scratch;
      for (int64_t i = 0; i < counts[c]; ++i) {
        write_expected(expected, i, dtypes[d], me->world->world_size, &scratch);
      }
      const int is_right = fill_and_reduce(me, data, expected, counts[c], dtypes[d], counts[c]) &&
                           fill_and_reduce(me, data, expected, counts[c], dtypes[d], counts[c] / 3 + 1);
      free(data);
      free(expected);
      CTS_TRY(me, is_right);
    }
  }
  CTS_TRY(me, sluice_comm_all_reduce_f32(me->comm, NULL, 0, SLUICE_DTYPE_F32, NULL) == SLUICE_OK);
  CTS_TRY(me, sluice_comm_all_reduce_f32(me->comm, NULL, 1, SLUICE_DTYPE_I64, NULL) == SLUICE_E_INVALID_ARGUMENT);
}

/* data is in separate memory, or packed into the end of the output. */
static int sum_once(cts_rank_t* me, int64_t count, int32_t dtype, int is_packed) {
  const uint64_t bytes = sluice_dtype_bytes(dtype) * (uint64_t)count;
  float* out = calloc(2 * (uint64_t)count, sizeof *out);
  char* data = (char*)(void*)out + (uint64_t)count * sizeof *out * (is_packed ? 1 : 2) - bytes;
  double scratch[2];
  int is_right = 1;
  for (int64_t i = 0; i < count; ++i) set_element(data, i, dtype, value(me->rank, i));
  if (sluice_comm_sum_f32(me->comm, data, count, dtype, out, NULL) != SLUICE_OK) is_right = 0;
  for (int64_t i = 0; is_right && i < count; ++i) {
    float expected = 0;
    for (int32_t r = 0; r < me->world->world_size; ++r) {
      set_element(scratch, 0, dtype, value(r, i));
      const float x = (float)get_element(scratch, 0, dtype);
      expected = r == 0 ? x : expected + x;
    }
    is_right = memcmp(out + i, &expected, sizeof expected) == 0;
  }
  for (int64_t i = 0; is_right && !is_packed && i < count; ++i) {
    set_element(scratch, 0, dtype, value(me->rank, i));
    is_right = memcmp(data + (uint64_t)i * sluice_dtype_bytes(dtype), scratch, sluice_dtype_bytes(dtype)) == 0;
  }
  free(out);
  return is_right;
}

static void sum_floats(cts_rank_t* me) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  static const int64_t counts[] = {1, 7, 255, 50003, 2200003};
  for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; ++d) {
    /* The last exceeds one piece of 16-bit elements. */
    const size_t num = sizeof counts / sizeof counts[0] - (dtypes[d] != SLUICE_DTYPE_BF16);
    for (size_t c = 0; c < num; ++c) {
      CTS_TRY(me, sum_once(me, counts[c], dtypes[d], 0));
      CTS_TRY(me, sum_once(me, counts[c], dtypes[d], 1));
    }
  }
  CTS_TRY(me, sluice_comm_sum_f32(me->comm, NULL, 0, SLUICE_DTYPE_BF16, NULL, NULL) == SLUICE_OK);
  CTS_TRY(me, sluice_comm_sum_f32(me->comm, NULL, 1, SLUICE_DTYPE_F64, NULL, NULL) == SLUICE_E_INVALID_ARGUMENT);
}

const cts_case_t cts_reduce_cases[] = {
    {"AllReduceF32_EveryDtypeAndCut_IsTheSumInRankOrder", reduce_floats, 1, 0, 0},
    {"SumF32_EveryDtypeSeparateAndPacked_IsTheUnroundedSumInRankOrder", sum_floats, 1, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
