/* Products by oneDNN, found at run time: f32 by dnnl_sgemm.
 *
 * A system oneDNN brings the OpenMP runtime it was linked with. In a torch process that can be a second one, with a
 * second pool of threads that fights the first for the cores; then every call here is held to one thread.
 */
#include "backend/gemm/onednn/gemm_onednn.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/gemm/gemm_form.h"

typedef struct sluice_gemm_onednn_s {
  sluice_gemm_t base;
  sluice_onednn_symbols_t dnnl;
} sluice_gemm_onednn_t;

static void onednn_destroy(sluice_gemm_t* gemm) { sluice_free(gemm->allocator, gemm, sizeof(sluice_gemm_onednn_t)); }

static int onednn_supports(const sluice_gemm_t* gemm, const sluice_product_list_t* list) {
  (void)gemm;
  if (list->dtype_ab != SLUICE_DTYPE_F32 || list->dtype_c != SLUICE_DTYPE_F32) return 0;
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->products[i], &form)) return 0;
  }
  return 1;
}

static sluice_status_t product(sluice_gemm_onednn_t* onednn, const sluice_product_list_t* list,
                               const sluice_gemm_form_t* f) {
  int answer = onednn->dnnl.dnnl_sgemm(f->trans_a ? 'T' : 'N', f->trans_b ? 'T' : 'N', f->m, f->n, f->k, 1.0f, f->a,
                                       f->lda, f->b, f->ldb, list->beta, f->c, f->ldc);
  if (answer == 0) return SLUICE_OK;
  return sluice_error_record(SLUICE_E_FOREIGN, -1, -1, answer,
                             "%s: dnnl_sgemm of [%lld, %lld, %lld] returned %d: choose another gemm with SLUICE_GEMM",
                             onednn->base.name, (long long)f->m, (long long)f->n, (long long)f->k, answer);
}

static sluice_status_t onednn_run(sluice_gemm_t* gemm, const sluice_product_list_t* list) {
  sluice_gemm_onednn_t* onednn = (sluice_gemm_onednn_t*)gemm;
  int threads = 0;
  if (onednn->dnnl.omp_set_num_threads != NULL) {
    threads = onednn->dnnl.omp_get_max_threads();
    onednn->dnnl.omp_set_num_threads(1);
  }
  sluice_status_t status = SLUICE_OK;
  for (int64_t i = 0; i < list->count && status == SLUICE_OK; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->products[i], &form)) continue; /* supports() has seen them all */
    if (sluice_gemm_form_is_trivial(&form, list->dtype_c, list->beta)) continue;
    status = product(onednn, list, &form);
  }
  if (threads > 0) onednn->dnnl.omp_set_num_threads(threads);
  return status;
}

static const sluice_gemm_vtable_t onednn_vtable = {
    .destroy = onednn_destroy,
    .supports = onednn_supports,
    .run = onednn_run,
};

/* In a torch process whose OpenMP runtime is not the one that this oneDNN uses: hold oneDNN to one thread. 0 when that
 * is not possible. */
static int hold_second_openmp(void* handle, sluice_onednn_symbols_t* symbols) {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (torch == NULL) return 1;
  void* get = dlsym(handle, "omp_get_max_threads");
  if (get == NULL || get == dlsym(torch, "omp_get_max_threads")) return 1;
  void* set = dlsym(handle, "omp_set_num_threads");
  if (set == NULL) return 0;
  *(void**)&symbols->omp_get_max_threads = get;
  *(void**)&symbols->omp_set_num_threads = set;
  sluice_log(SLUICE_LOG_WARN, "gemm onednn: its OpenMP is not torch's, so it is held to one thread");
  return 1;
}

/* Libraries stay open: their thread pools live until the process ends. */
static sluice_status_t find(const char* library, sluice_onednn_symbols_t* out_symbols, char* why, size_t why_bytes) {
  const char* path = library != NULL ? library : "libdnnl.so.2";
  memset(out_symbols, 0, sizeof *out_symbols);
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
    snprintf(why, why_bytes, "%s brings a second OpenMP into a torch process and cannot be held to one thread", path);
    return SLUICE_E_NOT_FOUND;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_gemm_onednn_create_from(const sluice_onednn_symbols_t* symbols, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  sluice_gemm_onednn_t* onednn = sluice_alloc_zeroed(allocator, sizeof *onednn, "gemm onednn");
  if (onednn == NULL) return SLUICE_E_NO_MEMORY;
  const sluice_onednn_version_t* version = symbols->dnnl_version();
  onednn->base.vtable = &onednn_vtable;
  onednn->base.allocator = allocator;
  snprintf(onednn->base.name, sizeof onednn->base.name, "onednn (%d.%d)", version->major, version->minor);
  onednn->dnnl = *symbols;
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
