// SPDX-License-Identifier: Apache-2.0
/* GEMMs through oneDNN, opened at run time: f32 with dnnl_sgemm, bf16 with matmul primitives of oneDNN 2.x.
 *
 * Making a primitive takes up to a millisecond, and the number of rows of an expert changes in each step. So a
 * primitive leaves this dimension open until the call: m, or k if A is transposed (a weight gradient). The other
 * dimensions are sizes of weights, so a few primitives serve a whole model.
 *
 * A system oneDNN loads the OpenMP runtime that it was linked with. In a torch process this can be a second runtime,
 * whose threads compete with torch's for the cores. In this case every call into oneDNN is limited to one thread.
 */
#include "backend/gemm/onednn/gemm_onednn.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/base/file_trust.h"
#include "backend/gemm/gemm_form.h"

/* Values of oneDNN's enumerations. */
enum { DNNL_BF16 = 2, DNNL_F32 = 3, DNNL_CPU = 1, DNNL_ARG_SRC = 1, DNNL_ARG_DST = 17, DNNL_ARG_WEIGHTS = 33 };
#define DNNL_RUNTIME INT64_MIN

typedef struct sluice_onednn_key_s {
  int64_t m, n, k; /* DNNL_RUNTIME: given in the call */
  int64_t lda, ldb, ldc;
  int32_t dtype_c, accumulate, trans_a, trans_b;
} sluice_onednn_key_t;

enum { NUM_PRIMITIVES = 32 };

typedef struct sluice_gemm_onednn_s {
  sluice_gemm_t base;
  sluice_onednn_symbols_t dnnl;
  void* engine; /* NULL: no bf16 */
  void* stream;
  int next; /* the entry that a new primitive replaces */
  struct {
    sluice_onednn_key_t key;
    void* primitive; /* NULL: free */
  } primitives[NUM_PRIMITIVES];
} sluice_gemm_onednn_t;

static void onednn_destroy(sluice_gemm_t* gemm) {
  sluice_gemm_onednn_t* onednn = (sluice_gemm_onednn_t*)gemm;
  for (int i = 0; i < NUM_PRIMITIVES; ++i) {
    if (onednn->primitives[i].primitive != NULL) onednn->dnnl.dnnl_primitive_destroy(onednn->primitives[i].primitive);
  }
  if (onednn->stream != NULL) onednn->dnnl.dnnl_stream_destroy(onednn->stream);
  if (onednn->engine != NULL) onednn->dnnl.dnnl_engine_destroy(onednn->engine);
  sluice_free(gemm->allocator, onednn, sizeof *onednn);
}

static int onednn_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  const sluice_gemm_onednn_t* onednn = (const sluice_gemm_onednn_t*)gemm;
  if (list->dtype_ab == SLUICE_DTYPE_BF16) {
    if (onednn->engine == NULL) return 0;
    if (list->dtype_c != SLUICE_DTYPE_BF16 && list->dtype_c != SLUICE_DTYPE_F32) return 0;
  } else if (list->dtype_ab != SLUICE_DTYPE_F32 || list->dtype_c != SLUICE_DTYPE_F32) {
    return 0;
  }
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->problems[i], &form)) return 0;
  }
  return 1;
}

/* ---- bf16 ------------------------------------------------------------------------------------------------------ */

static int describe(const sluice_gemm_onednn_t* onednn, int64_t rows, int64_t cols, int64_t leading, int trans,
                    int dtype, sluice_onednn_memory_desc_t* out) {
  const int64_t dims[2] = {rows, cols};
  const int64_t strides[2] = {trans ? 1 : leading, trans ? leading : 1};
  return onednn->dnnl.dnnl_memory_desc_init_by_strides(out, 2, dims, dtype, strides);
}

/* a, b, c; returns oneDNN's status, 0 for success. */
static int describe_all(const sluice_gemm_onednn_t* onednn, const sluice_onednn_key_t* key,
                        sluice_onednn_memory_desc_t out[3]) {
  int dtype_c = key->dtype_c == SLUICE_DTYPE_BF16 ? DNNL_BF16 : DNNL_F32;
  int answer = describe(onednn, key->m, key->k, key->lda, key->trans_a, DNNL_BF16, &out[0]);
  if (answer == 0) answer = describe(onednn, key->k, key->n, key->ldb, key->trans_b, DNNL_BF16, &out[1]);
  if (answer == 0) answer = describe(onednn, key->m, key->n, key->ldc, 0, dtype_c, &out[2]);
  return answer;
}

static int make_primitive(const sluice_gemm_onednn_t* onednn, const sluice_onednn_key_t* key, void** out_primitive) {
  const sluice_onednn_symbols_t* dnnl = &onednn->dnnl;
  sluice_onednn_memory_desc_t descs[3];
  sluice_onednn_matmul_desc_t matmul;
  void* attributes = NULL;
  void* ops = NULL;
  void* primitive_desc = NULL;
  *out_primitive = NULL;
  int answer = describe_all(onednn, key, descs);
  if (answer == 0) answer = dnnl->dnnl_matmul_desc_init(&matmul, &descs[0], &descs[1], NULL, &descs[2]);
  if (answer == 0) answer = dnnl->dnnl_primitive_attr_create(&attributes);
  if (answer == 0 && key->accumulate) {
    answer = dnnl->dnnl_post_ops_create(&ops);
    if (answer == 0) answer = dnnl->dnnl_post_ops_append_sum(ops, 1.0f);
    if (answer == 0) answer = dnnl->dnnl_primitive_attr_set_post_ops(attributes, ops);
  }
  if (answer == 0) {
    answer = dnnl->dnnl_primitive_desc_create(&primitive_desc, &matmul, attributes, onednn->engine, NULL);
  }
  if (answer == 0) answer = dnnl->dnnl_primitive_create(out_primitive, primitive_desc);
  if (primitive_desc != NULL) dnnl->dnnl_primitive_desc_destroy(primitive_desc);
  if (ops != NULL) dnnl->dnnl_post_ops_destroy(ops);
  if (attributes != NULL) dnnl->dnnl_primitive_attr_destroy(attributes);
  return answer;
}

static int find_primitive(sluice_gemm_onednn_t* onednn, const sluice_onednn_key_t* key, void** out_primitive) {
  for (int i = 0; i < NUM_PRIMITIVES; ++i) {
    *out_primitive = onednn->primitives[i].primitive;
    if (*out_primitive != NULL && memcmp(&onednn->primitives[i].key, key, sizeof *key) == 0) return 0;
  }
  int answer = make_primitive(onednn, key, out_primitive);
  if (answer != 0) return answer;
  int at = onednn->next;
  onednn->next = (at + 1) % NUM_PRIMITIVES;
  if (onednn->primitives[at].primitive != NULL) onednn->dnnl.dnnl_primitive_destroy(onednn->primitives[at].primitive);
  onednn->primitives[at].key = *key;
  onednn->primitives[at].primitive = *out_primitive;
  return 0;
}

static int gemm_bf16(sluice_gemm_onednn_t* onednn, const sluice_grouped_gemm_t* list, const sluice_gemm_form_t* f) {
  const sluice_onednn_symbols_t* dnnl = &onednn->dnnl;
  sluice_onednn_key_t key;
  memset(&key, 0, sizeof key); /* compared as bytes */
  key.m = f->m;
  key.n = f->n;
  key.k = f->k;
  key.lda = f->lda;
  key.ldb = f->ldb;
  key.ldc = f->ldc;
  key.dtype_c = list->dtype_c;
  key.accumulate = list->beta != 0.0f;
  key.trans_a = f->trans_a;
  key.trans_b = f->trans_b;
  sluice_onednn_memory_desc_t descs[3];
  int answer = describe_all(onednn, &key, descs);
  if (f->trans_a) {
    key.k = DNNL_RUNTIME;
  } else {
    key.m = DNNL_RUNTIME;
  }
  void* primitive = NULL;
  if (answer == 0) answer = find_primitive(onednn, &key, &primitive);
  sluice_onednn_arg_t args[3] = {{DNNL_ARG_SRC, NULL}, {DNNL_ARG_WEIGHTS, NULL}, {DNNL_ARG_DST, NULL}};
  void* const data[3] = {(void*)f->a, (void*)f->b, f->c};
  for (int i = 0; i < 3 && answer == 0; ++i) {
    answer = dnnl->dnnl_memory_create(&args[i].memory, &descs[i], onednn->engine, data[i]);
  }
  if (answer == 0) answer = dnnl->dnnl_primitive_execute(primitive, onednn->stream, 3, args);
  if (answer == 0) answer = dnnl->dnnl_stream_wait(onednn->stream);
  for (int i = 0; i < 3; ++i) {
    if (args[i].memory != NULL) dnnl->dnnl_memory_destroy(args[i].memory);
  }
  return answer;
}

/* Sets engine and stream if this oneDNN and this CPU can multiply bf16; otherwise leaves both NULL. */
static void start_bf16(sluice_gemm_onednn_t* onednn) {
  const sluice_onednn_symbols_t* dnnl = &onednn->dnnl;
  int complete = dnnl->dnnl_version()->major == 2;
#define SYMBOL(required, result, name, parameters) complete &= dnnl->name != NULL;
#include "backend/gemm/onednn/onednn_symbols.inc"
#undef SYMBOL
  if (!complete || dnnl->dnnl_engine_create(&onednn->engine, DNNL_CPU, 0) != 0) {
    onednn->engine = NULL;
    return;
  }
  /* oneDNN has no bf16 on a CPU without AVX-512. Making one primitive tells. */
  const sluice_onednn_key_t key = {DNNL_RUNTIME, 32, 32, 32, 32, 32, SLUICE_DTYPE_BF16, 0, 0, 0};
  void* primitive = NULL;
  int answer = dnnl->dnnl_stream_create(&onednn->stream, onednn->engine, 1);
  if (answer == 0) answer = make_primitive(onednn, &key, &primitive);
  if (primitive != NULL) dnnl->dnnl_primitive_destroy(primitive);
  if (answer == 0) return;
  sluice_log(SLUICE_LOG_INFO, "gemm %s: no bf16 on this CPU (%d)", onednn->base.name, answer);
  if (onednn->stream != NULL) dnnl->dnnl_stream_destroy(onednn->stream);
  dnnl->dnnl_engine_destroy(onednn->engine);
  onednn->stream = NULL;
  onednn->engine = NULL;
}

/* ---- both ------------------------------------------------------------------------------------------------------ */

static sluice_status_t problem(sluice_gemm_onednn_t* onednn, const sluice_grouped_gemm_t* list,
                               const sluice_gemm_form_t* f) {
  int answer;
  if (list->dtype_ab == SLUICE_DTYPE_BF16) {
    answer = gemm_bf16(onednn, list, f);
  } else {
    answer = onednn->dnnl.dnnl_sgemm(f->trans_a ? 'T' : 'N', f->trans_b ? 'T' : 'N', f->m, f->n, f->k, 1.0f, f->a,
                                     f->lda, f->b, f->ldb, list->beta, f->c, f->ldc);
  }
  if (answer == 0) return SLUICE_OK;
  return sluice_error_record(SLUICE_E_EXTERNAL, -1, -1, answer,
                             "%s refused a GEMM [%lld, %lld, %lld] of %s with its status %d: choose another gemm, "
                             "by name or with SLUICE_GEMM",
                             onednn->base.name, (long long)f->m, (long long)f->n, (long long)f->k,
                             sluice_dtype_name(list->dtype_ab), answer);
}

static sluice_status_t onednn_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  sluice_gemm_onednn_t* onednn = (sluice_gemm_onednn_t*)gemm;
  int threads = 0;
  if (onednn->dnnl.omp_set_num_threads != NULL) {
    threads = onednn->dnnl.omp_get_max_threads();
    onednn->dnnl.omp_set_num_threads(1);
  }
  sluice_status_t status = SLUICE_OK;
  for (int64_t i = 0; i < list->count && status == SLUICE_OK; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->problems[i], &form)) continue; /* never: supports() has checked all forms */
    if (sluice_gemm_form_is_trivial(&form, list->dtype_c, list->beta)) continue;
    status = problem(onednn, list, &form);
  }
  if (threads > 0) onednn->dnnl.omp_set_num_threads(threads);
  return status;
}

static const sluice_gemm_vtable_t onednn_vtable = {
    .destroy = onednn_destroy,
    .supports = onednn_supports,
    .run = onednn_run,
};

/* Limits oneDNN to one thread if the process has a torch with another OpenMP runtime. 0: that is not possible. */
static int hold_second_openmp(void* handle, sluice_onednn_symbols_t* symbols) {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (torch == NULL) return 1;
  void* get = dlsym(handle, "omp_get_max_threads");
  if (get == NULL || get == dlsym(torch, "omp_get_max_threads")) return 1;
  void* set = dlsym(handle, "omp_set_num_threads");
  if (set == NULL) return 0;
  *(void**)&symbols->omp_get_max_threads = get;
  *(void**)&symbols->omp_set_num_threads = set;
  sluice_log(SLUICE_LOG_WARN, "gemm onednn: its OpenMP is not torch's, so it is limited to one thread");
  return 1;
}

/* Libraries stay open: their thread pools live until the process ends. */
static sluice_status_t find(const char* library, sluice_onednn_symbols_t* out_symbols, char* why, size_t why_bytes) {
  const char* path = library != NULL ? library : "libdnnl.so.2";
  memset(out_symbols, 0, sizeof *out_symbols);
  sluice_warn_if_others_write(path);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    snprintf(why, why_bytes, "%s could not be opened (%s): apt-get install libdnnl2, or give the path of a oneDNN",
             path, dlerror());
    return SLUICE_E_NOT_FOUND;
  }
#define SYMBOL(required, result, name, parameters)                                               \
  *(void**)&out_symbols->name = dlsym(handle, #name);                                            \
  if ((required) && out_symbols->name == NULL) {                                                 \
    snprintf(why, why_bytes, "%s has no symbol %s: give the path of a oneDNN 2.x", path, #name); \
    return SLUICE_E_NOT_FOUND;                                                                   \
  }
#include "backend/gemm/onednn/onednn_symbols.inc"
#undef SYMBOL
  if (!hold_second_openmp(handle, out_symbols)) {
    snprintf(why, why_bytes, "%s brings a second OpenMP into a torch process and cannot be limited to one thread",
             path);
    return SLUICE_E_NOT_FOUND;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_gemm_onednn_create_from(const sluice_onednn_symbols_t* symbols, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  sluice_gemm_onednn_t* onednn = sluice_alloc_zeroed(allocator, sizeof *onednn, "gemm onednn");
  if (onednn == NULL) return sluice_alloc_status();
  const sluice_onednn_version_t* version = symbols->dnnl_version();
  onednn->base.vtable = &onednn_vtable;
  onednn->base.allocator = allocator;
  snprintf(onednn->base.name, sizeof onednn->base.name, "onednn (%d.%d)", version->major, version->minor);
  onednn->dnnl = *symbols;
  start_bf16(onednn);
  *out_gemm = &onednn->base;
  return SLUICE_OK;
}

sluice_status_t sluice_gemm_onednn_open(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm,
                                        char* why, size_t why_bytes) {
  *out_gemm = NULL;
  sluice_onednn_symbols_t symbols;
  SLUICE_TRY(find(library, &symbols, why, why_bytes));
  return sluice_gemm_onednn_create_from(&symbols, allocator, out_gemm);
}

sluice_status_t sluice_gemm_onednn_create(const char* library, sluice_allocator_t* allocator,
                                          sluice_gemm_t** out_gemm) {
  char why[512];
  sluice_status_t status = sluice_gemm_onednn_open(library, allocator, out_gemm, why, sizeof why);
  if (status == SLUICE_E_NOT_FOUND) return SLUICE_FAIL(status, "gemm \"onednn\": %s", why);
  return status;
}
