/* What a look at gradients finds, as words of the device's memory. Plain, for kernels too. */
#ifndef SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_
#define SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_

enum { SLUICE_ADAM_IS_NOT_FINITE = 0, SLUICE_ADAM_IS_LARGE, SLUICE_ADAM_NUM_FLAGS };

#endif /* SLUICE_BACKEND_DEVICE_ADAM_FLAGS_H_ */
