// SPDX-License-Identifier: Apache-2.0
/* The reference kernels: the loops of adam_loops.inc.h, compiled for any processor. */
#include "backend/optim/adam_loops.inc.h"

const sluice_adam_kernels_t sluice_adam_plain[SLUICE_ADAM_ARITHMETICS] = KERNELS_OF("plain");
