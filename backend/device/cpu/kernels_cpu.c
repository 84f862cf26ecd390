#include "backend/device/kernels.h"

const sluice_kernels_t* sluice_cpu_kernels(void) { return sluice_cpu_kernels_ref(); }
