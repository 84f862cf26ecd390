// SPDX-License-Identifier: Apache-2.0
/* Copies, combines and scales rows. A warp takes a row; its lanes take adjacent pieces, so accesses coalesce. */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

template <typename Piece>
SLUICE_FN void copy_row_by(const void* src, void* dst, int64_t bytes) {
  const int64_t pieces = bytes / (int64_t)sizeof(Piece);
  SLUICE_LANES(lane) {
    for (int64_t i = lane; i < pieces; i += 32) ((Piece*)dst)[i] = ((const Piece*)src)[i];
  }
}

struct alignas(16) sixteen_bytes_t {
  uint64_t x[2];
};

SLUICE_FN void copy_row(const void* src, void* dst, int64_t bytes, int64_t piece) {
  switch (piece) {
    case 16: copy_row_by<sixteen_bytes_t>(src, dst, bytes); break;
    case 8: copy_row_by<uint64_t>(src, dst, bytes); break;
    case 4: copy_row_by<uint32_t>(src, dst, bytes); break;
    case 2: copy_row_by<uint16_t>(src, dst, bytes); break;
    default: copy_row_by<uint8_t>(src, dst, bytes); break;
  }
}

template <typename Piece>
SLUICE_FN void clear_row_by(void* dst, int64_t bytes) {
  const int64_t pieces = bytes / (int64_t)sizeof(Piece);
  SLUICE_LANES(lane) {
    for (int64_t i = lane; i < pieces; i += 32) ((Piece*)dst)[i] = Piece();
  }
}

SLUICE_FN void clear_row(void* dst, int64_t bytes, int64_t piece) {
  switch (piece) {
    case 16: clear_row_by<sixteen_bytes_t>(dst, bytes); break;
    case 8: clear_row_by<uint64_t>(dst, bytes); break;
    case 4: clear_row_by<uint32_t>(dst, bytes); break;
    case 2: clear_row_by<uint16_t>(dst, bytes); break;
    default: clear_row_by<uint8_t>(dst, bytes); break;
  }
}

/* dst[i, :] = src[index[i], :], or other[-2 - index[i], :], or zeros */
SLUICE_FN void gather_rows(const sluice_gather_args_t& a, int64_t i) {
  const int64_t from = a.index[i];
  char* const to = (char*)a.dst + i * a.row_bytes;
  if (from == -1) {
    clear_row(to, a.row_bytes, a.piece);
  } else {
    const char* const src = from < 0 ? (const char*)a.other + (-2 - from) * a.other_stride_bytes
                                     : (const char*)a.src + from * a.src_stride_bytes;
    copy_row(src, to, a.row_bytes, a.piece);
  }
}
SLUICE_KERNEL(gather_rows, sluice_gather_args_t)

/* Reads a token's row once and writes it to its K places. */
template <typename Piece>
SLUICE_FN void scatter_row_by(const sluice_scatter_args_t& a, int64_t t) {
  enum { AT_ONCE = 4 };
  const int64_t pieces = a.row_bytes / (int64_t)sizeof(Piece), skipped = a.skip_end - a.skip_first;
  const Piece* const src = (const Piece*)((const char*)a.src + t * a.src_stride_bytes);
  SLUICE_LANES(lane) {
    for (int64_t first = lane; first < pieces; first += 32 * AT_ONCE) {
      Piece x[AT_ONCE];
      SLUICE_UNROLL
      for (int v = 0; v < AT_ONCE; ++v) x[v] = first + 32 * v < pieces ? src[first + 32 * v] : Piece();
      SLUICE_ONE_BY_ONE
      for (int64_t k = 0; k < a.top_k; ++k) {
        const int64_t row = a.position[t * a.top_k + k];
        if (row < 0 || (row >= a.skip_first && row < a.skip_end)) continue;
        Piece* const dst = (Piece*)a.dst + (row < a.skip_end ? row : row - skipped) * pieces;
        SLUICE_UNROLL
        for (int v = 0; v < AT_ONCE; ++v) {
          if (first + 32 * v < pieces) dst[first + 32 * v] = x[v];
        }
      }
    }
  }
}
SLUICE_FN void scatter_rows(const sluice_scatter_args_t& a, int64_t t) {
  switch (a.piece) {
    case 16: scatter_row_by<sixteen_bytes_t>(a, t); break;
    case 8: scatter_row_by<uint64_t>(a, t); break;
    case 4: scatter_row_by<uint32_t>(a, t); break;
    case 2: scatter_row_by<uint16_t>(a, t); break;
    default: scatter_row_by<uint8_t>(a, t); break;
  }
}
SLUICE_KERNEL(scatter_rows, sluice_scatter_args_t)

/* Finds the run of row u by bisection: the first whose end is beyond it. */
SLUICE_FN void move_rows(const sluice_move_args_t& a, int64_t u) {
  int64_t low = 0, high = a.num_runs - 1;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (a.runs[middle].end > u) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t inside = u - (low > 0 ? a.runs[low - 1].end : 0);
  copy_row((const char*)a.src + (a.runs[low].src_row + inside) * a.row_bytes,
           (char*)a.dst + (a.runs[low].dst_row + inside) * a.row_bytes, a.row_bytes, a.piece);
}
SLUICE_KERNEL(move_rows, sluice_move_args_t)

/* out[t, j] = sum over k, in order, of scale[t, k] * rows[position[t, k], j] */
template <typename E, int N>
SLUICE_FN void combine_by(const sluice_combine_args_t& a, int64_t t) {
  typedef typename E::value value;
  SLUICE_LANES(lane) {
    for (int64_t j = (int64_t)lane * N; j < a.width; j += (int64_t)32 * N) {
      value sum[N];
      SLUICE_UNROLL
      for (int v = 0; v < N; ++v) sum[v] = 0;
      for (int64_t k = 0; k < a.top_k; ++k) {
        const int64_t row = a.position[t * a.top_k + k];
        if (row < 0) continue;
        const value s = a.scale == NULL ? (value)1 : (value)a.scale[t * a.scale_t + k * a.scale_k];
        const pack_t<E, N> p = load_pack<E, N>(a.rows, row * a.width + j);
        SLUICE_UNROLL
        for (int v = 0; v < N; ++v) sum[v] = sum[v] + s * E::get(p.x[v]);
      }
      pack_t<E, N> out;
      SLUICE_UNROLL
      for (int v = 0; v < N; ++v) out.x[v] = E::put(sum[v]);
      store_pack<E, N>(a.out, t * a.out_stride + j, out);
    }
  }
}
template <typename E>
SLUICE_FN void combine_rows(const sluice_combine_args_t& a, int64_t t) {
  if (a.wide) {
    combine_by<E, wide_of<E>::N>(a, t);
  } else {
    combine_by<E, 1>(a, t);
  }
}
SLUICE_KERNELS_BY_DTYPE(combine_rows, sluice_combine_args_t)

/* dst[i, j] = weight[i] * src[i, j] */
template <typename E>
SLUICE_FN void scale_rows(const sluice_scale_args_t& a, int64_t i) {
  const typename E::value w = (typename E::value)a.weight[i];
  SLUICE_LANES(lane) {
    for (int64_t j = lane; j < a.width; j += 32) store<E>(a.dst, i * a.width + j, w * load<E>(a.src, i * a.width + j));
  }
}
SLUICE_KERNELS_BY_DTYPE(scale_rows, sluice_scale_args_t)

/* Row i of each matrix. The matrices' values alternate in src, so their loads hit the same cache lines. */
template <typename From, typename E>
SLUICE_FN void pack_row(const sluice_pack_args_t& a, int64_t i) {
  SLUICE_ONE_BY_ONE
  for (int64_t e = 0; e < a.count; ++e) {
    SLUICE_LANES(lane) {
      for (int64_t j = lane; j < a.columns; j += 32) {
        store<E>(a.dst, e * a.dst_stride + i * a.columns + j,
                 load<From>(a.src, e + i * a.row_stride + j * a.col_stride));
      }
    }
  }
}
template <typename E>
SLUICE_FN void pack_matrices(const sluice_pack_args_t& a, int64_t i) {
  if (a.src_f32) {
    pack_row<f32_type, E>(a, i);
  } else {
    pack_row<E, E>(a, i);
  }
}
SLUICE_KERNELS_BY_DTYPE(pack_matrices, sluice_pack_args_t)

/* data[i, j] *= factor */
template <typename E>
SLUICE_FN void scale_columns(const sluice_scale_columns_args_t& a, int64_t i) {
  const typename E::value factor = (typename E::value)a.factor;
  SLUICE_LANES(lane) {
    for (int64_t j = lane; j < a.width; j += 32) {
      store<E>(a.data, i * a.stride + j, factor * load<E>(a.data, i * a.stride + j));
    }
  }
}
SLUICE_KERNELS_BY_DTYPE(scale_columns, sluice_scale_columns_args_t)

/* data[i, j] += bias[j] */
template <typename E>
SLUICE_FN void add_bias(const sluice_bias_args_t& a, int64_t i) {
  SLUICE_LANES(lane) {
    for (int64_t j = lane; j < a.width; j += 32) {
      store<E>(a.data, i * a.width + j, load<E>(a.data, i * a.width + j) + load<E>(a.bias, j));
    }
  }
}
SLUICE_KERNELS_BY_DTYPE(add_bias, sluice_bias_args_t)

/* to[i] = words[i] */
SLUICE_FN void write_words(const sluice_words_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t i = unit * 32 + lane;
    if (i < a.count) a.to[i] = a.words[i];
  }
}
SLUICE_KERNEL(write_words, sluice_words_args_t)

/* dst[i] = src[route[i] / K, route[i] % K], or 0 */
SLUICE_FN void gather_scalars(const sluice_gather_scalars_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t i = unit * 32 + lane;
    if (i < a.count) {
      const int64_t r = a.route[i];
      a.dst[i] = r < 0 ? 0.0f : a.src[r / a.top_k * a.src_t + r % a.top_k * a.src_k];
    }
  }
}
SLUICE_KERNEL(gather_scalars, sluice_gather_scalars_args_t)

/* out[t, k] = rows[position[t, k]] */
SLUICE_FN void spread_scalars(const sluice_spread_scalars_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    const int64_t i = unit * 32 + lane;
    if (i < a.count) {
      const int64_t row = a.position[i];
      a.out[i / a.top_k * a.out_t + i % a.top_k * a.out_k] = row < 0 ? 0.0f : a.rows[row];
    }
  }
}
SLUICE_KERNEL(spread_scalars, sluice_spread_scalars_args_t)
