/* Pinned host memory on the NUMA node next to a device: the other node's costs a crossing of the link between sockets
 * with every byte that is offloaded. Pages are mapped, bound to the node by a system call and registered with the
 * driver; where the host has one node, the kernel or the driver refuses, or nobody knows the device's node, the memory
 * is the driver's own (cuMemHostAlloc), which is said once in the log. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_NUMA_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_NUMA_H_

#include <stdint.h>

#include "backend/device/cuda/cuda_driver.h"

typedef struct sluice_cuda_numa_s {
  int32_t node; /* -1: any will do */
  int32_t told;
} sluice_cuda_numa_t;

/* The node next to a device (the driver's handle): as the driver says, else as its place on the PCI bus says. -1 where
 * the host has one node, or none is known. */
sluice_cuda_numa_t sluice_cuda_numa_of(const sluice_cuda_driver_t* driver, int device);
/* For tests: another /sys. NULL: the system's. */
void sluice_cuda_numa_read_from(const char* sysfs);

/* Page-locked memory, of the node if that can be had; *out_mapped: how to give it back. A context is current. Returns
 * the driver's code. */
int sluice_cuda_numa_alloc(const sluice_cuda_driver_t* driver, sluice_cuda_numa_t* numa, uint64_t bytes,
                           void** out_data, int32_t* out_mapped);
void sluice_cuda_numa_free(const sluice_cuda_driver_t* driver, void* data, uint64_t bytes, int32_t mapped);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_NUMA_H_ */
