// SPDX-License-Identifier: Apache-2.0
/* A world machine of fake GPUs: the fake driver, cuBLAS and NCCL under the engine; each rank has a device. */
#ifndef SLUICE_CAPI_TEST_CUDA_FAKES_H_
#define SLUICE_CAPI_TEST_CUDA_FAKES_H_

#include "capi/test/cuda/cuda_layer_suite.h"

/* Host waits (cuEventSynchronize, cuStreamSynchronize) and the reads among them, of one rank's device. */
typedef struct fakes_waits_s {
  int64_t of_driver; /* all ranks together: meaningful for one rank */
  uint64_t reads;
} fakes_waits_t;

/* Resets for `world_size` ranks. with_groups as sluice_fake_cublas. */
void fakes_open(int32_t world_size, int with_groups);
/* The same with all ranks on one device, in a local group instead of NCCL's. */
void fakes_open_local(int32_t world_size, int with_groups);
/* Time that a rank waits for its stream before it aborts its communicator; 300 s after fakes_open. */
void fakes_be_patient(uint64_t milliseconds);
/* Invented rates of such a device, for a tuner that predicts. */
extern const char fakes_machine_json[];
const world_machine_t* fakes_machine(void);
/* Releases the ranks' devices and streams; returns the number of leaks, described in a line. */
int64_t fakes_close(char* out, uint64_t out_bytes);

/* Waits of passes of one direction, summed since fakes_open. */
fakes_waits_t fakes_waits(int32_t rank, int32_t direction);
/* These fakes for the layer's suite: 0 a device for each rank and NCCL, 1 one device and a local communicator. */
const layer_machine_t* fakes_layer_machine(int is_local);

/* The stream of a rank's host. */
sluice_stream_t fakes_stream(int32_t rank);

#endif /* SLUICE_CAPI_TEST_CUDA_FAKES_H_ */
