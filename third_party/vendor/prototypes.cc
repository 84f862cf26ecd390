// SPDX-License-Identifier: Apache-2.0
// Compares our declarations of CUDA, cuBLAS and NCCL with the vendors' headers at compile time.
//
// Our declarations use void* for handles, and int for enums and results. So two types are equal if both are pointers,
// or both are integers or enums of one size, or both are the same floating type, or both are structs of one size.
// cublas_v2.h uses half types in functions that we do not call; their headers would need a fourth package.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short x;
};
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <nccl.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

template <typename A, typename B>
constexpr bool same_type() {
  if constexpr (std::is_void_v<A> || std::is_void_v<B>)
    return std::is_void_v<A> && std::is_void_v<B>;
  else if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>)
    return std::is_pointer_v<A> && std::is_pointer_v<B>;
  else if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>)
    return std::is_same_v<A, B>;
  else if constexpr (std::is_class_v<A> || std::is_class_v<B>)
    return std::is_class_v<A> && std::is_class_v<B> && sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
  else
    return sizeof(A) == sizeof(B) &&
           (std::is_integral_v<A> || std::is_enum_v<A>)&&(std::is_integral_v<B> || std::is_enum_v<B>);
}

template <typename R1, typename... A1, typename R2, typename... A2>
constexpr bool same_function(R1 (*)(A1...), R2 (*)(A2...)) {
  if constexpr (sizeof...(A1) != sizeof...(A2))
    return false;
  else
    return same_type<R1, R2>() && (same_type<A1, A2>() && ...);
}

namespace ours {
typedef struct {
  char internal[128];
} sluice_nccl_id_t;
typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
} sluice_nccl_config_t;
#define SYMBOL(name, parameters) int name parameters;
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
#define SYMBOL(required, name, parameters) int name parameters;
#include "backend/gemm/cublas/cublas_symbols.inc"
#undef SYMBOL
typedef struct {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} sluice_cublaslt_result_t;
#define SYMBOL(result, name, parameters) result name parameters;
#include "backend/gemm/cublas/cublaslt_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name, parameters) result name parameters;
#include "backend/comm/nccl/nccl_symbols.inc"

#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
} // namespace ours

// cublas_api.h overloads cublasGemmEx for C++; this is the exported function.
constexpr cublasStatus_t (*gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                                    const void*, cudaDataType, int, const void*, cudaDataType, int, const void*, void*,
                                    cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) = &::cublasGemmEx;
#define VENDOR_cublasGemmEx     , gemm_ex
#define SECOND(a, b, ...)       b
#define VENDOR_OF_(given, name) SECOND(given, &::name, none)
#define VENDOR_OF(name)         VENDOR_OF_(VENDOR_##name, name)

#define CHECK_FUNCTION(name)                                                                  \
  static_assert(same_function(static_cast<decltype(&ours::name)>(nullptr),                    \
                              static_cast<std::decay_t<decltype(VENDOR_OF(name))>>(nullptr)), \
                #name);
#define SYMBOL(name, parameters) CHECK_FUNCTION(name)
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
#define SYMBOL(required, name, parameters) CHECK_FUNCTION(name)
#include "backend/gemm/cublas/cublas_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name, parameters) CHECK_FUNCTION(name)
#include "backend/gemm/cublas/cublaslt_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name, parameters) CHECK_FUNCTION(name)
#include "backend/comm/nccl/nccl_symbols.inc"

#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL

// The comparison finds planted differences: another number of parameters, another width, a value for a pointer.
static_assert(!same_function(static_cast<int (*)(int, int)>(nullptr), &::cuDeviceGet), "count");
static_assert(!same_function(static_cast<int (*)(size_t)>(nullptr), &::cuInit), "width");
static_assert(!same_function(static_cast<int (*)(int, int)>(nullptr), static_cast<int (*)(int*, int)>(nullptr)),
              "pointer");

#include "values.inc"
