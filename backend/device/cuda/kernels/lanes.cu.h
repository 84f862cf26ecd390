// SPDX-License-Identifier: Apache-2.0
/* One source, two builds: nvcc compiles it to a warp of 32 threads, a C++ compiler to a loop over 32 lanes.
 *
 * A kernel's body is written for one warp. Code that lanes execute independently is in SLUICE_LANES; a value per lane
 * is a per_lane<T>; between such blocks are the warp operations below, which every lane reaches. So a body means the
 * same in both builds, and the CPU build is compared bit by bit with the reference kernels. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_KERNELS_LANES_CU_H_
#define SLUICE_BACKEND_DEVICE_CUDA_KERNELS_LANES_CU_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)

#define SLUICE_FN     __device__ __forceinline__
#define SLUICE_MEMBER SLUICE_FN

SLUICE_FN int sluice_lane() { return (int)(threadIdx.x & 31u); }

#define SLUICE_LANES(lane) for (int lane = sluice_lane(), sluice_once = 1; sluice_once; sluice_once = 0)
#define SLUICE_UNROLL      _Pragma("unroll") /* before a loop over arrays that must stay in registers */
#define SLUICE_ONE_BY_ONE  _Pragma("unroll 1")
#define SLUICE_MAY_ALIAS

template <typename T>
struct per_lane {
  T x;
  SLUICE_FN T& operator[](int) { return x; }
};

enum { ALL_LANES = -1 };

/* Makes the memory writes of this warp's lanes visible to each other. */
SLUICE_FN void warp_fence() { __syncwarp((unsigned)ALL_LANES); }

template <typename T>
SLUICE_FN T warp_get(per_lane<T>& v, int lane) {
  return __shfl_sync((unsigned)ALL_LANES, v.x, lane);
}

/* v[l] <- v[l + distance]; lanes without such a neighbour keep their own. */
template <typename T>
SLUICE_FN per_lane<T> warp_down(per_lane<T>& v, int distance) {
  per_lane<T> r;
  r.x = __shfl_down_sync((unsigned)ALL_LANES, v.x, (unsigned)distance);
  return r;
}

/* Returns the lanes that hold the same key, as bits. */
SLUICE_FN per_lane<uint32_t> warp_match(per_lane<int32_t>& key) {
  per_lane<uint32_t> r;
  r.x = __match_any_sync((unsigned)ALL_LANES, key.x);
  return r;
}

SLUICE_FN int bits_set(uint32_t x) { return __popc(x); }

#define SLUICE_KERNEL(name, args_t)                                                               \
  extern "C" __global__ void __launch_bounds__(SLUICE_CUDA_BLOCK) sluice_##name(const args_t a) { \
    const int64_t warp = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;                   \
    const int64_t warps = (int64_t)gridDim.x * blockDim.x / 32;                                   \
    for (int64_t unit = warp; unit < a.units; unit += warps) name(a, unit);                       \
  }

#else

#define SLUICE_FN     static inline
#define SLUICE_MEMBER inline __attribute__((always_inline)) /* two builds of a kernel may be in one program */

#ifndef SLUICE_LANES /* defined by a build that checks accesses and orders: fake/lane_orders.h */
#define SLUICE_LANES(lane)        for (int lane = 0; lane < 32; ++lane)
#define SLUICE_AT_LANE(lane)      ((void)0) /* before the lane's own value is used */
#define SLUICE_AT_WARP_OP()       ((void)0)
#define SLUICE_AT_FENCE()         ((void)0)
#define SLUICE_AT_UNIT(unit)      ((void)0)
#define SLUICE_WARP_AT(at, warps) ((warps)-1 - (at)) /* the last first, so that no body relies on an order */
#endif

#define SLUICE_UNROLL
#define SLUICE_ONE_BY_ONE
#define SLUICE_MAY_ALIAS __attribute__((may_alias)) /* a type for memory that may hold any type */

template <typename T>
struct per_lane {
  T x[32];
  SLUICE_MEMBER T& operator[](int lane) {
    SLUICE_AT_LANE(lane);
    return x[lane];
  }
};

SLUICE_FN void warp_fence() { SLUICE_AT_FENCE(); }

template <typename T>
SLUICE_FN T warp_get(per_lane<T>& v, int lane) {
  SLUICE_AT_WARP_OP();
  return v.x[lane];
}

template <typename T>
SLUICE_FN per_lane<T> warp_down(per_lane<T>& v, int distance) {
  per_lane<T> r;
  SLUICE_AT_WARP_OP();
  for (int l = 0; l < 32; ++l) r.x[l] = v.x[l + distance < 32 ? l + distance : l];
  return r;
}

SLUICE_FN per_lane<uint32_t> warp_match(per_lane<int32_t>& key) {
  per_lane<uint32_t> r;
  SLUICE_AT_WARP_OP();
  for (int l = 0; l < 32; ++l) {
    r.x[l] = 0;
    for (int m = 0; m < 32; ++m) r.x[l] |= (uint32_t)(key.x[m] == key.x[l]) << m;
  }
  return r;
}

SLUICE_FN int bits_set(uint32_t x) { return __builtin_popcount(x); }

/* Runs the warps of the grid one after another. */
#define SLUICE_KERNEL(name, args_t)                                     \
  static void sluice_##name##_on_cpu(int64_t warps, const void* args) { \
    args_t a;                                                           \
    memcpy((void*)&a, args, sizeof a);                                  \
    for (int64_t at = 0; at < warps; ++at) {                            \
      const int64_t warp = SLUICE_WARP_AT(at, warps);                   \
      for (int64_t unit = warp; unit < a.units; unit += warps) {        \
        SLUICE_AT_UNIT(unit);                                           \
        name(a, unit);                                                  \
      }                                                                 \
    }                                                                   \
  }

#endif

/* ---- the same in both builds ---------------------------------------------------------------------------------- */

/* Returns the minimum of 32 values. */
SLUICE_FN int32_t warp_least(per_lane<int32_t> v) {
  for (int half = 16; half > 0; half /= 2) {
    per_lane<int32_t> upper = warp_down(v, half);
    SLUICE_LANES(l) {
      if (l < half && upper[l] < v[l]) v[l] = upper[l];
    }
  }
  return warp_get(v, 0);
}

/* Returns the maximum of 32 values. */
SLUICE_FN int64_t warp_most(per_lane<int64_t> v) {
  for (int half = 16; half > 0; half /= 2) {
    per_lane<int64_t> upper = warp_down(v, half);
    SLUICE_LANES(l) {
      if (l < half && upper[l] > v[l]) v[l] = upper[l];
    }
  }
  return warp_get(v, 0);
}

/* The sum of 32 partial sums, folded by halves: the order of kernels.h. */
template <typename T>
SLUICE_FN T warp_fold(per_lane<T> v) {
  for (int half = 16; half > 0; half /= 2) {
    per_lane<T> upper = warp_down(v, half);
    SLUICE_LANES(l) {
      if (l < half) v[l] = v[l] + upper[l];
    }
  }
  return warp_get(v, 0);
}

/* v[l] <- the sum of v[0 .. l); returns the sum of all. */
SLUICE_FN int32_t warp_scan(per_lane<int32_t>& v) {
  per_lane<int32_t> rest = v, sum;
  SLUICE_LANES(l) { sum[l] = 0; }
  int32_t total = 0;
  /* 32 steps of one shuffle each: a few hundred cycles, once per 32 experts. */
  for (int from = 0; from < 32; ++from) {
    int32_t x = warp_get(rest, from);
    SLUICE_LANES(l) {
      if (from < l) sum[l] += x;
    }
    total += x;
  }
  v = sum;
  return total;
}

#endif /* SLUICE_BACKEND_DEVICE_CUDA_KERNELS_LANES_CU_H_ */
