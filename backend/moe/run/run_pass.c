// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/run_pass.h"

#include "backend/moe/ops/run_op.h"
#include "backend/moe/run/mode.h"

sluice_pass_t sluice_run_pass(sluice_moe_t* moe, int32_t direction, sluice_stream_t stream) {
  return (sluice_pass_t){.context = moe->context,
                         .moe = moe,
                         .memory = &moe->context->pass_memory,
                         .binding = {.memory = &moe->context->pass_memory,
                                     .deduplicate = (uint8_t)sluice_shape_deduplication(&moe->shape)},
                         .stream = stream,
                         .is_bounded = moe->mode->is_bounded,
                         .run_op = direction == SLUICE_FORWARD ? sluice_run_forward_op : sluice_run_backward_op,
                         .travel = moe->strategies->travel,
                         .begin_ns = sluice_now_ns(),
                         .host = {.is_on = sluice_pass_is_watched(moe)}};
}
