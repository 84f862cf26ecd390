// SPDX-License-Identifier: Apache-2.0
/* Error handling inside Sluice: the place that detects an error records it once with SLUICE_FAIL, and all callers pass
 * the status on. The record is per thread; lanes hand theirs to the calling thread (error_capture / error_adopt). */
#pragma once

#include "sluice/base.h"

/* Records `status` with a formatted message (what, where, what to do) and returns it. */
#ifndef __clang_analyzer__
#define SLUICE_FAIL(status, ...) sluice_error_record((status), -1, -1, 0, __VA_ARGS__)
/* The same with the reporting rank and the rank at fault; -1 if unknown. */
#define SLUICE_FAIL_PEER(status, rank, peer, ...) sluice_error_record((status), (rank), (peer), 0, __VA_ARGS__)
#else /* it returns the recorded status, which the analyzer cannot see from another file */
#define SLUICE_FAIL(status, ...) (sluice_error_record((status), -1, -1, 0, __VA_ARGS__), (status))
#define SLUICE_FAIL_PEER(status, rank, peer, ...) \
  (sluice_error_record((status), (rank), (peer), 0, __VA_ARGS__), (status))
#endif

/* OK if the condition holds; else INVALID_ARGUMENT with a formatted message (what, where, what to do), whose arguments
 * are only evaluated then. It does not return by itself: SLUICE_TRY(SLUICE_REQUIRE(...)). */
#define SLUICE_REQUIRE(condition, ...) \
  ((condition) ? (sluice_status_t)SLUICE_OK : SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, __VA_ARGS__))

/* Returns early; for functions that hold no resources. */
#define SLUICE_TRY(expr)                                            \
  do {                                                              \
    sluice_status_t sluice_try_status_ = (expr);                    \
    if (sluice_try_status_ != SLUICE_OK) return sluice_try_status_; \
  } while (0)

sluice_status_t sluice_error_record(sluice_status_t status, int32_t rank, int32_t peer, int32_t native_code,
                                    const char* format, ...) __attribute__((format(printf, 5, 6)));
/* Copies this thread's record out / makes a record this thread's. adopt returns info->status. */
void sluice_error_capture(sluice_error_info_t* out_info);
sluice_status_t sluice_error_adopt(const sluice_error_info_t* info);
