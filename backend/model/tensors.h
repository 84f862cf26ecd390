// SPDX-License-Identifier: Apache-2.0
/* The chunks and the tensors of a layer's passes: ops read and write them, plans count them, restore policies are for
 * them. */
#pragma once

#include <stdint.h>

#include "sluice/moe.h"

#define SLUICE_MAX_CHUNKS 256 /* the largest n */

/* The candidates for n. Predictions cost no step, so with them the search during training considers each n from 1 to
 * SLUICE_MOST_CHOSEN_CHUNKS. Plans under a budget, and races without predictions, use a short list. */
#define SLUICE_MOST_CHOSEN_CHUNKS 16
#define SLUICE_NUM_CHUNK_COUNTS   8

/* 1, 2, 3, 4, 6, 8, 12, 16. */
extern const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS];

/* In grouped exchanges the combine of chunk i and the dispatch of chunk i + SLUICE_GROUPED_CHUNKS form a group. */
#define SLUICE_GROUPED_CHUNKS 2

/* The tensors between ops. Each has a ring of slots; sluice_template_home names the slot and tensor that hold a chunk:
 * T_DI of a kept chunk lies in T_KEPT_DI, dT_M may overwrite T_M, and so on. */
typedef enum sluice_tensor_kind_e {
  SLUICE_T_SEND = 0, /* rows to be sent, by destination rank */
  SLUICE_T_RECV,     /* received rows, by source rank */
  SLUICE_T_DI,       /* dispatched input [rows, M], by local expert */
  SLUICE_T_M,        /* pre-activation [rows, g*H] */
  SLUICE_T_ACT,      /* activated rows [rows, H] */
  SLUICE_T_DO,       /* expert output [rows, M] */
  SLUICE_T_OUT,      /* the host's output tokens (or input gradients), written by chunks of tokens, or all at once */
  SLUICE_T_DDO,      /* dT_DO [rows, M], not yet multiplied by the route weights */
  SLUICE_T_ROUTE,    /* route weight of each row [rows], f32 */
  SLUICE_T_DACT,     /* gradient of the activated rows [rows, H]; then route weight times activated rows */
  SLUICE_T_DM,       /* dT_M [rows, g*H]; in the slots of T_M unless the backward must preserve a kept T_M */
  SLUICE_T_DDI,      /* dT_DI [rows, M] */
  SLUICE_T_DGATE,    /* the gate's scalar per row [rows] */
  SLUICE_T_DW,       /* the host's parameter gradients; if chunks add to 16-bit gradients, their f32 sums */
  SLUICE_T_KEPT_DI,  /* kept rows, one slot per chunk: T_DI ... */
  SLUICE_T_KEPT_M,   /* ... and T_M; with callback experts T_DO */
  SLUICE_T_HOST_DI,  /* buffers of the host pool, one per chunk: offloaded T_DI ... */
  SLUICE_T_HOST_M,   /* ... and T_M */
  SLUICE_T_COPY_WEIGHTS, /* deduplicated forward: route weights of received rows by (row, k), f32, for the sums sent
                            back */
  SLUICE_T_NODE,         /* two levels: rows from other nodes to be forwarded in this node, or sums of this node's ranks
                            for other nodes */
  SLUICE_T_LOW,          /* rows times one factor of an adapter [rows, 2 * lora_rank], within a chunk's ops */
  SLUICE_T_COUNT
} sluice_tensor_kind_t;

/* The tensors that wgrad may need from dgrad, besides the saved buffers. */
#define SLUICE_NUM_DEFERRED 6
extern const int32_t sluice_deferred_tensors[SLUICE_NUM_DEFERRED];

/* The tensor of each saved buffer; META has none: -1. */
extern const int32_t sluice_saved_tensors[SLUICE_SAVED_COUNT];
