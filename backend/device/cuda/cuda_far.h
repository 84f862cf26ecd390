/* What the engine asks of a device whose memory it cannot touch (device.h). */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_FAR_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_FAR_H_

#include "backend/device/device.h"

extern const sluice_far_vtable_t sluice_cuda_far_vtable;
/* What it keeps for that. The device is entered if it can be; called by destroy. */
void sluice_cuda_far_release(sluice_device_t* device);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_FAR_H_ */
