// SPDX-License-Identifier: Apache-2.0
/* Checks a caller's arguments. */
#pragma once

#include "backend/base/status.h"

/* OK if the condition holds; else INVALID_ARGUMENT with a formatted message (what, where, what to do), whose arguments
 * are only evaluated then. It does not return by itself: SLUICE_TRY(SLUICE_REQUIRE(...)). */
#define SLUICE_REQUIRE(condition, ...) \
  ((condition) ? (sluice_status_t)SLUICE_OK : SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, __VA_ARGS__))
