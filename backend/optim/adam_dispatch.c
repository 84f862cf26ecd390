// SPDX-License-Identifier: Apache-2.0
/* Chooses the widest kernels of Adam that this processor supports. */
#include <stddef.h>

#include "backend/optim/adam.h"

const sluice_adam_kernels_t* sluice_adam_dispatch(void) {
  const sluice_adam_kernels_t* widest = sluice_adam_avx512();
  if (widest == NULL) widest = sluice_adam_avx2();
  return widest != NULL ? widest : sluice_adam_plain;
}
