#include "backend/gemm/cublas/cublas_choice.h"

#include <stddef.h>
#include <string.h>

#include "backend/gemm/gemm_form.h"

typedef struct choice_s {
  int32_t dtype, trans_a, trans_b;
  int64_t count, rows, weights; /* at most */
  int32_t how;
} choice_t;

static const choice_t choices[] = {
#define CHOICE(dtype, trans_a, trans_b, count, rows, weights, how) {dtype, trans_a, trans_b, count, rows, weights, how},
#include "backend/gemm/cublas/cublas_choices.inc"
#undef CHOICE
    {0, 0, 0, 0, 0, 0, SLUICE_CUBLAS_BY_TABLE} /* the end */
};

int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list) {
  sluice_gemm_form_t form, largest = {0};
  int64_t count = 0, rows = 0;
  if (choices[0].how == SLUICE_CUBLAS_BY_TABLE) return SLUICE_CUBLAS_GROUPED;
  for (int64_t i = 0; i < list->count; ++i) {
    if (!sluice_gemm_form(&list->problems[i], &form) || form.m == 0 || form.n == 0 || form.k == 0) continue;
    ++count, rows += form.m;
    if (form.n * form.k > largest.n * largest.k) largest = form;
  }
  for (const choice_t* c = choices; c->how != SLUICE_CUBLAS_BY_TABLE; ++c) {
    if (c->dtype != list->dtype_ab || c->trans_a != largest.trans_a || c->trans_b != largest.trans_b) continue;
    if (count <= c->count && rows <= c->rows * count && largest.n * largest.k <= c->weights) return c->how;
  }
  return SLUICE_CUBLAS_GROUPED;
}

int32_t sluice_cublas_how_named(const char* name) {
  static const char* const names[] = {NULL, "grouped", "single", "lt"};
  for (int32_t how = SLUICE_CUBLAS_GROUPED; name != NULL && how <= SLUICE_CUBLAS_LT; ++how) {
    if (strcmp(name, names[how]) == 0) return how;
  }
  return SLUICE_CUBLAS_BY_TABLE;
}
