// SPDX-License-Identifier: Apache-2.0
/* Declares the host's side of CUDA: streams and graphs of the driver that the loader finds. Here this is the fake
 * driver, whose memory is the host's. Not part of Sluice's ABI. */
#pragma once

typedef struct cuda_host_s {
  void *context, *stream, *graph, *launchable;
  int device;
} cuda_host_t;

/* Creates a stream on that device. Returns 0, the driver's code, or -1 without a driver. The device's context stays
 * current on the calling thread. */
int cuda_host_open(cuda_host_t* out, int ordinal);
void cuda_host_close(cuda_host_t* host);
int cuda_host_settle(const cuda_host_t* host); /* waits until all enqueued work has run */
int cuda_host_begin_capture(cuda_host_t* host);
int cuda_host_end_capture(cuda_host_t* host);
int cuda_host_launch(const cuda_host_t* host);
