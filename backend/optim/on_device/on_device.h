// SPDX-License-Identifier: Apache-2.0
/* The optimizer with states outside of the device: parameters and gradients are in device memory, masters and moments
 * in host memory. A step copies buckets of states to the device and back, so that the device holds 4 bytes per 16-bit
 * parameter (parameter and gradient) and 16 per element of a slot [AxoNN, sections on memory and on the all-reduce].
 *
 * Over several ranks, gradients are summed on the device, k buckets at a time, and the sums overlap with the updates of
 * earlier buckets. Ranks first compare their arguments, and whether all gradients are small enough that no sum can
 * overflow f32. If one is not, all sums are first formed and scanned without an update, and then formed again with
 * updates; this needs no extra memory. In both cases a gradient or a sum that is infinite or NaN leaves every byte as
 * it was, on every rank. */
#pragma once

#include "backend/device/device.h"
#include "backend/optim/bucketed/bucketed.h"

typedef struct sluice_device_buckets_s sluice_device_buckets_t;

/* Returns the bytes of device memory for steps of one rank: 16 per element of a slot; each of its four arrays is
 * aligned up to 64. */
uint64_t sluice_device_buckets_bytes(int64_t bucket, int32_t num_slots);

/* Returns an upper bound on the bytes that the sum of `count` elements receives, aligned up to 64. A step allocates
 * them for its longest chunk, after its slots. */
uint64_t sluice_device_sum_receive_bytes(int64_t count, int32_t world_size);

/* memory: an allocator of device memory (init_memory of device_memory.h), from which exactly those bytes are allocated
 * now. A step of one rank allocates no more; the first step over several ranks allocates what its sums need, and keeps
 * it. allocator: of host memory. Both allocators and the device are borrowed until destroy. out_buckets: new, release
 * with sluice_device_buckets_destroy. Errors: INVALID_ARGUMENT, UNSUPPORTED (a device in host memory), NO_MEMORY. */
sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t bucket, int32_t num_slots,
                                             sluice_device_buckets_t** out_buckets);
void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets); /* accepts NULL; waits for the device */

/* Results have the bits of a step in host memory, for every bucket size and every k. The host waits for the scan of the
 * gradients and for the other ranks; the rest is stream-complete.
 *
 * step: the tensors have param and grad on the device; each has a master, and the master and moments are in host memory
 * (page-locked, or else copies do not overlap). It has no file; its bucket, kernels and threads are not used. chunk 0:
 * 2, the value of the paper. Collective over step->comm, as sluice_bucketed_step. out_outcome: times are 0. Threads:
 * one call at a time, and no other use of the device during the call. Errors: INVALID_ARGUMENT naming group and tensor,
 * UNSUPPORTED (max_norm, a communicator of host memory), NO_MEMORY, STATE (a captured stream), MISMATCH, PEER_REFUSED:
 * nothing was changed on any rank. Errors of exchanges and EXTERNAL end the communicator: ranks may have updated
 * different buckets. */
sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                           sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome);
