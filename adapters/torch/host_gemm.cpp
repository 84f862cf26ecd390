// SPDX-License-Identifier: Apache-2.0
// Runs GEMMs with torch's kernels, as the C ABI's sluice_host_gemm_fn_t.
//
// The GEMMs then use torch's BLAS library, thread pool and choice of instructions. Tensors are views on the library's
// bytes. The CPU kernels are called below every dispatcher layer, so autograd, autocast and Python dispatch modes that
// the host has switched on do not see them.
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "sluice/context.h"

namespace {

c10::DispatchKeySet layers_above_the_kernels() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
}

bool torch_type(int32_t dtype, at::ScalarType* out_type) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: *out_type = at::kFloat; return true;
    case SLUICE_DTYPE_BF16: *out_type = at::kBFloat16; return true;
    case SLUICE_DTYPE_F16: *out_type = at::kHalf; return true;
    default: return false;
  }
}

at::Tensor view(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), {rows, columns}, {row_stride, column_stride}, type);
}

} // namespace

extern "C" {

// Returns 0 on success. Another value: torch has no such GEMM on a CPU (f32 results of 16-bit factors), or it threw.
SLUICE_EXPORT int32_t sluice_torch_gemm(void* user, const sluice_host_gemm_args_t* args) {
  (void)user;
  at::ScalarType type;
  if (args->dtype_c != args->dtype_ab || !torch_type(args->dtype_ab, &type)) return 1;
  try {
    static const c10::DispatchKeySet layers = layers_above_the_kernels();
    c10::impl::ExcludeDispatchKeyGuard below(layers);
    const at::Tensor a = view(args->a, args->m, args->k, args->a_row_stride, args->a_col_stride, type);
    const at::Tensor b = view(args->b, args->k, args->n, args->b_row_stride, args->b_col_stride, type);
    at::Tensor c = view(args->c, args->m, args->n, args->c_row_stride, args->c_col_stride, type);
    if (args->beta == 0.0F) {
      at::cpu::mm_out(c, a, b);
    } else {
      at::cpu::addmm_out(c, c, a, b, args->beta, 1);
    }
    return 0;
  } catch (...) {
    return 2;
  }
}

} // extern "C"
