// SPDX-License-Identifier: Apache-2.0
/* GEMMs through oneDNN, which is called through one table of symbols. Tests may fill the table. The types of oneDNN
 * that the calls need are declared here, so that the build needs no oneDNN. */
#pragma once

#include <stddef.h>

#include "backend/gemm/gemm.h"

typedef struct sluice_onednn_version_s {
  int major, minor, patch; /* oneDNN's struct has more fields after these */
} sluice_onednn_version_t;

/* Only oneDNN 2.x writes and reads these; 2.6 uses 696 and 2800 bytes of them. */
typedef union sluice_onednn_memory_desc_s {
  int64_t align;
  char bytes[1024];
} sluice_onednn_memory_desc_t;
typedef union sluice_onednn_matmul_desc_s {
  int64_t align;
  char bytes[4096];
} sluice_onednn_matmul_desc_t;
typedef struct sluice_onednn_arg_s {
  int arg;
  void* memory;
} sluice_onednn_arg_t;

typedef struct sluice_onednn_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(required, result, name, parameters) result(*name) parameters;
#include "backend/gemm/onednn/onednn_symbols.inc"
#undef SYMBOL
  /* From the OpenMP runtime that this oneDNN uses; NULL if that is none, or the one of the process. If both are set,
   * every call into oneDNN runs with one thread. */
  int (*omp_get_max_threads)(void);
  void (*omp_set_num_threads)(int);
} sluice_onednn_symbols_t;

/* As sluice_gemm_onednn_create, but writes the text of NOT_FOUND to `why` and does not record that error. */
sluice_status_t sluice_gemm_onednn_open(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm,
                                        char* why, size_t why_bytes);
/* Creates the gemm from a filled table. */
sluice_status_t sluice_gemm_onednn_create_from(const sluice_onednn_symbols_t* symbols, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm);
