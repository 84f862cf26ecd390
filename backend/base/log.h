// SPDX-License-Identifier: Apache-2.0
/* The process-wide log callback (sluice_set_log). Silent by default: a library does not print. */
#pragma once

#include "sluice/base.h"

void sluice_log(int32_t level, const char* format, ...) __attribute__((format(printf, 2, 3)));
