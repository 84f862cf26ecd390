// SPDX-License-Identifier: Apache-2.0
/* Properties of each kind of op, as data: one row per kind in op_table.c, and nowhere else. backend/moe implements the
 * ops; docs/schedule.md lists what a new one needs. */
#pragma once

#include "backend/schedule/schedule.h"

#define SLUICE_OP_TABLE_ACCESSES 6

/* Bits of the passes that may contain an op. */
enum { SLUICE_OP_IN_FORWARD = 1 << SLUICE_FORWARD, SLUICE_OP_IN_BACKWARD = 1 << SLUICE_BACKWARD };

/* The price of an op. The cost model has one formula for each (backend/cost/cost.c), which the compiler checks. */
typedef enum sluice_op_price_e {
  SLUICE_PRICE_NONE = 0,    /* missing: no op has this price */
  SLUICE_PRICE_SEND,        /* packing a chunk's rows and exchanging them, towards the experts */
  SLUICE_PRICE_RETURN,      /* the same towards the tokens */
  SLUICE_PRICE_NODE_SEND,   /* the same within a node, towards the experts */
  SLUICE_PRICE_NODE_RETURN, /* the same on the way back */
  SLUICE_PRICE_PLACE,       /* sorting received rows into expert order */
  SLUICE_PRICE_SUM,         /* summing returned rows into tokens */
  SLUICE_PRICE_FIRST_GEMM,  /* T_DI by W1 */
  SLUICE_PRICE_SECOND_GEMM, /* activated rows by W2 */
  SLUICE_PRICE_FIRST_GRAD,  /* dT_M by W1 */
  SLUICE_PRICE_SECOND_GRAD, /* dT_DO by W2 */
  SLUICE_PRICE_WEIGHT_GRAD, /* of both matrices */
  SLUICE_PRICE_ACTIVATION,  /* per element of T_M */
  SLUICE_PRICE_ACTIVATION_GRAD,
  SLUICE_PRICE_EXPERT,      /* an expert's whole forward */
  SLUICE_PRICE_EXPERT_GRAD, /* an expert's whole backward */
  SLUICE_PRICE_COPY         /* copying T_DI or T_M between device and host */
} sluice_op_price_t;

/* When a scalar per route accompanies the rows of an exchange, in a second exchange of the same op. */
enum { SLUICE_SCALARS_NEVER = 0, SLUICE_SCALARS_WHERE_DEDUP, SLUICE_SCALARS_ALWAYS };

/* For fields that every op must set, 0 means "none", so that tables_test finds a row that lacks one. */
typedef struct sluice_op_row_s {
  const char* name;   /* in messages, traces and JSON */
  const char* letter; /* in pictures, as short as possible (python_plugin/sluice/timeline/svg.py) */
  int32_t passes;     /* SLUICE_OP_IN_* */
  int32_t lane;       /* 1 + its SLUICE_LANE_* with several ranks */
  sluice_op_price_t price;
  int32_t is_exchange; /* with other ranks */
  int32_t scalars;     /* SLUICE_SCALARS_*, for an exchange */
  int32_t is_copy;     /* its accesses follow from the policy of its chunk, not from the lists below */
  /* The tensors that it reads and writes in every template. */
  int32_t num_reads, num_writes;
  int16_t reads[SLUICE_OP_TABLE_ACCESSES], writes[SLUICE_OP_TABLE_ACCESSES];
} sluice_op_row_t;

/* kind: in [0, SLUICE_OP_COUNT). */
const sluice_op_row_t* sluice_op_row(int32_t kind);
/* Returns its SLUICE_LANE_* with several ranks; -1 if its row has none. */
int32_t sluice_op_lane(int32_t kind);
