// SPDX-License-Identifier: Apache-2.0
/* The user word of a request: its kind, and the op or rank that it is for. Private to backend/pipeline/run. */
#pragma once

#include <stdint.h>

enum {
  SLUICE_STAGE_REQUEST_SEND = 1, /* an op */
  SLUICE_STAGE_REQUEST_RECEIVE,  /* an op */
  SLUICE_STAGE_REQUEST_TELL,     /* a control message to a rank */
  SLUICE_STAGE_REQUEST_CONTROL,  /* the next control message of a rank */
  SLUICE_STAGE_REQUEST_DRAIN     /* a message of a rank in a batch that has failed */
};

static inline uint64_t sluice_stage_request(int32_t kind, int32_t index) {
  return (uint64_t)kind << 32 | (uint32_t)index;
}
static inline int32_t sluice_stage_request_kind(uint64_t user) { return (int32_t)(user >> 32); }
static inline int32_t sluice_stage_request_index(uint64_t user) { return (int32_t)(uint32_t)user; }
