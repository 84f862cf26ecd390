// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/capture.h"

sluice_status_t sluice_capture_open(sluice_pass_t* pass) {
  return pass->context->rows->open(pass->context, pass->stream, &pass->captured);
}

sluice_status_t sluice_capture_refuse(sluice_pass_t* pass) {
  SLUICE_TRY(sluice_capture_open(pass));
  if (!pass->captured) return SLUICE_OK;
  pass->captured = 0;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "layer %d: the stream is being captured into a graph, which cannot wait for counts: set "
                     "exchange_mode to SLUICE_EXCHANGE_CAPACITY",
                     pass->moe->shape.config.layer_id);
}
