/* Kernels by number, and their launch; between the device and its users in this folder. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_

#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_times.h"
#include "backend/device/cuda/kernels/kernel_args.h"

enum {
#define KERNEL(name, args) SLUICE_CUDA_##name,
#define KERNEL_DTYPES(name, args) \
  SLUICE_CUDA_##name, SLUICE_CUDA_##name##_bf16, SLUICE_CUDA_##name##_f16, SLUICE_CUDA_##name##_f64,
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  SLUICE_CUDA_NUM_KERNELS
};

/* Launches `kernel` over `units` units, `args` being its argument struct, on the device that this thread has entered.
 * A failure is kept for sluice_cuda_leave. */
void sluice_cuda_launch(int32_t kernel, sluice_stream_t stream, const void* args, int64_t units);

/* The first failure of a launch since enter, with its record as this thread's; leave reports it too. */
sluice_status_t sluice_cuda_launch_status(void);

const sluice_kernels_t* sluice_cuda_kernels(void);

/* What a device keeps for the engine (cuda_far.c). */
typedef struct sluice_cuda_far_state_s {
  void* end;        /* event: the end of the last pass, on its host's stream */
  int32_t has_end;  /* it was recorded */
  int32_t captured; /* the stream of the last open is being captured into a graph */
  void* pinned;     /* where reads arrive */
  uint64_t pinned_bytes;
  uint64_t pinned_limit;          /* of the pool below; 0: none */
  sluice_cuda_times_t times;      /* of the running pass's ops */
  sluice_pinned_pool_t* pools[2]; /* of saved rows: on the device, pinned; NULL before the first */
} sluice_cuda_far_state_t;
sluice_cuda_far_state_t* sluice_cuda_far_state(sluice_device_t* device);
/* The device is entered: `stream` waits for lanes that a failed join left running. */
sluice_status_t sluice_cuda_rejoin(sluice_device_t* device, sluice_stream_t stream);
/* STATE where there are such lanes: a capture cannot wait for them. */
sluice_status_t sluice_cuda_check_joined(sluice_device_t* device);
/* A stream that this device made, NULL (the default one) before it made any. */
sluice_stream_t sluice_cuda_own_stream(const sluice_device_t* device);
/* The device is entered if it can be; called by destroy. */
void sluice_cuda_far_release(sluice_device_t* device);
extern const sluice_far_vtable_t sluice_cuda_far_vtable;
/* Leaves the context; the first error counts. */
sluice_status_t sluice_cuda_leave_with(sluice_device_t* device, sluice_status_t status);
/* A table by expert, in the launches' own parameters: nothing on the host has to stay alive. *out_table: NULL where
 * entries are the ids, else the start of scratch, of which it takes table_bytes. */
uint64_t sluice_cuda_table_bytes(int32_t num_experts);
sluice_status_t sluice_cuda_write_table(sluice_stream_t stream, const int32_t* entries, int32_t num_experts,
                                        void* scratch, int32_t** out_table);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_ */
