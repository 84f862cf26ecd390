// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/handshake/failure.h"

#include <stdio.h>
#include <string.h>

static int is_final(sluice_status_t status) {
  return status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT || status == SLUICE_E_ABORTED;
}

sluice_status_t sluice_fail_pass(sluice_context_t* context, sluice_status_t status, int in_step) {
  if (context->world_size == 1 || is_final(status)) return status;
  sluice_error_info_t info;
  sluice_error_capture(&info);
  if (!in_step) {
    sluice_comm_abort(context->comm);
    return sluice_error_adopt(&info);
  }
  context->pending_failure = status;
  snprintf(context->failure_text, sizeof context->failure_text, "an earlier pass failed there: %.200s", info.message);
  return status;
}

sluice_status_t sluice_take_refusal(sluice_context_t* context, sluice_status_t refusal, char* text,
                                    uint64_t text_bytes) {
  if (refusal != SLUICE_OK) {
    sluice_error_info_t info;
    sluice_error_capture(&info);
    snprintf(text, text_bytes, "%s", info.message);
    return refusal;
  }
  if (context->pending_failure == SLUICE_OK) return SLUICE_OK;
  sluice_status_t status = context->pending_failure;
  context->pending_failure = SLUICE_OK;
  snprintf(text, text_bytes, "%s", context->failure_text);
  return SLUICE_FAIL(
      status,
      "an earlier pass failed on this rank, and the other ranks have now been notified; the next call can proceed (%s)",
      context->failure_text);
}
