// SPDX-License-Identifier: Apache-2.0
/* Fake GPUs as a machine of the test world: the fake driver, cuBLAS and NCCL. Each rank has a device. */
#pragma once

#include "capi/test/cuda/cuda_layer_suite.h"

/* Host waits (cuEventSynchronize, cuStreamSynchronize), and how many of them were reads of one rank's device. */
typedef struct fakes_waits_s {
  int64_t of_driver; /* over all ranks, so meaningful only with one rank */
  uint64_t reads;
} fakes_waits_t;

/* Prepares the fakes for `world_size` ranks. with_groups: as for sluice_fake_cublas. */
void fakes_open(int32_t world_size, int with_groups);
/* The same with all ranks on one device and a local communicator in place of NCCL. */
void fakes_open_local(int32_t world_size, int with_groups);
/* Time that a rank waits for its stream before it aborts its communicator; 300 s after fakes_open. */
void fakes_be_patient(uint64_t milliseconds);
/* Invented rates of such a device, for tests of predictions. */
extern const char fakes_machine_json[];
const world_machine_t* fakes_machine(void);
/* Releases the ranks' streams. Returns the number of leaks, and describes them in `out`. */
int64_t fakes_close(char* out, uint64_t out_bytes);

/* Waits of passes of one direction, summed since fakes_open. */
fakes_waits_t fakes_waits(int32_t rank, int32_t direction);
/* The fakes as a machine of the layer's suite. 0: a device for each rank, NCCL; 1: one device, a local communicator. */
const layer_machine_t* fakes_layer_machine(int is_local);

/* The stream of a rank's host. */
sluice_stream_t fakes_stream(int32_t rank);
