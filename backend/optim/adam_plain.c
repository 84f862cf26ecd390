// SPDX-License-Identifier: Apache-2.0
/* The reference kernels, which are the loops of adam_loops.inc.h compiled for any processor, and the choice of the
 * widest kernels that this processor supports. */
#include "backend/optim/adam_loops.inc.h"

const sluice_adam_kernels_t sluice_adam_plain[SLUICE_ADAM_ARITHMETICS] = KERNELS_OF("plain");

const sluice_adam_kernels_t* sluice_adam_dispatch(void) {
  const sluice_adam_kernels_t* widest = sluice_adam_avx512();
  if (widest == NULL) widest = sluice_adam_avx2();
  return widest != NULL ? widest : sluice_adam_plain;
}
