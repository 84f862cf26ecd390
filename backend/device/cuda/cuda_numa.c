// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_numa.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/base/pages.h"

enum { PREFERRED = 1, MAX_NODES = 1024, WORD_BITS = 8 * (int)sizeof(unsigned long) }; /* MPOL_PREFERRED */

static const char* sysfs = "/sys";
void sluice_cuda_numa_read_from(const char* root) { sysfs = root != NULL ? root : "/sys"; }

static int read_line(const char* path, char* out, int out_bytes) {
  FILE* file = fopen(path, "r");
  if (file == NULL) return 0;
  char* line = fgets(out, out_bytes, file);
  (void)fclose(file);
  return line != NULL;
}

/* "0" is one node; "0-1" and "0,2" are several. */
static int has_several_nodes(void) {
  char path[256], line[128];
  snprintf(path, sizeof path, "%s/devices/system/node/has_memory", sysfs);
  return read_line(path, line, sizeof line) && strpbrk(line, "-,") != NULL;
}

static int32_t node_on_the_bus(const sluice_cuda_driver_t* driver, int device) {
  int domain = 0, bus = 0, slot = 0, node = -1;
  char path[256], line[32];
  if (driver->cuDeviceGetAttribute(&domain, SLUICE_CU_ATTRIBUTE_PCI_DOMAIN, device) != 0 ||
      driver->cuDeviceGetAttribute(&bus, SLUICE_CU_ATTRIBUTE_PCI_BUS, device) != 0 ||
      driver->cuDeviceGetAttribute(&slot, SLUICE_CU_ATTRIBUTE_PCI_DEVICE, device) != 0) {
    return -1;
  }
  snprintf(path, sizeof path, "%s/bus/pci/devices/%04x:%02x:%02x.0/numa_node", sysfs, (unsigned)domain, (unsigned)bus,
           (unsigned)slot);
  if (!read_line(path, line, sizeof line) || sscanf(line, "%d", &node) != 1) return -1;
  return node;
}

sluice_cuda_numa_t sluice_cuda_numa_of(const sluice_cuda_driver_t* driver, int device) {
  sluice_cuda_numa_t numa = {.node = -1};
  int node = -1;
  if (!has_several_nodes()) return numa;
  /* Drivers before 12.2 lack the attribute. */
  if (driver->cuDeviceGetAttribute(&node, SLUICE_CU_ATTRIBUTE_HOST_NUMA_ID, device) != 0) node = -1;
  if (node < 0) node = node_on_the_bus(driver, device);
  numa.node = node >= 0 && node < MAX_NODES ? node : -1;
  if (numa.node < 0) {
    sluice_log(
        SLUICE_LOG_INFO,
        "cuda: the host has several NUMA nodes and the device's is unknown: the driver chooses where pinned memory is");
  }
  return numa;
}

static int prefer(void* data, uint64_t bytes, int32_t node) {
  unsigned long mask[MAX_NODES / WORD_BITS] = {0};
  mask[node / WORD_BITS] = 1ul << (node % WORD_BITS);
  /* One bit more than the number of nodes: the kernel reads bits below it. */
  return syscall(SYS_mbind, data, (unsigned long)bytes, PREFERRED, mask, (unsigned long)MAX_NODES + 1, 0u) == 0 ? 0
                                                                                                                : errno;
}

static void tell(sluice_cuda_numa_t* numa, const char* what, const char* why) {
  if (!numa->told) {
    sluice_log(SLUICE_LOG_INFO, "cuda: the driver chooses where pinned memory is, not NUMA node %d: %s: %s", numa->node,
               what, why);
  }
  numa->told = 1;
}

static uint64_t whole_pages(uint64_t bytes) { return sluice_round_up_u64(bytes, (uint64_t)sysconf(_SC_PAGESIZE)); }

/* Registration touches the pages, and the kernel chooses their node then. */
static void* map_on_node(const sluice_cuda_driver_t* driver, sluice_cuda_numa_t* numa, uint64_t bytes) {
  void* data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    tell(numa, "mmap", strerror(errno));
    return NULL;
  }
  int error = prefer(data, bytes, numa->node);
  sluice_pages_advise(data, bytes);
  int code = error == 0 ? driver->cuMemHostRegister_v2(data, bytes, SLUICE_CU_MEMHOSTREGISTER_PORTABLE) : 0;
  if (error == 0 && code == 0) return data;
  const char* name = NULL;
  if (code != 0 && (driver->cuGetErrorName(code, &name) != 0 || name == NULL)) name = "unknown error";
  tell(numa, error != 0 ? "mbind" : "cuMemHostRegister", error != 0 ? strerror(error) : name);
  (void)munmap(data, bytes);
  return NULL;
}

int sluice_cuda_numa_alloc(const sluice_cuda_driver_t* driver, sluice_cuda_numa_t* numa, uint64_t bytes,
                           void** out_data, int32_t* out_mapped) {
  *out_data = numa->node >= 0 ? map_on_node(driver, numa, whole_pages(bytes)) : NULL;
  *out_mapped = *out_data != NULL;
  if (*out_data != NULL) return 0;
  return driver->cuMemHostAlloc(out_data, bytes, SLUICE_CU_MEMHOSTALLOC_PORTABLE);
}

void sluice_cuda_numa_free(const sluice_cuda_driver_t* driver, void* data, uint64_t bytes, int32_t mapped) {
  if (!mapped) {
    (void)driver->cuMemFreeHost(data);
    return;
  }
  (void)driver->cuMemHostUnregister(data);
  (void)munmap(data, whole_pages(bytes));
}
