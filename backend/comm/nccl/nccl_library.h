// SPDX-License-Identifier: Apache-2.0
/* The NCCL library through one table of symbols, opened by name at run time; tests fill the table themselves. */
#ifndef SLUICE_BACKEND_COMM_NCCL_NCCL_LIBRARY_H_
#define SLUICE_BACKEND_COMM_NCCL_NCCL_LIBRARY_H_

#include <stddef.h>

#include "backend/base/status.h"

typedef struct sluice_nccl_id_s {
  char internal[128];
} sluice_nccl_id_t;

/* The beginning of ncclConfig_t that NCCL 2.14 had: newer ones fill in what is not there. */
typedef struct sluice_nccl_config_s {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
} sluice_nccl_config_t;

typedef struct sluice_nccl_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(result, name, parameters) result(*name) parameters;
#include "backend/comm/nccl/nccl_symbols.inc"
  /* All there, or all NULL: */
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
} sluice_nccl_symbols_t;

/* Values of nccl.h; `./test --vendor` compares them. */
enum { SLUICE_NCCL_REMOTE_ERROR = 6, SLUICE_NCCL_IN_PROGRESS = 7, SLUICE_NCCL_UINT8 = 1 };
#define SLUICE_NCCL_MAGIC          0xcafebeefu
#define SLUICE_NCCL_CONFIG_VERSION 21400u
#define SLUICE_NCCL_MIN_VERSION    21800 /* 2.18.0: ncclCommSplit */
/* 2.23.0: registration serves sends and receives too, not collectives in a switch alone. */
#define SLUICE_NCCL_REGISTER_VERSION 22300

/* Of a call inside a group: IN_PROGRESS is no error, and the calls behind it belong to the same exchange. */
static inline int sluice_nccl_is_taken(int code) { return code == 0 || code == SLUICE_NCCL_IN_PROGRESS; }

/* Opens libnccl.so.2 (or `library`), one that is loaded already (PyTorch's) before one of the system.
 * Errors: NOT_FOUND (no library, symbol missing, version too old: says what to install), EXTERNAL. Stays open. */
sluice_status_t sluice_nccl_open(const char* library, sluice_nccl_symbols_t* out_symbols);
/* The second half, for a table that is filled. */
sluice_status_t sluice_nccl_check_version(const sluice_nccl_symbols_t* symbols);

/* One rank makes it; the host carries it to the others. Errors: EXTERNAL. */
sluice_status_t sluice_nccl_make_id(const sluice_nccl_symbols_t* symbols, sluice_nccl_id_t* out_id);

#endif /* SLUICE_BACKEND_COMM_NCCL_NCCL_LIBRARY_H_ */
