// SPDX-License-Identifier: Apache-2.0
/* The process-wide log callback (sluice_set_log). Silent by default: a library does not print. */
#ifndef SLUICE_BACKEND_BASE_LOG_H_
#define SLUICE_BACKEND_BASE_LOG_H_

#include "sluice/base.h"

void sluice_log(int32_t level, const char* format, ...) __attribute__((format(printf, 2, 3)));

#endif /* SLUICE_BACKEND_BASE_LOG_H_ */
