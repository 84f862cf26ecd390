// SPDX-License-Identifier: Apache-2.0
/* Pinned host memory on the NUMA node of a device: otherwise every offloaded byte would cross the link between sockets.
 * Pages are mapped, bound to the node by a system call and registered with the driver. If the host has one node, the
 * kernel or the driver refuses, or the device's node is unknown, the memory comes from the driver (cuMemHostAlloc),
 * which is logged once. */
#pragma once

#include <stdint.h>

#include "backend/device/cuda/cuda_driver.h"

typedef struct sluice_cuda_numa_s {
  int32_t node; /* -1: any node */
  int32_t told;
} sluice_cuda_numa_t;

/* Returns the node of a device (the driver's handle): from the driver, or else from its PCI address. -1 if the host has
 * one node, or none is known. */
sluice_cuda_numa_t sluice_cuda_numa_of(const sluice_cuda_driver_t* driver, int device);
/* For tests: reads another /sys. NULL: the system's. */
void sluice_cuda_numa_read_from(const char* sysfs);

/* Allocates page-locked memory, on the node if possible; *out_mapped: how to free it. A context is current. Returns the
 * driver's code. */
int sluice_cuda_numa_alloc(const sluice_cuda_driver_t* driver, sluice_cuda_numa_t* numa, uint64_t bytes,
                           void** out_data, int32_t* out_mapped);
void sluice_cuda_numa_free(const sluice_cuda_driver_t* driver, void* data, uint64_t bytes, int32_t mapped);
