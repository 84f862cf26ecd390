// SPDX-License-Identifier: Apache-2.0
/* The rules of swapping: the ops that follow from an event of the computation. Pure. The executor, the simulator and
 * the checker of the tests run the same rules.
 *
 * In addition to the layer that runs, at most one swapped layer has its bytes on the device, while they are copied out
 * or after they were copied back. So the SETTLE of the previous layer precedes a PUT; a PREFETCH begins only if no copy
 * out is in progress and no other layer was copied back; and if a layer was copied back, a PUT is settled at once. */
#pragma once

#include "backend/base/alloc.h"
#include "sluice/swap.h"

enum { SLUICE_SWAP_MOST_OPS = 4 }; /* of one event; BACKWARD_ENDS has one for each layer of the micro-batch */

typedef enum { SLUICE_SWAP_LEAVES, SLUICE_SWAP_IS_OUT, SLUICE_SWAP_COMES, SLUICE_SWAP_IS_USED } sluice_swap_state_t;

/* The activations of one layer for one micro-batch, from its forward to the end of its backward. */
typedef struct sluice_swap_entry_s {
  int64_t micro_batch;
  int32_t layer;
  sluice_swap_state_t state;
} sluice_swap_entry_t;

typedef struct sluice_swap_order_s {
  sluice_allocator_t* allocator;
  int32_t* swapped; /* [num_layers] */
  int32_t num_layers;
  sluice_swap_entry_t* entries; /* in the order of forwards */
  int32_t count, capacity;
} sluice_swap_order_t;

/* Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_swap_order_init(sluice_swap_order_t* order, const int32_t* swapped, int32_t num_layers,
                                       sluice_allocator_t* allocator);
void sluice_swap_order_deinit(sluice_swap_order_t* order);
void sluice_swap_order_reset(sluice_swap_order_t* order);

/* has_left: whether all copies out that have begun have ended. The other arguments are those of sluice_swap_reach. */
sluice_status_t sluice_swap_order_reach(sluice_swap_order_t* order, int32_t event, int64_t micro_batch, int32_t layer,
                                        int32_t has_left, sluice_swap_op_t* ops, int32_t room, int32_t* out_count);
