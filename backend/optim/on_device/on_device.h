// SPDX-License-Identifier: Apache-2.0
/* The optimizer that leaves the device: parameters and gradients in its memory, masters and moments in the host's. A
 * step takes buckets of states to the device and back, so that the device holds 4 bytes for each 16-bit parameter (it
 * and its gradient) and 16 for each element of a slot [AxoNN, sections on memory and on the all-reduce].
 *
 * Over ranks gradients are summed on the device, k buckets at a time, beside the updates of those that are summed. The
 * ranks first agree on what they do, and whether all gradients are small enough that no sum can leave f32. Where one is
 * not, all sums are formed and looked at once, without an update, and then once more with updates: that takes no
 * memory. Either way a gradient, or a sum, that is infinite or no number leaves every byte as it was, on every rank. */
#ifndef SLUICE_BACKEND_OPTIM_ON_DEVICE_ON_DEVICE_H_
#define SLUICE_BACKEND_OPTIM_ON_DEVICE_ON_DEVICE_H_

#include "backend/device/device.h"
#include "backend/optim/bucketed/bucketed.h"

typedef struct sluice_device_buckets_s sluice_device_buckets_t;

/* Of the device's memory, of steps of one rank: 16 for each element of a slot; each of its four arrays is aligned up to
 * 64. */
uint64_t sluice_device_buckets_bytes(int64_t bucket, int32_t num_slots);

/* memory: of the device (init_memory of device_memory.h), of which exactly those bytes are taken now. A step of one
 * rank takes no more; the first step over ranks takes what its sums need, and keeps it. allocator: of the host. Both
 * and the device are borrowed until destroy. out_buckets: new, sluice_device_buckets_destroy. Errors: INVALID_ARGUMENT,
 * UNSUPPORTED (a device in host memory), NO_MEMORY. */
sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t bucket, int32_t num_slots,
                                             sluice_device_buckets_t** out_buckets);
void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets); /* accepts NULL; waits for the device */

/* Results have the bits of a step in host memory, for every size of buckets and every k. The host waits for the look at
 * the gradients, and for the other ranks; all else is stream-complete.
 *
 * step: tensors have param and grad on the device; each has a master, and this and its moments lie in the host's memory
 * (page-locked, else copies wait for each other). It has no file; its bucket, kernels and threads are not used. chunk
 * 0: 2, the paper's. Collective over step->comm, as sluice_bucketed_step. out_outcome: times are 0. Threads: one call
 * at a time, and none of the device beside it. Errors: INVALID_ARGUMENT naming group and tensor, UNSUPPORTED (max_norm,
 * a communicator of host memory), NO_MEMORY, STATE (a captured stream), MISMATCH, PEER_REFUSED: nothing was changed, on
 * any rank; what exchanges return and EXTERNAL, which end the communicator: buckets may differ in their step. */
sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                           sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome);

#endif /* SLUICE_BACKEND_OPTIM_ON_DEVICE_ON_DEVICE_H_ */
