// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/cublaslt.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/hash.h"

enum { NUM_SETS = 64, NUM_WAYS = 4, ALLOC_FAILED = 3, NOT_SUPPORTED = 15, MOST_ALIGNMENT = 256 };

/* The calls that share an algorithm. Sizes that depend on the rows of an expert are rounded up, since they differ in
 * every step. Without padding, so that keys can be compared as bytes. */
typedef struct key_s {
  int64_t trans, types, compute, m, n, k, lda, ldb, ldc, alignment, workspace_bytes;
} lt_key_t;

typedef struct lt_plan_s {
  lt_key_t key;
  void* desc; /* NULL: the entry is free */
  void* layouts[3];
  uint64_t columns[3]; /* of the layouts, which the algorithm can run */
  uint64_t algorithm[8];
  uint64_t used; /* the call that last used the plan */
  int is_declined;
} lt_plan_t;

struct sluice_cublaslt_s {
  sluice_cublaslt_symbols_t symbols;
  sluice_allocator_t* allocator;
  void* handle;
  uint64_t num_calls;
  lt_plan_t plans[NUM_SETS][NUM_WAYS];
};

static sluice_status_t fail(int code, const char* what) {
  sluice_status_t status = code == ALLOC_FAILED ? SLUICE_E_NO_MEMORY : SLUICE_E_EXTERNAL;
  return sluice_error_record(status, -1, -1, code, "gemm \"cublas\": cuBLASLt, %s: cublasStatus_t %d", what, code);
}

/* ---- opening the library ---- */

static sluice_status_t take(void* handle, const char* library, sluice_cublaslt_symbols_t* out_symbols) {
#define SYMBOL(result, name, parameters)                                                                          \
  *(void**)&out_symbols->name = dlsym(handle, #name);                                                             \
  if (out_symbols->name == NULL) {                                                                                \
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,                                                                        \
                       "gemm \"cublas\": %s has no symbol " #name ": cuBLASLt 12.0 or later is needed", library); \
  }
#include "backend/gemm/cublas/cublaslt_symbols.inc"
#undef SYMBOL
  return SLUICE_OK;
}

static sluice_status_t find(sluice_cublaslt_symbols_t* out_symbols) {
  static const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  void* handle = NULL;
  const char* name = NULL;
  for (int loaded = 1; loaded >= 0; --loaded) {
    for (int i = 0; i < 2 && handle == NULL; ++i) {
      name = names[i];
      handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
    }
  }
  if (handle == NULL) return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "gemm \"cublas\": no cuBLASLt: %s", dlerror());
  return take(handle, name, out_symbols);
}

static sluice_status_t start(sluice_cublaslt_t* lt) {
  size_t version = lt->symbols.cublasLtGetVersion();
  if (version < SLUICE_CUBLASLT_MIN_VERSION) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "gemm \"cublas\": cuBLASLt %zu is too old, Sluice needs 12.0.0 (120000) or later", version);
  }
  int code = lt->symbols.cublasLtCreate(&lt->handle);
  if (code == 0) return SLUICE_OK;
  lt->handle = NULL;
  return fail(code, "it cannot be initialized");
}

sluice_status_t sluice_cublaslt_open(const sluice_cublaslt_symbols_t* symbols, sluice_allocator_t* allocator,
                                     sluice_cublaslt_t** out_lt) {
  *out_lt = NULL;
  sluice_cublaslt_t* lt = sluice_alloc_zeroed(allocator, sizeof *lt, "cublasLt");
  if (lt == NULL) return sluice_alloc_status();
  lt->allocator = allocator;
  sluice_status_t status = SLUICE_OK;
  if (symbols != NULL) {
    lt->symbols = *symbols;
  } else {
    status = find(&lt->symbols);
  }
  if (status == SLUICE_OK) status = start(lt);
  if (status != SLUICE_OK) {
    sluice_free(allocator, lt, sizeof *lt);
    return status;
  }
  *out_lt = lt;
  return SLUICE_OK;
}

static void drop_plan(sluice_cublaslt_t* lt, lt_plan_t* plan) {
  for (int i = 0; i < 3; ++i) {
    if (plan->layouts[i] != NULL) (void)lt->symbols.cublasLtMatrixLayoutDestroy(plan->layouts[i]);
  }
  if (plan->desc != NULL) (void)lt->symbols.cublasLtMatmulDescDestroy(plan->desc);
  memset(plan, 0, sizeof *plan);
}

void sluice_cublaslt_close(sluice_cublaslt_t* lt) {
  if (lt == NULL) return;
  for (int i = 0; i < NUM_SETS * NUM_WAYS; ++i) drop_plan(lt, &lt->plans[i / NUM_WAYS][i % NUM_WAYS]);
  (void)lt->symbols.cublasLtDestroy(lt->handle);
  sluice_free(lt->allocator, lt, sizeof *lt);
}

/* ---- an algorithm for one GEMM ---- */

static uint32_t alignment_of(const void* data) {
  uint32_t alignment = MOST_ALIGNMENT;
  while ((uintptr_t)data % alignment != 0) alignment /= 2;
  return alignment;
}

static int64_t rounded(int64_t size) {
  const int64_t step = size <= 128 ? 16 : 128;
  return (size + step - 1) / step * step;
}

/* Returns the call with the sizes that plans are searched for. A size that is only a number of columns does not change
 * strides; in the GEMMs of experts, it is the number of rows. */
static sluice_cublaslt_call_t rounded_call(const sluice_cublaslt_call_t* c) {
  sluice_cublaslt_call_t call = *c;
  if (!c->trans_b) call.n = rounded(c->n);
  if (!c->trans_a && c->trans_b) call.k = rounded(c->k);
  return call;
}

static void columns_of(const sluice_cublaslt_call_t* c, uint64_t out_columns[3]) {
  out_columns[0] = (uint64_t)(c->trans_a ? c->m : c->k);
  out_columns[1] = (uint64_t)(c->trans_b ? c->k : c->n);
  out_columns[2] = (uint64_t)c->n;
}

static lt_key_t key_of(const sluice_cublaslt_call_t* c) {
  return (lt_key_t){.trans = c->trans_a * 2 + c->trans_b,
                    .types = c->type * 256 + c->type_c,
                    .compute = c->compute,
                    .m = c->m,
                    .n = c->n,
                    .k = c->k,
                    .lda = c->lda,
                    .ldb = c->ldb,
                    .ldc = c->ldc,
                    .alignment = alignment_of(c->a) | alignment_of(c->b) << 10 | alignment_of(c->c) << 20,
                    .workspace_bytes = (int64_t)c->workspace_bytes};
}

static uint64_t hash_of(const lt_key_t* key) {
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, key, sizeof *key);
  return hash ^ hash >> 32;
}

static int describe(const sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, lt_plan_t* plan) {
  const sluice_cublaslt_symbols_t* s = &lt->symbols;
  const uint64_t rows[] = {(uint64_t)(c->trans_a ? c->k : c->m), (uint64_t)(c->trans_b ? c->n : c->k), (uint64_t)c->m};
  const int64_t leading[] = {c->lda, c->ldb, c->ldc};
  columns_of(c, plan->columns);
  int code = s->cublasLtMatmulDescCreate(&plan->desc, c->compute, c->scale_type);
  if (code != 0) plan->desc = NULL;
  for (int i = 0; i < 3 && code == 0; ++i) {
    code = s->cublasLtMatrixLayoutCreate(&plan->layouts[i], i < 2 ? c->type : c->type_c, rows[i], plan->columns[i],
                                         leading[i]);
    if (code != 0) plan->layouts[i] = NULL;
  }
  const int32_t trans[] = {c->trans_a, c->trans_b};
  for (int i = 0; i < 2 && code == 0; ++i) {
    code = s->cublasLtMatmulDescSetAttribute(plan->desc, SLUICE_CUBLASLT_DESC_TRANS_A + i, &trans[i], sizeof trans[i]);
  }
  return code;
}

/* Sets the preferences of the heuristics. Forbids reductions in the type of the output, as for cuBLAS. */
static int prefer(const sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, void* preference) {
  const uint32_t reductions = SLUICE_CUBLASLT_REDUCTION_INPLACE | SLUICE_CUBLASLT_REDUCTION_COMPUTE_TYPE;
  const uint32_t a = alignment_of(c->a), b = alignment_of(c->b), out = alignment_of(c->c);
  const struct {
    int attribute;
    const void* value;
    size_t bytes;
  } wishes[] = {{SLUICE_CUBLASLT_PREF_MAX_WORKSPACE, &c->workspace_bytes, sizeof c->workspace_bytes},
                {SLUICE_CUBLASLT_PREF_REDUCTIONS, &reductions, sizeof reductions},
                {SLUICE_CUBLASLT_PREF_ALIGNMENT_A, &a, sizeof a},
                {SLUICE_CUBLASLT_PREF_ALIGNMENT_B, &b, sizeof b},
                {SLUICE_CUBLASLT_PREF_ALIGNMENT_C, &out, sizeof out},
                {SLUICE_CUBLASLT_PREF_ALIGNMENT_D, &out, sizeof out}};
  int code = 0;
  for (size_t i = 0; i < sizeof wishes / sizeof wishes[0] && code == 0; ++i) {
    code = lt->symbols.cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].attribute, wishes[i].value,
                                                            wishes[i].bytes);
  }
  return code;
}

static int ask(const sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, lt_plan_t* plan) {
  void* preference = NULL;
  sluice_cublaslt_result_t result;
  int count = 0;
  memset(&result, 0, sizeof result);
  int code = lt->symbols.cublasLtMatmulPreferenceCreate(&preference);
  if (code != 0) return code;
  code = prefer(lt, c, preference);
  if (code == 0) {
    void* const* l = plan->layouts;
    code = lt->symbols.cublasLtMatmulAlgoGetHeuristic(lt->handle, plan->desc, l[0], l[1], l[2], l[2], preference, 1,
                                                      &result, &count);
  }
  (void)lt->symbols.cublasLtMatmulPreferenceDestroy(preference);
  plan->is_declined = code == NOT_SUPPORTED || (code == 0 && (count < 1 || result.state != 0));
  memcpy(plan->algorithm, result.algorithm, sizeof plan->algorithm);
  return code == NOT_SUPPORTED ? 0 : code;
}

/* Gives the layouts the columns of this GEMM. If the plan's algorithm cannot run it, searches for another one. */
static int fit(const sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, lt_plan_t* plan) {
  uint64_t columns[3];
  int code = 0;
  columns_of(c, columns);
  if (plan->is_declined || memcmp(plan->columns, columns, sizeof columns) == 0) return 0;
  for (int i = 0; i < 3 && code == 0; ++i) {
    if (columns[i] == plan->columns[i]) continue;
    code = lt->symbols.cublasLtMatrixLayoutSetAttribute(plan->layouts[i], SLUICE_CUBLASLT_LAYOUT_COLUMNS, &columns[i],
                                                        sizeof columns[i]);
  }
  if (code != 0) return code;
  memcpy(plan->columns, columns, sizeof columns);
  void* const* l = plan->layouts;
  sluice_cublaslt_result_t result;
  memset(&result, 0, sizeof result);
  code = lt->symbols.cublasLtMatmulAlgoCheck(lt->handle, plan->desc, l[0], l[1], l[2], l[2], plan->algorithm, &result);
  const int fits = code == 0 && result.workspace_bytes <= c->workspace_bytes;
  return fits || (code != 0 && code != NOT_SUPPORTED) ? code : ask(lt, c, plan);
}

/* Returns the plan with this key, or the one of its set that was used least recently. */
static lt_plan_t* plan_for(sluice_cublaslt_t* lt, const lt_key_t* key) {
  lt_plan_t* set = lt->plans[hash_of(key) % NUM_SETS];
  lt_plan_t* oldest = set;
  for (int way = 0; way < NUM_WAYS; ++way) {
    if (set[way].desc != NULL && memcmp(&set[way].key, key, sizeof *key) == 0) return &set[way];
    if (set[way].used < oldest->used) oldest = &set[way];
  }
  return oldest;
}

static sluice_status_t find_plan(sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, const lt_plan_t** out_plan) {
  const sluice_cublaslt_call_t call = rounded_call(c);
  const lt_key_t key = key_of(&call);
  lt_plan_t* plan = plan_for(lt, &key);
  int code = 0;
  *out_plan = plan;
  if (plan->desc == NULL || memcmp(&plan->key, &key, sizeof key) != 0) {
    drop_plan(lt, plan);
    code = describe(lt, &call, plan);
    if (code == 0) code = ask(lt, &call, plan);
    plan->key = key;
  }
  if (code == 0) code = fit(lt, c, plan);
  plan->used = ++lt->num_calls;
  if (code == 0) return SLUICE_OK;
  drop_plan(lt, plan);
  char what[128];
  snprintf(what, sizeof what, "an algorithm for a GEMM [%lld, %lld, %lld]", (long long)c->m, (long long)c->n,
           (long long)c->k);
  return fail(code, what);
}

sluice_status_t sluice_cublaslt_run(sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* c, int* out_declined) {
  const lt_plan_t* plan = NULL;
  *out_declined = 0;
  SLUICE_TRY(find_plan(lt, c, &plan));
  *out_declined = plan->is_declined;
  if (plan->is_declined) return SLUICE_OK;
  void* const* l = plan->layouts;
  int code = lt->symbols.cublasLtMatmul(lt->handle, plan->desc, c->alpha, c->a, l[0], c->b, l[1], c->beta, c->c, l[2],
                                        c->c, l[2], plan->algorithm, c->workspace, c->workspace_bytes, c->stream);
  return code == 0 ? SLUICE_OK : fail(code, "a GEMM");
}
