/* The optimizer that leaves the device: parameters and gradients in its memory, masters and moments in the host's. A
 * step takes buckets of states to the device and back, so that the device holds 4 bytes for each 16-bit parameter (it
 * and its gradient) and 16 for each element of a slot. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_ON_DEVICE_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_ON_DEVICE_H_

#include "backend/device/device.h"
#include "backend/optim/adam_request.h"

typedef struct sluice_device_buckets_s sluice_device_buckets_t;

/* Of the device's memory: 16 for each element of a slot; each of its four arrays is aligned up to 64. */
uint64_t sluice_device_buckets_bytes(int64_t bucket, int32_t num_slots);

/* memory: of the device (init_memory of device_memory.h), of which exactly those bytes are taken now and nothing in a
 * step. allocator: of the host. Both and the device are borrowed until destroy. out_buckets: new,
 * sluice_device_buckets_destroy. Errors: INVALID_ARGUMENT, UNSUPPORTED (a device in host memory), NO_MEMORY. */
sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t bucket, int32_t num_slots,
                                             sluice_device_buckets_t** out_buckets);
void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets); /* accepts NULL; waits for the device */

/* All of a step or nothing: gradients are looked at on the device first, which the host waits for; where one is
 * infinite or no number *out_is_skipped is 1 and every byte is as it was. Results have the bits of the step in host
 * memory, for every size of buckets. Stream-complete.
 *
 * step: tensors have param and grad on the device; each has a master, and this and its moments lie in the host's memory
 * (page-locked, else copies wait for each other). Without looks_first gradients are not looked at. kernels and threads
 * are not used. Threads: one call at a time, and none of the device beside it. Errors: INVALID_ARGUMENT naming group
 * and tensor, UNSUPPORTED (max_norm), NO_MEMORY, STATE (a captured stream): nothing was changed; FOREIGN, after which
 * buckets may differ in their step. */
sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_adam_step_t* step,
                                           sluice_stream_t stream, int32_t* out_is_skipped);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_ON_DEVICE_H_ */
