// SPDX-License-Identifier: Apache-2.0
/* The settings of a calibration. */
#pragma once

#include <stdint.h>

typedef struct sluice_calibration_s {
  int64_t model_width, hidden_width; /* of the layers that will run; sizes above 4096 are measured at 4096 */
  int32_t dtype;                     /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  double seconds;                    /* approximate duration */
} sluice_calibration_t;
