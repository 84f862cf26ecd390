// SPDX-License-Identifier: Apache-2.0
/* The settings of a calibration. */
#ifndef SLUICE_BACKEND_CALIBRATE_CALIBRATION_H_
#define SLUICE_BACKEND_CALIBRATE_CALIBRATION_H_

#include <stdint.h>

typedef struct sluice_calibration_s {
  int64_t model_width, hidden_width; /* of the layers that will run; sizes above 4096 are measured at 4096 */
  int32_t dtype;                     /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  double seconds;                    /* approximate duration */
} sluice_calibration_t;

#endif /* SLUICE_BACKEND_CALIBRATE_CALIBRATION_H_ */
