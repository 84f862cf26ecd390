// SPDX-License-Identifier: Apache-2.0
/* Properties of each tensor between ops, as data: one row per kind in tensor_table.c. */
#pragma once

#include "backend/schedule/schedule.h"

/* How long the rows of a tensor are needed, as bits. A slot whose rows no pass needs again is free after the last op of
 * its use, which releases it; debug runs then fill it with NaN (backend/moe/pass/slot_poisoner.c). */
enum {
  SLUICE_LIVES_FOR_USE = 1,   /* until the last op of its use */
  SLUICE_LIVES_FOR_SPLIT = 2, /* longer in passes that the host calls by parts: a later part reads it */
  SLUICE_LIVES_FOR_WGRAD = 4, /* longer if wgrad is a separate pass: the step keeps the rows */
  SLUICE_LIVES_FOR_EVER = 8   /* always: it is the result of the pass, or its input */
};

typedef struct sluice_tensor_row_s {
  const char* name;
  int32_t lives; /* SLUICE_LIVES_FOR_*; 0 means missing, which tables_test finds */
} sluice_tensor_row_t;

/* tensor: in [0, SLUICE_T_COUNT). */
const sluice_tensor_row_t* sluice_tensor_row(int32_t tensor);
