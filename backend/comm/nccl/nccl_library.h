// SPDX-License-Identifier: Apache-2.0
/* The NCCL library as one table of symbols, loaded by name at run time; tests fill the table themselves. */
#pragma once

#include <limits.h>
#include <stddef.h>

#include "backend/base/status.h"

typedef struct sluice_nccl_id_s {
  char internal[128];
} sluice_nccl_id_t;

/* The first members of ncclConfig_t of NCCL 2.17: NCCL uses its defaults for the later ones. */
typedef struct sluice_nccl_config_s {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize, minCTAs, maxCTAs;
} sluice_nccl_config_t;

typedef struct sluice_nccl_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(result, name, parameters) result(*name) parameters;
#include "backend/comm/nccl/nccl_symbols.inc"
  /* All are set, or all are NULL: */
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
} sluice_nccl_symbols_t;

/* Values of nccl.h; `./test --vendor` compares them. */
enum { SLUICE_NCCL_REMOTE_ERROR = 6, SLUICE_NCCL_IN_PROGRESS = 7, SLUICE_NCCL_UINT8 = 1 };
#define SLUICE_NCCL_MAGIC          0xcafebeefu
#define SLUICE_NCCL_CONFIG_VERSION 21700u
#define SLUICE_NCCL_UNDEFINED      INT_MIN /* members of a config that NCCL chooses */
#define SLUICE_NCCL_MOST_CTAS      64      /* NCCL's most channels */
#define SLUICE_NCCL_MIN_VERSION    21800   /* 2.18.0: ncclCommSplit */
/* 2.23.0: registration also serves sends and receives, not only in-switch collectives. */
#define SLUICE_NCCL_REGISTER_VERSION 22300

static inline sluice_nccl_config_t sluice_nccl_config(int blocking) {
  return (sluice_nccl_config_t){.size = sizeof(sluice_nccl_config_t),
                                .magic = SLUICE_NCCL_MAGIC,
                                .version = SLUICE_NCCL_CONFIG_VERSION,
                                .blocking = blocking,
                                .cgaClusterSize = SLUICE_NCCL_UNDEFINED,
                                .minCTAs = SLUICE_NCCL_UNDEFINED,
                                .maxCTAs = SLUICE_NCCL_UNDEFINED};
}

/* For a call inside a group: IN_PROGRESS is no error, and later calls still belong to the same exchange. */
static inline int sluice_nccl_is_taken(int code) { return code == 0 || code == SLUICE_NCCL_IN_PROGRESS; }

/* Loads libnccl.so.2 (or `library`), preferably one that is loaded already (PyTorch's). Errors: NOT_FOUND (no library,
 * symbol missing, version too old: says what to install), EXTERNAL. Stays loaded. */
sluice_status_t sluice_nccl_open(const char* library, sluice_nccl_symbols_t* out_symbols);
/* Checks the version of a table that is filled. */
sluice_status_t sluice_nccl_check_version(const sluice_nccl_symbols_t* symbols);

/* One rank calls it; the host sends the id to the other ranks. Errors: EXTERNAL. */
sluice_status_t sluice_nccl_make_id(const sluice_nccl_symbols_t* symbols, sluice_nccl_id_t* out_id);
