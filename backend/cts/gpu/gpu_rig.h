/* What every part of gpu_suite stands on: the device, its memory and driver, and the drop counters of cases. */
#ifndef SLUICE_BACKEND_CTS_GPU_GPU_RIG_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_RIG_H_

#include "backend/base/alloc.h"
#include "backend/device/cuda/cuda_device.h"

/* Sizes are tiny then, and times say nothing. */
#ifdef SLUICE_GPU_SUITE_FAKE
enum { GPU_IS_FAKE = 1 };
#else
enum { GPU_IS_FAKE = 0 };
#endif

typedef struct gpu_rig_s {
  sluice_device_t* device;
  sluice_allocator_t memory; /* the device's */
  const sluice_cuda_driver_t* driver;
  int passed, failed;
} gpu_rig_t;

extern gpu_rig_t gpu_rig; /* the program's one */

/* NOT_FOUND: no GPU here. */
sluice_status_t gpu_rig_open(void);
/* Reports what is left of the device's memory. */
void gpu_rig_close(void);

/* A case: NULL is a pass, else what is wrong. */
void gpu_report(const char* name, const char* problem);
/* What the library said last. */
const char* gpu_last_error(void);
/* Ends the program where nothing can follow. */
void gpu_die(const char* what);

/* The device's context, current between the two; they nest. */
void gpu_enter(void);
void gpu_leave(void);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_RIG_H_ */
