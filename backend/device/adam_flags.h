// SPDX-License-Identifier: Apache-2.0
/* The findings of a check of gradients, as words of device memory. Kernels include this file. */
#ifndef SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_
#define SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_

enum { SLUICE_ADAM_IS_NOT_FINITE = 0, SLUICE_ADAM_IS_LARGE, SLUICE_ADAM_NUM_FLAGS };

#endif /* SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_ */
