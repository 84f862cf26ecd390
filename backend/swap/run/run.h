// SPDX-License-Identifier: Apache-2.0
/* The executor of swapping: a thread copies pieces of memory to a tier and back. The public header sluice/swap.h
 * documents each call. */
#pragma once

#include "sluice/swap.h"

/* config: in the current layout, with defaults filled in. */
sluice_status_t sluice_swapper_open(const sluice_swap_config_t* config, sluice_swap_t** out_swap);
void sluice_swapper_close(sluice_swap_t* swap);
sluice_status_t sluice_swapper_reach(sluice_swap_t* swap, int32_t event, int64_t micro_batch, int32_t layer,
                                     sluice_swap_op_t* ops, int32_t room, int32_t* out_count);
sluice_status_t sluice_swapper_put(sluice_swap_t* swap, const void* data, uint64_t bytes, int64_t* out_ticket);
sluice_status_t sluice_swapper_settle(sluice_swap_t* swap, int64_t ticket);
sluice_status_t sluice_swapper_prefetch(sluice_swap_t* swap, int64_t ticket, void* to);
sluice_status_t sluice_swapper_take(sluice_swap_t* swap, int64_t ticket);
void sluice_swapper_release(sluice_swap_t* swap, int64_t ticket);
void sluice_swapper_reset(sluice_swap_t* swap);
void sluice_swapper_read_stats(sluice_swap_t* swap, sluice_swap_stats_t* out_stats);
