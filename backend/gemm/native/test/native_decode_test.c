// SPDX-License-Identifier: Apache-2.0
/* Decoding of packed weights by each set of kernels that this processor can run: every code with scales of every size
 * and every number of codes, against the definition in packed.h. No byte beyond the codes is read. */
#include <math.h>

#include "backend/gemm/native/native_kernels.h"
#include "backend/gemm/test/operands.h"

enum { MOST = SLUICE_NATIVE_COLS, SPARE = 16 };

/* The `codes` end at the end of accessible memory. */
static void check(const sluice_native_kernels_t* kernels, const sluice_packed_t* packed, const uint8_t* codes,
                  int64_t count, int32_t dtype) {
  float wanted[MOST], got[MOST + SPARE];
  sluice_packed_decode(packed, codes, count + count % 2, 0, 0, count, dtype, wanted);
  kernels->decode(packed, codes, count + count % 2, 0, 0, count, dtype, got);
  for (int64_t i = 0; i < count; ++i) {
    const double x = get_element(wanted, i, dtype), y = get_element(got, i, dtype);
    const uint64_t bytes = sluice_dtype_bytes(dtype);
    const int same = memcmp((char*)wanted + bytes * (uint64_t)i, (char*)got + bytes * (uint64_t)i, bytes) == 0;
    if (same || (isnan(x) && isnan(y))) continue;
    fail_msg("%s, %s as %s: code %d of %d is %.9g, expected %.9g", kernels->name,
             sluice_packed_format(packed->format)->name, sluice_dtype_name(dtype), (int)i, (int)count, y, x);
  }
}

static void every_code(const sluice_native_kernels_t* kernels, char* end) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  static const float scales[] = {1, 0.0123f, 3e-39f, 7e-5f, 1e38f, 0, INFINITY, NAN};
  static const uint8_t powers[] = {0, 1, 100, 127, 140, 253, 254, 255};
  for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) {
    const int bits = sluice_packed_format(format)->bits;
    for (int s = 0; s < 8; ++s) {
      uint8_t own[MOST / 32 * sizeof(float)];
      const uint16_t half = sluice_f32_to_bf16(scales[s]);
      for (int i = 0; i < MOST / 32; ++i) {
        if (format == SLUICE_PACKED_MXFP4) own[i] = powers[(s + i) % 8];
        if (format == SLUICE_PACKED_FP8) memcpy(own + 4 * i, &scales[s], sizeof(float));
        if (format >= SLUICE_PACKED_INT8) memcpy(own + 2 * i, &half, sizeof half);
      }
      const int32_t block_cols = format == SLUICE_PACKED_FP8 ? 128 : 32;
      const sluice_packed_t packed = {format, block_cols, 0, own, MOST / 32, 0};
      for (int64_t count = 1; count <= MOST; count += count < 70 ? 1 : 31) {
        uint8_t* codes = (uint8_t*)end - (bits == 8 ? count : (count + 1) / 2);
        for (int64_t i = 0; codes + i < (uint8_t*)end; ++i) codes[i] = (uint8_t)(bits == 8 ? i + count : i * 33);
        for (int d = 0; d < 3; ++d) check(kernels, &packed, codes, count, dtypes[d]);
      }
      uint8_t* codes = (uint8_t*)end - MOST;
      for (int i = 0; i < MOST; ++i) codes[i] = (uint8_t)i;
      for (int d = 0; d < 3; ++d) check(kernels, &packed, codes, MOST, dtypes[d]);
    }
  }
}

TEST(Decode_EveryCodeScaleTypeAndCount_IsThatOfTheDefinition) {
  sluice_native_set_t sets[SLUICE_NATIVE_SETS];
  const int count = sluice_native_sets(sets);
  fenced_t codes = fenced(MOST);
  char* end = (char*)codes.data + MOST;
  int tried = 0;
  for (int i = 0; i < count; ++i) {
    if (sets[i].kernels == NULL) continue;
    every_code(sets[i].kernels, end);
    if (sets[i].kernels->pairs != NULL) every_code(sets[i].kernels->pairs, end);
    ++tried;
  }
  unfence(&codes);
  if (tried == 0) skip_because("this processor has no native");
}
