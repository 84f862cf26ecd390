// SPDX-License-Identifier: Apache-2.0
/* Token copies on the device: a part of sluice_cuda_routing_kernels. */
#pragma once

#include "backend/device/device.h"

uint64_t sluice_cuda_token_copy_scratch_bytes(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
/* Call between enter and leave. Counts token copies by block of tokens and rank, if blocks->num_ranks is not 0. */
sluice_status_t sluice_cuda_count_token_copies(sluice_stream_t stream, const sluice_device_blocks_t* blocks);
sluice_status_t sluice_cuda_number_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                                const sluice_device_token_copies_t* token_copies);
sluice_status_t sluice_cuda_move_words(sluice_device_t* device, sluice_stream_t stream, const sluice_row_run_t* runs,
                                       int64_t num_runs, const int32_t* src, int32_t* dst);
sluice_status_t sluice_cuda_place_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                               const sluice_device_arrivals_t* arrivals);
