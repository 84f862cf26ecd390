// SPDX-License-Identifier: Apache-2.0
/* Runs passes on a device: begin, submit, join, and the state that a pass leaves on lanes. The device is entered. */
#pragma once

#include "backend/device/cuda/cuda_state.h"

/* Creates an event on first use. */
sluice_status_t sluice_cuda_make_event(cuda_device_t* device, void** event);
/* Makes `stream` wait for lanes that a failed join left running. */
sluice_status_t sluice_cuda_rejoin(sluice_device_t* device, sluice_stream_t stream);
/* Returns STATE if there are such lanes: a capture cannot wait for them. */
sluice_status_t sluice_cuda_check_joined(sluice_device_t* device);

/* The entries of the device's table. */
sluice_status_t sluice_cuda_begin(sluice_device_t* device, int32_t num_events, sluice_job_fn_t fn, void* user,
                                  sluice_stream_t stream);
sluice_status_t sluice_cuda_submit(sluice_device_t* device, const sluice_job_t* job);
sluice_status_t sluice_cuda_join(sluice_device_t* device);
/* Entries of the table of its memory. */
sluice_status_t sluice_cuda_fork_stream(sluice_device_t* device, sluice_stream_t stream, sluice_stream_t* out_stream);
sluice_status_t sluice_cuda_join_stream(sluice_device_t* device, sluice_stream_t stream);
