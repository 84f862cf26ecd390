// SPDX-License-Identifier: Apache-2.0
/* Routing on the device: the host reads none of it. Call between sluice_cuda_enter and _leave; every pointer
 * is device memory; results are stream-complete. */
#pragma once

#include "backend/device/cuda/cuda_device.h"
#include "backend/device/cuda/kernels/kernel_args.h"

/* Returns the bytes of sluice_route_args_t.tile_counts. */
uint64_t sluice_cuda_route_scratch_bytes(int64_t num_routes, int64_t num_experts);
/* Sorts the routes of a chunk of tokens by (slot, token, k). `units` is set here. Deterministic, no atomics. */
void sluice_cuda_route(sluice_stream_t stream, const sluice_route_args_t* args);
/* Counts routes per block of tokens and slot. args->units: the number of blocks. */
void sluice_cuda_count_blocks(sluice_stream_t stream, const sluice_block_args_t* args);

/* Writes a table by expert through launch parameters, so that no host memory has to stay alive. *out_table: NULL if
 * entries are the ids, else the start of scratch, where the table takes table_bytes. */
uint64_t sluice_cuda_table_bytes(int32_t num_experts);
sluice_status_t sluice_cuda_write_table(sluice_stream_t stream, const int32_t* entries, int32_t num_experts,
                                        void* scratch, int32_t** out_table);

/* ---- cuda_token_copies.c: entries of sluice_cuda_routing_kernels, which enter the device themselves ---- */

uint64_t sluice_cuda_token_copy_scratch_bytes(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
/* Call between enter and leave, as the functions above. Counts token copies by block of tokens and rank, if
 * blocks->num_ranks is not 0. */
sluice_status_t sluice_cuda_count_token_copies(sluice_stream_t stream, const sluice_device_blocks_t* blocks);
sluice_status_t sluice_cuda_number_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                                const sluice_device_token_copies_t* token_copies);
sluice_status_t sluice_cuda_move_words(sluice_device_t* device, sluice_stream_t stream, const sluice_row_run_t* runs,
                                       int64_t num_runs, const int32_t* src, int32_t* dst);
sluice_status_t sluice_cuda_place_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                               const sluice_device_arrivals_t* arrivals);
