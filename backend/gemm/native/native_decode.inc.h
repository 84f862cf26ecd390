// SPDX-License-Identifier: Apache-2.0
/* Decodes packed weights (backend/gemm/packed.h) in the registers of an instruction set. Each native_*.c includes this
 * file after it has defined
 *
 *   lanes_of_codes(format, at, left)     the next LANES codes as dwords; codes past `left` are 0 and are not read
 *   values_of(format, codes)             the codes as f32
 *   HAS_TABLE(format)                    1: decode by table, a register with the value of each code
 *   table_of(format, dtype, scale)       the values of all codes, scaled and rounded
 *   look_up(format, table, codes)        the values of these codes
 *   rounded(dtype, x)                    x to nearest even of dtype, still in f32; keeps subnormal numbers
 *   store_exact(dtype, at, x)            stores all lanes; x has been rounded
 *   HAS_WORDS                            1: bf16 has the three functions below, for formats with a table
 *   words_of(format, scales, block)      the bf16 of all codes of a block
 *   look_up_words(words, at)             the bf16 of the next 2 * LANES codes
 *   store_words(at, x)                   stores all of them
 *
 * decode_lanes has the same bits as sluice_packed_decode. */

/* The scale of a block in all lanes, or the table of its codes. */
typedef vf scaled_t;

/* sluice_packed_scale, without a call in the loop over blocks. */
INLINE float scale_at(const int32_t format, const char* at) {
  uint32_t bits;
  float scale;
  if (format == SLUICE_PACKED_MXFP4) {
    const uint32_t code = *(const uint8_t*)at;
    bits = code == 0 ? 1u << 22 : code == 255 ? 0x7fc00000u : code << 23;
  } else if (format == SLUICE_PACKED_FP8) {
    memcpy(&bits, at, sizeof bits);
  } else {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    bits = (uint32_t)half << 16;
  }
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}

INLINE scaled_t block_of(const int32_t format, const int32_t dtype, const char* scales, int64_t block) {
  const int32_t bytes = format == SLUICE_PACKED_MXFP4 ? 1 : format == SLUICE_PACKED_FP8 ? 4 : 2;
  const vf scale = vf_set1(scale_at(format, scales + block * bytes));
  return HAS_TABLE(format) ? table_of(format, dtype, scale) : scale;
}

INLINE vf decode_lanes(const int32_t format, const int32_t dtype, const uint8_t* at, int64_t left, scaled_t block) {
  const codes_t codes = lanes_of_codes(format, at, left);
  if (HAS_TABLE(format)) return look_up(format, block, codes);
  return rounded(dtype, vf_mul(values_of(format, codes), block));
}

INLINE int32_t bits_of(const int32_t format) {
  return format == SLUICE_PACKED_MXFP4 || format == SLUICE_PACKED_INT4 ? 4 : 8;
}

INLINE void decode_as(const int32_t format, const int32_t dtype, const sluice_packed_t* packed, const void* data,
                      int64_t ld, int64_t row, int64_t col, int64_t count, char* out) {
  const int32_t bits = bits_of(format);
  const int64_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const uint8_t* at = (const uint8_t*)data + sluice_packed_bytes(bits, ld, row, col);
  const char* scales = sluice_packed_scales(packed, row);
  int64_t number = col / packed->block_cols;
  int64_t end = (number + 1) * packed->block_cols - col; /* of the block, from col */
  for (int64_t done = 0; done < count; end += packed->block_cols, ++number) {
    const int64_t stop = end < count ? end : count;
#if HAS_WORDS
    if (dtype == SLUICE_DTYPE_BF16 && HAS_TABLE(format)) {
      const words_t words = words_of(format, scales, number);
      for (; stop - done >= 2 * LANES; done += 2 * LANES, at += 2 * LANES * bits / 8) {
        store_words(out + done * bytes, look_up_words(words, at));
      }
      if (done >= stop) continue;
    }
#endif
    const scaled_t block = block_of(format, dtype, scales, number);
    for (; done < stop; done += LANES) {
      store_exact(dtype, out + done * bytes, decode_lanes(format, dtype, at, count - done, block));
      at += LANES * bits / 8;
    }
  }
}

#define DECODE_FORMAT(dtype)                                                                                        \
  switch (packed->format) {                                                                                         \
    case SLUICE_PACKED_MXFP4: decode_as(SLUICE_PACKED_MXFP4, dtype, packed, data, ld, row, col, count, out); break; \
    case SLUICE_PACKED_FP8: decode_as(SLUICE_PACKED_FP8, dtype, packed, data, ld, row, col, count, out); break;     \
    case SLUICE_PACKED_INT8: decode_as(SLUICE_PACKED_INT8, dtype, packed, data, ld, row, col, count, out); break;   \
    default: decode_as(SLUICE_PACKED_INT4, dtype, packed, data, ld, row, col, count, out); break;                   \
  }

static void decode(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t row, int64_t col, int64_t count,
                   int32_t dtype, void* out) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: DECODE_FORMAT(SLUICE_DTYPE_BF16) break;
    case SLUICE_DTYPE_F16: DECODE_FORMAT(SLUICE_DTYPE_F16) break;
    default: DECODE_FORMAT(SLUICE_DTYPE_F32) break;
  }
}
