// SPDX-License-Identifier: Apache-2.0
/* Decodes packed weights: out[r, c] = dtype(f32(code) * f32(scale)), rounded as defined in backend/gemm/packed.h. A
 * warp takes a row. Its lanes take adjacent packs of eight elements, so that they write adjacent 16 bytes and the codes
 * of a warp are whole cache lines too. */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

/* Each format has code(): the value of the code in the low bits of a word, whatever the other bits are; scale(): scale
 * i of a row of scales; block(): the block of columns that contains a column. */

SLUICE_FN float quiet_nan() { return float_of(0x7fc00000u); }

struct mxfp4_format {
  enum { BITS = 4, BLOCK_ROWS = 1, SCALE_BYTES = 1 };
  /* The three low bits, shifted to where exponent and mantissa of an f32 meet, represent 2^-126 times the number. */
  static SLUICE_MEMBER float code(uint32_t word) {
    return float_of((word << 28 & 0x80000000u) | (word << 22 & 0x01c00000u)) * 0x1p126f;
  }
  static SLUICE_MEMBER int32_t block(const sluice_decode_args_t&, int32_t col) { return col / 32; }
  static SLUICE_MEMBER float scale(const void* scales, int32_t i) {
    const uint32_t exponent = ((const uint8_t*)scales)[i];
    if (exponent == 255u) return quiet_nan();
    return float_of(exponent == 0u ? 0x00400000u : exponent << 23);
  }
};

struct fp8_format {
  enum { BITS = 8, BLOCK_ROWS = 128, SCALE_BYTES = 4 };
  static SLUICE_MEMBER float code(uint32_t word) {
    const float value = float_of((word << 24 & 0x80000000u) | (word << 20 & 0x07f00000u)) * 0x1p120f;
    return (word & 0x7fu) == 0x7fu ? quiet_nan() : value;
  }
  static SLUICE_MEMBER int32_t block(const sluice_decode_args_t&, int32_t col) { return col / 128; }
  static SLUICE_MEMBER float scale(const void* scales, int32_t i) { return ((const float*)scales)[i]; }
};

/* Blocks of a size that the layer defines, found by multiplication: a division costs as much as decoding two
 * elements. */
struct blocks_as_given {
  enum { BLOCK_ROWS = 1, SCALE_BYTES = 2 };
  static SLUICE_MEMBER int32_t block(const sluice_decode_args_t& a, int32_t col) {
    return (int32_t)((uint64_t)((uint32_t)col / SLUICE_CUDA_LEAST_BLOCK) * a.per_block >> SLUICE_CUDA_PER_BLOCK_BITS);
  }
  static SLUICE_MEMBER float scale(const void* scales, int32_t i) { return load<bf16_type>(scales, i); }
};

/* For integers, 2^23 plus the code plus half its range has the code in its low bits, so no conversion is needed. */
struct int8_format : blocks_as_given {
  enum { BITS = 8 };
  static SLUICE_MEMBER float code(uint32_t word) { return float_of(0x4b000000u | ((word & 255u) ^ 128u)) - 8388736.0f; }
};

struct int4_format : blocks_as_given {
  enum { BITS = 4 };
  static SLUICE_MEMBER float code(uint32_t word) { return float_of(0x4b000000u | ((word & 15u) ^ 8u)) - 8388616.0f; }
};

/* A row of a weight: the addresses of its codes, its scales and its output. */
struct decoded_row_t {
  const uint8_t* codes;
  const uint8_t* scales;
  void* out;
};

/* Finds the weight of row u by bisection: the first whose end is beyond it. */
template <typename F, typename E>
SLUICE_FN decoded_row_t row_of(const sluice_decode_args_t& a, int64_t u) {
  int32_t low = 0, high = a.num_weights - 1;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (a.weights[middle].end > u) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const sluice_decode_weight_t& w = a.weights[low];
  const int32_t row = (int32_t)u - (low > 0 ? a.weights[low - 1].end : 0);
  int32_t block = row / F::BLOCK_ROWS;
  if (w.half > 0 && row >= w.half) {
    block = (w.half + F::BLOCK_ROWS - 1) / F::BLOCK_ROWS + (row - w.half) / F::BLOCK_ROWS;
  }
  decoded_row_t r;
  r.codes = (const uint8_t*)w.codes + row * w.row_bytes;
  r.scales = (const uint8_t*)w.scales + (int64_t)block * w.scales_ld * F::SCALE_BYTES;
  r.out = (typename E::stored*)w.out + (int64_t)row * a.cols;
  return r;
}

enum { PACK = 8, PACKS_AT_ONCE = 4 };

/* The codes of a pack, loaded with one access. */
template <typename F>
struct alignas(PACK* F::BITS / 8) codes_t {
  uint32_t words[PACK * F::BITS / 32];
};

template <typename E>
struct pack_parts {
  enum { N = wide_of<E>::N < (int)PACK ? (int)wide_of<E>::N : (int)PACK, PARTS = (int)PACK / N };
};

/* Two stages for each of a lane's packs: the loads of codes and scales, which overlap, then the results. */
template <typename F, typename E>
SLUICE_FN void decode(const sluice_decode_args_t& a, int64_t u) {
  const decoded_row_t row = row_of<F, E>(a, u);
  const int32_t cols = a.cols;
  SLUICE_LANES(lane) {
    for (int32_t first = lane * PACK; first < cols; first += 32 * PACK * PACKS_AT_ONCE) {
      codes_t<F> codes[PACKS_AT_ONCE];
      float scale[PACKS_AT_ONCE];
      SLUICE_UNROLL
      for (int i = 0; i < PACKS_AT_ONCE; ++i) {
        const int32_t c = first + i * 32 * PACK;
        if (c < cols) {
          codes[i] = *(const codes_t<F>*)(row.codes + c / 8 * F::BITS);
          scale[i] = F::scale(row.scales, F::block(a, c));
        }
      }
      SLUICE_UNROLL
      for (int i = 0; i < PACKS_AT_ONCE; ++i) {
        const int32_t c = first + i * 32 * PACK;
        if (c < cols) {
          SLUICE_UNROLL
          for (int part = 0; part < pack_parts<E>::PARTS; ++part) {
            pack_t<E, pack_parts<E>::N> out;
            SLUICE_UNROLL
            for (int v = 0; v < pack_parts<E>::N; ++v) {
              const int at = (part * pack_parts<E>::N + v) * F::BITS;
              out.x[v] = E::put(F::code(codes[i].words[at / 32] >> at % 32) * scale[i]);
            }
            store_pack<E, pack_parts<E>::N>(row.out, c + part * pack_parts<E>::N, out);
          }
        }
      }
    }
  }
}

#define DECODER(format, type)                                                         \
  SLUICE_FN void decode_##format##_##type(const sluice_decode_args_t& a, int64_t u) { \
    decode<format##_format, type##_type>(a, u);                                       \
  }                                                                                   \
  SLUICE_KERNEL(decode_##format##_##type, sluice_decode_args_t)
#define DECODERS(format) DECODER(format, f32) DECODER(format, bf16) DECODER(format, f16)

DECODERS(mxfp4)
DECODERS(fp8)
DECODERS(int8)
DECODERS(int4)

/* Decodes rows whose width is not divisible by 8, or whose codes are not aligned: one element at a time. */
template <typename F, typename E>
SLUICE_FN void decode_elements(const sluice_decode_args_t& a, int64_t u) {
  const decoded_row_t row = row_of<F, E>(a, u);
  SLUICE_LANES(lane) {
    for (int32_t c = lane; c < a.cols; c += 32) {
      const float scale = F::scale(row.scales, F::block(a, c));
      const uint32_t word = (uint32_t)row.codes[(int64_t)c * F::BITS / 8] >> (F::BITS == 4 ? (c & 1) * 4 : 0);
      store<E>(row.out, c, (typename E::value)(F::code(word) * scale));
    }
  }
}

template <typename E>
SLUICE_FN void decode_any(const sluice_decode_args_t& a, int64_t u) {
  switch (a.format) {
    case SLUICE_CUDA_MXFP4: decode_elements<mxfp4_format, E>(a, u); break;
    case SLUICE_CUDA_FP8: decode_elements<fp8_format, E>(a, u); break;
    case SLUICE_CUDA_INT8: decode_elements<int8_format, E>(a, u); break;
    default: decode_elements<int4_format, E>(a, u); break;
  }
}
SLUICE_KERNELS_BY_DTYPE(decode_any, sluice_decode_args_t)
