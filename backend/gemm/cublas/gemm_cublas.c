// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/gemm_cublas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/log.h"
#include "backend/base/file_trust.h"
#include "backend/base/text.h"
#include "backend/device/cuda/cuda_device.h"
#include "backend/gemm/cublas/cublas_decode.h"
#include "backend/gemm/cublas/cublas_streams.h"
#include "backend/gemm/gemm_form.h"

enum { MAX_GROUPS = 512, GROUP_ALIGNMENT = 16, SCRATCH_ALIGNMENT = 256 }; /* GEMMs of one grouped call */
#define TABLE_BYTES     ((uint64_t)3 * MAX_GROUPS * sizeof(uint64_t))     /* pointers to A, B and C, on the device */
#define WORKSPACE_BYTES ((uint64_t)32 << 20)

/* One grouped call's arguments on the host. */
typedef struct groups_s {
  int trans_a[MAX_GROUPS], trans_b[MAX_GROUPS], m[MAX_GROUPS], n[MAX_GROUPS], k[MAX_GROUPS];
  int lda[MAX_GROUPS], ldb[MAX_GROUPS], ldc[MAX_GROUPS], size[MAX_GROUPS];
  union {
    float f32[MAX_GROUPS];
    double f64[MAX_GROUPS];
  } alpha, beta;
  uint64_t pointers[3 * MAX_GROUPS];
  int32_t count;
} groups_t;

typedef struct gemm_cublas_s {
  sluice_gemm_t base;
  sluice_cublas_symbols_t symbols;
  sluice_device_t* device;
  sluice_allocator_t* memory;
  void* handle;
  sluice_cublaslt_t* lt; /* NULL: no cuBLASLt */
  sluice_cublas_streams_t side;
  int32_t how;     /* SLUICE_CUBLAS_* for every list; BY_RULE: depends on its shape */
  int32_t num_sms; /* the SMs that GEMMs may use */
  int32_t whole;   /* SM count passed to cuBLAS for a GEMM on its own: 0, or num_sms if SLUICE_CUBLAS_SMS sets it */
  int32_t sms[SLUICE_CUBLAS_NUM_STREAMS]; /* the number that each handle was told; 0: all */
  void* workspace;                        /* the table of pointers, then cuBLAS's workspace */
  uint64_t workspace_bytes;
  int32_t tf32;
  uint32_t no_groups; /* one bit for each type for which the library declined a grouped call */
  groups_t groups;
  sluice_cublas_decoded_t decoded; /* the part that runs of a list with packed weights */
} gemm_cublas_t;

static sluice_status_t fail(int code, const char* what) {
  sluice_status_t status = code == SLUICE_CUBLAS_ALLOC_FAILED ? SLUICE_E_NO_MEMORY : SLUICE_E_EXTERNAL;
  return sluice_error_record(status, -1, -1, code, "gemm \"cublas\": %s: cublasStatus_t %d", what, code);
}

static int type_of(int32_t dtype) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return SLUICE_CUBLAS_R_32F;
    case SLUICE_DTYPE_BF16: return SLUICE_CUBLAS_R_16BF;
    case SLUICE_DTYPE_F16: return SLUICE_CUBLAS_R_16F;
    case SLUICE_DTYPE_F64: return SLUICE_CUBLAS_R_64F;
    default: return -1;
  }
}

static int compute_of(const gemm_cublas_t* gemm, int32_t dtype) {
  if (dtype == SLUICE_DTYPE_F64) return SLUICE_CUBLAS_COMPUTE_64F;
  return dtype == SLUICE_DTYPE_F32 && gemm->tf32 ? SLUICE_CUBLAS_COMPUTE_TF32 : SLUICE_CUBLAS_COMPUTE_32F;
}

static int cublas_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  (void)gemm;
  if (type_of(list->dtype_ab) < 0) return 0;
  if (list->dtype_c != list->dtype_ab) {
    int is_half = list->dtype_ab == SLUICE_DTYPE_BF16 || list->dtype_ab == SLUICE_DTYPE_F16;
    if (!is_half || list->dtype_c != SLUICE_DTYPE_F32) return 0;
  }
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t f;
    if (!sluice_gemm_form(&list->problems[i], &f)) return 0;
    if (f.m > INT32_MAX || f.n > INT32_MAX || f.k > INT32_MAX) return 0;
    if (f.lda > INT32_MAX || f.ldb > INT32_MAX || f.ldc > INT32_MAX) return 0;
  }
  return list->packed == NULL || sluice_cublas_can_decode(list);
}

/* *out_is_trivial: cuBLAS has nothing to compute. With k = 0 and beta = 0, clears C, which may hold NaN. */
static sluice_status_t settle_trivial(const gemm_cublas_t* gemm, const sluice_gemm_form_t* f,
                                      const sluice_grouped_gemm_t* list, int* out_is_trivial) {
  *out_is_trivial = f->m == 0 || f->n == 0 || f->k == 0;
  if (f->m == 0 || f->n == 0 || f->k != 0 || list->beta != 0.0f) return SLUICE_OK;
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(gemm->device);
  uint64_t bytes = sluice_dtype_bytes(list->dtype_c);
  int code = driver->cuMemsetD2D8Async((unsigned long long)(uintptr_t)f->c, (uint64_t)f->ldc * bytes, 0,
                                       (uint64_t)f->n * bytes, (uint64_t)f->m, list->stream);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "a GEMM of depth 0 cannot be cleared");
}

/* Runs one GEMM. cuBLAS reads matrices column by column: it sees a row-major X as X^T, and computes C^T = B^T A^T. */
static sluice_status_t run_one(gemm_cublas_t* gemm, void* handle, const sluice_gemm_form_t* f,
                               const sluice_grouped_gemm_t* list) {
  const float one = 1.0f, beta = list->beta;
  const double one64 = 1.0, beta64 = (double)list->beta;
  int is_64 = list->dtype_ab == SLUICE_DTYPE_F64, type = type_of(list->dtype_ab);
  int code =
      gemm->symbols.cublasGemmEx(handle, f->trans_b ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N,
                                 f->trans_a ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N, (int)f->n, (int)f->m, (int)f->k,
                                 is_64 ? (const void*)&one64 : &one, f->b, type, (int)f->ldb, f->a, type, (int)f->lda,
                                 is_64 ? (const void*)&beta64 : &beta, f->c, type_of(list->dtype_c), (int)f->ldc,
                                 compute_of(gemm, list->dtype_ab), SLUICE_CUBLAS_ALGORITHM_DEFAULT);
  if (code == 0) return SLUICE_OK;
  char what[160];
  snprintf(what, sizeof what, "a GEMM [%lld, %lld, %lld] of %s into %s", (long long)f->m, (long long)f->n,
           (long long)f->k, sluice_dtype_name(list->dtype_ab), sluice_dtype_name(list->dtype_c));
  return fail(code, what);
}

/* Returns the workspace of cuBLAS, aligned to 256. Memory from callbacks of the host may be aligned to 64 only. */
static char* scratch_of(const gemm_cublas_t* gemm, uint64_t* out_bytes) {
  char* begin = (char*)gemm->workspace + TABLE_BYTES;
  uint64_t skipped = (SCRATCH_ALIGNMENT - (uintptr_t)begin % SCRATCH_ALIGNMENT) % SCRATCH_ALIGNMENT;
  uint64_t room = gemm->workspace_bytes - TABLE_BYTES;
  if (skipped > room) skipped = room;
  *out_bytes = room - skipped;
  return begin + skipped;
}

/* Runs one GEMM through cuBLASLt, or with run_one if cuBLASLt declines. */
static sluice_status_t run_lt(gemm_cublas_t* gemm, const sluice_gemm_form_t* f, const sluice_grouped_gemm_t* list) {
  const float one = 1.0f, beta = list->beta;
  const double one64 = 1.0, beta64 = (double)list->beta;
  int is_64 = list->dtype_ab == SLUICE_DTYPE_F64, declined = 0;
  uint64_t scratch_bytes;
  char* scratch = scratch_of(gemm, &scratch_bytes);
  const sluice_cublaslt_call_t call = {
      .trans_a = f->trans_b ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N,
      .trans_b = f->trans_a ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N,
      .type = type_of(list->dtype_ab),
      .type_c = type_of(list->dtype_c),
      .compute = compute_of(gemm, list->dtype_ab),
      .scale_type = is_64 ? SLUICE_CUBLAS_R_64F : SLUICE_CUBLAS_R_32F,
      .m = f->n,
      .n = f->m,
      .k = f->k,
      .lda = f->ldb,
      .ldb = f->lda,
      .ldc = f->ldc,
      .a = f->b,
      .b = f->a,
      .c = f->c,
      .alpha = is_64 ? (const void*)&one64 : &one,
      .beta = is_64 ? (const void*)&beta64 : &beta,
      .workspace = scratch,
      .workspace_bytes = scratch_bytes,
      .stream = list->stream,
  };
  SLUICE_TRY(sluice_cublaslt_run(gemm->lt, &call, &declined));
  return declined ? run_one(gemm, gemm->handle, f, list) : SLUICE_OK;
}

static void add_group(groups_t* g, const sluice_gemm_form_t* f, const sluice_grouped_gemm_t* list) {
  int32_t i = g->count++;
  g->trans_a[i] = f->trans_b ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N;
  g->trans_b[i] = f->trans_a ? SLUICE_CUBLAS_OP_T : SLUICE_CUBLAS_OP_N;
  g->m[i] = (int)f->n;
  g->n[i] = (int)f->m;
  g->k[i] = (int)f->k;
  g->lda[i] = (int)f->ldb;
  g->ldb[i] = (int)f->lda;
  g->ldc[i] = (int)f->ldc;
  g->size[i] = 1;
  g->pointers[i] = (uint64_t)(uintptr_t)f->b;
  g->pointers[MAX_GROUPS + i] = (uint64_t)(uintptr_t)f->a;
  g->pointers[2 * MAX_GROUPS + i] = (uint64_t)(uintptr_t)f->c;
  if (list->dtype_ab == SLUICE_DTYPE_F64) {
    g->alpha.f64[i] = 1.0;
    g->beta.f64[i] = (double)list->beta;
  } else {
    g->alpha.f32[i] = 1.0f;
    g->beta.f32[i] = list->beta;
  }
}

/* Whether a GEMM may join a grouped call. In a grouped call, cuBLAS cannot see the pointers, which are on the device,
 * and assumes that those of 16-bit and TF32 GEMMs are aligned. A misaligned load would destroy the CUDA context. GEMMs
 * with odd widths or tensors at arbitrary offsets therefore run as single GEMMs, whose pointers cuBLAS sees. */
static int may_join(const gemm_cublas_t* gemm, const sluice_gemm_form_t* f, int32_t dtype) {
  if (dtype == SLUICE_DTYPE_F64 || (dtype == SLUICE_DTYPE_F32 && !gemm->tf32)) return 1;
  return ((uintptr_t)f->a | (uintptr_t)f->b | (uintptr_t)f->c) % GROUP_ALIGNMENT == 0;
}

/* Whether the library has declined and enqueued nothing. It may still accept the GEMMs of an "invalid" call as single
 * GEMMs; if not, those calls fail. */
static int is_declined(int code) {
  return code == SLUICE_CUBLAS_NOT_SUPPORTED || code == SLUICE_CUBLAS_ARCH_MISMATCH ||
         code == SLUICE_CUBLAS_INVALID_VALUE;
}

/* Runs a grouped call. The table is rewritten in stream order, after the previous call has read it. *out_declined: the
 * library does not group this type, and nothing was done. */
static sluice_status_t run_groups(gemm_cublas_t* gemm, const sluice_grouped_gemm_t* list, int* out_declined) {
  groups_t* g = &gemm->groups;
  uint64_t* table = gemm->workspace;
  int type = type_of(list->dtype_ab);
  *out_declined = 0;
  for (int part = 0; part < 3; ++part) {
    SLUICE_TRY(
        sluice_cuda_write_words(list->stream, table + part * MAX_GROUPS, g->pointers + part * MAX_GROUPS, g->count));
  }
  int code = gemm->symbols.cublasGemmGroupedBatchedEx(
      gemm->handle, g->trans_a, g->trans_b, g->m, g->n, g->k, &g->alpha, (const void* const*)table, type, g->lda,
      (const void* const*)(table + MAX_GROUPS), type, g->ldb, &g->beta, (void* const*)(table + 2 * MAX_GROUPS), type,
      g->ldc, g->count, g->size, compute_of(gemm, list->dtype_ab));
  *out_declined = is_declined(code);
  if (*out_declined) {
    sluice_log(SLUICE_LOG_INFO, "gemm %s: no grouped GEMMs of %s here (cublasStatus_t %d): one by one", gemm->base.name,
               sluice_dtype_name(list->dtype_ab), code);
  }
  return code == 0 || *out_declined ? SLUICE_OK : fail(code, "a grouped GEMM");
}

static sluice_status_t set_sms(gemm_cublas_t* gemm, int32_t s, int32_t sms) {
  if (gemm->sms[s] == sms) return SLUICE_OK;
  gemm->sms[s] = -1; /* unknown if the call fails */
  const int code = gemm->symbols.cublasSetSmCountTarget(s == 0 ? gemm->handle : gemm->side.handles[s], sms);
  if (code != 0) return fail(code, "the number of its SMs cannot be set");
  gemm->sms[s] = sms;
  return SLUICE_OK;
}

/* Each GEMM goes to the stream with the least work so far. No GEMM of a list reads the result of another. */
static sluice_status_t run_side_by_side(gemm_cublas_t* gemm, const sluice_grouped_gemm_t* list) {
  sluice_status_t status = sluice_cublas_streams_fork(&gemm->side, list->stream, list->count);
  for (int64_t i = 0; i < list->count && status == SLUICE_OK; ++i) {
    sluice_gemm_form_t form;
    int is_trivial;
    if (!sluice_gemm_form(&list->problems[i], &form)) continue; /* never: supports() has checked all forms */
    status = settle_trivial(gemm, &form, list, &is_trivial);
    if (is_trivial || status != SLUICE_OK) continue;
    const int32_t s = sluice_cublas_streams_next(&gemm->side, (double)form.m * (double)form.n * (double)form.k);
    status = set_sms(gemm, s, sluice_cublas_sms_of(form.m, form.n, gemm->num_sms));
    if (status == SLUICE_OK) status = run_one(gemm, s == 0 ? gemm->handle : gemm->side.handles[s], &form, list);
  }
  return sluice_cublas_streams_join(&gemm->side, list->stream, status);
}

static sluice_status_t run_list(gemm_cublas_t* gemm, const sluice_grouped_gemm_t* list, int32_t how) {
  int may_group = how == SLUICE_CUBLAS_GROUPED && list->count > 1 && gemm->symbols.cublasGemmGroupedBatchedEx != NULL &&
                  list->dtype_c == list->dtype_ab && !(gemm->no_groups & (1u << list->dtype_ab));
  gemm->groups.count = 0;
  int64_t first = 0; /* the first GEMM of the open group */
  int64_t seen = 0;  /* GEMMs before this one that could not join the group have run */
  for (int64_t i = 0; i <= list->count; ++i) {
    if (may_group && gemm->groups.count > 0 && (i == list->count || gemm->groups.count == MAX_GROUPS)) {
      int declined;
      SLUICE_TRY(run_groups(gemm, list, &declined));
      if (declined) {
        gemm->no_groups |= 1u << list->dtype_ab; /* permanent: run the group again, one by one */
        may_group = 0;
        seen = i;
        i = first;
      } else {
        first = i;
      }
      gemm->groups.count = 0;
    }
    if (i == list->count) break;
    sluice_gemm_form_t form;
    int is_trivial;
    if (!sluice_gemm_form(&list->problems[i], &form)) continue; /* never: supports() has checked all forms */
    SLUICE_TRY(settle_trivial(gemm, &form, list, &is_trivial));
    if (is_trivial) continue;
    int joins = may_join(gemm, &form, list->dtype_ab);
    if (may_group && joins) {
      add_group(&gemm->groups, &form, list);
    } else if (may_group || joins || i >= seen) {
      SLUICE_TRY(how == SLUICE_CUBLAS_LT && gemm->lt != NULL ? run_lt(gemm, &form, list)
                                                             : run_one(gemm, gemm->handle, &form, list));
    }
  }
  return SLUICE_OK;
}

/* Runs a list with packed weights in parts. `how` is the choice for the whole list, for the same bits as with plain
 * weights. */
static sluice_status_t run_packed(gemm_cublas_t* gemm, const sluice_grouped_gemm_t* list, int32_t how, int is_forked) {
  for (int64_t next = 0; next < list->count;) {
    sluice_grouped_gemm_t part;
    SLUICE_TRY(sluice_cublas_decode_next(list, &next, &gemm->decoded, &part));
    SLUICE_TRY(is_forked ? run_side_by_side(gemm, &part) : run_list(gemm, &part, how));
  }
  return SLUICE_OK;
}

static sluice_status_t cublas_run(sluice_gemm_t* base, const sluice_grouped_gemm_t* list) {
  gemm_cublas_t* gemm = (gemm_cublas_t*)base;
  const int32_t how = gemm->how != SLUICE_CUBLAS_BY_RULE ? gemm->how : sluice_cublas_choose(list, gemm->num_sms);
  const int is_forked = how == SLUICE_CUBLAS_STREAMS && list->count > 1;
  SLUICE_TRY(sluice_cuda_enter(gemm->device));
  int code = gemm->symbols.cublasSetStream_v2(gemm->handle, list->stream);
  /* Setting the stream resets cuBLAS to its default workspace. */
  if (code == 0) {
    uint64_t bytes;
    char* scratch = scratch_of(gemm, &bytes);
    if (is_forked) bytes = sluice_cublas_streams_part(bytes);
    code = gemm->symbols.cublasSetWorkspace_v2(gemm->handle, scratch, bytes);
  }
  sluice_status_t status = code != 0 ? fail(code, "its stream and workspace cannot be set") : SLUICE_OK;
  if (status == SLUICE_OK && !is_forked) status = set_sms(gemm, 0, gemm->whole);
  if (status == SLUICE_OK) {
    status = list->packed != NULL ? run_packed(gemm, list, how, is_forked)
             : is_forked          ? run_side_by_side(gemm, list)
                                  : run_list(gemm, list, how);
  }
  return sluice_cuda_leave_with(gemm->device, status);
}

static void cublas_destroy(sluice_gemm_t* base) {
  gemm_cublas_t* gemm = (gemm_cublas_t*)base;
  if (gemm->handle != NULL && !sluice_cuda_is_inherited(gemm->device)) {
    int is_current = sluice_cuda_enter(gemm->device) == SLUICE_OK;
    sluice_cublaslt_close(gemm->lt);
    sluice_cublas_streams_close(&gemm->side, &gemm->symbols);
    (void)gemm->symbols.cublasDestroy_v2(gemm->handle);
    if (is_current) (void)sluice_cuda_leave(gemm->device);
  }
  sluice_free(gemm->memory, gemm->workspace, gemm->workspace_bytes);
  sluice_free(base->allocator, gemm, sizeof *gemm);
}

/* Opens cuBLASLt. If it is missing or too old, cuBLAS runs all GEMMs. */
static sluice_status_t open_lt(gemm_cublas_t* gemm, const sluice_gemm_cublas_options_t* options) {
  if (options->symbols != NULL && options->lt_symbols == NULL) return SLUICE_OK;
  sluice_status_t status = sluice_cublaslt_open(options->lt_symbols, gemm->base.allocator, &gemm->lt);
  return status == SLUICE_E_NOT_FOUND ? SLUICE_OK : status;
}

static const sluice_gemm_vtable_t cublas_vtable = {
    .destroy = cublas_destroy,
    .supports = cublas_supports,
    .run = cublas_run,
    .decodes = 1,
};

static sluice_status_t take(void* handle, const char* library, sluice_cublas_symbols_t* out_symbols) {
#define SYMBOL(required, name, parameters)                                                                         \
  *(void**)&out_symbols->name = dlsym(handle, #name);                                                              \
  if ((required) && out_symbols->name == NULL) {                                                                   \
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,                                                                         \
                       "gemm \"cublas\": %s has no symbol " #name ": Sluice needs cuBLAS 12.0 or later", library); \
  }
#include "backend/gemm/cublas/cublas_symbols.inc"
#undef SYMBOL
  return SLUICE_OK;
}

/* Opens cuBLAS and never closes it. Prefers a library that the host has loaded (PyTorch's) to one of the system. */
static sluice_status_t find(const char* library, sluice_cublas_symbols_t* out_symbols) {
  static const char* const names[] = {"libcublas.so.13", "libcublas.so.12"};
  void* handle = NULL;
  const char* name = library;
  if (library != NULL) {
    sluice_warn_if_others_write(library);
    handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  }
  for (int loaded = 1; library == NULL && loaded >= 0; --loaded) {
    for (int i = 0; i < 2 && handle == NULL; ++i) {
      name = names[i];
      handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
    }
  }
  if (handle == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "gemm \"cublas\": no cuBLAS: %s; install CUDA's libcublas 12.0 or later, or give its path",
                       dlerror());
  }
  return take(handle, name, out_symbols);
}

static sluice_status_t open_handle(gemm_cublas_t* gemm, const sluice_gemm_cublas_options_t* options) {
  int version = 0;
  int code = gemm->symbols.cublasCreate_v2(&gemm->handle);
  if (code != 0) {
    gemm->handle = NULL;
    return fail(code, "it cannot be initialized");
  }
  code = gemm->symbols.cublasGetVersion_v2(gemm->handle, &version);
  if (code != 0) return fail(code, "its version cannot be read");
  if (version < SLUICE_CUBLAS_MIN_VERSION) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "gemm \"cublas\": version %d is too old, Sluice needs 12.0.0 (120000) or later", version);
  }
  code = gemm->symbols.cublasSetMathMode(gemm->handle, SLUICE_CUBLAS_MATH_FULL_REDUCTION);
  if (code != 0) return fail(code, "reductions in full precision cannot be set");
  snprintf(gemm->base.name, sizeof gemm->base.name, "cublas (%d.%d.%d%s)", version / 10000, version / 100 % 100,
           version % 100, gemm->tf32 ? ", tf32" : "");
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(gemm->device);
  gemm->num_sms = sluice_cuda_device_sms(gemm->device);
  SLUICE_TRY(sluice_read_environment("SLUICE_CUBLAS_SMS", 1, gemm->num_sms, &gemm->whole));
  if (gemm->whole > 0) gemm->num_sms = gemm->whole;
  uint64_t bytes;
  char* scratch = scratch_of(gemm, &bytes);
  SLUICE_TRY(sluice_cublas_streams_open(driver, &gemm->symbols, scratch, bytes, &gemm->side));
  return open_lt(gemm, options);
}

sluice_status_t sluice_gemm_cublas_create(const sluice_gemm_cublas_options_t* options, sluice_allocator_t* allocator,
                                          sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  gemm_cublas_t* gemm = sluice_alloc_zeroed(allocator, sizeof *gemm, "gemm cublas");
  if (gemm == NULL) return sluice_alloc_status();
  gemm->base.vtable = &cublas_vtable;
  gemm->base.allocator = allocator;
  gemm->device = options->device;
  gemm->memory = options->memory;
  gemm->tf32 = options->tf32;
  gemm->how = options->how != SLUICE_CUBLAS_BY_RULE ? options->how : sluice_cublas_how_named(getenv("SLUICE_CUBLAS"));
  gemm->workspace_bytes = TABLE_BYTES + (options->workspace_bytes > 0 ? options->workspace_bytes : WORKSPACE_BYTES);
  sluice_status_t status = SLUICE_OK;
  if (options->symbols != NULL) {
    gemm->symbols = *options->symbols;
  } else {
    status = find(options->library, &gemm->symbols);
  }
  if (status != SLUICE_OK) goto err_destroy;
  gemm->workspace = sluice_alloc(gemm->memory, gemm->workspace_bytes, "cublas workspace");
  if (gemm->workspace == NULL) {
    status = sluice_alloc_status();
    goto err_destroy;
  }
  status = sluice_cuda_enter(gemm->device);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_cuda_leave_with(gemm->device, open_handle(gemm, options));
  if (status != SLUICE_OK) goto err_destroy;
  *out_gemm = &gemm->base;
  return SLUICE_OK;

err_destroy:
  cublas_destroy(&gemm->base);
  return status;
}
